"""A look at each step of ``torch.optim``: what it takes of a replicated model is all ranks'.

Gradients are this rank's own before a backward pass has ended, after passes in `no_sync`, while a
`FusedOptimizer` updates, and where the program has made them itself. A step with those lets the
weights of the ranks come apart without a word, so each step is looked at before it is made.

Comparison of hyper-parameters of ``torch.optim``: what steps go by is the same on all ranks.

A rank that has another learning rate would train other weights without a word. The digest of all
numbers in ``param_groups`` is sent with the handshake that reduces gradients; a step by numbers
that have changed since then, or of an optimizer that is new, has a handshake of its own.
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
from mpistrat.lockstep.handshake import Lockstep, digest_of
from mpistrat.strategy.all_reduce import all_reduce_tree
from mpistrat.strategy.shared_state import check_same

__all__ = [
    "HyperParameters",
    "StepComparison",
    "check_all_alike",
    "watch_parameters",
]


# By the identity of a parameter: whose it is, and which.
_OWNERS: dict[int, tuple[weakref.ref[Any], int]] = {}

_gradient = operator.attrgetter("grad")


def watch_parameters(gradients: Any) -> None:
    """Look at steps of ``torch.optim`` that take parameters of a model, from now on.

    Args:
      gradients: Those of the model.
    """
    _register()
    places = list(map(id, gradients.params))
    gradients_ref = weakref.ref(gradients, functools.partial(_forget, places))
    _OWNERS.update({place: (gradients_ref, i) for i, place in enumerate(places)})


def _forget(places: list[int], gradients_ref: weakref.ref[Any]) -> None:
    for place in places:
        if _OWNERS.get(place, (None, 0))[0] is gradients_ref:
            del _OWNERS[place]


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_prepare_step)


def check_all_alike(group: Any, tree: Any, advice: str) -> None:
    """Raise DivergenceError with advice, on all ranks, unless all have the same. Collective."""
    try:
        check_same(group, tree)
    except DivergenceError as error:
        raise DivergenceError(f"{str(error).partition(chr(10))[0]}\n  {advice}") from None


def _owner(p: Any) -> tuple[Any, int]:
    """Return the gradients of the model that has a parameter, and its place; None without one."""
    gradients_ref, i = _OWNERS.get(id(p), (None, 0))
    gradients = None if gradients_ref is None else gradients_ref()
    return (gradients, i) if gradients is not None and gradients.params[i] is p else (None, 0)


def _prepare_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Look at a step; give it a closure that does, if it has one."""
    if getattr(optimizer, "reduces_gradients", False):  # FusedOptimizer looks itself
        return None
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if _OWNERS.keys().isdisjoint(map(id, params)):
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _look(optimizer, params)
        return None
    wrapped_closure = functools.partial(_closed, closure, optimizer, params)
    return (optimizer, wrapped_closure), {
        name: x for name, x in kwargs.items() if name != "closure"
    }


def _closed(closure: Callable[[], Any], optimizer: Optimizer, params: list[Any]) -> Any:
    """Call the closure of a step; LBFGS goes by its loss, so that is all ranks' mean."""
    loss = closure()
    gradients = _look(optimizer, params)
    if gradients is None or not isinstance(optimizer, torch.optim.LBFGS):
        return loss
    local_loss = np.array(float(loss.detach()))
    mean = all_reduce_tree(
        gradients.strategy._replicas, "MEAN", local_loss, gradients.reduced_rows, None
    )
    return torch.tensor(float(mean), dtype=loss.dtype)


def _unreduced(gradients: Any) -> str:
    """Return why gradients are this rank's own, and what to do; "" if they are all ranks'."""
    if gradients.deferred:
        return (
            "a FusedOptimizer updates this model, by its own step(). For one of torch.optim take "
            "a copy, model = mpistrat.torch.replicate(copy.deepcopy(model), strategy)."
        )
    if gradients.in_pass():
        return "the ranks' mean is made when the backward pass ends. Call step() after it."
    if gradients.passes and not gradients.dropped():
        return (
            "it was added up in no_sync. Make the last backward pass before step() outside of "
            "mpistrat.torch.no_sync(model)."
        )
    return ""


def _same(objects: Iterable[Any], other_objects: Sequence[Any]) -> bool:
    """Tell whether both have the same objects in the same order."""
    object_list = [*objects]
    return len(object_list) == len(other_objects) and all(
        map(operator.is_, object_list, other_objects)
    )


