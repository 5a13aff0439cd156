"""The checks of `mpistrat doctor`: each reads the facts of a job and returns a line of the report.

Nothing is started here; `mpistrat.launch.doctor` gathers the facts and prints the findings.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mpistrat.comm.callsite import shorten
from mpistrat.config import YIELD_VARIABLE, describe_unsupported
from mpistrat.launch.facts import Job, LinkFacts, RankFacts

OK, NOTE, FAILED_CHECK = "ok", "note", "BAD"
_MIB = 2**20
# Container engines give so much by default; MPI's own buffers for 8 ranks fill it.
_SMALL_SHM_NBYTES = 64 * _MIB
_MIN_OPEN_FILES = 1024  # a rank opens a handful for each neighbour on its node
_MAX_NAMED = 8  # hosts and values that a text names; --json has all
_SLOW_FRACTION = 0.4  # of the rate in /sys; a slower network has another cause than protocols

_OTHER_LAUNCHER_TEXT = (
    "if the launcher speaks to another MPI than mpi4py loads: under Slurm `srun --mpi=pmi2` for "
    "MPICH, `--mpi=pmix` for Open MPI (`srun --mpi=list`); else the mpiexec of the library, which "
    "`mpistrat run` finds"
)


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
      name: What was checked.
      text: The finding.
      level: `OK`; `NOTE` if jobs run, but slower or less safely; `FAILED_CHECK` if they do not run.
      mend: The line that fixes it, or an empty string.
    """

    name: str
    text: str
    level: str = OK
    mend: str = ""


def _list_distinct(texts: Sequence[str], separator: str = ", ") -> str:
    """Return the values that differ, each once, for a message; the first few of many."""
    return separator.join(shorten(list(dict.fromkeys(texts)), _MAX_NAMED))


def _format_hosts(rank_facts: Sequence[RankFacts]) -> str:
    return f"on {_list_distinct([rank.host for rank in rank_facts])}"


def _examine_system(job: Job) -> Finding:
    complaint = describe_unsupported()
    text = f"{platform.system()} on {platform.machine()}"
    return Finding(
        "system", f"{text}. {complaint}" if complaint else text, FAILED_CHECK if complaint else OK
    )


def _examine_launcher(job: Job) -> Finding:
    if job.mismatch:
        mend = "module load the MPI that mpi4py loads, or set MPI4PY_LIBMPI to its libmpi.so"
        return Finding("launcher", job.mismatch, NOTE if job.ranks else FAILED_CHECK, mend)
    if job.within:
        text = f"none was tried: this process is a rank itself, started by {job.within}"
        return Finding("launcher", text)
    return Finding("launcher", job.command)


def _examine_start(job: Job) -> Finding:
    name = "start"
    if job.failed:
        hosts_text = _list_distinct([host for host, _ in job.failed])
        text = f"Python or mpistrat cannot be started on {hosts_text}: {job.failed[0][1]}"
        mend = "install into a directory that all nodes see, or load the same modules on all"
        look_command = "srun -N 1 -w" if job.slurm else "ssh"
        return Finding(
            name, text, FAILED_CHECK, f"{mend}; `{look_command} {job.failed[0][0]} ls DIR` looks"
        )
    if len(job.ranks) != job.wanted:
        text = f"{job.wanted} ranks were expected, {len(job.ranks)} came. {job.trouble}".strip()
        return Finding(
            name, text, FAILED_CHECK, "run the line of `launcher` above by hand, and see it fail"
        )
    hosts = [f"{len(ranks)} on {host}" for host, ranks in job.hosts.items()]
    return Finding(name, f"{job.wanted} ranks: {_list_distinct(hosts)}")


def _examine_ranks(job: Job) -> Finding:
    name = "ranks"
    if job.sizes and set(job.sizes) == {job.wanted}:
        return Finding(name, "found each other by MPI")
    if job.within:
        return Finding(name, "not tried; `mpistrat doctor` in the shell of the allocation does")
    if len(job.sizes) > 1:
        text = (
            f"{len(job.sizes)} jobs of {_list_distinct(list(map(str, job.sizes)))} instead of one"
        )
        return Finding(name, text, FAILED_CHECK, _OTHER_LAUNCHER_TEXT)
    return Finding(
        name, job.trouble or "MPI could not be started", FAILED_CHECK, _OTHER_LAUNCHER_TEXT
    )


