"""The rows that a model is given, and what it gives for none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpistrat import nest
from mpistrat.errors import ContextError

__all__ = ["first_rows", "nothing", "tensors_in", "without_weight"]


def tensors_in(value: Any) -> Iterator[Any]:
    """Iterate over the tensors in what a model takes or returns: trees, mappings, records.

    They come in the order in which the program has written them; of mappings `nest` sorts the keys.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple):
        inside = list(value)
    elif hasattr(value, "__dataclass_fields__"):
        inside = list(vars(value).values())
    else:
        inside = [leaf for leaf in nest.flatten(value)[0] if leaf is not value]
    for one in inside:
        yield from tensors_in(one)


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
            "batch."
        )
    if len(set(calls)) > 1:
        each = ", ".join(f"{rows:g}" for rows in calls)
        return ContextError(
            f"this loss comes from calls of the model with {each} rows: they have one weight, so "
            "their numbers of rows have to be equal. Make it one call, or call backward() for the "
            "loss of each."
        )
    return None


def nothing(model: Any, args: Any, kwargs: Any, came: Callable[[Any], None]) -> Any:
    """Return what a model would give for no rows, without running it.

    Args:
      model: The model.
      args: What it is called with.
      kwargs: What it is called with by name.
      came: Is called in each backward pass that would give parameters gradients: not in
        ``torch.autograd.grad``.

    Raises:
      ContextError: That cannot be told.
    """
    pairs = [*model.named_parameters(), *model.named_buffers()]
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # shapes without contents

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return mode.from_tensor(leaf.detach().requires_grad_(leaf.requires_grad))

    try:
        mine = {name: fake(one) for name, one in pairs}
        some = [nest.map(fake, given) for given in (args, kwargs)]
        with mode:
            out = torch.func.functional_call(model, mine, *some)
    except Exception as error:
        raise ContextError(
            "this rank has no rows, and what the model would give for none is not known "
            f"without running it: {error}\n  Call mpistrat.torch.take_part(model) in place of "
            "the model, the loss and its backward pass where a rank has no rows, or leave out a "
            "last batch of few: mpistrat.torch.batches(..., drop_last=True)."
        ) from error
    anchor = torch.zeros((), requires_grad=True)
    anchor.register_post_accumulate_grad_hook(came)
    for x in tensors_in([*args, *kwargs.values()]):
        if x.requires_grad:  # perhaps of another replicated model, whose pass the ranks are in too
            anchor = anchor + x.sum().real.to(anchor.dtype)
    return nest.map(functools.partial(_empty, anchor), out)


def _empty(anchor: Any, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return torch.zeros(leaf.shape, dtype=leaf.dtype)
    nothing = torch.full(leaf.shape, float("nan"), dtype=leaf.dtype)
    return nothing + anchor.to(leaf.dtype)
