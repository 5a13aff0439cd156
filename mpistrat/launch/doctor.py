"""The checks of `mpistrat doctor`: one function per check.

How to add a check: write a function that returns a `Finding`, and add it to `CHECKS`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from mpistrat.environment import YIELD, environment, launched_by, unsupported, yields
from mpistrat.errors import LaunchError
from mpistrat.launch.mpiexec import cores, find, library
from mpistrat.launch.process import run_job
from mpistrat.launch.run import plan_note

__all__ = ["CHECKS", "Finding", "examine"]

_MIB = 2**20
_PATIENCE = 60.0  # seconds for a job of two ranks that does nothing
_SMALL = 64 * _MIB  # what container engines give by default; MPI's own buffers for 8 ranks fill it


class Finding(NamedTuple):
    """One line of the report: what was checked, what was found, and whether it is good enough."""

    name: str
    text: str
    ok: bool = True


def _system() -> Finding:
    text = f"{platform.system()} on {platform.machine()}"
    wrong = unsupported()
    return Finding("system", f"{text}. {wrong}" if wrong else text, ok=wrong is None)


def _package(name: str, module: str) -> Finding:
    """Import a package in a child: that it is installed does not mean that it can be loaded."""
    ask = f"import {module} as m; print(m.__version__)"
    got = subprocess.run(
        [sys.executable, "-c", ask],
        capture_output=True,
        text=True,
        env=environment({}),
        check=False,
    )
    if got.returncode:
        why = (got.stderr.strip().splitlines() or [f"exit code {got.returncode}"])[-1]
        return Finding(name, f"cannot be imported: {why}", ok=False)
    return Finding(name, got.stdout.strip())


def _launcher() -> Finding:
    launcher, loaded = find()
    note = plan_note(launcher, loaded)
    return Finding("mpiexec", f"{launcher}; {note or 'fits the library'}")


def _two_ranks() -> Finding:
    """Start two ranks, each of which prints how many there are: only that shows that all fits."""
    name = "two ranks"
    inside = launched_by()
    if inside is not None:
        return Finding(name, f"not tried: this process is a rank itself, started by {inside}")
    launcher, _ = find()
    # One write per rank: lines of two ranks must not mix.
    ask = "from mpi4py import MPI; import os; os.write(1, b'size %d\\n' % MPI.COMM_WORLD.size)"
    with tempfile.TemporaryFile() as output:
        outcome = run_job(launcher.command(2, [sys.executable, "-c", ask]), _PATIENCE, output)
        output.seek(0)
        said = output.read().decode(errors="replace")
    if outcome.code == 0 and said.count("size 2") == 2:
        return Finding(name, f"found each other, {outcome.seconds:.1f} s")
    if outcome.timed_out:
        return Finding(name, f"did not end within {_PATIENCE:g} s", ok=False)
    return Finding(name, f"failed, exit code {outcome.code}: {said.strip()[-500:]}", ok=False)


def _overlap() -> Finding:
    """Tell whether `all_reduce_start` overlaps with computation."""
    name = "overlap"
    launcher, loaded = find()
    if not loaded.flavour.unless_set:
        return Finding(name, "all_reduce_start overlaps with computation, between nodes")
    env = environment(launcher.command(1, [sys.executable]).env)
    if not yields(env):
        return Finding(name, f"all_reduce_start does not overlap with computation: {YIELD} is off")
    return Finding(
        name,
        "all_reduce_start overlaps with computation, between nodes: `mpistrat run` sets "
        f"{YIELD}=1; set it yourself for other launchers",
    )


def _cores() -> Finding:
    mine, there = cores(), os.cpu_count() or 1
    return Finding("cores", f"{mine} for this process, {there} in this machine")


def _shared_memory() -> Finding:
    where = Path("/dev/shm")
    if not where.is_dir():
        return Finding("/dev/shm", "does not exist on this system")
    usage = shutil.disk_usage(where)
    text = f"{usage.free // _MIB} MiB free of {usage.total // _MIB} MiB"
    if usage.total <= _SMALL:
        text += "; small for MPI (in a container, start it with a larger --shm-size)"
    return Finding("/dev/shm", text, ok=usage.free > 0)


CHECKS: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("system", _system),
    ("Python", lambda: Finding("Python", f"{platform.python_version()} ({sys.executable})")),
    ("NumPy", lambda: _package("NumPy", "numpy")),
    ("Numba", lambda: _package("Numba", "numba")),
    ("mpi4py", lambda: _package("mpi4py", "mpi4py")),
    ("MPI library", lambda: Finding("MPI library", str(library()))),
    ("mpiexec", _launcher),
    ("two ranks", _two_ranks),
    ("overlap", _overlap),
    ("cores", _cores),
    ("/dev/shm", _shared_memory),
)


def examine() -> Iterator[Finding]:
    """Yield one finding per row of `CHECKS`; a check that raises `LaunchError` has failed.

    Cost: a few starts of Python and one job of two ranks, 3 s.
    """
    for name, check in CHECKS:
        try:
            yield check()
        except LaunchError as error:
            yield Finding(name, str(error), ok=False)
