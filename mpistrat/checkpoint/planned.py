"""Leaving before the job is ended, at a step where all ranks have saved."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn, final

from mpistrat.checkpoint.checkpoint import determine_owner
from mpistrat.checkpoint.claim import Claim
from mpistrat.checkpoint.files import check_path
from mpistrat.checkpoint.manager import CheckpointManager, check_number, read_step
from mpistrat.checkpoint.notice import EXIT_CODE, Notice, parse_signals, summarize_notices
from mpistrat.cluster.batch_job import get_end_time, get_job_id, get_kill_wait
from mpistrat.strategy.context_stack import enter_cross_replica
from mpistrat.watchdog.status_board import say

_QUERY_SECONDS = 300.0  # seconds between two questions to the batch system
# Seconds until the first line about the time that is left, and between further lines.
_FIRST_LINE_SECONDS, _LINE_SECONDS = 60.0, 1800.0
_MAX_SECONDS_AGO = 86400.0  # seconds; what was over so long ago is no end of this job
_EndSource = float | Callable[[], float | None] | None


def format_duration(seconds: float) -> str:
    """Return a length of time for people.

    Example:
      >>> format_duration(18600), format_duration(754), format_duration(12.3)
      ('5 h 10 min', '12 min 34 s', '12 s')
    """
    total_seconds = round(max(0.0, seconds))
    if total_seconds >= 3600:
        return f"{total_seconds // 3600} h {total_seconds % 3600 // 60} min"
    return (
        f"{total_seconds // 60} min {total_seconds % 60} s"
        if total_seconds >= 60
        else f"{total_seconds} s"
    )


def _check_end_time(end_time: float, current_time: float, error_prefix: str = "") -> float:
    """Return a time, if it may be the end of a job; both are seconds since 1970."""
    if math.isnan(end_time):
        raise ValueError(f"{error_prefix}it is not a number")
    if end_time < current_time - _MAX_SECONDS_AGO:
        raise ValueError(
            f"{error_prefix}{end_time:g} is long over; seconds since 1970 are time.time() + 3600"
        )
    return end_time


@final
class RemainingTime:
    """Knows when the time of the job ends, and whether all steps will be made before; on rank 0.

    Args:
      end_source: When, as `preemption` takes it.
      grace_seconds: Seconds before that at which the job is to leave.
      claim: Says how long saving took, and shows the progress.
      clock: Seconds, monotonic.
      wall_clock: Seconds since 1970.
    """

    def __init__(
        self,
        end_source: _EndSource,
        grace_seconds: float,
        claim: Claim,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ):
        """Create it; nobody is asked yet."""
        self.step: int | None = None
        self.total_steps: int | None = None
        self._end_source, self._grace_seconds, self._claim = end_source, grace_seconds, claim
        self._clock, self._wall_clock = clock, wall_clock
        self._query_time, self._is_silent = -_QUERY_SECONDS, False
        self._end_time: float | None = None
        self._rate_start: tuple[int, float] | None = None
        self._next_line_time = clock() + _FIRST_LINE_SECONDS

    def _ask_seconds_left(self) -> float | None:
        """Return the seconds that are left; ask whoever knows, every five minutes at most."""
        clock_time = self._clock()
        if clock_time - self._query_time >= _QUERY_SECONDS:
            self._query_time = clock_time
            try:
                end_time = self._end_source() if callable(self._end_source) else self._end_source
                wall_time = self._wall_clock()
                self._end_time = (
                    None
                    if end_time is None
                    else clock_time + _check_end_time(end_time, wall_time) - wall_time
                )
            except Exception as error:
                if not self._is_silent:
                    say(f"mpistrat: the time limit of this job is not known: {error}.")
                self._is_silent = True
        return None if self._end_time is None else self._end_time - clock_time

    def _compute_rate(self) -> float | None:
        """Return steps per second since the first known step."""
        if self.step is None:
            return None
        clock_time = self._clock()
        if self._rate_start is None:
            self._rate_start = self.step, clock_time
        first_step, first_time = self._rate_start
        return (
            (self.step - first_step) / (clock_time - first_time)
            if self.step > first_step and clock_time > first_time
            else None
        )

    def __call__(self) -> float | None:
        """Return the seconds that are left if it is time to leave, and else None."""
        seconds_left, rate = self._ask_seconds_left(), self._compute_rate()
        save_seconds = float(self._claim.progress.get("save_seconds", 0.0))
        seconds_needed = None
        if rate and self.step is not None and self.total_steps is not None:
            seconds_needed = max(0, self.total_steps - self.step) / rate
        self._update_claim(seconds_left, rate, seconds_needed)
        if self._clock() >= self._next_line_time and (
            seconds_needed is not None or seconds_left is not None
        ):
            self._next_line_time = self._clock() + _LINE_SECONDS
            say(self._format_line(seconds_left, seconds_needed, save_seconds))
        leaving_seconds = max(self._grace_seconds, 2 * save_seconds + (2 / rate if rate else 0.0))
        return (
            None
            if seconds_left is None or seconds_left > leaving_seconds
            else max(seconds_left, 1e-3)
        )

    def _update_claim(
        self, seconds_left: float | None, rate: float | None, seconds_needed: float | None
    ) -> None:
        progress = {"step": self.step, "steps": self.total_steps, "steps_per_second": rate}
        progress |= {"done_in_seconds": seconds_needed, "job_ends_in_seconds": seconds_left}
        self._claim.update_progress(
            **{
                name: round(value, 3) if isinstance(value, float) else value
                for name, value in progress.items()
                if value is not None
            }
        )

    def _format_line(
        self, seconds_left: float | None, seconds_needed: float | None, save_seconds: float
    ) -> str:
        clauses = (
            []
            if seconds_needed is None
            else [f"at this rate done in {format_duration(seconds_needed)}"]
        )
        clauses += (
            [] if seconds_left is None else [f"the job ends in {format_duration(seconds_left)}"]
        )
        clauses.append(
            f"last save {format_duration(save_seconds)}, notice "
            f"{format_duration(self._grace_seconds)}"
        )
        return f"mpistrat: {'; '.join(clauses)}."


@final
class Preemption:
    """The context manager of `preemption`: saves and leaves when a rank has a notice.

    Attributes:
      grace: Seconds from a notice to the end.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        *,
        signals: tuple[signal.Signals, ...],
        grace: float,
        stop_file: Path | None,
        end_source: _EndSource,
        test_function: Callable[[], Any] | None,
    ):
        """Create it; nothing is listened to before the body begins."""
        self._manager, self.grace, self._signals = manager, grace, signals
        self._stop_file, self._end_source = stop_file, end_source
        self._test_function = test_function
        self._strategy = determine_owner(manager.checkpoint)[0]
        self._lockstep = self._strategy._replicas.lockstep
        self._notice = Notice(self._lockstep.ranks[self._lockstep.comm.rank], grace)
        self._remaining_time: RemainingTime | None = None
        self._has_asked_scheduler = False  # for the KillWait of Slurm
        self._is_of_fit = False  # the program has not chosen the signals

    def __enter__(self) -> Preemption:
        """Claim the directory, and listen. Collective."""
        with self._lockstep.validating_collectively("preemption"):
            if self._manager._preemption is not None:
                raise ValueError("preemption: this manager is in the body of another one already.")
        self._manager._acquire_claim()
        watchers: dict[str, Callable[[], Any]] = {}
        if self._test_function is not None:
            watchers["the test of the program"] = self._test_function
        claim = self._manager._claim
        if claim is not None:  # on rank 0, which alone asks for files and schedulers
            if self._stop_file is not None:
                watchers[f"the file {self._stop_file}"] = self._stop_file.exists
            self._remaining_time = RemainingTime(self._end_source, self.grace, claim)
            watchers["the end of the job's time"] = self._remaining_time
            if signal.SIGTERM in self._signals:
                watchers["the KillWait of Slurm"] = self._ask_kill_wait
            self._warn_of_short_grace(claim)
        with self._lockstep.validating_collectively("preemption"):
            if self._signals:
                if get_job_id() or not self._is_of_fit:
                    self._notice.warn_of_open_mpi(self._signals)
                self._notice.listen_for_signals(self._signals, "preemption")
        self._notice.start_watchers(
            {name: _call_until_failure(name, call) for name, call in watchers.items()}
        )
        self._manager._preemption = self
        return self

    def _ask_kill_wait(self) -> None:
        """Ask once, in the thread that watches: a scheduler may take its time."""
        if not self._has_asked_scheduler:
            self._has_asked_scheduler = True
            self._notice.kill_wait_seconds = get_kill_wait()

    def _warn_of_short_grace(self, claim: Claim) -> None:
        save_seconds = claim.previous_content.get("save_seconds")
        if isinstance(save_seconds, int | float) and save_seconds > self.grace:
            say(
                "mpistrat: the last save of the previous job took "
                f"{format_duration(save_seconds)}, but "
                f"grace is {format_duration(self.grace)}: too short to save after a notice. "
                "Request an earlier signal from the batch system, and pass that time as grace."
            )

    def __exit__(self, exception_type: type[BaseException] | None, *exception: object) -> None:
        """Listen no more; handlers that were there are put back.

        Raises:
          KeyboardInterrupt: Ctrl-C came after the last step.
        """
        self._notice.stop_listening()
        self._manager._preemption = None
        if exception_type is None and self._notice.is_interrupt:
            raise KeyboardInterrupt

    def _read_reason(self, step: int | None = None, steps: int | None = None) -> str:
        """Return the reason of this rank's notice; empty without a notice.

        Never communicates. The caller agrees with the other ranks, saves and calls `_leave` with
        them.

        Args:
          step: The next step, for the line about the remaining time; None for the
            ``step`` of the checkpoint, if it has one.
          steps: How many there are to be.

        Raises:
          ValueError: One of them is not an integer, or below 0.
        """
        checked_step = check_number("preemption: step", step, 0)
        step_count = check_number("preemption: steps", steps, 0)
        if self._remaining_time is not None:
            next_step = (
                read_step(self._manager.checkpoint) if checked_step is None else checked_step
            )
            self._remaining_time.step, self._remaining_time.total_steps = next_step, step_count
        return self._notice.reason

    def step(self, step: int | None = None, steps: int | None = None) -> None:
        """Save and leave if any rank has a notice; for loops without `CheckpointManager.resume`.

        Collective: all ranks call it, in cross-replica code, once in each step.

        Args:
          step: As `_read_reason` takes it.
          steps: As `_read_reason` takes it.

        Raises:
          SystemExit: With code 42, on every rank, when the checkpoint is there.
          KeyboardInterrupt: In its place, if the notice was Ctrl-C.
          OSError: It could not be written; the next call tries again.
          ValueError: As of `_read_reason`.

        Cost: one handshake.
        """
        call = "preemption.step"
        with enter_cross_replica(self._strategy, call, "it outside of run()"):
            with self._lockstep.validating_collectively(call):
                is_asked = bool(self._read_reason(step, steps))
            if not self._lockstep.handshake(call, needs_followup=is_asked).needs_followup:
                return
            self._manager._save()
        self._leave()

    def _leave(self) -> NoReturn:
        """Print which ranks had a notice, and leave with code 42 after the save. Collective.

        Raises:
          SystemExit: On every rank.
          KeyboardInterrupt: On every rank, after Ctrl-C.
        """
        self._manager.wait()  # for a save in the background
        notices = summarize_notices(self._lockstep, self._notice.reason)
        claim = self._manager._claim
        if claim is not None:
            path = self._manager.latest_checkpoint
            say(
                f"mpistrat: Ctrl-C: saved as {path}; start again to continue."
                if notices.is_interrupt
                else f"mpistrat: told to end ({notices.text}): saved as {path}; exiting with code "
                f"{EXIT_CODE}."
            )
            claim.update_progress(left_because=notices.text)
            claim.release()
        if notices.is_interrupt:
            self._lockstep.state.kept_interrupt.drop()  # a second one, during the save
            raise KeyboardInterrupt
        self._notice.is_leaving = True
        sys.exit(EXIT_CODE)


