"""Facts about this process from the launcher and the system, without starting MPI."""

from __future__ import annotations

import functools
import math
import os
import platform
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SHARED = Path("/dev/shm")  # names of shared memory, see shm_overview(7)
_MACHINES = ("x86_64", "aarch64")


def unsupported(system: str = sys.platform, machine: str | None = None) -> str | None:
    """Return what a program has to know of a system on which the tests do not run; else None.

    Args:
      system: The operating system, as `sys.platform` names it.
      machine: The processor, as `platform.machine` names it; None for this one.

    Example:
      >>> unsupported("linux", "aarch64") is None
      True
      >>> unsupported("linux", "riscv64")
      'mpistrat is not tested on riscv64, only on x86_64 and aarch64: results may be wrong.'
    """
    machine = platform.machine() if machine is None else machine
    if system == "win32":
        return "mpistrat does not run on Windows. Use Linux: WSL 2, a container or a cluster."
    if system != "linux":
        return (
            f"mpistrat is tested on Linux only, and this is {system}. Ranks may not share "
            "memory, and there is less information about ranks that hang or are killed. Use "
            "it to try programs; run jobs on Linux."
        )
    if machine not in _MACHINES:
        return (
            f"mpistrat is not tested on {machine}, only on {' and '.join(_MACHINES)}: results may "
            "be wrong."
        )
    return None


def check_system(system: str = sys.platform) -> None:
    """Refuse a system on which mpistrat cannot run, and warn of one where it is not tested.

    Args:
      system: The operating system, as `sys.platform` names it.

    Raises:
      ImportError: This is Windows.

    Warns:
      RuntimeWarning: It is another system than Linux, or another processor than the tests run on.
    """
    text = unsupported(system)
    if text is not None and system == "win32":
        raise ImportError(text)
    if text is not None:
        warnings.warn(text, RuntimeWarning, stacklevel=3)


class _Mark(NamedTuple):
    """Variables that one launcher sets in every process of a job."""

    needs: tuple[str, ...]
    launcher: str


# First match wins. Slurm's mark needs the step: a batch script has SLURM_PROCID too, yet is no
# rank, and an editor that came by ssh may have anything in part. Hydra inside an allocation starts
# its proxies with srun, so its ranks carry both marks.
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST")
_MARKS = (
    _Mark(("OMPI_COMM_WORLD_SIZE",), "mpiexec of Open MPI"),
    _Mark(("PALS_RANKID",), "mpiexec of PALS"),
    _Mark((*_STEP, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), "srun"),
    _Mark(("PMIX_RANK",), "a launcher that speaks PMIx"),
    _Mark(("PMI_RANK",), "mpiexec of MPICH or Intel MPI"),
)

# Set by sbatch and salloc for the shell in which the user's script runs; such a shell is not a
# rank.
_SHELL_STEPS = ("4294967291", "4294967290")


def shell_of_step(env: Mapping[str, str]) -> bool:
    """Tell whether this is a shell that ``srun --pty`` has started, in which a user types.

    Its variables are those of a rank, except for the terminal; ranks that are started in it inherit
    all of them, and are more than one.

    Args:
      env: The environment.

    Example:
      >>> typed = {"SLURM_PTY_PORT": "4567", "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1"}
      >>> shell_of_step(typed), shell_of_step({**typed, "PMI_SIZE": "2"})
      (True, False)
    """
    sizes = [counted(env.get(name, "")) or 1 for name in _SIZES]
    return "SLURM_PTY_PORT" in env and max(sizes) == 1


