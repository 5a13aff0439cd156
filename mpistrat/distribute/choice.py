"""How a strategy's values move, as a program has chosen it: by a class, or by options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from mpistrat import nest
from mpistrat.arrays import Array, as_array, digest
from mpistrat.collectives.communication import (
    WIRES,
    CommunicationImplementation,
    CommunicationOptions,
)
from mpistrat.collectives.folding import Folding, put
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.reducing import Reducing
from mpistrat.collectives.routed import (
    Chosen,
    Packing,
    Routed,
    Timed,
    divisors_of,
)
from mpistrat.collectives.routes import Native, Ring, Route
from mpistrat.distribute.mode import Mode, current, entered
from mpistrat.distribute.regroup import select
from mpistrat.distribute.slices import arrays_of
from mpistrat.distribute.values import Birth, Home, OnRank, PerReplica
from mpistrat.distribute.writes import prove_same
from mpistrat.errors import StructureError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.scaling import multiply

__all__ = ["Choice", "Ops", "like"]

_AUTO, _RING, _NCCL = CommunicationImplementation


class Ops:
    """What a choice needs of a `CrossDeviceOps`, which says what its methods do.

    Attributes:
      route: Returns the way of each message and the number of packs; None if `reduce` itself moves.
      reduce: Folds one value.
      batch_reduce: Folds several values.
      broadcast: Gives replica 0's value to every replica.
    """

    route: Callable[[Sequence[str]], tuple[Route, int] | None]
    reduce: Callable[[Any, Any, Any, Any], Any]
    batch_reduce: Callable[[Any, Any, Any], list[Any]]
    broadcast: Callable[[Any, Any], Any]


@final
@dataclass(frozen=True)
class Choice:
    """What a program has chosen; equal on all ranks, which each call proves.

    Attributes:
      base: What moves values where nothing is chosen.
      ops: The class of the algorithm, if one was given.
      options: Sizes, time and algorithm.
      labels: The labels of the replicas' devices.
    """

    base: Reducer
    ops: Ops | None = None
    options: CommunicationOptions = field(default_factory=CommunicationOptions)
    labels: tuple[str, ...] = ()

    @property
    def made(self) -> bool:
        """Whether anything was chosen at all."""
        return self.ops is not None or self.options != CommunicationOptions()

    @property
    def delegate(self) -> Ops | None:
        """The class of the program that moves values itself, if one was given."""
        if self.ops is None or self.ops.route(self.labels) is not None:
            return None
        return self.ops

    def but(self, ops: Ops | None = None, options: CommunicationOptions | None = None) -> Choice:
        """Return this choice with others in its place, where there are others.

        An algorithm that options name takes the place of a class that was chosen before.

        Raises:
          ValueError: `options` are none.
        """
        if options is not None and not isinstance(options, CommunicationOptions):
            raise ValueError(
                f"options must be an instance of CommunicationOptions, got {options!r:.80}."
            )
        merged = self.options.merge(options)
        named = options is not None and options.implementation is not _AUTO
        kept = None if named else self.ops
        return Choice(self.base, kept if ops is None else ops, merged, self.labels)

    def reducer(self) -> Reducing:
        """Return what moves values so.

        Raises:
          ValueError: The root is no replica; or a class that moves values as they are was chosen
            together with a wire.
        """
        made = self._untimed()
        seconds = self.options.timeout_seconds
        return made if seconds is None else Timed(self.base, made, seconds)

    def _untimed(self) -> Reducing:
        nbytes, how = self.options.bytes_per_pack, self.options.implementation
        if self.ops is not None:
            chosen = self.ops.route(self.labels)
            if chosen is None:
                return _Delegated(self.base, self.ops, self.options)
            if self.options.wire != WIRES[0]:
                raise ValueError(
                    f"wire={self.options.wire!r} does not go with {type(self.ops).__name__}, which "
                    "moves values as they are; leave out one of the two."
                )
            route, packs = chosen
            return Routed(self.base, route, Packing(nbytes, packs))
        if how is _AUTO and not nbytes:
            base, wire = self.base, self.options.wire
            return base if wire == WIRES[0] else Reducer(base.lockstep, wire)
        return Routed(self.base, Ring() if how is _RING else Native(), Packing(nbytes))


@final
class _Delegated(Chosen):
    """Lets a class of the program move values.

    Before that it is shown that all ranks call it, and after that, that all got the same.

    Args:
      base: What gathers.
      ops: The class's instance.
      options: What it is given as options.
    """

    def __init__(self, base: Reducer, ops: Ops, options: CommunicationOptions):
        """Reduce by `ops`."""
        super().__init__(base)
        self._base, self._ops, self._options = base, ops, options
        kind = type(ops)
        self._by = f" by {kind.__module__}.{kind.__qualname__}, {options}"

    def all_gather(
        self, call: str, axis: Sequence[int], leaves: Sequence[Array], paths: Sequence[str]
    ) -> list[Array]:
        """Concatenate every leaf as without a choice; these classes only reduce. Collective."""
        return self._base.all_gather(f"{call}{self._by}", axis, leaves, paths)

    def fold(
        self,
        what: Folding,
        values: Sequence[Array],
        weights: Sequence[float],
        weigh: bool = False,
        outs: Sequence[Array] | None = None,
        alarm: str = "",
    ) -> list[Array]:
        """Fold leaves over all ranks. Collective. Cost: two proofs, and what the class does."""
        with self.lockstep.preparing(what.text):
            text = f"{what.text}{'' if outs is None else ', out'}{self._by}"
            wires = what.wires(values, weights, fresh=True)
        scales = self._weighed(what, weights, weigh, text, alarm)
        # A mean of values that count alike is theirs to make; of others, it is a sum, divided here.
        if scales is not None and bool((scales == 1).all()):
            scales = None
        op = what.op if scales is None else ReduceOp.SUM
        if weigh and scales is not None:
            for wire, scale in zip(wires, scales[self.comm.rank], strict=True):
                multiply(wire, scale)
        totals = self._folded(text, op, wires, self._like)
        return put(what.results(totals, divisors_of(scales)), outs)

    @property
    def delegates(self) -> bool:
        """True: the class moves values."""
        return True

    def by_class(
        self, call: str, op: ReduceOp, values: Sequence[Any], check: Callable[[Any, Any], Any]
    ) -> list[Any]:
        """Fold values of any kind. Collective. Cost: two proofs, and what the class does."""
        text = f"{call}{self._by}"
        self.lockstep.prove(text)
        return self._folded(text, op, values, check)

    def _like(self, made: Any, wire: Array) -> Array:
        return like(self._ops, made, wire)

    def _folded(
        self, text: str, op: ReduceOp, given: Sequence[Any], check: Callable[[Any, Any], Any]
    ) -> list[Any]:
        if not given:
            return []
        failure, totals, contents = None, [], b""
        try:
            structure = nest.flatten(list(given))[1]
            values = [self._per_replica(one, i, structure) for i, one in enumerate(given)]
            ruling = current()
            with nullcontext() if ruling is None else entered(Mode(ruling.strategy)):
                if len(values) == 1:
                    made = [self._ops.reduce(op, values[0], values[0], self._options)]
                else:
                    pairs = [(value, value) for value in values]
                    made = list(self._ops.batch_reduce(op, pairs, self._options))
            totals = [check(one, value) for one, value in zip(made, given, strict=True)]
            contents = b"".join([digest(arrays_of(total)) for total in totals])
        except Exception as error:
            failure = error
        advice = "A CrossDeviceOps must return the same on every rank."
        told = {"what the class returned": contents}
        prove_same(self.lockstep, f"{text}, folded", told, advice, failure)
        return totals

    def _per_replica(self, value: Any, place: int, structure: nest.Structure) -> PerReplica:
        comm, home = self.comm, Home.of(self.lockstep)
        values: list[Any] = [OnRank(rank) for rank in home.ranks]
        values[comm.rank] = value
        birth = Birth(self.lockstep.session.calls, place, structure)
        return PerReplica(value, comm.rank, tuple(values), comm.size == 1, birth, home)


def like(ops: Ops, result: Any, wire: Array) -> Array:
    """Return what a class made of a value, in the value's dtype.

    Args:
      ops: The class's instance, for messages.
      result: What it made.
      wire: The value, as the class was given it.

    Raises:
      StructureError: It is of another shape, or a dtype that does not convert.
    """
    total = np.array(as_array(select(result), "the result"), order="C")
    if total.shape != wire.shape:
        raise StructureError(
            f"{type(ops).__name__} returned shape {total.shape} for values of shape {wire.shape}."
        )
    if not np.can_cast(total.dtype, wire.dtype, "same_kind"):
        raise StructureError(
            f"{type(ops).__name__} returned {total.dtype} for values of {wire.dtype}."
        )
    return total.astype(wire.dtype, copy=False)
