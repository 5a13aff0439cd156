"""Attributes that only TensorFlow's objects have: their errors say what to use instead."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.distribute.kinds import DistributedVariable
from mpistrat.instead import INSTEAD, OF_CONTEXTS, OF_STRATEGIES

__all__ = ["explain", "refuse_name"]

_NONE = (
    "get_replica_context() is None in cross-replica code: in a scope, in a merge_fn, in a function "
    "given to update. Call {} in the function that Strategy.run calls; in cross-replica code, "
)
# What has which attributes in TensorFlow, and what it is here.
_KINDS: tuple[tuple[Any, str, str], ...] = (
    ((np.ndarray, np.generic), "tf.Tensor", "Tensors are NumPy's arrays and numbers here: "),
    (DistributedVariable, "tf.Variable", "Variables have no graph here: "),
    (tuple, "tf.TensorShape", "Shapes are tuples here: "),
    (np.dtype, "tf.DType", "Dtypes are NumPy's here: "),
    (type(None), "tf.distribute.ReplicaContext", _NONE),
)


def explain(error: BaseException, crossing: bool) -> None:
    """Say what to use instead of an attribute of tensors, or of a replica context that is None.

    That has to be None in cross-replica code, as programs for tf.distribute ask whether it is, and
    tensors are arrays. So Python raises, and what there is to say is added when the error leaves
    a function or a scope, or ends the program.

    Args:
      error: What was raised; its text changes.
      crossing: It was raised in cross-replica code.
    """
    if not isinstance(error, AttributeError) or (error.obj is None and not crossing):
        return
    for kinds, path, text in _KINDS:
        advice = INSTEAD.get(f"{path}.{error.name}")
        if advice and isinstance(error.obj, kinds) and not hasattr(error.obj, "_fields"):
            hint = text.format(error.name) + advice[0].lower() + advice[1:]
            if hint not in str(error):
                error.args = (f"{error}\n  {hint}",)
                error.name = None  # of which Python would guess what was meant
            return


def refuse_name(owner: Any, name: str, in_replica: bool) -> Any:
    """Raise for an attribute that a strategy or a replica context does not have.

    Args:
      owner: The strategy or the context.
      name: The attribute.
      in_replica: It is a context.

    Raises:
      AttributeError: Always; says what to use if the name is known.
    """
    replacement = (OF_CONTEXTS if in_replica else OF_STRATEGIES).get(name)
    if replacement is None or hasattr(type(owner), name):
        return object.__getattribute__(owner, name)  # which raises
    text = f"{type(owner).__name__!r} object has no attribute {name!r}. Use {replacement}."
    raise AttributeError(text, name=name, obj=owner)
