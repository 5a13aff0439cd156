"""`CheckpointManager`: the newest few checkpoints of a directory.

`SaveInterval` says when a save is due, `iterate_remaining_batches` continues training where the
last start stopped. In both, all ranks agree in the handshake of the step.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, final

import numpy as np

from mpistrat.arrays import as_int, check_bool, check_int, is_bfloat16
from mpistrat.checkpoint import atomic, files, sharded
from mpistrat.checkpoint.background import BackgroundSaver
from mpistrat.checkpoint.checkpoint import Checkpoint, check_all_ranks_save, determine_owner
from mpistrat.checkpoint.claim import Claim, acquire_claim
from mpistrat.checkpoint.files import explaining_write_errors, on_replica0
from mpistrat.checkpoint.format import NO_METRICS
from mpistrat.checkpoint.saving import record_known_paths
from mpistrat.data import position
from mpistrat.data.dataset import Dataset
from mpistrat.data.distributed import DistributedDataset
from mpistrat.errors import CheckpointError, StructureError
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import CallState
from mpistrat.watchdog.status_board import say

_SECONDS_BY_UNIT = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SECONDS_BY_UNIT |= {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}
_INTERVAL_TEXT = re.compile(r"(\d+(?:\.\d+)?) *([a-z]+?)s?")
_DUE_FLAG, _NOTICE_FLAG = 1, 2
_Batches: TypeAlias = DistributedDataset | Dataset


@final
class SaveInterval:
    """When the next checkpoint is due.

    Args:
      interval: Seconds, a text such as ``"10 min"`` or ``"500 steps"``, or None for never.

    Raises:
      TypeError: It is neither a number nor a text.
      ValueError: It is not more than 0, or the text names no time and no steps.

    Example:
      >>> save_interval = SaveInterval("2 steps")
      >>> [(save_interval.count_step(), save_interval.is_due)[1] for _ in range(3)]
      [False, True, True]
    """

    def __init__(self, interval: object):
        """Begin to count."""
        self.is_never_due = interval is None
        self._seconds, self._steps = _parse_interval(interval)
        self.restart()

    def restart(self) -> None:
        """Count again: all is saved, or restored."""
        self._begin_time, self._step_count = time.monotonic(), 0

    def count_step(self) -> None:
        """Count a step."""
        self._step_count += 1

    @property
    def is_due(self) -> bool:
        """Whether it is time, by this rank's clock."""
        if self._steps is not None:
            return self._step_count >= self._steps
        # Before the first step nothing is new.
        seconds = self._seconds if self._step_count else None
        return seconds is not None and time.monotonic() - self._begin_time >= seconds


def _parse_interval(interval: object) -> tuple[float | None, int | None]:
    """Return seconds and steps, of which at least one is None."""
    expected_text = (
        f"every must be seconds, or as '10 min' or '500 steps', or None, got {interval!r:.60}."
    )
    if interval is None:
        return None, None
    if isinstance(interval, str):
        match = _INTERVAL_TEXT.fullmatch(interval.strip())
        number, unit = match.groups() if match else ("0", "")
        if unit == "step" and number.isdigit() and int(number):
            return None, int(number)
        seconds = float(number) * _SECONDS_BY_UNIT.get(unit, 0.0)
    elif isinstance(interval, bool) or not isinstance(interval, int | float):
        raise TypeError(expected_text)
    else:
        seconds = float(interval)
    if not 0 < seconds < float("inf"):
        raise ValueError(expected_text)
    return seconds, None


