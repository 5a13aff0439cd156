"""Collectives for trees of JAX arrays, inside of transformed functions and outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpistrat.arrays import as_array, as_int, label
from mpistrat.collectives.dtypes import check_integer, choose_wire_type
from mpistrat.comm.callsite import find_call_site
from mpistrat.errors import AxisError, LeafTypeError, StructureError
from mpistrat.jax.arrays import is_key, place_results
from mpistrat.jax.traced import TracedCall, TracedGroup, bind, find_group
from mpistrat.kernels.ops import ReduceOp
from mpistrat.pytree import key_text
from mpistrat.strategy.reductions import gather
from mpistrat.strategy.shared_state import broadcast_state

__all__ = ["all_gather", "all_reduce", "broadcast", "replicate"]

jnp = jax.numpy


def all_reduce(
    reduce_op: ReduceOp | str, value: Any, *, weight: Any = None, shared_loss: bool = False
) -> Any:
    """Reduce the values of all replicas, in a function that JAX transforms or outside.

    It has gradients in both modes, and a batch of ``jax.vmap`` is one call. The gradient by a
    replica's value is that of the *sum of all replicas' losses*, as in `mpistrat.vjp`.

    Collective: every replica calls it, with the same structure, shapes and dtypes; so do their
    gradients. The ranks are those of the strategy in whose code the function is traced.

    Args:
      reduce_op: ``"SUM"``, ``"MEAN"``, and without gradients ``"MIN"``, ``"MAX"``, ``"PROD"``, and
        ``"ANY"`` and ``"ALL"`` of bool.
      value: Tree of arrays or numbers.
      weight: For MEAN, how many examples this replica's values stand for; may be traced, as
        ``mask.sum()``. A value of weight 0 is never read. There is no gradient by it.
      shared_loss: The loss is one number that all replicas have in common, and each wants its
        gradient by its own value: what comes back does not communicate, and is smaller by the
        number of replicas.

    Returns:
      The same tree of JAX arrays. dtypes are kept, except that MEAN of integers gives floats.

    Raises:
      ContextError: No strategy is in scope, in a job of several ranks.
      LeafTypeError: A leaf is not an array, or its dtype cannot be reduced.
      ValueError: The operation is unknown, or a weight is given for another one than MEAN.
      LockstepError: The calls differ between ranks. Within ``jit`` it comes, as what follows, as a
        ``JaxRuntimeError`` with its text, and leaves `Strategy.run` as itself.
      RemoteError: Another rank failed.
      NotImplementedError: Within ``jax.checkpoint``, which would repeat the collective call.

    Cost: as `ReplicaContext.all_reduce`, and within ``jit`` about 150 us; no copies.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> jax.jit(lambda x: all_reduce("mean", {"loss": x}))(jnp.float32(2))
      {'loss': Array(2., dtype=float32)}
    """
    group = find_group("all_reduce")
    with group.lockstep.validating_collectively("all_reduce"):
        op = ReduceOp.parse(reduce_op)
        if weight is not None and op is not ReduceOp.MEAN:
            raise ValueError(f"weight is for MEAN; {op.value} has none.")
        leaves, names, rebuild = _flatten(
            value, lambda leaf, path: _check_reducible(op, leaf, path, group.lockstep.comm.size)
        )
        is_traced = _is_traced(leaves, weight)
        has_constant_weight = weight is None or _is_number(weight)
        traced_call = TracedCall(
            TracedGroup(group),
            "all_reduce",
            op,
            weight=float(weight) if has_constant_weight and weight is not None else None,
            has_traced_weight=not has_constant_weight,
            has_shared_loss=shared_loss,
            names=names,
            call_site=find_call_site(),
        )
        operands = leaves if has_constant_weight else [_as_weight(weight), *leaves]
    if not leaves:
        return value
    if is_traced:
        return rebuild(bind(traced_call, *operands))
    return rebuild(traced_call.call_directly(operands))


def all_gather(value: Any, axis: int, *, shared_loss: bool = False) -> Any:
    """Concatenate the values of all replicas, in a function that JAX transforms or outside.

    Collective: as `all_reduce`, but outside of ``jit`` sizes along `axis` may differ.

    Args:
      value: Tree of arrays with at least one dimension; keys of ``jax.random.key`` are taken, too.
      axis: Which axis; counted from the end if negative.
      shared_loss: As in `all_reduce`.

    Returns:
      The same tree of JAX arrays, in replica order.

    Raises:
      ContextError: No strategy is in scope, in a job of several ranks.
      LeafTypeError: A leaf is not an array.
      AxisError: A leaf has no such axis.
      LockstepError: The calls differ between ranks; where it is traced, the shapes, too.

    Cost: as `ReplicaContext.all_gather`; within ``jit`` one copy more.

    Example:
      >>> import jax.numpy as jnp
      >>> all_gather(jnp.arange(2), axis=0)
      Array([0, 1], dtype=int32)
    """
    group = find_group("all_gather")
    with group.lockstep.validating_collectively("all_gather"):
        checked_axis = as_int(axis)
        if checked_axis is None:
            raise TypeError(f"all_gather: axis must be an integer, not {axis!r:.60}.")
        axis = checked_axis
        leaves, names, rebuild = _flatten(value, lambda leaf, path: _check_axis(leaf, axis, path))
        traced_call = TracedCall(
            TracedGroup(group),
            "all_gather",
            axis=axis,
            has_shared_loss=shared_loss,
            names=names,
            call_site=find_call_site(),
        )
    if not leaves:
        return value
    arrays, restore_keys = _replace_keys(leaves, axis)
    if _is_traced(arrays):
        return rebuild(restore_keys(bind(traced_call, *arrays)))
    tree = traced_call.build_tree([as_array(leaf) for leaf in arrays])
    gathered = traced_call.list_leaves(gather(group, "all_gather", tree, axis))
    return rebuild(restore_keys(place_results(gathered, arrays)))


def broadcast(value: Any, *, shared_loss: bool = False) -> Any:
    """Broadcast replica 0's values to all, in a function that JAX transforms or outside.

    Collective: as `all_reduce`.

    Args:
      value: Tree of arrays, numbers and keys; of the other replicas only shapes and dtypes count.
      shared_loss: As in `all_reduce`.

    Returns:
      The same tree of JAX arrays.

    Raises:
      ContextError: No strategy is in scope, in a job of several ranks.
      LeafTypeError: A leaf is not an array.
      LockstepError: The calls differ between ranks.

    Cost: as `Strategy.broadcast`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> jax.jit(broadcast)({"w": jnp.ones(2)})
      {'w': Array([1., 1.], dtype=float32)}
    """
    group = find_group("broadcast")
    with group.lockstep.validating_collectively("broadcast"):
        leaves, names, rebuild = _flatten(value, _convert_leaf)
        traced_call = TracedCall(
            TracedGroup(group),
            "broadcast",
            has_shared_loss=shared_loss,
            names=names,
            call_site=find_call_site(),
        )
        arrays, restore_keys = _replace_keys(leaves, 0)
    if not leaves:
        return value
    if _is_traced(arrays):
        return rebuild(restore_keys(bind(traced_call, *arrays)))
    return rebuild(restore_keys(traced_call.call_directly(arrays)))


def replicate(tree: Any) -> Any:
    """Give all ranks replica 0's values of a tree, such as parameters or the state of optax.

    Collective: all ranks call it, in a scope or in replica code, with the same structure.

    Args:
      tree: Any tree of JAX: arrays, numbers, keys; ``None`` is an empty node. Functions in it, as
        modules of equinox have, stay each rank's own.

    Returns:
      The same tree. Python's numbers come back as such.

    Raises:
      ContextError: No strategy is in scope, in a job of several ranks.
      LeafTypeError: A leaf is not an array, or is traced; there, call `broadcast`.
      LockstepError: The trees differ between ranks.

    Cost: as `Strategy.broadcast`.

    Example:
      >>> import jax.numpy as jnp
      >>> replicate((jnp.ones(2), 3))
      (Array([1., 1.], dtype=float32), 3)
    """
    group = find_group("replicate")
    with group.lockstep.validating_collectively("replicate"):
        leaves, names, rebuild = _flatten(tree, lambda leaf, _: leaf)
        leaf_indices = [index for index, leaf in enumerate(leaves) if not callable(leaf)]
        arrays, restore_keys = _replace_keys([leaves[index] for index in leaf_indices], 0)
        names = tuple(names[index] for index in leaf_indices) if names else ()
        traced_call = TracedCall(TracedGroup(group), "broadcast", names=names)
    tree_of_rank0 = broadcast_state(group, traced_call.build_tree(arrays), None)
    new_leaves = restore_keys(traced_call.list_leaves(tree_of_rank0))
    for index, leaf in zip(leaf_indices, new_leaves, strict=True):
        leaves[index] = leaf
    return rebuild(leaves)


def _flatten(
    value: Any, check_leaf: Callable[[Any, str], Any]
) -> tuple[list[Any], tuple[str, ...], Callable[[list[Any]], Any]]:
    """Return the checked leaves of a tree, their names, and a function from leaves to a tree."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(value)
    paths = ["/".join(map(_step_text, path)) for path, _ in pairs]
    leaves = [check_leaf(leaf, path) for (_, leaf), path in zip(pairs, paths, strict=True)]
    if len(set(paths)) < len(paths):  # as of {"a/b": 0, "a": {"b": 0}}, too
        equal_paths = sorted({path for path in paths if paths.count(path) > 1})
        raise StructureError(
            "leaves of a tree cannot be told apart on another rank, where only the texts of their "
            f"keys are known: several are {', '.join(equal_paths):.200}. Take other keys."
        )
    names = tuple(paths) if all(paths) else ()
    return leaves, names, lambda new_leaves: jax.tree.unflatten(structure, new_leaves)


