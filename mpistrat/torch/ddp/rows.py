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

from mpistrat import pytree
from mpistrat.errors import ContextError

__all__ = ["create_empty_output", "first_rows", "tensors_in", "watch", "without_weight"]

_OPAQUE_TYPES = (torch.nn.Module, type, types.ModuleType)  # their attributes are not visited
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))  # the attributes that every module has
_ADVICE = (
    "\n  Call mpistrat.torch.take_part(model) in place of the model, the loss and its backward "
    "pass where a rank has no rows, or leave out a last batch of few: "
    "mpistrat.torch.batches(..., drop_last=True)."
)


def tensors_in(value: Any, visited: dict[int, Any] | None = None) -> Iterator[Any]:
    """Iterate over the tensors in inputs or outputs of a model: trees, mappings, other objects.

    They come in the order in which the program has written them; `nest` sorts the keys of mappings.

    Args:
      value: The value that may have tensors inside.
      visited: The objects that were visited before, by their identity.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    visited = {} if visited is None else visited
    if id(value) in visited:  # again, or inside of itself
        return
    visited[id(value)] = value
    if isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, list | tuple):
        children = list(value)
    elif hasattr(value, "__dataclass_fields__"):
        children = [getattr(value, name, None) for name in value.__dataclass_fields__]
    elif isinstance(value, _OPAQUE_TYPES) or not hasattr(value, "__dict__"):
        children = [leaf for leaf in pytree.flatten(value)[0] if leaf is not value]
    else:
        children = list(vars(value).values())
    for child in children:
        yield from tensors_in(child, visited)


def first_rows(*args: Any, **kwargs: Any) -> float:
    """Return the first dimension of the first tensor in the arguments of a model; 1 without any."""
    first_tensor = next((x for x in tensors_in([*args, *kwargs.values()]) if x.ndim), None)
    return 1 if first_tensor is None else len(first_tensor)


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
        rows_text = ", ".join(f"{rows:g}" for rows in calls)
        return ContextError(
            f"this loss comes from calls of the model with {rows_text} rows: they have one weight, "
            "so their numbers of rows have to be equal. Make it one call, call backward() for the "
            "loss of each, or say what a call counts for: replicate(model, rows=lambda x: 1)."
        )
    return None


def watch(out: Any, callback: Callable[[], None]) -> bool:
    """Call a function in each backward pass that comes through an output, or its gradients.

    Args:
      out: The output of a model.
      callback: The function.

    Returns:
      Whether there is a tensor in it that a pass may come through.
    """

    def hook(gradient: Any) -> Any:
        callback()
        if not torch.is_grad_enabled():
            return None
        # create_graph: a pass through what is made of this gradient comes here again.
        watched_gradient = gradient + torch.zeros((), dtype=gradient.dtype, requires_grad=True)
        watched_gradient.register_hook(hook)
        return watched_gradient

    watched = [tensor for tensor in tensors_in(out) if tensor.grad_fn is not None]
    for tensor in watched:
        tensor.register_hook(hook)
    return bool(watched)


def create_empty_output(model: Any, args: Any, kwargs: Any) -> Any:
    """Return what a model would give for no rows, without running it.

    Backward passes go through it to the parameters, and bring them zeros; and so through what such
    a call leaves in attributes of modules.

    Args:
      model: The model.
      args: Its positional arguments.
      kwargs: Its keyword arguments.

    Raises:
      ContextError: The shape of its output is not known.
    """
    call_arguments = args, kwargs
    try:
        try:
            runs = [_imagined(model, call_arguments, 0)]
        except Exception:
            # ``x.view(len(x), -1)`` has no answer for no rows. Sizes and counts follow from two.
            runs = [_imagined(model, call_arguments, 2), _imagined(model, call_arguments, 3)]
        # Inputs may be of another replicated model, whose pass the ranks are in too.
        sources = [
            tensor
            for tensor in (*model.parameters(), *tensors_in(call_arguments))
            if tensor.requires_grad
        ]
        empty_tensors = {
            id(tensor): _empty(tensor, sources, [_of_none(*size) for size in sizes])
            for (tensor, *_), sizes in _sizes(runs)
        }
        modules = {id(module): module for module in model.modules()}
        # Whatever a model returns them in: a record, an object of the program's own.
        out = copy.deepcopy(runs[0][0], {**modules, **empty_tensors})
        for (place, key, value, known_objects), *other_leftovers in zip(
            *(left for _, left in runs), strict=True
        ):
            if _counts(value):
                place[key] = _of_none(value, *(other[2] for other in other_leftovers))
            else:
                place[key] = copy.deepcopy(value, {**modules, **empty_tensors, **known_objects})
        return out
    except Exception as error:
        raise ContextError(
            "this rank has no rows, and the shape of the model's output is not known "
            f"without running it: {error}{_ADVICE}"
        ) from error


def _sizes(runs: list[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Iterate over the tensors that calls gave or left in the same places, and their shapes."""
    numbers = [[x for x in pytree.flatten(out)[0] if isinstance(x, int | float)] for out, _ in runs]
    if numbers.count(numbers[0]) != len(runs):
        raise ValueError("it returns numbers that depend on the number of rows.")
    tensors_of_runs = [tensors_in([out, [value for _, _, value, _ in left]]) for out, left in runs]
    for ones in zip(*tensors_of_runs, strict=True):
        yield ones, zip(*(tensor.shape for tensor in ones), strict=True)