def _look(optimizer: Optimizer, params: list[Any]) -> Any:
    """Raise, on all ranks, if a step would take gradients of this rank; return their owner."""
    first, last, foreign_gradients = None, None, []
    owner, _ = _owner(params[0])
    if (
        owner is not None
        and _same(params, owner.params)
        and _same(map(_gradient, params), owner.views)
    ):
        params = params[:1]  # what holds for one of these, holds for all
    for p in params:
        if p.grad is None:
            continue
        owner, i = _owner(p)
        if owner is not None and owner is not last:
            reason, last = _unreduced(owner), owner
            if reason:
                name = type(optimizer).__name__
                text = (
                    f"{name}.step() would update {owner.names[i]!r} by a gradient that is this "
                    f"rank's own: {reason}"
                )
                owner.strategy._replicas.lockstep.refuse(f"{name}.step", ContextError(text))
            first = first or owner
        if owner is None or p.grad is not owner.views[i]:
            foreign_gradients.append((owner, i, p))
    if first is not None and foreign_gradients and first.strategy.num_replicas_in_sync > 1:
        first.stepped += 1
        owner, i, p = foreign_gradients[first.stepped % len(foreign_gradients)]
        name = f"of shape {tuple(p.shape)}" if owner is None else f"of {owner.names[i]}"
        check_all_alike(
            first.strategy._replicas,
            {f"gradient {name}": p.grad.detach()},
            "No backward pass of a replicated model has made it, so it is each rank's own: of a "
            "parameter beside the model (replicate what has both), or set by the program "
            "(strategy.all_reduce('MEAN', gradients, weight=rows) first).",
        )
    if first is not None and first.strategy.num_replicas_in_sync > 1:
        first.steps.check(optimizer)
    return first


_MAX_OPTIMIZERS = 8  # optimizers of one model that are remembered
_values_of, _version = operator.methodcaller("values"), operator.attrgetter("_version")


@final
class HyperParameters:
    """The numbers in the groups of one optimizer, as one handshake compares them.

    It has the groups and not the optimizer, which ends at another time on each rank.

    Args:
      optimizer: The optimizer.
      scheduled: The numbers of groups whose learning rate is compared elsewhere.

    Attributes:
      groups: Its ``param_groups``.
      digest: That of the text.
    """

    def __init__(self, optimizer: Optimizer, scheduled: Collection[int] = ()):
        """Read the numbers."""
        self.groups, self._scheduled = optimizer.param_groups, scheduled
        self._kind = type(optimizer).__name__
        self._text = ""
        self._read(self._values())

    def _values(self) -> list[Any]:
        return [*itertools.chain.from_iterable(map(_values_of, self.groups))]

    def _read(self, values: list[Any]) -> None:
        self._last_values = values
        self._tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self._versions = [*map(_version, self._tensors)]
        texts = [
            f"{text} (group {i})"
            for i, group in enumerate(self.groups)
            for text in _number_texts(
                group, {"params", "lr"} if i in self._scheduled else {"params"}
            )
        ]
        self._text = f"{self._kind}.param_groups: {', '.join(texts)}"
        self.digest = digest_of(self._text)

    def refresh(self) -> bool:
        """Read the groups again; tell whether one has other values, of whatever kind."""
        # Each step asks, so this goes over all values in built-in functions.
        values = self._values()
        same = len(values) == len(self._last_values) and all(
            map(operator.is_, values, self._last_values)
        )
        if same and [*map(_version, self._tensors)] == self._versions:
            return False
        self._read(values)
        return True

    def keep(self) -> None:
        """Take the values for those that have been read: a learning rate that is not compared."""
        self._last_values = self._values()

    def text(self) -> str:
        """Return the numbers, for the error of a handshake."""
        return self._text

    def undo(self) -> None:
        """Do nothing: no weight has been updated by them."""


def _number_texts(group: dict[str, Any], skipped_names: set[str]) -> Iterator[str]:
    for name, value in group.items():
        if name in skipped_names:
            continue
        is_sequence = isinstance(value, tuple | list)
        texts = [*map(_number_text, value if is_sequence else [value])]
        if texts and all(texts):
            names = [f"{name}[{i}]" for i in range(len(texts))] if is_sequence else [name]
            yield from map("=".join, zip(names, texts, strict=True))


def _number_text(value: Any) -> str:
    """Return a number, or what a tensor of one element holds, as text; "" of anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float):
        return repr(float(value))  # also of NumPy's
    return repr(value) if isinstance(value, int) else ""


@final
class StepComparison:
    """The optimizers that update one replicated model, and whether ranks step by the same numbers.

    Args:
      lockstep: Compares.
    """

    def __init__(self, lockstep: Lockstep):
        """Know of no optimizer."""
        self._lockstep = lockstep
        self._hyperparameters: list[HyperParameters] = []

    def ride(self) -> None:
        """Compare the numbers of all optimizers by the next handshake, which reduces gradients."""
        for hyperparameters in self._hyperparameters:
            hyperparameters.refresh()
            self._lockstep.defer(hyperparameters)

    def check(self, optimizer: Optimizer) -> None:
        """Raise LockstepError, on all ranks, if an optimizer would step by other numbers there.

        Collective for a new optimizer, and if numbers have changed since `ride`.
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
        self._lockstep.defer(hyperparameters)
        self._lockstep.handshake(f"{type(optimizer).__name__}.step")