def _step_text(step: Any) -> str:
    """Return one step of a path: a key that is no text is shown as one of another class."""
    if isinstance(step, jax.tree_util.DictKey) and not isinstance(step.key, str):
        return f"[{key_text(step.key)}]"
    text: str = jax.tree_util.keystr((step,), simple=True)
    return text


def _convert_leaf(leaf: Any, path: str) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    return jnp.asarray(as_array(leaf, path) if not _is_number(leaf) else leaf)


def _check_reducible(op: ReduceOp, leaf: Any, path: str, rank_count: int) -> Any:
    array = _convert_leaf(leaf, path)
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        check_integer(op, leaf, path, rank_count, np.dtype(array.dtype))
    if is_key(array):
        raise LeafTypeError(f"{label(path)} has dtype {array.dtype}, which cannot be reduced.")
    result_dtype = jax.dtypes.canonicalize_dtype(
        choose_wire_type(op, np.dtype(array.dtype), path).result
    )
    return array if array.dtype == result_dtype else array.astype(result_dtype)


def _check_axis(leaf: Any, axis: int, path: str) -> Any:
    array = _convert_leaf(leaf, path)
    if not -array.ndim <= axis < array.ndim:
        raise AxisError(
            f"all_gather: {label(path)} of shape {array.shape} has no axis {axis}. To stack "
            "values, give each of them one: value[None]."
        )
    return array


