"""The methods of `Optimizer` that communicate: `build`, `apply_gradients`, `flush`, `discard`.

`apply_gradients` checks its arguments (`mpistrat.optim.gradient_validation`), makes one handshake
and reduces (`mpistrat.optim.reduced`), updates (`mpistrat.optim.updating`, or `_update_directly`
where norms, accumulation and remote gradients play no part), and reports gradients that are not
finite. One barrier of the node ends the call; with ``nonfinite="raise"`` it is an all-reduce that
finds the first gradient that is not finite, so all ranks raise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpistrat.arrays import Array, quiet
from mpistrat.comm.base import Comm
from mpistrat.data.iterators import latest_iterator
from mpistrat.errors import NonFiniteError
from mpistrat.lockstep.ending import abort
from mpistrat.lockstep.guards import check_weight, warn, warn_on_replica0
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.optim import passes
from mpistrat.optim.base import Progress, limit_of
from mpistrat.optim.fused import GradientTransform
from mpistrat.optim.gradient_validation import (
    GradientCall,
    find_strategy,
    refuse_duplicates,
    refuse_unknown,
    validate_gradients,
)
from mpistrat.optim.passes import Gradient
from mpistrat.optim.reduced import ReducedGradients, make_zero_gradients, reduce_gradients
from mpistrat.optim.state import State, Target, VariableList, check_variable
from mpistrat.optim.update_plan import UpdatePlan
from mpistrat.optim.updating import (
    NO_INDEX,
    FusedUpdate,
    Update,
    VariableUpdate,
    merge_duplicate_rows,
    synchronize_ranks,
)
from mpistrat.strategy.context_stack import StrategyLike, current_context
from mpistrat.variables.variable import Variable

if TYPE_CHECKING:
    from mpistrat.optim.base import OptimizerSettings

__all__ = ["Pairs", "States", "apply", "build", "discard", "flush"]

_WHOLE_BATCH = (
    "{name}: called outside of strategy.run, on a batch of a Dataset that is not distributed: "
    "every rank computes all of it. Loop over strategy.experimental_distribute_dataset(dataset), "
    "and call the step by strategy.run(step, args=batch)."
)
# Pairs of gradient and variable.
Pairs: TypeAlias = Iterable[tuple[Any, Variable]]
# The state for each strategy.
States: TypeAlias = dict[StrategyLike, State]


def build(optimizer: OptimizerSettings, states: States, variables: Iterable[Variable]) -> State:
    """Return the state for these variables, made if there is none yet; see `Optimizer.build`."""
    name, listed_variables = f"{type(optimizer).__name__}.build", list(variables)
    strategy = find_strategy(name, listed_variables)
    with strategy._replicas.lockstep.validating_collectively(name):
        if not listed_variables:
            raise ValueError(f"{name}: there are no variables.")
        for variable in listed_variables:
            check_variable(strategy, variable, name, "a list of variables")
        refuse_duplicates(name, listed_variables)
        state = states.get(strategy)
        if state is not None:
            refuse_unknown(name, state, listed_variables)
    if state is None:
        state = states[strategy] = State(optimizer, strategy, listed_variables)
    return state


def apply(
    optimizer: OptimizerSettings, states: States, grads_and_vars: Pairs, weight: float | None
) -> Variable:
    """Update variables by gradients; see `Optimizer.apply_gradients`. Collective."""
    name, failure = f"{type(optimizer).__name__}.apply_gradients", None
    gradients: Sequence[Any] = ()
    variables: Sequence[Variable] = ()
    try:
        if pairs := [*grads_and_vars]:
            gradients, variables = zip(*pairs, strict=True)
    except Exception as error:
        failure = _explain_bad_pairs(name, grads_and_vars, error)
    mode = current_context()
    state = None if mode is None or mode.updated_variable is not None else states.get(mode.strategy)
    listing = None if state is None else state.variable_lists.get(tuple(map(id, variables)))
    if state is None or listing is None:
        state, listing = _find_state(optimizer, states, gradients, variables, failure)
    lockstep, progress = state.strategy._replicas.lockstep, state.progress
    try:
        is_replica_code = (mode and mode.replica) is not None
        if is_replica_code:
            if lockstep.state.run.uneven_row_count is not None:
                check_weight(lockstep, name, weight)
        elif latest_iterator.iterator is not None:
            _warn_whole_batch(lockstep, name)
        gradient_call = validate_gradients(
            state, gradients, listing, weight, is_replica_code=is_replica_code, step=progress.step
        )
        node = state.strategy._replicas.reducer.node
        if node.arena.moving_keys:
            node.arena.check_not_moving(name, gradient_call.dense_gradients)
        if not gradient_call.update_plan.has_compiled:
            gradient_call.update_plan.compile(node.wire)
    except Exception as error:
        lockstep.fail_collectively(name, error)
    reduced = reduce_gradients(state, gradient_call)
    if reduced.weight:
        _update(state, progress, gradient_call, reduced)
    else:
        _finish_zero_weight(state, progress, gradient_call)
    return state.counters["iterations"]


def _warn_whole_batch(lockstep: Lockstep, name: str) -> None:
    """Warn once of a step outside of `run` on a batch of a dataset that is not distributed.

    Not collective; see `warn_on_replica0`.
    """
    iterator = None if latest_iterator.iterator is None else latest_iterator.iterator()
    if iterator is not None and lockstep.comm.size > 1:
        warn_on_replica0(lockstep, "whole batch", _WHOLE_BATCH.format(name=name))


def flush(optimizer: OptimizerSettings, state: State) -> None:
    """Update by the gradients that wait for an update; see `Optimizer.flush`. Collective."""
    progress, targets = state.progress, list(state.targets.values())
    name = f"{type(optimizer).__name__}.flush"
    lockstep = find_strategy(name, [target.variable for target in targets])._replicas.lockstep
    with lockstep.validating_collectively(name):
        text = f"{optimizer._describe_options()}.flush of {progress.calls} calls,"
        update_plan = UpdatePlan(state, text, targets, [])
        scalars = {id(o): o.scalars(progress.step) for o in update_plan.optimizers}
        rates = update_plan.format_rates(progress.step)
        update_plan.compile(state.strategy._replicas.reducer.node.wire)
    gradient_call = GradientCall(name, False, 0.0, update_plan, rates, [], [], {}, scalars)
    lockstep.handshake(gradient_call.text)
    if progress.weight:
        last_progress = progress._replace(calls=optimizer.accumulate - 1)
        _update(state, last_progress, gradient_call, make_zero_gradients(update_plan))
    elif progress.calls:
        state.store_progress(progress.drop_calls())


def discard(optimizer: OptimizerSettings, state: State) -> None:
    """Drop the gradients that wait for an update; see `Optimizer.discard`. Collective."""
    progress, targets = state.progress, state.targets.values()
    name = f"{type(optimizer).__name__}.discard"
    group = find_strategy(name, [target.variable for target in targets])._replicas
    group.lockstep.handshake(f"{optimizer._describe_options()}.discard of {progress.calls} calls")
    if progress.calls:
        for target in targets:
            if target.pending is not None:
                target.pending[:] = 0
        state.store_progress(progress.drop_calls())
        if group.lockstep.comm.size > 1 and any(target.is_shared for target in targets):
            group.reducer.node.arena.nodes().node.barrier()


def _explain_bad_pairs(name: str, pairs: object, error: Exception) -> Exception:
    """Return an error that explains why the pairs cannot be unpacked; an iterator's own error."""
    if isinstance(pairs, Iterator) or not isinstance(error, TypeError | ValueError):
        return error
    text = f"{name}: expected pairs, such as zip(gradients, variables), got {pairs!r:.60}."
    return TypeError(text)