def launched_by(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of the launcher that started this process as one rank of a job, or None.

    Args:
      env: The environment; that of this process if not given.

    Returns:
      A name for messages, such as ``"srun"``; None in a plain process, in a batch script, and in a
      shell that ``srun --pty`` or ``salloc`` has started.

    Example:
      >>> launched_by({"PMI_RANK": "1", "PMI_SIZE": "2"})
      'mpiexec of MPICH or Intel MPI'
      >>> launched_by({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}) is None
      True
    """
    mark = _mark(env)
    return mark and mark.launcher


def marks(env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the variables by which `launched_by` knows; none in a plain process.

    Args:
      env: The environment; that of this process if not given.
    """
    mark = _mark(env)
    return mark.needs if mark else ()


def _mark(env: Mapping[str, str]) -> _Mark | None:
    if shell_of_step(env):
        return None
    for mark in _MARKS:
        if all(env.get(name) for name in mark.needs):
            if mark.launcher == "srun" and env["SLURM_STEP_ID"] in _SHELL_STEPS:
                continue
            return mark
    return None


def passes_on_a_code(env: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the launcher ends with the code of a rank that ends last, after all others.

    srun and Open MPI's do. MPICH's and Intel's kill that rank, and then report the kill.

    Args:
      env: The environment; that of this process if not given.

    Example:
      >>> passes_on_a_code({"PMI_RANK": "1"}), passes_on_a_code({"OMPI_COMM_WORLD_SIZE": "2"})
      (False, True)
    """
    # Hydra inside an allocation has the marks of srun too, and this of its own, as Open MPI has.
    hydra = "MPI_LOCALNRANKS" in env and "OMPI_COMM_WORLD_SIZE" not in env
    return not hydra and launched_by(env) in ("srun", "mpiexec of Open MPI")


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the environment of this process with `extra` added, for a child process.

    Args:
      extra: Variables to set in the copy. This process's own environment does not change.

    Example:
      >>> environment({"PRTE_EXAMPLE": "1"})["PRTE_EXAMPLE"]
      '1'
    """
    return {**os.environ, **extra}


def set_absent(variables: Mapping[str, str]) -> set[str]:
    """Set environment variables of this process that are absent; return the names of these.

    Args:
      variables: Values by name. A variable that is there already keeps its value.
    """
    absent = variables.keys() - os.environ.keys()
    os.environ.update({name: variables[name] for name in absent})
    return absent


def installed(names: Sequence[str], places: Sequence[str] | None = None) -> dict[str, str]:
    """Return the versions of the packages that are installed here, without importing any.

    Args:
      names: The packages, in lower case. One that is not installed is left out.
      places: Directories to look in, or None for those from which this process imports.

    Cost: One listing of each directory. `importlib.metadata` reads the same names after importing
    about 30 modules.

    Example:
      >>> installed(["no_such_package"])
      {}
    """
    found: dict[str, str] = {}
    for place in sys.path if places is None else places:
        try:
            entries = os.listdir(place or ".")  # noqa: PTH208  # names are all that is wanted
        except OSError:  # a zip file, or nothing
            continue
        for entry in entries:
            stem, kind = os.path.splitext(entry)  # noqa: PTH122
            if kind in (".dist-info", ".egg-info"):
                name, _, version = stem.partition("-")
                if version and name.lower() in names:
                    found.setdefault(name.lower(), version.partition("-")[0])
    return found


# What Open MPI is asked to do by it: to give its core away while it waits.
YIELD = "OMPI_MCA_mpi_yield_when_idle"


def yields(env: Mapping[str, str] = os.environ) -> bool:
    """Tell whether Open MPI yields its core while it waits.

    Its launcher sets the variable when it is given ``--mca mpi_yield_when_idle 1``.

    Args:
      env: The environment; that of this process if not given.

    Example:
      >>> yields({YIELD: "1"}), yields({})
      (True, False)
    """
    return env.get(YIELD, "").strip().lower() in ("1", "true", "yes", "enabled", "t", "y")


# Variables in which launchers tell a rank the size of its job: Open MPI, Hydra and PMI-1/2, PMIx
# (none), Slurm's srun. Inside `sbatch` without `srun` the last is not set, which is right.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
_DIGITS = 18  # what has more counts nothing that there is


def counted(text: str) -> int | None:
    """Return the number that a text of digits stands for; None for any other text.

    Example:
      >>> counted("12"), counted("-1"), counted("9" * 5000)
      (12, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def job_size(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that the launcher announced, or None.

    Args:
      env: The environment; that of this process if not given.

    Example:
      >>> job_size({"PMI_SIZE": "4"})
      4
    """
    for name in _SIZES:
        found = counted(env.get(name, ""))
        if found is not None:
            return found
    return None


# In which launchers tell a rank its number.
_NUMBERS = ("OMPI_COMM_WORLD_RANK", "PALS_RANKID", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def number_of(env: Mapping[str, str] = os.environ) -> str:
    """Return the number that the launcher gave to a rank, or an empty text.

    Args:
      env: The environment; that of this process if not given.

    Example:
      >>> number_of({"PMI_RANK": "3"}), number_of({})
      ('3', '')
    """
    return next((env[name] for name in _NUMBERS if counted(env.get(name, "")) is not None), "")


# Room for a mask of 8192 cores; Linux allows no more.
MASK_BYTES = 1024
# Reductions and sums are bound by memory, which no more cores than this make faster.
MOST = 16


def mask_of() -> int:
    """Return the cores that this thread may run on, as the bits of a number.

    Launchers and schedulers set them (``--bind-to``, ``--cpus-per-task``, ``taskset``, cpusets).
    """
    if hasattr(os, "sched_getaffinity"):
        return sum(1 << core for core in os.sched_getaffinity(0) if core < 8 * MASK_BYTES)
    return (1 << (os.cpu_count() or 1)) - 1


def cores_of(masks: Sequence[int], rank: int, limit: float = math.inf) -> int:
    """Return how many threads a rank may use without taking cores from its neighbours.

    Args:
      masks: The cores of each rank of the node, as `mask_of` returns them.
      rank: The rank in the node.
      limit: How many cores' worth of time the process gets; see `quota`.

    Returns:
      Its cores divided by the number of ranks that may use any of them; 1 to `MOST`.

    Example:
      >>> cores_of([0b1111, 0b1111, 0b110000], 0), cores_of([0b1111, 0b1111, 0b110000], 2)
      (2, 2)
    """
    mine = masks[rank]
    sharers = max(1, sum(bool(mine & other) for other in masks))
    cores = min(bin(mine).count("1"), limit)
    return max(1, min(MOST, int(cores // sharers)))


@functools.cache
def quota(
    groups: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")
) -> float:
    """Return how many cores' worth of time the control groups of this process allow.

    The least of its group and those above it, as containers set it (``cpu.max`` of version 2;
    ``cpu.cfs_quota_us`` of version 1); infinity if there is no limit. Read once in a process: what
    a container gets does not change, and a strategy would read six files.

    Args:
      groups: Where control groups are mounted.
      process: The file that names the group of this process.
    """
    lines = [line.split(":", 2) for line in _text(process).splitlines()]
    path = next((name for _, kind, name in (x for x in lines if len(x) == 3) if not kind), "/")
    here = groups / path.strip().lstrip("/")
    least = _version_1(groups / "cpu")
    # In a namespace of its own the path may not be there; what is, is above it.
    for group in [here, *here.parents]:
        if group == groups or groups in group.parents:
            least = min(least, _cores(_text(group / "cpu.max").split()))
    return least


def _version_1(group: Path) -> float:
    words = [_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    return _cores(words)


def _cores(words: Sequence[str]) -> float:
    try:
        allowed, period = map(int, words)
        return allowed / period if allowed > 0 else math.inf
    except (ValueError, ZeroDivisionError):  # "max 100000", or no such file
        return math.inf


def _text(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""


def shared_files() -> set[str]:
    """Return the files of shared memory that this process has mapped."""
    with suppress(OSError):
        told = os.fsdecode(Path("/proc/self/maps").read_bytes())  # names are any bytes
        rows = [line.split(maxsplit=5) for line in told.splitlines()]
        names = {row[5] for row in rows if len(row) == 6}
        return {name for name in names if Path(name).parent == SHARED and Path(name).exists()}
    return set()
