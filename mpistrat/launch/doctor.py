"""Check whether Python, MPI and the launcher fit together, here or on all nodes of an allocation.

Starts ranks as a program would be started, and reports what is wrong and the command that fixes it.
The exit code is 1 if programs would not run. Findings that only cost speed or safety are notes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import secrets
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpistrat.cluster.batch_job import asked
from mpistrat.comm.callsite import shorten
from mpistrat.config import YIELD_VARIABLE, child_environment, describe_unsupported, launched_by
from mpistrat.errors import LaunchError
from mpistrat.launch.facts import FAILED, Job, LinkFacts, RankFacts, collect, parse
from mpistrat.launch.mpi_libraries import Command, find
from mpistrat.launch.plan import LOCAL_HOST, LaunchOptions, handing_on, positive
from mpistrat.launch.process import run_job
from mpistrat.launch.run import find_allocation, plan_command, plan_note

_PATIENCE = 60.0  # seconds for a job that does next to nothing

# A process that cannot start Python says so by the shell, which every node has.
_FACTS_SCRIPT = (
    'said=$("$0" -m mpistrat.launch.facts "$@" 2>&1) && printf "%s\\n" "$said" || '
    f'printf "{FAILED}%s %s\\n" "$(uname -n)" "$(printf "%s" "$said" | tail -n 1)"'
)

# Rank 0 exchanges messages with the first rank of its host, and of another one, that there is.
_MEASURE = """
import array, json, os, platform, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
hosts = world.allgather(platform.node())

