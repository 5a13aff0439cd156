"""The position in a dataset, as a checkpoint saves it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

from mpistrat.data.iterators import Optional, prefetch_elements
from mpistrat.errors import DataError


@final
class EpochPosition(NamedTuple):
    """A position in an epoch.

    Attributes:
      epoch: The number of the epoch.
      passed_count: The number of global batches that the program is done with.
      seeds: The seeds of the shuffles that have none of their own.
      description: The text of `Dataset._describe_with_rows`; empty before an epoch was begun.
    """

    epoch: int
    passed_count: int
    seeds: tuple[int, ...]
    description: str


def draw_seeds(count: int) -> tuple[int, ...]:
    """Return new seeds."""
    return tuple(secrets.randbits(62) for _ in range(count))


def compute_position(dataset: Any) -> EpochPosition | None:
    """Return the position in a dataset, after the batch that the program has, if that counts."""
    position: EpochPosition | None = dataset._position
    return (
        position._replace(passed_count=position.passed_count + 1)
        if position and dataset._is_batch_used()
        else position
    )


def begin_batch(dataset: Any, is_batch_used: Callable[[], bool]) -> None:
    """Note that the program has a batch: the one at the position.

    Args:
      dataset: The dataset of the batch.
      is_batch_used: Returns whether that batch counts, although the program has not asked for
        another.
    """
    dataset._is_batch_used = is_batch_used


def finish_batch(dataset: Any) -> None:
    """Note that the program has done with that batch, and count it if it was used."""
    dataset._position, dataset._is_batch_used = compute_position(dataset), bool


def find_resumable_position(dataset: Any, division: str = "") -> EpochPosition | None:
    """Return the position in a dataset; None between two epochs.

    Args:
      dataset: The dataset.
      division: The way in which it is divided, if each rank reads data of its own; else empty.

    Raises:
      DataError: Each rank reads data of its own; or the elements are not batches; or the epoch was
        begun with another dataset.
    """
    if division:
        raise DataError(
            f"this dataset cannot be resumed in the middle of an epoch: it is {division}, so each "
            "rank knows only what it has read itself, and another number of ranks would "
            "read other parts. Give one dataset of global batches to "
            "experimental_distribute_dataset, with a policy that divides each batch."
        )
    if not dataset.batched:
        raise DataError(
            "an epoch of single examples cannot be resumed: how many make a step depends on the "
            "number of ranks. Call batch(global_batch_size) first."
        )
    position = compute_position(dataset)
    if position is not None and position.description != dataset._describe_with_rows():
        raise DataError(
            f"the checkpoint was saved after {position.passed_count} batches of epoch "
            f"{position.epoch} of another dataset, so nobody knows which examples are left. "
            f"It was: {position.description}. It is: {dataset._describe_with_rows()}. Give "
            "the same source, seeds and batch size until that epoch has ended."
        )
    return position


def resume_epoch(dataset: Any, get_local_bits: Callable[[], int]) -> Iterator[tuple[int, Optional]]:
    """Return an iterator as `DistributedDataset._resume` does, for an undivided dataset."""
    position = find_resumable_position(dataset)
    if position is None:
        position = EpochPosition(
            dataset.epoch, 0, draw_seeds(dataset._seed_count), dataset._describe_with_rows()
        )
    remaining_elements = dataset._pipeline.iterate_elements(
        position.seeds, (position.epoch,), position.passed_count
    )
    return track_elements(
        dataset,
        position,
        prefetch_elements(remaining_elements, dataset._prefetch_depth),
        get_local_bits,
    )


def track_elements(
    dataset: Any, position: EpochPosition, elements: Iterator[Any], get_all_bits: Callable[[], int]
) -> Iterator[tuple[int, Optional]]:
    """Iterate over the remaining elements of an epoch, and advance the position in the dataset.

    Args:
      dataset: The dataset; its position advances when the next element is asked for.
      position: The position of the first of `elements`.
      elements: The elements.
      get_all_bits: Returns the bits of all ranks; called with each element, and at their end.

    Yields:
      The bits of all ranks, and the element; at the end no element.
    """
    dataset.begin_after(position.epoch)
    dataset._position = position
    for element in elements:
        yield get_all_bits(), Optional(element)
        dataset._position = position = position._replace(passed_count=position.passed_count + 1)
    dataset._position = None
    yield get_all_bits(), Optional()
