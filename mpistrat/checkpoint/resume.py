"""Training that continues where the last start stopped: batches that are left, and when to save."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, final

from mpistrat.arrays import whole_number
from mpistrat.board.reporter import say
from mpistrat.errors import StructureError
from mpistrat.feed import places
from mpistrat.feed.dataset import Dataset
from mpistrat.feed.distributed import DistributedDataset
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.lockstep.ranks import CallState

_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SECONDS |= {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0}
_TEXT = re.compile(r"(\d+(?:\.\d+)?) *([a-z]+?)s?")
_DUE_FLAG, _NOTICE_FLAG = 1, 2
_Batches: TypeAlias = DistributedDataset | Dataset


@final
class SaveInterval:
    """When the next checkpoint is due.

    Args:
      every: Seconds, a text such as ``"10 min"`` or ``"500 steps"``, or None for never.

    Raises:
      TypeError: It is neither a number nor a text.
      ValueError: It is not more than 0, or the text names no time and no steps.

    Example:
      >>> pace = SaveInterval("2 steps")
      >>> [(pace.step(), pace.is_due)[1] for _ in range(3)]
      [False, True, True]
    """

    def __init__(self, every: Any):
        """Begin to count."""
        self.is_never_due = every is None
        self._seconds, self._steps = _parse_interval(every)
        self.begin()

    def begin(self) -> None:
        """Count again: all is saved, or restored."""
        self._begin_time, self._step_count = time.monotonic(), 0

    def step(self) -> None:
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


def _parse_interval(every: Any) -> tuple[float | None, int | None]:
    """Return seconds and steps, of which at least one is None."""
    expected_text = (
        f"every must be seconds, or as '10 min' or '500 steps', or None, got {every!r:.60}."
    )
    if every is None:
        return None, None
    if isinstance(every, str):
        match = _TEXT.fullmatch(every.strip())
        number, unit = match.groups() if match else ("0", "")
        if unit == "step" and number.isdigit() and int(number):
            return None, int(number)
        seconds = float(number) * _SECONDS.get(unit, 0.0)
    elif isinstance(every, bool) or not isinstance(every, int | float):
        raise TypeError(expected_text)
    else:
        seconds = float(every)
    if not 0 < seconds < float("inf"):
        raise ValueError(expected_text)
    return seconds, None


def _resolve_dataset(
    checkpoint: Any, data: Any, is_alone: bool
) -> tuple[_Batches, Callable[[Any], Any]]:
    """Return the dataset to iterate over, and what is made of its elements."""
    batches = getattr(data, "distributed", data)
    if not isinstance(batches, DistributedDataset | Dataset):
        raise TypeError(
            "CheckpointManager.resume: expected what "
            f"strategy.experimental_distribute_dataset returns, got {data!r:.60}."
        )
    if isinstance(batches, Dataset) and not is_alone:
        raise TypeError(
            f"CheckpointManager.resume({data!r}): every rank would see all of it. Divide it first: "
            "strategy.experimental_distribute_dataset(dataset)."
        )
    origin = _origin(batches)
    saved_objects = [
        stateful_object for stateful_object, _ in checkpoint._collect_state().stateful.values()
    ]
    if not any(
        _origin(getattr(stateful_object, "distributed", stateful_object)) is origin
        for stateful_object in saved_objects
    ):
        raise StructureError(
            "CheckpointManager.resume: the checkpoint does not hold the position in this "
            "dataset. Add the dataset that was distributed: Checkpoint(..., data=dataset). "
            f"It has {saved_objects}."
        )
    return batches, getattr(data, "convert", lambda element: element)


def _origin(data: Any) -> Any:
    """Return the dataset that was distributed."""
    return getattr(data, "origin", data)


def iterate_remaining(manager: Any, lockstep: Lockstep, data: Any, epochs: Any) -> Iterator[Any]:
    """Return the batches that are left; see `CheckpointManager.resume`. Collective."""
    with lockstep.preparing("CheckpointManager.resume"):
        batches, convert = _resolve_dataset(manager.checkpoint, data, lockstep.comm.size == 1)
        count = whole_number("resume(epochs)", epochs, 0, ValueError)
    lockstep.handshake(f"CheckpointManager.resume({batches!r}, epochs={count})")
    manager.take()  # before anything is computed that could not be saved
    if not manager._is_current:
        path = manager.restore_or_initialize()
        if path is not None and lockstep.comm.rank == 0:
            say(f"mpistrat: resume continues from {path}, in epoch {_origin(batches).epoch + 1}.")
    return _batches(manager, lockstep, batches, convert, count)


def _batches(
    manager: Any, lockstep: Lockstep, data: _Batches, convert: Callable[[Any], Any], epochs: int
) -> Iterator[Any]:
    pace, origin = manager._save_interval, _origin(data)
    rank, state = lockstep.comm.rank, lockstep.state

    def read_flags() -> int:
        notice = manager._notice
        flags = _NOTICE_FLAG if notice is not None and notice.asked() else 0
        return flags | (_DUE_FLAG if rank == 0 and pace.is_due else 0)

    while origin.epoch < epochs:
        remaining_batches = (
            places.resumed(data, read_flags)
            if isinstance(data, Dataset)
            else data.resumed(read_flags)
        )
        for flags, batch in remaining_batches:
            is_epoch_end = not batch.has_value()
            if flags or (is_epoch_end and (pace.is_never_due or origin.epoch >= epochs)):
                manager._save()
            if flags & _NOTICE_FLAG:
                manager._notice.leave()
            if not is_epoch_end:
                places.lend(origin, functools.partial(_has_stepped, state, _count_steps(state)))
                try:
                    yield convert(batch.get_value())
                finally:
                    places.take_back(origin)
                pace.step()


def _count_steps(state: CallState) -> int:
    return state.steps + state.passes


def _has_stepped(state: CallState, previous_steps: int) -> bool:
    return _count_steps(state) != previous_steps
