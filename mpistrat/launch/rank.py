"""What `mpistrat run` starts on each rank: ``python -m mpistrat.launch.rank [-m] PROGRAM ...``.

MPI and the session start before the program is imported. So a program that cannot be imported on
one rank ends the job on all, and ranks that were started as jobs of their own find out before they
compute anything. A batch script may start it with ``srun`` in the same way.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from mpistrat.comm.mpi import before_abort, library
from mpistrat.comm.session import Session
from mpistrat.errors import PreflightError
from mpistrat.launch.roster import shared_files, sign_in
from mpistrat.lockstep.exits import code_of, exits
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.lockstep.startup import begin

__all__ = ["main"]


def main(argv: Sequence[str]) -> None:
    """Run a program as one rank.

    Args:
      argv: ``-m`` and a module, or a script; then its arguments.
    """
    before = shared_files()
    session = Session.on(library().COMM_WORLD)
    files = shared_files() - before  # MPI's; of a job that fails, its launcher removes them
    out = exits()
    try:
        begin(Lockstep(session))
        if session.options.measure:
            from mpistrat.launch.measured import Measured  # few jobs need it

            Measured(Lockstep(session), session.options.measure)
        chosen = session.options
        if chosen.record:
            out.recorder = lambda code: _record(chosen.record, code)
            before_abort(lambda code: _record(chosen.record, code))
            sign_in(Path(chosen.record).parent, session.comm.rank, files)
        _check_size(chosen.ranks, session.comm.size)
        session.release()  # it belongs to whoever makes the first strategy, as without the runner
        _run(list(argv))
    except BaseException as error:
        # Frames of runpy and of this file say nothing about the program.
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None and _ours(trace.tb_frame.f_code):
            trace = trace.tb_next
        out.note(error.with_traceback(trace))
        if isinstance(error, SystemExit) and session.comm.size == 1:
            raise  # with its text, if it has one
        # It is printed in the last proof, once; here the process only has to end.
        raise SystemExit(code_of(error)) from None


def _ours(code: object) -> bool:
    name = getattr(code, "co_filename", "")
    return name in (__file__, runpy.__file__) or name.startswith("<frozen runpy")


def _check_size(wanted: int, got: int) -> None:
    if wanted and wanted != got:
        raise PreflightError(
            f"{wanted} ranks were started, but MPI says that this job has {got}: the launcher is "
            "not of the MPI that mpi4py uses, so each rank is a job of its own. `mpistrat doctor` "
            "shows both."
        )


def _record(path: str, code: int) -> None:
    with contextlib.suppress(OSError):  # on another host than the launcher's
        Path(path).write_text(f"{code}\n", encoding="ascii")


def _run(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
