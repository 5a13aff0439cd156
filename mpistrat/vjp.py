"""Vector-Jacobian products of collectives, for those who write backward passes by hand.

Each function does what the method of `ReplicaContext` with its name does, and also returns the
function that takes a gradient back: given the gradient of every replica's loss by its own result,
it returns the gradient of the *sum of all replicas' losses* by this replica's value. Where a
replica's own gradient is wanted, of a loss that is the same on all, divide by the number of
replicas, or let one replica only bring a gradient.

The gradient by the value of replica i is, of

- an all-reduce, SUM: the sum of the gradients of all replicas;
- an all-reduce, MEAN: their mean;
- an all-reduce, MEAN with weights w: their sum, times ``w_i / sum(w)``; 0 if ``w_i`` is 0;
- an all-gather: the part of their sum at the position of replica i's value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import Array, as_array, is_bfloat16, is_inexact, is_scalar, label, spec_text
from mpistrat.errors import ContextError, LeafTypeError, StructureError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.strategy.replica_context import ReplicaContext, get_replica_context
from mpistrat.variables.indexed_slices import IndexedSlices
from mpistrat.variables.variable import Variable

__all__ = ["all_gather", "all_reduce"]

Pull = Callable[[Any], Any]


def all_reduce(
    reduce_op: ReduceOp | str, value: object, *, weight: float | None = None
) -> tuple[Any, Pull]:
    """Reduce the values of all replicas, and return the result and how gradients come back.

    Collective: every replica calls it, and every replica calls what it returns as often.

    Args:
      reduce_op: ``"SUM"`` or ``"MEAN"``.
      value: Tree of floating-point or complex arrays or numbers.
      weight: As in `ReplicaContext.all_reduce`. It is a constant: there is no gradient by it.

    Returns:
      The result, and ``pull``: ``pull(gradient)`` takes a tree of the shapes of the result and
      returns one of the shapes and dtypes of the value.

    Raises:
      ContextError: This is not replica code, or ``pull`` is called after its run.
      LeafTypeError: A leaf has no gradient: integers, `IndexedSlices`.
      ValueError: Another operation, or a gradient of other structure or shapes.

    Cost: an all-reduce; each ``pull`` is another one of the same size.
    Like: the gradient of ``tf.distribute.ReplicaContext.all_reduce``.

    Example:
      >>> result, pull = all_reduce("SUM", np.array([1.0, 2.0]))
      >>> pull(2 * result)
      array([2., 4.])
    """
    ctx = _require_replica_context("all_reduce")
    with ctx.strategy._replicas.lockstep.validating_collectively("vjp.all_reduce"):
        op = ReduceOp.parse(reduce_op)
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ValueError(f"vjp.all_reduce is for SUM and MEAN, not for {op.value}.")
        _differentiable_shapes(value)
    result = ctx.all_reduce(op, value, weight=weight)
    likes = _leaf_specs(result)

    def pull(gradient: object) -> Any:
        checked_gradient = _check_gradient(ctx, "all_reduce", likes, gradient)
        if weight is None:
            return ctx.all_reduce(op, checked_gradient)
        # A sum that float16 does not hold may well have a share that it does.
        widened = pytree.map(_widen_half, checked_gradient)
        total, weights = ctx.all_reduce(ReduceOp.SUM, (widened, np.float64(weight)))
        scale_share = functools.partial(_scale_share, weight=float(weight), weights=float(weights))
        return pytree.map(
            lambda leaf, like: scale_share(leaf, dtype=like.dtype), total, checked_gradient
        )

    return result, pull


def all_gather(value: object, axis: int) -> tuple[Any, Pull]:
    """Concatenate the values of all replicas, and return the result and how gradients come back.

    Collective: every replica calls it, and every replica calls what it returns as often.

    Args:
      value: Tree of floating-point or complex arrays; sizes along `axis` may differ, and be 0.
      axis: The axis; counted from the end if negative.

    Returns:
      The result, and ``pull``: ``pull(gradient)`` takes a tree of the shapes of the result and
      returns one of the shapes and dtypes of the value.

    Raises:
      ContextError: This is not replica code, or ``pull`` is called after its run.
      LeafTypeError: A leaf has no gradient.
      AxisError: A leaf has no such axis.
      ValueError: A gradient has another structure or other shapes.

    Cost: an all-gather; each ``pull`` is an all-reduce of the size of the result, and one
    handshake.
    Like: the gradient of ``tf.distribute.ReplicaContext.all_gather``.

    Example:
      >>> result, pull = all_gather(np.array([1.0, 2.0]), axis=0)
      >>> pull(3 * result)
      array([3., 6.])
    """
    ctx = _require_replica_context("all_gather")
    with ctx.strategy._replicas.lockstep.validating_collectively("vjp.all_gather"):
        shapes = _differentiable_shapes(value)
    result = ctx.all_gather(value, axis)
    likes = _leaf_specs(result)
    local_sizes = np.array([[shape[axis] for shape in shapes]], np.int64)

    def pull(gradient: object) -> Any:
        total = ctx.all_reduce(ReduceOp.SUM, _check_gradient(ctx, "all_gather", likes, gradient))
        starts = ctx.all_gather(local_sizes, 0)[: ctx.replica_id_in_sync_group].sum(axis=0)
        leaves, structure = pytree.flatten(total)
        parts = zip(leaves, starts, local_sizes[0], strict=True)
        return pytree.unflatten(
            structure, [_slice_part(leaf, axis, *extent) for leaf, *extent in parts]
        )

    return result, pull


class _LeafSpec(NamedTuple):
    """Shape and dtype of a leaf of a result, which its gradient must have."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    number: bool


