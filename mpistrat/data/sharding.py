"""Which rows of which batches a replica gets, step by step; no communication.

A `Sharding` is one way to divide a dataset. `policy_deal` chooses among them as the dataset asks.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import Array, digest
from mpistrat.data.dataset import Dataset
from mpistrat.data.iterators import prefetched
from mpistrat.data.pieces import BatchSlice
from mpistrat.data.pipeline import AutoShardPolicy, Batches
from mpistrat.data.sources import Reads, Spec
from mpistrat.data.steps import rejoined, shares
from mpistrat.errors import DataError, OutOfRangeError

UNSEEN = bytes(16)


class StepPart(NamedTuple):
    """A replica's part of a step.

    Attributes:
      element: The part.
      rows: How many rows the global batch has that it was cut from; -1 if from none.
      contents: A digest of what every replica has read or made whole for it; `UNSEEN` if nobody
        has looked.
    """

    element: Any
    rows: int = -1
    contents: bytes = UNSEEN

    def digest(self) -> bytes:
        """Return a digest of the part; `UNSEEN` of one without elements."""
        arrays = [array for array in map(np.asarray, pytree.flatten(self.element)[0]) if array.size]
        return digest(arrays) if arrays else UNSEEN


Parts: TypeAlias = Iterator[StepPart]


class ShardSpec(NamedTuple):
    """Which replica this is.

    Attributes:
      rank: Its number.
      size: How many there are.
      alone: It is a worker of its own, to which the others' data are not shown.
      every: Every how many steps of an epoch, from the first, contents are looked at; 0 for never.
    """

    rank: int
    size: int
    alone: bool
    every: int = 0

    def contents(
        self, step: int, pieces: Iterable[BatchSlice], includes_results: bool = True
    ) -> bytes:
        """Return a digest of what all replicas hold alike of `pieces`, if it is time to look."""
        if not self.every or step % self.every:
            return UNSEEN
        arrays = itertools.chain.from_iterable(piece.alike(includes_results) for piece in pieces)
        return digest(arrays)


class Sharding(NamedTuple):
    """One way to divide a dataset over replicas.

    Attributes:
      how: Text of it, for the handshake that all ranks do the same.
      dataset: What this replica reads from.
      same: All ranks hold the same dataset: its description is checked, and its seeds are shared.
      cut: Every step divides one global batch, whose number of rows must agree.
      parts: ``parts(pieces, passed)`` gives this replica's parts of the pieces of one epoch except
        for the first `passed`; None to iterate over the dataset itself.
      rows: The rows that each replica always gets, if that is known.
      compared: The rows that the ranks hold have to be the same, where `same` is true.
      single: The dataset has batches of one row, of which each replica gets the row alone.
    """

    how: str
    dataset: Dataset
    same: bool
    cut: bool
    parts: Callable[[Iterator[BatchSlice], int], Parts] | None
    rows: int | None = None
    compared: bool = True
    single: bool = False

    @property
    def element_spec(self) -> Any:
        """The tree of `Spec` of what is divided; None if only reading could tell."""
        spec = self.dataset.element_spec
        if spec is None or not self.single:
            return spec
        return pytree.map(lambda leaf: Spec(leaf.shape[1:], leaf.dtype), spec)

    def describe(self) -> str:
        """Return a string that is equal on all ranks if they may continue together."""
        return f"{self.how}: {self.dataset.describe()}" if self.same else self.how

    def sample(self) -> list[Array | None]:
        """Return contents that have to be the same on all ranks, leaf by leaf; see `Arrays`."""
        level = self.dataset._level
        compared = self.same and self.compared
        return level.sample() if compared and isinstance(level, Batches) else []

    def not_compared(self) -> Sharding:
        """Return the same way for ranks that may hold different rows."""
        return self._replace(how=f"{self.how}, rows may differ", compared=False)

    def epoch(self, epoch: int, seeds: Sequence[int], passed_count: int = 0) -> Parts:
        """Iterate over this replica's parts of an epoch, without `passed_count` first batches."""
        if self.parts is None:
            # Not a generator, which would end at the first error.
            return map(StepPart, self.dataset)
        parts = self.parts(self.dataset.pieces(epoch, seeds), passed_count)
        return prefetched(parts, self.dataset.depth) if self.dataset.depth else parts


def own(dataset: Dataset) -> Sharding:
    """Return the way where each replica brings its own dataset, whole."""
    return Sharding("a dataset of each rank", dataset, same=False, cut=False, parts=None)


def calls(fn: Callable[[], Any]) -> Sharding:
    """Return the way where each replica calls a function for each element, until that has none."""

    def parts(pieces: Iterator[BatchSlice], passed_count: int) -> Parts:
        return map(lambda _: StepPart(called()), itertools.repeat(None))

    def called() -> Any:
        try:
            return fn()
        except OutOfRangeError:
            raise StopIteration from None

    placeholder = Dataset.from_batches(lambda: ())  # what it looks like, only the function knows
    return Sharding("a function of each rank", placeholder, same=False, cut=False, parts=parts)


