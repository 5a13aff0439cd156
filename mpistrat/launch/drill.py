"""`mpistrat drill`: a program is ended at random moments and started again, and its end compared.

The program runs once in peace and once with interruptions, each in a directory of its own. What it
has saved last must be the same.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

from mpistrat.checkpoint.differences import differences, newest
from mpistrat.errors import CheckpointError, LaunchError
from mpistrat.launch.mpiexec import Command
from mpistrat.launch.process import descendants, run_job

__all__ = ["PLACE", "Drill", "Moments", "Strike", "moments", "plan", "play", "words"]

PLACE = "{dir}"  # in the program's arguments: the directory of its checkpoints
_LOOK = 0.05  # seconds between two looks at processes and files
_SLOWER = 5  # times as long as in peace, and this many seconds more, a run may take
_SPARE = 120.0
_RUNNER = (b"-m", b"mpistrat.launch.rank")
# MPICH's launcher would let srun start the ranks in an allocation, out of this process's sight.
_FORKS = {"HYDRA_LAUNCHER": "fork"}
# What launchers call the rank in the environment of its process.
_NAMES = (b"OMPI_COMM_WORLD_RANK", b"PALS_RANKID", b"PMIX_RANK", b"PMI_RANK", b"SLURM_PROCID")
_TAIL = 15  # lines of a log that are shown


@final
class Drill(NamedTuple):
    """What is to be done.

    Attributes:
      program: Arguments of ``mpistrat run`` after the number of ranks.
      ranks: How many the run in peace has.
      sizes: How many the others have, in turns.
      kills: How many times it is interrupted.
      signal: By which signal.
      seed: Of moments and ranks.
      tolerance: How far floating-point arrays may be from each other, as a part of their greatest
        number; 0 for the same bits.
      ignore: Patterns of names of arrays that may differ, such as times.
      timeout: Seconds that a run may take; None for what follows from the run in peace.
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
class DrillRun(NamedTuple):
    """A run that has ended.

    Attributes:
      code: The exit code.
      seconds: How long its ranks ran.
      saved: After how many of them the first checkpoint was there; None if there was none.
      struck: After how many of them a rank got the signal; None if it ended before.
      late: It was ended because it took too long.
    """

    code: int
    seconds: float
    saved: float | None
    struck: float | None
    late: bool


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


def moments(saved: float, whole: float, kills: int) -> Moments:
    """Return when to interrupt a program, so that each run goes on, and leaves something to do.

    Args:
      saved: When the run in peace had its first checkpoint.
      whole: How long it took.
      kills: How many interruptions there are.

    Example:
      >>> moments(2.0, 10.0, 4)
      Moments(early=2.0, wait=10.0, window=1.8)
      >>> moments(12.0, 12.0, 3)  # saves at its end only, or when it gets a signal
      Moments(early=12.0, wait=2.0, window=2.4)
    """
    if saved > 0.9 * whole:
        return Moments(saved, whole / (kills + 3), 0.6 * whole / kills)
    return Moments(saved, whole, 0.9 * (whole - saved) / kills)


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
    found = {}
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError, ValueError, StopIteration):  # it has ended
            told = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if tuple(told[1:3]) == _RUNNER:
                rows = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                variables = dict(row.partition(b"=")[::2] for row in rows)
                number = next(variables[name] for name in _NAMES if name in variables)
                found[int(number)] = pid
    return found if len(found) == ranks else {}


def _heeds(pid: int, number: int) -> bool:
    """Tell whether a signal is SIGKILL, or one for which a process has a handler."""
    if number == signal.SIGKILL:
        return True
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        mask = next(row.split()[1] for row in status.splitlines() if row.startswith("SigCgt:"))
        return bool(int(mask, 16) >> (number - 1) & 1)
    return False


@final
class _Watcher(threading.Thread):
    """Looks when the ranks of a run are there, and when it saves; interrupts it in time."""

    def __init__(self, strike: Strike, number: int, directory: Path, when: Moments | None):
        super().__init__(name="mpistrat drill", daemon=True)
        self._strike, self._number, self._when = strike, number, when
        self._directory, self._before = directory, newest(directory)
        self._over = threading.Event()
        self.began = self.saved = self.struck = 0.0

    def close(self) -> float:
        """Stop looking; return how long the ranks ran."""
        ended = time.monotonic()
        self._over.set()
        self.join()
        return ended - self.began if self.began else 0.0

    def run(self) -> None:
        """Look until all is seen and done."""
        strike, when = self._strike, self._when
        pids: dict[int, int] = {}
        while not pids and not self._over.wait(_LOOK):
            pids = _ranks(strike.ranks)
        if not pids:
            return
        self.began = time.monotonic()
        if when is not None and strike.early:
            self._over.wait(strike.part * when.early)
        else:
            while not (self.saved or self._over.wait(_LOOK)):
                if newest(self._directory) != self._before:
                    self.saved = time.monotonic()
                late = when is not None and time.monotonic() > self.began + when.wait
                if late and _heeds(pids[strike.rank], self._number):
                    break
            if when is not None:
                self._over.wait(strike.part * when.window)
        if when is not None and not self._over.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[strike.rank], self._number)
                self.struck = time.monotonic()


