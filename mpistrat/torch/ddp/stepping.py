"""Checks before each step of ``torch.optim``: all ranks step by the same gradients and numbers.

Gradients are this rank's own before a backward pass has ended, after passes in `no_sync`, while a
`FusedOptimizer` updates, and where the program has made them itself. A step by those would let the
weights of the ranks drift apart without an error. So a hook checks the gradients before each step
of an optimizer that has parameters of a replicated model.

A rank with another learning rate would train other weights without an error, too. The digest of all
numbers in ``param_groups`` (`HyperParameters`) is sent with the handshake that reduces gradients. A
step by numbers that have changed since then, or by a new optimizer, has a handshake of its own.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from mpistrat.errors import ContextError, DivergenceError
from mpistrat.lockstep.handshake import Lockstep, digest_call
from mpistrat.strategy.all_reduce import all_reduce_tree
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.strategy.shared_state import check_same

__all__ = [
    "HyperParameters",
    "StepComparison",
    "check_same_values",
    "watch_parameters",
]


# By the identity of a parameter: the gradients of its model, and its index there.
_OWNERS: dict[int, tuple[weakref.ref[Any], int]] = {}

_MAX_OPTIMIZERS = 8  # of one model, in `StepComparison`

_get_gradient = operator.attrgetter("grad")
_get_values, _get_version = operator.methodcaller("values"), operator.attrgetter("_version")


def watch_parameters(gradients: Any) -> None:
    """Check steps of ``torch.optim`` with parameters of a model, from now on.

    Args:
      gradients: The gradients of the model.
    """
    _register_hook()
    parameter_ids = list(map(id, gradients.params))
    gradients_ref = weakref.ref(gradients, functools.partial(_forget_parameters, parameter_ids))
    _OWNERS.update(
        {parameter_id: (gradients_ref, i) for i, parameter_id in enumerate(parameter_ids)}
    )


def _forget_parameters(parameter_ids: list[int], gradients_ref: weakref.ref[Any]) -> None:
    for parameter_id in parameter_ids:
        if _OWNERS.get(parameter_id, (None, 0))[0] is gradients_ref:
            del _OWNERS[parameter_id]


@functools.cache
def _register_hook() -> None:
    register_optimizer_step_pre_hook(_prepare_step)


def check_same_values(replicas: ReplicaGroup, tree: Any, advice: str) -> None:
    """Raise DivergenceError with advice, on all ranks, if values differ. Collective."""
    try:
        check_same(replicas, tree)
    except DivergenceError as error:
        raise DivergenceError(f"{str(error).partition(chr(10))[0]}\n  {advice}") from None


def _find_owner(p: torch.Tensor) -> tuple[Any, int]:
    """Return the gradients of the model that has a parameter, and its index; None without one."""
    gradients_ref, i = _OWNERS.get(id(p), (None, 0))
    gradients = None if gradients_ref is None else gradients_ref()
    return (gradients, i) if gradients is not None and gradients.params[i] is p else (None, 0)


def _prepare_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check a step, or wrap its closure so that it does."""
    if getattr(optimizer, "_reduces_gradients", False):  # FusedOptimizer checks its steps itself
        return None
    params = [p for group_options in optimizer.param_groups for p in group_options["params"]]
    if _OWNERS.keys().isdisjoint(map(id, params)):
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _check_gradients(optimizer, params)
        return None
    wrapped_closure = functools.partial(_call_closure, closure, optimizer, params)
    return (optimizer, wrapped_closure), {
        name: x for name, x in kwargs.items() if name != "closure"
    }


def _call_closure(closure: Callable[[], Any], optimizer: Optimizer, params: list[Any]) -> Any:
    """Return the loss of a closure; for LBFGS, which steps by it, the mean of all ranks."""
    loss = closure()
    gradients = _check_gradients(optimizer, params)
    if gradients is None or not isinstance(optimizer, torch.optim.LBFGS):
        return loss
    local_loss = np.array(float(loss.detach()))
    mean = all_reduce_tree(
        gradients.strategy._replicas, "MEAN", local_loss, gradients.reduced_rows, None
    )
    return torch.tensor(float(mean), dtype=loss.dtype)