def _find_state(
    optimizer: OptimizerSettings,
    states: States,
    gradients: Sequence[Any],
    variables: Sequence[Variable],
    failure: Exception | None,
) -> tuple[State, VariableList]:
    """Return the state of variables and the list of them, once checked. Collective the first time.

    Raises:
      Exception: `failure`, or the error of a variable, on all ranks.
    """
    name = f"{type(optimizer).__name__}.apply_gradients"
    strategy = find_strategy(name, variables)
    state: State | None = states.get(strategy)
    key = tuple(map(id, variables))
    listing = None if state is None or failure is not None else state.variable_lists.get(key)
    if state is not None and listing is not None:
        return state, listing
    with strategy._replicas.lockstep.validating_collectively(name):
        if failure is not None:
            raise failure
        for variable in variables:
            check_variable(strategy, variable, name, "(gradient, variable)")
        refuse_duplicates(name, variables)
        if all(gradient is None for gradient in gradients):
            cause = (
                "each is None. Compute them in the step" if gradients else "was a zip used twice?"
            )
            raise ValueError(f"{name}: no gradient for any variable: {cause}.")
    state = state or build(optimizer, states, variables)
    return state, state.record_list(variables)


def _finish_zero_weight(state: State, progress: Progress, gradient_call: GradientCall) -> None:
    """Count a call of weight 0 on all replicas, or update by the calls before. Collective.

    Raises:
      ValueError: No call of the update has a weight; on all ranks.
    """
    optimizer = gradient_call.update_plan.optimizer
    if not progress.is_update_due(optimizer):
        state.store_progress(progress.count_call(0.0))
        return
    if not progress.weight:
        text = f"{gradient_call.name}: the weights of all replicas are 0"
        calls = optimizer.accumulate
        if calls > 1:
            text += f" in all {calls} calls of the update (accumulate={calls})"
        state.strategy._replicas.lockstep.raise_on_all_ranks(ValueError(f"{text}."))
    _update(state, progress, gradient_call, make_zero_gradients(gradient_call.update_plan))


