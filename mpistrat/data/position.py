"""The position in a dataset, as a checkpoint saves it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

from mpistrat.data.iterators import Optional, prefetched
from mpistrat.errors import DataError


@final
class EpochPlace(NamedTuple):
    """How far an epoch was passed.

    Attributes:
      epoch: Its number.
      passed: How many global batches.
      seeds: Of the shuffles that have none of their own.
      of: What `Dataset.identity` said of the dataset; nothing before an epoch was begun.
    """

    epoch: int
    passed: int
    seeds: tuple[int, ...]
    of: str


def drawn(count: int) -> tuple[int, ...]:
    """Return new seeds."""
    return tuple(secrets.randbits(62) for _ in range(count))


def place_of(dataset: Any) -> EpochPlace | None:
    """Return how far a dataset was passed, with the batch that the program has, if that counts."""
    place: EpochPlace | None = dataset._place
    return place._replace(passed=place.passed + 1) if place and dataset._used() else place


def lend(dataset: Any, is_batch_used: Callable[[], bool]) -> None:
    """Note that the program has a batch: the next after those that were passed.

    Args:
      dataset: Whose batch it is.
      is_batch_used: Returns whether that batch counts, although the program has not asked for
        another.
    """
    dataset._used = is_batch_used


def take_back(dataset: Any) -> None:
    """Note that the program has done with that batch, and count it if it was used."""
    dataset._place, dataset._used = place_of(dataset), bool


def checked(dataset: Any, division: str = "") -> EpochPlace | None:
    """Return how far a dataset was passed; None between two epochs.

    Args:
      dataset: The dataset.
      division: How it is divided, if nobody knows what all ranks have read.

    Raises:
      DataError: They do not; or its elements are not batches; or it is another one than that of
        which an epoch was begun.
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
    place = place_of(dataset)
    if place is not None and place.of != dataset.identity():
        raise DataError(
            f"the checkpoint was saved after {place.passed} batches of epoch {place.epoch} of "
            f"another dataset, so nobody knows which examples are left. It was: {place.of}. It is: "
            f"{dataset.identity()}. Give the same source, seeds and batch size until that epoch "
            "has ended."
        )
    return place


def resumed(dataset: Any, get_local_bits: Callable[[], int]) -> Iterator[tuple[int, Optional]]:
    """Return what ``DistributedDataset.resumed`` does, of a dataset that is not divided."""
    place = checked(dataset)
    if place is None:
        place = EpochPlace(dataset.epoch, 0, drawn(dataset.seeds_needed), dataset.identity())
    remaining_elements = dataset._level.elements(place.seeds, (place.epoch,), place.passed)
    return passing(dataset, place, prefetched(remaining_elements, dataset.depth), get_local_bits)


def passing(
    dataset: Any, place: EpochPlace, elements: Iterator[Any], get_all_bits: Callable[[], int]
) -> Iterator[tuple[int, Optional]]:
    """Iterate over what is left of an epoch, and note how far it has come.

    Args:
      dataset: Whose place moves on, when the next element is asked for.
      place: Where `elements` begin.
      elements: The elements.
      get_all_bits: Returns the bits of all ranks; called with each element, and at their end.

    Yields:
      The bits of all ranks, and the element; at the end no element.
    """
    dataset.begin_after(place.epoch)
    dataset._place = place
    for element in elements:
        yield get_all_bits(), Optional(element)
        dataset._place = place = place._replace(passed=place.passed + 1)
    dataset._place = None
    yield get_all_bits(), Optional()
