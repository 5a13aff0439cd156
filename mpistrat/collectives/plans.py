"""All-reduces that were made before, remembered, so that the next one costs little more than MPI.

A small all-reduce takes some microseconds, and so does finding out what it is: to flatten the tree,
check each leaf, write the text of the call and its digest. All that follows from the structure,
shapes and dtypes, so it is found out once, by the general path, and remembered under them. A call
that finds its plan moves, proves and folds exactly as the general path does; what differs from the
plan on one rank only has another digest there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from mpistrat import nest
from mpistrat.arrays import Array
from mpistrat.collectives.folding import Folding
from mpistrat.collectives.lockstep import FRAME, HEAD, Lockstep, digest_of
from mpistrat.collectives.messages import divide
from mpistrat.collectives.node import NodeFolds
from mpistrat.collectives.part import Part
from mpistrat.kernels.ops import FOLDS, ReduceOp
from mpistrat.memory.arena import DIRECT

__all__ = ["NumberPlan", "Plan", "Plans", "Request", "SharedPlan", "Sketch", "request"]

# Programs have few structures; one that makes new ones for ever must not fill the memory.
_MOST = 1024
_ONE = struct.pack("<d", 1.0)
_FLOATS = frozenset({float, np.float64})
_NUMBERS = _FLOATS | {complex, np.float32, np.int32, np.int64, np.complex64, np.complex128}
_TREES = frozenset({dict, list, tuple})


class Request(NamedTuple):
    """One call, as far as plans look at it.

    Attributes:
      key: What a plan is remembered under; equal for calls that move and fold alike.
      leaves: The leaves.
      structure: The structure of the tree.
    """

    key: tuple[Any, ...]
    leaves: list[Any]
    structure: nest.Structure


def request(reduce_op: Any, value: Any) -> Request | None:
    """Return what is asked for, or None if it is nothing that plans are made for."""
    if not isinstance(reduce_op, str | ReduceOp):
        return None
    kind = type(value)
    if kind not in _TREES and kind is not np.ndarray and kind not in _NUMBERS:
        return None
    leaves, structure = nest.flatten(value)
    specs: list[Any] = []
    for leaf in leaves:
        kind = type(leaf)
        if kind is np.ndarray:
            specs.append((leaf.dtype, leaf.shape))
        elif kind in _NUMBERS:
            specs.append(kind)
        else:
            return None
    return Request((reduce_op, structure, *specs), leaves, structure)


class Sketch(NamedTuple):
    """What the general path found out about a call, whatever its size.

    Attributes:
      what: The call.
      like: For each leaf whether it is a number, so that a number comes back.
    """

    what: Folding
    like: tuple[bool, ...]


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
      parts: One per leaf, as the general path made them.
      header: What every rank gives before the values.
      numbers: For each leaf, whether it is a number, so that a number comes back.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        op: ReduceOp,
        text: str,
        parts: Sequence[Part],
        header: bytes,
        numbers: Sequence[bool],
    ):
        """Lay the leaves out as the general path does: header, then values one after another."""
        self._ride, self._text, self._digest = lockstep.ride, text, digest_of(text)
        self._header = header
        self._fold: Callable[..., Any] = FOLDS[op]
        self._divisor = lockstep.comm.size if op is ReduceOp.MEAN else 0
        self._quiet = all(part.value.dtype.kind in "iu" for part in parts)
        self._runs = _runs(lockstep.received, parts, len(header), numbers)

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
        skip = len(_ONE) if self._mean else 0
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
    """How one all-reduce of up to `DIRECT` bytes passes through memory that all ranks share.

    Each rank writes its values to its row, comes to the proof, and folds all rows for itself.

    Args:
      lockstep: What proves it.
      node: The shared memory.
      what: The call; one pack, of one dtype.
      numbers: For each leaf, whether it is a number, so that a number comes back.
    """

    def __init__(self, lockstep: Lockstep, node: NodeFolds, what: Folding, numbers: Sequence[bool]):
        """Find the rows of both sides."""
        (pack,) = what.packs
        self._session, self._ride = lockstep.session, lockstep.ride
        self._text, self._digest = what.said("")
        mean = what.op is ReduceOp.MEAN
        self._header, self._divisor = (_ONE, lockstep.comm.size) if mean else (b"", 0)
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

    def all(self, leaves: Sequence[Any]) -> list[Any]:
        """Prove, fold and return the totals of `leaves`, in rank order. Collective."""
        side = (self._session.calls + 1) & 1
        np.concatenate(leaves, axis=None, out=self._mine[side])
        total = self._total(side)
        return [
            total[start] if shape is None else total[start:stop].reshape(shape)
            for start, stop, shape in self._cuts
        ]

    def one(self, leaf: Any) -> Any:
        """Return the total of the only leaf, an array. Collective."""
        side = (self._session.calls + 1) & 1
        mine = self._mine[side]
        if leaf.ndim == 1:
            mine[:] = leaf
            return self._total(side)
        mine.reshape(self._shape)[...] = leaf
        return self._total(side).reshape(self._shape)

    def _total(self, side: int) -> Array:
        self._ride(self._text, self._digest, self._header)
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


def _as_is(leaf: Any, part: Part) -> bool:
    """Tell whether the bytes of a leaf travel and come back as they are."""
    same = part.form.wire == part.form.result == part.value.dtype
    return same and _native(leaf, part) and part.value.size > 0


def _native(leaf: Any, part: Part) -> bool:
    return type(leaf) is not np.ndarray or leaf.dtype == part.value.dtype


def _runs(
    received: Array, parts: Sequence[Part], at: int, numbers: Sequence[bool]
) -> tuple[_Run, ...]:
    runs = []
    first = 0
    while first < len(parts):
        dtype = parts[first].value.dtype
        cuts, count, last = [], 0, first
        while last < len(parts) and parts[last].value.dtype == dtype:
            value = parts[last].value
            shape = None if numbers[last] else value.shape
            cuts.append((count, count + value.size, shape))
            count, last = count + value.size, last + 1
        stop = at + count * dtype.itemsize
        runs.append(_Run(tuple(row[at:stop].view(dtype) for row in received), tuple(cuts)))
        first, at = last, stop
    return tuple(runs)


@final
class Plans:
    """The plans of one strategy, by what they are for."""

    def __init__(self, lockstep: Lockstep, node: NodeFolds):
        """Remember nothing yet."""
        self._lockstep, self._node = lockstep, node
        self._known: dict[tuple[Any, ...], Plan | SharedPlan] = {}
        self._sketches: dict[tuple[Any, ...], Sketch] = {}
        self._lone: dict[tuple[Any, ...], AnyPlan] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._known) + len(self._lone)

    def lone(self, reduce_op: Any, value: Any) -> AnyPlan | None:
        """Return the plan for a lone array or number, if there is one."""
        try:
            if type(value) is np.ndarray:
                return self._lone.get((reduce_op, value.dtype, value.shape))
            return self._lone.get((reduce_op, type(value)))
        except TypeError:  # no operation; the general path says so, on every rank
            return None

    def find(self, asked: Request | None) -> Plan | SharedPlan | None:
        """Return the plan of this request, if there is one."""
        return None if asked is None else self._known.get(asked.key)

    def sketch(self, asked: Request | None, weighted: bool) -> Sketch | None:
        """Return what is known of this request, if anything is."""
        return None if asked is None else self._sketches.get((weighted, *asked.key))

    def learn(self, asked: Request, what: Folding, parts: Sequence[Part], weighted: bool) -> None:
        """Remember what the general path has found out about this request."""
        if self._lockstep.options.nan != "off":
            return  # it looks at every leaf, and wants its name
        if len(self._sketches) >= _MOST:
            self._sketches.clear()
        # A leaf of foreign byte order is converted by the general path only.
        if all(_native(leaf, part) for leaf, part in zip(asked.leaves, parts, strict=True)):
            like = tuple(type(leaf) is not np.ndarray for leaf in asked.leaves)
            self._sketches[(weighted, *asked.key)] = Sketch(what, like)
        if not weighted:
            self._plan(asked, what, parts)

    def _plan(self, asked: Request, what: Folding, parts: Sequence[Part]) -> None:
        lockstep, op = self._lockstep, what.op
        header = _ONE if op is ReduceOp.MEAN else b""
        if not all(_as_is(leaf, part) for leaf, part in zip(asked.leaves, parts, strict=True)):
            return
        if len(self) >= _MOST:
            self._known.clear()
            self._lone.clear()
        reduce_op, structure, *specs = asked.key
        numbers = [type(leaf) is not np.ndarray for leaf in asked.leaves]
        plan: Plan | SharedPlan
        if lockstep.fits(len(header) + what.nbytes):
            plan = Plan(lockstep, op, what.text, parts, header, numbers)
        elif (
            lockstep.frames
            and self._node.arena.direct
            and what.most <= DIRECT
            and len(what.packs) == 1
        ):
            plan = SharedPlan(lockstep, self._node, what, numbers)
        else:
            return
        if not nest.is_lone(structure):
            self._known[asked.key] = plan
            return
        number = specs[0] in _FLOATS and op in (ReduceOp.SUM, ReduceOp.MEAN)
        key = (reduce_op, *specs[0]) if isinstance(specs[0], tuple) else (reduce_op, specs[0])
        self._lone[key] = NumberPlan(lockstep, op, what.text) if number else plan

    def _direct(self, what: Folding) -> bool:
        there = self._lockstep.frames and self._node.arena.direct
        return there and len(what.packs) == 1 and what.most <= DIRECT
