"""The data of `mpistrat doctor`: facts reported by ranks, and measurements.

`python -m mpistrat.launch.facts DIRECTORY ...` is what each rank runs; it prints one line and does
not start MPI, so one rank that cannot does not keep the others waiting.
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
from mpistrat.launch.mpi_libraries import library
from mpistrat.watchdog.processes import machine

MARK = "mpistrat-doctor "  # begins the line of a rank
FAILED = "mpistrat-doctor-failed "  # begins the line of a process that could not tell
_PACKAGES = ("mpistrat", "numpy", "numba", "mpi4py", "optree")
_BLAS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


class RankFacts(NamedTuple):
    """What one rank tells of itself and of its host.

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
      blas: BLAS threads that the environment asks for; 0 if it does not say.
      shm: Free and total bytes of ``/dev/shm``; (0, 0) if there is none.
      opens: Whether memory of other processes can be opened by ``/proc/PID/fd``.
      space: Its boot and namespace of process numbers; another one is another container.
      home: Whether the home directory can be written.
      files: How many files it may open.
      fabric: Devices in ``/sys/class/infiniband``.
      rate: The fastest network device's rate that ``/sys`` tells, Gbit/s; 0 if it does not.
      unseen: Directories in which it does not see what was written before it was started.
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
    """All that is known; each part may be missing, if what tells it has failed.

    Attributes:
      wanted: How many ranks were asked for.
      command: The call that started them, or an empty string.
      mismatch: Why no launcher fits, or what may not fit; an empty string if all is well.
      ranks: What the processes told.
      failed: Host and last line of each process that could not tell anything.
      sizes: How many ranks there are, as each job that was found told.
      trouble: Why the ranks could not be started or measured, or an empty string.
      inside: Between two ranks of one host.
      between: Between two hosts.
      slurm: What ``scontrol show config`` prints, in an allocation; else an empty string.
      within: What has started this process as a rank, so that it starts none; or an empty string.
      directories: Those that ranks were asked to see.
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


def _versions() -> dict[str, str]:
    """Return versions of packages, of which each is imported: a broken one is installed, too."""
    versions = find_versions(_PACKAGES)
    for name in ("numpy", "numba", "optree"):
        try:
            if name in versions:
                importlib.import_module(name)
        except Exception as error:  # whatever a broken package raises
            versions[name] = f"cannot be imported ({type(error).__name__}: {error})"
    return versions


def _library() -> tuple[str, bool, bool]:
    """Return the library in words, whether it is a wheel's, and whether it yields unasked."""
    try:
        loaded = library()
    except LaunchError as error:
        return f"none: {str(error).splitlines()[0]}", False, True
    wheel = Path(sys.prefix) in Path(loaded.file or "/").parents
    return str(loaded), wheel, not loaded.flavour.unless_set


def _opens() -> bool:
    """Try on a child what ranks do with one another's memory."""
    waits, ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        os.read(waits, 1)
        os._exit(0)
    try:
        os.close(os.open(f"/proc/{child}/fd/{waits}", os.O_RDONLY))
        return True
    except OSError:
        return False
    finally:
        os.close(ends)
        os.close(waits)
        os.kill(child, signal.SIGKILL)  # it may wait for what another thread held when it was made
        os.waitpid(child, 0)


def _rate(fabric: Path, network: Path) -> float:
    """Return the fastest device's rate, Gbit/s."""
    rates = [0.0]
    for file in fabric.glob("*/ports/*/rate"):  # "100 Gb/sec (4X EDR)"
        rates += _number(file, 1.0)
    for file in network.glob("*/speed"):  # Mbit/s; -1 or an error where there is none
        rates += _number(file, 1e-3)
    return max(rates)


def _number(file: Path, unit: float) -> list[float]:
    try:
        return [float(file.read_text(encoding="utf-8").split()[0]) * unit]
    except (OSError, ValueError, IndexError):
        return []


def collect(directories: Sequence[str] = (), system: Path = Path("/sys/class")) -> RankFacts:
    """Return the facts of this process.

    Args:
      directories: Files that were written before; in whose directories, is asked.
      system: Where the kernel lists devices.

    Cost: A start of Python, which loads the MPI library.
    """
    name, wheel, is_set_to_yield = _library()
    shm, env = Path("/dev/shm"), child_environment({})
    usage = shutil.disk_usage(shm) if shm.is_dir() else None
    fabric = system / "infiniband"
    threads = next((env[name] for name in _BLAS if name in env), "0").split(",")[0]
    return RankFacts(
        host=platform.node(),
        python=sys.executable,
        versions={"Python": platform.python_version(), **_versions()},
        library=name,
        wheel=wheel,
        yields=is_set_to_yield or is_yielding(),
        mask=affinity_mask(),
        cores=int(min(os.cpu_count() or 1, max(1, cpu_quota()))),
        blas=int(threads) if threads.isdigit() else 0,
        shm=(usage.free, usage.total) if usage else (0, 0),
        opens=_opens(),
        space=machine(),
        home=os.access(Path.home(), os.W_OK),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        fabric=tuple(sorted(path.name for path in fabric.glob("*"))),
        rate=_rate(fabric, system / "net"),
        unseen=tuple(str(Path(file).parent) for file in directories if not Path(file).exists()),
    )


def parse(output: str) -> tuple[tuple[RankFacts, ...], tuple[tuple[str, str], ...]]:
    """Return the facts of ranks, and host and reason of each rank that has none.

    Args:
      output: What they printed; other lines are left alone.
    """
    ranks, failed = [], []
    for line in output.splitlines():
        if FAILED in line:
            host, _, reason = line.partition(FAILED)[2].partition(" ")
            failed.append((host, reason.strip()))
        elif MARK in line:
            fields: dict[str, Any] = json.loads(line.partition(MARK)[2])
            for name in ("shm", "fabric", "unseen"):
                fields[name] = tuple(fields[name])
            ranks.append(RankFacts(**fields))
    return tuple(ranks), tuple(failed)


if __name__ == "__main__":
    # One write: lines of several ranks must not mix.
    os.write(1, f"{MARK}{json.dumps(collect(sys.argv[1:])._asdict())}\n".encode())
