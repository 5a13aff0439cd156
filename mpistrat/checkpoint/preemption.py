"""`PreemptionCheckpointHandler`: saves when the job is about to be ended, and continues from there.

A signal, or a function that is asked every second, only sets a flag on the rank that it reaches.
The flag is sent with the handshake with which each `PreemptionCheckpointHandler.run` begins, so all
ranks learn of it at the same step, exchange the reasons, save there, and leave. Each `run` ends
with a write to the variable that counts runs, so every save has the right count.

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

from mpistrat.checkpoint.checkpoint import Checkpoint, check_all_ranks_save, determine_owner
from mpistrat.checkpoint.manager import CheckpointManager
from mpistrat.checkpoint.notice import (
    EXIT_CODE,
    Notice,
    check_signal_list,
    parse_signals,
    summarize_notices,
)
from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import FailureCatcher
from mpistrat.strategy.context_stack import enter_cross_replica
from mpistrat.variables.arguments import check_class, check_function
from mpistrat.variables.variable import Variable
from mpistrat.watchdog.status_board import say

_RUN_COUNTER_NAME = "checkpointed_runs"
_RESERVED_RUNS = 3 * 2  # runs kept in reserve at the end of the grace period, as in TensorFlow


@final
@dataclass(frozen=True)
class TerminationConfig:
    """The sources of a notice that the job is about to be ended, and the reaction to it.

    Attributes:
      termination_watcher_fn: Asked every second, in a thread of its own, on every rank; when it
        returns something true, this rank is about to be ended. None: a signal is the notice.
      exit_fn: Called on every rank when the last checkpoint is there. None: ``sys.exit(42)``. If it
        returns, the run continues as if nothing had been.
      grace_period: Seconds from the notice to the end. 0: save and leave at once. More: save, go
        on, save again as late as the time that a run takes allows, and leave then.
      save_fn: Called on every rank instead of saving the checkpoint, with the arguments of
        `PreemptionCheckpointHandler.save_checkpoint_if_preempted`.
      signals: The signals that are a notice; None is SIGTERM, or none with a function. Slurm sends
        SIGTERM; Open MPI's mpirun leaves a rank a quarter of a second after that, so there let
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
            object.__setattr__(
                self, "signals", check_signal_list(self.signals, "TerminationConfig")
            )
        if not self._parse_signals() and self.termination_watcher_fn is None:
            raise ValueError(
                "TerminationConfig: neither a signal nor a function is given, so there would "
                "never be a notice."
            )

    def _parse_signals(self) -> tuple[signal.Signals, ...]:
        """Return the signals.

        Raises:
          ValueError: One is unknown, or cannot be handled.
        """
        default_signals = () if self.termination_watcher_fn is not None else (signal.SIGTERM,)
        return parse_signals(
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
      termination_config: The sources of a notice, and the reaction; SIGTERM, and ``sys.exit(42)``
        on all ranks, if None.

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
        checkpoint_or_manager = checkpoint_or_checkpoint_manager
        config = TerminationConfig() if termination_config is None else termination_config
        checkpoint = (
            checkpoint_or_manager.checkpoint
            if isinstance(checkpoint_or_manager, CheckpointManager)
            else checkpoint_or_manager
        )
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint()  # for the current strategy
        strategy, failure = determine_owner(checkpoint)
        lockstep: Lockstep = strategy._replicas.lockstep
        with lockstep.validating_collectively("PreemptionCheckpointHandler"):
            if failure is not None:
                raise failure
            _check_arguments(cluster_resolver, checkpoint_or_manager, checkpoint_dir, config)
            _check_counter_name(checkpoint)
            check_all_ranks_save(strategy, "PreemptionCheckpointHandler")
        with strategy.scope():
            lockstep.handshake(f"PreemptionCheckpointHandler, {config.grace_period or 0} s")
            self._manager = _make_manager(checkpoint_or_manager, checkpoint_dir)
            self._strategy, self._config, self._lockstep = strategy, config, lockstep
            self._run_variable = Variable(np.int64(0), trainable=False, name=_RUN_COUNTER_NAME)
            self._restore_newest(checkpoint)
        self._run_count = int(self._run_variable.numpy())
        self._mean_seconds, self._timed_run_count, self._save_seconds = 0.0, 0, 0.0
        self._last_look_time = time.monotonic()
        self._has_saved = False  # since the notice, and the grace period has not passed yet
        self._notice = Notice(lockstep.ranks[lockstep.comm.rank], config.grace_period)
        with lockstep.validating_collectively("PreemptionCheckpointHandler"):
            self._start_listening()

    def _restore_newest(self, checkpoint: Checkpoint) -> None:
        """Restore the newest checkpoint, with the number of runs. Collective."""
        if self._manager is None:
            return
        previous_tree = getattr(checkpoint, _RUN_COUNTER_NAME, None)
        setattr(checkpoint, _RUN_COUNTER_NAME, self._run_variable)
        try:
            self._manager.restore_or_initialize()
        except BaseException:
            setattr(checkpoint, _RUN_COUNTER_NAME, previous_tree)
            raise

    def _start_listening(self) -> None:
        config = self._config
        weakref.finalize(self, self._notice.stop_listening).atexit = False
        if config._parse_signals():
            self._notice.warn_of_open_mpi(config._parse_signals())
            self._notice.listen_for_signals(config._parse_signals(), "PreemptionCheckpointHandler")
        watcher = config.termination_watcher_fn
        self._notice.start_watchers({} if watcher is None else {"termination_watcher_fn": watcher})

    @property
    def total_run_calls(self) -> int:
        """How many times `run` has ended, earlier starts of the program included."""
        return self._run_count

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
        self._check_notices("PreemptionCheckpointHandler.run", (), {})
        start = time.monotonic()
        return_value = distributed_train_function(*args, **kwargs)
        self._count_run(time.monotonic() - start)
        return return_value

    def _count_run(self, seconds: float) -> None:
        """Count one run in the variable, which whoever saves the checkpoint saves."""
        with enter_cross_replica(
            self._strategy, "PreemptionCheckpointHandler", "it outside of run()"
        ):
            self._run_variable.assign(np.int64(self._run_count + 1))
        self._run_count += 1
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
        self._check_notices(
            "PreemptionCheckpointHandler.save_checkpoint_if_preempted", args, kwargs
        )
        self._last_look_time = time.monotonic()

    def watch_preemption_scope(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that runs its body and does nothing else.

        It is here for programs that have it: the other ranks hear of an error without it, in their
        next call. Never communicates.
        """
        return contextlib.nullcontext()

    def _check_notices(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Agree on whether it is time to save, and to leave."""
        with enter_cross_replica(self._strategy, call, "it outside of run()"):
            notice, failure = self._notice, None
            if notice.watcher_error is not None:
                failure, notice.watcher_error = notice.watcher_error, None
            reason = notice.reason
            reserved_seconds = _RESERVED_RUNS * self._mean_seconds + self._save_seconds
            latest_save_time = (
                notice.notice_time + (self._config.grace_period or 0.0) - reserved_seconds
            )
            is_late = bool(reason) and self._has_saved and time.monotonic() > latest_save_time
            is_new = bool(reason) and not self._has_saved
            lockstep = self._lockstep
            if not lockstep.handshake(
                call, failure=failure, needs_followup=is_new or is_late
            ).needs_followup:
                return
            notice_text = summarize_notices(lockstep, reason).text
            is_last = not self._config.grace_period or any(lockstep.gather_texts(b"late" * is_late))
            self._save(args, kwargs)
            self._has_saved = not is_last
            if lockstep.comm.rank == 0:
                self._print_outcome(notice_text, is_last)
        if is_last:
            notice.clear()
            notice.is_leaving = True
            (self._config.exit_fn or functools.partial(sys.exit, EXIT_CODE))()
            notice.is_leaving = False

    def _save(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        start = time.monotonic()
        if self._config.save_fn is not None:
            call = "PreemptionCheckpointHandler, after save_fn"
            with FailureCatcher() as caught:
                self._config.save_fn(*args, **kwargs)
            self._lockstep.handshake(call, failure=caught.failure)
        elif self._manager is not None:
            self._manager._save(*args, **kwargs)
            self._manager.wait()  # for a save in the background
        self._save_seconds = time.monotonic() - start

    def _print_outcome(self, notice_text: str, is_last: bool) -> None:
        destination_text = "by save_fn"
        if self._config.save_fn is None and self._manager is not None:
            destination_text = f"as {self._manager.latest_checkpoint}"
        outcome = "leaving" if is_last else "continuing until the grace period ends"
        text = f"saved {destination_text} after {self._run_count} runs; {outcome}."
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


def _check_counter_name(checkpoint: Checkpoint) -> None:
    current_tree = getattr(checkpoint, _RUN_COUNTER_NAME, None)
    is_run_counter = (
        isinstance(current_tree, Variable) and current_tree.name == f"{_RUN_COUNTER_NAME}:0"
    )
    if current_tree is not None and not is_run_counter:
        raise ValueError(
            "PreemptionCheckpointHandler counts runs in the checkpoint under the name "
            f"{_RUN_COUNTER_NAME!r}, which is taken; give that tree another name."
        )


def _make_manager(
    checkpoint_or_manager: Checkpoint | CheckpointManager | None,
    directory: str | os.PathLike[str] | None,
) -> CheckpointManager | None:
    if isinstance(checkpoint_or_manager, Checkpoint) and directory is not None:
        return CheckpointManager(checkpoint_or_manager, directory, max_to_keep=1)
    return checkpoint_or_manager if isinstance(checkpoint_or_manager, CheckpointManager) else None


def _check_arguments(
    resolver: ClusterResolver | None,
    checkpoint_or_manager: object,
    directory: object,
    config: TerminationConfig,
) -> None:
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