def _update(
    state: State, progress: Progress, gradient_call: GradientCall, reduced: ReducedGradients
) -> None:
    """Update or accumulate by gradients that this rank can read. Collective."""
    group, update_plan = state.strategy._replicas, gradient_call.update_plan
    in_place = reduced.in_place
    lockstep, node = group.lockstep, group.reducer.node
    report: Callable[[], None] | None = None
    try:
        if progress.step == 0:
            for target in update_plan.dense:
                if target.ema is not None:  # the program may have assigned weights since `build`
                    target.ema[:] = target.w
        update_comm = None
        if lockstep.comm.size > 1 and (in_place is not None or update_plan.is_shared):
            update_comm = lockstep.comm if update_plan.is_spread else node.arena.nodes().node
        has_remote = in_place and in_place.remote_indices
        if update_plan.is_direct and progress.scale == 1.0 and not has_remote:
            bad_index = quiet().run(_update_directly, gradient_call, reduced, update_comm)
            if bad_index is None:
                state.store_progress(progress.count_update(update_plan.optimizer))
            else:
                report = functools.partial(_fail_nonfinite, state, gradient_call, bad_index)
        else:
            with np.errstate(all="ignore"):
                update = _prepare_update(state, progress, gradient_call, reduced, update_comm)
                report = _perform_update(state, progress, gradient_call, update, reduced.weight)
    except BaseException as error:
        abort(lockstep, gradient_call.text, error)
    if report is not None:
        report()


