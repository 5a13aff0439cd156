"""Rows and batches that a predicate keeps.

The rows that a `Filter` keeps are found once, by this rank or by all ranks together, each of which
judges its share. From then on they are an index, so that lengths, orders and positions are exact.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.data.pieces import BatchSlice, ExampleReader, Given, Order, listed, named, row_bounds
from mpistrat.data.sources import UNKNOWN, Arrays, Rows
from mpistrat.data.steps import Arrange, Path, Pieces, Seeds, Step
from mpistrat.errors import DataError
from mpistrat.lockstep.handshake import Lockstep

_BLOCK_ROWS = 128  # read at a time

Predicate = Callable[..., Any]


def _is_kept(predicate: Predicate, element: Any) -> bool:
    """Return what a predicate says of an element."""
    try:
        # As a map, which unpacks tuples but not named tuples.
        verdict = predicate(*element) if type(element) is tuple else predicate(element)
    except StopIteration as error:
        raise DataError(
            f"the function of filter, {named(predicate)}, raised StopIteration, which would look "
            "like the end of the data. Return True or False."
        ) from error
    flag = np.asarray(verdict)
    if flag.shape or flag.dtype != np.bool_:
        raise DataError(
            f"the function of filter, {named(predicate)}, returned {verdict!r:.60}; expected True "
            "or False for the whole element (of an array, for example, (x > 0).all())."
        )
    return bool(flag)


@final
class RowChoice:
    """Which rows a predicate keeps; found when somebody asks.

    Args:
      reader: Reads the examples that the predicate judges.
      predicate: Judges one.
      list_candidates: Returns the rows that are judged, increasing; no others are read.
    """

    def __init__(
        self, reader: ExampleReader, predicate: Predicate, list_candidates: Callable[[], Rows]
    ):
        """Create it; nothing is read yet."""
        self._reader, self._predicate = reader, predicate
        self._list_candidates = list_candidates
        self._candidates: Rows | None = None
        self._mask: Array | None = None

    @property
    def is_known(self) -> bool:
        """Whether the predicate has run."""
        return self._mask is not None

    def candidates(self) -> Rows:
        """Return the rows that are judged."""
        if self._candidates is None:
            self._candidates = self._list_candidates()
        return self._candidates

    def mask(self) -> Array:
        """Return for each row of the arrays whether it is kept; judge all, if nobody has."""
        if self._mask is None:
            self.adopt(self.judge(0, len(self.candidates())))
        assert self._mask is not None
        return self._mask

    def judge(self, lo: int, hi: int) -> Array:
        """Return whether each of the candidates `lo` to `hi` (exclusive) is kept."""
        rows = self.candidates()[lo:hi]
        if self._mask is not None:
            kept: Array = self._mask[rows]
            return kept
        verdicts = np.zeros(len(rows), np.bool_)
        for start in range(0, len(rows), _BLOCK_ROWS):
            examples = self._reader.examples(rows[start : start + _BLOCK_ROWS])
            for offset, example in enumerate(examples):
                verdicts[start + offset] = _is_kept(self._predicate, example)
        return verdicts

    def adopt(self, verdicts: Array) -> None:
        """Keep the candidates of which `verdicts` says so."""
        mask = np.zeros(self._reader.arrays.rows, np.bool_)
        mask[self.candidates()] = verdicts
        self._mask, self._candidates = mask, None  # which need 8 times the memory

    def describe(self) -> str:
        """Return how many rows are kept, and a digest of which."""
        mask = self.mask()
        mask_digest = hashlib.blake2b(np.packbits(mask).tobytes(), digest_size=8).hexdigest()
        return f"keeping {np.count_nonzero(mask)} of {len(mask)} rows {mask_digest}"


@final
@dataclasses.dataclass(frozen=True, repr=False)
class Filter(Arrange):
    """Those examples that a predicate keeps.

    Attributes:
      predicate: The predicate.
      map_count: How many maps make the examples that it judges.
      choice: The rows that it keeps.
    """

    predicate: Predicate
    map_count: int
    choice: RowChoice

    def cardinality(self, element_count: int) -> int:
        """Return the most that can be kept: all."""
        return element_count

    def order(self, make_order: Callable[[Path], Order], seeds: Seeds, path: Path) -> Order:
        """Return the rows that are kept, in their order."""
        order = make_order(path)
        rows = order.span(0, order.length)
        return listed(rows[self.choice.mask()[rows]])

    def stream(self, make_pieces: Pieces, seeds: Seeds, path: Path) -> Iterator[BatchSlice]:
        """Batches are filtered by `BatchFilter`."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Return a string that does not depend on the process, as addresses do."""
        return f"Filter({named(self.predicate)}, after {self.map_count} maps)"


@final
@dataclasses.dataclass(frozen=True, repr=False)
class BatchFilter(Step):
    """Those batches that a predicate keeps.

    Attributes:
      predicate: The predicate.
    """

    predicate: Predicate

    def cardinality(self, element_count: int) -> int:
        """Return 0 or unknown."""
        return UNKNOWN if element_count else 0

    def stream(self, make_pieces: Pieces, seeds: Seeds, path: Path) -> Iterator[BatchSlice]:
        """Iterate over the batches that are kept; each batch is read whole."""
        for piece in make_pieces(path):
            batch = piece.cut(0, 1)
            if _is_kept(self.predicate, batch):
                arrays = functools.partial(Arrays, batch, "a batch that filter keeps")
                yield Given(arrays, is_in_memory=True)

    def __repr__(self) -> str:
        """Return a string that does not depend on the process, as addresses do."""
        return f"Filter({named(self.predicate)})"


def judge_together(
    lockstep: Lockstep, name: str, filters: Sequence[Filter], is_compared: bool
) -> None:
    """Find the rows that filters keep; each rank judges its share of them. Collective.

    All ranks must have shown that they have the same dataset.

    Args:
      lockstep: Of the ranks.
      name: What messages call the dataset.
      filters: Its filters, in their order.
      is_compared: Whether all ranks hold the same rows.

    Raises:
      DataError: Ranks may hold different rows; or a predicate returns neither True nor False.
      RemoteError: A predicate failed on another rank.

    Cost: one handshake for each filter, in which ranks send a bit for each row of their shares.
    """
    size = lockstep.comm.size
    for index, step in enumerate(filters):
        call = f"{name}: filter no. {index + 1}, {step!r}"
        with lockstep.preparing(call):
            if not is_compared:
                raise DataError(
                    f"{name}: filter wants the same rows on all ranks, each of which judges its "
                    "share, and rows_may_differ=True was given. Choose the rows before the dataset "
                    "is made, or call distribute_datasets_from_function."
                )
            count = len(step.choice.candidates())
            shares = [row_bounds(count, rank, size) for rank in range(size)]
            verdicts = step.choice.judge(*shares[lockstep.comm.rank])
        payloads = lockstep.gather_payloads(call, np.packbits(verdicts).tobytes())
        parts = [
            np.unpackbits(np.frombuffer(payload, np.uint8), count=hi - lo)
            for payload, (lo, hi) in zip(payloads, shares, strict=True)
        ]
        step.choice.adopt(np.concatenate(parts).astype(np.bool_))
