"""The options of mpistrat, and facts about this process from the launcher and the system.

Each field of `Options` is one option. ``MPISTRAT_<FIELD>`` sets it for a process; an unknown
``MPISTRAT_`` name or a value that cannot be read is an error, never ignored.

The facts are read without starting MPI: the system, the launcher and the rank that it gave this
process, whether a rank has started this program, the cores and threads that a rank may use.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mpistrat.errors import OptionError

# The options of mpistrat.

PREFIX = "MPISTRAT_"


KEEP_THREADS = -1  # threads of BLAS: as many as there are without mpistrat


_MAX_SECONDS = 1e9  # seconds, which is 31 years; clocks of the system overflow beyond 9.2e9


def _parse_flag(text: str) -> bool:
    flag_values = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
    return flag_values[text.strip().lower()]


def _parse_nan(text: str) -> str:
    if text not in ("off", "report", "raise"):
        raise ValueError(text)
    return text


def _parse_traceback(text: str) -> str:
    if text not in ("short", "full"):
        raise ValueError(text)
    return text


def _parse_pairs(text: str) -> str:
    if text and any(pair.count("=") != 1 for pair in text.split(";")):
        raise ValueError(text)
    return text


def _parse_number(text: str) -> int:
    count = int(text)
    if not 0 <= count < 1 << 63:  # more cannot be given to the other ranks
        raise ValueError(text)
    return count


def _parse_blas_threads(text: str) -> int:
    return KEEP_THREADS if text.strip().lower() == "keep" else _parse_number(text)


def _parse_job_size(text: str) -> int:
    return _parse_number(text) if text.strip() else 0  # as a script leaves it that knows of none


def _parse_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(text)
    return min(seconds, _MAX_SECONDS)


def _option_field(default: object, parse: Callable[[str], Any], requirement: str) -> Any:
    """Return a field: its default, and how its variable is read."""
    return dataclasses.field(default=default, metadata={"parse": parse, "wanted": requirement})


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one process.

    Attributes:
      ranks: How many ranks the launcher was asked for; a job of another size does not start.
        0 for what its variables say; 1 if its processes are meant to be jobs of their own, as a
        program that a rank starts.
        ``MPISTRAT_RANKS``; `mpistrat run` sets it.
      record: A file for the exit code, written when all ranks have left. ``MPISTRAT_RECORD``;
        `mpistrat run` sets it, and counts a job that has not written it as failed.
      measure: A file for the results of the job: ranks, nodes, seconds, steps.
        ``MPISTRAT_MEASURE``; `mpistrat scaling` sets it.
      profile: A directory for a profile of each rank, ``rank-N.prof``; empty for none. The ranks of
        `mpistrat run` and of ``python -m mpistrat.launch.rank`` write it. ``MPISTRAT_PROFILE``;
        ``mpistrat run --profile`` sets it.
      grace: Seconds that a rank which leaves with a failure waits for the others to make a call,
        before it ends the job; in a job of several groups also for other signs of life.
        ``MPISTRAT_GRACE``.
      warn: Seconds after which a rank that the others wait for is named. ``MPISTRAT_WARN``.
      timeout: Seconds after which a job whose ranks wait for one another is ended, with exit code
        75. ``MPISTRAT_TIMEOUT``.
      nan: What happens when a rank is about to give a NaN or infinity to a reduction: ``off``,
        values are not checked; ``report``, a line on stderr says which rank, leaf, index and step;
        ``raise``, every rank raises `NonFiniteError`. ``MPISTRAT_NAN``.
      check_every: Every so many steps (calls of ``run``) the copies of one variable are compared,
        another variable each time; and every so many steps of an iterator, from its first, the
        contents of the batch, if all ranks hold it whole. 0 for never. ``MPISTRAT_CHECK_EVERY``.
      ranks_per_node: Treat so many consecutive ranks as one node, to test what happens between
        nodes. 0 asks MPI which ranks share memory. ``MPISTRAT_RANKS_PER_NODE``.
      map_private: Each rank maps the weights of a `mpistrat.torch.FusedOptimizer` privately, so
        that a node has them once. Off, each rank has its own copy. ``MPISTRAT_MAP_PRIVATE``: 0 or
        1.
      terminal: Whether the output of the job goes to a terminal, although a rank sees a pipe.
        ``MPISTRAT_TERMINAL``: 0 or 1; `mpistrat run` sets it.
      fault: A fault to inject on one rank, for tests of programs; see `mpistrat.testing.inject`.
        ``MPISTRAT_FAULT``.
      traceback: How much is printed of an exception: ``short``, the frames of the program, and two
        of mpistrat at most; ``full``, all. ``MPISTRAT_TRACEBACK``.
      numba: Use the compiled kernels. Off, their NumPy references do the same work.
        ``MPISTRAT_NUMBA``: 0 or 1.
      threads: How many threads the kernels of a rank may use at once; 0 for its share of the cores
        that it may run on. Results are the same with any number. ``MPISTRAT_THREADS``.
      blas_threads: How many threads BLAS, OpenMP and PyTorch may use at most in a rank. 0 for its
        share of the cores where several ranks of the job may run on the same ones, unless
        ``OMP_NUM_THREADS`` or a variable like it is set; `KEEP_THREADS` for the number that they
        use without mpistrat. ``MPISTRAT_BLAS_THREADS``: a number, or ``keep``.
    """

    traceback: str = _option_field("short", _parse_traceback, "short or full")
    numba: bool = _option_field(True, _parse_flag, "0 or 1")
    threads: int = _option_field(
        0, _parse_number, "a number of threads, or 0 for the cores of the rank"
    )
    blas_threads: int = _option_field(
        0, _parse_blas_threads, "a number of threads, 0 for a share, or keep"
    )
    ranks: int = _option_field(0, _parse_job_size, "a number of ranks, or empty")
    record: str = _option_field("", str, "a file name")
    measure: str = _option_field("", str, "a file name")
    profile: str = _option_field("", str, "a directory")
    grace: float = _option_field(30.0, _parse_seconds, "seconds, more than 0")
    warn: float = _option_field(60.0, _parse_seconds, "seconds, more than 0")
    timeout: float = _option_field(1800.0, _parse_seconds, "seconds, more than 0")
    nan: str = _option_field("off", _parse_nan, "off, report or raise")
    check_every: int = _option_field(100, _parse_number, "a number of steps, or 0")
    ranks_per_node: int = _option_field(0, _parse_number, "a number of ranks, or 0")
    map_private: bool = _option_field(True, _parse_flag, "0 or 1")
    terminal: bool = _option_field(False, _parse_flag, "0 or 1")
    fault: str = _option_field("", _parse_pairs, "rank=R;call=N;phase=P;do=ACTION")