def _run(
    drill: Drill, directory: Path, log: Path, strike: Strike, when: Moments | None, limit: float
) -> DrillRun:
    program = words(drill.program, directory)
    # The processes of ranks have to be seen and interrupted from here, in an allocation too.
    here = ["-n", str(strike.ranks), "--nodes", "1", "--launcher", "mpiexec"]
    command = [sys.executable, "-m", "mpistrat", "run", *here, *program]
    watcher = _Watcher(strike, drill.signal, directory, when)
    watcher.start()
    with log.open("wb") as output:
        try:
            outcome = run_job(Command(tuple(command), _FORKS), limit, output)
        finally:
            seconds = watcher.close()
    if outcome.interrupted:
        raise KeyboardInterrupt
    began, saved, struck = watcher.began, watcher.saved, watcher.struck
    return DrillRun(
        outcome.code,
        seconds,
        saved - began if saved else None,
        struck - began if struck else None,
        outcome.timed_out,
    )


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_TAIL:]
    return "\n".join(f"    {line}" for line in lines)


def _row(name: Any, ranks: Any, ended: str, seconds: Any, saved: str) -> str:
    return f"{name:<9} {ranks:>5}  {ended:<38} {seconds:>9}  {saved}"


def _told(name: Any, strike: Strike, run: DrillRun, directory: Path, number: signal.Signals) -> str:
    ended = "took too long" if run.late else f"code {run.code}"
    if run.struck is not None:
        ended = f"{number.name} to rank {strike.rank} at {run.struck:.2f} s: {ended}"
    saved = ", ".join(path.stem for path in newest(directory).values()) or "none"
    return _row(name, strike.ranks, ended, f"{run.seconds:.2f} s", saved)


def play(drill: Drill, directory: Path) -> Iterator[str]:
    """DrillRun the program in peace and with interruptions, and compare.

    Args:
      drill: What is to be done.
      directory: Empty; gets the directories ``peace`` and ``drill``, and the output of each run.

    Yields:
      Lines to be printed: a table of the runs, and what differs.

    Raises:
      LaunchError: The program does not do what a drill needs: end with code 0 in peace, and save.
      CheckpointError: It does not come to its end again, or to another one than in peace.
    """
    yield _row("run", "ranks", "ended", "ranks ran", "newest checkpoint")
    peace, drilled = directory / "peace", directory / "drill"
    peace.mkdir()
    drilled.mkdir()
    calm, log = Strike(drill.ranks, 0), directory / "peace.log"
    first = _run(drill, peace, log, calm, None, drill.timeout or 1e9)
    yield _told("in peace", calm, first, peace, drill.signal)
    _check(drill, first, peace, log)
    limit = drill.timeout or first.seconds * _SLOWER + _SPARE
    when = moments(first.saved or first.seconds, first.seconds, drill.kills)
    last = Strike(drill.sizes[drill.kills % len(drill.sizes)], 0)
    struck = 0
    for number, strike in enumerate([*plan(drill), last], 1):
        name, log = "last" if strike is last else str(number), directory / f"{number}.log"
        run = _run(drill, drilled, log, strike, None if strike is last else when, limit)
        yield _told(name, strike, run, drilled, drill.signal)
        struck += run.struck is not None
        if run.late or (run.code and run.struck is None):
            what = f"did not end within {limit:g} s" if run.late else f"ended with code {run.code}"
            raise CheckpointError(f"run {name} {what}, by itself:\n{_tail(log)}\n    ({log})")
    compared, wrong = differences(peace, drilled, drill.tolerance, drill.ignore)
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} of {compared} arrays differ from the run in peace:\n  "
            + "\n  ".join(wrong)
        )
    if not struck:
        raise LaunchError("no run was interrupted before its end: give the program more to do.")
    how = f"within {drill.tolerance:g}" if drill.tolerance else "to the bit"
    what = f"{compared} arrays of {', '.join(newest(peace))}"
    yield f"after {struck} interruption{'s' * (struck != 1)} the same as in peace {how}: {what}"


def _check(drill: Drill, run: DrillRun, directory: Path, log: Path) -> None:
    if run.late or run.code:
        raise LaunchError(
            f"the program fails without interruptions too:\n{_tail(log)}\n    ({log})"
        )
    if not newest(directory):
        shown = " ".join(words(drill.program, directory))
        raise LaunchError(
            f"the program has left no checkpoint in {directory}. It ran as\n    {shown}\n"
            f"  Give it its directory: {PLACE} in an argument stands for it, else --checkpoint DIR "
            "is added."
        )
    if not run.seconds:
        raise LaunchError(
            "no process of a rank was seen: the drill needs Linux, and a launcher that starts all "
            "ranks on this host."
        )
