"""The rows that a model is given, and what it gives for none."""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpistrat import nest
from mpistrat.errors import ContextError

__all__ = ["first_rows", "nothing", "tensors_in", "watch", "without_weight"]

_WHOLE = (torch.nn.Module, type, types.ModuleType)  # what is not looked into


def tensors_in(value: Any, seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """Iterate over the tensors in what a model takes or returns: trees, mappings, other objects.

    They come in the order in which the program has written them; of mappings `nest` sorts the keys.

    Args:
      value: What may have tensors inside.
      seen: What was looked into before, by its identity.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    seen = {} if seen is None else seen
    if id(value) in seen:  # again, or inside of itself
        return
    seen[id(value)] = value
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple):
        inside = list(value)
    elif hasattr(value, "__dataclass_fields__"):
        inside = [getattr(value, name, None) for name in value.__dataclass_fields__]
    elif isinstance(value, _WHOLE) or not hasattr(value, "__dict__"):
        inside = [leaf for leaf in nest.flatten(value)[0] if leaf is not value]
    else:
        inside = list(vars(value).values())
    for one in inside:
        yield from tensors_in(one, seen)


def first_rows(*args: Any, **kwargs: Any) -> float:
    """Return the first dimension of the first tensor in the arguments of a model; 1 without any."""
    found = next((x for x in tensors_in([*args, *kwargs.values()]) if x.ndim), None)
    return 1 if found is None else len(found)


def without_weight(calls: list[float]) -> ContextError | None:
    """Return why it is not known of how many rows a loss is the mean; None if it is.

    Args:
      calls: The rows of each call of the model that its backward pass came through.
    """
    if not calls:
        return ContextError(
            "gradients came by a backward pass through no output of the model, so it is not known "
            "of how many rows they are the mean. Call the model itself, not a part of it "
            "(model.encoder(x)) or model.forward; add penalties of weights to the loss of the "
            "batch. A transform of torch.func (vmap, grad, jacrev) belongs into the forward of a "
            "module that calls the model: replicate that module."
        )
    if len(set(calls)) > 1:
        each = ", ".join(f"{rows:g}" for rows in calls)
        return ContextError(
            f"this loss comes from calls of the model with {each} rows: they have one weight, so "
            "their numbers of rows have to be equal. Make it one call, call backward() for the "
            "loss of each, or say what a call counts for: replicate(model, rows=lambda x: 1)."
        )
    return None


def watch(out: Any, came: Callable[[], None]) -> bool:
    """Call a function in each backward pass that comes through an output, or its gradients.

    Args:
      out: What a model returns.
      came: The function.

    Returns:
      Whether there is a tensor in it that a pass may come through.
    """

    def hook(gradient: Any) -> Any:
        came()
        if not torch.is_grad_enabled():
            return None
        # create_graph: a pass through what is made of this gradient comes here again.
        again = gradient + torch.zeros((), dtype=gradient.dtype, requires_grad=True)
        again.register_hook(hook)
        return again

    watched = [one for one in tensors_in(out) if one.grad_fn is not None]
    for one in watched:
        one.register_hook(hook)
    return bool(watched)


def nothing(model: Any, args: Any, kwargs: Any) -> Any:
    """Return what a model would give for no rows, without running it.

    Backward passes go through it to the parameters, and bring them zeros.

    Args:
      model: The model.
      args: What it is called with.
      kwargs: What it is called with by name.

    Raises:
      ContextError: That cannot be told.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # shapes without contents

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return mode.from_tensor(leaf.detach().requires_grad_(leaf.requires_grad))

    try:
        some, named = (nest.map(fake, given) for given in (args, kwargs))
        with _as_it_was(model):
            for module in model.modules():
                for held in (module._parameters, module._buffers):
                    held.update({key: fake(one) for key, one in held.items()})
            with mode:
                out = model(*some, **named)
        # Inputs may be of another replicated model, whose pass the ranks are in too.
        given = [*model.parameters(), *tensors_in([*args, *kwargs.values()])]
        sources = [one for one in given if one.requires_grad]
        made = {id(one): _empty(one, sources) for one in tensors_in(out)}
        kept = {id(module): module for module in model.modules()}
        # Whatever a model returns them in: a record, an object of the program's own.
        return copy.deepcopy(out, {**kept, **made})
    except Exception as error:
        raise ContextError(
            "this rank has no rows, and what the model would give for none is not known "
            f"without running it: {error}\n  Call mpistrat.torch.take_part(model) in place of "
            "the model, the loss and its backward pass where a rank has no rows, or leave out a "
            "last batch of few: mpistrat.torch.batches(..., drop_last=True)."
        ) from error


def _empty(leaf: Any, sources: list[Any]) -> Any:
    """Return a tensor without rows in the place of one without contents."""
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return torch.zeros(leaf.shape, dtype=leaf.dtype)
    return _Constant.apply(torch.full(leaf.shape, float("nan"), dtype=leaf.dtype), *sources)


@contextlib.contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """Return a context manager after which modules have the attributes that they had before.

    What a forward pass without contents leaves in them has none. (torch.func.functional_call does
    not put back the weights of a module that a model has twice.)
    """
    held = [d for m in model.modules() for d in (vars(m), m._parameters, m._buffers, m._modules)]
    before = [dict(d) for d in held]
    try:
        yield
    finally:
        for now, then in zip(held, before, strict=True):
            now.clear()
            now.update(then)


@final
class _Constant(torch.autograd.Function):
    """A value that does not depend on other tensors, which gradients pass to all the same."""

    @staticmethod
    def forward(ctx: Any, value: Any, *sources: Any) -> Any:
        """Return the value."""
        ctx.sources = sources
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Return zeros, of which there are gradients again."""
        sources = (gradient, *ctx.sources)
        zeros = (_Constant.apply(torch.zeros_like(one), *sources) for one in ctx.sources)
        return None, *zeros
