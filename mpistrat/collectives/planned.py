"""All-reduces whose every step is known: what is left is to move, to prove and to fold."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.folding import Folding
from mpistrat.collectives.node import NodeFolds
from mpistrat.collectives.spans import Scales, scales_of
from mpistrat.kernels.fold import fold_rows
from mpistrat.kernels.ops import FOLDS, ReduceOp
from mpistrat.kernels.scaling import Overflow, divide, multiply, noting, rescue_rows
from mpistrat.lockstep.frame import FRAME, HEAD
from mpistrat.lockstep.lockstep import Lockstep, digest_of

__all__ = ["ONE", "AnyPlan", "NumberPlan", "Plan", "Run", "SharedPlan", "leaves_of", "runs_of"]

# The weight that rides with a mean without weights.
ONE = struct.pack("<d", 1.0)


class Run(NamedTuple):
    """Adjacent leaves of one dtype, folded at once: everybody's values, and how to cut the sum."""

    values: tuple[Array, ...]
    cuts: tuple[tuple[int, int, tuple[int, ...] | None], ...]


@final
class Plan:
    """How one small all-reduce travels and is folded.

    Args:
      lockstep: What it rides in.
      op: The fold.
      text: The text of the call.
      values: The leaves as they travel, for their dtypes and shapes.
      header: What every rank gives before the values, if not a weight.
      numbers: For each leaf, whether it is a number, so that a number comes back.
      weighted: Values are multiplied by weights first; a mean.

    Attributes:
      nbytes: What one rank gives, in bytes.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        op: ReduceOp,
        text: str,
        values: Sequence[Array],
        header: bytes,
        numbers: Sequence[bool],
        weighted: bool = False,
    ):
        """Lay the leaves out as the general path does: header, then values one after another."""
        self._ride, self._text, self._digest = lockstep.ride, text, digest_of(text)
        self._header, self._weighted = header, weighted
        self._received = lockstep.received
        self.nbytes = sum(value.nbytes for value in values)
        self._fold: Callable[..., Any] = FOLDS[op]
        self._divisor = lockstep.comm.size if op is ReduceOp.MEAN else 0
        self._quiet = all(value.dtype.kind in "iu" for value in values)
        self._runs = runs_of(lockstep.received, values, len(header), numbers)

    def all(self, leaves: Sequence[Any], weight: float = 1.0) -> list[Any]:
        """Prove, fold and return the totals of `leaves`, in rank order. Collective."""
        data = [leaf.tobytes() if type(leaf) is np.ndarray else _bytes(leaf) for leaf in leaves]
        header = self._header
        if self._weighted:
            header = struct.pack("<d", weight)
            if weight == 0:  # never read
                data = [bytes(self.nbytes)]
        self._ride(self._text, self._digest, header + b"".join(data))
        if self._quiet:
            return self._totals(Scales(), None)
        return self._noted(_scales(self._received) if self._weighted else Scales())

    def folded(self) -> list[Any]:
        """Return the totals of what came with the last proof, without weights. Not collective."""
        return self._noted(Scales())

    def _noted(self, scales: Scales) -> list[Any]:
        with noting(overflow := Overflow() if self._divisor else None):
            return self._totals(scales, overflow)

    def into(self, leaves: Sequence[Any], outs: Sequence[Array], weight: float = 1.0) -> None:
        """Put the totals of `leaves` into arrays of their shapes and dtypes. Collective."""
        for out, total in zip(outs, self.all(leaves, weight), strict=True):
            out[...] = total

    def one(self, leaf: Any) -> Any:
        """Return the total of the only leaf. Collective."""
        return self.all((leaf,))[0]

    def _totals(self, scales: Scales, overflow: Overflow | None) -> list[Any]:
        factors, divisor = scales.of(0)
        if scales.divisors is None:
            divisor = self._divisor or 1.0
        found = [leaves_of(run, self._fold, factors, divisor, overflow) for run in self._runs]
        return found[0] if len(found) == 1 else list(itertools.chain.from_iterable(found))


@final
class NumberPlan:
    """How one float64 number is summed: Python's own additions, which are those of IEEE 754.

    The same frame as `Plan`, without NumPy's price for arrays of one number.

    Args:
      lockstep: What it rides in.
      op: SUM or MEAN.
      text: The text of the call.
      plan: The `Plan` of the same call, which decides what is left of several NaNs.
    """

    def __init__(self, lockstep: Lockstep, op: ReduceOp, text: str, plan: Plan):
        """Find the number of each rank in the frames."""
        self._plan = plan
        self._ride, self._text, self._digest = lockstep.ride, text, digest_of(text)
        self._mean = op is ReduceOp.MEAN
        self._size = lockstep.comm.size
        self._frames = lockstep.frames_received.data
        skip = len(ONE) if self._mean else 0
        self._pack = struct.Struct("<dd" if self._mean else "<d").pack
        gaps = "".join(f"{HEAD + skip}xd{FRAME - HEAD - skip - 8}x" for _ in range(self._size))
        self._unpack = struct.Struct(f"={gaps}").unpack_from

    def one(self, number: float) -> Any:
        """Return the total. Collective."""
        payload = self._pack(1.0, number) if self._mean else self._pack(number)
        self._ride(self._text, self._digest, payload)
        numbers = self._unpack(self._frames)
        total = numbers[0]
        for value in numbers[1:]:
            total += value
        if total - total != 0:  # infinite, or not a number
            return self._plan.folded()[0]
        return np.float64(total / self._size if self._mean else total)


class _Cut(NamedTuple):
    """Where leaves lie in the total: one, or neighbours of one shape.

    Attributes:
      line: From where to where.
      shape: The shape to give to it; None for a number.
      leaves: How many leaves it is.
    """

    line: slice
    shape: tuple[int, ...] | None
    leaves: int


@final
class SharedPlan:
    """How one all-reduce that is not too large passes through memory that all ranks share.

    Each rank writes its values to its row, comes to the proof, and folds all rows for itself.

    Args:
      lockstep: What proves it.
      node: The shared memory.
      what: The call; one pack, of one dtype.
      numbers: For each leaf, whether it is a number, so that a number comes back.
      weighted: Values are multiplied by weights first; a mean.

    Attributes:
      nbytes: What one rank gives, in bytes.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        node: NodeFolds,
        what: Folding,
        numbers: Sequence[bool],
        weighted: bool = False,
    ):
        """Find the rows of both sides."""
        (pack,) = what.packs
        self.nbytes = what.nbytes
        self._lockstep, self._session, self._ride = lockstep, lockstep.session, lockstep.ride
        self._text, self._digest = what.said("")
        mean = what.op is ReduceOp.MEAN
        self._header, self._divisor = (ONE, lockstep.comm.size) if mean else (b"", 0)
        self._fold: Callable[..., Any] = FOLDS[what.op]
        self._node, self._op, self._weighted = node, what.op, weighted
        self._columns, self._dtype = pack.columns, pack.dtype
        self._sides = node.arena.sides(pack.dtype)
        self._rows = tuple(tuple(row[: pack.columns] for row in side) for side in self._sides)
        self._mine = tuple(side[node.rank] for side in self._rows)
        self._cuts = _cuts([None if n else s for s, n in zip(what.shapes, numbers, strict=True)])
        self._shape = what.shapes[0]
        # If no leaf has to be put into shape, that is half of what it takes to cut hundreds.
        flat = all(cut.leaves == 1 and len(cut.shape or ()) == 1 for cut in self._cuts)
        self._lines = [cut.line for cut in self._cuts] if flat else None
        self._spare: tuple[Array, list[Any]] | None = None

    def all(self, leaves: Sequence[Any], weight: float = 1.0) -> list[Any]:
        """Prove, fold and return the totals of `leaves`, in rank order. Collective."""
        return self._cut(self._total(self._given(leaves, weight), weight))

    def into(self, leaves: Sequence[Any], outs: Sequence[Array], weight: float = 1.0) -> None:
        """Put the totals of `leaves` into arrays of their shapes and dtype. Collective."""
        if self._spare is None:
            room = np.empty(self._columns, self._dtype)
            self._spare = room, self._cut(room)
        total, parts = self._spare
        self._total(self._given(leaves, weight), weight, total)
        for out, part in zip(outs, parts, strict=True):
            out[...] = part

    def one(self, leaf: Any) -> Any:
        """Return the total of the only leaf, an array. Collective."""
        self._session.check()
        side = (self._session.calls + 1) & 1
        mine = self._mine[side]
        if leaf.ndim == 1:
            mine[:] = leaf
            return self._total(side)
        mine.reshape(self._shape)[...] = leaf
        return self._total(side).reshape(self._shape)

    def _given(self, leaves: Sequence[Any], weight: float) -> int:
        """Write to this rank's row, and return of which side. Not collective."""
        self._session.check()  # before anything is written
        side = (self._session.calls + 1) & 1
        if weight:  # a value without weight is never read
            np.concatenate(leaves, axis=None, out=self._mine[side])
        return side

    def _cut(self, total: Array) -> list[Any]:
        if self._lines is not None:
            return [total[line] for line in self._lines]
        parts: list[Any] = []
        for line, shape, count in self._cuts:
            if shape is None:
                parts.append(total[line.start])
            elif count == 1:
                parts.append(total[line].reshape(shape))
            else:
                parts.extend(total[line].reshape(count, *shape))
        return parts

    def _total(self, side: int, weight: float = 1.0, total: Array | None = None) -> Array:
        header = struct.pack("<d", weight) if self._weighted else self._header
        self._ride(self._text, self._digest, header)
        hooks = self._lockstep.hooks
        if hooks.on_moving is not None:
            hooks.on_moving()
        if total is None:
            total = np.empty(self._columns, self._dtype)
        if self._weighted:
            self._weigh(side, total)
        else:
            self._plain(side, total)
        if hooks.on_moved is not None:
            hooks.on_moved([total])
        return total

    def _plain(self, side: int, total: Array) -> None:
        rows, fold = self._rows[side], self._fold
        with noting(overflow := Overflow() if self._divisor else None):
            fold(rows[0], rows[1], out=total)
            for row in rows[2:]:
                fold(total, row, out=total)
            if overflow is not None:
                divide(total, self._divisor)
        if overflow is not None and overflow.seen:
            with np.errstate(all="ignore"):
                rescue_rows(total, rows, None, self._divisor)

    def _weigh(self, side: int, total: Array) -> None:
        """Fold as the general path does, which other ranks may take."""
        scales = _scales(self._lockstep.received)
        if scales.table is None:
            self._plain(side, total)
            return
        ready = self._node.ready(self._op, self._dtype, self._columns)
        given = scales.of(0)
        fold_rows(self._fold, self._sides[side], total[None], 0, self._columns, *given, ready=ready)


