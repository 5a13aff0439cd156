"""What `mpistrat run` does: one job, from its program to its exit code."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from mpistrat.cluster.detect import launched_by
from mpistrat.errors import LaunchError
from mpistrat.launch.flavours import version
from mpistrat.launch.mpiexec import Launcher, Library, find
from mpistrat.launch.process import run_job

__all__ = ["plan_note", "python_program", "refuse_inside", "run"]


def python_program(program: Sequence[str], module: bool) -> list[str]:
    """Return the words that run a Python program so that its failure on one rank ends the job.

    Args:
      program: A module or a script, then its arguments.
      module: Whether the first is a module.

    Example:
      >>> python_program(["train.py", "--fast"], module=False)[1:]
      ['-m', 'mpi4py', 'train.py', '--fast']
    """
    # mpi4py's runner calls MPI_Abort when an exception or a non-zero SystemExit leaves the program;
    # without it the other ranks wait for ever in MPI_Finalize.
    return [sys.executable, "-m", "mpi4py", *(["-m"] if module else []), *program]


def refuse_inside(env: Mapping[str, str] | None = None) -> None:
    """Raise a `LaunchError` if this process already is a rank of a job.

    Args:
      env: The environment, or None for that of this process.
    """
    launcher = launched_by(env)
    if launcher is not None:
        raise LaunchError(
            f"this process already is one rank of a job ({launcher} started it), and a job\n"
            "  in a job would start ranks x ranks processes. Drop one of the two: either\n"
            "  `mpistrat run -n N train.py` in a plain shell or batch script, or\n"
            "  `srun python -m mpi4py train.py`."
        )


def plan_note(launcher: Launcher, loaded: Library) -> str:
    """Return a remark on a pair that was accepted but may still not fit, or an empty string."""
    if launcher.flavour.name != loaded.flavour.name or launcher.flavour.name == "unknown":
        return f"{launcher} and {loaded} may not be one MPI; `mpistrat doctor` tries it"
    theirs, ours = version(launcher.text), version(loaded.text)
    if theirs != ours:
        return f"mpiexec is {theirs} but the library is {ours}; use one if ranks stay alone"
    return ""


def run(
    ranks: int, program: Sequence[str], module: bool = False, timeout: float | None = None
) -> int:
    """Run a Python program on `ranks` ranks with the MPI of this environment.

    The exact call of the launcher is printed to stderr first.

    Args:
      ranks: Number of ranks, at least 1.
      program: A script or a module, then its arguments.
      module: Whether the first word is a module, as after ``python -m``.
      timeout: Seconds after which the job is ended, or None for never.

    Returns:
      The launcher's exit code; 124 if the time ran out.

    Raises:
      LaunchError: No launcher fits, `ranks` is less than 1, or this process already is a rank.
    """
    refuse_inside()
    launcher, loaded = find()
    command = launcher.command(ranks, python_program(program, module))
    note = plan_note(launcher, loaded)
    if note:
        _say(f"note: {note}")
    _say(str(command))
    outcome = run_job(command, timeout)
    if outcome.timed_out:
        _say(f"the job was ended: it ran longer than --timeout {timeout:g} s")
    return outcome.code


def _say(text: str) -> None:
    print(f"mpistrat: {text}", file=sys.stderr, flush=True)