def _replace_keys(
    leaves: Sequence[Any], axis: int
) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
    """Return leaves with keys replaced by their numbers, and a function that makes the keys."""
    key_kinds = [jax.random.key_impl(leaf) if is_key(leaf) else None for leaf in leaves]
    if axis < 0 and any(key_kind is not None for key_kind in key_kinds):
        raise LeafTypeError("all_gather of keys counts their axes from the front; give axis >= 0.")
    pairs = zip(leaves, key_kinds, strict=True)
    arrays = [leaf if key_kind is None else jax.random.key_data(leaf) for leaf, key_kind in pairs]

    def restore_keys(key_arrays: list[Any]) -> list[Any]:
        pairs = zip(key_arrays, key_kinds, strict=True)
        return [
            array if key_kind is None else jax.random.wrap_key_data(array, impl=key_kind)
            for array, key_kind in pairs
        ]

    return arrays, restore_keys


def _is_traced(leaves: Sequence[Any], weight: Any = None) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in (*leaves, weight))


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex | np.generic)


def _as_weight(weight: Any) -> Any:
    array = jnp.asarray(weight)
    if array.shape or array.dtype.kind not in "iufV":
        raise ValueError(f"weight must be a number of examples, 0 or more, not {weight!r:.60}.")
    if array.dtype.kind not in "iu":  # the numbers of 16 bits, too
        array = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    return jax.lax.stop_gradient(array)
