"""All-reduces that are sent with the handshake: every rank reduces all values, in rank order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array, quiet
from mpistrat.collectives.call import ONES, Call
from mpistrat.collectives.paths.path import Path
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import put
from mpistrat.collectives.weights import Scales
from mpistrat.kernels.ops import UFUNCS
from mpistrat.kernels.scaling import Overflow, divide, multiply, rescue_rows


class _Run(NamedTuple):
    """Adjacent leaves of one dtype, reduced at once: everybody's values, and how to cut the sum."""

    values: tuple[Array, ...]
    cuts: tuple[tuple[int, int, tuple[int, ...] | None], ...]


@final
class Frame(Path):
    """Everything is sent with the handshake, after the weights of a mean."""

    @staticmethod
    def fits(reducer: Reducer, call: Call) -> bool:
        """Tell whether weights and values are no more than rides."""
        return reducer.lockstep.fits(8 * call.weights + call.nbytes)

    def __init__(self, reducer: Reducer, call: Call):
        """Find each rank's values in what is received."""
        super().__init__(reducer, call)
        lockstep = reducer.lockstep
        self._text, self._digest = call.said(reducer.said)
        self._handshake, self._received = lockstep.handshake, lockstep.received
        self._ufunc: Callable[..., Any] = UFUNCS[call.op]
        self._exact = all(dtype.kind in "iu" for dtype, _ in call.specs)
        self._overflow = Overflow() if call.mean else None
        self._silent = quiet if self._overflow is None else self._overflow.quiet
        # Without weights every rank gives 1.
        self.same = reducer.even(call)
        self._header = call.header(ONES * call.weights)
        self._one = call.weights == 1 or not call.mean  # weight for all leaves
        self._even = call.same or not call.mean
        self._runs = self._runs_of(0, len(call.specs))
        self._each: list[tuple[_Run, ...]] = []

    def run(
        self,
        values: Sequence[Any],
        weights: Sequence[float] = ONES,
        outs: Sequence[Array] | None = None,
    ) -> list[Any]:
        """Reduce these values; see `Path.run`. Collective."""
        call = self.call
        if not call.raw or (call.weigh and 0 in weights):  # what weighs nothing is never read
            with np.errstate(all="ignore"):
                values = call.wires(values, weights, fresh=False)
        data = [
            leaf.tobytes() if type(leaf) is np.ndarray else np.asarray(leaf).tobytes()
            for leaf in values
        ]
        header = self._header if self._even else call.header(weights)
        riding = header + b"".join(data)
        text, digest = call.said_now(self.reducer.said) if call.of else (self._text, self._digest)
        self._handshake(text, riding, digest=digest, alarm=call.alarm)
        scales = self.same if self._even else self.reducer.scales(call, self._received)
        totals = self.totals(scales)
        return totals if outs is None else put(totals, outs)

    def totals(self, scales: Scales) -> list[Any]:
        """Return the totals of what came with the last handshake. Not collective."""
        call = self.call
        reduced = self._reduced
        found = reduced(scales) if self._exact else self._silent().run(reduced, scales)
        if call.as_it_is:
            return found
        with np.errstate(all="ignore"):
            return call.results(found)

    def one(self, leaf: Any) -> Any:
        """Return the total of the only leaf. Collective."""
        return self.run((leaf,))[0]

    def _reduced(self, scales: Scales) -> list[Any]:
        runs, overflow = self._runs, self._overflow
        if self._one or scales.uniform:
            how = (self._ufunc, *scales.of(0), overflow)
            if len(runs) == 1:
                return _leaves_of(runs[0], *how)
            return list(itertools.chain.from_iterable(_leaves_of(run, *how) for run in runs))
        if not self._each:
            self._each = [self._runs_of(leaf, leaf + 1) for leaf in range(len(self.call.specs))]
        found: list[Any] = []
        for leaf, (run,) in enumerate(self._each):
            found += _leaves_of(run, self._ufunc, *scales.of(leaf), overflow)
        return found

    def _runs_of(self, first: int, last: int) -> tuple[_Run, ...]:
        """Return views of what was received: all ranks' values of a range of leaves."""
        call, runs = self.call, []
        at = 8 * call.weights + sum(size * d.itemsize for d, size in call.specs[:first])
        for dtype, some in itertools.groupby(range(first, last), lambda i: call.specs[i][0]):
            cuts, count = [], 0
            for leaf in some:
                size = call.specs[leaf][1]
                shape = None if call.numbers and call.numbers[leaf] else call.shapes[leaf]
                cuts.append((count, count + size, shape))
                count += size
            stop = at + count * dtype.itemsize
            values = tuple(row[at:stop].view(dtype) for row in self._received)
            runs.append(_Run(values, tuple(cuts)))
            at = stop
        return tuple(runs)


def _leaves_of(
    run: _Run,
    ufunc: Callable[..., Any],
    factors: Array | None,
    divisor: float,
    overflow: Overflow | None,
) -> list[Any]:
    """Return the leaves of a run: everybody's values reduced, divided, and cut.

    Where `overflow` has been seen, which NumPy notes in it meanwhile, means are made another way.
    """
    values = run.values
    if factors is not None:
        values = tuple(value.copy() for value in values)
        for value, factor in zip(values, factors, strict=True):
            multiply(value, factor)
    total: Array = ufunc(values[0], values[1]) if len(values) > 1 else values[0].copy()
    for value in values[2:]:
        ufunc(total, value, out=total)
    if divisor != 1.0:
        divide(total, divisor)
    if overflow is not None and overflow.seen:
        overflow.seen.clear()
        rescue_rows(total, run.values, factors, divisor)
    return [total[a] if shape is None else total[a:b].reshape(shape) for a, b, shape in run.cuts]