_FIELD_METADATA = {field.name: field.metadata for field in dataclasses.fields(Options)}


def read_options(env: Mapping[str, str] = os.environ) -> Options:
    """Return the options that an environment asks for.

    Args:
      env: The environment; that of this process if not given.

    Returns:
      Defaults, overridden by the ``MPISTRAT_*`` variables.

    Raises:
      OptionError: A name is unknown or a value does not parse.

    Example:
      >>> read_options({"MPISTRAT_NUMBA": "0"}).numba
      False
    """
    values: dict[str, Any] = {}
    for name, text in env.items():
        if not name.startswith(PREFIX):
            continue
        field = name[len(PREFIX) :].lower()
        if field not in _FIELD_METADATA:
            import difflib  # of no use to a program whose options are known

            close_matches = difflib.get_close_matches(field, _FIELD_METADATA, n=1)
            known_names = ", ".join(PREFIX + f.upper() for f in sorted(_FIELD_METADATA))
            hint = f" Did you mean {PREFIX}{close_matches[0].upper()}?" if close_matches else ""
            raise OptionError(f"{name} is not an option of mpistrat. Known: {known_names}.{hint}")
        try:
            values[field] = _FIELD_METADATA[field]["parse"](text)
        except (KeyError, ValueError):
            raise OptionError(
                f"{name}={text!r} cannot be used; it must be {_FIELD_METADATA[field]['wanted']}."
            ) from None
    return Options(**values)


def read_or_default() -> Options:
    """Return the options, or the defaults if they cannot be read.

    The first handshake tells all ranks what is wrong with them.
    """
    try:
        return read_options()
    except OptionError:
        return Options()


# The system.

_PROCESSORS = ("x86_64", "aarch64")