def _examine_versions(job: Job) -> Finding:
    name = "versions"
    first_versions = job.ranks[0].versions
    differences = [
        f"{package} is "
        + _list_distinct([rank.versions.get(package, "missing") for rank in job.ranks])
        for package in dict.fromkeys(
            package_name for rank in job.ranks for package_name in rank.versions
        )
        if len({rank.versions.get(package) for rank in job.ranks}) > 1
    ]
    if differences:
        hosts = [f"{host}: {ranks[0].python}" for host, ranks in job.hosts.items()]
        hosts_text = _list_distinct(hosts, "; ")
        mend = f"start all ranks with one Python, by its full path, {job.ranks[0].python}"
        return Finding(name, f"{'; '.join(differences)} ({hosts_text})", FAILED_CHECK, mend)
    broken_names = [
        package_name
        for package_name, version in first_versions.items()
        if version.startswith("cannot")
    ]
    missing_names = [*sorted({"numpy", "mpi4py", "optree"} - first_versions.keys()), *broken_names]
    text = ", ".join(
        f"{package_name} {version}" for package_name, version in first_versions.items()
    )
    if missing_names:
        mend = f"pip install --force-reinstall {' '.join(missing_names)}"
        return Finding(
            name, f"{text}; missing or broken: {', '.join(missing_names)}", FAILED_CHECK, mend
        )
    if "numba" not in first_versions:
        return Finding(name, f"{text}; no numba", NOTE, "pip install numba: kernels are compiled")
    return Finding(name, text)


def _examine_library(job: Job) -> Finding:
    name = "MPI library"
    libraries = [rank.library for rank in job.ranks]
    if len(set(libraries)) > 1 or libraries[0].startswith("none"):
        mend = "load the same MPI module on all nodes, or set MPI4PY_LIBMPI for all ranks"
        return Finding(name, _list_distinct(libraries), FAILED_CHECK, mend)
    return Finding(name, libraries[0])


def _examine_fabric(job: Job) -> Finding:
    name = "network"
    slow_ranks = [rank for rank in job.ranks if rank.fabric and rank.wheel]
    if slow_ranks:
        fabric = f"{_list_distinct(slow_ranks[0].fabric)} {_format_hosts(slow_ranks)}"
        text = f"{fabric} is not used: MPI is in the Python environment"
        mend = "module load the site's MPI, then export MPI4PY_LIBMPI=/path/to/its/libmpi.so"
        return Finding(name, text, NOTE, mend)
    fabric = _list_distinct([device for rank in job.ranks for device in rank.fabric])
    return Finding(name, fabric or "no InfiniBand or Omni-Path devices")