def _resolve_dataset(
    checkpoint: Any, dataset: Any, is_alone: bool
) -> tuple[_Batches, Callable[[Any], Any]]:
    """Return the dataset to iterate over, and a function for its elements."""
    batches = getattr(dataset, "distributed", dataset)
    if not isinstance(batches, DistributedDataset | Dataset):
        raise TypeError(
            "CheckpointManager.resume: expected what "
            f"strategy.experimental_distribute_dataset returns, got {dataset!r:.60}."
        )
    if isinstance(batches, Dataset) and not is_alone:
        raise TypeError(
            f"CheckpointManager.resume({dataset!r}): every rank would see all of it. Divide it "
            "first: strategy.experimental_distribute_dataset(dataset)."
        )
    origin = _original_dataset(batches)
    saved_objects = [
        stateful_object for stateful_object, _ in checkpoint._collect_state().stateful.values()
    ]
    if not any(
        _original_dataset(getattr(stateful_object, "distributed", stateful_object)) is origin
        for stateful_object in saved_objects
    ):
        raise StructureError(
            "CheckpointManager.resume: the checkpoint does not hold the position in this "
            "dataset. Add the dataset that was distributed: Checkpoint(..., data=dataset). "
            f"It has {saved_objects}."
        )
    return batches, getattr(dataset, "convert", lambda element: element)


def _original_dataset(dataset: Any) -> Any:
    """Return the dataset that was distributed."""
    return getattr(dataset, "_origin", dataset)


def iterate_remaining_batches(
    manager: Any,
    lockstep: Lockstep,
    dataset: Any,
    epochs: Any,
    on_epoch_end: Callable[[], object] | None = None,
) -> Iterator[Any]:
    """Return the batches that are left; see `CheckpointManager.resume`. Collective."""
    with lockstep.validating_collectively("CheckpointManager.resume"):
        batches, convert = _resolve_dataset(manager.checkpoint, dataset, lockstep.comm.size == 1)
        epoch_count = check_int("resume(epochs)", epochs, 0, ValueError)
        if on_epoch_end is not None and not callable(on_epoch_end):
            raise TypeError(
                f"resume(on_epoch_end) must be a function or None, got {on_epoch_end!r:.60}."
            )
    lockstep.handshake(f"CheckpointManager.resume({batches!r}, epochs={epoch_count})")
    manager._acquire_claim()  # before anything is computed that could not be saved
    if not manager._is_current:
        restored_path = manager.restore_or_initialize()
        if restored_path is not None and lockstep.comm.rank == 0:
            say(
                f"mpistrat: resume continues from {restored_path}, in epoch "
                f"{_original_dataset(batches).epoch + 1}."
            )
    return _yield_batches(manager, (batches, convert), epoch_count, on_epoch_end)


def read_notice_flag(manager: Any) -> int:
    """The bit that this rank sends to the others in the handshake of a step; 0 without a notice."""
    preemption = manager._preemption
    return _NOTICE_FLAG if preemption is not None and preemption._read_reason() else 0


def save_and_leave(manager: Any) -> None:
    """Save at once, and exit with code 42: a rank got a notice of preemption. Collective."""
    manager._save()
    manager._preemption._leave()


def _yield_batches(
    manager: Any,
    source: tuple[_Batches, Callable[[Any], Any]],
    epoch_count: int,
    on_epoch_end: Callable[[], object] | None,
) -> Iterator[Any]:
    (batches, convert), save_interval = source, manager._save_interval
    original_dataset = _original_dataset(batches)
    rank, call_state = manager._lockstep.comm.rank, manager._lockstep.state

    def read_flags() -> int:
        return read_notice_flag(manager) | (_DUE_FLAG if rank == 0 and save_interval.is_due else 0)

    while original_dataset.epoch < epoch_count:
        remaining_batches = (
            position.resume_epoch(batches, read_flags)
            if isinstance(batches, Dataset)
            else batches._resume(read_flags)
        )
        for flags, batch in remaining_batches:
            is_epoch_end, last_save = not batch.has_value(), manager.last_save
            is_last = is_epoch_end and on_epoch_end is not None and bool(on_epoch_end())
            is_last = is_last or (is_epoch_end and original_dataset.epoch >= epoch_count)
            is_due = flags or (is_epoch_end and (save_interval.is_never_due or is_last))
            if is_due and manager.last_save is last_save:  # else `on_epoch_end` has saved
                manager._save()
            if flags & _NOTICE_FLAG:
                manager._preemption._leave()
            if not is_epoch_end:
                has_stepped = functools.partial(_has_stepped, call_state, _count_steps(call_state))
                position.begin_batch(original_dataset, has_stepped)
                last_save = manager.last_save
                try:
                    yield convert(batch.get_value())
                finally:
                    position.finish_batch(original_dataset)
                if manager.last_save is last_save:  # else the body has saved after this step
                    save_interval.count_step()
            elif is_last:
                return


