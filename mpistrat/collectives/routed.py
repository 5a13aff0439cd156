"""Reductions and gathers that take the way that a program has chosen."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.folding import Folding, put
from mpistrat.collectives.forms import decode_order, encode_order, ordered
from mpistrat.collectives.gatherer import Gatherer
from mpistrat.collectives.messages import parts_of, rescued, scale
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.reducing import Reducing
from mpistrat.collectives.routes import Route
from mpistrat.collectives.spans import Placed, scaled, total_of
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.abort import moving

__all__ = [
    "Chosen",
    "Packing",
    "Routed",
    "Timed",
    "divisors_of",
    "grouped",
]


class Chosen(Reducing):
    """What takes the place of a `Reducer` where a program has chosen how values move.

    Args:
      base: What moves values where nothing is chosen.
    """

    def __init__(self, base: Reducer):
        """Take the place of `base`."""
        super().__init__(base.lockstep, base.node)

    @final
    def fold_placed(
        self, what: Folding, placed: Placed, weight: float, weigh: bool, leaves: list[Array]
    ) -> None:
        """Fold arrays of the arena as any others: a choice leaves shared memory out. Collective."""
        self.fold(what, leaves, [weight], weigh, leaves)

    def _weighed(
        self, what: Folding, weights: Sequence[float], weigh: bool, text: str, alarm: str
    ) -> Array | None:
        """Prove the call; return the weights of every rank (rows) and leaf, of a MEAN."""
        mean = what.op is ReduceOp.MEAN
        header = struct.pack(f"<{len(weights)}d", *weights) if mean else b""
        smalls = self.lockstep.share(text, header, alarm=alarm)
        if not mean:
            return None
        table = np.array([np.frombuffer(small, np.float64) for small in smalls])
        self.weights = table.reshape(self.comm.size, -1)
        scales = scaled(self.weights, weigh)
        return np.broadcast_to(scales, (self.comm.size, len(what.forms)))


def divisors_of(scales: Array | None) -> list[float] | None:
    """Return what each leaf is divided by, given the weights of every rank (rows) and leaf."""
    return None if scales is None else [total_of(column) for column in scales.T.tolist()]


class Packing(NamedTuple):
    """How leaves are made into messages.

    Attributes:
      nbytes: A message is closed once it is larger than so many bytes; 0 for no limit.
      parts: Without a limit: all leaves of one dtype are cut into so many messages; 0 for a
        message per leaf.
    """

    nbytes: int = 0
    parts: int = 1

    def __str__(self) -> str:
        """Return what the proof says of it."""
        return f"{self.nbytes} bytes per pack" if self.nbytes else f"{self.parts} packs"


def grouped(
    specs: Sequence[tuple[np.dtype[Any], int]], packing: Packing
) -> list[tuple[tuple[int, ...], int]]:
    """Return which leaves travel as one run of memory, and into how many messages it is cut.

    Args:
      specs: dtype and number of elements of each leaf; empty ones do not travel.
      packing: How.

    Example:
      >>> f4 = np.dtype(np.float32)
      >>> grouped([(f4, 2), (f4, 2), (f4, 1)], Packing(nbytes=8))
      [((2, 1), 1), ((0,), 1)]
      >>> grouped([(f4, 2), (f4, 2), (f4, 1)], Packing(parts=2))
      [((0, 1, 2), 2)]
    """
    indices = [i for i, (_, size) in enumerate(specs) if size]
    if not packing.nbytes and not packing.parts:
        return [((i,), 1) for i in indices]
    done: list[tuple[tuple[int, ...], int]] = []
    open_: dict[np.dtype[Any], list[int]] = {}
    for i in reversed(indices) if packing.nbytes else indices:
        dtype = specs[i][0]
        pack = open_.setdefault(dtype, [])
        pack.append(i)
        if packing.nbytes and sum(specs[j][1] for j in pack) * dtype.itemsize > packing.nbytes:
            done.append((tuple(open_.pop(dtype)), 1))
    cuts = 1 if packing.nbytes else packing.parts
    return done + [(tuple(pack), cuts) for pack in open_.values()]


class _Sent(NamedTuple):
    """Leaves as one run of memory, and room for their fold."""

    leaves: tuple[int, ...]
    cuts: int
    send: Array
    recv: Array


@final
class Routed(Chosen):
    """Makes the values of all ranks one, on a chosen way.

    Nothing but weights rides in the proof: what was chosen moves all values, however small.
    Gathers that fit the proof do ride in it.

    Args:
      base: What moves values where nothing is chosen.
      route: The way of each message.
      packing: What a message is.
    """

    def __init__(self, base: Reducer, route: Route, packing: Packing):
        """Reduce over the ranks of `base`."""
        super().__init__(base)
        self._route, self._packing = route, packing
        self._by = f" by {route.name}, {packing}"
        gather = functools.partial(route.gather, base.comm)
        self._gatherer = Gatherer(base.lockstep, gather)

    def fold(
        self,
        what: Folding,
        values: Sequence[Array],
        weights: Sequence[float],
        weigh: bool = False,
        outs: Sequence[Array] | None = None,
        alarm: str = "",
    ) -> list[Array]:
        """Fold leaves over all ranks. Collective. Cost: the proof, and the way, per message."""
        op = what.op
        with np.errstate(all="ignore"):
            with self.lockstep.preparing(what.text):
                text = f"{what.text}{self._by}"
                wires = what.wires(values, weights, fresh=weigh)
                sent = self._sent(op, wires)
            scales = self._weighed(what, weights, weigh, text, alarm)
            with moving(self.lockstep, text):
                given = [pair for m in sent for pair in parts_of(m.leaves, m.send, wires)]
                if weigh and scales is not None:
                    scale(given, scales[self.comm.rank])
                for message in sent:
                    self._move(text, message, op)
                divisors = divisors_of(scales)
                results = what.results(self._totals(op, wires, sent), divisors)
                if divisors is not None and not self._route.whole:
                    fold = functools.partial(self._route.fold, text, self.lockstep, op=op)
                    rescued(results, given, divisors, self.comm.size, fold)
            return put(results, outs)

    def all_gather(
        self, call: str, axis: Sequence[int], leaves: Sequence[Array], paths: Sequence[str]
    ) -> list[Array]:
        """Concatenate every leaf over all ranks; on the way's own gather. Collective."""
        return self._gatherer.all_gather(f"{call}{self._by}", axis, leaves, paths)

    def _sent(self, op: ReduceOp, wires: Sequence[Array]) -> list[_Sent]:
        keys = [encode_order(w, op) if ordered(op, w.dtype) else w for w in wires]
        packing = Packing(0, 0) if self._route.whole else self._packing
        found = []
        for leaves, cuts in grouped([(key.dtype, key.size) for key in keys], packing):
            one = keys[leaves[0]] if len(leaves) == 1 else None
            flat = [keys[i].reshape(-1) for i in leaves] if one is None else []
            send = np.concatenate(flat) if one is None else one
            found.append(_Sent(leaves, cuts, send, np.empty_like(send)))
        return found

    def _move(self, text: str, message: _Sent, op: ReduceOp) -> None:
        if self._route.whole or message.cuts == 1:
            self._route.fold(text, self.lockstep, message.send, message.recv, op)
            return
        sends = np.array_split(message.send.reshape(-1), message.cuts)
        recvs = np.array_split(message.recv.reshape(-1), message.cuts)
        for send, recv in zip(sends, recvs, strict=True):
            if send.size:
                self._route.fold(text, self.lockstep, send, recv, op)

    @staticmethod
    def _totals(op: ReduceOp, wires: Sequence[Array], sent: list[_Sent]) -> list[Array]:
        totals = [np.empty_like(wire) for wire in wires]  # of no elements, unless set below
        for message in sent:
            for i, flat in parts_of(message.leaves, message.recv, wires):
                part = flat.reshape(wires[i].shape)
                totals[i] = decode_order(part, op) if ordered(op, wires[i].dtype) else part.copy()
        return totals