def _examine_binding(job: Job) -> Finding:
    name = "cores"
    for host, ranks in job.hosts.items():
        host_mask = 0
        for rank in ranks:
            host_mask |= rank.mask
        usable_count, rank_count = bin(host_mask).count("1"), len(ranks)
        if usable_count == 1 < min(rank_count, ranks[0].cores):
            text = f"all {rank_count} ranks on {host} are on one core of {ranks[0].cores}"
            return Finding(name, text, NOTE, "srun --cpu-bind=cores, or mpiexec --bind-to none")
        if rank_count > min(usable_count, ranks[0].cores):
            text = f"{rank_count} ranks on {host} share {min(usable_count, ranks[0].cores)} cores"
            return Finding(name, text, NOTE, f"start at most {usable_count} ranks on each node")
        thread_count = ranks[0].blas
        if thread_count * rank_count > usable_count:
            threads_text = f"{rank_count} ranks x {thread_count} BLAS threads"
            text = f"{threads_text} on {usable_count} cores of {host}"
            right_count = max(1, usable_count // rank_count)
            mend = f"export OMP_NUM_THREADS={right_count}, as `mpistrat run` does"
            return Finding(name, text, NOTE, mend)
    core_counts = _list_distinct([str(bin(rank.mask).count("1")) for rank in job.ranks])
    return Finding(name, f"{core_counts} for each rank")


def _examine_shared_memory(job: Job) -> Finding:
    smallest_rank = min(job.ranks, key=lambda rank: rank.shm[1])
    free, total = (size // _MIB for size in smallest_rank.shm)
    text = f"{free} MiB free of {total} MiB {_format_hosts([smallest_rank])}"
    mend = "start the container with --shm-size=8g (docker), or bind the host's /dev/shm into it"
    if smallest_rank.shm[1] <= _SMALL_SHM_NBYTES:
        return Finding("/dev/shm", f"{text}; MPI's own buffers fill it", NOTE, mend)
    if not smallest_rank.shm[0]:
        return Finding(
            "/dev/shm", text, FAILED_CHECK, "rm what others left: find /dev/shm -user $USER -ls"
        )
    return Finding("/dev/shm", text)


def _examine_memory_access(job: Job) -> Finding:
    separated_ranks = [r for r in job.ranks if len({n.space for n in job.hosts[r.host]}) > 1]
    closed_ranks = [rank for rank in job.ranks if not rank.opens or rank in separated_ranks]
    if closed_ranks:
        hosts = _format_hosts(closed_ranks)
        text = f"/proc/PID/fd cannot be opened {hosts}: arrays go through MPI, not in place"
        mend = "start all ranks of a node in one container, not one container for each"
        return Finding("memory", text, NOTE, mend)
    return Finding("memory", "ranks of a node can share it")


def _examine_home(job: Job) -> Finding:
    closed_ranks = [rank for rank in job.ranks if not rank.home]
    if closed_ranks:
        mend = "`mpistrat warm` by who installed mpistrat, or export NUMBA_CACHE_DIR=DIR"
        hosts = _format_hosts(closed_ranks)
        text = f"cannot be written {hosts}: kernels are compiled once for each node and job"
        return Finding("home", text, NOTE, mend)
    return Finding("home", "can be written")


def _examine_open_files(job: Job) -> Finding:
    tightest_rank = min(job.ranks, key=lambda rank: rank.files if rank.files >= 0 else 2**62)
    if 0 <= tightest_rank.files < _MIN_OPEN_FILES:
        text = f"a rank may open only {tightest_rank.files} {_format_hosts([tightest_rank])}"
        return Finding("open files", text, NOTE, "ulimit -n 65536, or DefaultLimitNOFILE of slurmd")
    return Finding(
        "open files", "without limit" if tightest_rank.files < 0 else f"up to {tightest_rank.files}"
    )


def _examine_directories(job: Job) -> Finding:
    unseen_directories = [(rank, path) for rank in job.ranks for path in rank.unseen]
    if unseen_directories:
        rank, path = unseen_directories[0]
        text = f"{path} is not the same directory on {rank.host}: records and checkpoints get lost"
        return Finding(
            "directories", text, FAILED_CHECK, "give a directory on the shared file system"
        )
    return Finding("directories", f"{', '.join(job.directories) or 'none'}: seen by all ranks")


def _examine_failure(job: Job) -> Finding:
    name = "a rank that dies"
    kills_are_off = re.search(r"^KillOnBadExit\s*=\s*0", job.slurm, re.MULTILINE)
    if kills_are_off and not job.kills:
        text = "does not end the job: KillOnBadExit is 0, and the others wait until its time is up"
        return Finding(name, text, FAILED_CHECK, "srun -K1, or export SLURM_KILL_BAD_EXIT=1")
    return Finding(name, "ends the job")


def _examine_overlap(job: Job) -> Finding:
    name = "overlap"
    if not all(rank.yields for rank in job.ranks):
        text = "all_reduce_start does not overlap with computation: Open MPI keeps its core"
        return Finding(name, text, NOTE, f"export {YIELD_VARIABLE}=1, as `mpistrat run` does")
    return Finding(name, "all_reduce_start overlaps with computation, between nodes")


def _format_link(link: LinkFacts) -> str:
    return f"{link.latency:.1f} us, {link.bandwidth:.2f} Gbit/s"


def _explain_unmeasured(job: Job, reason: str) -> str:
    is_single_job = set(job.sizes) == {job.wanted}
    return f"not measured: {reason if is_single_job else 'the ranks have not found each other'}"


def _examine_node_link(job: Job) -> Finding:
    if job.inside is None:
        return Finding("inside a node", _explain_unmeasured(job, "no two ranks were on one"))
    return Finding("inside a node", _format_link(job.inside))


def _examine_network(job: Job) -> Finding:
    name = "between nodes"
    if job.between is None:
        return Finding(name, _explain_unmeasured(job, "all ranks were on one"))
    rate = min(rank.rate for rank in job.ranks)
    text = _format_link(job.between) + (f" of {rate:g} that /sys tells" if rate else "")
    if job.between.bandwidth < _SLOW_FRACTION * rate:
        mend = (
            "use the site's MPI (MPI4PY_LIBMPI), or name the device: UCX_NET_DEVICES, FI_PROVIDER"
        )
        return Finding(name, text, NOTE, mend)
    return Finding(name, text)


# All but those of `_CHECKS_WITHOUT_RANKS` read the facts of ranks, and need some.
CHECKS: tuple[Callable[[Job], Finding], ...] = (
    *(_examine_system, _examine_launcher, _examine_start, _examine_ranks),
    *(
        _examine_versions,
        _examine_library,
        _examine_fabric,
        _examine_binding,
        _examine_shared_memory,
        _examine_memory_access,
        _examine_home,
        _examine_open_files,
    ),
    *(
        _examine_directories,
        _examine_failure,
        _examine_overlap,
        _examine_node_link,
        _examine_network,
    ),
)
_CHECKS_WITHOUT_RANKS = (
    _examine_system,
    _examine_launcher,
    _examine_start,
    _examine_ranks,
    _examine_failure,
)


def examine(job: Job) -> Iterator[Finding]:
    """Yield the finding of each check for a job; nothing is started."""
    for check in CHECKS:
        if job.ranks or check in _CHECKS_WITHOUT_RANKS:
            yield check(job)