def _count_steps(call_state: CallState) -> int:
    return call_state.step_count + call_state.backward_count


def _has_stepped(call_state: CallState, previous_steps: int) -> bool:
    return _count_steps(call_state) != previous_steps


class CheckpointManager:
    """Saves numbered checkpoints, and removes the oldest.

    Collective: creation is. Replica 0 lists the directory for all ranks.

    Args:
      checkpoint: What is saved.
      directory: Where; replica 0 makes it when it first saves. The same string on every rank.
      max_to_keep: How many may be there, those of earlier runs included; None for any number. One
        that this manager has found damaged does not count: it never takes the place of a good one,
        and is removed with those that are older than the oldest that stays.
      checkpoint_name: What comes before the numbers.
      background: `save` returns when the state is copied, and a thread of one rank of each node
        writes it; at most one save is in progress. If it fails on any rank, the error is printed at
        once, and raised on all ranks by the next call, or by `wait`; until then `checkpoints` does
        not have it. The process waits for it before it ends.
      init_fn: Called on every rank by `restore_or_initialize` if there is no checkpoint.
      every: How often `resume` saves, and when `due` says so: seconds, or a string such as ``"10
        min"`` or ``"500 steps"``. Time is that of replica 0's monotonic clock. None for the end of
        each epoch.
      keep_best: The name of a metric, see `save`. The checkpoint with its best value stays beside
        the `max_to_keep` newest, see `best_checkpoint`.
      best_mode: ``"min"`` if low values are good, ``"max"`` if high ones are.

    Raises:
      TypeError: `checkpoint` is not a `Checkpoint`, `directory` not a string or path, `init_fn` not
        a function, `every` neither a number nor a string, or `keep_best` not a string.
      ValueError: `max_to_keep` is not a positive integer, `checkpoint_name` cannot name a file,
        `every` is not a time, or `best_mode` is another text.
      OSError: The directory cannot be read.
      LockstepError: The ranks name different directories.

    Cost: one handshake, whose payload from replica 0 has the path of each checkpoint. With
    `keep_best` replica 0 also opens each checkpoint and reads its manifest, no arrays.
    Like: ``tf.train.CheckpointManager``.

    Example:
      >>> import tempfile, mpistrat as ms
      >>> v = ms.Variable(0)
      >>> directory = tempfile.mkdtemp()
      >>> manager = ms.CheckpointManager(ms.Checkpoint(v=v), directory, max_to_keep=2)
      >>> for step in range(3):
      ...     _ = v.assign(step)
      ...     path = manager.save()
      >>> [path[-10:] for path in manager.checkpoints]
      ['ckpt-2.npz', 'ckpt-3.npz']
      >>> _ = v.assign(7)
      >>> manager.restore_or_initialize() == manager.latest_checkpoint
      True
      >>> int(v.numpy())
      2
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        *,
        checkpoint_name: str = "ckpt",
        init_fn: Callable[[], Any] | None = None,
        every: float | str | None = None,
        background: bool = False,
        keep_best: str | None = None,
        best_mode: str = "min",
    ):
        """Create a manager, and find the checkpoints that are there."""
        self._checkpoint = _check_checkpoint(checkpoint)
        self._strategy, failure = determine_owner(checkpoint)
        self._lockstep = self._strategy._replicas.lockstep
        if failure is not None:
            self._lockstep.fail_collectively("CheckpointManager", failure)
        with self._lockstep.validating_collectively("CheckpointManager"):
            self._directory = files.check_path("CheckpointManager", "directory", directory)
            self._name = _check_checkpoint_name(checkpoint_name)
            keep = check_number("max_to_keep", max_to_keep, 1)
            self._criterion = _make_criterion(keep_best, best_mode)
            self._retention = atomic.Retention(keep, self._criterion)
            self._init_fn = _check_init_function(init_fn)
            self._save_interval = SaveInterval(every)
            self._background_saver = (
                BackgroundSaver() if check_bool("background", background) else None
            )
        self._is_current = False  # the program has what is saved, or something newer
        self.last_save: tuple[float, dict[str, Any]] = (0.0, {})  # its start, and `job.json` of it
        self._has_claimed, self._waited_seconds = False, 0.0
        self._claim: Claim | None = None  # on replica 0
        self._preemption: Any = None  # a `Preemption`, in the body of one
        call = f"CheckpointManager({str(self._directory)!r}, {self._name!r}, keep {keep}"
        call += (", in the background)" if background else ")") + f", every {every}" * bool(every)
        call += f", the best by {self._criterion}" * (self._criterion is not None)
        self._paths = self._find_checkpoints(call)

    def _find_checkpoints(self, call: str) -> list[str]:
        """Return the paths of the checkpoints, the oldest first, and note their metrics."""

        def read_metrics_by_path() -> dict[str, Mapping[str, float]]:
            paths = files.list_numbered_paths(self._directory, self._name).values()
            needs_metrics = self._criterion is not None
            return {
                str(path): dict(sharded.read_metrics(path)) if needs_metrics else {}
                for path in paths
            }

        metrics_by_path = on_replica0(self._lockstep, call, read_metrics_by_path)
        for path, metrics in metrics_by_path.items():
            self._retention.record_checkpoint(Path(path), metrics)
        first_path = files.make_numbered_path(self._directory, self._name, 0)
        record_known_paths([first_path, *map(Path, metrics_by_path)])
        return list(metrics_by_path)

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """Where."""
        return os.fspath(self._directory)

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints, oldest first, as of the last call of this manager."""
        return list(self._paths)

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest, or None."""
        return self._paths[-1] if self._paths else None

    @property
    def best_checkpoint(self) -> str | None:
        """The path of the one with the best value of `keep_best`; None if none was saved with it.

        Of equal values it is the first; NaN is never best, nor is one that this manager has found
        damaged.
        """
        best_path = self._retention.find_best([*map(Path, self._paths)])
        return None if best_path is None else os.fspath(best_path)

    @property
    def _best_value(self) -> float | None:
        """The value of `keep_best` that the best checkpoint was saved with; None without one."""
        if self._criterion is None or self.best_checkpoint is None:
            return None
        return self._retention.metrics_by_path[Path(self.best_checkpoint)][self._criterion.metric]

    def save(
        self,
        checkpoint_number: int | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> str:
        """Save the checkpoint, and then remove the oldest ones beyond `max_to_keep`.

        Collective, in cross-replica code; raises and costs what `Checkpoint.save` does, and a
        handshake more. Checkpoints that cannot be removed stay; replica 0 names each once on
        stderr. With `background` it waits for the save before, and the first rank of each node
        copies the arrays that it writes.

        Args:
          checkpoint_number: Its number, not below those that are there; the next one if None.
          metrics: Numbers by name that it is saved with, equal on all ranks, such as the results of
            a validation. ``mpistrat checkpoint list`` shows them, and `keep_best` chooses by them;
            a checkpoint without metrics is never best.

        Returns:
          The path.

        Raises:
          LockstepError: As of `Checkpoint.save`; or the ranks have different metrics.
          TypeError: `metrics` is not a dict of at least one number by name.
          ValueError: There are newer ones than that number, or it is not an integer; or `metrics`
            has no value for `keep_best`.
          OSError: As of `Checkpoint.save`; or the save before, in the background, has failed, and
            nothing is saved now.
        """
        return self._save(checkpoint_number, metrics)

    def _save(
        self, checkpoint_number: int | None = None, metrics: Mapping[str, float] | None = None
    ) -> str:
        """Save, whatever `save` of a subclass waits for: not to do so now would lose work."""
        with self._lockstep.validating_collectively("CheckpointManager.save"):
            number = check_number("checkpoint_number", checkpoint_number, 0)
            checked_metrics = _check_metrics(metrics, self._criterion)
        self._acquire_claim()
        start = time.monotonic()
        self._finish_pending_save("CheckpointManager.save")
        slowest = self._gather_slowest()
        prefix = self._directory / self._name
        path, paths = self._checkpoint._save_numbered(
            prefix, number, checked_metrics, self._retention, self._background_saver
        )
        progress = {"saved": path, "saved_step": read_step(self._checkpoint), **slowest}
        self.last_save = (start, progress)
        if self._background_saver is None:
            self._record_paths(paths)
        self._mark_current()
        return path

    def _gather_slowest(self) -> dict[str, Any]:
        """Return which rank the others have waited for since the save before. Collective."""
        lockstep = self._lockstep
        total_waited_seconds = lockstep.session.board.spent()[0]
        own_seconds, self._waited_seconds = (
            total_waited_seconds - self._waited_seconds,
            total_waited_seconds,
        )
        call = f"CheckpointManager({str(self._directory)!r}), time waited"
        seconds_by_rank = list(
            map(float, lockstep.gather_payloads(call, f"{own_seconds:.3f}".encode()))
        )
        seconds_behind = max(seconds_by_rank) - min(seconds_by_rank)
        slowest = (
            lockstep.ranks[seconds_by_rank.index(min(seconds_by_rank))] if seconds_behind else None
        )
        return {"slowest_rank": slowest, "seconds_behind": round(seconds_behind, 3)}

    def _acquire_claim(self) -> None:
        """Claim the directory for this job, if it has not yet. Collective.

        Raises:
          FileExistsError: Another job saves there; raised on every rank within 30 s.
          OSError: The directory cannot be written.
          StrategyError: The manager was created in the scope of a strategy of this rank alone.
        """
        if self._has_claimed:
            return
        check_all_ranks_save(self._strategy, "CheckpointManager")  # all ranks would claim it
        call = f"CheckpointManager({str(self._directory)!r}), its claim"

        def acquire() -> None:
            with explaining_write_errors(self._directory, is_claimed=True):
                self._claim = acquire_claim(self._directory, self)

        on_replica0(self._lockstep, call, acquire)
        self._has_claimed = True

    def _mark_current(self) -> None:
        self._is_current = True
        self._save_interval.restart()

    def wait(self) -> str | None:
        """Wait until the save in progress, if there is one, has ended.

        Collective, unless no save is in progress.

        Returns:
          The path of the newest checkpoint, or None.

        Raises:
          OSError: It has failed; on every rank.
        """
        self._finish_pending_save("CheckpointManager.wait")
        return self.latest_checkpoint

    def _finish_pending_save(self, call: str) -> None:
        if self._background_saver is not None and self._background_saver.is_pending:
            self._record_paths(self._background_saver.finish_pending_save(self._lockstep, call))

    def _record_paths(self, paths: list[str]) -> None:
        """Record the paths of the checkpoints, and show the newest in the claim."""
        self._paths = paths
        self._retention.forget_others({*map(Path, paths)})
        if self._claim is not None:
            start, progress = self.last_save
            self._claim.update_progress(**progress, save_seconds=round(time.monotonic() - start, 3))
            self._claim.rewrite()

    def due(self) -> bool:
        """Return whether it is time to save, as `every` says; for loops without `resume`.

        Collective: all ranks call it, once a step, and get the same answer.

        Raises:
          LockstepError: The ranks make different calls.

        Cost: one handshake; `resume` asks in the handshake of the step.
        """
        self._save_interval.count_step()
        answers = self._lockstep.gather_payloads(
            "CheckpointManager.due", b"due" if self._save_interval.is_due else b"not"
        )
        return bool(answers[0] == b"due")

    def resume(
        self, data: Any, epochs: int = 1, *, on_epoch_end: Callable[[], Any] | None = None
    ) -> Iterator[Any]:
        """Restore the newest checkpoint, and return the batches that are still to come.

        Collective: all ranks call it and iterate alike, in cross-replica code. ::

            checkpoint = ms.Checkpoint(model=model, optimizer=optimizer, data=dataset, step=0)
            manager = ms.CheckpointManager(checkpoint, "runs/a", max_to_keep=3, every="10 min")
            for batch in manager.resume(strategy.experimental_distribute_dataset(dataset), 20):
                strategy.run(step, args=(batch,))
                checkpoint.step += 1

        First come the remaining batches of the epoch in which the checkpoint was saved, then the
        following epochs: in the same order of global batches, whatever the number of ranks is now
        and was then. Shuffles without a seed continue with that of the checkpoint until the epoch
        ends. Sources in memory and of files skip the batches that are done; an iterable is read
        again, and its first elements are dropped.

        A batch counts when the body of the loop has ended, or in it a ``strategy.run`` or the
        backward pass of a model that ``mpistrat.torch`` has replicated: so a program may `save` at
        the end of the body, and one that is left by ``break`` or an exception before its step was
        made comes again. Between two bodies it saves when that is due, at the end of each epoch if
        `every` is None, and always at the end of the last one. A run that has ended continues when
        it is started with more epochs.

        Args:
          data: The result of ``experimental_distribute_dataset``. The dataset that was distributed
            is part of the checkpoint, as are all things that the body changes.
          epochs: How many epochs there are in all, those of earlier starts included.
          on_epoch_end: Called on all ranks after the last batch of each epoch, before that epoch is
            saved: what it changes, such as a history with the results of a validation, is in the
            checkpoint. An epoch that it saves itself, as its last act, is not saved again. If its
            result is true, this was the last epoch.

        Returns:
          An iterator. If this manager has restored or saved before, nothing is restored again, and
          the dataset continues at its position.

        Raises:
          TypeError: `data` is not a distributed dataset, or `on_epoch_end` not a function.
          ValueError: `epochs` is less than 0.
          StructureError: The checkpoint does not hold the dataset; or as `restore_or_initialize`.
          CheckpointError: As `restore_or_initialize`, as OSError.
          FileExistsError: Another job saves in the directory.
          DataError: At the first batch: each rank reads data of its own; or the checkpoint was
            saved in the middle of an epoch of another dataset.

        Cost: what restoring costs; each step one handshake, as without it.
        """
        return iterate_remaining_batches(self, self._lockstep, data, epochs, on_epoch_end)

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint that can be read, or call `init_fn` if there is none.

        Collective, in cross-replica code. A damaged checkpoint is skipped, with a message of
        replica 0 on stderr, and the one before it is used.

        Returns:
          The path of the restored checkpoint, or None.

        Raises:
          CheckpointError: There are checkpoints, but none can be read: nothing starts over unless
            they are removed. Or one has the name of another: nothing is restored, for the newest
            may be among the others.
          StructureError: The newest does not fit the variables.
          DataError: The newest is of another format.
          OSError: It cannot be read.
          Exception: An error of `init_fn` on any rank; the other ranks raise as for `once`.
        """
        self._finish_pending_save("CheckpointManager.restore_or_initialize")
        damage_texts: list[str] = []
        for path in reversed(self._paths):
            number = (files.split_numbered_path(Path(path)) or ("", 0))[1]
            try:
                status, stored_number = self._checkpoint._restore_trees(
                    "Checkpoint.restore", path, is_partial=False, required_number=number
                )
            except CheckpointError as error:
                damage_texts.append(str(error))
                self._retention.damaged_paths.add(Path(path))
                continue
            if status.path is None:
                self._raise_renamed(path, number, stored_number)
            if damage_texts and self._checkpoint.strategy._replicas.lockstep.comm.rank == 0:
                # No warning, which could be an exception, and on one rank.
                text = f"{path} was restored, because newer ones cannot be read"
                say(f"mpistrat: {text}: {'; '.join(damage_texts)}")
            self._mark_current()
            return path
        if damage_texts:
            raise CheckpointError(
                f"none of the {len(damage_texts)} checkpoints in {self.directory} can be read: "
                f"{'; '.join(damage_texts)}. Remove them to start over."
            )
        if self._init_fn is not None:
            call = f"CheckpointManager({self.directory!r}), init_fn"
            with self._lockstep.validating_collectively(call):
                self._init_fn()
            self._lockstep.handshake(call)
        self._mark_current()
        return None

    def _raise_renamed(self, path: str, number: int, stored_number: int) -> NoReturn:
        suffix = Path(path).suffix
        right_path = files.make_numbered_path(self._directory, self._name, stored_number, suffix)
        raise CheckpointError(
            f"{path} holds checkpoint number {stored_number}, not {number}: it has been renamed, "
            f"or replaced by a copy of {right_path.name}. Give each file of {self.directory} the "
            "name of what it holds; Checkpoint.restore(path) takes any name."
        )

    def __repr__(self) -> str:
        """Return directory, name, and how many are there."""
        return f"CheckpointManager({self.directory!r}, {self._name!r}, {len(self._paths)} there)"