def _cuts(shapes: Sequence[tuple[int, ...] | None]) -> tuple[_Cut, ...]:
    """Return where leaves lie one after the other; None is a number.

    Neighbours of one shape are one cut: an array is taken apart in one call.
    """
    found: list[_Cut] = []
    at = 0
    for shape, several in itertools.groupby(shapes):
        count, size = len(list(several)), math.prod(shape or ())
        many = shape is not None and len(shape) > 0  # what has no dimension comes out as a number
        for number in [count] if many else [1] * count:
            found.append(_Cut(slice(at, at + number * size), shape, number))
            at += number * size
    return tuple(found)


def _scales(received: Array) -> Scales:
    """Return how values are scaled by the weights that rode before them."""
    return scales_of(received[:, :8].copy().view(np.float64), True)


AnyPlan: TypeAlias = Plan | NumberPlan | SharedPlan


def _bytes(number: Any) -> bytes:
    return np.asarray(number).tobytes()


def leaves_of(
    run: Run,
    fold: Callable[..., Any],
    factors: Array | None,
    divisor: float,
    overflow: Overflow | None,
) -> list[Any]:
    """Return the leaves of a run: everybody's values folded, divided, and cut.

    Where `overflow` has been seen, which NumPy notes in it meanwhile, means are made another way.
    """
    total = _folded(run, fold, factors)
    if divisor != 1.0:
        divide(total, divisor)
    if overflow is not None and overflow.seen:
        overflow.seen = False
        rescue_rows(total, run.values, factors, divisor)
    return [total[a] if shape is None else total[a:b].reshape(shape) for a, b, shape in run.cuts]