def describe_unsupported(system: str = sys.platform, machine: str | None = None) -> str | None:
    """Return a warning about a system on which the tests do not run; None for other systems.

    Args:
      system: The operating system, as `sys.platform` names it.
      machine: The processor, as `platform.machine` names it; None for this one.

    Example:
      >>> describe_unsupported("linux", "aarch64") is None
      True
      >>> describe_unsupported("linux", "riscv64")
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
    if machine not in _PROCESSORS:
        return (
            f"mpistrat is not tested on {machine}, only on {' and '.join(_PROCESSORS)}: results "
            "may be wrong."
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
    text = describe_unsupported(system)
    if text is not None and system == "win32":
        raise ImportError(text)
    if text is not None:
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def find_versions(names: Sequence[str], directories: Sequence[str] | None = None) -> dict[str, str]:
    """Return the versions of the packages that are installed here, without importing any.

    Args:
      names: The packages, in lower case. One that is not installed is left out.
      directories: Directories to look in, or None for those from which this process imports.

    Cost: One listing of each directory. `importlib.metadata` reads the same names after importing
    about 30 modules.

    Example:
      >>> find_versions(["no_such_package"])
      {}
    """
    versions: dict[str, str] = {}
    for directory in sys.path if directories is None else directories:
        try:
            entries = os.listdir(directory or ".")  # noqa: PTH208  # names are all that is wanted
        except OSError:  # a zip file, or nothing
            continue
        for entry in entries:
            stem, kind = os.path.splitext(entry)  # noqa: PTH122
            if kind in (".dist-info", ".egg-info"):
                name, _, version = stem.partition("-")
                if version and name.lower() in names:
                    versions.setdefault(name.lower(), version.partition("-")[0])
    return versions


# The launcher, and the variables that it sets.


class _LauncherMark(NamedTuple):
    """Variables that one launcher sets in every process of a job."""

    variables: tuple[str, ...]
    launcher: str


# First match wins. Slurm's mark needs the step: a batch script has SLURM_PROCID too, yet is no
# rank, and an editor that came by ssh may have anything in part. Hydra inside an allocation starts
# its proxies with srun, so its ranks carry both marks.
_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST")


_LAUNCHER_MARKS = (
    _LauncherMark(("OMPI_COMM_WORLD_SIZE",), "mpiexec of Open MPI"),
    _LauncherMark(("PALS_RANKID",), "mpiexec of PALS"),
    _LauncherMark((*_STEP, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), "srun"),
    _LauncherMark(("PMIX_RANK",), "a launcher that speaks PMIx"),
    _LauncherMark(("PMI_RANK",), "mpiexec of MPICH or Intel MPI"),
)


# Set by sbatch and salloc for the shell in which the user's script runs; such a shell is not a
# rank.
_SHELL_STEPS = ("4294967291", "4294967290")


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
    mark = _find_launcher_mark(env)
    return mark and mark.launcher


def launcher_variables(env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the variables by which `launched_by` knows; none in a plain process.

    Args:
      env: The environment; that of this process if not given.
    """
    mark = _find_launcher_mark(env)
    return mark.variables if mark else ()


def _find_launcher_mark(env: Mapping[str, str]) -> _LauncherMark | None:
    if is_interactive_shell(env):
        return None
    for mark in _LAUNCHER_MARKS:
        if all(env.get(name) for name in mark.variables):
            if mark.launcher == "srun" and env["SLURM_STEP_ID"] in _SHELL_STEPS:
                continue
            return mark
    return None


def is_interactive_shell(env: Mapping[str, str]) -> bool:
    """Tell whether this is a shell that ``srun --pty`` has started, in which a user types.

    Its variables are those of a rank, except for the terminal; ranks that are started in it inherit
    all of them, and are more than one.

    Args:
      env: The environment.

    Example:
      >>> typed = {"SLURM_PTY_PORT": "4567", "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1"}
      >>> is_interactive_shell(typed), is_interactive_shell({**typed, "PMI_SIZE": "2"})
      (True, False)
    """
    sizes = [parse_count(env.get(name, "")) or 1 for name in _SIZE_VARIABLES]
    return "SLURM_PTY_PORT" in env and max(sizes) == 1