def _call_until_failure(name: str, watcher: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that answers None from the first time on that `watcher` fails."""
    has_failed = False

    def ask() -> Any:
        nonlocal has_failed
        try:
            return None if has_failed else watcher()
        except Exception as error:
            has_failed = True
            say(f"mpistrat: {name} failed and is not called again: {type(error).__name__}: {error}")
            return None

    return ask


def preemption(
    manager: CheckpointManager,
    *,
    signals: Iterable[int | str] = ("SIGUSR1", "SIGTERM"),
    grace: float = 120.0,
    stop_file: str | os.PathLike[str] | None = None,
    ends: float | Callable[[], float | None] | None = get_end_time,
    test: Callable[[], Any] | None = None,
) -> Preemption:
    """Save and leave with exit code 42 when the job is about to be ended.

    Use it in a ``with`` statement. A notice on one rank is enough: it is printed on stderr at once,
    and at the next step all ranks save and exit. `CheckpointManager.resume` checks at each step;
    other loops call `Preemption.step`. Existing signal handlers are called too, and restored
    afterwards.

    Collective: creation, and entering, which claims the directory.

    Args:
      manager: The `CheckpointManager` that saves.
      signals: Signals that are a notice; names or numbers. Slurm sends SIGTERM, and the signal of
        ``--signal``. mpirun of Open MPI kills ranks 0.25 s after SIGTERM: there use SIGUSR1. After
        SIGINT (Ctrl-C) KeyboardInterrupt is raised in place of the exit; a second one raises it at
        once.
      grace: Seconds from a notice to the end of the job, as requested from the batch system, such
        as by ``--signal=B:USR1@120``. Without a notice the program exits this long before the time
        limit of the job; earlier if two saves and two steps take longer.
      stop_file: A file whose existence is a notice; rank 0 checks every second. It is not removed.
      ends: When the time of the job ends: seconds since 1970; a function that returns that, which
        rank 0 calls at the start and every five minutes; or None for never. By default Slurm or PBS
        is asked.
      test: A function whose true result is a notice; called every second in a thread, on every
        rank. If it raises, the error is printed on stderr and it is not called again.

    Returns:
      The context manager.

    Raises:
      TypeError: An argument is of another kind.
      ValueError: `grace` is not positive; `ends` is long over; a signal is unknown, or cannot be
        handled; this is not the main thread, which is the one that gets signals.
      FileExistsError: Another job saves in the directory.

    Cost: three handshakes; afterwards that of `Preemption.step` or ``resume``.

    Example:
      >>> import tempfile, mpistrat as ms
      >>> v = ms.Variable(0)
      >>> manager = ms.CheckpointManager(ms.Checkpoint(v=v), tempfile.mkdtemp(), max_to_keep=2)
      >>> with ms.preemption(manager, grace=60.0) as leaving:
      ...     for step in range(3):
      ...         _ = v.assign_add(1)
      ...         leaving.step(step + 1, 3)
    """
    if not isinstance(manager, CheckpointManager):
        raise TypeError(f"preemption: manager must be a CheckpointManager, got {manager!r:.80}.")
    lockstep = determine_owner(manager.checkpoint)[0]._replicas.lockstep
    with lockstep.validating_collectively("preemption"):
        numbers = parse_signals(signals, "preemption")
        if isinstance(grace, bool) or not isinstance(grace, int | float):
            raise TypeError(f"preemption: grace must be seconds, got {grace!r:.60}.")
        if not 0 < grace < float("inf"):
            raise ValueError(f"preemption: grace must be seconds, more than 0, got {grace!r}.")
        if test is not None and not callable(test):
            raise TypeError(f"preemption: test must be a function or None, got {test!r:.60}.")
        if not (ends is None or callable(ends) or isinstance(ends, int | float)):
            raise TypeError(f"preemption: ends must be a time or a function, got {ends!r:.60}.")
        if isinstance(ends, int | float):
            _check_end_time(ends, time.time(), "preemption: ends: ")
        has_stop_file = stop_file not in (None, "")
        path = check_path("preemption", "stop_file", stop_file) if has_stop_file else None
    lockstep.handshake(f"preemption, grace {grace}, stop_file {path}")
    return Preemption(
        manager,
        signals=numbers,
        grace=float(grace),
        stop_file=path,
        end_source=ends,
        test_function=test,
    )
