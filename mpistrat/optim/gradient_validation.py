"""The arguments of `Optimizer.apply_gradients`, checked before anything communicates.

Each call checks dtype and shape of each gradient, and computes the hyper-parameters of the step
once for each optimizer. A call that is like the last one takes its `UpdatePlan`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from mpistrat.arrays import Array, as_array, digest, is_bfloat16, spec_text
from mpistrat.collectives.weights import as_weight
from mpistrat.errors import ContextError, LeafTypeError, StructureError
from mpistrat.optim.state import LastCall, State, Target, VariableList
from mpistrat.optim.update_plan import UpdatePlan
from mpistrat.strategy.context_stack import (
    StrategyLike,
    check_same_strategy,
    require_chosen_strategy,
)
from mpistrat.strategy.strategies import current_strategy, default_strategy
from mpistrat.variables.indexed_slices import IndexedSlices, list_arrays
from mpistrat.variables.values import DistributedValues, Mirrored
from mpistrat.variables.variable import Variable

if TYPE_CHECKING:
    from mpistrat.optim.base import OptimizerSettings

__all__ = [
    "GradientCall",
    "find_strategy",
    "refuse_duplicates",
    "refuse_unknown",
    "validate_gradients",
]


_MAX_PLANS = 64  # plans that the state of an optimizer keeps
_WEIGHT_LIMIT = 1 << 62
_ARRAY_TYPES = {np.ndarray}
_GET_DTYPE_AND_SHAPE = operator.attrgetter("dtype", "shape")
_GET_BASE = operator.attrgetter("base")


class GradientCall(NamedTuple):
    """One call whose arguments are valid on this rank.

    Attributes:
      name: The name of the call in messages.
      is_replica_code: Each replica has its own gradients; else they are the same on all ranks.
      weight: How many examples this replica's gradients stand for; None for as many as others.
      update_plan: The plan of calls with these variables.
      rates: The end of the text of the call: learning rates that are functions.
      dense_gradients: The gradients of all elements, with shape and dtype of their variables, in no
        memory that the call writes to.
      sparse_gradients: The gradients of some rows, in the dtype of their variables.
      compared_values: The contents that have to be equal on all ranks in cross-replica code, by
        variable.
      scalars: The numbers of this step, without norms, by the identity of optimizers.
    """

    name: str
    is_replica_code: bool
    weight: float | None
    update_plan: UpdatePlan
    rates: str
    dense_gradients: list[Array]
    sparse_gradients: list[IndexedSlices]
    compared_values: dict[str, Array | bytes]
    scalars: dict[int, tuple[float, ...]]

    @property
    def text(self) -> str:
        """The description of the call in the handshake."""
        return self.update_plan.plan.text + self.rates


def find_strategy(name: str, candidates: Sequence[object]) -> StrategyLike:
    """Return the strategy of variables; raise if an optimizer cannot work for it here.

    Args:
      name: The call, for messages.
      candidates: Variables, perhaps among other objects.
    """
    variable_strategy = next(
        (candidate.strategy for candidate in candidates if isinstance(candidate, Variable)), None
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


def refuse_duplicates(name: str, variables: Sequence[Variable]) -> None:
    """Raise ValueError if a variable is given twice."""
    numbers: set[int] = set()
    for variable in variables:
        if variable._number in numbers:
            raise ValueError(f"{name}: {variable._label} is given twice; add up its gradients.")
        numbers.add(variable._number)


def refuse_unknown(name: str, state: State, variables: Sequence[Variable]) -> None:
    """Raise ValueError if a variable is not among those of the state."""
    unknown = [variable._label for variable in variables if variable._number not in state.targets]
    if unknown:
        raise ValueError(
            f"{name}: {', '.join(unknown)} is not among the variables that this optimizer was "
            f"built for: {', '.join(state.names)}. Build it with all of them before the first "
            "step, optimizer.build(variables), or make another optimizer."
        )


def validate_gradients(
    state: State,
    gradients: Sequence[Any],
    listing: VariableList,
    weight: float | None,
    *,
    is_replica_code: bool,
    step: int,
) -> GradientCall:
    """Return the call; raise if it cannot be made. Never communicates.

    Args:
      state: The state of the optimizer.
      gradients: One for each variable, or None.
      listing: The variables.
      weight: The argument of the program.
      is_replica_code: Whether replica code makes the call.
      step: How many updates were made before.
    """
    name, number = state.call_name, None
    if weight is not None:
        is_plain_count = type(weight) is int and 0 <= weight < _WEIGHT_LIMIT
        number = float(weight) if is_plain_count else as_weight(weight, name)
    weight_key = number is not None if is_replica_code else number
    last_call = state.last_call
    if (
        last_call is not None
        and last_call.listing is listing
        and last_call.is_replica_code == is_replica_code
        and last_call.weight_key == weight_key
        and {*map(type, gradients)} == _ARRAY_TYPES
        and [*map(_GET_DTYPE_AND_SHAPE, gradients)] == listing.dtypes_and_shapes
    ):  # true in nearly all steps; then only the gradients are new
        validated: _Validated = last_call.update_plan, [*gradients], [], {}
    else:
        validated = _validate_each(
            state, gradients, listing, number, is_replica_code=is_replica_code
        )
    update_plan, dense, sparse, compared_values = validated
    bases = [*map(_GET_BASE, dense)]
    if not state.base_ids.isdisjoint(map(id, bases)) or any(map(_is_foreign, bases)):
        # The call changes the memory of these views, so it takes their present contents.
        dense = state.copy_own_views(dense)
    scalars = {id(o): o.scalars(step) for o in update_plan.optimizers}
    rates = update_plan.format_rates(step) if update_plan.needs_rates else ""
    return GradientCall(
        name, is_replica_code, number, update_plan, rates, dense, sparse, compared_values, scalars
    )


# The plan, dense gradients, sparse gradients, and contents to compare; as in `GradientCall`.
_Validated: TypeAlias = (
    "tuple[UpdatePlan, list[Array], list[IndexedSlices], dict[str, Array | bytes]]"
)


def _is_foreign(base: object) -> bool:
    """Return whether no NumPy array owns the memory of a view; it may be a variable's then."""
    return base is not None and (type(base) is not np.ndarray or base.base is not None)


