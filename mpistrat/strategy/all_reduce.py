"""Implementation of ``ReplicaContext.all_reduce``: convert inputs, reduce, return results.

A value goes down once, and back once: leaves and a key here, a plan from the cache or made now,
then arrays through `mpistrat.collectives.allreduce`. A class of the program's own that moves
values is asked instead of that.

Handles of all-reduces that were started.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, final

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import (
    Array,
    dtype_name,
    find_array_kind,
    is_masked,
    is_scalar,
    label,
    restore_kind,
    spec_text,
)
from mpistrat.collectives.allreduce import start_all_reduce
from mpistrat.collectives.plan import (
    ONES,
    Contribution,
    PlanOptions,
    ReductionInputs,
    ReductionPlan,
    described,
)
from mpistrat.collectives.plan_cache import CallSignature, signature_of
from mpistrat.collectives.results import of_one
from mpistrat.collectives.weights import as_weight
from mpistrat.comm.callsite import find_call_site
from mpistrat.errors import ContextError, LeafTypeError, StructureError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.variables import sparse
from mpistrat.variables.kinds import ALONE, named
from mpistrat.variables.sparse import SlicesContribution
from mpistrat.variables.values import DistributedValues


class Prepared(NamedTuple):
    """What a program has given to one all-reduce, found good.

    Attributes:
      op: The operation.
      leaves: The leaves as they were given.
      structure: Of the tree.
      contributions: What this rank gives, leaf by leaf.
      weight: How many examples it stands for.
      weighed: That was said.
      outs: Where the results go, leaf by leaf; None for new arrays.
    """

    op: ReduceOp
    leaves: list[Any]
    structure: pytree.Structure
    contributions: list[Contribution | SlicesContribution]
    weight: float
    weighed: bool
    outs: list[Array] | None

    @property
    def dense(self) -> list[Contribution]:
        """The leaves that are arrays."""
        return [
            contribution
            for contribution in self.contributions
            if isinstance(contribution, Contribution)
        ]

    @property
    def has_rows(self) -> bool:
        """Whether some leaves are `IndexedSlices`."""
        return len(self.dense) < len(self.leaves)

    def tree(self, totals: Sequence[Any]) -> Any:
        """Return results as a tree like the one that was given, of arrays of the same kinds."""
        return pytree.unflatten(self.structure, list(map(restore_kind, totals, self.leaves)))


def _prepared(reduce_op: Any, value: Any, weight: Any, out: Any, ranks: int) -> Prepared:
    """Return the checked inputs of a reduction. Not collective."""
    op = ReduceOp.parse(reduce_op)
    parsed_weight = _weight(op, weight)
    leaves, structure = pytree.flatten(value)
    leaves = [x.local if isinstance(x, DistributedValues) else x for x in leaves]
    pairs = zip(leaves, named(leaves, structure), strict=True)
    contributions = [
        sparse.contribution(op, leaf, path, parsed_weight, ranks) for leaf, path in pairs
    ]
    prepared = Prepared(
        op, leaves, structure, contributions, parsed_weight, weight is not None, None
    )
    if out is None:
        return prepared
    for contribution in contributions:
        if isinstance(contribution, SlicesContribution):
            raise LeafTypeError(
                f"out: {label(contribution.path)} is IndexedSlices, which have no out."
            )
    shapes = [contribution.value.shape for contribution in prepared.dense]
    results = [contribution.dtypes.result for contribution in prepared.dense]
    return prepared._replace(outs=_fitting(out, structure, shapes, results))


def prepare_reduction(
    group: ReplicaGroup, name: str, reduce_op: Any, value: Any, weight: Any, out: Any
) -> tuple[Prepared, str, ReductionPlan, str]:
    """Return the inputs, the text of the call without its leaves, the plan, and an alarm or "".

    An error of one rank is raised on all of them.
    """
    with group.lockstep.preparing(name):
        prepared = _prepared(reduce_op, value, weight, out, group.lockstep.comm.size)
        weighting_text = " weighted" if prepared.weighed else ""
        start = (
            f"{name}({prepared.op.value}{weighting_text}, {pytree.describe(prepared.structure)})"
        )
        plan = _plan_of(start, prepared)
        return prepared, start, plan, group.reducer.alarm(start, prepared.dense)


def _plan_of(start: str, prepared: Prepared) -> ReductionPlan:
    """Return the plan of the leaves that are arrays."""
    dense = prepared.dense
    shapes = [contribution.value.shape for contribution in dense]
    number_flags: list[bool] = []
    is_native = False
    if not prepared.has_rows:
        pairs = zip(prepared.leaves, shapes, strict=True)
        number_flags = [is_scalar(leaf) and not shape for leaf, shape in pairs]
        is_native = all(map(_is_native, prepared.leaves, dense))
    options = PlanOptions(1, prepared.weighed, not prepared.weighed, number_flags, is_native)
    dtypes = [contribution.dtypes for contribution in dense]
    return ReductionPlan(described(start, dense), prepared.op, dtypes, shapes, options)


def rows_reduced(group: ReplicaGroup, start: str, prepared: Prepared) -> Any:
    """Return the tree of results where some leaves are `IndexedSlices`. Collective."""
    parts = prepared.contributions
    return prepared.tree(
        sparse.all_reduce(group, start, prepared.op, parts, weigh=prepared.weighed)
    )


def _is_native(leaf: Any, contribution: Contribution) -> bool:
    """Tell whether the bytes of a leaf travel and come back unchanged."""
    is_same_dtype = (
        contribution.dtypes.wire == contribution.dtypes.result == contribution.value.dtype
    )
    return is_same_dtype and (
        type(leaf) is not np.ndarray or leaf.dtype == contribution.value.dtype
    )


def _fitting(
    out: Any,
    structure: pytree.Structure,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[np.dtype[Any]],
) -> list[Array]:
    outs, out_structure = pytree.flatten(out)
    if out_structure != structure:
        raise StructureError(
            f"out must have the structure of value, {pytree.describe(structure)}, not "
            f"{pytree.describe(out_structure)}."
        )
    specs = zip(outs, shapes, dtypes, strict=True)
    return [fit(place, shape, dtype, structure, i) for i, (place, shape, dtype) in enumerate(specs)]


def _weight(op: ReduceOp, weight: float | None) -> float:
    if weight is None:
        return 1.0
    if op is not ReduceOp.MEAN:
        raise ValueError(f"weight is for MEAN; {op.value} has none.")
    return as_weight(weight)


def fit(
    place: Any, shape: tuple[int, ...], dtype: np.dtype[Any], tree: pytree.Structure, leaf: int
) -> Array:
    """Return an array where a result of that shape and dtype can be put: that leaf of `out`.

    Raises:
      LeafTypeError: It is not an array, or masked, or of another shape or dtype.
      ValueError: It is read-only.
    """
    kind = find_array_kind(place)
    if kind is not None:
        place = kind.as_array(place, pytree.path_names(tree)[leaf])
    if is_masked(place):
        raise LeafTypeError(
            f"out: {label(pytree.path_names(tree)[leaf])} is a masked array; masked "
            "elements might not be written. Pass the array without the mask, out.data."
        )
    if isinstance(place, np.ndarray) and place.shape == shape and place.dtype == dtype:
        if place.flags.writeable:
            return place
        path = pytree.path_names(tree)[leaf]
        raise ValueError(f"out: {label(path)} is read-only, so the result cannot go there.")
    path = pytree.path_names(tree)[leaf]
    result_text = f"{dtype_name(dtype)}[{','.join(map(str, shape))}]"
    if not isinstance(place, np.ndarray):
        raise LeafTypeError(
            f"out: {label(path)} is {place!r:.80} ({type(place).__name__}); expected an array to "
            f"write to, {result_text}."
        )
    if not place.dtype.isnative:
        result_text += (
            ", in the byte order of this machine; give an array with dtype.newbyteorder('=')"
        )
    raise LeafTypeError(f"out: {label(path)} is {spec_text(place)}; the result is {result_text}.")


def in_replica(group: ReplicaGroup, reduce_op: Any, value: Any, weight: Any, out: Any) -> Any:
    """Reduce `value` over the replicas; see `ReplicaContext.all_reduce`. Collective."""
    if group.view is ALONE:
        return _reduce_single_replica(group, reduce_op, value, weight, out)
    signature = signature_of(reduce_op, weight is not None, value)
    reduction = None if signature is None else group.plans.find(signature.key)
    if signature is None or reduction is None:
        return _first(group, signature, reduce_op, value, weight, out)
    try:
        weights = ONES if weight is None else (_weight(reduction.plan.op, weight),)
    except Exception as error:
        group.lockstep.refuse("all_reduce", error)
    if out is None:
        totals = reduction(ReductionInputs(signature.leaves, weights))
        return pytree.unflatten(signature.structure, totals)
    outs = _outs(group, reduction.plan, signature, value, out)
    reduction(ReductionInputs(signature.leaves, weights, outs))
    return out


def _first(
    group: ReplicaGroup,
    signature: CallSignature | None,
    reduce_op: Any,
    value: Any,
    weight: Any,
    out: Any,
) -> Any:
    """Reduce leaves whose plan is not kept, and keep it if that is possible. Collective."""
    prepared, start, plan, alarm = prepare_reduction(
        group, "all_reduce", reduce_op, value, weight, out
    )
    if not prepared.leaves:
        return value if out is None else out
    if prepared.has_rows:
        return rows_reduced(group, start, prepared)
    values = [contribution.value for contribution in prepared.dense]
    inputs = ReductionInputs(values, (prepared.weight,), prepared.outs, alarm=alarm)
    # A leaf of foreign byte order is converted here each time; a leaf that is looked at, too.
    can_keep = group.delegate is None and not group.reducer.watches
    if signature and can_keep and all(map(_native, prepared.leaves, prepared.dense)):
        totals = group.plans.add(signature.key, plan)(inputs)
    else:
        totals = group.reduction(plan)(inputs)
    return prepared.tree(totals) if out is None else out


def _native(leaf: Any, contribution: Contribution) -> bool:
    return type(leaf) is not np.ndarray or leaf.dtype == contribution.value.dtype


def _outs(
    group: ReplicaGroup, plan: ReductionPlan, signature: CallSignature, value: Any, out: Any
) -> list[Array]:
    """Return the leaves of `out` for a plan that was kept, or raise on all ranks."""
    outs = signature.leaves_of_out(value, out) if plan.is_native else None
    if outs is not None:
        return outs
    with group.lockstep.preparing("all_reduce"):
        results = [dtypes.result for dtypes in plan.dtypes]
        return _fitting(out, signature.structure, plan.shapes, results)


def _reduce_single_replica(
    group: ReplicaGroup, reduce_op: Any, value: Any, weight: Any, out: Any
) -> Any:
    prepared = _prepared(reduce_op, value, weight, out, group.lockstep.comm.size)
    outs = prepared.outs
    if outs is None:
        return prepared.tree(
            [
                _copy_contribution(prepared.op, contribution)
                for contribution in prepared.contributions
            ]
        )
    dense = prepared.dense  # all: the rest has no out
    if prepared.op is ReduceOp.MEAN and prepared.weight == 0:
        for place in outs:
            place[...] = np.nan
    else:
        dtypes = [contribution.dtypes.result for contribution in dense]
        of_one([contribution.value for contribution in dense], outs, dtypes, group.reducer.pool)
    return out


def _copy_contribution(op: ReduceOp, contribution: Contribution | SlicesContribution) -> Any:
    if isinstance(contribution, SlicesContribution):
        return sparse.copy_slices(op, contribution)
    # One replica by construction: its value, with its dtype, even for a mean of integers.
    if op is ReduceOp.MEAN and contribution.weight == 0:
        return np.full(contribution.value.shape, np.nan, contribution.dtypes.result)
    return np.array(contribution.value)


@final
class Handle:
    """An all-reduce that was begun by ``all_reduce_start``, and that `wait` ends."""

    def __init__(self, lockstep: Lockstep, call: str, results: Callable[[], Any]):
        """Wait for `results`, which returns them when they are there."""
        self._lockstep, self._call, self._results = lockstep, call, results
        self._place, run = find_call_site(), lockstep.state.run
        self.depth, self._is_done, self._is_abandoned = run.depth, False, False
        self._result: Any = None
        if run.depth:
            run.handles.append(self)

    def __del__(self) -> None:
        """Warn where nobody can wait for it any more; of a run, that was an error at its end."""
        if not (self._is_done or self._is_abandoned):
            text = f"{self!r}: wait() was not called."
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a copy could not be waited for.

        Raises:
          TypeError: Always, when it is copied as when it is pickled.
        """
        raise TypeError(f"{self!r} cannot be copied or pickled; wait for it where it was made.")

    def __repr__(self) -> str:
        """Return which call it is, and where it was made."""
        return f"<{self._call:.200} of {self._place}>"

    def wait(self) -> Any:
        """Wait until the results are there, and return them.

        Not collective, but all ranks have to do it before the ``run`` ends in which the call was
        made. Ranks may wait for several handles in different orders; again for one gives the same.

        Returns:
          What ``all_reduce`` returns.

        Raises:
          StrategyError: Called in another thread or process than the call was made in.
          ContextError: The run has ended in which it was made, or a call in it has failed.
          RuntimeError: What has failed meanwhile, between ranks that are threads of one process;
            on MPI it ends the job.

        Cost: what is left of the transfer, and of results that are not in ``Strategy.buffers``
        one copy.
        """
        self._lockstep.check()
        self._lockstep.state.interrupted.check()
        if self._is_abandoned:
            raise ContextError(f"{self!r}: the run in which it was made has ended.")
        if not self._is_done:
            self._result = self._wait_for_results()
            self._is_done = True
            self._forget()
        return self._result

    def _wait_for_results(self) -> Any:
        session = self._lockstep.session
        session.board.enter(session.calls, f"{self._call}.wait")
        session.board.resume()  # it is no handshake
        try:
            return self._results()
        finally:
            session.board.leave()

    def _forget(self) -> None:
        self._results = lambda: None
        handles = self._lockstep.state.run.handles
        if self in handles:
            handles.remove(self)

    def abandon(self) -> None:
        """End it without giving the results away, so that the memory is nobody's any more."""
        self._is_abandoned = True
        try:
            self._wait_for_results()
        finally:
            self._forget()


