"""`Optimizer.apply_gradients` behind its door: gradients of all replicas in, variables updated.

One handshake for the whole call; then one of these, alike on all ranks:

========  ==================================  ==================================================
way       when                                what moves
========  ==================================  ==================================================
alone     one rank, or cross-replica code     nothing: the gradient is there
folded    small variables only, or memory     an all-reduce; then each rank updates what it holds
          is not shared, or values move by
          choice
in place  gradients lie in the arena, or are  each rank folds and updates its parts of all
          put there                           variables in one pass; one barrier of the node
========  ==================================  ==================================================
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast, final

import numpy as np

from mpistrat.arrays import Array, as_array, is_bfloat16, spec_text
from mpistrat.collectives.alarms import warn
from mpistrat.collectives.folding import Folding
from mpistrat.collectives.forms import form
from mpistrat.collectives.lost import moving
from mpistrat.collectives.part import Part
from mpistrat.collectives.spans import Placed, Scales, scales_of
from mpistrat.distribute import sparse, writes
from mpistrat.distribute.default import current_strategy, default_strategy, refuse_unchosen
from mpistrat.distribute.mode import Mode, same_strategy
from mpistrat.distribute.slices import IndexedSlices
from mpistrat.distribute.values import DistributedValues, Mirrored
from mpistrat.distribute.variables import Variable
from mpistrat.errors import ContextError, LeafTypeError, NonFiniteError, StructureError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.scaling import factors_of
from mpistrat.memory.arena import Block, Home
from mpistrat.optim import passes
from mpistrat.optim.clipping import ClipByValue
from mpistrat.optim.passes import Gradient
from mpistrat.optim.schedules import Schedule
from mpistrat.optim.state import State, Target, check_variable
from mpistrat.optim.updating import Rows, Update, Work, compile_for

if TYPE_CHECKING:
    from mpistrat.optim.base import Optimizer

__all__ = ["apply", "build"]

# Small variables are updated by every rank, which folds the rows of all: up to so many bytes it is
# quicker than to fold them in slices first, and to wait for that.
_EACH = 1 << 20
_MEAN = ReduceOp.MEAN


class _Call(NamedTuple):
    """One call, found good on this rank.

    Attributes:
      name: What messages call it.
      replica: Each replica has its own gradients; else they are the same on all ranks.
      weight: How many examples this replica's stand for; None for as many as others.
      known: What is the same each time.
      values: The gradients that are dense; of shape and dtype of their variables.
      rows: The others, in the dtype of theirs.
      alike: What shows in cross-replica code that gradients are the same, by leaf.
    """

    name: str
    replica: bool
    weight: float | None
    known: _Known
    values: list[Array]
    rows: list[IndexedSlices]
    alike: dict[str, Array | bytes]


@final
class _Known:
    """What is the same in all calls that update these variables in this way.

    Args:
      text: Of the call.
      dense: The variables with gradients of all elements.
      sparse: The variables with gradients of some rows.
      step: Whether the text has to tell the learning rates of each step.
    """

    def __init__(self, text: str, dense: list[Target], sparse: list[Target], step: bool):
        """Find out what follows from the variables."""
        self.dense, self.sparse, self._tells = dense, sparse, step
        zeros = [np.broadcast_to(np.zeros((), t.variable.dtype), t.variable.shape) for t in dense]
        names = [t.variable.spec() for t in dense]
        parts = [Part(z, form(_MEAN, z.dtype), 1, n) for z, n in zip(zeros, names, strict=True)]
        self.start = (
            f"{text} {', '.join([*names, *[f'rows of {t.variable.spec()}' for t in sparse]])}"
        )
        self._what = Folding(self.start, _MEAN, [p.form for p in parts], [z.shape for z in zeros])
        # From one large variable on it pays to have all gradients where every rank can read them.
        self.large = any(target.shared for target in dense)
        self.compiled = False
        self.places: dict[tuple[int, ...], tuple[int, _Places]] = {}

    def what(self, step: int) -> Folding:
        """Return the call as it is at a step."""
        if not self._tells:
            return self._what
        rates = sorted({t.optimizer.rate(step) for t in (*self.dense, *self.sparse)})
        return self._what.but(f", at step {step} by {', '.join(map(repr, rates))}")

    def compile(self, optimizer: Optimizer) -> None:
        """Have the loops compiled that this call needs, before its proof."""
        if not self.compiled and passes.compiles(sum(t.variable.size for t in self.dense)):
            for target in {t.variable.dtype: t for t in self.dense}.values():
                compile_for(optimizer, target)
        self.compiled = True


class _Places(NamedTuple):
    """Where gradients lie that are folded in place.

    Attributes:
      suffix: What the text of the call says of it.
      rows: Of each gradient the block, the matrix in it, and its first column.
      first: Which of them are folded into the first row, before they are read from there.
      placed: All of these; None if there are none.
    """

    suffix: str
    rows: list[tuple[weakref.ref[Block], int, int]]
    first: list[bool]
    placed: Placed | None


class _Folded(NamedTuple):
    """Gradients as this rank can read them.

    Attributes:
      rows: Of each gradient the matrix, and the column where it begins.
      factors: What each row is multiplied by; None for ones.
      divisor: What the sum is divided by.
      weight: The sum of the weights of all replicas.
      reads: Other ranks read what this one has given, until the call ends.
    """

    rows: list[tuple[Array, int]]
    factors: list[Array | None]
    divisor: list[float]
    weight: float
    reads: bool


def build(optimizer: Optimizer, states: dict[Any, State], variables: Iterable[Variable]) -> State:
    """Return the state for these variables, made if there is none yet; see `Optimizer.build`."""
    name, given = f"{type(optimizer).__name__}.build", list(variables)
    strategy = _strategy(name, given)
    with strategy.parts.lockstep.preparing(name):
        if not given:
            raise ValueError(f"{name}: there are no variables.")
        for variable in given:
            check_variable(strategy, variable, name)
        _refuse_twice(name, given)
        state = states.get(strategy)
        if state is not None:
            _refuse_unknown(name, state, given)
    if state is None:
        state = states[strategy] = State(optimizer, strategy, given)
    return state


def _strategy(name: str, given: Sequence[Any]) -> Any:
    found = next((one.strategy for one in given if isinstance(one, Variable)), None)
    strategy = found or current_strategy()
    mode = same_strategy(strategy, name)
    if mode is not None and mode.updating is not None:
        raise ContextError(f"{name} was called in the function of update; call it outside of it.")
    if strategy is default_strategy():
        refuse_unchosen(name)
    return strategy


def _refuse_twice(name: str, given: Sequence[Variable]) -> None:
    seen: set[int] = set()
    for variable in given:
        if variable.number in seen:
            raise ValueError(f"{name}: {variable.label} is given twice; add up its gradients.")
        seen.add(variable.number)


def _refuse_unknown(name: str, state: State, given: Sequence[Variable]) -> None:
    unknown = [one.label for one in given if one.number not in state.targets]
    if unknown:
        raise ValueError(
            f"{name}: {', '.join(unknown)} is not among the variables that this optimizer was "
            f"built for: {', '.join(state.names)}. Build it with all of them before the first "
            "step, optimizer.build(variables), or make another optimizer."
        )


def apply(
    optimizer: Optimizer, states: dict[Any, State], grads_and_vars: Any, weight: float | None
) -> Variable:
    """Update variables by gradients; see `Optimizer.apply_gradients`. Collective."""
    name, failure, pairs = f"{type(optimizer).__name__}.apply_gradients", None, []
    try:
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars]
    except Exception as error:
        failure = error
    strategy = _strategy(name, [variable for _, variable in pairs])
    lockstep = strategy.parts.lockstep
    lockstep.check()
    with lockstep.preparing(name):
        if failure is not None:
            raise failure
        for _, variable in pairs:
            check_variable(strategy, variable, name)
        _refuse_twice(name, [variable for _, variable in pairs])
        given = [(g, v) for g, v in pairs if g is not None]
        if not given:
            raise ValueError(f"{name}: there is no gradient for any variable.")
    state = states.get(strategy) or build(optimizer, states, [v for _, v in pairs])
    mode = same_strategy(strategy, name)
    with lockstep.preparing(name):
        call = _checked(optimizer, state, name, given, mode, weight)
        progress = state.progress
        what = call.known.what(progress.step)
        call.known.compile(optimizer)
    _step(optimizer, state, call, what)
    return state.counters["iterations"]


def _checked(
    optimizer: Optimizer,
    state: State,
    name: str,
    given: list[tuple[Any, Variable]],
    mode: Mode | None,
    weight: float | None,
) -> _Call:
    _refuse_unknown(name, state, [variable for _, variable in given])
    if optimizer.accumulate > 1 and len(given) < len(state.targets):
        raise ValueError(
            f"{name}: accumulate={optimizer.accumulate} adds up the gradients of all "
            f"{len(state.targets)} variables, but {len(given)} are given."
        )
    replica = mode is not None and mode.replica is not None
    number = None if weight is None else _weight(name, weight)
    size = state.strategy.parts.lockstep.comm.size
    dense, rows, values, slices, alike = [], [], [], [], {}
    for gradient, variable in given:
        target = state.targets[variable.number]
        if isinstance(gradient, DistributedValues):
            if not replica and size > 1:
                _refuse_per_replica(name, gradient, variable)
                alike[variable.spec()] = _shown(gradient, state)
            gradient = gradient.local
        elif not replica and size > 1:
            alike[variable.spec()] = _shown(gradient, state)
        if isinstance(gradient, IndexedSlices):
            gradient = _rows(name, gradient, target, optimizer)
        if isinstance(gradient, IndexedSlices):
            rows.append(target)
            slices.append(gradient)
        else:
            dense.append(target)
            values.append(_dense(name, gradient, variable))
    how = "" if number is None else " weighted" if replica else f" weight {number!r}"
    key = (
        replica,
        how,
        *[t.variable.number for t in dense],
        None,
        *[t.variable.number for t in rows],
    )
    known = state.calls.get(key)
    if known is None:
        where = "replicas" if replica else "all"
        text = f"{optimizer.text()}.apply_gradients of {where}{how}"
        known = state.calls[key] = _Known(text, dense, rows, _tells(optimizer))
    return _Call(name, replica, number, known, values, slices, alike)


def _tells(optimizer: Optimizer) -> bool:
    """Whether a learning rate is a function of the program, of which no text tells all."""
    rates = [optimizer.learning_rate, *[g.changes.get("learning_rate") for g in optimizer.groups]]
    return any(callable(rate) for rate in rates)


def _weight(name: str, weight: Any) -> float:
    given = np.asarray(weight)
    number = float(given) if given.ndim == 0 and given.dtype.kind in "iuf" else math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name}: weight must be a number of examples, 0 or more, not {weight!r}.")
    return number


def _refuse_per_replica(name: str, gradient: DistributedValues, variable: Variable) -> None:
    if not isinstance(gradient, Mirrored):
        raise StructureError(
            f"{name}: the gradient of {variable.label} is a value per replica, in cross-replica "
            "code. Reduce it first (strategy.reduce, extended.reduce_to), or call this in the "
            "function that run calls, where gradients of the replicas are folded."
        )


def _shown(gradient: Any, state: State) -> Array | bytes:
    """Return what has to be the same on all ranks: contents, or the name of a proof of them."""
    if isinstance(gradient, Mirrored):
        proof = gradient.proved_by(state.strategy.parts.lockstep.session)
        if proof:
            return proof.encode()
        gradient = gradient.local
    if isinstance(gradient, IndexedSlices):
        return writes.digest(gradient)
    return as_array(gradient, "a gradient")


def _dense(name: str, gradient: Any, variable: Variable) -> Array:
    array = gradient
    if type(gradient) is not np.ndarray or gradient.dtype != variable.dtype:
        array = as_array(gradient, f"the gradient of {variable.label}")
        if not (is_bfloat16(array.dtype) or np.can_cast(array.dtype, variable.dtype, "same_kind")):
            raise LeafTypeError(
                f"{name}: the gradient of {variable.label} is {spec_text(array)}, which does not "
                f"convert to {variable.dtype}."
            )
    if array.shape != variable.shape:
        raise StructureError(
            f"{name}: the gradient of {variable.label} has shape {array.shape}; wanted is that of "
            f"the variable, {variable.shape}."
        )
    return array if array.dtype == variable.dtype else array.astype(variable.dtype)


def _rows(
    name: str, given: IndexedSlices, target: Target, optimizer: Optimizer
) -> IndexedSlices | Array:
    """Return rows in the dtype of their variable; dense, if all elements are to change."""
    variable = target.variable
    shape, count = given.values.shape[1:], max(variable.shape[:1], default=0)
    low, high = (int(f(given.indices)) for f in (np.min, np.max)) if given.indices.size else (0, -1)
    if not variable.ndim or shape != variable.shape[1:] or low < 0 or high >= count:
        raise StructureError(
            f"{name}: the gradient of {variable.label} of shape {variable.shape} is IndexedSlices "
            f"of rows of shape {shape}, with indices from {low} to {high}; they do not fit."
        )
    values = _like(given.values, variable)
    made = IndexedSlices(values, given.indices, variable.shape)
    whole = optimizer.accumulate > 1 or optimizer.ema is not None
    if whole or target.optimizer.rule.measure is not None:
        return np.asarray(made)
    return made


def _like(values: Array, variable: Variable) -> Array:
    return values if values.dtype == variable.dtype else values.astype(variable.dtype)


def _step(optimizer: Optimizer, state: State, call: _Call, what: Folding) -> None:
    """Fold the gradients, and update or accumulate. Collective."""
    parts, progress = state.strategy.parts, state.progress
    lockstep, node = parts.lockstep, parts.reducer.node
    with np.errstate(all="ignore"):
        folded, rows = _met(state, call, what)
        if call.values and not folded.weight:
            lockstep.fail(ValueError(f"{call.name}: the weights of all replicas are 0."))
        with moving(lockstep, what.text):
            works = _works(optimizer, progress.scale, progress.weight, call, folded)
            shared = folded.reads or any(t.shared for t in (*call.known.dense, *call.known.sparse))
            meets = node.arena.nodes().node if shared and lockstep.comm.size > 1 else None
            sparse_ones = _unique(optimizer, progress.scale, call, rows)
            update = Update(optimizer, progress, works, sparse_ones, meets, lockstep.session.team)
            outcome = _outcome(optimizer, state, call, update, folded.weight)
    if outcome is not None:
        outcome()


def _outcome(
    optimizer: Optimizer, state: State, call: _Call, update: Update, weight: float
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


def _met(state: State, call: _Call, what: Folding) -> tuple[_Folded, list[IndexedSlices]]:
    """Prove the call, and return the gradients of all replicas as this rank can read them."""
    parts, known = state.strategy.parts, call.known
    weight = 1.0 if call.weight is None else call.weight
    if parts.lockstep.comm.size == 1:
        return _alone(call.values, weight), call.rows
    if not call.replica:
        advice = "Reduce gradients first: strategy.reduce, extended.reduce_to, ctx.all_reduce."
        writes.prove_same(parts.lockstep, what.text, call.alike, advice)
        return _alone(call.values, weight), call.rows
    rows: list[IndexedSlices] = []
    if call.rows:
        given = [
            sparse.contribution(_MEAN, one, target.variable.name, weight)
            for one, target in zip(call.rows, known.sparse, strict=True)
        ]
        weigh = call.weight is not None
        rows = sparse.all_reduce(parts.reducer, f"{what.text}, rows", _MEAN, given, weigh=weigh)
    if not call.values:
        return _Folded([], [], [], weight, False), rows
    places = _places(state, call, what, weight)
    if places is not None:
        return _in_place(state, call, what, places, weight), rows
    alarm = ""
    if parts.lockstep.options.nan != "off":
        names = [t.variable.spec() for t in known.dense]
        pairs = zip(call.values, what.forms, names, strict=True)
        alarm = parts.reducer.alarm(call.name, [Part(v, f, weight, n) for v, f, n in pairs])
    weigh = call.weight is not None
    totals = parts.reducer.fold(what, call.values, [weight], weigh, None, alarm)
    return _alone(totals, math.fsum(parts.reducer.weights[:, 0].tolist())), rows


def _alone(values: Sequence[Array], weight: float) -> _Folded:
    """Return gradients that are means already."""
    rows = [(np.require(v, requirements="CAW").reshape(1, -1), 0) for v in values]
    return _Folded(rows, [None] * len(rows), [1.0] * len(rows), weight, False)


def _places(state: State, call: _Call, what: Folding, weight: float) -> _Places | None:
    """Return where the gradients lie in the arena, if they are folded there.

    Collective, the first time that memory for gradients is wanted.
    """
    parts, known, values = state.strategy.parts, call.known, call.values
    node, lockstep = parts.reducer.node, parts.lockstep
    if not (parts.reducer.in_place and node.possible and lockstep.options.nan == "off"):
        return None
    key = tuple(map(id, values))
    found = known.places.get(key)
    if found is not None and found[0] == node.arena.generation:
        return found[1]
    homes = node.homes(values, values) if what.worth_a_place else None
    if homes is None:
        if not known.large or not state.has_buffers(what.text):
            return None
        buffers = [state.buffers[t.variable.number] for t in known.dense]
        if weight:  # what is taken 0 times is not read
            for place, value in zip(buffers, values, strict=True):
                np.copyto(place, value)
        key = tuple(map(id, buffers))
        found = known.places.get(key)
        if found is not None and found[0] == node.arena.generation:
            return found[1]
        homes = node.homes(buffers, buffers)
        assert homes is not None
    made = _placed(state, known, homes)
    if len(known.places) > 16:
        known.places.clear()
    known.places[key] = node.arena.generation, made
    return made


def _placed(state: State, known: _Known, homes: list[Home]) -> _Places:
    node = state.strategy.parts.reducer.node
    nodes = node.arena.nodes()
    small = [t for t in known.dense if not t.shared]
    # Every rank of the node would read the rows of all.
    much = sum(t.w.nbytes for t in small) * nodes.node.size > _EACH
    first = [nodes.nodes > 1 or (much and not t.shared) for t in known.dense]
    folded = [home for home, yes in zip(homes, first, strict=True) if yes]
    rows = [(weakref.ref(h.block), h.place.matrix, h.place.start) for h in homes]
    return _Places(node.placed(homes).suffix, rows, first, node.placed(folded) if folded else None)


def _in_place(state: State, call: _Call, what: Folding, places: _Places, weight: float) -> _Folded:
    """Prove the call, and fold into the first row what every rank would have to fold."""
    reducer = state.strategy.parts.reducer
    reducer.meet(what, places.suffix, weight)
    table = reducer.weights
    whole = math.fsum(table[:, 0].tolist())
    # In calls that accumulate, each is to count by its weight, and not by its part of the mean.
    raw = state.accumulates
    scales = Scales(table, [1.0]) if raw else scales_of(table, True)
    column, divisor = scales.of(0)
    with moving(state.strategy.parts.lockstep, what.text):
        if places.placed is not None and whole:
            reducer.node.fold_first(_MEAN, places.placed, scales)
        nodes = reducer.node.arena.nodes()
        mine = column if column is None or nodes.nodes == 1 else column[nodes.ranks]
        rows, factors, divisors = [], [], []
        for (block, matrix, start), first in zip(places.rows, places.first, strict=True):
            given = cast(Block, block()).matrices[matrix]
            rows.append((given[:1] if first else given, start))
            factors.append(None if first or mine is None else factors_of(mine, given.dtype))
            divisors.append(1.0 if first else float(divisor))
        return _Folded(rows, factors, divisors, whole, True)


def _works(
    optimizer: Optimizer, scale: float, before: float, call: _Call, folded: _Folded
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
    optimizer: Optimizer, scale: float, call: _Call, rows: list[IndexedSlices]
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


def _warn(state: State, call: _Call, step: int) -> None:
    text = (
        f"{call.name}: a gradient is NaN or infinite, so the update after step {step} is left out "
        "on all ranks (nonfinite='skip'); optimizer.progress.skipped counts them."
    )
    warn(state.strategy.parts.lockstep, call.name, text, RuntimeWarning, stacklevel=4)


def _nonfinite(state: State, call: _Call, bad: int) -> None:
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
