"""`Optimizer.apply_gradients` behind its door: checked, folded, updated, and what failed told."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.collectives.folding import Folding
from mpistrat.distribute.slices import IndexedSlices
from mpistrat.distribute.variables import Variable
from mpistrat.errors import NonFiniteError
from mpistrat.lockstep.abort import moving
from mpistrat.lockstep.guards import warn
from mpistrat.optim.clipping import ClipByValue
from mpistrat.optim.folded import Folded, fold
from mpistrat.optim.given import (
    GradientCall,
    checked,
    owner,
    refuse_twice,
    refuse_unknown,
)
from mpistrat.optim.passes import Gradient
from mpistrat.optim.state import State, check_variable
from mpistrat.optim.updating import Rows, Update, Work

if TYPE_CHECKING:
    from mpistrat.optim.base import OptimizerSettings

__all__ = ["apply", "build"]


def build(
    optimizer: OptimizerSettings, states: dict[Any, State], variables: Iterable[Variable]
) -> State:
    """Return the state for these variables, made if there is none yet; see `Optimizer.build`."""
    name, given = f"{type(optimizer).__name__}.build", list(variables)
    strategy = owner(name, given)
    with strategy.parts.lockstep.preparing(name):
        if not given:
            raise ValueError(f"{name}: there are no variables.")
        for variable in given:
            check_variable(strategy, variable, name)
        refuse_twice(name, given)
        state = states.get(strategy)
        if state is not None:
            refuse_unknown(name, state, given)
    if state is None:
        state = states[strategy] = State(optimizer, strategy, given)
    return state


def apply(
    optimizer: OptimizerSettings,
    states: dict[Any, State],
    grads_and_vars: Any,
    weight: float | None,
) -> Variable:
    """Update variables by gradients; see `Optimizer.apply_gradients`. Collective."""
    name, failure, pairs = f"{type(optimizer).__name__}.apply_gradients", None, []
    try:
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars]
    except Exception as error:
        failure = error
    strategy = owner(name, [variable for _, variable in pairs])
    lockstep = strategy.parts.lockstep
    lockstep.check()
    with lockstep.preparing(name):
        if failure is not None:
            raise failure
        for _, variable in pairs:
            check_variable(strategy, variable, name)
        refuse_twice(name, [variable for _, variable in pairs])
        given = [(g, v) for g, v in pairs if g is not None]
        if not given:
            raise ValueError(f"{name}: there is no gradient for any variable.")
    state = states.get(strategy) or build(optimizer, states, [v for _, v in pairs])
    with lockstep.preparing(name):
        call = checked(optimizer, state, name, given, weight)
        progress = state.progress
        what = call.known.what(progress.step)
        call.known.compile(optimizer)
    _step(optimizer, state, call, what)
    return state.counters["iterations"]


def _step(optimizer: OptimizerSettings, state: State, call: GradientCall, what: Folding) -> None:
    """Fold the gradients, and update or accumulate. Collective."""
    parts, progress = state.strategy.parts, state.progress
    lockstep, node = parts.lockstep, parts.reducer.node
    with np.errstate(all="ignore"):
        folded, rows = fold(state, call, what)
        if call.values and not folded.weight:
            lockstep.fail(ValueError(f"{call.name}: the weights of all replicas are 0."))
        with moving(lockstep, what.text):
            works = _works(optimizer, progress.scale, progress.weight, call, folded)
            shared = folded.reads or any(t.shared for t in (*call.known.dense, *call.known.sparse))
            meets = node.arena.nodes().node if shared and lockstep.comm.size > 1 else None
            sparse_ones = _unique(optimizer, progress.scale, call, rows)
            team, far = lockstep.session.team, (folded.far, folded.fetch)
            update = Update(optimizer, progress, works, sparse_ones, meets, team, *far)
            outcome = _outcome(optimizer, state, call, update, folded.weight)
    if outcome is not None:
        outcome()


def _outcome(
    optimizer: OptimizerSettings, state: State, call: GradientCall, update: Update, weight: float
) -> Callable[[], None] | None:
    """Do what the call does; return what is to be said of it, on all ranks, if anything is."""
    progress = state.progress
    if not progress.due(optimizer):
        update.accumulate()
        state.keep(progress.added(weight))
        return None
    norm = update.norm() if update.looks else 0.0
    if not math.isfinite(norm) and optimizer.nonfinite == "skip":
        update.forget()
        state.keep(progress.left_out(optimizer))
        return None if optimizer.loss_scale else lambda: _warn(state, call, progress.step)
    if not math.isfinite(norm) and optimizer.nonfinite == "raise":
        bad: int | None = -1
        update.close()
    else:
        bad = update.apply()
    if bad is None:
        state.keep(progress.updated(optimizer))
        return None
    if optimizer.accumulate > 1:  # what has come so far is gone, on all ranks
        update.forget()
        state.keep(progress.dropped())
    return lambda: _nonfinite(state, call, bad)


def _works(
    optimizer: OptimizerSettings, scale: float, before: float, call: GradientCall, folded: Folded
) -> list[Work]:
    """Return what is updated; of gradients that are added up, the mean is over all calls."""
    limit = optimizer.clip.limit if isinstance(optimizer.clip, ClipByValue) else math.inf
    works = []
    for target, (rows, start), factors, divisor in zip(
        call.known.dense, folded.rows, folded.factors, folded.divisor, strict=True
    ):
        if optimizer.accumulate > 1:
            divisor = before + folded.weight
            if not folded.reads:  # a mean of this call, which is to count by its weight
                factors = np.array([folded.weight], rows.dtype)
        gradient = Gradient(
            *(rows, start + target.low, factors, divisor, 1.0 / scale, limit, target.pending)
        )
        works.append(Work(target, gradient))
    return works


def _unique(
    optimizer: OptimizerSettings, scale: float, call: GradientCall, rows: list[IndexedSlices]
) -> list[Rows]:
    """Return rows once each, with the sum of their gradients."""
    limit = optimizer.clip.limit if isinstance(optimizer.clip, ClipByValue) else math.inf
    found = []
    for target, one in zip(call.known.sparse, rows, strict=True):
        which, place = np.unique(one.indices, return_inverse=True)
        values = np.zeros((len(which), *one.values.shape[1:]), target.variable.dtype)
        np.add.at(values, place.reshape(-1), one.values)
        values *= values.dtype.type(1.0 / scale)
        np.clip(values, -limit, limit, out=values)
        found.append(Rows(target, which, values))
    return found


def _warn(state: State, call: GradientCall, step: int) -> None:
    text = (
        f"{call.name}: a gradient is NaN or infinite, so the update after step {step} is left out "
        "on all ranks (nonfinite='skip'); optimizer.progress.skipped counts them."
    )
    warn(state.strategy.parts.lockstep, call.name, text, RuntimeWarning, stacklevel=4)


def _nonfinite(state: State, call: GradientCall, bad: int) -> None:
    """Raise on all ranks which gradient is not finite, and on which rank it came so."""
    lockstep, known = state.strategy.parts.lockstep, call.known
    targets = [*known.dense, *known.sparse]
    given = [*call.values, *[one.values for one in call.rows]]
    mine = ""
    pairs = list(zip(targets, given, strict=True)) if call.weight != 0 else []
    for target, value in pairs[bad:] if bad >= 0 else pairs:
        good = np.isfinite(value)
        if not good.all():
            index = tuple(map(int, np.unravel_index(int(np.argmin(good)), good.shape)))
            mine = f"the gradient of {target.variable.label} is {value[index]} at index {index}"
            break
    told = [mine]
    if lockstep.comm.size > 1:
        told = [text.decode() for text in lockstep.texts(mine.encode())]
    lines = [f"\n  rank {lockstep.ranks[i]}: {text}" for i, text in enumerate(told) if text]
    leaf = targets[bad].variable.label if bad >= 0 else "some variable"
    where = (
        "".join(lines) or f"\n  Each rank's is finite, but what they come to, of {leaf}, is not."
    )
    lockstep.fail(
        NonFiniteError(
            f"{call.name}, step {state.progress.step}: a gradient is NaN or infinite.{where}\n  "
            "Weights are finite, but some may be updated; restart from a checkpoint, or give the "
            "optimizer nonfinite='skip'."
        )
    )
