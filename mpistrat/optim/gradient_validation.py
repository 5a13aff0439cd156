"""What a program gives to `Optimizer.apply_gradients`, checked before anything communicates."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from mpistrat.arrays import Array, as_array, digest, is_bfloat16, spec_text
from mpistrat.collectives.weights import as_weight
from mpistrat.errors import ContextError, LeafTypeError, StructureError
from mpistrat.optim.state import Listed, State, Target
from mpistrat.optim.update_plan import UpdatePlan
from mpistrat.strategy.context_stack import check_same_strategy, require_chosen_strategy
from mpistrat.strategy.strategies import current_strategy, default_strategy
from mpistrat.variables.indexed_slices import IndexedSlices, list_arrays
from mpistrat.variables.values import DistributedValues, Mirrored
from mpistrat.variables.variable import Variable

if TYPE_CHECKING:
    from mpistrat.optim.base import OptimizerSettings

__all__ = ["GradientCall", "owner", "refuse_twice", "refuse_unknown", "validate_gradients"]


# Ways in which calls of one optimizer differ that are remembered.
_CALLS = 64
_WEIGHT_LIMIT = 1 << 62
_ARRAYS = {np.ndarray}
_LIKE = operator.attrgetter("dtype", "shape")
_BASE = operator.attrgetter("base")


class GradientCall(NamedTuple):
    """One call, found good on this rank.

    Attributes:
      name: What messages call it.
      replica: Each replica has its own gradients; else they are the same on all ranks.
      weight: How many examples this replica's stand for; None for as many as others.
      update_plan: What is the same each time.
      rates: The end of the text of the call: learning rates that are functions.
      values: The gradients that are dense; of shape and dtype of their variables, and in no memory
        that the call writes to.
      rows: The others, in the dtype of theirs.
      alike: What shows in cross-replica code that gradients are the same, by leaf.
      scalars: The numbers of this step, without norms, by the identity of optimizers.
    """

    name: str
    replica: bool
    weight: float | None
    update_plan: UpdatePlan
    rates: str
    values: list[Array]
    rows: list[IndexedSlices]
    alike: dict[str, Array | bytes]
    scalars: dict[int, tuple[float, ...]]

    @property
    def text(self) -> str:
        """The call, as the handshake describes it."""
        return self.update_plan.plan.text + self.rates


def owner(name: str, values: Sequence[Any]) -> Any:
    """Return the strategy of variables; raise if an optimizer cannot work for it here.

    Args:
      name: The call, for messages.
      values: Variables, perhaps among other things.
    """
    variable_strategy = next(
        (value.strategy for value in values if isinstance(value, Variable)), None
    )
    strategy = variable_strategy or current_strategy()
    mode = check_same_strategy(strategy, name)
    if mode is not None and mode.updated_variable is not None:
        raise ContextError(f"{name} was called in the function of update; call it outside of it.")
    if strategy is default_strategy():
        require_chosen_strategy(
            name, "Create the variables in strategy.scope(), and call it in run"
        )
    return strategy


def refuse_twice(name: str, variables: Sequence[Variable]) -> None:
    """Raise ValueError if a variable is given twice."""
    numbers: set[int] = set()
    for variable in variables:
        if variable._number in numbers:
            raise ValueError(f"{name}: {variable._label} is given twice; add up its gradients.")
        numbers.add(variable._number)


def refuse_unknown(name: str, state: State, variables: Sequence[Variable]) -> None:
    """Raise ValueError if the state is not made for a variable."""
    unknown = [variable._label for variable in variables if variable._number not in state.targets]
    if unknown:
        raise ValueError(
            f"{name}: {', '.join(unknown)} is not among the variables that this optimizer was "
            f"built for: {', '.join(state.names)}. Build it with all of them before the first "
            "step, optimizer.build(variables), or make another optimizer."
        )


def validate_gradients(
    optimizer: OptimizerSettings,
    state: State,
    name: str,
    replica: bool,
    gradients: Sequence[Any],
    listed: Listed,
    weight: float | None,
    step: int,
) -> GradientCall:
    """Return the call; raise if it cannot be made. Never communicates.

    Args:
      optimizer: The optimizer.
      state: Its state.
      name: What messages call the call.
      replica: Whether it is replica code that makes it.
      gradients: One for each variable, or None.
      listed: What is known of the variables.
      weight: As it was given.
      step: How many updates were made before.
    """
    number: float | None = None
    if weight is not None:
        is_plain_count = type(weight) is int and 0 <= weight < _WEIGHT_LIMIT
        number = float(weight) if is_plain_count else as_weight(weight, name)
    weight_key = number is not None if replica else number
    last = state.last
    if (
        last is not None
        and last[0] is listed
        and last[1:3] == (replica, weight_key)
        and {*map(type, gradients)} == _ARRAYS
        and [*map(_LIKE, gradients)] == listed.likes
    ):  # as in nearly all steps, and then the gradients are all that is new
        validated: _Validated = last[3], [*gradients], [], {}
    else:
        validated = _validate_each(optimizer, state, name, gradients, listed, replica, number)
    update_plan, values, rows, compared_values = validated
    bases = [*map(_BASE, values)]
    if not state.bases.isdisjoint(map(id, bases)) or any(map(_is_foreign, bases)):
        # Views of memory that the call changes count as they are now.
        values = state.copy_own_views(values)
    scalars = {id(o): o.scalars(step) for o in update_plan.optimizers}
    rates = update_plan.rates_text(step) if update_plan.needs_rates else ""
    return GradientCall(
        name, replica, number, update_plan, rates, values, rows, compared_values, scalars
    )


# The plan, dense gradients, sparse ones, and what shows that they are alike; as in `GradientCall`.
_Validated: TypeAlias = (
    "tuple[UpdatePlan, list[Array], list[IndexedSlices], dict[str, Array | bytes]]"
)


def _is_foreign(base: Any) -> bool:
    """Tell whether the memory below a view may be anybody's: no array of NumPy owns it."""
    return base is not None and (type(base) is not np.ndarray or base.base is not None)


