"""The few ``tf.*`` names that programs for tf.distribute without models need.

``from mpistrat.compat import tf`` instead of ``import tensorflow as tf``. Tensors are NumPy arrays;
Python numbers become int32 and float32, as they do there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from mpistrat.cluster.spec import ClusterSpec
from mpistrat.compat import tf_distribute as distribute
from mpistrat.compat import v1
from mpistrat.distribute import variables
from mpistrat.distribute.context import get_replica_context
from mpistrat.distribute.slices import IndexedSlices
from mpistrat.distribute.writes import VariableAggregation, VariableSynchronization
from mpistrat.errors import OutOfRangeError
from mpistrat.feed.dataset import Dataset
from mpistrat.feed.iterators import Optional
from mpistrat.feed.policies import AutoShardPolicy, DatasetOptions, DistributeOptions

__all__ = [
    "IndexedSlices",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "bool",
    "cast",
    "compat",
    "constant",
    "data",
    "distribute",
    "errors",
    "experimental",
    "float32",
    "float64",
    "function",
    "get_replica_context",
    "identity",
    "int32",
    "int64",
    "ones",
    "range",
    "train",
    "zeros",
]

bool = np.bool_
float32 = np.float32
float64 = np.float64
int32 = np.int32
int64 = np.int64
compat = SimpleNamespace(v1=v1)
train = SimpleNamespace(ClusterSpec=ClusterSpec)
data = SimpleNamespace(
    Dataset=Dataset,
    Options=DatasetOptions,
    INFINITE_CARDINALITY=Dataset.INFINITE,
    UNKNOWN_CARDINALITY=Dataset.UNKNOWN,
    experimental=SimpleNamespace(
        AutoShardPolicy=AutoShardPolicy, DistributeOptions=DistributeOptions
    ),
)
errors = SimpleNamespace(OutOfRangeError=OutOfRangeError)
experimental = SimpleNamespace(Optional=Optional)
_NARROW = {"i": np.int32, "f": np.float32}


def function(fn: Any = None, **_: Any) -> Any:
    """Return `fn` as it is; everything runs eagerly. A decorator, with or without arguments."""
    return fn if fn is not None else lambda inner: inner


def Variable(initial_value: Any, *args: Any, **kwargs: Any) -> variables.Variable:
    """Return an `mpistrat.Variable` whose initial value is taken as `constant` takes it.

    Example:
      >>> Variable([1.0, 2.0]).dtype
      dtype('float32')
    """
    if callable(initial_value):
        return variables.Variable(lambda: constant(initial_value()), *args, **kwargs)
    return variables.Variable(constant(initial_value), *args, **kwargs)


def constant(value: Any, dtype: Any = None, shape: Any = None) -> Any:
    """Return a fresh array; Python integers become int32 and Python floats float32.

    Args:
      value: Number, nested list or array.
      dtype: Dtype; of arrays their own if None.
      shape: Shape to fill or reshape to; None for that of `value`.

    Example:
      >>> constant([1, 2]).dtype
      dtype('int32')
    """
    array = np.array(value)
    if dtype is None and not hasattr(value, "dtype"):
        dtype = _NARROW.get(array.dtype.kind)
    array = array.astype(dtype) if dtype is not None else array
    if shape is None:
        return array
    return np.full(shape, array) if array.size == 1 else array.reshape(shape)


def identity(value: Any) -> Any:
    """Return a copy of `value`, as `constant` makes it."""
    return constant(value)


def cast(value: Any, dtype: Any) -> Any:
    """Return `value` as an array of `dtype`."""
    return np.asarray(value).astype(dtype)


def zeros(shape: Any, dtype: Any = float32) -> Any:
    """Return an array of zeros."""
    return np.zeros(shape, dtype)


def ones(shape: Any, dtype: Any = float32) -> Any:
    """Return an array of ones."""
    return np.ones(shape, dtype)


def range(*args: Any, dtype: Any = None) -> Any:
    """Return evenly spaced numbers, int32 or float32 unless `dtype` says otherwise."""
    array = np.arange(*args)
    return array.astype(dtype or _NARROW[array.dtype.kind])
