"""All-reduces whose every step is known: what is left is to move, to prove and to fold."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.folding import Folding
from mpistrat.collectives.lockstep import FRAME, HEAD, Lockstep, digest_of
from mpistrat.collectives.messages import divide
from mpistrat.collectives.node import NodeFolds
from mpistrat.kernels.ops import FOLDS, ReduceOp

__all__ = ["ONE", "AnyPlan", "NumberPlan", "Plan", "SharedPlan"]

# The weight that rides with a mean without weights.
ONE = struct.pack("<d", 1.0)


class _Run(NamedTuple):
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
      header: What every rank gives before the values.
      numbers: For each leaf, whether it is a number, so that a number comes back.

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
    ):
        """Lay the leaves out as the general path does: header, then values one after another."""
        self._ride, self._text, self._digest = lockstep.ride, text, digest_of(text)
        self._header = header
        self.nbytes = sum(value.nbytes for value in values)
        self._fold: Callable[..., Any] = FOLDS[op]
        self._divisor = lockstep.comm.size if op is ReduceOp.MEAN else 0
        self._quiet = all(value.dtype.kind in "iu" for value in values)
        self._runs = _runs(lockstep.received, values, len(header), numbers)

    def all(self, leaves: Sequence[Any]) -> list[Any]:
        """Prove, fold and return the totals of `leaves`, in rank order. Collective."""
        data = [leaf.tobytes() if type(leaf) is np.ndarray else _bytes(leaf) for leaf in leaves]
        self._ride(self._text, self._digest, self._header + b"".join(data))
        if self._quiet:
            return self._totals()
        with np.errstate(all="ignore"):
            return self._totals()

    def one(self, leaf: Any) -> Any:
        """Return the total of the only leaf. Collective."""
        return self.all((leaf,))[0]

    def _totals(self) -> list[Any]:
        results: list[Any] = []
        fold = self._fold
        for values, cuts in self._runs:
            total = fold(values[0], values[1]) if len(values) > 1 else values[0].copy()
            for value in values[2:]:
                fold(total, value, out=total)
            if self._divisor:
                divide(total, self._divisor)
            for start, stop, shape in cuts:
                results.append(total[start] if shape is None else total[start:stop].reshape(shape))
        return results


@final
class NumberPlan:
    """How one float64 number is summed: Python's own additions, which are those of IEEE 754.

    The same frame as `Plan`, without NumPy's price for arrays of one number.

    Args:
      lockstep: What it rides in.
      op: SUM or MEAN.
      text: The text of the call.
    """

    def __init__(self, lockstep: Lockstep, op: ReduceOp, text: str):
        """Find the number of each rank in the frames."""
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
        return np.float64(total / self._size if self._mean else total)


@final
class SharedPlan:
    """How one all-reduce that is not too large passes through memory that all ranks share.

    Each rank writes its values to its row, comes to the proof, and folds all rows for itself.

    Args:
      lockstep: What proves it.
      node: The shared memory.
      what: The call; one pack, of one dtype.
      numbers: For each leaf, whether it is a number, so that a number comes back.

    Attributes:
      nbytes: What one rank gives, in bytes.
    """

    def __init__(self, lockstep: Lockstep, node: NodeFolds, what: Folding, numbers: Sequence[bool]):
        """Find the rows of both sides."""
        (pack,) = what.packs
        self.nbytes = what.nbytes
        self._session, self._ride = lockstep.session, lockstep.ride
        self._text, self._digest = what.said("")
        mean = what.op is ReduceOp.MEAN
        self._header, self._divisor = (ONE, lockstep.comm.size) if mean else (b"", 0)
        self._fold: Callable[..., Any] = FOLDS[what.op]
        self._rows = tuple(
            tuple(row[: pack.columns] for row in side) for side in node.arena.sides(pack.dtype)
        )
        self._mine = tuple(side[node.rank] for side in self._rows)
        places = {piece.leaf: piece for piece in pack.pieces}
        self._cuts = tuple(
            (at.column, at.column + at.stop, None if numbers[leaf] else what.shapes[leaf])
            for leaf, at in places.items()
        )
        self._shape = what.shapes[0]
        # If no leaf has to be put into shape, that is half of what it takes to cut hundreds.
        flat = all(len(shape or ()) == 1 for _, _, shape in self._cuts)
        self._lines = [slice(start, stop) for start, stop, _ in self._cuts] if flat else None

    def all(self, leaves: Sequence[Any]) -> list[Any]:
        """Prove, fold and return the totals of `leaves`, in rank order. Collective."""
        self._session.check()  # before anything is written
        side = (self._session.calls + 1) & 1
        np.concatenate(leaves, axis=None, out=self._mine[side])
        total = self._total(side)
        if self._lines is not None:
            return [total[line] for line in self._lines]
        return [
            total[start] if shape is None else total[start:stop].reshape(shape)
            for start, stop, shape in self._cuts
        ]

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

    def _total(self, side: int) -> Array:
        self._ride(self._text, self._digest, self._header)
        moving = self._session.on_moving
        if moving is not None:
            moving()
        rows, fold = self._rows[side], self._fold
        with np.errstate(all="ignore"):
            total: Array = fold(rows[0], rows[1])
            for row in rows[2:]:
                fold(total, row, out=total)
            if self._divisor:
                divide(total, self._divisor)
        moved = self._session.on_moved
        if moved is not None:
            moved([total])
        return total


AnyPlan: TypeAlias = Plan | NumberPlan | SharedPlan


def _bytes(number: Any) -> bytes:
    return np.asarray(number).tobytes()


def _runs(
    received: Array, values: Sequence[Array], at: int, numbers: Sequence[bool]
) -> tuple[_Run, ...]:
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
        runs.append(_Run(tuple(row[at:stop].view(dtype) for row in received), tuple(cuts)))
        first, at = last, stop
    return tuple(runs)
