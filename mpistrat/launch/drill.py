"""Interrupt a program at random times, restart it until it finishes, and compare its result.

Runs the program once without interruptions. Then it runs it in another directory, where a random
rank is killed at random times and the program is started again each time. The newest checkpoints
of both must be equal. {dir} in the arguments of the program stands for its checkpoint directory;
without it, --checkpoint DIR is added. The exit code is 0 if the checkpoints are equal, else 1.

  mpistrat drill -n 2 --kills 3 train.py --epochs 4
  mpistrat drill -n 2 --signal USR1 --ranks 2,3,1 --tolerance 1e-6 train.py --output {dir}
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

from mpistrat.checkpoint.inspection import differences, newest
from mpistrat.config import rank_text
from mpistrat.errors import CheckpointError, LaunchError
from mpistrat.launch.mpi_libraries import Command
from mpistrat.launch.plan import part, positive, seconds
from mpistrat.launch.process import descendants, run_job
from mpistrat.watchdog.processes import catches

PLACE = "{dir}"  # in the program's arguments: the directory of its checkpoints
_LOOK = 0.05  # seconds between two looks at processes and files
_SLOWER = 5  # times as long as the reference run, and this many seconds more, a run may take
_SPARE = 120.0
_RUNNER = (b"-m", b"mpistrat.launch.rank")
# MPICH's launcher would let srun start the ranks in an allocation, out of this process's sight.
_FORKS = {"HYDRA_LAUNCHER": "fork"}
_TAIL = 15  # lines of a log that are shown


@final
class Drill(NamedTuple):
    """What is to be done.

    Attributes:
      program: Arguments of ``mpistrat run`` after the number of ranks.
      ranks: How many the reference run has.
      sizes: How many the others have, in turns.
      kills: How many times it is interrupted.
      signal: By which signal.
      seed: Of moments and ranks.
      tolerance: How far floating-point arrays may be from each other, as a part of their greatest
        number; 0 for the same bits.
      ignore: Patterns of names of arrays that may differ, such as times.
      timeout: Seconds that a run may take; None to derive it from the reference run.
    """

    program: tuple[str, ...]
    ranks: int
    sizes: tuple[int, ...]
    kills: int
    signal: signal.Signals
    seed: int
    tolerance: float = 0.0
    ignore: tuple[str, ...] = ()
    timeout: float | None = None


@final
class Strike(NamedTuple):
    """An interruption.

    Attributes:
      ranks: How many ranks the job has.
      rank: The one that gets the signal.
      part: How far in the time that it may come, from 0 to 1.
      early: It comes before the first checkpoint of its run; as a rule it comes after it.
    """

    ranks: int
    rank: int
    part: float = 0.0
    early: bool = False


@final
class Moments(NamedTuple):
    """When to interrupt, in seconds of a run.

    Attributes:
      early: Before this.
      wait: Else when the run has saved, or after so long without, if it has a handler by then.
      window: And then before so much has gone by.
    """

    early: float
    wait: float
    window: float


def plan(drill: Drill) -> list[Strike]:
    """Return the interruptions, a function of the seed; one in five is early.

    Example:
      >>> one = Drill(("a.py",), 2, (2, 3), 3, signal.SIGKILL, seed=7)
      >>> [strike.ranks for strike in plan(one)], plan(one) == plan(one)
      ([2, 3, 2], True)
    """
    rng = random.Random(drill.seed)
    sizes = (drill.sizes[i % len(drill.sizes)] for i in range(drill.kills))
    return [Strike(n, rng.randrange(n), rng.random(), rng.random() < 0.2) for n in sizes]


def moments(saved: float, duration: float, kills: int) -> Moments:
    """Return when to interrupt a program, so that each run continues, and leaves something to do.

    Args:
      saved: When the reference run had its first checkpoint.
      duration: How long it took.
      kills: How many interruptions there are.

    Example:
      >>> moments(2.0, 10.0, 4)
      Moments(early=2.0, wait=10.0, window=1.8)
      >>> moments(12.0, 12.0, 3)  # saves at its end only, or when it gets a signal
      Moments(early=12.0, wait=2.0, window=2.4)
    """
    if saved > 0.9 * duration:
        return Moments(saved, duration / (kills + 3), 0.6 * duration / kills)
    return Moments(saved, duration, 0.9 * (duration - saved) / kills)


def words(program: Sequence[str], directory: Path) -> list[str]:
    """Return a program and its arguments, with the directory of its checkpoints.

    Example:
      >>> words(["a.py", "--output={dir}/run"], Path("x")), words(["a.py"], Path("x"))
      (['a.py', '--output=x/run'], ['a.py', '--checkpoint', 'x'])
    """
    if any(PLACE in word for word in program):
        return [word.replace(PLACE, str(directory)) for word in program]
    return [*program, "--checkpoint", str(directory)]


def _ranks(ranks: int) -> dict[int, int]:
    """Return the process of each rank that this process has started, by its number."""
    pids = {}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError, ValueError):  # it has ended
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if tuple(arguments[1:3]) == _RUNNER:
                rows = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
                pids[int(rank_text(dict(row.partition("=")[::2] for row in rows)))] = pid
    return pids if len(pids) == ranks else {}


@final
class DrillRun(threading.Thread):
    """One run of the program; the thread looks when it saves, and interrupts it in time.

    Attributes:
      code: The exit code.
      late: It was ended because it took too long.
      seconds: How long its ranks ran.
      saved: After how many of them the first checkpoint was there; 0 if there was none.
      struck: After how many of them a rank got the signal; 0 if it ended before.
    """

    def __init__(self, drill: Drill, directory: Path, log: Path, strike: Strike, limit: float):
        """Create a run that has not begun."""
        super().__init__(name="mpistrat drill", daemon=True)
        self.directory, self.log, self.strike = directory, log, strike
        self._drill, self._limit = drill, limit
        self._strike_moments: Moments | None = None
        self._checkpoint_before, self._has_ended, self._begin_time = (
            newest(directory),
            threading.Event(),
            0.0,
        )
        self.seconds = self.saved = self.struck = 0.0

    def play(self, strike_moments: Moments | None) -> DrillRun:
        """Run the program to its end, and interrupt it at `strike_moments`; None for never."""
        self._strike_moments = strike_moments
        program = words(self._drill.program, self.directory)
        # The processes of ranks have to be seen and interrupted from here, in an allocation too.
        location_options = ["-n", str(self.strike.ranks), "--nodes", "1", "--launcher", "mpiexec"]
        command = [sys.executable, "-m", "mpistrat", "run", *location_options, *program]
        self.start()
        with self.log.open("wb") as output:
            try:
                outcome = run_job(Command(tuple(command), _FORKS), self._limit, output)
            finally:
                end_time = time.monotonic()
                self._has_ended.set()
                self.join()
                self.seconds = end_time - self._begin_time if self._begin_time else 0.0
        if outcome.interrupted:
            raise KeyboardInterrupt
        self.code, self.timed_out = outcome.code, outcome.timed_out
        return self

    def run(self) -> None:
        """Look until all is seen and done."""
        strike, strike_moments, number = self.strike, self._strike_moments, self._drill.signal
        pids: dict[int, int] = {}
        while not pids and not self._has_ended.wait(_LOOK):
            pids = _ranks(strike.ranks)
        if not pids:
            return
        begin_time = self._begin_time = time.monotonic()
        if strike_moments is not None and strike.early:
            self._has_ended.wait(strike.part * strike_moments.early)
        else:
            while not (self.saved or self._has_ended.wait(_LOOK)):
                if newest(self.directory) != self._checkpoint_before:
                    self.saved = time.monotonic() - begin_time
                is_overdue = (
                    strike_moments is not None
                    and time.monotonic() > begin_time + strike_moments.wait
                )
                if is_overdue and (number == signal.SIGKILL or catches(pids[strike.rank], number)):
                    break
            if strike_moments is not None:
                self._has_ended.wait(strike.part * strike_moments.window)
        if strike_moments is not None and not self._has_ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[strike.rank], number)
                self.struck = time.monotonic() - begin_time

    def tail(self) -> str:
        """Return the last lines of its output."""
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL:]
        return "\n".join([*(f"    {line}" for line in lines), f"    ({self.log})"])

    def row(self, name: Any) -> str:
        """Return its line of the table."""
        ending = "took too long" if self.timed_out else f"code {self.code}"
        if self.struck:
            strike_text = (
                f"{self._drill.signal.name} to rank {self.strike.rank} at {self.struck:.2f} s"
            )
            ending = f"{strike_text}: {ending}"
        saved = ", ".join(path.stem for path in newest(self.directory).values()) or "none"
        return _row(name, self.strike.ranks, ending, f"{self.seconds:.2f} s", saved)


def _row(name: Any, ranks: Any, ending: str, seconds: Any, saved: str) -> str:
    return f"{name:<9} {ranks:>5}  {ending:<38} {seconds:>9}  {saved}"


def play(drill: Drill, directory: Path) -> Iterator[str]:
    """Run the program without and with interruptions, and compare.

    Args:
      drill: What is to be done.
      directory: Empty; gets the directories ``reference`` and ``drill``, and the output of each
        run.

    Yields:
      Lines to be printed: a table of the runs, and what differs.

    Raises:
      LaunchError: The program does not end with code 0 without interruptions, or does not save.
      CheckpointError: With interruptions it fails, or its result differs.
    """
    yield _row("run", "ranks", "ended", "ranks ran", "newest checkpoint")
    reference, drilled = directory / "reference", directory / "drill"
    reference.mkdir()
    drilled.mkdir()
    calm, log = Strike(drill.ranks, 0), directory / "reference.log"
    first = DrillRun(drill, reference, log, calm, drill.timeout or 1e9).play(None)
    yield first.row("reference")
    _check(drill, first)
    limit = drill.timeout or first.seconds * _SLOWER + _SPARE
    strike_moments = moments(first.saved or first.seconds, first.seconds, drill.kills)
    last = Strike(drill.sizes[drill.kills % len(drill.sizes)], 0)
    struck = 0
    for number, strike in enumerate([*plan(drill), last], 1):
        name, log = "last" if strike is last else str(number), directory / f"{number}.log"
        run = DrillRun(drill, drilled, log, strike, limit).play(
            None if strike is last else strike_moments
        )
        yield run.row(name)
        struck += run.struck > 0
        if run.timed_out or (run.code and not run.struck):
            failure = (
                f"did not end within {limit:g} s"
                if run.timed_out
                else f"ended with code {run.code}"
            )
            raise CheckpointError(f"run {name} {failure}, by itself:\n{run.tail()}")
    compared, differing_arrays = differences(reference, drilled, drill.tolerance, drill.ignore)
    if differing_arrays:
        raise CheckpointError(
            f"{len(differing_arrays)} of {compared} arrays differ from the reference run:\n  "
            + "\n  ".join(differing_arrays)
        )
    if not struck:
        raise LaunchError("no run was interrupted before its end: give the program more to do.")
    precision = f"within {drill.tolerance:g}" if drill.tolerance else "to the bit"
    arrays_text = f"{compared} arrays of {', '.join(newest(reference))}"
    times = f"{struck} interruption{'s' * (struck != 1)}"
    yield f"after {times} equal to the reference run {precision}: {arrays_text}"


def _check(drill: Drill, run: DrillRun) -> None:
    if run.timed_out or run.code:
        raise LaunchError(f"the program fails without interruptions too:\n{run.tail()}")
    if not newest(run.directory):
        command_text = " ".join(words(drill.program, run.directory))
        raise LaunchError(
            f"the program has left no checkpoint in {run.directory}. It ran as\n"
            f"    {command_text}\n"
            f"  Give it its directory: {PLACE} in an argument stands for it, else --checkpoint DIR "
            "is added."
        )
    if not run.seconds:
        raise LaunchError(
            "no process of a rank was seen: the drill needs Linux, and a launcher that starts all "
            "ranks on this host."
        )


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add, rest = parser.add_argument, argparse.REMAINDER
    add("-n", dest="ranks", metavar="N", type=positive, required=True, help="number of ranks")
    add("--kills", metavar="K", type=positive, default=3, help="interruptions (3)")
    add(
        "--signal",
        type=_signal,
        default="KILL",
        help="KILL, or USR1, TERM, ... if the program saves and exits on it",
    )
    text = "ranks of the interrupted runs in turns, such as 2,3,1; else N"
    add("--ranks", dest="sizes", metavar="N,N,..", type=_sizes, default=(), help=text)
    text = "how far floating-point arrays may be apart, as a part of their largest number (0)"
    add("--tolerance", metavar="T", type=part, default=0.0, help=text)
    text = "names of arrays that may differ, such as '*seconds*'; may be given several times"
    add("--ignore", metavar="PATTERN", action="append", default=[], help=text)
    add("--seed", metavar="S", type=int, help="of ranks and moments; printed, to play it again")
    add("--timeout", metavar="S", type=seconds, help="time limit of a run in seconds")
    text = "an empty one for checkpoints and output, kept; else one that is kept on failure"
    add("--directory", metavar="DIR", type=Path, help=text)
    text = "a module and its arguments, as after python -m"
    add("-m", dest="module", metavar="MODULE ...", nargs=rest, help=text)
    add("script", metavar="SCRIPT ...", nargs=rest, help="a script and its arguments")


def _signal(text: str) -> signal.Signals:
    try:
        return signal.Signals[f"SIG{text.upper().removeprefix('SIG')}"]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a signal; use KILL or USR1") from None


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(positive, text.split(",")))


def main(args: argparse.Namespace) -> int:
    """Play the drill."""
    from mpistrat.errors import CheckpointError

    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    program = ("-m", *args.module) if args.module else tuple(script)
    if not program:
        raise LaunchError("give a SCRIPT or -m MODULE to run")
    directory = _directory(args.directory)
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    sizes = args.sizes or (args.ranks,)
    drill = Drill(
        *(program, args.ranks, sizes, args.kills, args.signal, seed),
        *(args.tolerance, tuple(args.ignore), args.timeout),
    )
    print(f"seed {seed}, {directory}", flush=True)
    try:
        for line in play(drill, directory):
            print(line, flush=True)
    except (CheckpointError, LaunchError) as error:
        print(f"mpistrat drill: {error}\n  kept: {directory}; again: --seed {seed}", flush=True)
        return 1 if isinstance(error, CheckpointError) else 2
    except KeyboardInterrupt:
        return 130
    if args.directory is None:
        shutil.rmtree(directory)
    return 0


def _directory(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="mpistrat-drill-")).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise LaunchError(
            f"--directory {directory} is not empty; a drill begins with nothing saved."
        )
    return directory.resolve()
