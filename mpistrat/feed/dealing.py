"""Which rows of which batches a replica gets, step by step; no communication.

A `Deal` is one way to divide a dataset. `policy_deal` chooses among them as the dataset asks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from mpistrat.errors import DataError, OutOfRangeError
from mpistrat.feed.dataset import Dataset
from mpistrat.feed.pieces import Piece
from mpistrat.feed.policies import AutoShardPolicy
from mpistrat.feed.prefetch import prefetched
from mpistrat.feed.reads import Reads
from mpistrat.feed.rebatch import rejoined, shares

__all__ = ["Deal", "Place", "calls", "own", "policy_deal", "turns"]

# The rows of the global batch, or -1 if that is not known to all, and this replica's part.
Parts: TypeAlias = Iterator[tuple[int, Any]]


class Place(NamedTuple):
    """Which replica this is.

    Attributes:
      rank: Its number.
      size: How many there are.
      alone: It is a worker of its own, to which the others' data are not shown.
    """

    rank: int
    size: int
    alone: bool


class Deal(NamedTuple):
    """One way to divide a dataset over replicas.

    Attributes:
      how: Text of it, for the proof that all ranks do the same.
      dataset: What this replica reads from.
      same: All ranks hold the same dataset: its description is proved, and its seeds are shared.
      cut: Every step divides one global batch, whose number of rows must agree.
      parts: ``parts(pieces)`` gives this replica's parts of the pieces of one epoch; None to
        iterate over the dataset itself.
      rows: The rows that each replica always gets, if that is known.
    """

    how: str
    dataset: Dataset
    same: bool
    cut: bool
    parts: Callable[[Iterator[Piece]], Parts] | None
    rows: int | None = None

    def describe(self) -> str:
        """Return a text that is equal on all ranks if they may go on together."""
        return f"{self.how}: {self.dataset.describe()}" if self.same else self.how

    def epoch(self, epoch: int, seeds: Sequence[int]) -> Parts:
        """Iterate over this replica's parts of one epoch."""
        if self.parts is None:
            # Not a generator, which would end at the first error.
            return map(lambda element: (-1, element), self.dataset)
        parts = self.parts(self.dataset.pieces(epoch, seeds))
        return prefetched(parts, self.dataset.depth) if self.dataset.depth else parts


def own(dataset: Dataset) -> Deal:
    """Return the deal where each replica brings its own dataset, whole."""
    return Deal("a dataset of each rank", dataset, same=False, cut=False, parts=None)


def calls(fn: Callable[[], Any]) -> Deal:
    """Return the deal where each replica calls a function for each element, until that has none."""

    def parts(pieces: Iterator[Piece]) -> Parts:
        return map(lambda _: (-1, called()), itertools.repeat(None))

    def called() -> Any:
        try:
            return fn()
        except OutOfRangeError:
            raise StopIteration from None

    nothing = Dataset.from_batches(lambda: ())  # what it looks like, only the function knows
    return Deal("a function of each rank", nothing, same=False, cut=False, parts=parts)


def turns(dataset: Dataset, place: Place) -> Deal:
    """Return the deal where the batches go to the replicas in turns, undivided."""

    def parts(pieces: Iterator[Piece]) -> Parts:
        mine = itertools.islice(pieces, place.rank, None, place.size)
        return Reads(mine, lambda piece: (-1, piece.cut(0, 1)))

    return Deal("batches in turns", dataset, same=True, cut=False, parts=parts)


def policy_deal(dataset: Dataset, place: Place) -> Deal:
    """Return the deal that the options of a dataset of global batches ask for.

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
            return Deal("all on each rank", dataset, False, False, _in_shares(dataset, place))
        if dataset.batch_size is not None:
            return _even(dataset, place, dataset.batch_size)
    return _cut(dataset, place)


def _cut(dataset: Dataset, place: Place) -> Deal:
    def part(piece: Piece) -> tuple[int, Any]:
        rows = -1 if piece.rows is None else piece.rows
        return rows, piece.cut(place.rank, place.size)

    def parts(pieces: Iterator[Piece]) -> Parts:
        return Reads(pieces, part)

    return Deal("cut", dataset, True, True, parts, _fixed(dataset, place))


def _fixed(dataset: Dataset, place: Place) -> int | None:
    if place.alone or not dataset.full_batches or (dataset.batch_size or 0) % place.size:
        return None
    return dataset.batch_size and dataset.batch_size // place.size


def _even(dataset: Dataset, place: Place, batch_size: int) -> Deal:
    sizes = shares(batch_size, place.size)
    start, stop = sum(sizes[: place.rank]), sum(sizes[: place.rank + 1])

    def part(piece: Piece) -> tuple[int, Any]:
        rows = piece.count()
        return rows, piece.span(min(start, rows), min(stop, rows))

    def parts(pieces: Iterator[Piece]) -> Parts:
        return Reads(rejoined(pieces, (batch_size,)), part)

    return Deal("dealt out", dataset, True, True, parts, _fixed(dataset, place))


def _files(dataset: Dataset, place: Place) -> Deal:
    if dataset.files < place.size:
        raise DataError(
            f"AutoShardPolicy.FILE: {dataset.files} files cannot be divided between {place.size} "
            "replicas. Use AutoShardPolicy.DATA, which divides every batch, or more files."
        )
    mine = dataset.of_files(place.rank, place.size)
    how = f"files in turns: {dataset.describe()}"
    return Deal(how, mine, same=False, cut=False, parts=_in_shares(dataset, place))


def _in_shares(dataset: Dataset, place: Place) -> Callable[[Iterator[Piece]], Parts]:
    """Return the parts of a replica that goes over all of its dataset, in parts of a batch."""
    batch_size = dataset.batch_size
    if batch_size is None:
        return lambda pieces: Reads(
            ((piece, index) for piece in pieces for index in range(place.size)),
            lambda each: (-1, each[0].cut(each[1], place.size)),
        )
    sizes = shares(batch_size, place.size)
    turned = sizes[place.rank :] + sizes[: place.rank]
    return lambda pieces: Reads(rejoined(pieces, turned), lambda piece: (-1, piece.cut(0, 1)))