def passes_on_exit_code(env: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the launcher ends with the code of a rank that ends last, after all others.

    srun and Open MPI's do. MPICH's and Intel's kill that rank, and then report the kill.

    Args:
      env: The environment; that of this process if not given.

    Example:
      >>> passes_on_exit_code({"PMI_RANK": "1"}), passes_on_exit_code({"OMPI_COMM_WORLD_SIZE": "2"})
      (False, True)
    """
    # Hydra inside an allocation has the marks of srun too, and this of its own, as Open MPI has.
    hydra = "MPI_LOCALNRANKS" in env and "OMPI_COMM_WORLD_SIZE" not in env
    return not hydra and launched_by(env) in ("srun", "mpiexec of Open MPI")


# The variable that asks Open MPI to give its core away while it waits.
YIELD_VARIABLE = "OMPI_MCA_mpi_yield_when_idle"


def is_yielding(env: Mapping[str, str] = os.environ) -> bool:
    """Tell whether Open MPI yields its core while it waits.

    Its launcher sets the variable when it is given ``--mca mpi_yield_when_idle 1``.

    Args:
      env: The environment; that of this process if not given.

    Example:
      >>> is_yielding({YIELD_VARIABLE: "1"}), is_yielding({})
      (True, False)
    """
    return env.get(YIELD_VARIABLE, "").strip().lower() in ("1", "true", "yes", "enabled", "t", "y")


# Variables in which launchers set the size of the job: Open MPI, Hydra and PMI-1/2, PMIx (none),
# Slurm's srun. Inside `sbatch` without `srun` the last is not set, which is right.
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")


_MAX_DIGITS = 18  # a longer text counts nothing real


def parse_count(text: str) -> int | None:
    """Return the number that a text of digits stands for; None for any other text.

    Example:
      >>> parse_count("12"), parse_count("-1"), parse_count("9" * 5000)
      (12, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


def job_size(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that the launcher announced, or None.

    Args:
      env: The environment; that of this process if not given.

    Example:
      >>> job_size({"PMI_SIZE": "4"})
      4
    """
    for name in _SIZE_VARIABLES:
        size = parse_count(env.get(name, ""))
        if size is not None:
            return size
    return None


def torchrun_size(env: Mapping[str, str] = os.environ) -> int | None:
    """Return how many processes torchrun has started; None if it has not started this one.

    Its processes have ``WORLD_SIZE`` beside ``TORCHELASTIC_RUN_ID``. The first alone says nothing:
    many shells and images export it.

    Args:
      env: The environment; that of this process if not given.

    Example:
      >>> torchrun_size({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"})
      2
      >>> torchrun_size({"WORLD_SIZE": "2"}) is None
      True
    """
    return parse_count(env.get("WORLD_SIZE", "")) if env.get("TORCHELASTIC_RUN_ID") else None


# Variables in which launchers set the number of ranks of the job on a node.
_NODE_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def node_size(env: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks of the job the launcher has started on this node; 0 if unknown.

    Args:
      env: The environment; that of this process if not given.

    Example:
      >>> node_size({"MPI_LOCALNRANKS": "4"}), node_size({})
      (4, 0)
    """
    return next(filter(None, (parse_count(env.get(name, "")) for name in _NODE_SIZE_VARIABLES)), 0)


# Variables in which launchers set the number of a rank.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PALS_RANKID", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def rank_text(env: Mapping[str, str] = os.environ) -> str:
    """Return the number that the launcher gave to a rank, or an empty text.

    Args:
      env: The environment; that of this process if not given.

    Example:
      >>> rank_text({"PMI_RANK": "3"}), rank_text({})
      ('3', '')
    """
    return next(
        (env[name] for name in _RANK_VARIABLES if parse_count(env.get(name, "")) is not None), ""
    )


# Programs that a rank starts.

# Programs that start ranks and end when their job does, as the kernel names them (15 characters).
LAUNCHERS = frozenset(
    (
        *("hydra_pmi_proxy", "mpiexec", "mpiexec.hydra", "mpiexec.gforker", "mpirun"),
        *("orted", "orterun", "prte", "prted", "prterun", "slurmstepd", "srun"),
    )
)


# Number, process and session of a rank, for the programs that it starts. No MPISTRAT_*, which are
# options.
_PARENT_VARIABLE = "_MPISTRAT_RANK"


# Variables that launchers and `mpistrat run` set in each rank; no options of users (OMPI_MCA_*).
_LAUNCHER_VARIABLE = re.compile(
    r"PMIX_(?!MCA_)|PMI_|HYDI_|PALS_|MPI_LOCAL|PRTE_LAUNCHED$"
    r"|OMPI_(COMM_WORLD|WORLD|UNIVERSE|NUM_APP|FILE|ARGV|COMMAND|TOOL|MCA_(num_procs|initial_wdir)$)"
    r"|SLURM_(STEP|PROCID|LOCALID|NODEID|GTIDS|SRUN|TASK_PID|PTY)"
    rf"|MPISTRAT_(RECORD|MEASURE)$|{_PARENT_VARIABLE}$"
)


_marked_pids: list[int] = []  # the process that is marked; a forked child has it too


class ParentRank(NamedTuple):
    """The rank that has started a program.

    Attributes:
      rank: Its number in the job.
      pid: Its process.
      session: The session of that, see setsid(2).
    """

    rank: int
    pid: int
    session: int


def mark_rank() -> None:
    """Let the programs that this rank starts find out that they are no ranks.

    They inherit the launcher's variables. Only processes of a launcher are marked.
    """
    if launched_by() is None or _marked_pids or parent_rank() is not None:
        return
    _marked_pids.append(os.getpid())
    mark = ParentRank(parse_count(rank_text()) or 0, os.getpid(), os.getsid(0))
    os.environ[_PARENT_VARIABLE] = " ".join(map(str, mark))


def parent_rank(env: Mapping[str, str] = os.environ) -> ParentRank | None:
    """Return the rank that has started this program; None if no rank has.

    It is found for a process that a rank has started through others, such as a shell, and for one
    whose parent has ended. It is None for a process of a launcher that such a rank has started, and
    for a forked process that runs no other program.

    Args:
      env: The environment; that of this process if not given.
    """
    mark = [parse_count(word) for word in env.get(_PARENT_VARIABLE, "").split()]
    if _marked_pids or launched_by(env) is None or len(mark) != 3 or None in mark:
        return None
    parent = ParentRank(*(number or 0 for number in mark))
    pid = os.getpid()
    if parent.pid == pid:  # another program runs in the rank, by os.execv
        return None
    while pid > 0 and (process := _name_and_parent(pid)) is not None:
        if pid == parent.pid:
            return parent
        if process[0] in LAUNCHERS:
            return None
        pid = process[1]
    return parent if os.getsid(0) == parent.session else None


def _name_and_parent(pid: int) -> tuple[str, int] | None:
    """Return the name of a process and the pid of its parent; None if they cannot be read."""
    head, _, tail = _read_text(Path(f"/proc/{pid}/stat")).rpartition(")")
    fields = tail.split()
    return (head.partition("(")[2], int(fields[1])) if len(fields) > 1 else None


def forget_launcher(env: MutableMapping[str, str] = os.environ) -> None:
    """Remove the variables that launchers set in ranks, so that MPI starts with one rank.

    Args:
      env: The environment; that of this process if not given.

    Example:
      >>> env = {"PMI_RANK": "1", "PMIX_MCA_gds": "hash", "OMPI_MCA_btl": "self"}
      >>> forget_launcher(env)
      >>> sorted(env)
      ['OMPI_MCA_btl', 'PMIX_MCA_gds']
    """
    for name in [name for name in env if _LAUNCHER_VARIABLE.match(name)]:
        del env[name]


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the environment of this process with `extra` added, for a child process.

    Args:
      extra: Variables to set in the copy. This process's own environment does not change.

    Example:
      >>> child_environment({"PRTE_EXAMPLE": "1"})["PRTE_EXAMPLE"]
      '1'
    """
    return {**os.environ, **extra}


def set_missing_variables(text_by_name: Mapping[str, str]) -> set[str]:
    """Set environment variables of this process that are absent; return the names of these.

    Args:
      text_by_name: Values by name. A variable that is there already keeps its value.
    """
    absent = text_by_name.keys() - os.environ.keys()
    os.environ.update({name: text_by_name[name] for name in absent})
    return absent


# Cores and threads.

# The size of a mask of 8192 cores; Linux allows no more.
MASK_BYTES = 1024


# Reductions and sums are bound by memory, which no more cores than this make faster.
MAX_THREADS = 16


def affinity_mask() -> int:
    """Return the cores that this thread may run on, as the bits of a number.

    Launchers and schedulers set them (``--bind-to``, ``--cpus-per-task``, ``taskset``, cpusets).
    """
    if hasattr(os, "sched_getaffinity"):
        return sum(1 << core for core in os.sched_getaffinity(0) if core < 8 * MASK_BYTES)
    return (1 << (os.cpu_count() or 1)) - 1


def threads_of_rank(masks: Sequence[int], rank: int, limit: float = math.inf) -> int:
    """Return how many threads a rank may use without taking cores from its neighbours.

    Args:
      masks: The cores of each rank of the node, as `affinity_mask` returns them.
      rank: The rank in the node.
      limit: How many cores' worth of time the process gets; see `cpu_quota`.

    Returns:
      Its cores divided by the number of ranks that may use any of them; 1 to `MAX_THREADS`.

    Example:
      >>> masks = [0b1111, 0b1111, 0b110000]
      >>> threads_of_rank(masks, 0), threads_of_rank(masks, 2)
      (2, 2)
    """
    return min(MAX_THREADS, cores_of_rank(masks, rank, limit))


def cores_of_rank(masks: Sequence[int], rank: int, limit: float = math.inf) -> int:
    """Return the same as `threads_of_rank`, but without a largest number: 1 or more.

    Example:
      >>> cores_of_rank([(1 << 64) - 1] * 2, 0)
      32
    """
    cores = min(bin(masks[rank]).count("1"), limit)
    return max(1, int(cores // len(ranks_sharing_cores(masks, rank))))


def ranks_sharing_cores(masks: Sequence[int], rank: int) -> list[int]:
    """Return the ranks of the node that may use cores of one rank, with that one.

    Example:
      >>> ranks_sharing_cores([0b1111, 0b1111, 0b110000], 0)
      [0, 1]
    """
    return [r for r, mask in enumerate(masks) if r == rank or mask & masks[rank]]


def complete_masks(masks: Sequence[int], rank: int, ranks: int, cores: int) -> list[int]:
    """Return the masks of all ranks of a node, of which only those of one group are known.

    Ranks that together may use more cores than there are have the same ones: launchers bind all
    ranks, or none.

    Args:
      masks: The cores of each rank of the group.
      rank: One of these.
      ranks: How many ranks the node has.
      cores: How many cores it has.

    Example:
      >>> complete_masks([0b1111], 0, 4, 4), complete_masks([0b1], 0, 4, 4)
      ([15, 15, 15, 15], [1])
    """
    unseen = ranks - len(masks)
    shared = bin(masks[rank]).count("1") * ranks > cores
    return [*masks, *[masks[rank]] * (unseen if shared else 0)]


# Variables by which users set the threads of libraries that multiply matrices.
THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS"),
    *("BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
)


_own_variables: dict[str, str] = {}  # by `set_thread_variable`


def has_thread_variable(env: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the user has set one of `THREAD_VARIABLES`.

    Args:
      env: The environment; that of this process if not given.

    Example:
      >>> has_thread_variable({"MKL_NUM_THREADS": "4"}), has_thread_variable({})
      (True, False)
    """
    return any(name in env and env[name] != _own_variables.get(name) for name in THREAD_VARIABLES)


def set_thread_variable(count: int) -> None:
    """Tell libraries that are not loaded yet how many threads to use, unless the user has.

    All of them read ``OMP_NUM_THREADS`` when they are loaded, where they find no variable of
    their own.
    """
    if not has_thread_variable():
        _own_variables["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(count)


@functools.cache
def cpu_quota(
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
    lines = [line.split(":", 2) for line in _read_text(process).splitlines()]
    path = next((name for _, kind, name in (x for x in lines if len(x) == 3) if not kind), "/")
    group_path = groups / path.strip().lstrip("/")
    min_cores = _read_quota_version_1(groups / "cpu")
    # In a namespace of its own the path may not be there; what is, is above it.
    for group in [group_path, *group_path.parents]:
        if group == groups or groups in group.parents:
            min_cores = min(min_cores, _parse_quota(_read_text(group / "cpu.max").split()))
    return min_cores


def _read_quota_version_1(group_path: Path) -> float:
    words = [_read_text(group_path / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    return _parse_quota(words)


def _parse_quota(words: Sequence[str]) -> float:
    try:
        allowed, period = map(int, words)
        return allowed / period if allowed > 0 else math.inf
    except (ValueError, ZeroDivisionError):  # "max 100000", or no such file
        return math.inf


# Files.

SHM_DIRECTORY = Path("/dev/shm")  # names of shared memory, see shm_overview(7)


def mapped_shm_files() -> set[str]:
    """Return the files of shared memory that this process has mapped."""
    with suppress(OSError):
        maps_text = os.fsdecode(Path("/proc/self/maps").read_bytes())  # names are any bytes
        rows = [line.split(maxsplit=5) for line in maps_text.splitlines()]
        names = {row[5] for row in rows if len(row) == 6}
        return {
            name for name in names if Path(name).parent == SHM_DIRECTORY and Path(name).exists()
        }
    return set()


def _read_text(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""