def _validate_each(
    optimizer: OptimizerSettings,
    state: State,
    name: str,
    gradients: Sequence[Any],
    listed: Listed,
    replica: bool,
    weight: float | None,
) -> _Validated:
    """Return gradients, looked at one by one."""
    compares = not replica and state.strategy._replicas.lockstep.comm.size > 1
    dense, rows, values, slices = [], [], [], []
    compared_values: dict[str, Array | bytes] = {}
    for gradient, variable, target in zip(gradients, listed.variables, listed.targets, strict=True):
        if gradient is None:
            continue
        if target is None:
            pairs = zip(gradients, listed.variables, strict=True)
            refuse_unknown(name, state, [v for g, v in pairs if g is not None])
            raise AssertionError
        if compares:
            compared_values[variable._spec()] = _shown(name, gradient, variable)
        validated_gradient: Any = gradient
        if type(gradient) is not np.ndarray or (gradient.dtype, gradient.shape) != target.like:
            validated_gradient = _found(name, gradient, target, optimizer)
            if type(validated_gradient) is IndexedSlices:
                rows.append(target)
                slices.append(validated_gradient)
                continue
        dense.append(target)
        values.append(validated_gradient)
    if not dense or optimizer.accumulate > 1:
        _check_count(optimizer, state, name, len(dense), len(rows))
    update_plan = _plan_update(optimizer, state, replica, weight, dense, rows)
    if not compares and len(dense) == len(gradients):
        state.last = listed, replica, weight is not None if replica else weight, update_plan
    return update_plan, values, slices, compared_values


def _check_count(
    optimizer: OptimizerSettings, state: State, name: str, dense: int, rows: int
) -> None:
    if not (dense or rows):
        raise ValueError(f"{name}: there is no gradient for any variable.")
    if optimizer.accumulate > 1 and dense < len(state.targets):
        raise ValueError(
            f"{name}: accumulate={optimizer.accumulate} adds up the gradients of all "
            f"{len(state.targets)} variables, but {dense} are given."
        )


