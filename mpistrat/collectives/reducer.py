"""All-reduce of lists of arrays.

Four paths, chosen from sizes, the number of ranks and what the nodes allow, so alike on all ranks:

- *small*: everything fits the proof's frame; folded locally, in rank order.
- *node*: through memory that the ranks of a node share, between nodes by MPI_Allreduce in lanes.
- *alone*: one rank's values are the results; at most copied.
- *native*: MPI_Allreduce, where memory cannot be shared; large leaves from where they lie, small
  ones packed.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.communication import WIRES
from mpistrat.collectives.folding import Folding, put
from mpistrat.collectives.gatherer import Gatherer
from mpistrat.collectives.messages import (
    Message,
    fold_by_mpi,
    messages,
    parts_of,
    rescued,
    scale,
    travel,
)
from mpistrat.collectives.node import NodeFolds
from mpistrat.collectives.overlap import Overlap
from mpistrat.collectives.planned import leaves_of, runs_of
from mpistrat.collectives.reducing import Reducing
from mpistrat.collectives.results import Results, of_one, results_for
from mpistrat.collectives.spans import Packed, Placed, Scales, placed, scales_of
from mpistrat.kernels.ops import FOLDS, ReduceOp
from mpistrat.kernels.scaling import Overflow, noting
from mpistrat.lockstep.abort import lost
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.sharedmem.pool import Pool

__all__ = ["Reducer"]


class _Way(NamedTuple):
    """A path that an all-reduce has taken, up to the proof.

    Attributes:
      suffix: What the text of the call says of it.
      riding: What rides in the proof.
      finish: Moves and folds, given the scales and what rode.
      small: Nothing moves but the proof.
      meets: Ranks wait for one another after the proof.
    """

    suffix: str
    riding: bytes
    finish: Callable[[Scales, list[bytes]], list[Array]]
    small: bool = False
    meets: bool = True


@final
class Reducer(Reducing):
    """Makes the values of all ranks one, on the quickest path that there is.

    Args:
      lockstep: Proves each call, and carries what is small.
      wire: What float32 travels as between nodes; see `CommunicationOptions`.
    """

    in_place = True

    def __init__(self, lockstep: Lockstep, wire: str = WIRES[0]):
        """Reduce over the ranks of `lockstep`."""
        super().__init__(lockstep, NodeFolds(lockstep, wire))
        self._by = "" if wire == WIRES[0] else f", {wire} between nodes"
        self._gatherer = Gatherer(lockstep)
        groups, key = lockstep.session.groups, ("overlap", lockstep.order)
        if key not in groups:
            groups[key] = Overlap(lockstep)
        self._overlap: Overlap = groups[key]

    def all_gather(
        self, call: str, axis: Sequence[int], leaves: Sequence[Array], paths: Sequence[str]
    ) -> list[Array]:
        """Concatenate every leaf over all ranks; see `Gatherer.all_gather`. Collective."""
        return self._gatherer.all_gather(call, axis, leaves, paths)

    def fold(
        self,
        what: Folding,
        values: Sequence[Array],
        weights: Sequence[float],
        weigh: bool = False,
        outs: Sequence[Array] | None = None,
        alarm: str = "",
    ) -> list[Array]:
        """Fold leaves over all ranks. Collective.

        Cost: the proof; unless everything rides in it, two barriers of the node, or one
        MPI_Allreduce per bucket.
        """
        self.lockstep.session.kept(Pool).turn()
        with np.errstate(all="ignore"):
            try:
                way = self._way(what, values, weights, weigh, outs)
            except Exception as error:
                self.lockstep.refuse(what.text, error)
            scales, smalls = self._prove(what, way, len(weights), weigh, alarm)
            try:
                results = way.finish(scales, smalls)
            except Exception as error:
                if not way.meets:
                    raise
                lost(self.lockstep, what.text, error)
            moved = self.lockstep.hooks.on_moved
            if moved is not None and not way.small:
                moved(results)
            return put(results, outs)

    def start(
        self,
        what: Folding,
        values: Sequence[Array],
        weight: float,
        weigh: bool,
        outs: Sequence[Array] | None,
        alarm: str,
    ) -> Callable[[], list[Array]]:
        """Begin what `fold` does; between nodes it goes on in a thread. Collective."""

        def prove(suffix: str, riding: bytes) -> tuple[Scales, list[bytes]]:
            return self._prove(what, _Way(suffix, riding, _nothing), 1, weigh, alarm)

        wait = self._overlap.start(self.lockstep, self.node, what, values, weight, outs, prove)
        return wait or super().start(what, values, weight, weigh, outs, alarm)

    def fold_placed(
        self, what: Folding, placed: Placed, weight: float, weigh: bool, leaves: list[Array]
    ) -> None:
        """Fold arrays where they lie, if all is known of them; else as `fold`."""
        header = struct.pack("<d", weight) if what.op is ReduceOp.MEAN else b""
        way = _Way(placed.suffix, header, _nothing)
        self.lockstep.session.kept(Pool).turn()
        with np.errstate(all="ignore"):
            scales, _ = self._prove(what, way, 1, weigh, "")
            try:
                if self.comm.size > 1:
                    self.node.fold_placed(what.op, placed, scales)
                else:
                    put(self._alone(what, leaves, [weight], leaves, scales, []), leaves)
            except Exception as error:
                lost(self.lockstep, what.text, error)
        moved = self.lockstep.hooks.on_moved
        if moved is not None:
            moved(leaves)

    def meet(self, what: Folding, suffix: str, weight: float) -> None:
        """Prove a MEAN that the caller folds where it lies; as `Reducing.meet`. Collective."""
        self._prove(what, _Way(suffix, struct.pack("<d", weight), _nothing), 1, True, "")

    def _prove(
        self, what: Folding, way: _Way, weights: int, weigh: bool, alarm: str
    ) -> tuple[Scales, list[bytes]]:
        text, digest = what.said(way.suffix + self._by)
        smalls: list[bytes] = []
        watched = self.lockstep.options.nan != "off"  # any rank may have an alarm to tell
        if way.small or watched or not self.lockstep.fits(len(way.riding)):
            smalls = self.lockstep.share(text, way.riding, alarm=alarm)
        else:
            self.lockstep.ride(text, digest, way.riding)
        if what.op is not ReduceOp.MEAN:
            return Scales(), smalls
        self.weights = self._weights(smalls, weights)
        return scales_of(self.weights, weigh), smalls

    def _weights(self, smalls: list[bytes], count: int) -> Array:
        """Return every rank's weights (rows) of every leaf (columns), from what came."""
        if smalls:
            return np.array([np.frombuffer(small[: 8 * count], np.float64) for small in smalls])
        return self.lockstep.received[:, : 8 * count].copy().view(np.float64)

    def _way(
        self,
        what: Folding,
        values: Sequence[Array],
        weights: Sequence[float],
        weigh: bool,
        outs: Sequence[Array] | None,
    ) -> _Way:
        """Choose a path, and do on it what can fail."""
        homes = None
        self.node.arena.check_still(what.text, [*values, *(outs or ())])
        if outs is not None and self.node.possible and what.worth_a_place:
            homes = self.node.homes(what, values, outs)
        mean = what.op is ReduceOp.MEAN
        header = struct.pack(f"<{len(weights)}d", *weights) if mean else b""
        if homes is not None:
            self.node.compile(what, inside=True)
            where = placed(homes)
            finish = functools.partial(self._in_place, what, where, list(values))
            return _Way(where.suffix, header, finish)
        if self.lockstep.fits(len(header) + what.nbytes):
            wires = what.wires(values, weights, fresh=False)
            riding = header + b"".join([wire.tobytes() for wire in wires])
            finish = functools.partial(self._rode, what, wires, len(header))
            return _Way("", riding, finish, small=True, meets=False)
        if self.comm.size == 1:
            places = None if outs is None else list(outs)
            finish = functools.partial(self._alone, what, values, weights, places)
            return _Way("", header, finish, meets=False)
        if not self.node.possible:
            wires = what.wires(values, weights, fresh=weigh)
            sent = messages(what.op, wires, self.comm.size)
            finish = functools.partial(self._native, what, wires, sent, weigh)
            return _Way("", header, finish)
        if mean and 0 in weights:  # never read
            values = what.wires(values, weights, fresh=False)
        self.node.compile(what)
        packed = self.node.prepare(what, values)
        results = results_for(what, values, outs, self.lockstep.session.kept(Pool))
        finish = functools.partial(self._packed, what, packed, values, weights, weigh, results)
        return _Way("", header, finish, meets=packed.side is None)

    def _alone(
        self,
        what: Folding,
        values: Sequence[Array],
        weights: Sequence[float],
        outs: list[Array] | None,
        scales: Scales,
        _: list[bytes],
    ) -> list[Array]:
        if scales.table is None and (scales.divisors is None or set(scales.divisors) == {1}):
            if outs is not None and outs is values:
                return outs
            dtypes = [form.result for form in what.forms]
            return of_one(values, outs, dtypes, self.lockstep.session.kept(Pool))
        # Sums over several examples; or all weights are 0, and there is no mean.
        return what.results(what.wires(values, weights, fresh=True), scales.divisors)

    def _in_place(
        self, what: Folding, placed: Placed, values: list[Array], scales: Scales, _: list[bytes]
    ) -> list[Array]:
        self.node.fold_placed(what.op, placed, scales)
        return values

    def _packed(
        self,
        what: Folding,
        packed: Packed,
        values: Sequence[Array],
        weights: Sequence[float],
        weigh: bool,
        results: Results,
        scales: Scales,
        smalls: list[bytes],
    ) -> list[Array]:
        if self.node.room(what, packed):
            self.node.fold_packed(what, packed, scales, results)
            return results.arrays
        # Once in a session: what MPI needs instead may fail to be allocated, so there is a proof.
        with self.lockstep.preparing(f"{what.text}, by MPI"):
            wires = what.wires(values, weights, fresh=weigh)
            sent = messages(what.op, wires, self.comm.size)
        self.lockstep.prove(f"{what.text}, by MPI")
        totals = self._native(what, wires, sent, weigh, scales, smalls)
        self.node.warn("all_reduce")
        return totals

    def _rode(
        self,
        what: Folding,
        wires: list[Array],
        start: int,
        scales: Scales,
        smalls: list[bytes],
    ) -> list[Array]:
        received = self.lockstep.received
        if not self.lockstep.frames:  # where what rides is equal on all ranks
            received = np.array([np.frombuffer(small, np.uint8) for small in smalls])
        # With one weight for all as plans fold, which other ranks may have.
        groups = [wires] if scales.uniform else [[wire] for wire in wires]
        totals: list[Array] = []
        for group in groups:
            factors, divisor = scales.of(len(totals))
            overflow = Overflow() if what.op is ReduceOp.MEAN else None
            with noting(overflow):
                for run in runs_of(received, group, start, [False] * len(group)):
                    totals += leaves_of(run, FOLDS[what.op], factors, divisor, overflow)
            start += sum(wire.nbytes for wire in group)
        return what.results(totals, None)

    def _native(
        self,
        what: Folding,
        wires: list[Array],
        sent: list[Message],
        weigh: bool,
        scales: Scales,
        _: list[bytes],
    ) -> list[Array]:
        given = [pair for m in sent for pair in parts_of(m.leaves, m.send, wires)]
        if weigh:
            mine = [scales.of(leaf)[0] for leaf in range(len(wires))]
            scale(given, [1.0 if m is None else m[self.comm.rank] for m in mine])
        results = what.results(travel(self.comm, what.op, wires, sent), scales.divisors)
        if scales.divisors is not None and self.comm.size > 1:
            fold = functools.partial(fold_by_mpi, self.comm, op=what.op)
            rescued(results, given, scales.divisors, self.comm.size, fold)
        return results


def _nothing(scales: Scales, smalls: list[bytes]) -> list[Array]:
    return []