def _prepare_update(
    state: State,
    progress: Progress,
    gradient_call: GradientCall,
    reduced: ReducedGradients,
    update_comm: Comm | None,
) -> Update:
    """Return the update of a call that `_update_directly` cannot do."""
    update_plan, in_place, means = gradient_call.update_plan, reduced.in_place, reduced.means
    transform = _create_transform(update_plan.optimizer, progress, reduced)
    division = update_plan.division if in_place is None else in_place.division
    fused_updates = [
        FusedUpdate(fused, indices, [means[i] for i in indices])
        for fused, indices in division.fused
        if fused.parts
    ]
    singles = [i for fused, indices in division.fused if not fused.parts for i in indices]
    indices = [*division.separate_indices, *singles]
    return Update(
        update_plan.optimizer,
        step=progress.step,
        scalars=gradient_call.scalars,
        is_compiled=update_plan.is_worth_compiling,
        variable_updates=_list_updates(gradient_call, reduced, indices, transform),
        fused_updates=fused_updates,
        transform=transform,
        row_updates=[
            merge_duplicate_rows(target, slices, transform)
            for target, slices in zip(update_plan.sparse, reduced.sparse, strict=True)
        ],
        dense_count=len(update_plan.dense),
        comm=update_comm,
        team=state.strategy._replicas.lockstep.session.team,
        remote_indices=() if in_place is None else in_place.remote_indices,
        fetch=reduced.fetch,
    )


def _update_directly(
    gradient_call: GradientCall, reduced: ReducedGradients, update_comm: Comm | None
) -> int | None:
    """Update as `Update.apply` does, where no norms are needed and no gradient is fetched.

    Returns:
      As `Update.apply`.
    """
    update_plan, scalars = gradient_call.update_plan, gradient_call.scalars
    transform, is_guarded, bad_index = update_plan.transform, update_plan.is_guarded, NO_INDEX
    is_compiled = update_plan.is_worth_compiling
    fused_groups, separate_indices = (reduced.in_place or update_plan).division
    for fused, indices in fused_groups:
        gradients = [*map(reduced.means.__getitem__, indices)]
        bad_member_index = fused.update(
            gradients, transform, scalars[id(fused.optimizer)], is_guarded, is_compiled
        )
        if bad_member_index is not None:
            bad_index = min(bad_index, indices[bad_member_index])
    for i in separate_indices:
        target = update_plan.dense[i]
        rows, start, factors, divisor = reduced.get_gradient_rows(i)
        start += target.low
        limit = transform.limit
        gradient = Gradient(rows, start, factors, divisor, 1.0, limit, None, not is_guarded)
        skipped_count = passes.update(
            target.rule,
            gradient,
            target.w,
            target.slot_parts,
            scalars[id(target.optimizer)],
            ema=target.ema,
            decay=update_plan.decay,
            is_guarded=is_guarded,
            is_compiled=is_compiled,
        )
        if skipped_count:
            bad_index = min(bad_index, i)
    if update_comm is None and bad_index == NO_INDEX:
        return None
    return synchronize_ranks(update_comm, bad_index, is_guarded)


def _perform_update(
    state: State,
    progress: Progress,
    gradient_call: GradientCall,
    update: Update,
    weight: float,
) -> Callable[[], None] | None:
    """Update or accumulate; return a function that reports a failure on all ranks, or None."""
    optimizer = gradient_call.update_plan.optimizer
    if not progress.is_update_due(optimizer):
        update.accumulate()
        state.store_progress(progress.count_call(weight))
        return None
    norm = update.norm() if optimizer.needs_global_norm else 0.0
    if not math.isfinite(norm) and optimizer.nonfinite == "skip":
        update.clear_pending()
        state.store_progress(progress.count_skipped_update(optimizer))
        if optimizer.loss_scale:
            return None
        return lambda: _warn_skipped(state, gradient_call, progress.step)
    if not math.isfinite(norm) and optimizer.nonfinite == "raise":
        bad_index: int | None = -1
        update.wait_for_ranks()
    else:
        bad_index = update.apply()
    if bad_index is None:
        state.store_progress(progress.count_update(optimizer))
        return None
    if optimizer.accumulate > 1:  # all ranks drop the gradients of the calls before
        update.clear_pending()
        state.store_progress(progress.drop_calls())
    return functools.partial(_fail_nonfinite, state, gradient_call, bad_index)


