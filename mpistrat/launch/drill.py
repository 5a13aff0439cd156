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
from typing import NamedTuple, final

from mpistrat.checkpoint.inspection import compare_runs, find_newest_checkpoints
from mpistrat.config import rank_text
from mpistrat.errors import CheckpointError, LaunchError
from mpistrat.launch.arguments import parse_non_negative, parse_positive, parse_seconds
from mpistrat.launch.mpi_libraries import Command
from mpistrat.launch.process import find_descendants, run_job
from mpistrat.watchdog.processes import has_signal_handler

DIRECTORY_FIELD = "{dir}"  # in the program's arguments: the directory of its checkpoints
_LOOK_SECONDS = 0.05  # seconds between two looks at processes and files
_TIMEOUT_FACTOR = 5  # a run may take so many times as long as the reference run, ...
_TIMEOUT_SECONDS = 120.0  # ... and so much longer
_RANK_WORDS = (b"-m", b"mpistrat.launch.rank")
# MPICH's launcher would let srun start the ranks in an allocation, out of this process's sight.
_FORK_VARIABLES = {"HYDRA_LAUNCHER": "fork"}
_HISTORY_HINT = (
    "\nThe seconds in a History, that of ms.fit included, differ between all runs: "
    "--ignore history/values leaves its curves out."
)
_TAIL_LINE_COUNT = 15  # lines of a log that are shown


@final
class Drill(NamedTuple):
    """The options of a drill.

    Attributes:
      program: Arguments of ``mpistrat run`` after the number of ranks.
      rank_count: Number of ranks of the reference run.
      rank_counts: Numbers of ranks of the interrupted runs, in turns.
      strike_count: Number of interruptions.
      strike_signal: The signal that interrupts.
      seed: The seed of moments and ranks.
      tolerance: The largest allowed difference of floating-point arrays, as a part of their
        greatest number; 0 for the same bits.
      ignored_patterns: Patterns of names of arrays that may differ, such as times.
      timeout: Seconds that a run may take; None to derive it from the reference run.
    """

    program: tuple[str, ...]
    rank_count: int
    rank_counts: tuple[int, ...]
    strike_count: int
    strike_signal: signal.Signals
    seed: int
    tolerance: float = 0.0
    ignored_patterns: tuple[str, ...] = ()
    timeout: float | None = None


@final
class Strike(NamedTuple):
    """An interruption.

    Attributes:
      rank_count: Number of ranks of the job.
      rank: The rank that gets the signal.
      time_fraction: Its position in the time in which it may come, from 0 to 1.
      is_early: Whether it comes before the first checkpoint of its run; as a rule it comes after.
    """

    rank_count: int
    rank: int
    time_fraction: float = 0.0
    is_early: bool = False


@final
class Moments(NamedTuple):
    """The times of interruptions, in seconds of a run.

    Attributes:
      early_seconds: An early interruption comes before this time.
      wait_seconds: Another interruption waits until the run has saved, but no longer than this, if
        the program has a handler of the signal by then.
      window_seconds: It then comes within this time.
    """

    early_seconds: float
    wait_seconds: float
    window_seconds: float


def plan_strikes(drill: Drill) -> list[Strike]:
    """Return the interruptions, a function of the seed; one in five is early.

    Example:
      >>> drill = Drill(("a.py",), 2, (2, 3), 3, signal.SIGKILL, seed=7)
      >>> strikes = plan_strikes(drill)
      >>> [strike.rank_count for strike in strikes], strikes == plan_strikes(drill)
      ([2, 3, 2], True)
    """
    generator = random.Random(drill.seed)
    rank_counts = (drill.rank_counts[i % len(drill.rank_counts)] for i in range(drill.strike_count))
    return [
        Strike(n, generator.randrange(n), generator.random(), generator.random() < 0.2)
        for n in rank_counts
    ]


def plan_moments(first_save_seconds: float, run_seconds: float, strike_count: int) -> Moments:
    """Return times of interruptions by which each run continues, and leaves something to do.

    Args:
      first_save_seconds: The time of the first checkpoint in the reference run.
      run_seconds: The duration of the reference run.
      strike_count: The number of interruptions.

    Example:
      >>> plan_moments(2.0, 10.0, 4)
      Moments(early_seconds=2.0, wait_seconds=10.0, window_seconds=1.8)
      >>> plan_moments(12.0, 12.0, 3)  # saves at its end only, or when it gets a signal
      Moments(early_seconds=12.0, wait_seconds=2.0, window_seconds=2.4)
    """
    if first_save_seconds > 0.9 * run_seconds:
        wait_seconds = run_seconds / (strike_count + 3)
        return Moments(first_save_seconds, wait_seconds, 0.6 * run_seconds / strike_count)
    window_seconds = 0.9 * (run_seconds - first_save_seconds) / strike_count
    return Moments(first_save_seconds, run_seconds, window_seconds)


