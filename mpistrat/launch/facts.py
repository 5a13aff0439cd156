"""The facts that `mpistrat doctor` checks: those that ranks report, and measurements.

Each rank runs `python -m mpistrat.launch.facts FILE ...`. It prints one line and does not start
MPI, so a rank that cannot start it does not keep the others waiting. The names of the fields are
those of the report of ``mpistrat doctor --json``.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import resource
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpistrat.comm.callsite import group_by_key
from mpistrat.config import affinity_mask, child_environment, cpu_quota, find_versions, is_yielding
from mpistrat.errors import LaunchError
from mpistrat.launch.mpi_libraries import find_library
from mpistrat.watchdog.processes import get_machine_id

FACTS_MARK = "mpistrat-doctor "  # begins the line of a rank
FAILURE_MARK = "mpistrat-doctor-failed "  # begins the line of a process that could not report
_PACKAGES = ("mpistrat", "numpy", "numba", "mpi4py", "optree")
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


class RankFacts(NamedTuple):
    """The facts of one rank and of its host.

    Attributes:
      host: Its host name.
      python: The interpreter.
      versions: Of Python and packages. One that is missing is left out; one that cannot be imported
        has the reason instead.
      library: The MPI library that mpi4py loads, or why there is none.
      wheel: Whether that library is in the Python environment, as one from a wheel does.
      yields: Whether a rank that waits gives its core away, where its MPI does so only if asked to.
      mask: The cores that it may run on, as bits.
      cores: How many cores the host has.
      blas: BLAS threads that the environment asks for; 0 without such a variable.
      shm: Free and total bytes of ``/dev/shm``; (0, 0) if there is none.
      opens: Whether memory of other processes can be opened by ``/proc/PID/fd``.
      space: Its boot and namespace of process numbers; another one is another container.
      home: Whether the home directory can be written.
      files: How many files it may open.
      fabric: Devices in ``/sys/class/infiniband``.
      rate: The fastest network device's rate in ``/sys``, Gbit/s; 0 if there is none.
      unseen: Directories in which it does not see files that were written before its start.
    """

    host: str
    python: str
    versions: Mapping[str, str]
    library: str
    wheel: bool
    yields: bool
    mask: int
    cores: int
    blas: int
    shm: tuple[int, int]
    opens: bool
    space: str
    home: bool
    files: int
    fabric: tuple[str, ...]
    rate: float
    unseen: tuple[str, ...]


class LinkFacts(NamedTuple):
    """Messages between two ranks: how long one of 8 bytes takes, how fast 4 MiB go.

    Attributes:
      latency: Microseconds, one way.
      bandwidth: Gbit/s, one way.
    """

    latency: float
    bandwidth: float


class Job(NamedTuple):
    """The facts of a job; each may be missing, if its source has failed.

    Attributes:
      wanted: How many ranks were asked for.
      command: The call that started them, or an empty string.
      mismatch: The reason why no launcher fits, or may not fit; an empty string if one fits.
      ranks: The facts of the ranks.
      failed: Host and last line of each process that could not report any.
      sizes: The number of ranks of each job that was found; one, unless the job fell apart.
      trouble: Why the ranks could not be started or measured, or an empty string.
      inside: Between two ranks of one host.
      between: Between two hosts.
      slurm: The output of ``scontrol show config``, in an allocation; else an empty string.
      within: The launcher that has started this process as a rank, so that it starts none; or an
        empty string.
      directories: Directories that ranks were asked to see.
      kills: Whether the launcher ends the job when one rank ends badly, as far as is known.
    """

    wanted: int
    command: str = ""
    mismatch: str = ""
    ranks: tuple[RankFacts, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    sizes: tuple[int, ...] = ()
    trouble: str = ""
    inside: LinkFacts | None = None
    between: LinkFacts | None = None
    slurm: str = ""
    within: str = ""
    directories: tuple[str, ...] = ()
    kills: bool = True

    @property
    def hosts(self) -> dict[str, list[RankFacts]]:
        """The ranks of each host."""
        return group_by_key([rank.host for rank in self.ranks], self.ranks)


def _find_versions() -> dict[str, str]:
    """Return versions of packages; they are imported, as a broken one has a version, too."""
    versions = find_versions(_PACKAGES)
    for name in ("numpy", "numba", "optree"):
        try:
            if name in versions:
                importlib.import_module(name)
        except Exception as error:  # whatever a broken package raises
            versions[name] = f"cannot be imported ({type(error).__name__}: {error})"
    return versions


def _describe_library() -> tuple[str, bool, bool]:
    """Return the library in words, whether it is a wheel's, and whether it yields unasked."""
    try:
        library = find_library()
    except LaunchError as error:
        return f"none: {str(error).splitlines()[0]}", False, True
    is_from_wheel = Path(sys.prefix) in Path(library.file_path or "/").parents
    return str(library), is_from_wheel, not library.flavour.default_variables


