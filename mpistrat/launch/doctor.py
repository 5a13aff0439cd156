"""`mpistrat doctor`: starts ranks as a program would be started, and gathers what they tell.

Two starts: one in which no rank starts MPI, so that each can tell what is wrong with it; one in
which MPI is started and messages are measured. `checks` looks at what came of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpistrat.cluster.job import asked
from mpistrat.environment import environment, launched_by
from mpistrat.errors import LaunchError
from mpistrat.launch.facts import FAILED, Job, LinkFacts, collect, parse
from mpistrat.launch.mpiexec import Command, find
from mpistrat.launch.plan import HERE, Wishes, handing_on
from mpistrat.launch.process import run_job
from mpistrat.launch.run import call_of, place_of, plan_note

_PATIENCE = 60.0  # seconds for a job that does next to nothing

# A process that cannot start Python says so by the shell, which every node has.
_TELL = (
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
    place = place_of()
    count = ranks or max(sum(place.tasks), 2)
    facts: dict[str, Any] = {"kills": _kills(launcher)}
    with contextlib.suppress(OSError):
        facts["slurm"] = asked(["scontrol", "show", "config"]) if place is not HERE else ""
    outer_launcher = launched_by()
    if outer_launcher is not None:
        return Job(1, ranks=(collect(),), within=outer_launcher, **facts)

    start = Command((*launcher, "-n", str(count)), {})
    try:
        if not launcher:
            start, flag = call_of(place, Wishes(ranks=count), (), {})
            start = handing_on(start, flag, start.environment())
            by_srun = start.argv[0] == "srun"
            facts["mismatch"] = "" if by_srun else plan_note(*find())
    except LaunchError as error:
        return Job(count, mismatch=str(error), **facts)

    def command(program: Sequence[str]) -> Command:
        return start._replace(argv=(*start.argv, *program))

    default_directories = [str(Path.cwd())] if os.access(Path.cwd(), os.W_OK) else []
    with _written(directories or default_directories) as files:
        facts_command = command(["sh", "-c", _TELL, sys.executable, *files])
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
    return has_kill_option or environment({}).get("SLURM_KILL_BAD_EXIT") == "1"
