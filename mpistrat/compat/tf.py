"""The few ``tf.*`` names that programs for tf.distribute without models need.

``from mpistrat.compat import tf`` instead of ``import tensorflow as tf``. A name that is not here
says what to use instead. What to beware of:

- Tensors are NumPy arrays, so they have no ``.numpy()``, and neither has what strategies return:
  write ``np.asarray(tensor)`` or ``float(loss)``, which both kinds understand.
- Python numbers become int32 and float32, as they do there; an integer that does not fit is a
  ValueError. Between arrays and NumPy's own scalars NumPy's rules hold: a float32 array times
  ``np.float64(2)`` is float64, where TensorFlow keeps float32. Write ``2.0``.
- Nothing is traced: `function` returns its argument, and there are no gradients.
- Random numbers are NumPy's; without a seed they are others on each rank.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpistrat.checkpoint.checkpoint import Checkpoint
from mpistrat.checkpoint.files import latest_checkpoint
from mpistrat.checkpoint.manager import CheckpointManager
from mpistrat.cluster.spec import ClusterSpec
from mpistrat.compat import tf_data as data
from mpistrat.compat import tf_distribute as distribute
from mpistrat.compat import tf_math as math
from mpistrat.compat import tf_nest as nest
from mpistrat.compat import tf_nn as nn
from mpistrat.compat import tf_random as random
from mpistrat.compat import v1
from mpistrat.compat.tf_absent import Names as _Names
from mpistrat.compat.tf_absent import absent_from as _absent_from
from mpistrat.compat.tf_arrays import (
    cast,
    concat,
    constant,
    convert_to_tensor,
    expand_dims,
    fill,
    identity,
    matmul,
    one_hot,
    ones,
    ones_like,
    range,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_sum,
    reshape,
    shape,
    square,
    squeeze,
    stack,
    transpose,
    where,
    zeros,
    zeros_like,
)
from mpistrat.compat.tf_math import (
    abs,
    add,
    argmax,
    argmin,
    divide,
    equal,
    exp,
    greater,
    less,
    maximum,
    minimum,
    multiply,
    negative,
    not_equal,
    pow,
    sigmoid,
    sign,
    sqrt,
    subtract,
    tanh,
)
from mpistrat.compat.tf_variable import Variable
from mpistrat.distribute.context import get_replica_context
from mpistrat.distribute.slices import IndexedSlices
from mpistrat.distribute.topology import DeviceAssignment, Topology
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
    "abs",
    "add",
    "argmax",
    "argmin",
    "bool",
    "cast",
    "compat",
    "complex64",
    "complex128",
    "concat",
    "config",
    "constant",
    "control_dependencies",
    "convert_to_tensor",
    "data",
    "device",
    "distribute",
    "divide",
    "equal",
    "errors",
    "executing_eagerly",
    "exp",
    "expand_dims",
    "experimental",
    "fill",
    "float16",
    "float32",
    "float64",
    "function",
    "get_replica_context",
    "greater",
    "group",
    "identity",
    "int8",
    "int16",
    "int32",
    "int64",
    "less",
    "math",
    "matmul",
    "maximum",
    "minimum",
    "multiply",
    "name_scope",
    "negative",
    "nest",
    "nn",
    "no_op",
    "not_equal",
    "one_hot",
    "ones",
    "ones_like",
    "pow",
    "print",
    "random",
    "range",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_sum",
    "reshape",
    "shape",
    "sigmoid",
    "sign",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "subtract",
    "tanh",
    "tpu",
    "train",
    "transpose",
    "types",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "where",
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

__getattr__ = _absent_from("tf")


def function(func: Any = None, **_: Any) -> Any:
    """Return `func` as it is; everything runs eagerly. A decorator, with or without arguments."""
    return func if func is not None else lambda inner: inner


def executing_eagerly() -> Any:
    """Return True."""
    return True


def group(*inputs: Any, **_: Any) -> None:
    """Do nothing: values are there as soon as a call has returned them."""


def no_op(name: Any = None) -> None:
    """Do nothing; `name` has no effect."""


def print(*inputs: Any, output_stream: Any = None, **kwargs: Any) -> None:
    """Print `inputs`, as the built-in does, on every rank that comes here.

    Args:
      inputs: What to print.
      output_stream: A file; None for stderr.
      kwargs: ``sep`` and ``end`` as there; others have no effect.
    """
    chosen = {key: value for key, value in kwargs.items() if key in ("sep", "end")}
    file = sys.stderr if output_stream is None else output_stream
    builtins.print(*inputs, file=file, **chosen)


def device(device_name: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context that changes nothing: `device_name` is a label here."""
    return contextlib.nullcontext()


def control_dependencies(control_inputs: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context that changes nothing: what stands before runs before; `control_inputs`."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def name_scope(name: str) -> Iterator[str]:
    """Return a context that changes nothing; it gives `name` with a slash after it."""
    yield f"{name}/"


def _connect_to_cluster(*args: Any, **kwargs: Any) -> None:
    """Do nothing: MPI has connected the ranks."""


def _initialize_tpu_system(cluster_resolver: Any = None) -> Any:
    """Start nothing, and return ``mpistrat.Topology.read()``: which ranks share a node.

    Collective; `cluster_resolver` is ignored.
    """
    return Topology.read()


compat = _Names("tf.compat", v1=v1)
train = _Names(
    "tf.train",
    ClusterSpec=ClusterSpec,
    Checkpoint=Checkpoint,
    CheckpointManager=CheckpointManager,
    latest_checkpoint=latest_checkpoint,
)
errors = _Names("tf.errors", OutOfRangeError=OutOfRangeError)
experimental = _Names("tf.experimental", Optional=Optional)
types = _Names(
    "tf.types",
    experimental=_Names(
        "tf.types.experimental",
        distributed=_Names(
            "tf.types.experimental.distributed", Mirrored=Mirrored, PerReplica=PerReplica
        ),
    ),
)
config = _Names(
    "tf.config",
    experimental_connect_to_cluster=_connect_to_cluster,
    experimental_connect_to_host=_connect_to_cluster,
    run_functions_eagerly=_connect_to_cluster,
)
tpu = _Names(
    "tf.tpu",
    experimental=_Names(
        "tf.tpu.experimental",
        DeviceAssignment=DeviceAssignment,
        Topology=Topology,
        initialize_tpu_system=_initialize_tpu_system,
        shutdown_tpu_system=_connect_to_cluster,
    ),
)
