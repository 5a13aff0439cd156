"""What to use instead of attributes of TensorFlow's tensors and contexts that do not exist here."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.distribute.kinds import DistributedVariable

__all__ = ["explain", "refuse_name"]

# What programs ask of a replica context, and what cross-replica code has for it.
_INSTEAD = {
    "all_gather": "strategy.gather(...)",
    "all_reduce": "strategy.all_reduce(...) or strategy.reduce(...)",
    "merge_call": "the function itself",
    "num_replicas_in_sync": "strategy.num_replicas_in_sync",
    "replica_id_in_sync_group": "strategy.rank",
}
_ROWS = "v.scatter_update(tf.IndexedSlices(rows, indices)) of the variable, or v.assign(array)"
# What programs for TensorFlow ask of tensors, their shapes and dtypes, and what NumPy has for it.
_OF_TENSORS: tuple[tuple[Any, str, dict[str, str]], ...] = (
    (
        (np.ndarray, np.generic),
        "Tensors are NumPy's arrays and numbers",
        {
            "numpy": "the array itself, np.asarray(x), or float(x) of a number",
            "eval": "the array itself",
            "get_shape": "x.shape",
            "set_shape": "tf.ensure_shape(x, shape), which checks it",
            "ref": "id(x)",
            "experimental_ref": "id(x)",
            **dict.fromkeys(("assign", "assign_add", "assign_sub"), _ROWS),
        },
    ),
    (
        DistributedVariable,
        "Variables have no graph",
        {
            **dict.fromkeys(("eval", "initial_value", "initialized_value"), "v.numpy()"),
            "load": "v.assign(array)",
            "count_up_to": "v.assign_add(1)",
            "gather_nd": "v[rows], or tf.gather_nd(v, indices)",
            "sparse_read": "v[rows]",
            "set_shape": "v.shape, which never changes",
            "experimental_ref": "v.ref()",
            "is_distributed_variable": "isinstance(v, tf.distribute.DistributedValues)",
        },
    ),
    (
        tuple,
        "Shapes are tuples",
        {
            "as_list": "list(shape)",
            "dims": "shape",
            "is_fully_defined": "True",
            **dict.fromkeys(("ndims", "rank"), "len(shape)"),
            "num_elements": "math.prod(shape)",
        },
    ),
    (
        np.dtype,
        "Dtypes are NumPy's",
        {
            "as_numpy_dtype": "dtype.type",
            "base_dtype": "dtype",
            "is_bool": 'dtype.kind == "b"',
            "is_complex": 'dtype.kind == "c"',
            "is_floating": 'dtype.kind in "fV"',
            "is_integer": 'dtype.kind in "iu"',
            "is_unsigned": 'dtype.kind == "u"',
            **dict.fromkeys(("max", "min"), "np.finfo(dtype), or np.iinfo(dtype) of integers"),
            "size": "dtype.itemsize",
        },
    ),
)
# By the name that other libraries, or this one elsewhere, have for it.
_OF_STRATEGIES = {
    **dict.fromkeys(
        ("size", "world_size", "num_replicas", "num_ranks", "Get_size"),
        "strategy.num_replicas_in_sync",
    ),
    **dict.fromkeys(
        ("replica_id", "replica_id_in_sync_group", "get_rank", "Get_rank"), "strategy.rank"
    ),
    **dict.fromkeys(("is_chief", "is_main_process", "is_master"), "strategy.rank == 0"),
    **dict.fromkeys(("barrier", "Barrier"), "strategy.group(None), which waits for all ranks"),
    **dict.fromkeys(("bcast", "Bcast"), "strategy.broadcast(tree)"),
    **dict.fromkeys(("allreduce", "Allreduce"), 'strategy.all_reduce("sum", value)'),
    **dict.fromkeys(("allgather", "Allgather"), "strategy.gather(value, axis)"),
    "merge_call": "the function itself, as this is cross-replica code",
}
_OF_CONTEXTS = {
    **dict.fromkeys(
        ("size", "world_size", "num_replicas", "num_ranks", "Get_size"), "ctx.num_replicas_in_sync"
    ),
    **dict.fromkeys(("rank", "replica_id", "get_rank", "Get_rank"), "ctx.replica_id_in_sync_group"),
    **dict.fromkeys(
        ("is_chief", "is_main_process", "is_master"), "ctx.replica_id_in_sync_group == 0"
    ),
    **dict.fromkeys(
        ("barrier", "Barrier", "group"),
        "strategy.group(None) outside of run(); every collective call waits for all replicas",
    ),
    **dict.fromkeys(("broadcast", "bcast", "Bcast"), "strategy.broadcast(tree), before run()"),
    **dict.fromkeys(("allreduce", "Allreduce", "reduce"), 'ctx.all_reduce("sum", value)'),
    **dict.fromkeys(("allgather", "Allgather", "gather"), "ctx.all_gather(value, axis)"),
    "run": "the function itself, as this is replica code",
}
_NONE = "get_replica_context() is None in cross-replica code"


def explain(error: BaseException, crossing: bool) -> None:
    """Say what to use instead of an attribute of tensors, or of a replica context that is None.

    That has to be None in cross-replica code, as programs for tf.distribute ask whether it is, and
    tensors are arrays. So Python raises, and what there is to say is added when the error leaves
    a function or a scope, or ends the program.

    Args:
      error: What was raised; its text changes.
      crossing: It was raised in cross-replica code.
    """
    if not isinstance(error, AttributeError):
        return
    told, name = "", error.name or ""
    if error.obj is None and crossing and name in _INSTEAD:
        told = (
            f"{_NONE}: in a scope, in a merge_fn, in a function given to update. Call {name} in "
            f"the function that Strategy.run calls; in cross-replica code, use {_INSTEAD[name]}."
        )
    for kinds, what, instead in _OF_TENSORS:
        if isinstance(error.obj, kinds) and name in instead and not hasattr(error.obj, "_fields"):
            told = f"{what} here: use {instead[name]}."
    if told and told not in str(error):
        error.args = (f"{error}\n  {told}",)
        error.name = None  # of which Python would guess what was meant


def refuse_name(owner: Any, name: str, in_replica: bool) -> Any:
    """Raise for an attribute that a strategy or a replica context does not have.

    Args:
      owner: The strategy or the context.
      name: The attribute.
      in_replica: It is a context.

    Raises:
      AttributeError: Always; says what to use if the name is known.
    """
    instead = (_OF_CONTEXTS if in_replica else _OF_STRATEGIES).get(name)
    if instead is None or hasattr(type(owner), name):
        return object.__getattribute__(owner, name)  # which raises
    text = f"{type(owner).__name__!r} object has no attribute {name!r}. Use {instead}."
    raise AttributeError(text, name=name, obj=owner)