def _explain_unreduced(gradients: Any) -> str:
    """Return why gradients are this rank's own, and the remedy; "" if they are reduced."""
    if gradients.is_reduction_deferred:
        return (
            "a FusedOptimizer updates this model, by its own step(). For one of torch.optim take "
            "a copy, model = mpistrat.torch.replicate(copy.deepcopy(model), strategy)."
        )
    if gradients.is_in_pass():
        return "the ranks' mean is made when the backward pass ends. Call step() after it."
    if gradients.pass_count and not gradients.has_dropped_gradients():
        return (
            "it was added up in no_sync. Make the last backward pass before step() outside of "
            "mpistrat.torch.no_sync(model)."
        )
    return ""


def _are_same_objects(objects: Iterable[Any], other_objects: Sequence[Any]) -> bool:
    """Return whether both have the same objects in the same order."""
    object_list = [*objects]
    return len(object_list) == len(other_objects) and all(
        map(operator.is_, object_list, other_objects)
    )


def _check_gradients(optimizer: Optimizer, params: list[Any]) -> Any:
    """Raise, on all ranks, if a step would take gradients of this rank; return their owner."""
    first_owner, last_owner, foreign_gradients = None, None, []
    owner, _ = _find_owner(params[0])
    if (
        owner is not None
        and _are_same_objects(params, owner.params)
        and _are_same_objects(map(_get_gradient, params), owner.views)
    ):
        params = params[:1]  # one of these is enough
    for p in params:
        if p.grad is None:
            continue
        owner, index = _find_owner(p)
        if owner is not None and owner is not last_owner:
            reason, last_owner = _explain_unreduced(owner), owner
            if reason:
                _refuse_step(optimizer, owner, index, reason)
            first_owner = first_owner or owner
        if owner is None or p.grad is not owner.views[index]:
            foreign_gradients.append((owner, index, p))
    if first_owner is not None and first_owner.strategy.num_replicas_in_sync > 1:
        if foreign_gradients:
            _compare_foreign_gradient(first_owner, foreign_gradients)
        first_owner.step_comparison.check_optimizer(optimizer)
    return first_owner


def _refuse_step(optimizer: Optimizer, owner: Any, index: int, reason: str) -> None:
    """Raise ContextError, on all ranks, as a gradient is this rank's own."""
    name = type(optimizer).__name__
    message = (
        f"{name}.step() would update {owner.names[index]!r} by a gradient that is this rank's own: "
        f"{reason}"
    )
    owner.strategy._replicas.lockstep.fail_collectively(f"{name}.step", ContextError(message))


def _compare_foreign_gradient(
    first_owner: Any, foreign_gradients: list[tuple[Any, int, torch.Tensor]]
) -> None:
    """Compare one of the gradients that no backward pass has made, another one in each step."""
    first_owner.foreign_step_count += 1
    owner, index, p = foreign_gradients[first_owner.foreign_step_count % len(foreign_gradients)]
    name = f"of shape {tuple(p.shape)}" if owner is None else f"of {owner.names[index]}"
    assert p.grad is not None
    check_same_values(
        first_owner.strategy._replicas,
        {f"gradient {name}": p.grad.detach()},
        "No backward pass of a replicated model has made it, so it is each rank's own: of a "
        "parameter beside the model (replicate what has both), or set by the program "
        "(strategy.all_reduce('MEAN', gradients, weight=rows) first).",
    )