def turns(dataset: Dataset, place: ShardSpec) -> Sharding:
    """Return the way where the elements go to the replicas in turns, undivided."""
    single = not dataset.batched
    rows = dataset.batch(1) if single else dataset

    def parts(pieces: Iterator[BatchSlice], passed_count: int) -> Parts:
        rounds = (_round(pieces, place, step) for step in itertools.count())
        local_pieces = itertools.takewhile(lambda pair: pair[0] is not None, rounds)
        return Reads(local_pieces, lambda pair: StepPart(element(pair[0]), contents=pair[1]))

    def element(piece: BatchSlice) -> Any:
        batch = piece.cut(0, 1)
        return pytree.map(lambda leaf: leaf[0], batch) if single else batch

    description = f"{'examples' if single else 'batches'} in turns"
    return Sharding(description, rows, same=True, cut=False, parts=parts, single=single)


def _round(pieces: Iterator[BatchSlice], place: ShardSpec, step: int) -> tuple[Any, bytes]:
    """Return this replica's of the next pieces, one for each, or None; and a digest of them all."""
    local_piece = None

    def taken() -> Iterator[BatchSlice]:  # none is held longer than it is looked at
        nonlocal local_piece
        for index, piece in enumerate(itertools.islice(pieces, place.size)):
            local_piece = piece if index == place.rank else local_piece
            yield piece

    everyones = taken()
    contents = place.contents(step, everyones, includes_results=False)
    collections.deque(everyones, maxlen=0)
    return local_piece, contents


def policy_deal(dataset: Dataset, place: ShardSpec) -> Sharding:
    """Return the way that the options of a dataset of global batches ask for.

    Raises:
      DataError: Files are to be divided, and there are none, or fewer than replicas.
    """
    policy = dataset.policy
    if policy is AutoShardPolicy.FILE and dataset.files:
        return _files(dataset, place)
    if policy is AutoShardPolicy.FILE and place.alone:
        raise DataError(
            "AutoShardPolicy.FILE divides the files of Dataset.from_files, and this dataset has "
            "none. Use AutoShardPolicy.DATA, which divides every batch."
        )
    if policy in (AutoShardPolicy.OFF, AutoShardPolicy.FILE):
        if place.alone:
            return Sharding("all on each rank", dataset, False, False, _in_shares(dataset, place))
        if dataset.batch_size is not None:
            return _even(dataset, place, dataset.batch_size)
    return _cut(dataset, place)


def _cut(dataset: Dataset, place: ShardSpec) -> Sharding:
    def reader() -> Callable[[BatchSlice], StepPart]:
        steps = itertools.count()

        def part(piece: BatchSlice) -> StepPart:
            contents = place.contents(next(steps), [piece]) if place.every else UNSEEN
            return StepPart(*piece.cut_and_count(place.rank, place.size), contents)

        return part

    return Sharding("cut", dataset, True, True, _stepwise(reader), _fixed(dataset, place))


def _stepwise(
    reader: Callable[[], Callable[[BatchSlice], StepPart]],
    joined: Callable[[Iterator[BatchSlice]], Iterator[BatchSlice]] = iter,
) -> Callable[[Iterator[BatchSlice], int], Parts]:
    """Return the parts of an epoch: what a new `reader` makes of each batch.

    The first step of an epoch that is resumed is step 0 too: contents are looked at where ranks
    begin.
    """

    def parts(pieces: Iterator[BatchSlice], passed_count: int) -> Parts:
        remaining_pieces = (
            itertools.islice(joined(pieces), passed_count, None) if passed_count else joined(pieces)
        )
        return Reads(remaining_pieces, reader())

    return parts


def _fixed(dataset: Dataset, place: ShardSpec) -> int | None:
    if place.alone or not dataset.full_batches or (dataset.batch_size or 0) % place.size:
        return None
    return dataset.batch_size and dataset.batch_size // place.size


def _even(dataset: Dataset, place: ShardSpec, batch_size: int) -> Sharding:
    sizes = shares(batch_size, place.size)
    start, stop = sum(sizes[: place.rank]), sum(sizes[: place.rank + 1])

    def reader() -> Callable[[BatchSlice], StepPart]:
        steps = itertools.count()

        def part(piece: BatchSlice) -> StepPart:
            rows = piece.count()
            contents = place.contents(next(steps), [piece])
            return StepPart(piece.span(min(start, rows), min(stop, rows)), rows, contents)

        return part

    parts = _stepwise(reader, lambda pieces: rejoined(pieces, (batch_size,)))
    return Sharding("dealt out", dataset, True, True, parts, _fixed(dataset, place))


def _files(dataset: Dataset, place: ShardSpec) -> Sharding:
    if dataset.files < place.size:
        raise DataError(
            f"AutoShardPolicy.FILE: {dataset.files} files cannot be divided between {place.size} "
            "replicas. Use AutoShardPolicy.DATA, which divides every batch, or more files."
        )
    local_files = dataset.of_files(place.rank, place.size)
    description = f"files in turns: {dataset.describe()}"
    return Sharding(
        description, local_files, same=False, cut=False, parts=_in_shares(dataset, place)
    )


def _in_shares(dataset: Dataset, place: ShardSpec) -> Callable[[Iterator[BatchSlice], int], Parts]:
    """Return the parts of a replica that goes over all of its dataset, in parts of a batch."""
    batch_size = dataset.batch_size
    if batch_size is None:
        return lambda pieces, _: Reads(
            ((piece, index) for piece in pieces for index in range(place.size)),
            lambda each: StepPart(each[0].cut(each[1], place.size)),
        )
    sizes = shares(batch_size, place.size)
    turned = sizes[place.rank :] + sizes[: place.rank]
    return lambda pieces, _: Reads(
        rejoined(pieces, turned), lambda piece: StepPart(piece.cut(0, 1))
    )