def _can_open_memory() -> bool:
    """Tell whether a process can open the memory of another one, tried on a child."""
    read_end, write_end = os.pipe()
    child_pid = os.fork()
    if child_pid == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    try:
        os.close(os.open(f"/proc/{child_pid}/fd/{read_end}", os.O_RDONLY))
        return True
    except OSError:
        return False
    finally:
        os.close(write_end)
        os.close(read_end)
        # It may wait for a lock that another thread held when it was made.
        os.kill(child_pid, signal.SIGKILL)
        os.waitpid(child_pid, 0)


def _read_fastest_rate(fabric_path: Path, network_path: Path) -> float:
    """Return the fastest device's rate, Gbit/s."""
    rates = [0.0]
    for path in fabric_path.glob("*/ports/*/rate"):  # "100 Gb/sec (4X EDR)"
        rates += _read_number(path, 1.0)
    for path in network_path.glob("*/speed"):  # Mbit/s; -1 or an error where there is none
        rates += _read_number(path, 1e-3)
    return max(rates)


def _read_number(path: Path, unit: float) -> list[float]:
    try:
        return [float(path.read_text(encoding="utf-8").split()[0]) * unit]
    except (OSError, ValueError, IndexError):
        return []


def collect_facts(
    probe_files: Sequence[str] = (), class_path: Path = Path("/sys/class")
) -> RankFacts:
    """Return the facts of this process.

    Args:
      probe_files: Files that were written before, one in each directory that ranks should see.
      class_path: The directory in which the kernel lists devices.

    Cost: A start of Python, which loads the MPI library.
    """
    library_text, is_from_wheel, is_set_to_yield = _describe_library()
    shm_path, variables = Path("/dev/shm"), child_environment({})
    shm_usage = shutil.disk_usage(shm_path) if shm_path.is_dir() else None
    fabric_path = class_path / "infiniband"
    threads_text = next(
        (
            variables[library_text]
            for library_text in _THREAD_VARIABLES
            if library_text in variables
        ),
        "0",
    ).split(",")[0]
    return RankFacts(
        host=platform.node(),
        python=sys.executable,
        versions={"Python": platform.python_version(), **_find_versions()},
        library=library_text,
        wheel=is_from_wheel,
        yields=is_set_to_yield or is_yielding(),
        mask=affinity_mask(),
        cores=int(min(os.cpu_count() or 1, max(1, cpu_quota()))),
        blas=int(threads_text) if threads_text.isdigit() else 0,
        shm=(shm_usage.free, shm_usage.total) if shm_usage else (0, 0),
        opens=_can_open_memory(),
        space=get_machine_id(),
        home=os.access(Path.home(), os.W_OK),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        fabric=tuple(sorted(path.name for path in fabric_path.glob("*"))),
        rate=_read_fastest_rate(fabric_path, class_path / "net"),
        unseen=tuple(str(Path(file).parent) for file in probe_files if not Path(file).exists()),
    )


def parse_facts(output_text: str) -> tuple[tuple[RankFacts, ...], tuple[tuple[str, str], ...]]:
    """Return the facts of ranks, and host and reason of each rank that has none.

    Args:
      output_text: The output of the job; other lines are ignored.
    """
    ranks, failures = [], []
    for line in output_text.splitlines():
        if FAILURE_MARK in line:
            host, _, reason = line.partition(FAILURE_MARK)[2].partition(" ")
            failures.append((host, reason.strip()))
        elif FACTS_MARK in line:
            fields: dict[str, Any] = json.loads(line.partition(FACTS_MARK)[2])
            for name in ("shm", "fabric", "unseen"):
                fields[name] = tuple(fields[name])
            ranks.append(RankFacts(**fields))
    return tuple(ranks), tuple(failures)


if __name__ == "__main__":
    # One write: lines of several ranks must not mix.
    os.write(1, f"{FACTS_MARK}{json.dumps(collect_facts(sys.argv[1:])._asdict())}\n".encode())