@final
class HyperParameters:
    """The numbers in the groups of one optimizer, which a handshake compares between ranks.

    It keeps the groups and not the optimizer, which ends at another time on each rank.

    Args:
      optimizer: The optimizer.
      scheduled_groups: The numbers of groups whose learning rate is compared elsewhere.

    Attributes:
      groups: Its ``param_groups``.
      digest: The digest of the text.
    """

    def __init__(self, optimizer: Optimizer, scheduled_groups: Collection[int] = ()):
        """Read the numbers."""
        self.groups, self._scheduled_groups = optimizer.param_groups, scheduled_groups
        self._class_name = type(optimizer).__name__
        self._text = ""
        self._record_values(self._list_values())

    def _list_values(self) -> list[Any]:
        return [*itertools.chain.from_iterable(map(_get_values, self.groups))]

    def _record_values(self, values: list[Any]) -> None:
        self._last_values = values
        self._tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self._versions = [*map(_get_version, self._tensors)]
        texts = [
            f"{text} (group {i})"
            for i, group_options in enumerate(self.groups)
            for text in _iterate_number_texts(
                group_options, {"params", "lr"} if i in self._scheduled_groups else {"params"}
            )
        ]
        self._text = f"{self._class_name}.param_groups: {', '.join(texts)}"
        self.digest = digest_call(self._text)

    def refresh(self) -> bool:
        """Read the groups again; return whether a group has other values, numbers or not."""
        # Each step calls this, so it compares all values in built-in functions.
        values = self._list_values()
        is_same = len(values) == len(self._last_values) and all(
            map(operator.is_, values, self._last_values)
        )
        if is_same and [*map(_get_version, self._tensors)] == self._versions:
            return False
        self._record_values(values)
        return True

    def accept_values(self) -> None:
        """Take the current values as read: a learning rate was set that is not compared."""
        self._last_values = self._list_values()

    def text(self) -> str:
        """Return the numbers as text, for the error of a handshake."""
        return self._text

    def undo(self) -> None:
        """Do nothing: no weight has been updated by them."""


def _iterate_number_texts(group_options: dict[str, Any], skipped_names: set[str]) -> Iterator[str]:
    for name, value in group_options.items():
        if name in skipped_names:
            continue
        is_sequence = isinstance(value, tuple | list)
        texts = [*map(_format_number, value if is_sequence else [value])]
        if texts and all(texts):
            names = [f"{name}[{i}]" for i in range(len(texts))] if is_sequence else [name]
            yield from map("=".join, zip(names, texts, strict=True))


def _format_number(value: object) -> str:
    """Return a number, or the element of a tensor of one, as text; "" for another value."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float):
        return repr(float(value))  # also for a float of NumPy
    return repr(value) if isinstance(value, int) else ""


@final
class StepComparison:
    """Compares the numbers of all optimizers of one replicated model between ranks.

    Args:
      lockstep: Makes the handshakes.
    """

    def __init__(self, lockstep: Lockstep):
        """Begin without optimizers."""
        self._lockstep = lockstep
        self._hyperparameters: list[HyperParameters] = []

    def defer_comparison(self) -> None:
        """Compare the numbers of all optimizers by the next handshake, which reduces gradients."""
        for hyperparameters in self._hyperparameters:
            hyperparameters.refresh()
            self._lockstep.defer_write(hyperparameters)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise LockstepError, on all ranks, if an optimizer has other numbers on another rank.

        Collective for a new optimizer, and if numbers have changed since `defer_comparison`.
        """
        groups = optimizer.param_groups
        hyperparameters = next(
            (candidate for candidate in self._hyperparameters if candidate.groups is groups), None
        )
        if hyperparameters is None:
            hyperparameters = HyperParameters(optimizer)
            self._hyperparameters = [*self._hyperparameters[1 - _MAX_OPTIMIZERS :], hyperparameters]
        else:
            earlier_digest = hyperparameters.digest
            if not hyperparameters.refresh() or hyperparameters.digest == earlier_digest:
                return
        self._lockstep.defer_write(hyperparameters)
        self._lockstep.handshake(f"{type(optimizer).__name__}.step")
