"""Implementation of `Optimizer.apply_gradients`: check, reduce, update, report failures.

And of `Optimizer.flush` and `discard`, which end a window of accumulation early.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import quiet
from mpistrat.comm.base import Comm
from mpistrat.errors import NonFiniteError
from mpistrat.lockstep.ending import abort
from mpistrat.lockstep.guards import warn, warn_unweighted
from mpistrat.optim import passes
from mpistrat.optim.base import Progress, limit_of
from mpistrat.optim.fused import Take
from mpistrat.optim.gradient_validation import (
    GradientCall,
    owner,
    refuse_twice,
    refuse_unknown,
    validate_gradients,
)
from mpistrat.optim.passes import Gradient
from mpistrat.optim.reduced import Reduced, nothing_to_add, reduce
from mpistrat.optim.rows import unique
from mpistrat.optim.state import Listed, State, check_variable
from mpistrat.optim.update_plan import UpdatePlan
from mpistrat.optim.updating import NOBODY, Update, Work, meet
from mpistrat.strategy.context_stack import current
from mpistrat.variables.variable import Variable

if TYPE_CHECKING:
    from mpistrat.optim.base import OptimizerSettings

__all__ = ["apply", "build", "discard", "flush"]


def build(
    optimizer: OptimizerSettings, states: dict[Any, State], variables: Iterable[Variable]
) -> State:
    """Return the state for these variables, made if there is none yet; see `Optimizer.build`."""
    name, listed_variables = f"{type(optimizer).__name__}.build", list(variables)
    strategy = owner(name, listed_variables)
    with strategy.replicas.lockstep.preparing(name):
        if not listed_variables:
            raise ValueError(f"{name}: there are no variables.")
        for variable in listed_variables:
            check_variable(strategy, variable, name, "a list of variables")
        refuse_twice(name, listed_variables)
        state = states.get(strategy)
        if state is not None:
            refuse_unknown(name, state, listed_variables)
    if state is None:
        state = states[strategy] = State(optimizer, strategy, listed_variables)
    return state


def apply(
    optimizer: OptimizerSettings,
    states: dict[Any, State],
    grads_and_vars: Any,
    weight: float | None,
) -> Variable:
    """Update variables by gradients; see `Optimizer.apply_gradients`. Collective."""
    name, failure = f"{type(optimizer).__name__}.apply_gradients", None
    gradients: Sequence[Any] = ()
    variables: Sequence[Any] = ()
    try:
        if pairs := [*grads_and_vars]:
            gradients, variables = zip(*pairs, strict=True)
    except Exception as error:
        failure = _unpaired(name, grads_and_vars, error)
    mode = current()
    state = None if mode is None or mode.updating is not None else states.get(mode.strategy)
    listed = None if state is None else state.listed.get(tuple(map(id, variables)))
    if state is None or listed is None:
        state, listed = _found(optimizer, states, name, gradients, variables, failure)
    lockstep, progress = state.strategy.replicas.lockstep, state.progress
    try:
        if weight is None and lockstep.state.run.uneven and mode and mode.replica:
            warn_unweighted(lockstep, name, stacklevel=4)
        replica = mode is not None and mode.replica is not None
        call = validate_gradients(
            optimizer, state, name, replica, gradients, listed, weight, progress.step
        )
        node = state.strategy.replicas.reducer.node
        if node.arena.moving_keys:
            node.arena.check_not_moving(name, call.values)
        if not call.update_plan.compiled:
            call.update_plan.compile(node.wire)
    except Exception as error:
        lockstep.refuse(name, error)
    reduced = reduce(state, call)
    if reduced.weight:
        _update(optimizer, state, progress, call, reduced)
    else:
        _add_nothing(optimizer, state, progress, call)
    return state.counters["iterations"]


def flush(optimizer: OptimizerSettings, state: State) -> None:
    """Update by the gradients that wait for an update; see `Optimizer.flush`. Collective."""
    progress, targets = state.progress, list(state.targets.values())
    name = f"{type(optimizer).__name__}.flush"
    lockstep = owner(name, [target.variable for target in targets]).replicas.lockstep
    with lockstep.preparing(name):
        text = f"{optimizer.chosen()}.flush of {progress.calls} calls,"
        update_plan = UpdatePlan(optimizer, state, text, targets, [])
        scalars = {id(o): o.scalars(progress.step) for o in update_plan.optimizers}
        rates = update_plan.rates_text(progress.step)
        update_plan.compile(state.strategy.replicas.reducer.node.wire)
    call = GradientCall(name, False, 0.0, update_plan, rates, [], [], {}, scalars)
    lockstep.handshake(call.text)
    if progress.weight:
        last = progress._replace(calls=optimizer.accumulate - 1)
        _update(optimizer, state, last, call, nothing_to_add(update_plan))
    elif progress.calls:
        state.keep(progress.dropped())


def discard(optimizer: OptimizerSettings, state: State) -> None:
    """Drop the gradients that wait for an update; see `Optimizer.discard`. Collective."""
    progress, targets = state.progress, state.targets.values()
    name = f"{type(optimizer).__name__}.discard"
    group = owner(name, [target.variable for target in targets]).replicas
    group.lockstep.handshake(f"{optimizer.chosen()}.discard of {progress.calls} calls")
    if progress.calls:
        for target in targets:
            if target.pending is not None:
                target.pending[:] = 0
        state.keep(progress.dropped())
        if group.lockstep.comm.size > 1 and any(target.shared for target in targets):
            group.reducer.node.arena.nodes().node.barrier()


def _unpaired(name: str, pairs: Any, error: Exception) -> Exception:
    """Return what to say of gradients that could not be taken apart; of a generator, its own."""
    if isinstance(pairs, Iterator) or not isinstance(error, TypeError | ValueError):
        return error
    text = f"{name}: expected pairs, such as zip(gradients, variables), got {pairs!r:.60}."
    return TypeError(text)


def _found(
    optimizer: OptimizerSettings,
    states: dict[Any, State],
    name: str,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    failure: Exception | None,
) -> tuple[State, Listed]:
    """Return the state of variables, and the list of them, found good. Collective the first time.

    Raises:
      Exception: `failure`, or what is wrong with the variables, on all ranks.
    """
    strategy = owner(name, variables)
    state: State | None = states.get(strategy)
    key = tuple(map(id, variables))
    listed = None if state is None or failure is not None else state.listed.get(key)
    if state is not None and listed is not None:
        return state, listed
    with strategy.replicas.lockstep.preparing(name):
        if failure is not None:
            raise failure
        for variable in variables:
            check_variable(strategy, variable, name, "(gradient, variable)")
        refuse_twice(name, variables)
        if all(gradient is None for gradient in gradients):
            raise ValueError(f"{name}: no gradient for any variable (was a zip used twice?).")
    state = state or build(optimizer, states, variables)
    return state, state.find(variables)


def _add_nothing(
    optimizer: OptimizerSettings, state: State, progress: Progress, call: GradientCall
) -> None:
    """Count a call of weight 0 on all replicas, or update by the calls before. Collective.

    Raises:
      ValueError: No call of the update has a weight; on all ranks.
    """
    if not progress.due(optimizer):
        state.keep(progress.added(0.0))
        return
    if not progress.weight:
        text, calls = f"{call.name}: the weights of all replicas are 0", optimizer.accumulate
        if calls > 1:
            text += f" in all {calls} calls of the update (accumulate={calls})"
        state.strategy.replicas.lockstep.fail(ValueError(f"{text}."))
    _update(optimizer, state, progress, call, nothing_to_add(call.update_plan))


def _update(
    optimizer: OptimizerSettings,
    state: State,
    progress: Progress,
    call: GradientCall,
    reduced: Reduced,
) -> None:
    """Update or accumulate by gradients that this rank can read. Collective."""
    group, update_plan, places = state.strategy.replicas, call.update_plan, reduced.places
    lockstep, node = group.lockstep, group.reducer.node
    outcome: Callable[[], None] | None = None
    try:
        if progress.step == 0:
            for target in update_plan.dense:
                if target.ema is not None:  # the program may have assigned weights since `build`
                    target.ema[:] = target.w
        update_comm = None
        if lockstep.comm.size > 1 and (places is not None or update_plan.shared):
            update_comm = lockstep.comm if update_plan.spread else node.arena.nodes().node
        if update_plan.plain and progress.scale == 1.0 and not (places and places.far):
            bad_index = quiet().run(_plainly, call, reduced, update_comm)
            if bad_index is None:
                state.keep(progress.updated(optimizer))
            else:
                outcome = functools.partial(_nonfinite, optimizer, state, call, bad_index)
        else:
            with np.errstate(all="ignore"):
                update = _planned(optimizer, state, progress, call, reduced, update_comm)
                outcome = _outcome(optimizer, state, progress, call, update, reduced.weight)
    except BaseException as error:
        abort(lockstep, call.text, error)
    if outcome is not None:
        outcome()


def _planned(
    optimizer: OptimizerSettings,
    state: State,
    progress: Progress,
    call: GradientCall,
    reduced: Reduced,
    update_comm: Comm | None,
) -> Update:
    """Return the update where there is more to do than `_plainly` does."""
    update_plan, means, take = call.update_plan, reduced.means, _taken(optimizer, progress, reduced)
    fused, separate_indices = (reduced.places or update_plan).division
    groups = [
        (group, indices, [means[i] for i in indices]) for group, indices in fused if group.parts
    ]
    singles = [i for group, indices in fused if not group.parts for i in indices]
    works = _works(call, reduced, [*separate_indices, *singles], take)
    row_updates = [
        unique(*pair, take) for pair in zip(update_plan.sparse, reduced.sparse, strict=True)
    ]
    remote_indices: Sequence[int] = () if reduced.places is None else reduced.places.far
    step_arguments = (optimizer, progress.step, call.scalars, update_plan.worth_compiling)
    return Update(
        *(*step_arguments, works, groups, take, row_updates, len(update_plan.dense)),
        *(
            update_comm,
            state.strategy.replicas.lockstep.session.team,
            remote_indices,
            reduced.fetch,
        ),
    )


def _plainly(call: GradientCall, reduced: Reduced, update_comm: Comm | None) -> int | None:
    """Do what `Update.apply` does, where there is nothing to know before, and nothing is fetched.

    Returns:
      As `Update.apply`.
    """
    update_plan, scalars, means, first = call.update_plan, call.scalars, reduced.means, NOBODY
    take, guard, compiled = update_plan.take, update_plan.guard, update_plan.worth_compiling
    fused, separate_indices = (reduced.places or update_plan).division
    for group, indices in fused:
        gradients, numbers = [*map(means.__getitem__, indices)], scalars[id(group.optimizer)]
        bad_member = group.update(gradients, take, numbers, guard, compiled)
        if bad_member is not None:
            first = min(first, indices[bad_member])
    for i in separate_indices:
        target = update_plan.dense[i]
        rows, start, factors, divisor = reduced.gradient_of(i)
        start += target.low
        gradient = Gradient(rows, start, factors, divisor, 1.0, take.limit, ignore=not guard)
        arguments = (scalars[id(target.optimizer)], target.ema, update_plan.decay, guard, compiled)
        if passes.update(target.rule, gradient, target.w, target.mine, *arguments):
            first = min(first, i)
    return meet(update_comm, first, guard) if update_comm is not None or first != NOBODY else None


def _outcome(
    optimizer: OptimizerSettings,
    state: State,
    progress: Progress,
    call: GradientCall,
    update: Update,
    weight: float,
) -> Callable[[], None] | None:
    """Do what the call does; return what is to be said of it, on all ranks, if anything is."""
    if not progress.due(optimizer):
        update.accumulate()
        state.keep(progress.added(weight))
        return None
    norm = update.norm() if optimizer.looks else 0.0
    if not math.isfinite(norm) and optimizer.nonfinite == "skip":
        update.forget()
        state.keep(progress.left_out(optimizer))
        return None if optimizer.loss_scale else lambda: _warn(state, call, progress.step)
    if not math.isfinite(norm) and optimizer.nonfinite == "raise":
        bad_index: int | None = -1
        update.close()
    else:
        bad_index = update.apply()
    if bad_index is None:
        state.keep(progress.updated(optimizer))
        return None
    if optimizer.accumulate > 1:  # what has come is gone, on all ranks
        update.forget()
        state.keep(progress.dropped())
    return functools.partial(_nonfinite, optimizer, state, call, bad_index)


def _taken(optimizer: OptimizerSettings, progress: Progress, reduced: Reduced) -> Take:
    """Return what is done to gradients; of several calls the mean is by the weight of each."""
    weight = 1.0 if reduced.places or optimizer.accumulate == 1 else reduced.weight
    divisor, factor = progress.weight + reduced.weight, 1.0 / progress.scale
    ignore = optimizer.nonfinite == "ignore"
    return Take(weight, divisor, factor, limit_of(optimizer.clip), ignore)


def _works(
    call: GradientCall, reduced: Reduced, indices: Iterable[int], take: Take
) -> dict[int, Work]:
    """Return what is updated of these gradients, by their numbers."""
    works = {}
    for i in sorted(indices):
        target = call.update_plan.dense[i]
        rows, start, factors, divisor = reduced.gradient_of(i)
        if target.pending is not None:  # the mean is over all calls
            divisor = take.divisor
            if reduced.places is None:  # a mean of this call, which is to count by its weight
                factors = np.array([take.weight], rows.dtype)
        start += target.low
        gradient_arguments = (divisor, take.factor, take.limit, target.pending, take.ignore)
        works[i] = Work(target, Gradient(rows, start, factors, *gradient_arguments))
    return works


def _warn(state: State, call: GradientCall, step: int) -> None:
    text = (
        f"{call.name}: a gradient is NaN or infinite, so the update after step {step} is left out "
        "on all ranks (nonfinite='skip'); optimizer.progress.skipped counts them."
    )
    warn(state.strategy.replicas.lockstep, call.name, text, RuntimeWarning, stacklevel=4)


def _nonfinite(
    optimizer: OptimizerSettings, state: State, call: GradientCall, bad_index: int
) -> None:
    """Raise on all ranks which gradient is not finite, and on which rank it came so."""
    lockstep, update_plan = state.strategy.replicas.lockstep, call.update_plan
    targets = [*update_plan.dense, *update_plan.sparse]
    gradients = [*call.values, *[slices.values for slices in call.rows]]
    local_text = ""
    pairs = list(zip(targets, gradients, strict=True)) if call.weight != 0 else []
    for target, value in pairs[bad_index:] if bad_index >= 0 else pairs:
        is_finite = np.isfinite(value)
        if not is_finite.all():
            index = tuple(map(int, np.unravel_index(int(np.argmin(is_finite)), is_finite.shape)))
            local_text = (
                f"the gradient of {target.variable.label} is {value[index]} at index {index}"
            )
            break
    rank_texts = [text.decode() for text in lockstep.texts(local_text.encode())]
    lines = [f"\n  rank {lockstep.ranks[i]}: {text}" for i, text in enumerate(rank_texts) if text]
    leaf = targets[bad_index].variable.label if bad_index >= 0 else "some variable"
    calls = optimizer.accumulate
    calls_text = f" with those of calls before (accumulate={calls})" if calls > 1 else ""
    finite_text = "\n  The gradients of this call are finite on each rank, but"
    causes = "".join(lines) or f"{finite_text} what they come to{calls_text} for {leaf} is not."
    lockstep.fail(
        NonFiniteError(
            f"{call.name}, step {state.progress.step}: a gradient is NaN or infinite.{causes}\n  "
            "Weights are finite, but some may be updated; restart from a checkpoint, or give the "
            "optimizer nonfinite='skip'."
        )
    )
