"""Implementation of ``ReplicaContext.all_reduce`` and ``all_reduce_start``.

Inputs are converted, reduced and given back as the program had them: leaves and a key first, then a
plan from the cache or a new one, then arrays through `mpistrat.collectives.allreduce`, or through a
class of the program's own. `Handle` is an all-reduce that was started.
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
    UNIT_WEIGHTS,
    Contribution,
    PlanOptions,
    ReductionInputs,
    ReductionPlan,
    describe_call,
)
from mpistrat.collectives.plan_cache import CallSignature, make_signature
from mpistrat.collectives.results import copy_single_rank_values
from mpistrat.collectives.weights import as_weight
from mpistrat.comm.callsite import find_call_site
from mpistrat.errors import ContextError, LeafTypeError, StructureError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.variables import sparse
from mpistrat.variables.kinds import SINGLE_REPLICA, name_leaves
from mpistrat.variables.sparse import SlicesContribution
from mpistrat.variables.values import DistributedValues


class PreparedReduction(NamedTuple):
    """The checked inputs of one all-reduce.

    Attributes:
      op: The operation.
      leaves: The leaves as they were given.
      structure: The structure of the tree.
      contributions: The contribution of this rank to each leaf.
      weight: How many examples it stands for.
      is_weighted: The program has given a weight.
      outs: The arrays for the results, leaf by leaf; None for new arrays.
    """

    op: ReduceOp
    leaves: list[Any]
    structure: pytree.Structure
    contributions: list[Contribution | SlicesContribution]
    weight: float
    is_weighted: bool
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

    def build_tree(self, totals: Sequence[Any]) -> Any:
        """Return results as a tree like the one that was given, of arrays of the same kinds."""
        return pytree.unflatten(self.structure, list(map(restore_kind, totals, self.leaves)))


def _prepare_inputs(
    reduce_op: ReduceOp | str, value: object, weight: float | None, out: object, rank_count: int
) -> PreparedReduction:
    """Return the checked inputs of a reduction. Not collective."""
    op = ReduceOp.parse(reduce_op)
    parsed_weight = _parse_weight(op, weight)
    leaves, structure = pytree.flatten(value)
    leaves = [x.local if isinstance(x, DistributedValues) else x for x in leaves]
    pairs = zip(leaves, name_leaves(leaves, structure), strict=True)
    contributions = [
        sparse.make_contribution(op, leaf, path, parsed_weight, rank_count) for leaf, path in pairs
    ]
    prepared = PreparedReduction(
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
    result_dtypes = [contribution.dtypes.result for contribution in prepared.dense]
    return prepared._replace(outs=_check_outs(out, structure, shapes, result_dtypes))


def prepare_reduction(
    group: ReplicaGroup,
    name: str,
    reduce_op: ReduceOp | str,
    value: object,
    *,
    weight: float | None,
    out: object,
) -> tuple[PreparedReduction, str, ReductionPlan, str]:
    """Return the inputs, the text of the call without its leaves, the plan, and an alarm or "".

    An error of one rank is raised on all of them.
    """
    with group.lockstep.validating_collectively(name):
        prepared = _prepare_inputs(reduce_op, value, weight, out, group.lockstep.comm.size)
        weighting_text = " weighted" if prepared.is_weighted else ""
        call_text = (
            f"{name}({prepared.op.value}{weighting_text}, {pytree.describe(prepared.structure)})"
        )
        plan = _make_plan(call_text, prepared)
        return prepared, call_text, plan, group.reducer.describe_alarm(call_text, prepared.dense)


def _make_plan(call_text: str, prepared: PreparedReduction) -> ReductionPlan:
    """Return the plan of the leaves that are arrays."""
    dense = prepared.dense
    shapes = [contribution.value.shape for contribution in dense]
    number_flags: list[bool] = []
    is_native = False
    if not prepared.has_rows:
        pairs = zip(prepared.leaves, shapes, strict=True)
        number_flags = [is_scalar(leaf) and not shape for leaf, shape in pairs]
        is_native = all(map(_is_native, prepared.leaves, dense))
    options = PlanOptions(
        1, prepared.is_weighted, not prepared.is_weighted, number_flags, is_native
    )
    dtypes = [contribution.dtypes for contribution in dense]
    return ReductionPlan(describe_call(call_text, dense), prepared.op, dtypes, shapes, options)


def reduce_with_rows(group: ReplicaGroup, call_text: str, prepared: PreparedReduction) -> Any:
    """Return the tree of results where some leaves are `IndexedSlices`. Collective."""
    contributions = prepared.contributions
    return prepared.build_tree(
        sparse.all_reduce_leaves(
            group, call_text, prepared.op, contributions, is_weighting=prepared.is_weighted
        )
    )


def _is_native(leaf: object, contribution: Contribution) -> bool:
    """Tell whether the bytes of a leaf travel and come back unchanged."""
    is_same_dtype = (
        contribution.dtypes.wire == contribution.dtypes.result == contribution.value.dtype
    )
    return is_same_dtype and (
        type(leaf) is not np.ndarray or leaf.dtype == contribution.value.dtype
    )


def _check_outs(
    out: object,
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
    return [
        check_out(out_leaf, shape, dtype, structure, i)
        for i, (out_leaf, shape, dtype) in enumerate(specs)
    ]


def _parse_weight(op: ReduceOp, weight: float | None) -> float:
    if weight is None:
        return 1.0
    if op is not ReduceOp.MEAN:
        raise ValueError(f"weight is for MEAN; {op.value} has none.")
    return as_weight(weight)


def check_out(
    out_leaf: object,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    structure: pytree.Structure,
    leaf_index: int,
) -> Array:
    """Return an array where a result of that shape and dtype can be put: that leaf of `out`.

    Raises:
      LeafTypeError: It is not an array, or masked, or of another shape or dtype.
      ValueError: It is read-only.
    """
    library = find_array_kind(out_leaf)
    if library is not None:
        out_leaf = library.as_array(out_leaf, pytree.path_names(structure)[leaf_index])
    if is_masked(out_leaf):
        raise LeafTypeError(
            f"out: {label(pytree.path_names(structure)[leaf_index])} is a masked array; masked "
            "elements might not be written. Pass the array without the mask, out.data."
        )
    if isinstance(out_leaf, np.ndarray) and out_leaf.shape == shape and out_leaf.dtype == dtype:
        if out_leaf.flags.writeable:
            return out_leaf
        path = pytree.path_names(structure)[leaf_index]
        raise ValueError(f"out: {label(path)} is read-only, so the result cannot go there.")
    path = pytree.path_names(structure)[leaf_index]
    result_text = f"{dtype_name(dtype)}[{','.join(map(str, shape))}]"
    if not isinstance(out_leaf, np.ndarray):
        raise LeafTypeError(
            f"out: {label(path)} is {out_leaf!r:.80} ({type(out_leaf).__name__}); expected an "
            f"array to write to, {result_text}."
        )
    if not out_leaf.dtype.isnative:
        result_text += (
            ", in the byte order of this machine; give an array with dtype.newbyteorder('=')"
        )
    raise LeafTypeError(
        f"out: {label(path)} is {spec_text(out_leaf)}; the result is {result_text}."
    )


def all_reduce_tree(
    group: ReplicaGroup, reduce_op: ReduceOp | str, value: object, weight: float | None, out: object
) -> Any:
    """Reduce `value` over the replicas; see `ReplicaContext.all_reduce`. Collective."""
    if group.view is SINGLE_REPLICA:
        return _reduce_single_replica(group, reduce_op, value, weight, out)
    signature = make_signature(reduce_op, weight is not None, value)
    reduction = None if signature is None else group.plans.find_reduction(signature.key)
    if signature is None or reduction is None:
        return _reduce_unplanned(group, signature, reduce_op, value, weight=weight, out=out)
    try:
        weights = UNIT_WEIGHTS if weight is None else (_parse_weight(reduction.plan.op, weight),)
    except Exception as error:
        group.lockstep.fail_collectively("all_reduce", error)
    if out is None:
        totals = reduction(ReductionInputs(signature.leaves, weights))
        return pytree.unflatten(signature.structure, totals)
    outs = _match_outs(group, reduction.plan, signature, value, out)
    reduction(ReductionInputs(signature.leaves, weights, outs))
    return out


def _reduce_unplanned(
    group: ReplicaGroup,
    signature: CallSignature | None,
    reduce_op: ReduceOp | str,
    value: object,
    *,
    weight: float | None,
    out: object,
) -> Any:
    """Reduce leaves whose plan is not kept, and keep it if that is possible. Collective."""
    prepared, call_text, plan, alarm = prepare_reduction(
        group, "all_reduce", reduce_op, value, weight=weight, out=out
    )
    if not prepared.leaves:
        return value if out is None else out
    if prepared.has_rows:
        return reduce_with_rows(group, call_text, prepared)
    values = [contribution.value for contribution in prepared.dense]
    inputs = ReductionInputs(values, (prepared.weight,), prepared.outs, alarm=alarm)
    # A leaf of foreign byte order is converted here each time; so is one that is watched for NaN.
    can_keep = group.delegate is None and not group.reducer.needs_finite_check
    if signature and can_keep and all(map(_has_native_order, prepared.leaves, prepared.dense)):
        totals = group.plans.add_plan(signature.key, plan)(inputs)
    else:
        totals = group.make_reduction(plan)(inputs)
    return prepared.build_tree(totals) if out is None else out


def _has_native_order(leaf: object, contribution: Contribution) -> bool:
    return type(leaf) is not np.ndarray or leaf.dtype == contribution.value.dtype


def _match_outs(
    group: ReplicaGroup, plan: ReductionPlan, signature: CallSignature, value: object, out: object
) -> list[Array]:
    """Return the leaves of `out` for a plan that was kept, or raise on all ranks."""
    outs = signature.match_out_leaves(value, out) if plan.is_native else None
    if outs is not None:
        return outs
    with group.lockstep.validating_collectively("all_reduce"):
        result_dtypes = [dtypes.result for dtypes in plan.dtypes]
        return _check_outs(out, signature.structure, plan.shapes, result_dtypes)


def _reduce_single_replica(
    group: ReplicaGroup, reduce_op: ReduceOp | str, value: object, weight: float | None, out: object
) -> Any:
    prepared = _prepare_inputs(reduce_op, value, weight, out, group.lockstep.comm.size)
    outs = prepared.outs
    if outs is None:
        return prepared.build_tree(
            [
                _copy_contribution(prepared.op, contribution)
                for contribution in prepared.contributions
            ]
        )
    dense = prepared.dense  # all: the rest has no out
    if prepared.op is ReduceOp.MEAN and prepared.weight == 0:
        for out_array in outs:
            out_array[...] = np.nan
    else:
        dtypes = [contribution.dtypes.result for contribution in dense]
        copy_single_rank_values(
            [contribution.value for contribution in dense], outs, dtypes, group.reducer.pool
        )
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

    def __init__(self, lockstep: Lockstep, call: str, fetch_results: Callable[[], Any]):
        """Wait for `fetch_results`, which returns them when they are there."""
        self._lockstep, self._call, self._fetch_results = lockstep, call, fetch_results
        self._call_line, run = find_call_site(), lockstep.state.run
        self._depth, self._is_done, self._is_abandoned = run.depth, False, False
        self._result: Any = None
        if run.depth:
            run.pending_handles.append(self)

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
        """Return the call and the line that made it."""
        return f"<{self._call:.200} of {self._call_line}>"

    def wait(self) -> Any:
        """Wait until the results are there, and return them.

        Not collective, but all ranks have to do it before the ``run`` ends in which the call was
        made. Ranks may wait for several handles in different orders; again for one gives the same.

        Returns:
          What ``all_reduce`` returns.

        Raises:
          StrategyError: Called in another thread or process than the call was made in.
          ContextError: The run has ended in which it was made, or a call in it has failed.
          RuntimeError: The transfer has failed, between ranks that are threads of one process; on
            MPI such a failure ends the job.

        Cost: what is left of the transfer, and of results that are not in ``Strategy.buffers``
        one copy.
        """
        self._lockstep.check()
        self._lockstep.state.kept_interrupt.raise_pending()
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
            return self._fetch_results()
        finally:
            session.board.leave()

    def _forget(self) -> None:
        self._fetch_results = lambda: None
        handles = self._lockstep.state.run.pending_handles
        if self in handles:
            handles.remove(self)

    def _abandon(self) -> None:
        """End it without its results, so that its memory is free again."""
        self._is_abandoned = True
        try:
            self._wait_for_results()
        finally:
            self._forget()


def all_reduce_start(
    group: ReplicaGroup, reduce_op: ReduceOp | str, value: object, weight: float | None, out: object
) -> Handle:
    """Begin to reduce `value`; as `ReplicaContext.all_reduce_start`. Collective."""
    lockstep = group.lockstep
    if group.view is SINGLE_REPLICA:
        result = all_reduce_tree(group, reduce_op, value, weight, out)
        return Handle(lockstep, "all_reduce_start", lambda: result)
    name = "all_reduce_start"
    prepared, call_text, plan, alarm = prepare_reduction(
        group, name, reduce_op, value, weight=weight, out=out
    )
    if not prepared.leaves:
        return Handle(lockstep, call_text, lambda: value if out is None else out)
    if prepared.has_rows:
        tree = reduce_with_rows(group, call_text, prepared)
        return Handle(lockstep, call_text, lambda: tree)
    outs = prepared.outs
    values = [contribution.value for contribution in prepared.dense]
    inputs = ReductionInputs(values, (prepared.weight,), outs, alarm=alarm)
    if group.delegate is None:
        fetch_totals = start_all_reduce(group.reducer, plan, inputs)
    else:
        totals = group.make_reduction(plan)(inputs)
        fetch_totals = lambda: totals  # noqa: E731
    arena = group.reducer.node.arena
    locations = [
        location for value in outs or () if (location := arena.find_address(value)) is not None
    ]
    moving_keys = {location.key for location in locations}
    arena.moving_keys.update(moving_keys)

    def fetch_results() -> Any:
        totals = fetch_totals()
        arena.moving_keys.difference_update(moving_keys)
        return prepared.build_tree(totals) if out is None else out

    return Handle(lockstep, plan.text, fetch_results)


def end_handles(lockstep: Lockstep, failure: BaseException | None) -> BaseException | None:
    """End the all-reduces that a run has left open, and return the failure of the run, if any.

    An open handle makes the run fail.
    """
    run = lockstep.state.run
    open_handles = [
        handle for handle in run.pending_handles if handle._depth >= run.depth
    ]  # or one inside of it
    for handle in open_handles:
        try:
            handle._abandon()
        except Exception as error:
            failure = error if failure is None else failure
    if not open_handles or failure is not None or run.failure is not None:
        return failure
    calls = "; ".join(map(repr, open_handles))
    return ContextError(
        f"rank {lockstep.comm.rank}: wait() was not called for {calls}. Call wait() of the "
        "handle of all_reduce_start before the function of run returns."
    )