def _folded(run: Run, fold: Callable[..., Any], factors: Array | None) -> Array:
    """Return the fold of everybody's values, multiplied before by `factors`, one for each rank.

    All who fold what rode do it here: two NaNs, or two complex numbers, may leave other bits in
    another loop, and ranks may have come on different ways.
    """
    values = run.values
    if factors is not None:
        values = tuple(value.copy() for value in values)
        for value, factor in zip(values, factors, strict=True):
            multiply(value, factor)
    total: Array = fold(values[0], values[1]) if len(values) > 1 else values[0].copy()
    for value in values[2:]:
        fold(total, value, out=total)
    return total


def runs_of(
    received: Array, values: Sequence[Array], at: int, numbers: Sequence[bool]
) -> tuple[Run, ...]:
    """Return the values that rode in proofs: views of `received`, from byte `at` of each row on.

    Args:
      received: uint8; one row for each rank.
      values: Of one rank, for their dtypes and shapes.
      at: Where the first begins.
      numbers: For each of them, whether a number is to come of it.
    """
    runs = []
    first = 0
    while first < len(values):
        dtype = values[first].dtype
        cuts, count, last = [], 0, first
        while last < len(values) and values[last].dtype == dtype:
            value = values[last]
            shape = None if numbers[last] else value.shape
            cuts.append((count, count + value.size, shape))
            count, last = count + value.size, last + 1
        stop = at + count * dtype.itemsize
        runs.append(Run(tuple(row[at:stop].view(dtype) for row in received), tuple(cuts)))
        first, at = last, stop
    return tuple(runs)
