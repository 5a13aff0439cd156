"""Saving when the job is about to be ended, and continuing from there when it is started again.

A signal, or a function that is asked every second, only sets a flag on the rank that it reaches.
The flag is sent with the handshake with which each `PreemptionCheckpointHandler.run` begins, so all
ranks learn of it at the same step, save there, and leave.

Like: ``tf.distribute.experimental.PreemptionCheckpointHandler``, failure_handling.py of TensorFlow
2.21, whose workers agree on a step to come; ranks that make the same calls are at one already.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from mpistrat.checkpoint.checkpoint import Checkpoint, owner_of, refuse_alone
from mpistrat.checkpoint.manager import CheckpointManager
from mpistrat.checkpoint.notice import EXIT_CODE, Notice, listed, notices_text, numbers_of
from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import Caught
from mpistrat.strategy.context_stack import enter_cross_replica
from mpistrat.variables.arguments import check_class, check_function
from mpistrat.variables.variable import Variable
from mpistrat.watchdog.status_board import say

_RUNS = "checkpointed_runs"
_SAVE_TIME = 3 * 2  # runs kept in reserve at the end of the grace period, as in TensorFlow


@final
@dataclass(frozen=True)
class TerminationConfig:
    """What tells that the job is about to be ended, and what happens then.

    Attributes:
      termination_watcher_fn: Asked every second, in a thread of its own, on every rank; when it
        returns something true, this rank is about to be ended. None: a signal tells.
      exit_fn: Called on every rank when the last checkpoint is there. None: ``sys.exit(42)``. If it
        returns, the run continues as if nothing had been.
      grace_period: Seconds from the notice to the end. 0: save and leave at once. More: save, go
        on, save again as late as the time that a run takes allows, and leave then.
      save_fn: Called on every rank instead of saving the checkpoint, with the arguments of
        `PreemptionCheckpointHandler.save_checkpoint_if_preempted`.
      signals: Which signals tell; None is SIGTERM, or none if a function tells. SIGTERM is what
        Slurm sends; Open MPI's mpirun leaves a rank a quarter of a second after that, so there let
        the batch system send SIGUSR1, and name it.

    Raises:
      TypeError: A function cannot be called, the period is not a number, or `signals` no list.
      ValueError: The period is negative; a signal is unknown, or cannot be handled.

    Example:
      >>> TerminationConfig(grace_period=30).grace_period
      30
    """

    termination_watcher_fn: Callable[[], Any] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None
    signals: Iterable[int | str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check all of them."""
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            function = getattr(self, name)
            if function is not None:
                check_function("TerminationConfig", name, function)
        period = self.grace_period
        if period is not None and (isinstance(period, bool) or not isinstance(period, int | float)):
            raise TypeError(f"TerminationConfig: grace_period must be seconds, got {period!r}.")
        if period is not None and not 0 <= period < float("inf"):
            raise ValueError(f"TerminationConfig: grace_period must be seconds, got {period!r}.")
        if self.signals is not None:
            object.__setattr__(self, "signals", listed(self.signals, "TerminationConfig"))
        if not self.numbers() and self.termination_watcher_fn is None:
            raise ValueError(
                "TerminationConfig: neither a signal nor a function is given, so there would "
                "never be a notice."
            )

    def numbers(self) -> tuple[signal.Signals, ...]:
        """Return the signals.

        Raises:
          ValueError: One is unknown, or cannot be handled.
        """
        default_signals = () if self.termination_watcher_fn is not None else (signal.SIGTERM,)
        return numbers_of(
            default_signals if self.signals is None else self.signals, "TerminationConfig"
        )


