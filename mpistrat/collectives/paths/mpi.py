"""All-reduces by MPI, message by message: where memory cannot be shared, or as a program chose."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from mpistrat.arrays import Array
from mpistrat.collectives.buckets import ALONE, Bucket
from mpistrat.collectives.call import Call
from mpistrat.collectives.paths.path import StagedPath
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.routes import Native, Packing
from mpistrat.collectives.weights import Scales
from mpistrat.kernels.scaling import low_sum, multiply, power_for, rescue

# Packs are bounded, so scratch memory is, whatever the tree.
_PACKING = Packing(4 * 1024 * 1024, alone=ALONE)


class Sent(NamedTuple):
    """Leaves ready to travel.

    Attributes:
      wires: The leaves as they are reduced.
      messages: Which travel as one, their values in one piece, and room for the results.
    """

    wires: list[Array]
    messages: list[tuple[Bucket, Array, Array]]


class Messages(StagedPath):
    """One MPI_Allreduce for each large leaf, without a copy, and for small ones together."""

    def __init__(self, reducer: Reducer, call: Call):
        """Find the way of each message."""
        super().__init__(reducer, call)
        self._route = reducer.route or Native()
        self._packing = _PACKING if reducer.route is None else reducer.packing
        if self._route.whole:
            self._packing = Packing(0, 0)

    @staticmethod
    def fits(reducer: Reducer, call: Call) -> bool:
        """Tell whether memory cannot be shared."""
        return not reducer.node.possible

    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> Sent:
        """Make messages, and room for what comes."""
        call = self.call
        wires = call.wires(values, weights, fresh=call.weigh)
        found = []
        for bucket in self._packing.buckets([(wire.dtype, wire.size) for wire in wires]):
            some = [wires[piece.leaf] for piece in bucket.pieces]
            send = some[0] if len(some) == 1 else np.concatenate([w.reshape(-1) for w in some])
            found.append((bucket, send, np.empty_like(send)))
        return Sent(wires, found)

    def finish(self, staged: Sent, scales: Scales) -> list[Any]:
        """Send the messages, and return the results."""
        call, size = self.call, self.reducer.comm.size
        given = [(i, part) for b, send, _ in staged.messages for i, part in _parts(b, send)]
        if call.weigh:
            for i, part in given:
                factors, _ = scales.of(i)
                if factors is not None:
                    multiply(part, factors[self.reducer.comm.rank])
        for message in staged.messages:
            self._move(*message)
        results = call.results(self._totals(staged), scales.divisors)
        divisors = scales.divisors
        if divisors is not None and size > 1 and not self._route.whole:
            power = power_for(size)
            for i, value in given:
                low = functools.partial(_low_total, self._reduce, value, power)
                rescue(results[i], low, divisors[i if len(divisors) > 1 else 0], power)
        return results

    def _reduce(self, send: Array, recv: Array) -> None:
        text = self.call.text + self.reducer.said
        self._route.reduce(text, self.reducer.lockstep, send, recv, self.call.op)

    def _move(self, bucket: Bucket, send: Array, recv: Array) -> None:
        cuts = 1 if self._packing.nbytes else self._packing.parts
        if cuts <= 1:
            self._reduce(send, recv)
            return
        sends = np.array_split(send.reshape(-1), cuts)
        recvs = np.array_split(recv.reshape(-1), cuts)
        for one, to in zip(sends, recvs, strict=True):
            if one.size:
                self._reduce(one, to)

    def _totals(self, sent: Sent) -> list[Array]:
        totals = [w if w.size else np.empty_like(w) for w in sent.wires]
        for bucket, _, recv in sent.messages:
            for i, flat in _parts(bucket, recv):
                part = flat.reshape(sent.wires[i].shape)
                # Keeping one is to keep nothing else.
                totals[i] = part.copy() if len(bucket.pieces) > 1 else part
        return totals


@final
class Chosen(Messages):
    """Every message on the way that a program has chosen, however small."""

    @staticmethod
    def fits(reducer: Reducer, call: Call) -> bool:
        """Tell whether a way was chosen."""
        return reducer.route is not None


def _parts(bucket: Bucket, message: Array) -> list[tuple[int, Array]]:
    """Return each leaf of a message and its part, as a flat array."""
    flat = message.reshape(-1)
    return [(p.leaf, flat[p.column : p.column + p.stop]) for p in bucket.pieces]


def _low_total(
    ufunc: Callable[[Array, Array], None], value: Array, power: float, where: NDArray[np.intp]
) -> Array:
    """Return the sums at some places of everybody's values, scaled down before. Collective."""
    send = low_sum([value], None, power, where)
    total = np.empty_like(send)
    ufunc(send, total)
    return total
