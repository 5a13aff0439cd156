"""Check whether Python, MPI and the launcher fit together, here or on all nodes of an allocation.

Starts ranks as a program would be started, and reports what is wrong and the command that fixes it.
The exit code is 1 if programs would not run. Findings that only cost speed or safety are notes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpistrat.cluster.allocation import Allocation
from mpistrat.cluster.batch_job import read_command_output
from mpistrat.config import child_environment, launched_by
from mpistrat.errors import LaunchError
from mpistrat.launch.arguments import parse_positive
from mpistrat.launch.doctor_checks import FAILED_CHECK, examine
from mpistrat.launch.facts import (
    FAILURE_MARK,
    Job,
    LinkFacts,
    collect_facts,
    parse_facts,
)
from mpistrat.launch.mpi_libraries import Command, find_launcher
from mpistrat.launch.plan import LOCAL_HOST, LaunchOptions, forward_variables
from mpistrat.launch.process import run_job
from mpistrat.launch.run import choose_hosts, describe_mismatch, plan_command

_JOB_SECONDS = 60.0  # seconds for a job that does next to nothing

# A process that cannot start Python reports this by the shell, which every node has.
_FACTS_SCRIPT = (
    'output=$("$0" -m mpistrat.launch.facts "$@" 2>&1) && printf "%s\\n" "$output" || '
    f'printf "{FAILURE_MARK}%s %s\\n" "$(uname -n)" "$(printf "%s" "$output" | tail -n 1)"'
)

# Rank 0 exchanges messages with the first other rank of its host, and with that of another host.
_MEASURE_PROGRAM = """
import array, json, os, platform, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
hosts = world.allgather(platform.node())