@final
class PreemptionCheckpointHandler:
    """Saves a checkpoint when the job is about to be ended, and restores it at the next start.

    Collective: making it is, in cross-replica code of the strategy of the checkpoint's variables.
    It restores the newest checkpoint, if there is one.

    Args:
      cluster_resolver: Names the tasks; ranks come from MPI anyway, so None does as well.
      checkpoint_or_checkpoint_manager: A `Checkpoint`, which is kept in `checkpoint_dir`, only the
        newest; or a `CheckpointManager`. The int64 variable ``checkpointed_runs`` is added to it.
        None if `TerminationConfig.save_fn` saves; then nothing is restored.
      checkpoint_dir: The directory, for a `Checkpoint`.
      termination_config: What tells, and what happens then; SIGTERM, and ``sys.exit(42)`` on all
        ranks, if None.

    Raises:
      NotImplementedError: The cluster has parameter servers.
      TypeError: An argument is of another kind.
      ValueError: A `Checkpoint` without a directory; or this is not the main thread, which is the
        one that gets signals.
      CheckpointError: There are checkpoints, but none can be read.
      StructureError: The newest does not fit the variables.

    Like: ``tf.distribute.experimental.PreemptionCheckpointHandler``.

    Example:
      >>> import tempfile, mpistrat as ms
      >>> strategy, directory = ms.OneDeviceStrategy("cpu"), tempfile.mkdtemp()
      >>> with strategy.scope():
      ...     steps = ms.Variable(0)
      >>> about_to_end = TerminationConfig(lambda: False, exit_fn=lambda: None)
      >>> handler = PreemptionCheckpointHandler(
      ...     None, ms.Checkpoint(steps=steps), directory, about_to_end)
      >>> for step in range(handler.total_run_calls, 3):
      ...     _ = handler.run(strategy.run, lambda: steps.assign_add(1))
      >>> int(steps.numpy()), handler.total_run_calls
      (3, 3)
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager | None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ):
        """Restore the newest checkpoint, and wait for a notice."""
        target = checkpoint_or_checkpoint_manager
        config = TerminationConfig() if termination_config is None else termination_config
        checkpoint = target.checkpoint if isinstance(target, CheckpointManager) else target
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint()  # for the current strategy
        strategy, failure = owner_of(checkpoint)
        lockstep: Lockstep = strategy._replicas.lockstep
        with lockstep.preparing("PreemptionCheckpointHandler"):
            if failure is not None:
                raise failure
            _check(cluster_resolver, target, checkpoint_dir, config)
            _check_free(checkpoint)
            refuse_alone(strategy, "PreemptionCheckpointHandler")
        with strategy.scope():
            lockstep.handshake(f"PreemptionCheckpointHandler, {config.grace_period or 0} s")
            self._manager = _managed(target, checkpoint_dir)
            self._strategy, self._config, self._lockstep = strategy, config, lockstep
            self._runs = Variable(np.int64(0), trainable=False, name=_RUNS)
            if self._manager is not None:
                previous_tree = getattr(checkpoint, _RUNS, None)
                setattr(checkpoint, _RUNS, self._runs)
                try:
                    self._manager.restore_or_initialize()
                except BaseException:
                    setattr(checkpoint, _RUNS, previous_tree)
                    raise
        self._counter = int(self._runs.numpy())
        self._mean_seconds, self._timed_run_count, self._save_seconds = 0.0, 0, 0.0
        self._last_look_time = time.monotonic()
        self._has_saved = False  # since the notice, and the grace period has not passed yet
        self._notice = Notice(lockstep.ranks[lockstep.comm.rank], config.grace_period)
        with lockstep.preparing("PreemptionCheckpointHandler"):
            self._begin()

    def _begin(self) -> None:
        config = self._config
        weakref.finalize(self, self._notice.end).atexit = False
        if config.numbers():
            self._notice.listen(config.numbers(), "PreemptionCheckpointHandler")
        watcher = config.termination_watcher_fn
        self._notice.watch({} if watcher is None else {"termination_watcher_fn": watcher})

    @property
    def total_run_calls(self) -> int:
        """How many times `run` has ended, earlier starts of the program included."""
        return self._counter

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Save and leave if any rank is about to be ended, and else call a function.

        Collective: all ranks call it, in cross-replica code, and the function is what all ranks
        do together, such as ``strategy.run(step, args=(batch,))``.

        Args:
          distributed_train_function: Called with the other arguments. When it has ended, one run
            has been made.
          *args: Its arguments.
          **kwargs: Its arguments by name.

        Returns:
          What it returned.

        Raises:
          SystemExit: With code 42, on every rank, after the checkpoint was saved; unless
            `TerminationConfig` says otherwise.
          OSError: The checkpoint could not be written; the next call tries again.

        Cost: two handshakes, one before and one after.
        """
        self._look("PreemptionCheckpointHandler.run", (), {})
        start = time.monotonic()
        result = distributed_train_function(*args, **kwargs)
        self._count_run(time.monotonic() - start)
        return result

    def _count_run(self, seconds: float) -> None:
        """Count one run in the variable, which whoever saves the checkpoint saves."""
        with enter_cross_replica(
            self._strategy, "PreemptionCheckpointHandler", "it outside of run()"
        ):
            self._runs.assign(np.int64(self._counter + 1))
        self._counter += 1
        self._timed_run_count += 1
        self._mean_seconds += (seconds - self._mean_seconds) / self._timed_run_count

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Save and leave if any rank is about to be ended; for loops that do not call `run`.

        Collective: all ranks call it, in cross-replica code, at the end of each step. One call
        counts as one run. Raises what `run` does.

        Args:
          *args: For `CheckpointManager.save`, or `TerminationConfig.save_fn`.
          **kwargs: For them, by name.

        Cost: two handshakes.
        """
        self._count_run(time.monotonic() - self._last_look_time)
        self._look("PreemptionCheckpointHandler.save_checkpoint_if_preempted", args, kwargs)
        self._last_look_time = time.monotonic()

    def watch_preemption_scope(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that runs its body and does nothing else.

        It is here for programs that have it: what a rank raises is told to the others without it,
        by their next call. Never communicates.
        """
        return contextlib.nullcontext()

    def _look(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Agree on whether it is time to save, and to leave."""
        with enter_cross_replica(self._strategy, call, "it outside of run()"):
            notice, failure = self._notice, None
            if notice.error is not None:
                failure, notice.error = notice.error, None
            reason = notice.reason
            reserve = _SAVE_TIME * self._mean_seconds + self._save_seconds
            ends = notice.at + (self._config.grace_period or 0.0) - reserve
            is_late = bool(reason) and self._has_saved and time.monotonic() > ends
            is_new = bool(reason) and not self._has_saved
            lockstep = self._lockstep
            if not lockstep.handshake(call, failure=failure, has_more=is_new or is_late).has_more:
                return
            notice_text = notices_text(lockstep, reason)
            is_last = not self._config.grace_period or any(lockstep.texts(b"late" * is_late))
            self._save(args, kwargs)
            self._has_saved = not is_last
            if lockstep.comm.rank == 0:
                self._print_outcome(notice_text, is_last)
        if is_last:
            notice.forget()
            notice.is_leaving = True
            (self._config.exit_fn or functools.partial(sys.exit, EXIT_CODE))()
            notice.is_leaving = False

    def _save(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        start = time.monotonic()
        if self._config.save_fn is not None:
            call = "PreemptionCheckpointHandler, after save_fn"
            with Caught() as caught:
                self._config.save_fn(*args, **kwargs)
            self._lockstep.handshake(call, failure=caught.failure)
        elif self._manager is not None:
            self._manager._save(*args, **kwargs)
            self._manager.wait()  # for what is written in the background
        self._save_seconds = time.monotonic() - start

    def _print_outcome(self, notice_text: str, is_last: bool) -> None:
        path = "by save_fn"
        if self._config.save_fn is None and self._manager is not None:
            path = f"as {self._manager.latest_checkpoint}"
        outcome = "leaving" if is_last else "continuing until the grace period ends"
        text = f"saved {path} after {self._counter} runs; {outcome}."
        say(f"mpistrat: told to end ({notice_text}): {text}")


@final
class PreemptionWatcher:
    """Warns, and watches nothing: it is for TPUs that tell their workers.

    Attributes:
      preemption_message: None.

    Warns:
      RuntimeWarning: Always; says what to use.
    """

    def __init__(self) -> None:
        """Create a watcher, with a warning."""
        self.preemption_message: str | None = None
        warnings.warn(
            "PreemptionWatcher is for TPUs, so it does nothing here. "
            "PreemptionCheckpointHandler saves when a signal says that the job will be "
            "ended.",
            RuntimeWarning,
            stacklevel=2,
        )

    def block_until_worker_exit(self) -> None:
        """Return at once: there is no worker that would be told to end."""


def _check_free(checkpoint: Checkpoint) -> None:
    current_tree = getattr(checkpoint, _RUNS, None)
    is_run_counter = isinstance(current_tree, Variable) and current_tree.name == f"{_RUNS}:0"
    if current_tree is not None and not is_run_counter:
        raise ValueError(
            f"PreemptionCheckpointHandler counts runs in the checkpoint under the name {_RUNS!r}, "
            "which is taken; give that tree another name."
        )


def _managed(
    checkpoint_or_manager: Checkpoint | CheckpointManager | None,
    directory: str | os.PathLike[str] | None,
) -> CheckpointManager | None:
    if isinstance(checkpoint_or_manager, Checkpoint) and directory is not None:
        return CheckpointManager(checkpoint_or_manager, directory, max_to_keep=1)
    return checkpoint_or_manager if isinstance(checkpoint_or_manager, CheckpointManager) else None


def _check(resolver: Any, checkpoint_or_manager: Any, directory: Any, config: Any) -> None:
    check_class("cluster_resolver", resolver, ClusterResolver)
    if resolver is not None and "ps" in resolver.cluster_spec().jobs:
        raise NotImplementedError(
            "PreemptionCheckpointHandler: the cluster has parameter servers (job 'ps'), whose "
            "variables no rank holds. Use it with ranks that hold copies."
        )
    check_class("termination_config", config, TerminationConfig)
    if isinstance(checkpoint_or_manager, Checkpoint) and directory is None:
        raise ValueError(
            "PreemptionCheckpointHandler was given a Checkpoint but no checkpoint_dir. Name the "
            "directory, or give a CheckpointManager."
        )
    saves = checkpoint_or_manager is not None or config.save_fn is not None
    if not saves or not isinstance(checkpoint_or_manager, Checkpoint | CheckpointManager | None):
        raise TypeError(
            "PreemptionCheckpointHandler needs a Checkpoint or CheckpointManager, or "
            f"TerminationConfig(save_fn=...), got {checkpoint_or_manager!r:.60}."
        )
