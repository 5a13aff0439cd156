"""The rows in the arguments of a model, and its output without rows."""

from __future__ import annotations

import contextlib
import copy
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpistrat import pytree
from mpistrat.errors import ContextError

__all__ = [
    "count_first_rows",
    "create_empty_output",
    "explain_missing_weight",
    "iterate_tensors",
    "watch_output",
]

_OPAQUE_TYPES = (torch.nn.Module, type, types.ModuleType)  # their attributes are not visited
_MODULE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))  # the attributes that every module has
_ADVICE = (
    "\n  Call mpistrat.torch.take_part(model) in place of the model, the loss and its backward "
    "pass where a rank has no rows, or leave out a last batch of few: "
    "mpistrat.torch.batches(..., drop_last=True)."
)


def iterate_tensors(value: Any, visited: dict[int, Any] | None = None) -> Iterator[Any]:
    """Iterate over the tensors in inputs or outputs of a model: trees, mappings, other objects.

    They come in the order in which the program wrote them; `pytree` sorts the keys of mappings.

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
        yield from iterate_tensors(child, visited)


def count_first_rows(*args: Any, **kwargs: Any) -> float:
    """Return the first dimension of the first tensor in the arguments of a model; 1 without any."""
    first_tensor = next((x for x in iterate_tensors([*args, *kwargs.values()]) if x.ndim), None)
    return 1 if first_tensor is None else len(first_tensor)


def explain_missing_weight(rows_of_calls: list[float]) -> ContextError | None:
    """Return an error if the number of rows of a loss is not known; else None.

    Args:
      rows_of_calls: The number of rows of each call of the model in its backward pass.
    """
    if not rows_of_calls:
        return ContextError(
            "gradients came by a backward pass through no output of the model, so it is not known "
            "of how many rows they are the mean. Call the model itself, not a part of it "
            "(model.encoder(x)) or model.forward; add penalties of weights to the loss of the "
            "batch. A transform of torch.func (vmap, grad, jacrev) belongs into the forward of a "
            "module that calls the model: replicate that module."
        )
    if len(set(rows_of_calls)) > 1:
        rows_text = ", ".join(f"{row_count:g}" for row_count in rows_of_calls)
        return ContextError(
            f"this loss comes from calls of the model with {rows_text} rows: they have one weight, "
            "so their numbers of rows have to be equal. Make it one call, call backward() for the "
            "loss of each, or say what a call counts for: replicate(model, rows=lambda x: 1)."
        )
    return None


def watch_output(output: Any, callback: Callable[[], None]) -> bool:
    """Call a function in each backward pass through an output, or through its gradients.

    Args:
      output: The output of a model.
      callback: The function.

    Returns:
      Whether the output has a tensor for a backward pass to come through.
    """

    def hook(gradient: torch.Tensor) -> Any:
        callback()
        if not torch.is_grad_enabled():
            return None
        # create_graph: a pass through a function of this gradient comes here again.
        watched_gradient = gradient + torch.zeros((), dtype=gradient.dtype, requires_grad=True)
        watched_gradient.register_hook(hook)
        return watched_gradient

    watched_tensors = [tensor for tensor in iterate_tensors(output) if tensor.grad_fn is not None]
    for tensor in watched_tensors:
        tensor.register_hook(hook)
    return bool(watched_tensors)


def create_empty_output(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the output of a model for no rows, without running it.

    Backward passes go through the output, and through the values that a call leaves in attributes
    of modules, and bring zeros to the parameters.

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
            runs = [_run_without_contents(model, call_arguments, 0)]
        except Exception:
            # ``x.view(len(x), -1)`` has no answer for no rows. Sizes and counts follow from two.
            runs = [_run_without_contents(model, call_arguments, size) for size in (2, 3)]
        # Inputs may be of another replicated model, whose pass the ranks are in too.
        sources = [
            tensor
            for tensor in (*model.parameters(), *iterate_tensors(call_arguments))
            if tensor.requires_grad
        ]
        empty_tensors = {
            id(tensor): _create_empty_tensor(
                tensor, sources, [_extrapolate_to_0(*size) for size in sizes]
            )
            for (tensor, *_), sizes in _iterate_shapes(runs)
        }
        modules = {id(module): module for module in model.modules()}
        # The copy keeps the structure: a model may return an object of the program's own.
        output = copy.deepcopy(runs[0].output, {**modules, **empty_tensors})
        for leftover, *other_leftovers in zip(*(run.leftovers for run in runs), strict=True):
            if _is_count(leftover.value):
                counts = [leftover.value, *(other.value for other in other_leftovers)]
                leftover.container[leftover.key] = _extrapolate_to_0(*counts)
            else:
                memo = {**modules, **empty_tensors, **leftover.known_objects}
                leftover.container[leftover.key] = copy.deepcopy(leftover.value, memo)
        return output
    except Exception as error:
        raise ContextError(
            "this rank has no rows, and the shape of the model's output is not known "
            f"without running it: {error}{_ADVICE}"
        ) from error


class _Leftover(NamedTuple):
    """A value that a call of a model has left in an attribute of a module.

    Attributes:
      container: The attributes of the module, or the list or mapping in one of them.
      key: The key of the value in it.
      value: A count, or a value with tensors that gradients pass.
      known_objects: The objects that were in a list before, by identity.
    """

    container: Any
    key: Any
    value: Any
    known_objects: dict[int, Any]


class _ModelRun(NamedTuple):
    """A call of a model on tensors without contents.

    Attributes:
      output: The output of the model.
      leftovers: The values that the call has left in attributes of modules.
    """

    output: Any
    leftovers: list[_Leftover]


def _iterate_shapes(runs: list[_ModelRun]) -> Iterator[tuple[tuple[Any, ...], Iterator[Any]]]:
    """Iterate over the tensors in the same positions of the results of calls, and their shapes."""
    numbers = [
        [x for x in pytree.flatten(run.output)[0] if isinstance(x, int | float)] for run in runs
    ]
    if numbers.count(numbers[0]) != len(runs):
        raise ValueError("it returns numbers that depend on the number of rows.")
    tensors_of_runs = [
        iterate_tensors([run.output, [leftover.value for leftover in run.leftovers]])
        for run in runs
    ]
    for tensors in zip(*tensors_of_runs, strict=True):
        yield tensors, zip(*(tensor.shape for tensor in tensors), strict=True)


def _extrapolate_to_0(size_for_2: Any, size_for_3: Any = None) -> Any:
    """Return a size or a count for 0 rows by those for 2 and 3 rows; or the only one."""
    return (
        size_for_2
        if size_for_3 is None or size_for_2 == size_for_3
        else 3 * size_for_2 - 2 * size_for_3
    )


def _is_count(value: object) -> bool:
    """Return whether an attribute is a count, and no flag."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _run_without_contents(model: torch.nn.Module, call_arguments: Any, row_count: int) -> _ModelRun:
    """Call a model on tensors without contents, and restore its attributes.

    Args:
      model: The model.
      call_arguments: Its positional and its keyword arguments.
      row_count: The size in place of sizes of 0 in that call.

    Returns:
      The output, and the values that the call leaves in attributes of modules.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # shapes without contents

    def fake(leaf: Any, row_count: int = 0) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        source_tensor = leaf.detach()
        if row_count and not source_tensor.numel():
            source_tensor = source_tensor.new_empty(
                [size or row_count for size in source_tensor.shape]
            )
        return mode.from_tensor(source_tensor.requires_grad_(leaf.requires_grad))

    args, kwargs = pytree.map(lambda leaf: fake(leaf, row_count), call_arguments)
    with _preserving_attributes(model) as snapshots:
        for module in model.modules():
            for mapping in (module._parameters, module._buffers):
                mapping.update({key: fake(tensor) for key, tensor in mapping.items()})
        with mode:
            output = model(*args, **kwargs)
        leftovers = [
            leftover
            for container, original in snapshots
            for leftover in _iterate_leftovers(container, original)
        ]
    # Tensors that hooks of the program have kept raise an error when they are used.
    setattr(mode, "dispatch", _raise_no_contents)  # noqa: B010
    return _ModelRun(output, leftovers)


def _raise_no_contents(*_: Any) -> Any:
    raise ContextError(
        "this tensor has no contents: it was kept, by a hook perhaps, from a call of the model in "
        f"which this rank had no rows, and did not run it.{_ADVICE}"
    )


def _iterate_leftovers(container: Any, original: Any) -> Iterator[_Leftover]:
    """Iterate over the values that a call has left in attributes of a module, or in a container."""
    if isinstance(container, list):
        is_unchanged = len(container) == len(original) and all(
            map(operator.is_, container, original)
        )
        entries = [] if is_unchanged else [(slice(None), [*container])]
        known_objects = {id(element): element for element in original}
    else:
        entries = [
            (key, value)
            for key, value in container.items()
            if key not in _MODULE_ATTRIBUTES and value is not original.get(key)
        ]
        known_objects = {}
    for key, value in entries:
        if _is_count(value) or any(x.grad_fn is not None for x in iterate_tensors(value)):
            yield _Leftover(container, key, value, known_objects)


def _create_empty_tensor(fake_tensor: torch.Tensor, sources: list[Any], shape: list[int]) -> Any:
    """Return a tensor of a shape without rows in place of one without contents."""
    if not (fake_tensor.is_floating_point() or fake_tensor.is_complex()):
        return torch.zeros(shape, dtype=fake_tensor.dtype)
    return _ConstantOutput.apply(torch.full(shape, float("nan"), dtype=fake_tensor.dtype), *sources)


@contextlib.contextmanager
def _preserving_attributes(model: torch.nn.Module) -> Iterator[list[tuple[Any, Any]]]:
    """Return a context manager that restores the attributes of modules at its end.

    A forward pass without contents leaves values without contents. (torch.func.functional_call does
    not restore the weights of a module that a model has twice.) The value of the context manager is
    a list of pairs: the attributes of a module, or a list or mapping in them, and a copy of it.
    """
    attributes = [vars(module) for module in model.modules()]
    containers = [
        value
        for mapping in attributes
        for key, value in mapping.items()
        if key not in _MODULE_ATTRIBUTES and type(value) in (dict, list)
    ]
    # Parameters, buffers and modules are in mappings of their own.
    inner_mappings = [
        mapping[key] for mapping in attributes for key in ("_parameters", "_buffers", "_modules")
    ]
    snapshots = [
        (container, copy.copy(container))
        for container in (*attributes, *containers, *inner_mappings)
    ]
    try:
        yield snapshots[: len(attributes) + len(containers)]
    finally:
        for container, original in snapshots:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(original)


@final
class _ConstantOutput(torch.autograd.Function):
    """A value that does not depend on other tensors; they get gradients of zeros nevertheless."""

    @staticmethod
    def forward(ctx: Any, constant: Any, *sources: torch.Tensor) -> Any:
        """Return the value."""
        ctx.sources = sources
        return constant

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return zeros that have gradients again."""
        sources = (gradient, *ctx.sources)
        zeros = (
            _ConstantOutput.apply(torch.zeros_like(source), *sources) for source in ctx.sources
        )
        return None, *zeros