def _plan_update(
    optimizer: OptimizerSettings,
    state: State,
    replica: bool,
    weight: float | None,
    dense: list[Target],
    rows: list[Target],
) -> UpdatePlan:
    weight_key = weight is not None if replica else weight
    key = (replica, weight_key, *map(id, dense), None, *map(id, rows))
    update_plan: UpdatePlan | None = state.calls.get(key)
    if update_plan is None:
        weight_text = "" if weight is None else " weighted" if replica else f" weight {weight!r}"
        weight_text = f"{'replicas' if replica else 'all'}{weight_text}"
        text = f"{optimizer.chosen()}.apply_gradients of {weight_text},"
        if len(state.calls) > _CALLS:
            state.calls.clear()
        update_plan = state.calls[key] = UpdatePlan(optimizer, state, text, dense, rows)
    return update_plan


def _found(
    name: str, gradient: Any, target: Target, optimizer: OptimizerSettings
) -> Array | IndexedSlices:
    if isinstance(gradient, DistributedValues):
        gradient = gradient.local
    if isinstance(gradient, IndexedSlices):
        return _rows(name, gradient, target, optimizer)
    return _dense(name, gradient, target.variable)


def _shown(name: str, gradient: Any, variable: Variable) -> Array | bytes:
    """Return what has to be the same on all ranks: contents, or the name of a handshake of them."""
    if isinstance(gradient, DistributedValues):
        if not isinstance(gradient, Mirrored):
            raise StructureError(
                f"{name}: the gradient of {variable._label} is a value per replica, in "
                "cross-replica code. Reduce it first (strategy.reduce, extended.reduce_to), or "
                "call this in the function that run calls, where gradients are reduced."
            )
        proof = gradient._find_handshake(variable.strategy._replicas.lockstep.session)
        if proof:
            return proof.encode()
        gradient = gradient.local
    if isinstance(gradient, IndexedSlices):
        return digest(list_arrays(gradient))
    return as_array(gradient, f"the gradient of {variable._label}")


def _dense(name: str, gradient: Any, variable: Variable) -> Array:
    array = _converted(name, as_array(gradient, f"the gradient of {variable._label}"), variable)
    if array.shape != variable.shape:
        raise StructureError(
            f"{name}: the gradient of {variable._label} has shape {array.shape}; expected that of "
            f"the variable, {variable.shape}."
        )
    return array


def _converted(name: str, array: Array, variable: Variable) -> Array:
    """Return a gradient, or rows of one, in the dtype of the variable."""
    if not (is_bfloat16(array.dtype) or np.can_cast(array.dtype, variable.dtype, "same_kind")):
        raise LeafTypeError(
            f"{name}: the gradient of {variable._label} is {spec_text(array)}, which does not "
            f"convert to {variable.dtype}."
        )
    with np.errstate(all="ignore"):  # what overflows is infinite, and `nonfinite` says what then
        gradient: Array = array.astype(variable.dtype, copy=False)
    return gradient


def _rows(
    name: str, slices: IndexedSlices, target: Target, optimizer: OptimizerSettings
) -> IndexedSlices | Array:
    """Return rows in the dtype of their variable; dense, if all elements are to change."""
    variable = target.variable
    shape, count = slices.values.shape[1:], max(variable.shape[:1], default=0)
    low, high = (
        (int(f(slices.indices)) for f in (np.min, np.max)) if slices.indices.size else (0, -1)
    )
    if not variable.ndim or shape != variable.shape[1:] or low < 0 or high >= count:
        raise StructureError(
            f"{name}: the gradient of {variable._label} of shape {variable.shape} is IndexedSlices "
            f"of rows of shape {shape}, with indices from {low} to {high}; they do not fit."
        )
    values = _converted(name, slices.values, variable)
    # In a narrow dtype the place of a row, or of its first element, might not be a number.
    converted_rows = IndexedSlices(
        values, slices.indices.astype(np.int64, copy=False), variable.shape
    )
    changes_all_rows = optimizer.accumulate > 1 or optimizer.ema is not None
    if changes_all_rows or target.optimizer.rule.measure is not None:
        whole_array: Array = np.asarray(converted_rows)
        return whole_array
    return converted_rows
