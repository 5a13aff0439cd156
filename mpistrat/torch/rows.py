"""The rows that a model is given, and what it gives for none."""

from __future__ import annotations

import contextlib
import copy
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpistrat import nest
from mpistrat.errors import ContextError

__all__ = ["first_rows", "nothing", "tensors_in", "watch", "without_weight"]

_WHOLE = (torch.nn.Module, type, types.ModuleType)  # what is not looked into
_OWN = frozenset(vars(torch.nn.Module()))  # the attributes that every module has
_ADVICE = (
    "\n  Call mpistrat.torch.take_part(model) in place of the model, the loss and its backward "
    "pass where a rank has no rows, or leave out a last batch of few: "
    "mpistrat.torch.batches(..., drop_last=True)."
)


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

    Backward passes go through it to the parameters, and bring them zeros; and so through what such
    a call leaves in attributes of modules.

    Args:
      model: The model.
      args: What it is called with.
      kwargs: What it is called with by name.

    Raises:
      ContextError: That cannot be told.
    """
    given = args, kwargs
    try:
        try:
            runs = [_imagined(model, given, 0)]
        except Exception:
            # ``x.view(len(x), -1)`` has no answer for no rows. Sizes and counts follow from two.
            runs = [_imagined(model, given, 2), _imagined(model, given, 3)]
        # Inputs may be of another replicated model, whose pass the ranks are in too.
        sources = [one for one in (*model.parameters(), *tensors_in(given)) if one.requires_grad]
        made = {
            id(one): _empty(one, sources, [_of_none(*size) for size in sizes])
            for (one, *_), sizes in _sizes(runs)
        }
        kept = {id(module): module for module in model.modules()}
        # Whatever a model returns them in: a record, an object of the program's own.
        out = copy.deepcopy(runs[0][0], {**kept, **made})
        for (place, key, value, known), *more in zip(*(left for _, left in runs), strict=True):
            if _counts(value):
                place[key] = _of_none(value, *(other[2] for other in more))
            else:
                place[key] = copy.deepcopy(value, {**kept, **made, **known})
        return out
    except Exception as error:
        raise ContextError(
            "this rank has no rows, and the shape of the model's output is not known "
            f"without running it: {error}{_ADVICE}"
        ) from error


def _sizes(runs: list[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Iterate over the tensors that calls gave or left in the same places, and their shapes."""
    numbers = [[x for x in nest.flatten(out)[0] if isinstance(x, int | float)] for out, _ in runs]
    if numbers.count(numbers[0]) != len(runs):
        raise ValueError("it returns numbers that depend on the number of rows.")
    found = [tensors_in([out, [value for _, _, value, _ in left]]) for out, left in runs]
    for ones in zip(*found, strict=True):
        yield ones, zip(*(one.shape for one in ones), strict=True)


def _of_none(two: Any, three: Any = None) -> Any:
    """Return what a size or a count is for no rows, if it is this for 2, and that for 3."""
    return two if three is None or two == three else 3 * two - 2 * three


def _counts(value: Any) -> bool:
    """Tell whether an attribute is a count, and no flag."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _imagined(model: Any, given: Any, rows: int) -> tuple[Any, list[Any]]:
    """Call a model on tensors without contents, and leave it as it was.

    Args:
      model: The model.
      given: What it is called with, and by name.
      rows: What sizes of 0 are in that call.

    Returns:
      What it gives, and what it leaves in attributes of modules that outlasts it: counts, and what
      gradients pass. Of each the place, the key there, the value, and what was known before.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # shapes without contents

    def fake(leaf: Any, rows: int = 0) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        like = leaf.detach()
        if rows and not like.numel():
            like = like.new_empty([size or rows for size in like.shape])
        return mode.from_tensor(like.requires_grad_(leaf.requires_grad))

    args, kwargs = nest.map(lambda leaf: fake(leaf, rows), given)
    with _as_it_was(model) as held:
        for module in model.modules():
            for inside in (module._parameters, module._buffers):
                inside.update({key: fake(one) for key, one in inside.items()})
        with mode:
            out = model(*args, **kwargs)
        left = [one for now, then in held for one in _left(now, then)]
    # What hooks of the program have kept of such a call is not found; so whoever uses it is told.
    setattr(mode, "dispatch", _without_contents)  # noqa: B010
    return out, left


def _without_contents(*_: Any) -> Any:
    raise ContextError(
        "this tensor has no contents: it was kept, by a hook perhaps, from a call of the model in "
        f"which this rank had no rows, and did not run it.{_ADVICE}"
    )


def _left(now: Any, then: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Iterate over what a call has left in the attributes of a module, or in a list or mapping."""
    if isinstance(now, list):
        same = len(now) == len(then) and all(map(operator.is_, now, then))
        found = [] if same else [(slice(None), [*now])]
        known = {id(one): one for one in then}
    else:
        found = [(k, x) for k, x in now.items() if k not in _OWN and x is not then.get(k)]
        known = {}
    for key, value in found:
        if _counts(value) or any(x.grad_fn is not None for x in tensors_in(value)):
            yield now, key, value, known


def _empty(leaf: Any, sources: list[Any], shape: list[int]) -> Any:
    """Return a tensor of a shape without rows in place of one without contents."""
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return torch.zeros(shape, dtype=leaf.dtype)
    return _Constant.apply(torch.full(shape, float("nan"), dtype=leaf.dtype), *sources)


@contextlib.contextmanager
def _as_it_was(model: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Return a context manager after which modules have the attributes that they had before.

    What a forward pass without contents leaves in them has none. (torch.func.functional_call does
    not put back the weights of a module that a model has twice.) It gives those of each module,
    lists and mappings in them, and what all these held.
    """
    own = [vars(module) for module in model.modules()]
    inside = [x for d in own for k, x in d.items() if k not in _OWN and type(x) in (dict, list)]
    # Of each module its own attributes, then the parameters, buffers and modules.
    inner = [d[key] for d in own for key in ("_parameters", "_buffers", "_modules")]
    before = [(now, copy.copy(now)) for now in (*own, *inside, *inner)]
    try:
        yield before[: len(own) + len(inside)]
    finally:
        for now, then in before:
            now.clear()
            (now.extend if isinstance(now, list) else now.update)(then)


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