def one_way(data, partner, times):
    here = world.rank == 0
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        for send in (here, not here):
            if send:
                world.Send(data, 0 if world.rank else partner)
            else:
                world.Recv(data, 0 if world.rank else partner)
        taken.append((time.perf_counter() - begin) / 2)
    return sorted(taken)[len(taken) // 2]

told = {"size": world.size}
for name, near in (("inside", True), ("between", False)):
    partner = next((r for r in range(1, world.size) if (hosts[r] == hosts[0]) == near), None)
    if partner is not None and world.rank in (0, partner):
        small = one_way(bytearray(8), partner, 300)
        large = one_way(bytearray(2**22), partner, 12)
        told[name] = (1e6 * small, 8e-9 * 2**22 / large)
    world.Barrier()
if world.rank == 0:
    os.write(1, b"mpistrat-measured " + json.dumps(told).encode() + b"\\n")
"""


def _output(command: Command) -> tuple[str, str]:
    """Run a job; return all that it printed, and what went wrong, or an empty string."""
    with tempfile.TemporaryFile() as file:
        try:
            outcome = run_job(command, _PATIENCE, file)
        except OSError as error:
            return "", f"{command.argv[0]} cannot be started: {error.strerror}"
        file.seek(0)
        output = file.read().decode(errors="replace")
    if outcome.timed_out:
        return (
            output,
            f"The job did not end within {_PATIENCE:g} s. {output.strip()[-300:]}".strip(),
        )
    failure = f"Exit code {outcome.code}: {output.strip()[-500:]}" if outcome.code else ""
    return output, failure


def _measured(output: str) -> dict[str, Any]:
    """Return the measurements of rank 0; there are several such ranks if the job fell apart."""
    lines = [line.partition("mpistrat-measured ")[2] for line in output.splitlines()]
    measurements = [json.loads(line) for line in lines if line]
    facts: dict[str, Any] = {"sizes": tuple(measurement["size"] for measurement in measurements)}
    for name in ("inside", "between"):
        facts[name] = next(
            (LinkFacts(*measurement[name]) for measurement in measurements if name in measurement),
            None,
        )
    return facts


@contextlib.contextmanager
def _written(directories: Sequence[str]) -> Iterator[list[str]]:
    """Write an empty file into each directory for as long as the context lasts."""
    files = [
        Path(path, f".mpistrat-doctor-{secrets.token_hex(8)}").absolute() for path in directories
    ]
    try:
        for file in files:
            try:
                file.touch(exist_ok=False)
            except OSError as error:
                raise LaunchError(
                    f"{file.parent} cannot be written: {error.strerror}. Give a directory that "
                    "exists, and that you may write."
                ) from None
        yield [str(file) for file in files]
    finally:
        for file in files:
            with contextlib.suppress(OSError):  # some may not have been made
                file.unlink()


def gather(
    ranks: int | None = None, launcher: Sequence[str] = (), directories: Sequence[str] = ()
) -> Job:
    """Start ranks, and return what there is to know.

    Args:
      ranks: How many; None for those of this allocation, or 2.
      launcher: A launcher and its options, to which ``-n N`` is added; empty for the one that
        `mpistrat run` would take.
      directories: Those that all ranks should see; none for the one that this process is in, if it
        can be written.

    Raises:
      LaunchError: One of the directories cannot be written.

    Cost: Two jobs, a few seconds.
    """
    place = find_allocation()
    count = ranks or max(sum(place.tasks), 2)
    facts: dict[str, Any] = {"kills": _kills(launcher)}
    with contextlib.suppress(OSError):
        facts["slurm"] = asked(["scontrol", "show", "config"]) if place is not LOCAL_HOST else ""
    outer_launcher = launched_by()
    if outer_launcher is not None:
        return Job(1, ranks=(collect(),), within=outer_launcher, **facts)

    start = Command((*launcher, "-n", str(count)), {})
    try:
        if not launcher:
            start, flag = plan_command(place, LaunchOptions(ranks=count), (), {})
            start = handing_on(start, flag, start.environment())
            by_srun = start.argv[0] == "srun"
            facts["mismatch"] = "" if by_srun else plan_note(*find())
    except LaunchError as error:
        return Job(count, mismatch=str(error), **facts)

    def command(program: Sequence[str]) -> Command:
        return start._replace(argv=(*start.argv, *program))

    default_directories = [str(Path.cwd())] if os.access(Path.cwd(), os.W_OK) else []
    with _written(directories or default_directories) as files:
        facts_command = command(["sh", "-c", _FACTS_SCRIPT, sys.executable, *files])
        output, trouble = _output(facts_command)
    rank_facts, failed = parse(output)
    facts["directories"] = tuple(str(Path(file).parent) for file in files)
    facts |= {"command": str(command(["python"])), "ranks": rank_facts, "failed": failed}
    if len(rank_facts) == count:
        output, trouble = _output(command([sys.executable, "-c", _MEASURE]))
        facts |= _measured(output)
    return Job(count, trouble=trouble, **facts)


def _kills(launcher: Sequence[str]) -> bool:
    """Tell whether a rank that dies ends the job: by its options, or as all launchers but srun."""
    if not launcher or Path(launcher[0]).name != "srun":
        return True
    has_kill_option = any(word.startswith(("-K", "--kill-on-bad-exit")) for word in launcher)
    return has_kill_option or child_environment({}).get("SLURM_KILL_BAD_EXIT") == "1"


OK, NOTE, FAILED_CHECK = "ok", "note", "BAD"
_MIB = 2**20
_SMALL = 64 * _MIB  # what container engines give by default; MPI's own buffers for 8 ranks fill it
_FILES = 1024  # a rank opens a handful for each neighbour on its node
_MAX_NAMED = 8  # hosts and values that a text names; --json has all
_SLOW = 0.4  # of the rate that the system tells; what is below it has another cause than protocols

_OTHER_LAUNCHER_TEXT = (
    "if the launcher speaks to another MPI than mpi4py loads: under Slurm `srun --mpi=pmi2` for "
    "MPICH, `--mpi=pmix` for Open MPI (`srun --mpi=list`); else the mpiexec of the library, which "
    "`mpistrat run` finds"
)


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
      name: What was checked.
      text: What was found.
      level: `OK`; `NOTE` if jobs run, but slower or less safely; `BAD` if they do not run.
      fix: The line that fixes it, or an empty string.
    """

    name: str
    text: str
    level: str = OK
    mend: str = ""


def _list_distinct(values: Sequence[str], separator: str = ", ") -> str:
    """Return the values that differ, each once, for a message; the first few of many."""
    return separator.join(shorten(list(dict.fromkeys(values)), _MAX_NAMED))


def _hosts_text(ranks: Sequence[RankFacts]) -> str:
    return f"on {_list_distinct([rank.host for rank in ranks])}"


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
        look = "srun -N 1 -w" if job.slurm else "ssh"
        return Finding(
            name, text, FAILED_CHECK, f"{mend}; `{look} {job.failed[0][0]} ls DIR` looks"
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


def _versions(job: Job) -> Finding:
    name = "versions"
    first = job.ranks[0].versions
    differ = [
        f"{package} is "
        + _list_distinct([rank.versions.get(package, "missing") for rank in job.ranks])
        for package in dict.fromkeys(
            package_name for rank in job.ranks for package_name in rank.versions
        )
        if len({rank.versions.get(package) for rank in job.ranks}) > 1
    ]
    if differ:
        hosts = [f"{host}: {ranks[0].python}" for host, ranks in job.hosts.items()]
        hosts_text = _list_distinct(hosts, "; ")
        mend = f"start all ranks with one Python, by its full path, {job.ranks[0].python}"
        return Finding(name, f"{'; '.join(differ)} ({hosts_text})", FAILED_CHECK, mend)
    broken = [
        package_name for package_name, version in first.items() if version.startswith("cannot")
    ]
    missing = [*sorted({"numpy", "mpi4py", "optree"} - first.keys()), *broken]
    text = ", ".join(f"{package_name} {version}" for package_name, version in first.items())
    if missing:
        mend = f"pip install --force-reinstall {' '.join(missing)}"
        return Finding(name, f"{text}; missing or broken: {', '.join(missing)}", FAILED_CHECK, mend)
    if "numba" not in first:
        return Finding(name, f"{text}; no numba", NOTE, "pip install numba: kernels are compiled")
    return Finding(name, text)


def _library(job: Job) -> Finding:
    name = "MPI library"
    libraries = [rank.library for rank in job.ranks]
    if len(set(libraries)) > 1 or libraries[0].startswith("none"):
        mend = "load the same MPI module on all nodes, or set MPI4PY_LIBMPI for all ranks"
        return Finding(name, _list_distinct(libraries), FAILED_CHECK, mend)
    return Finding(name, libraries[0])


def _fabric(job: Job) -> Finding:
    name = "network"
    slow = [rank for rank in job.ranks if rank.fabric and rank.wheel]
    if slow:
        fabric = f"{_list_distinct(slow[0].fabric)} {_hosts_text(slow)}"
        text = f"{fabric} is not used: MPI is in the Python environment"
        mend = "module load the site's MPI, then export MPI4PY_LIBMPI=/path/to/its/libmpi.so"
        return Finding(name, text, NOTE, mend)
    fabric = _list_distinct([device for rank in job.ranks for device in rank.fabric])
    return Finding(name, fabric or "no InfiniBand or Omni-Path devices")


def _binding(job: Job) -> Finding:
    name = "cores"
    for host, ranks in job.hosts.items():
        union = 0
        for rank in ranks:
            union |= rank.mask
        usable, count = bin(union).count("1"), len(ranks)
        if usable == 1 < min(count, ranks[0].cores):
            text = f"all {count} ranks on {host} are on one core of {ranks[0].cores}"
            return Finding(name, text, NOTE, "srun --cpu-bind=cores, or mpiexec --bind-to none")
        if count > min(usable, ranks[0].cores):
            text = f"{count} ranks on {host} share {min(usable, ranks[0].cores)} cores"
            return Finding(name, text, NOTE, f"start at most {usable} ranks on each node")
        threads = ranks[0].blas
        if threads * count > usable:
            text = f"{count} ranks x {threads} BLAS threads on {usable} cores of {host}"
            mend = f"export OMP_NUM_THREADS={max(1, usable // count)}, as `mpistrat run` does"
            return Finding(name, text, NOTE, mend)
    core_counts = _list_distinct([str(bin(rank.mask).count("1")) for rank in job.ranks])
    return Finding(name, f"{core_counts} for each rank")


def _shared_memory(job: Job) -> Finding:
    smallest_rank = min(job.ranks, key=lambda rank: rank.shm[1])
    free, total = (size // _MIB for size in smallest_rank.shm)
    text = f"{free} MiB free of {total} MiB {_hosts_text([smallest_rank])}"
    mend = "start the container with --shm-size=8g (docker), or bind the host's /dev/shm into it"
    if smallest_rank.shm[1] <= _SMALL:
        return Finding("/dev/shm", f"{text}; MPI's own buffers fill it", NOTE, mend)
    if not smallest_rank.shm[0]:
        return Finding(
            "/dev/shm", text, FAILED_CHECK, "rm what others left: find /dev/shm -user $USER -ls"
        )
    return Finding("/dev/shm", text)


def _opens(job: Job) -> Finding:
    separated_ranks = [r for r in job.ranks if len({n.space for n in job.hosts[r.host]}) > 1]
    closed = [rank for rank in job.ranks if not rank.opens or rank in separated_ranks]
    if closed:
        hosts = _hosts_text(closed)
        text = f"/proc/PID/fd cannot be opened {hosts}: arrays go through MPI, not in place"
        mend = "start all ranks of a node in one container, not one container for each"
        return Finding("memory", text, NOTE, mend)
    return Finding("memory", "ranks of a node can share it")


def _home(job: Job) -> Finding:
    closed = [rank for rank in job.ranks if not rank.home]
    if closed:
        mend = "`mpistrat warm` by who installed mpistrat, or export NUMBA_CACHE_DIR=DIR"
        hosts = _hosts_text(closed)
        text = f"cannot be written {hosts}: kernels are compiled once for each node and job"
        return Finding("home", text, NOTE, mend)
    return Finding("home", "can be written")


def _files(job: Job) -> Finding:
    tightest_rank = min(job.ranks, key=lambda rank: rank.files if rank.files >= 0 else 2**62)
    if 0 <= tightest_rank.files < _FILES:
        text = f"a rank may open only {tightest_rank.files} {_hosts_text([tightest_rank])}"
        return Finding("open files", text, NOTE, "ulimit -n 65536, or DefaultLimitNOFILE of slurmd")
    return Finding(
        "open files", "without limit" if tightest_rank.files < 0 else f"up to {tightest_rank.files}"
    )


def _directories(job: Job) -> Finding:
    unseen = [(rank, path) for rank in job.ranks for path in rank.unseen]
    if unseen:
        rank, path = unseen[0]
        text = f"{path} is not the same directory on {rank.host}: records and checkpoints get lost"
        return Finding(
            "directories", text, FAILED_CHECK, "give a directory on the shared file system"
        )
    return Finding("directories", f"{', '.join(job.directories) or 'none'}: seen by all ranks")


def _examine_ends(job: Job) -> Finding:
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


def _words(link: LinkFacts) -> str:
    return f"{link.latency:.1f} us, {link.bandwidth:.2f} Gbit/s"


def _unmeasured(job: Job, reason: str) -> str:
    is_single_job = set(job.sizes) == {job.wanted}
    return f"not measured: {reason if is_single_job else 'the ranks have not found each other'}"


def _examine_node_link(job: Job) -> Finding:
    if job.inside is None:
        return Finding("inside a node", _unmeasured(job, "no two ranks were on one"))
    return Finding("inside a node", _words(job.inside))


def _examine_network(job: Job) -> Finding:
    name = "between nodes"
    if job.between is None:
        return Finding(name, _unmeasured(job, "all ranks were on one"))
    rate = min(rank.rate for rank in job.ranks)
    text = _words(job.between) + (f" of {rate:g} that /sys tells" if rate else "")
    if job.between.bandwidth < _SLOW * rate:
        mend = (
            "use the site's MPI (MPI4PY_LIBMPI), or name the device: UCX_NET_DEVICES, FI_PROVIDER"
        )
        return Finding(name, text, NOTE, mend)
    return Finding(name, text)


# Those below `_ranks` ask what ranks have told, and are left out if none has.
CHECKS: tuple[Callable[[Job], Finding], ...] = (
    *(_examine_system, _examine_launcher, _examine_start, _examine_ranks),
    *(_versions, _library, _fabric, _binding, _shared_memory, _opens, _home, _files),
    *(_directories, _examine_ends, _examine_overlap, _examine_node_link, _examine_network),
)
_ALWAYS = (_examine_system, _examine_launcher, _examine_start, _examine_ranks, _examine_ends)


def examine(job: Job) -> Iterator[Finding]:
    """Yield what each check finds in what is known of a job; pure."""
    for check in CHECKS:
        if job.ranks or check in _ALWAYS:
            yield check(job)


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    text = "number of ranks; default: that of the allocation, or 2"
    add("-n", dest="ranks", metavar="N", type=positive, help=text)
    text = "a launcher and its options, as 'srun -K1 --mpi=pmix'; else that of `mpistrat run`"
    add("--launcher", metavar="WORDS", type=shlex.split, default=[], help=text)
    text = "a directory for checkpoints: check that every node sees it"
    add("directories", metavar="DIRECTORY", nargs="*", help=text)
    add("--json", action="store_true", help="print the full report as JSON")


def main(args: argparse.Namespace) -> int:
    """Print what was found."""
    job = gather(args.ranks, args.launcher, args.directories)
    findings = list(examine(job))
    if args.json:
        import json

        report = job._asdict() | {"ranks": [rank._asdict() for rank in job.ranks]}
        report["findings"] = [finding._asdict() for finding in findings]
        print(json.dumps(report, indent=1))
    else:
        for finding in findings:
            print(f"{finding.level:<5}{finding.name + ':':<19}{finding.text}")
            if finding.mend:
                print(f"{'':24}-> {finding.mend}")
    return int(any(finding.level == FAILED_CHECK for finding in findings))
