"""Which columns of a matrix are folded, by whom, and how they are scaled."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arena.arena import ArenaAddress, Block
from mpistrat.arrays import Array
from mpistrat.collectives.packs import Pack

__all__ = [
    "Packed",
    "Placed",
    "Range",
    "Scales",
    "placed",
    "scaled",
    "scales_of",
    "spans_of",
    "total_of",
]

# What is left of a weight that is not 0, so that what it belongs to is read.
_LEAST = 5e-324
# Whole numbers up to here are exact in float32.
_EXACT = 2**24


class Scales(NamedTuple):
    """What the values of each rank are multiplied by, and the sum divided by.

    Attributes:
      table: One row per rank, one column per leaf or one for all; None for all ones.
      divisors: One per leaf, or one for all; None for 1.
    """

    table: Array | None = None
    divisors: Sequence[float] | None = None

    def of(self, leaf: int) -> tuple[Array | None, float]:
        """Return what belongs to one leaf."""
        table, divisors = self.table, self.divisors
        column = None if table is None else table[:, leaf if table.shape[1] > 1 else 0]
        divisor = 1.0 if divisors is None else divisors[leaf if len(divisors) > 1 else 0]
        return column, divisor

    @property
    def uniform(self) -> bool:
        """Whether all leaves are treated alike."""
        one = self.table is None or self.table.shape[1] == 1
        return one and (self.divisors is None or len(self.divisors) == 1)


class Range(NamedTuple):
    """Columns of a matrix that are treated alike."""

    start: int
    stop: int
    scales: Array | None
    divisor: float


class Placed(NamedTuple):
    """Arrays of the arena that are folded where they lie.

    Attributes:
      suffix: What the text of the call says of it.
      rows: The matrices: the block of each, and its number there.
      spans: For each of them the columns: where they begin and end, and which leaf begins there.
    """

    suffix: str
    rows: list[tuple[weakref.ref[Block], int]]
    spans: list[list[tuple[int, int, int]]]


class Packed(NamedTuple):
    """Leaves on their way to shared memory.

    Attributes:
      values: The leaves.
      filled: The first pack is in place already.
      side: And every rank folds all of it, from this side.
    """

    values: Sequence[Array]
    filled: bool
    side: int | None


def spans_of(pack: Pack, scales: Scales) -> list[Range]:
    """Return the columns of a pack, cut where leaves are scaled differently."""
    if scales.uniform:
        return [Range(0, pack.columns, *scales.of(0))]
    return [Range(p.column, p.column + p.stop - p.start, *scales.of(p.leaf)) for p in pack.pieces]


def placed(homes: Sequence[ArenaAddress]) -> Placed:
    """Return where arrays of the arena are folded, as far as it is the same every time."""
    spans: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for leaf, home in enumerate(homes):
        place = home.place
        known = spans.setdefault((home.block.number, place.matrix), [])
        # Neighbours are folded as one, with the few columns between them that are nobody's.
        step = home.block.layout.step(place.matrix)
        if known and place.start == -(-known[-1][1] // step) * step:
            known[-1] = (known[-1][0], place.stop, known[-1][2])
        else:
            known.append((place.start, place.stop, leaf))
    blocks = {home.block.number: home.block for home in homes}
    # Weakly: what is remembered of a call must not keep a block that the program has dropped.
    rows = [(weakref.ref(blocks[number]), matrix) for number, matrix in spans]
    text = " ".join(f"{home.block.number}/{home.leaf}" for home in homes)
    return Placed(f", out, in place {text}", rows, list(spans.values()))


def scaled(table: Array, weigh: bool) -> Array:
    """Return the weights as far as they matter.

    Weights that all ranks have alike are ones: as long as batches are full nothing is multiplied,
    and a mean over one rank is the value itself. Others are divided by a power of two, which loses
    nothing unless values are next to nothing, so that together they are no more than 1: no mean
    overflows whose values do not.
    """
    if not weigh:
        return table
    columns = [_relative(column) for column in table.T.tolist()]
    return np.array(columns, np.float64).T.reshape(table.shape)


def _relative(weights: list[float]) -> list[float]:
    largest = max(weights)
    if not largest or weights.count(largest) == len(weights):
        return [1.0 if largest else 0.0] * len(weights)
    given = [weight > 0 for weight in weights]
    if not all(weight <= _EXACT and weight.is_integer() for weight in weights):
        # By a power of two too, so that nothing is rounded: their sum might be too large otherwise.
        weights = [math.ldexp(weight, -math.frexp(largest)[1]) for weight in weights]
    size = 2.0 ** -math.frexp(math.fsum(weights))[1]
    return [weight * size or _LEAST * read for weight, read in zip(weights, given, strict=True)]


def total_of(weights: list[float]) -> Any:
    """Return the sum of weights, as a longdouble where a float is not exact."""
    whole = math.fsum(weights)
    rest = math.fsum([*weights, -whole]) if math.isfinite(whole) else 0.0
    return np.longdouble(whole) + np.longdouble(rest) if rest else whole


def scales_of(table: Array, weigh: bool) -> Scales:
    """Return how values are scaled and divided, given the weights of every rank (rows) and leaf.

    Without `weigh` values are sums over their examples already, and are divided only.
    """
    if weigh and table.shape[1] == 1:  # what nearly all calls are, as long as batches are full
        weights = table[:, 0].tolist()
        if weights[0] and weights.count(weights[0]) == len(weights):
            return Scales(None, (float(len(weights)),))
    table = scaled(table, weigh)
    alike = not weigh or bool((table == 1).all())
    return Scales(None if alike else table, [total_of(column) for column in table.T.tolist()])