def fill_directory(program: Sequence[str], directory: Path) -> list[str]:
    """Return a program and its arguments, with the directory of its checkpoints.

    Example:
      >>> fill_directory(["a.py", "--output={dir}/run"], Path("x"))
      ['a.py', '--output=x/run']
      >>> fill_directory(["a.py"], Path("x"))
      ['a.py', '--checkpoint', 'x']
    """
    if any(DIRECTORY_FIELD in word for word in program):
        return [word.replace(DIRECTORY_FIELD, str(directory)) for word in program]
    return [*program, "--checkpoint", str(directory)]


def _find_rank_processes(rank_count: int) -> dict[int, int]:
    """Return the process of each rank that this process has started, by its number."""
    pid_by_rank = {}
    for pid in find_descendants(os.getpid()):
        with contextlib.suppress(OSError, ValueError):  # it has ended
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if tuple(arguments[1:3]) == _RANK_WORDS:
                assignments = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
                variables = dict(assignment.partition("=")[::2] for assignment in assignments)
                pid_by_rank[int(rank_text(variables))] = pid
    return pid_by_rank if len(pid_by_rank) == rank_count else {}


@final
class DrillRun(threading.Thread):
    """One run of the program; the thread watches its checkpoints, and interrupts it in time.

    Attributes:
      code: The exit code.
      has_timed_out: Whether it was ended because it took too long.
      run_seconds: The time in which its ranks ran.
      first_save_seconds: The time until the first checkpoint; 0 if there was none.
      strike_seconds: The time until a rank got the signal; 0 if the run ended before.
    """

    def __init__(
        self, drill: Drill, directory: Path, log_path: Path, strike: Strike, timeout: float
    ):
        """Create a run that has not begun."""
        super().__init__(name="mpistrat drill", daemon=True)
        self.directory, self.log_path, self.strike = directory, log_path, strike
        self._drill, self._timeout = drill, timeout
        self._strike_moments: Moments | None = None
        self._checkpoint_before, self._begin_time = find_newest_checkpoints(directory), 0.0
        self._end_event = threading.Event()
        self.run_seconds = self.first_save_seconds = self.strike_seconds = 0.0

    def execute(self, strike_moments: Moments | None) -> None:
        """Run the program to its end, and interrupt it at `strike_moments`; None for never."""
        self._strike_moments = strike_moments
        program = fill_directory(self._drill.program, self.directory)
        # The processes of ranks have to be seen and interrupted from here, in an allocation too.
        run_options = ["-n", str(self.strike.rank_count), "--nodes", "1", "--launcher", "mpiexec"]
        command = [sys.executable, "-m", "mpistrat", "run", *run_options, *program]
        self.start()
        with self.log_path.open("wb") as output:
            try:
                outcome = run_job(Command(tuple(command), _FORK_VARIABLES), self._timeout, output)
            finally:
                end_time = time.monotonic()
                self._end_event.set()
                self.join()
                self.run_seconds = end_time - self._begin_time if self._begin_time else 0.0
        if outcome.is_interrupted:
            raise KeyboardInterrupt
        self.code, self.has_timed_out = outcome.code, outcome.has_timed_out

    def run(self) -> None:
        """Watch the run until its end, and interrupt it."""
        strike, strike_moments = self.strike, self._strike_moments
        strike_signal = self._drill.strike_signal
        pids: dict[int, int] = {}
        while not pids and not self._end_event.wait(_LOOK_SECONDS):
            pids = _find_rank_processes(strike.rank_count)
        if not pids:
            return
        begin_time = self._begin_time = time.monotonic()
        if strike_moments is not None and strike.is_early:
            self._end_event.wait(strike.time_fraction * strike_moments.early_seconds)
        else:
            while not (self.first_save_seconds or self._end_event.wait(_LOOK_SECONDS)):
                if find_newest_checkpoints(self.directory) != self._checkpoint_before:
                    self.first_save_seconds = time.monotonic() - begin_time
                is_overdue = (
                    strike_moments is not None
                    and time.monotonic() > begin_time + strike_moments.wait_seconds
                )
                if is_overdue and (
                    strike_signal == signal.SIGKILL
                    or has_signal_handler(pids[strike.rank], strike_signal)
                ):
                    break
            if strike_moments is not None:
                self._end_event.wait(strike.time_fraction * strike_moments.window_seconds)
        if strike_moments is not None and not self._end_event.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[strike.rank], strike_signal)
                self.strike_seconds = time.monotonic() - begin_time

    def read_tail(self) -> str:
        """Return the last lines of its output."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-_TAIL_LINE_COUNT:]
        return "\n".join([*(f"    {line}" for line in lines), f"    ({self.log_path})"])

    def describe_failure(self) -> str:
        """Return in words how it has failed, if it has."""
        if self.has_timed_out:
            return f"did not end within {self._timeout:g} s"
        return f"ended with code {self.code}"

    def format_row(self, run_name: str) -> str:
        """Return its line of the table."""
        ending = "took too long" if self.has_timed_out else f"code {self.code}"
        if self.strike_seconds:
            strike_text = f"{self._drill.strike_signal.name} to rank {self.strike.rank}"
            ending = f"{strike_text} at {self.strike_seconds:.2f} s: {ending}"
        saved_names = (
            ", ".join(path.stem for path in find_newest_checkpoints(self.directory).values())
            or "none"
        )
        rank_text, seconds_text = str(self.strike.rank_count), f"{self.run_seconds:.2f} s"
        return _format_row(run_name, rank_text, ending, seconds_text, saved_names)


def _format_row(
    run_name: str, rank_text: str, ending: str, seconds_text: str, saved_names: str
) -> str:
    return f"{run_name:<9} {rank_text:>5}  {ending:<38} {seconds_text:>9}  {saved_names}"


def _describe_differences(compared_count: int, lines: Sequence[str]) -> str:
    """Return the text about arrays that differ from those of the reference run."""
    count_text = f"{len(lines)} of {compared_count} arrays differ from the reference run:"
    hint = _HISTORY_HINT if any("history/values" in line for line in lines) else ""
    return "\n  ".join([count_text, *lines]) + hint


def play_drill(drill: Drill, directory: Path) -> Iterator[str]:
    """Run the program without and with interruptions, and compare.

    Args:
      drill: The options.
      directory: An empty directory for the directories ``reference`` and ``drill``, and the output
        of each run.

    Yields:
      Lines to be printed: a table of the runs, and the result of the comparison.

    Raises:
      LaunchError: The program does not end with code 0 without interruptions, or does not save.
      CheckpointError: With interruptions it fails, or its result differs.
    """
    yield _format_row("run", "ranks", "ended", "ranks ran", "newest checkpoint")
    reference_directory, drill_directory = directory / "reference", directory / "drill"
    reference_directory.mkdir()
    drill_directory.mkdir()
    strike, log_path = Strike(drill.rank_count, 0), directory / "reference.log"
    reference_run = DrillRun(drill, reference_directory, log_path, strike, drill.timeout or 1e9)
    reference_run.execute(None)
    yield reference_run.format_row("reference")
    _check_reference_run(drill, reference_run)
    run_seconds = reference_run.run_seconds
    timeout = drill.timeout or run_seconds * _TIMEOUT_FACTOR + _TIMEOUT_SECONDS
    first_save_seconds = reference_run.first_save_seconds or run_seconds
    strike_moments = plan_moments(first_save_seconds, run_seconds, drill.strike_count)
    last_strike = Strike(drill.rank_counts[drill.strike_count % len(drill.rank_counts)], 0)
    interruption_count = 0
    for number, strike in enumerate([*plan_strikes(drill), last_strike], 1):
        name = "last" if strike is last_strike else str(number)
        run = DrillRun(drill, drill_directory, directory / f"{number}.log", strike, timeout)
        run.execute(None if strike is last_strike else strike_moments)
        yield run.format_row(name)
        interruption_count += run.strike_seconds > 0
        if run.has_timed_out or (run.code and not run.strike_seconds):
            failure = run.describe_failure()
            raise CheckpointError(f"run {name} {failure}, by itself:\n{run.read_tail()}")
    compared_count, differing_arrays = compare_runs(
        reference_directory, drill_directory, drill.tolerance, drill.ignored_patterns
    )
    if differing_arrays:
        raise CheckpointError(_describe_differences(compared_count, differing_arrays))
    if not interruption_count:
        raise LaunchError("no run was interrupted before its end: give the program more to do.")
    precision = f"within {drill.tolerance:g}" if drill.tolerance else "to the bit"
    newest_names = ", ".join(find_newest_checkpoints(reference_directory))
    arrays_text = f"{compared_count} arrays of {newest_names}"
    interruptions_text = f"{interruption_count} interruption{'s' * (interruption_count != 1)}"
    yield f"after {interruptions_text} equal to the reference run {precision}: {arrays_text}"


def _check_reference_run(drill: Drill, run: DrillRun) -> None:
    if run.has_timed_out or run.code:
        raise LaunchError(f"the program fails without interruptions too:\n{run.read_tail()}")
    if not find_newest_checkpoints(run.directory):
        command_text = " ".join(fill_directory(drill.program, run.directory))
        raise LaunchError(
            f"the program has left no checkpoint in {run.directory}. It ran as\n"
            f"    {command_text}\n"
            f"  Give it its directory: {DIRECTORY_FIELD} in an argument stands for it, else "
            "--checkpoint DIR is added."
        )
    if not run.run_seconds:
        raise LaunchError(
            "no process of a rank was seen: the drill needs Linux, and a launcher that starts all "
            "ranks on this host."
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add, rest = parser.add_argument, argparse.REMAINDER
    add("-n", dest="ranks", metavar="N", type=parse_positive, required=True, help="number of ranks")
    add("--kills", metavar="K", type=parse_positive, default=3, help="interruptions (3)")
    add(
        "--signal",
        type=_parse_signal,
        default="KILL",
        help="KILL, or USR1, TERM, ... if the program saves and exits on it",
    )
    text = "ranks of the interrupted runs in turns, such as 2,3,1; else N"
    add(
        "--ranks",
        dest="rank_counts",
        metavar="N,N,..",
        type=_parse_rank_counts,
        default=(),
        help=text,
    )
    text = "how far floating-point arrays may be apart, as a part of their largest number (0)"
    add("--tolerance", metavar="T", type=parse_non_negative, default=0.0, help=text)
    text = "names of arrays that may differ, such as '*seconds*'; may be given several times"
    add("--ignore", metavar="PATTERN", action="append", default=[], help=text)
    add("--seed", metavar="S", type=int, help="of ranks and moments; printed, to play it again")
    add("--timeout", metavar="S", type=parse_seconds, help="time limit of a run in seconds")
    text = "an empty one for checkpoints and output, kept; else one that is kept on failure"
    add("--directory", metavar="DIR", type=Path, help=text)
    text = "a module and its arguments, as after python -m"
    add("-m", dest="module", metavar="MODULE ...", nargs=rest, help=text)
    add("script", metavar="SCRIPT ...", nargs=rest, help="a script and its arguments")


def _parse_signal(text: str) -> signal.Signals:
    try:
        return signal.Signals[f"SIG{text.upper().removeprefix('SIG')}"]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a signal; use KILL or USR1") from None


def _parse_rank_counts(text: str) -> tuple[int, ...]:
    return tuple(map(parse_positive, text.split(",")))


def main(args: argparse.Namespace) -> int:
    """Play the drill."""
    from mpistrat.errors import CheckpointError

    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    program = ("-m", *args.module) if args.module else tuple(script)
    if not program:
        raise LaunchError("give a SCRIPT or -m MODULE to run")
    directory = _prepare_directory(args.directory)
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    rank_counts = args.rank_counts or (args.ranks,)
    drill = Drill(
        *(program, args.ranks, rank_counts, args.kills, args.signal, seed),
        *(args.tolerance, tuple(args.ignore), args.timeout),
    )
    print(f"seed {seed}, {directory}", flush=True)
    try:
        for line in play_drill(drill, directory):
            print(line, flush=True)
    except (CheckpointError, LaunchError) as error:
        print(f"mpistrat drill: {error}\n  kept: {directory}; again: --seed {seed}", flush=True)
        return 1 if isinstance(error, CheckpointError) else 2
    except KeyboardInterrupt:
        return 130
    if args.directory is None:
        shutil.rmtree(directory)
    return 0


def _prepare_directory(directory: Path | None) -> Path:
    if directory is None:
        return Path(tempfile.mkdtemp(prefix="mpistrat-drill-")).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise LaunchError(
            f"--directory {directory} is not empty; a drill begins with nothing saved."
        )
    return directory.resolve()