@final
class Timed(Chosen):
    """Collectives that may take so many seconds; then the watchdog ends the job, with code 75.

    Args:
      base: What moves values where nothing is chosen.
      inner: What makes the collectives.
      seconds: How long.
    """

    def __init__(self, base: Reducer, inner: Reducing, seconds: float):
        """Let `inner` take so many seconds."""
        super().__init__(base)
        self._inner, self._seconds = inner, seconds
        self._within = f" within {seconds:g} s"

    def fold(
        self,
        what: Folding,
        values: Sequence[Array],
        weights: Sequence[float],
        weigh: bool = False,
        outs: Sequence[Array] | None = None,
        alarm: str = "",
    ) -> list[Array]:
        """Fold leaves over all ranks, in time. Collective."""
        timed = Folding(what.text + self._within, what.op, what.forms, what.shapes)
        with self.lockstep.within(self._seconds):
            results = self._inner.fold(timed, values, weights, weigh, outs, alarm)
        self.weights = self._inner.weights
        return results

    def all_gather(
        self, call: str, axis: Sequence[int], leaves: Sequence[Array], paths: Sequence[str]
    ) -> list[Array]:
        """Concatenate every leaf over all ranks, in time. Collective."""
        with self.lockstep.within(self._seconds):
            return self._inner.all_gather(f"{call}{self._within}", axis, leaves, paths)

    @property
    def delegates(self) -> bool:
        """Whether a class of the program's own moves values here."""
        return self._inner.delegates

    def by_class(
        self, call: str, op: ReduceOp, values: Sequence[Any], check: Callable[[Any, Any], Any]
    ) -> list[Any]:
        """Fold values by a class of the program's own, in time. Collective."""
        with self.lockstep.within(self._seconds):
            return self._inner.by_class(f"{call}{self._within}", op, values, check)
