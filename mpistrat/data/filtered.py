"""Rows and batches that a predicate keeps.

The rows that a `RowFilter` keeps are found once, by this rank or by all ranks together, each of
which judges its share. From then on they are an index, so that lengths, orders and positions are
exact.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.data.pieces import (
    ExampleReader,
    LazyBatch,
    LoadedBatch,
    Order,
    find_row_bounds,
    get_function_name,
    make_listed_order,
)
from mpistrat.data.sources import UNKNOWN, ArrayTree, RowIndices
from mpistrat.data.steps import ArrangingStep, BatchMaker, EpochPath, Seeds, Step
from mpistrat.errors import DataError
from mpistrat.lockstep.handshake import Lockstep

_BLOCK_ROW_COUNT = 128  # read at a time

Predicate = Callable[..., Any]


def _is_kept(predicate: Predicate, element: Any) -> bool:
    """Return whether a predicate keeps an element."""
    try:
        # As a map, which unpacks tuples but not named tuples.
        verdict = predicate(*element) if type(element) is tuple else predicate(element)
    except StopIteration as error:
        raise DataError(
            f"the function of filter, {get_function_name(predicate)}, raised StopIteration, which "
            "would look like the end of the data. Return True or False."
        ) from error
    flag = np.asarray(verdict)
    if flag.shape or flag.dtype != np.bool_:
        raise DataError(
            f"the function of filter, {get_function_name(predicate)}, returned {verdict!r:.60}; "
            "expected True or False for the whole element (of an array, for example, "
            "(x > 0).all())."
        )
    return bool(flag)


@final
class RowSelection:
    """Which rows a predicate keeps; found when somebody asks.

    Args:
      reader: Reads the examples that the predicate judges.
      predicate: Judges one.
      list_candidates: Returns the rows that are judged, increasing; no others are read.
    """

    def __init__(
        self, reader: ExampleReader, predicate: Predicate, list_candidates: Callable[[], RowIndices]
    ):
        """Create it; nothing is read yet."""
        self._reader, self._predicate = reader, predicate
        self._list_candidates = list_candidates
        self._candidates: RowIndices | None = None
        self._mask: Array | None = None

    @property
    def is_known(self) -> bool:
        """Whether the predicate has run."""
        return self._mask is not None

    def get_candidates(self) -> RowIndices:
        """Return the rows that are judged."""
        if self._candidates is None:
            self._candidates = self._list_candidates()
        return self._candidates

    def get_mask(self) -> Array:
        """Return for each row of the arrays whether it is kept; judge all, if nobody has."""
        if self._mask is None:
            self.set_verdicts(self.judge_candidates(0, len(self.get_candidates())))
        assert self._mask is not None
        return self._mask

    def judge_candidates(self, lo: int, hi: int) -> Array:
        """Return whether each of the candidates `lo` to `hi` (exclusive) is kept."""
        row_indices = self.get_candidates()[lo:hi]
        if self._mask is not None:
            known_verdicts: Array = self._mask[row_indices]
            return known_verdicts
        verdicts = np.zeros(len(row_indices), np.bool_)
        for start in range(0, len(row_indices), _BLOCK_ROW_COUNT):
            examples = self._reader.read_examples(row_indices[start : start + _BLOCK_ROW_COUNT])
            for offset, example in enumerate(examples):
                verdicts[start + offset] = _is_kept(self._predicate, example)
        return verdicts

    def set_verdicts(self, verdicts: Array) -> None:
        """Keep the candidates of which `verdicts` says so."""
        mask = np.zeros(self._reader.array_tree.row_count, np.bool_)
        mask[self.get_candidates()] = verdicts
        self._mask, self._candidates = mask, None  # which need 8 times the memory

    def describe(self) -> str:
        """Return how many rows are kept, and a digest of which."""
        mask = self.get_mask()
        mask_digest = hashlib.blake2b(np.packbits(mask).tobytes(), digest_size=8).hexdigest()
        return f"keeping {np.count_nonzero(mask)} of {len(mask)} rows {mask_digest}"


@final
@dataclasses.dataclass(frozen=True, repr=False)
class RowFilter(ArrangingStep):
    """Those examples that a predicate keeps.

    Attributes:
      predicate: The predicate.
      map_count: How many maps make the examples that it judges.
      selection: The rows that it keeps.
    """

    predicate: Predicate
    map_count: int
    selection: RowSelection

    def cardinality(self, element_count: int) -> int:
        """Return the most that can be kept: all."""
        return element_count

    def transform_order(
        self, make_order: Callable[[EpochPath], Order], seeds: Seeds, path: EpochPath
    ) -> Order:
        """Return the rows that are kept, in their order."""
        order = make_order(path)
        row_indices = order.get_rows(0, order.length)
        return make_listed_order(row_indices[self.selection.get_mask()[row_indices]])

    def transform_batches(
        self, make_batches: BatchMaker, seeds: Seeds, path: EpochPath
    ) -> Iterator[LazyBatch]:
        """Batches are filtered by `BatchFilter`."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Return a string that does not depend on the process, as addresses do."""
        return f"Filter({get_function_name(self.predicate)}, after {self.map_count} maps)"


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

    def transform_batches(
        self, make_batches: BatchMaker, seeds: Seeds, path: EpochPath
    ) -> Iterator[LazyBatch]:
        """Iterate over the batches that are kept; each batch is read whole."""
        for lazy_batch in make_batches(path):
            batch = lazy_batch.read_part(0, 1)
            if _is_kept(self.predicate, batch):
                make_arrays = functools.partial(ArrayTree, batch, "a batch that filter keeps")
                yield LoadedBatch(make_arrays, is_in_memory=True)

    def __repr__(self) -> str:
        """Return a string that does not depend on the process, as addresses do."""
        return f"Filter({get_function_name(self.predicate)})"


def judge_rows_collectively(
    lockstep: Lockstep, name: str, row_filters: Sequence[RowFilter], compares_rows: bool
) -> None:
    """Find the rows that filters keep; each rank judges its share of them. Collective.

    All ranks must have shown that they have the same dataset.

    Args:
      lockstep: The ranks, and their handshake.
      name: The name of the dataset in messages.
      row_filters: The filters of its examples, in their order.
      compares_rows: Whether all ranks hold the same rows.

    Raises:
      DataError: Ranks may hold different rows; or a predicate returns neither True nor False.
      RemoteError: A predicate failed on another rank.

    Cost: one handshake for each filter, in which ranks send a bit for each row of their shares.
    """
    size = lockstep.comm.size
    for index, step in enumerate(row_filters):
        call = f"{name}: filter no. {index + 1}, {step!r}"
        with lockstep.validating_collectively(call):
            if not compares_rows:
                raise DataError(
                    f"{name}: filter wants the same rows on all ranks, each of which judges its "
                    "share, and rows_may_differ=True was given. Choose the rows before the dataset "
                    "is made, or call distribute_datasets_from_function."
                )
            count = len(step.selection.get_candidates())
            shares = [find_row_bounds(count, rank, size) for rank in range(size)]
            verdicts = step.selection.judge_candidates(*shares[lockstep.comm.rank])
        payloads = lockstep.gather_payloads(call, np.packbits(verdicts).tobytes())
        parts = [
            np.unpackbits(np.frombuffer(payload, np.uint8), count=hi - lo)
            for payload, (lo, hi) in zip(payloads, shares, strict=True)
        ]
        step.selection.set_verdicts(np.concatenate(parts).astype(np.bool_))