def _create_transform(
    optimizer: OptimizerSettings, progress: Progress, reduced: ReducedGradients
) -> GradientTransform:
    """Return the transform of gradients; the mean of several calls is by the weight of each."""
    return GradientTransform(
        weight=1.0 if reduced.in_place or optimizer.accumulate == 1 else reduced.weight,
        divisor=progress.weight + reduced.weight,
        factor=1.0 / progress.scale,
        limit=limit_of(optimizer.clip),
        should_clip_infinities=optimizer.nonfinite == "ignore",
    )


def _list_updates(
    gradient_call: GradientCall,
    reduced: ReducedGradients,
    indices: Iterable[int],
    transform: GradientTransform,
) -> dict[int, VariableUpdate]:
    """Return the updates of variables by these gradients, by the index of the gradient."""
    variable_updates = {}
    for i in sorted(indices):
        target = gradient_call.update_plan.dense[i]
        rows, start, factors, divisor = reduced.get_gradient_rows(i)
        if target.pending is not None:  # the mean is over all calls
            divisor = transform.divisor
            if reduced.in_place is None:  # a mean of this call, which is to count by its weight
                factors = np.array([transform.weight], rows.dtype)
        gradient = Gradient(
            rows,
            start + target.low,
            factors,
            divisor,
            scale=transform.factor,
            limit=transform.limit,
            pending=target.pending,
            should_clip_infinities=transform.should_clip_infinities,
        )
        variable_updates[i] = VariableUpdate(target, gradient)
    return variable_updates


def _warn_skipped(state: State, gradient_call: GradientCall, step: int) -> None:
    text = (
        f"{gradient_call.name}: a gradient is NaN or infinite, so the update after step {step} is "
        "left out on all ranks (nonfinite='skip'); optimizer.progress.skipped counts them."
    )
    warn(state.strategy._replicas.lockstep, gradient_call.name, text, RuntimeWarning)


def _fail_nonfinite(state: State, gradient_call: GradientCall, bad_index: int) -> None:
    """Raise an error on all ranks that says which gradient of which rank is not finite."""
    lockstep, update_plan = state.strategy._replicas.lockstep, gradient_call.update_plan
    targets = [*update_plan.dense, *update_plan.sparse]
    sparse_values = [slices.values for slices in gradient_call.sparse_gradients]
    gradients = [*gradient_call.dense_gradients, *sparse_values]
    local_text = ""
    if gradient_call.weight != 0:
        first_index = max(bad_index, 0)
        local_text = _describe_nonfinite(targets[first_index:], gradients[first_index:])
    rank_texts = [text.decode() for text in lockstep.gather_texts(local_text.encode())]
    lines = [f"\n  rank {lockstep.ranks[i]}: {text}" for i, text in enumerate(rank_texts) if text]
    variable_text = targets[bad_index].variable._label if bad_index >= 0 else "some variable"
    calls = update_plan.optimizer.accumulate
    calls_text = f" with those of calls before (accumulate={calls})" if calls > 1 else ""
    finite_text = "\n  The gradients of this call are finite on each rank, but"
    causes = "".join(lines)
    if not causes:
        causes = f"{finite_text} what they come to{calls_text} for {variable_text} is not."
    call_text = f"{gradient_call.name}, step {state.progress.step}"
    lockstep.raise_on_all_ranks(
        NonFiniteError(
            f"{call_text}: a gradient is NaN or infinite.{causes}\n  "
            "Weights are finite, but some may be updated; restart from a checkpoint, or give the "
            "optimizer nonfinite='skip'."
        )
    )


def _describe_nonfinite(targets: Sequence[Target], gradients: Sequence[Array]) -> str:
    """Return a description of the first element that is not finite; empty if all are finite."""
    for target, gradient in zip(targets, gradients, strict=True):
        is_finite = np.isfinite(gradient)
        if not is_finite.all():
            index = tuple(map(int, np.unravel_index(int(np.argmin(is_finite)), is_finite.shape)))
            return f"the gradient of {target.variable._label} is {gradient[index]} at index {index}"
    return ""