def all_reduce_start(
    group: ReplicaGroup, reduce_op: Any, value: Any, weight: Any, out: Any
) -> Handle:
    """Begin to reduce `value`; as `ReplicaContext.all_reduce_start`. Collective."""
    lockstep = group.lockstep
    if group.view is ALONE:
        result = in_replica(group, reduce_op, value, weight, out)
        return Handle(lockstep, "all_reduce_start", lambda: result)
    name = "all_reduce_start"
    prepared, start, plan, alarm = prepare_reduction(group, name, reduce_op, value, weight, out)
    if not prepared.leaves:
        return Handle(lockstep, start, lambda: value if out is None else out)
    if prepared.has_rows:
        tree = rows_reduced(group, start, prepared)
        return Handle(lockstep, start, lambda: tree)
    outs = prepared.outs
    values = [contribution.value for contribution in prepared.dense]
    inputs = ReductionInputs(values, (prepared.weight,), outs, alarm=alarm)
    if group.delegate is None:
        moved = start_all_reduce(group.reducer, plan, inputs)
    else:
        totals = group.reduction(plan)(inputs)
        moved = lambda: totals  # noqa: E731
    arena = group.reducer.node.arena
    homes = [home for value in outs or () if (home := arena.find_address(value)) is not None]
    moving_keys = {home.key for home in homes}
    arena.moving_keys.update(moving_keys)

    def results() -> Any:
        totals = moved()
        arena.moving_keys.difference_update(moving_keys)
        return prepared.tree(totals) if out is None else out

    return Handle(lockstep, plan.text, results)


def end_handles(lockstep: Lockstep, failure: BaseException | None) -> BaseException | None:
    """End what was begun in a run that ends, and return what the run has failed with, if it has.

    A handle that nobody has waited for is such a failure.
    """
    run = lockstep.state.run
    left = [handle for handle in run.handles if handle.depth >= run.depth]  # or one inside of it
    for handle in left:
        try:
            handle.abandon()
        except Exception as error:
            failure = error if failure is None else failure
    if not left or failure is not None or run.failed is not None:
        return failure
    calls = "; ".join(map(repr, left))
    return ContextError(
        f"rank {lockstep.comm.rank}: wait() was not called for {calls}. Call wait() of the "
        "handle of all_reduce_start before the function of run returns."
    )
