"""The few ``tf.*`` names that programs for tf.distribute without models need.

``from mpistrat.compat import tf`` instead of ``import tensorflow as tf``. Tensors are NumPy arrays,
so they have no ``.numpy()``: write ``np.asarray(tensor)``, which both kinds understand. Python
numbers become int32 and float32, as they do there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from mpistrat.cluster.spec import ClusterSpec
from mpistrat.compat import tf_data as data
from mpistrat.compat import tf_distribute as distribute
from mpistrat.compat import tf_nest as nest
from mpistrat.compat import v1
from mpistrat.compat.tf_arrays import (
    cast,
    concat,
    constant,
    convert_to_tensor,
    fill,
    identity,
    matmul,
    ones,
    ones_like,
    range,
    reduce_mean,
    reduce_sum,
    reshape,
    square,
    stack,
    zeros,
    zeros_like,
)
from mpistrat.distribute import variables
from mpistrat.distribute.context import get_replica_context
from mpistrat.distribute.slices import IndexedSlices
from mpistrat.distribute.values import Mirrored, PerReplica
from mpistrat.distribute.writes import VariableAggregation, VariableSynchronization
from mpistrat.errors import OutOfRangeError
from mpistrat.feed.iterators import Optional

__all__ = [
    "IndexedSlices",
    "Tensor",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "bool",
    "cast",
    "compat",
    "complex64",
    "complex128",
    "concat",
    "constant",
    "convert_to_tensor",
    "data",
    "distribute",
    "errors",
    "executing_eagerly",
    "experimental",
    "fill",
    "float16",
    "float32",
    "float64",
    "function",
    "get_replica_context",
    "group",
    "identity",
    "int8",
    "int16",
    "int32",
    "int64",
    "matmul",
    "nest",
    "ones",
    "ones_like",
    "range",
    "reduce_mean",
    "reduce_sum",
    "reshape",
    "square",
    "stack",
    "train",
    "types",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "zeros",
    "zeros_like",
]

Tensor = np.ndarray
bool = np.bool_
float16 = np.float16
float32 = np.float32
float64 = np.float64
int8 = np.int8
int16 = np.int16
int32 = np.int32
int64 = np.int64
uint8 = np.uint8
uint16 = np.uint16
uint32 = np.uint32
uint64 = np.uint64
complex64 = np.complex64
complex128 = np.complex128

compat = SimpleNamespace(v1=v1)
train = SimpleNamespace(ClusterSpec=ClusterSpec)
errors = SimpleNamespace(OutOfRangeError=OutOfRangeError)
experimental = SimpleNamespace(Optional=Optional)
types = SimpleNamespace(
    experimental=SimpleNamespace(
        distributed=SimpleNamespace(Mirrored=Mirrored, PerReplica=PerReplica)
    )
)


def function(func: Any = None, **_: Any) -> Any:
    """Return `func` as it is; everything runs eagerly. A decorator, with or without arguments."""
    return func if func is not None else lambda inner: inner


def executing_eagerly() -> Any:
    """Return True."""
    return True


def group(*inputs: Any, **_: Any) -> None:
    """Do nothing: values are there as soon as a call has returned them."""


def Variable(initial_value: Any, *args: Any, **kwargs: Any) -> variables.Variable:
    """Return an `mpistrat.Variable` whose initial value is taken as `constant` takes it.

    Example:
      >>> Variable([1.0, 2.0]).dtype
      dtype('float32')
    """
    if callable(initial_value):
        return variables.Variable(lambda: constant(initial_value()), *args, **kwargs)
    return variables.Variable(constant(initial_value), *args, **kwargs)
