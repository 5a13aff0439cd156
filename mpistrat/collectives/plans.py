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
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat import nest
from mpistrat.arrays import Array
from mpistrat.collectives.lockstep import FRAME, HEAD, Lockstep, digest_of
from mpistrat.collectives.messages import divide
from mpistrat.collectives.part import Part
from mpistrat.collectives.reducer import Folding
from mpistrat.kernels.ops import FOLDS, ReduceOp

__all__ = ["NumberPlan", "Plan", "Plans", "Request", "Sketch", "request"]

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

    def __init__(self, lockstep: Lockstep):
        """Remember nothing yet."""
        self._lockstep = lockstep
        self._known: dict[tuple[Any, ...], Plan] = {}
        self._sketches: dict[tuple[Any, ...], Sketch] = {}
        self._lone: dict[tuple[Any, ...], Plan | NumberPlan] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._known) + len(self._lone)

    def lone(self, reduce_op: Any, value: Any) -> Plan | NumberPlan | None:
        """Return the plan for a lone array or number, if there is one."""
        try:
            if type(value) is np.ndarray:
                return self._lone.get((reduce_op, value.dtype, value.shape))
            return self._lone.get((reduce_op, type(value)))
        except TypeError:  # no operation; the general path says so, on every rank
            return None

    def find(self, asked: Request | None) -> Plan | None:
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
            self._plan(asked, what.op, what.text, parts)

    def _plan(self, asked: Request, op: ReduceOp, text: str, parts: Sequence[Part]) -> None:
        lockstep = self._lockstep
        header = _ONE if op is ReduceOp.MEAN else b""
        as_is = all(_as_is(leaf, part) for leaf, part in zip(asked.leaves, parts, strict=True))
        fits = lockstep.fits(len(header) + sum(part.value.nbytes for part in parts))
        if not (as_is and fits):
            return
        if len(self) >= _MOST:
            self._known.clear()
            self._lone.clear()
        reduce_op, structure, *specs = asked.key
        if not nest.is_lone(structure):
            numbers = [type(leaf) is not np.ndarray for leaf in asked.leaves]
            self._known[asked.key] = Plan(lockstep, op, text, parts, header, numbers)
            return
        number = specs[0] in _FLOATS
        key = (reduce_op, *specs[0]) if isinstance(specs[0], tuple) else (reduce_op, specs[0])
        if number and op in (ReduceOp.SUM, ReduceOp.MEAN):
            self._lone[key] = NumberPlan(lockstep, op, text)
        else:
            number = type(asked.leaves[0]) is not np.ndarray
            self._lone[key] = Plan(lockstep, op, text, parts, header, [number])
