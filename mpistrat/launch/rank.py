"""The program that `mpistrat run` starts on each rank.

Its call is ``python -m mpistrat.launch.rank [-m] PROGRAM ...``.

Before the program, ``--label`` puts ``[rank@host]`` in front of each line on the terminal, and
``--output-dir DIR`` the output of each rank into a file of its own. With ``MPISTRAT_PROFILE`` the
program is profiled.

MPI and the session start before the program is imported. So a program that cannot be imported on
one rank ends the job on all, and ranks that were started as jobs of their own find out before they
compute anything. A batch script may start it with ``srun`` in the same way.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from mpistrat.config import mapped_shm_files, read_or_default
from mpistrat.launch.roster import announce_begin, leave_last_line, sign_in
from mpistrat.launch.streams import Output, redirect, take_input

if TYPE_CHECKING:
    from mpistrat.comm.session import Session


def main(argv: Sequence[str]) -> None:
    """Run a program as one rank.

    Args:
      argv: ``--label``, ``--output-dir DIR``; ``-m`` and a module, or a script; its arguments.
    """
    output, argv = _take_output_options(list(argv))
    announce_rank = redirect(output) if output != Output() else None
    previous_files = mapped_shm_files()
    session = _start_session()
    from mpistrat.comm.callsite import naming_call_site
    from mpistrat.comm.mpi import add_abort_callback
    from mpistrat.lockstep.ending import get_exit_code, last_line
    from mpistrat.lockstep.exits import exits
    from mpistrat.lockstep.handshake import Lockstep
    from mpistrat.lockstep.startup import begin_session

    if announce_rank is not None:
        announce_rank(session.comm.rank, session.comm.size)
    # The launcher removes those of a job that fails.
    mpi_files = mapped_shm_files() - previous_files
    process_exits, record_path = exits(), read_or_default().record
    job_directory = Path(record_path).parent if record_path else None
    take_input(session.comm.rank, job_directory)
    if job_directory is not None:
        process_exits.recorder = functools.partial(_write_record, record_path)
        add_abort_callback(process_exits.recorder)
        last_line.printers.append(functools.partial(leave_last_line, job_directory))
        sign_in(job_directory, session.comm.rank, mpi_files)
    try:
        with naming_call_site("mpistrat.launch.rank"):  # there is no line of the program yet
            begin_session(Lockstep(session))
        if session.options.measure:
            from mpistrat.launch.scaling import StepCounter  # few jobs need it

            StepCounter(Lockstep(session), session.options.measure)
        session.release()  # it belongs to whoever makes the first strategy, as without the runner
        with _profiling_if_asked(session):
            _run_program(list(argv))
    except BaseException as error:
        process_exits.handle_end(error.with_traceback(_strip_launcher_frames(error.__traceback__)))
        if isinstance(error, SystemExit) and session.comm.size == 1:
            raise  # with its text, if it has one
        # It is printed in the last handshake, once; here the process only has to end.
        raise SystemExit(get_exit_code(error)) from None


def _profiling_if_asked(session: Session) -> contextlib.AbstractContextManager[None]:
    if not session.options.profile:
        return contextlib.nullcontext()
    from mpistrat.launch.profile import profiling_rank  # few jobs need it

    return profiling_rank(session.options.profile, session.comm.rank, session.comm.size)


def _strip_launcher_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of runpy and of this file that it begins with."""
    while (
        trace is not None and trace.tb_next is not None and _is_launcher_code(trace.tb_frame.f_code)
    ):
        trace = trace.tb_next
    return trace


def _start_session() -> Session:
    """Start MPI, and from then on remember SIGUSR1, which may announce the end of the job.

    Where there is no handler it ends the process, in whatever thread, such as those that NumPy
    starts; that of MPICH swallows it. So it has to wait from before NumPy is imported. Ctrl-C waits
    too, as the others do not hear of a rank that ends before MPI has started. They wait for it in
    MPI_Init, where no Python runs, for ``MPISTRAT_TIMEOUT`` seconds at most.
    """
    blocked_signals = [signal.SIGUSR1, signal.SIGINT]
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked_signals)
    from mpistrat.checkpoint.notice import record_early_signal
    from mpistrat.comm.mpi import end_after_timeout, library
    from mpistrat.comm.session import Session, check_not_child
    from mpistrat.lockstep.exits import exits

    check_not_child()
    announce_begin()
    world = library().COMM_WORLD
    with end_after_timeout():
        session = Session.of_parent(world)
    signal.signal(signal.SIGUSR1, record_early_signal)
    # At exit, last of all: Python gives up its handlers then, and a notice would end the process.
    atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)
    exits().kept_interrupt.arm()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked_signals)
    return session


def _take_output_options(argv: list[str]) -> tuple[Output, list[str]]:
    """Return the place for output, and the other words."""
    output = Output()
    while argv[0] in ("--label", "--output-dir"):
        if argv.pop(0) == "--label":
            output = output._replace(has_labels=True)
        else:
            output = output._replace(directory=argv.pop(0))
    return output, argv


def _is_launcher_code(code: object) -> bool:
    name = getattr(code, "co_filename", "")
    return name in (__file__, runpy.__file__) or name.startswith("<frozen runpy")


def _write_record(record_path: str, code: int) -> None:
    # As bytes: Python opens a file for an encoding, and there may be no descriptor for two.
    with contextlib.suppress(OSError):  # on another host than the launcher's
        Path(record_path).write_bytes(b"%d\n" % code)


def _run_program(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):  # from Python 3.11 on
        # `python -m` puts the current directory first. As under plain `python`, a script does not
        # import from there, nor do NumPy and mpi4py.
        del sys.path[0]
    main(sys.argv[1:])