def read_step(checkpoint: Checkpoint) -> int | None:
    """Return the step that the program counts in its checkpoint, if it does."""
    for name in ("step", "checkpointed_runs"):
        with contextlib.suppress(TypeError, ValueError):
            step: Any = getattr(checkpoint, name, None)
            return int(step)
    return None


def _check_init_function(init_fn: Callable[[], Any] | None) -> Callable[[], Any] | None:
    if init_fn is not None and not callable(init_fn):
        raise TypeError(f"init_fn must be a function or None, got {init_fn!r:.60}.")
    return init_fn


def _check_checkpoint(checkpoint: object) -> Checkpoint:
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"CheckpointManager: checkpoint must be a Checkpoint, got {checkpoint!r:.60}."
        )
    return checkpoint


def _make_criterion(keep_best: str | None, best_mode: str) -> atomic.Criterion | None:
    if keep_best is not None and not isinstance(keep_best, str):
        raise TypeError(f"keep_best must be the name of a metric or None, got {keep_best!r:.60}.")
    atomic.check_mode("best_mode", best_mode)
    return None if keep_best is None else atomic.Criterion(keep_best, best_mode)


def _check_metrics(
    metrics: Mapping[str, Any] | None, criterion: atomic.Criterion | None
) -> Mapping[str, float]:
    """Return metrics as Python's floats.

    Raises:
      TypeError: They are no numbers by name, or there is none.
      ValueError: There is none for the criterion.
    """
    if metrics is None:
        return NO_METRICS
    if (
        not isinstance(metrics, Mapping)
        or not metrics
        or not all(isinstance(name, str) for name in metrics)
        or not all(map(_is_real_number, metrics.values()))
    ):
        raise TypeError(
            "CheckpointManager.save: metrics must be numbers by name, at least one, such as "
            f"{{'loss': 0.5}}, got {metrics!r:.80}."
        )
    values = {name: float(value) for name, value in metrics.items()}
    if criterion is not None and criterion.metric not in values:
        raise ValueError(
            f"CheckpointManager.save: metrics has {sorted(values)}, but the manager was made with "
            f"keep_best={criterion.metric!r}. Add that metric."
        )
    return values


def _is_real_number(value: Any) -> bool:
    """Return whether it is a real number, or an array of shape () of one; no truth value is."""
    if getattr(value, "ndim", None) == 0:  # NumPy's scalars too
        dtype = np.asarray(value).dtype
        return dtype.kind in "iuf" or is_bfloat16(dtype)
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check_checkpoint_name(name: object) -> str:
    if not isinstance(name, str) or not name or name.startswith(".") or os.sep in name:
        raise ValueError(f"checkpoint_name must be a part of a file's name, got {name!r:.60}.")
    return name


def check_number(name: str, argument: Any, minimum: int) -> int | None:
    """Return an integer, or the one in a variable, as an int; None is None.

    Raises:
      ValueError: It is neither, or too small.
    """
    value = argument.numpy() if hasattr(argument, "numpy") else argument
    number = as_int(value)
    if value is not None and (number is None or not minimum <= number < 10**18):
        raise ValueError(
            f"{name} must be an integer of at least {minimum} or None, got {argument!r:.60}."
        )
    return number