def _validate_each(
    state: State,
    gradients: Sequence[Any],
    listing: VariableList,
    weight: float | None,
    *,
    is_replica_code: bool,
) -> _Validated:
    """Return the plan and the gradients, after a check of each gradient."""
    name = state.call_name
    needs_comparison = not is_replica_code and state.strategy._replicas.lockstep.comm.size > 1
    dense_targets: list[Target] = []
    sparse_targets: list[Target] = []
    dense: list[Any] = []
    sparse: list[Any] = []
    compared_values: dict[str, Array | bytes] = {}
    triples = zip(gradients, listing.variables, listing.targets, strict=True)
    for gradient, variable, target in triples:
        if gradient is None:
            continue
        if target is None:
            refuse_unknown(name, state, _list_updated(gradients, listing))
            raise AssertionError
        if needs_comparison:
            compared_values[variable._spec()] = _get_comparable_contents(name, gradient, variable)
        valid_gradient = gradient
        if (
            type(gradient) is not np.ndarray
            or (gradient.dtype, gradient.shape) != target.dtype_and_shape
        ):
            valid_gradient = _convert_gradient(name, gradient, target, state)
        is_sparse = type(valid_gradient) is IndexedSlices
        (sparse_targets if is_sparse else dense_targets).append(target)
        (sparse if is_sparse else dense).append(valid_gradient)
    if not dense or state.accumulates:
        _check_count(state, name, len(dense), len(sparse))
    update_plan = _find_plan(state, dense_targets, sparse_targets, weight, is_replica_code)
    if not needs_comparison and len(dense) == len(gradients):
        weight_key = weight is not None if is_replica_code else weight
        state.last_call = LastCall(listing, is_replica_code, weight_key, update_plan)
    return update_plan, dense, sparse, compared_values


def _find_plan(
    state: State,
    dense_targets: list[Target],
    sparse_targets: list[Target],
    weight: float | None,
    is_replica_code: bool,
) -> UpdatePlan:
    weight_key = weight is not None if is_replica_code else weight
    key = (is_replica_code, weight_key, *map(id, dense_targets), None, *map(id, sparse_targets))
    update_plan: UpdatePlan | None = state.update_plans.get(key)
    if update_plan is None:
        if len(state.update_plans) > _MAX_PLANS:
            state.update_plans.clear()
        weight_text = f" weight {weight!r}" if weight is not None else ""
        if is_replica_code:
            weight_text = " weighted" if weight is not None else ""
        replicas_text = "replicas" if is_replica_code else "all"
        text = f"{state.text}.apply_gradients of {replicas_text}{weight_text},"
        update_plan = UpdatePlan(state, text, dense_targets, sparse_targets)
        state.update_plans[key] = update_plan
    return update_plan