def _require_replica_context(name: str) -> ReplicaContext:
    ctx: ReplicaContext | None = get_replica_context()
    if ctx is None:
        raise ContextError(
            f"vjp.{name} is for replica code, but this is cross-replica code, which no gradient "
            "passes. Call it in the function that Strategy.run calls."
        )
    return ctx


def _differentiable_shapes(value: object) -> list[tuple[int, ...]]:
    """Return the shapes of the leaves, all of which must have gradients."""
    leaves, structure = pytree.flatten(value)
    shapes = []
    for leaf, path in zip(leaves, pytree.path_names(structure), strict=True):
        if isinstance(leaf, IndexedSlices):
            raise LeafTypeError(f"{label(path)} is IndexedSlices, which have no gradient here.")
        array = leaf._component() if isinstance(leaf, Variable) else as_array(leaf, path)
        if not is_inexact(array.dtype):
            raise LeafTypeError(
                f"{label(path)} is {spec_text(array)}, which has no gradient. Wanted floats."
            )
        shapes.append(array.shape)
    return shapes


def _leaf_specs(result: object) -> tuple[Sequence[_LeafSpec], pytree.Structure]:
    leaves, structure = pytree.flatten(result)
    return [_LeafSpec(leaf.shape, leaf.dtype, is_scalar(leaf)) for leaf in leaves], structure


def _check_gradient(
    ctx: ReplicaContext,
    name: str,
    likes: tuple[Sequence[_LeafSpec], pytree.Structure],
    gradient: object,
) -> Any:
    """Return a gradient in the dtypes of the result that it belongs to."""
    subject = f"the gradient of {name}"
    with ctx.strategy._replicas.lockstep.validating_collectively(f"vjp.{name}, back"):
        leaves, structure = pytree.flatten(gradient)
        if structure != likes[1]:
            raise StructureError(
                f"{subject} must have the structure of its result, "
                f"{pytree.describe(likes[1])}, not {pytree.describe(structure)}."
            )
        checked_leaves = []
        for leaf, like, path in zip(leaves, likes[0], pytree.path_names(structure), strict=True):
            array = as_array(leaf, path)
            if array.shape != like.shape:
                raise StructureError(
                    f"{subject}: {label(path)} must have the shape of its result, {like.shape}, "
                    f"not {array.shape}."
                )
            if not np.can_cast(array.dtype, like.dtype, "same_kind"):
                raise LeafTypeError(
                    f"{subject}: {label(path)} is {spec_text(array)}; its result is {like.dtype}."
                )
            array = array.astype(like.dtype, copy=False)
            checked_leaves.append(array[()] if like.number else array)
        return pytree.unflatten(structure, checked_leaves)


def _widen_half(array: Array) -> Any:
    half = array.dtype == np.float16 or is_bfloat16(array.dtype)
    return array.astype(np.float32) if half else array


def _scale_share(total: Array, dtype: np.dtype[Any], weight: float, weights: float) -> Any:
    if weights == 0:
        return np.full_like(total, math.nan, dtype=dtype)[()]
    if weight == 0:  # whatever the others bring: this value was never read
        return np.zeros_like(total, dtype=dtype)[()]
    with np.errstate(all="ignore"):
        return (total * (weight / weights)).astype(dtype)


def _slice_part(total: Array, axis: int, start: int, size: int) -> Array:
    index = [slice(None)] * total.ndim
    index[axis] = slice(start, start + size)
    return total[tuple(index)].copy()