def measure_one_way(buffer, partner, repeats):
    is_first = world.rank == 0
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for is_sender in (is_first, not is_first):
            if is_sender:
                world.Send(buffer, 0 if world.rank else partner)
            else:
                world.Recv(buffer, 0 if world.rank else partner)
        seconds.append((time.perf_counter() - begin) / 2)
    return sorted(seconds)[len(seconds) // 2]

report = {"size": world.size}
for name, same in (("inside", True), ("between", False)):
    partner = next((r for r in range(1, world.size) if (hosts[r] == hosts[0]) == same), None)
    if partner is not None and world.rank in (0, partner):
        small = measure_one_way(bytearray(8), partner, 300)
        large = measure_one_way(bytearray(2**22), partner, 12)
        report[name] = (1e6 * small, 8e-9 * 2**22 / large)
    world.Barrier()
if world.rank == 0:
    os.write(1, b"mpistrat-measured " + json.dumps(report).encode() + b"\\n")
"""


def _run_and_capture(command: Command) -> tuple[str, str]:
    """Run a job; return its output, and the reason of a failure, or an empty string."""
    with tempfile.TemporaryFile() as file:
        try:
            outcome = run_job(command, _JOB_SECONDS, file)
        except OSError as error:
            return "", f"{command.argv[0]} cannot be started: {error.strerror}"
        file.seek(0)
        output = file.read().decode(errors="replace")
    if outcome.has_timed_out:
        return (
            output,
            f"The job did not end within {_JOB_SECONDS:g} s. {output.strip()[-300:]}".strip(),
        )
    failure = f"Exit code {outcome.code}: {output.strip()[-500:]}" if outcome.code else ""
    return output, failure


def _parse_measurements(output_text: str) -> dict[str, Any]:
    """Return the measurements as fields of `Job`; a job that fell apart has several ranks 0."""
    lines = [line.partition("mpistrat-measured ")[2] for line in output_text.splitlines()]
    measurements = [json.loads(line) for line in lines if line]
    job_fields: dict[str, Any] = {
        "sizes": tuple(measurement["size"] for measurement in measurements)
    }
    for name in ("inside", "between"):
        job_fields[name] = next(
            (LinkFacts(*measurement[name]) for measurement in measurements if name in measurement),
            None,
        )
    return job_fields


@contextlib.contextmanager
def _writing_probe_files(directories: Sequence[str]) -> Iterator[list[str]]:
    """Write an empty file into each directory for as long as the context lasts; yield the files."""
    probe_files = [
        Path(path, f".mpistrat-doctor-{secrets.token_hex(8)}").absolute() for path in directories
    ]
    try:
        for probe_file in probe_files:
            try:
                probe_file.touch(exist_ok=False)
            except OSError as error:
                raise LaunchError(
                    f"{probe_file.parent} cannot be written: {error.strerror}. Give a directory "
                    "that exists, and that you may write."
                ) from None
        yield [str(probe_file) for probe_file in probe_files]
    finally:
        for probe_file in probe_files:
            with contextlib.suppress(OSError):  # some may not have been made
                probe_file.unlink()


def gather_facts(
    requested_count: int | None = None,
    launcher_words: Sequence[str] = (),
    directories: Sequence[str] = (),
) -> Job:
    """Start ranks, and return the facts of the job.

    Args:
      requested_count: The number of ranks; None for those of this allocation, or 2.
      launcher_words: A launcher and its options, to which ``-n N`` is added; empty for the launcher
        that `mpistrat run` would take.
      directories: Directories that all ranks should see; empty for the current one, if it can be
        written.

    Raises:
      LaunchError: One of the directories cannot be written.

    Cost: Two jobs, a few seconds.
    """
    allocation = choose_hosts()
    rank_count = requested_count or max(sum(allocation.task_counts), 2)
    job_fields: dict[str, Any] = {"kills": _is_failure_fatal(launcher_words)}
    if allocation is not LOCAL_HOST:
        with contextlib.suppress(OSError):
            job_fields["slurm"] = read_command_output(["scontrol", "show", "config"])
    outer_launcher = launched_by()
    if outer_launcher is not None:
        return Job(1, ranks=(collect_facts(),), within=outer_launcher, **job_fields)

    start_command = Command((*launcher_words, "-n", str(rank_count)), {})
    try:
        if not launcher_words:
            start_command = _plan_start(allocation, rank_count)
            is_srun = start_command.argv[0] == "srun"
            job_fields["mismatch"] = "" if is_srun else describe_mismatch(*find_launcher())
    except LaunchError as error:
        return Job(rank_count, mismatch=str(error), **job_fields)

    def extend_command(program: Sequence[str]) -> Command:
        return start_command._replace(argv=(*start_command.argv, *program))

    default_directories = [str(Path.cwd())] if os.access(Path.cwd(), os.W_OK) else []
    with _writing_probe_files(directories or default_directories) as probe_files:
        facts_command = extend_command(["sh", "-c", _FACTS_SCRIPT, sys.executable, *probe_files])
        output, trouble = _run_and_capture(facts_command)
    rank_facts, failures = parse_facts(output)
    job_fields["directories"] = tuple(str(Path(file).parent) for file in probe_files)
    job_fields["command"] = str(extend_command(["python"]))
    job_fields |= {"ranks": rank_facts, "failed": failures}
    if len(rank_facts) == rank_count:
        output, trouble = _run_and_capture(extend_command([sys.executable, "-c", _MEASURE_PROGRAM]))
        job_fields |= _parse_measurements(output)
    return Job(rank_count, trouble=trouble, **job_fields)


def _plan_start(allocation: Allocation, rank_count: int) -> Command:
    """Return the call by which `mpistrat run` would start ranks; a program is to be added."""
    command, export_flag = plan_command(allocation, LaunchOptions(ranks=rank_count), (), {})
    return forward_variables(command, export_flag, command.build_environment())


def _is_failure_fatal(launcher_words: Sequence[str]) -> bool:
    """Tell whether a rank that dies ends the job: by an option, or as with all but srun."""
    if not launcher_words or Path(launcher_words[0]).name != "srun":
        return True
    has_kill_option = any(word.startswith(("-K", "--kill-on-bad-exit")) for word in launcher_words)
    return has_kill_option or child_environment({}).get("SLURM_KILL_BAD_EXIT") == "1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    text = "number of ranks; default: that of the allocation, or 2"
    add("-n", dest="ranks", metavar="N", type=parse_positive, help=text)
    text = "a launcher and its options, as 'srun -K1 --mpi=pmix'; else that of `mpistrat run`"
    add("--launcher", metavar="WORDS", type=shlex.split, default=[], help=text)
    text = "a directory for checkpoints: check that every node sees it"
    add("directories", metavar="DIRECTORY", nargs="*", help=text)
    add("--json", action="store_true", help="print the full report as JSON")


def main(args: argparse.Namespace) -> int:
    """Print the findings."""
    job = gather_facts(args.ranks, args.launcher, args.directories)
    findings = list(examine(job))
    if args.json:
        report = job._asdict() | {"ranks": [rank._asdict() for rank in job.ranks]}
        report["findings"] = [finding._asdict() for finding in findings]
        print(json.dumps(report, indent=1))
    else:
        for finding in findings:
            print(f"{finding.level:<5}{finding.name + ':':<19}{finding.text}")
            if finding.mend:
                print(f"{'':24}-> {finding.mend}")
    return int(any(finding.level == FAILED_CHECK for finding in findings))