def _list_updated(gradients: Sequence[Any], listing: VariableList) -> list[Variable]:
    pairs = zip(gradients, listing.variables, strict=True)
    return [variable for gradient, variable in pairs if gradient is not None]


def _check_count(state: State, name: str, dense_count: int, sparse_count: int) -> None:
    accumulate = state.optimizer.accumulate
    if not (dense_count or sparse_count):
        raise ValueError(f"{name}: there is no gradient for any variable.")
    if accumulate > 1 and dense_count < len(state.targets):
        raise ValueError(
            f"{name}: accumulate={accumulate} adds up the gradients of all "
            f"{len(state.targets)} variables, but {dense_count} are given."
        )


def _convert_gradient(
    name: str, gradient: object, target: Target, state: State
) -> Array | IndexedSlices:
    if isinstance(gradient, DistributedValues):
        gradient = gradient.local
    if isinstance(gradient, IndexedSlices):
        return _convert_rows(name, gradient, target, state.optimizer)
    return _convert_dense(name, gradient, target.variable, state)


def _get_comparable_contents(name: str, gradient: object, variable: Variable) -> Array | bytes:
    """Return contents that have to be equal on all ranks, or the text of a handshake of them."""
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


def _convert_dense(name: str, gradient: object, variable: Variable, state: State) -> Array:
    array = _convert_dtype(name, as_array(gradient, f"the gradient of {variable._label}"), variable)
    if array.shape != variable.shape:
        raise StructureError(
            f"{name}: the gradient of {variable._label} has shape {array.shape}; expected that of "
            f"the variable, {variable.shape}.{_suggest_variable(array, variable, state)}"
        )
    return array


def _suggest_variable(gradient: Array, variable: Variable, state: State) -> str:
    """Return what may be wrong with a gradient of another shape; empty if nothing is known."""
    if gradient.size == variable._storage.array.size:
        return f" Reshape it: gradient.reshape({variable.shape})."
    variables = (target.variable for target in state.targets.values())
    labels = [candidate._label for candidate in variables if candidate.shape == gradient.shape]
    if not labels:
        return ""
    return f" {labels[0]} has that shape: give the gradients in the order of the variables."


def _convert_dtype(name: str, array: Array, variable: Variable) -> Array:
    """Return a gradient, or rows of one, in the dtype of the variable."""
    if not (is_bfloat16(array.dtype) or np.can_cast(array.dtype, variable.dtype, "same_kind")):
        raise LeafTypeError(
            f"{name}: the gradient of {variable._label} is {spec_text(array)}, which does not "
            f"convert to {variable.dtype}."
        )
    with np.errstate(
        all="ignore"
    ):  # numbers that overflow become infinite, and the update checks for them
        gradient: Array = array.astype(variable.dtype, copy=False)
    return gradient


def _convert_rows(
    name: str, slices: IndexedSlices, target: Target, optimizer: OptimizerSettings
) -> IndexedSlices | Array:
    """Return rows in the dtype of their variable; a dense gradient, if all elements change."""
    variable = target.variable
    shape, count = slices.values.shape[1:], max(variable.shape[:1], default=0)
    low, high = 0, -1
    if slices.indices.size:
        low, high = int(slices.indices.min()), int(slices.indices.max())
    if not variable.ndim or shape != variable.shape[1:] or low < 0 or high >= count:
        raise StructureError(
            f"{name}: the gradient of {variable._label} of shape {variable.shape} is IndexedSlices "
            f"of rows of shape {shape}, with indices from {low} to {high}; they do not fit."
        )
    values = _convert_dtype(name, slices.values, variable)
    # In a narrow dtype the index of a row, or of its first element, might overflow.
    converted_rows = IndexedSlices(
        values, slices.indices.astype(np.int64, copy=False), variable.shape
    )
    changes_all_rows = optimizer.accumulate > 1 or optimizer.ema is not None
    if changes_all_rows or target.optimizer.rule.measure is not None:
        whole_array: Array = np.asarray(converted_rows)
        return whole_array
    return converted_rows