def _of_none(two: Any, three: Any = None) -> Any:
    """Return what a size or a count is for no rows, if it is this for 2, and that for 3."""
    return two if three is None or two == three else 3 * two - 2 * three


def _counts(value: Any) -> bool:
    """Tell whether an attribute is a count, and no flag."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _imagined(model: Any, call_arguments: Any, rows: int) -> tuple[Any, list[Any]]:
    """Call a model on tensors without contents, and leave it as it was.

    Args:
      model: The model.
      call_arguments: Its positional and its keyword arguments.
      rows: The size in place of sizes of 0 in that call.

    Returns:
      Its output, and the values that the call leaves in attributes of modules: counts, and tensors
      that gradients pass. Each has its place, the key there, the value, and the objects before.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # shapes without contents

    def fake(leaf: Any, rows: int = 0) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        like = leaf.detach()
        if rows and not like.numel():
            like = like.new_empty([size or rows for size in like.shape])
        return mode.from_tensor(like.requires_grad_(leaf.requires_grad))

    args, kwargs = pytree.map(lambda leaf: fake(leaf, rows), call_arguments)
    with _preserving_attributes(model) as snapshots:
        for module in model.modules():
            for mapping in (module._parameters, module._buffers):
                mapping.update({key: fake(tensor) for key, tensor in mapping.items()})
        with mode:
            out = model(*args, **kwargs)
        left = [
            leftover for container, original in snapshots for leftover in _left(container, original)
        ]
    # What hooks of the program have kept of such a call is not found; so whoever uses it is told.
    setattr(mode, "dispatch", _without_contents)  # noqa: B010
    return out, left


def _without_contents(*_: Any) -> Any:
    raise ContextError(
        "this tensor has no contents: it was kept, by a hook perhaps, from a call of the model in "
        f"which this rank had no rows, and did not run it.{_ADVICE}"
    )


def _left(container: Any, original: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Iterate over the values that a call has left in attributes of a module, or in a container."""
    if isinstance(container, list):
        same = len(container) == len(original) and all(map(operator.is_, container, original))
        entries = [] if same else [(slice(None), [*container])]
        known_objects = {id(element): element for element in original}
    else:
        entries = [
            (k, x)
            for k, x in container.items()
            if k not in _MODULE_ATTRIBUTES and x is not original.get(k)
        ]
        known_objects = {}
    for key, value in entries:
        if _counts(value) or any(x.grad_fn is not None for x in tensors_in(value)):
            yield container, key, value, known_objects


def _empty(leaf: Any, sources: list[Any], shape: list[int]) -> Any:
    """Return a tensor of a shape without rows in place of one without contents."""
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return torch.zeros(shape, dtype=leaf.dtype)
    return _Constant.apply(torch.full(shape, float("nan"), dtype=leaf.dtype), *sources)


@contextlib.contextmanager
def _preserving_attributes(model: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Return a context manager after which modules have the attributes that they had before.

    A forward pass without contents leaves values without contents. (torch.func.functional_call does
    not put back the weights of a module that a model has twice.) It gives the attributes of each
    module, the lists and mappings in them, and a copy of each.
    """
    attributes = [vars(module) for module in model.modules()]
    containers = [
        x
        for d in attributes
        for k, x in d.items()
        if k not in _MODULE_ATTRIBUTES and type(x) in (dict, list)
    ]
    # Of each module its own attributes, then the parameters, buffers and modules.
    inner = [d[key] for d in attributes for key in ("_parameters", "_buffers", "_modules")]
    snapshots = [
        (container, copy.copy(container)) for container in (*attributes, *containers, *inner)
    ]
    try:
        yield snapshots[: len(attributes) + len(containers)]
    finally:
        for container, original in snapshots:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(original)


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
        zeros = (_Constant.apply(torch.zeros_like(source), *sources) for source in ctx.sources)
        return None, *zeros
