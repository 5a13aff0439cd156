"""The few ``tf.*`` names that programs for tf.distribute without models need.

``from mpistrat.compat import tf`` instead of ``import tensorflow as tf``. A name that is not here
says what to use instead. What to beware of:

- Tensors are NumPy arrays, so they have no ``.numpy()``, and neither has what strategies return:
  write ``np.asarray(tensor)`` or ``float(loss)``, which both kinds understand.
- Python numbers become int32 and float32, as they do there; an integer that does not fit is a
  ValueError. Between arrays and NumPy's own scalars NumPy's rules hold: a float32 array times
  ``np.float64(2)`` is float64, where TensorFlow keeps float32. Write ``2.0``.
- Nothing is traced: `function` returns its argument, and there are no gradients.
- Random numbers are NumPy's; without `random.set_seed` or a seed they are others on each rank.
- Exceptions under ``errors`` are those of this library and Python's own, so they have no
  ``.message``: write ``str(error)``.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import numpy as np

from mpistrat.compat import tf_data as data
from mpistrat.compat import tf_debugging as debugging
from mpistrat.compat import tf_distribute as distribute
from mpistrat.compat import tf_math as math
from mpistrat.compat import tf_nest as nest
from mpistrat.compat import tf_nn as nn
from mpistrat.compat import tf_random as random
from mpistrat.compat import tf_train as train
from mpistrat.compat import v1
from mpistrat.compat.absent import Names as _Names
from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.compat.tf_arrays import (
    broadcast_to,
    cast,
    concat,
    constant,
    convert_to_tensor,
    expand_dims,
    eye,
    fill,
    gather,
    identity,
    linspace,
    matmul,
    one_hot,
    ones,
    ones_like,
    range,
    rank,
    repeat,
    reshape,
    shape,
    size,
    split,
    square,
    squeeze,
    stack,
    tile,
    transpose,
    unstack,
    where,
    zeros,
    zeros_like,
)
from mpistrat.compat.tf_graph import (
    control_dependencies,
    device,
    executing_eagerly,
    function,
    group,
    name_scope,
    no_op,
    print,
)
from mpistrat.compat.tf_math import (
    abs,
    add,
    argmax,
    argmin,
    cos,
    divide,
    equal,
    exp,
    floor,
    floordiv,
    greater,
    greater_equal,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    multiply,
    negative,
    not_equal,
    pow,
    round,
    sigmoid,
    sign,
    sin,
    sqrt,
    subtract,
    tan,
    tanh,
    truediv,
)
from mpistrat.compat.tf_reductions import (
    add_n,
    clip_by_global_norm,
    clip_by_norm,
    clip_by_value,
    reduce_all,
    reduce_any,
    reduce_logsumexp,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_prod,
    reduce_sum,
)
from mpistrat.compat.tf_system import config, errors
from mpistrat.compat.tf_tensor import Tensor, TensorSpec, is_tensor
from mpistrat.compat.tf_variable import Variable
from mpistrat.distribute.context import get_replica_context
from mpistrat.distribute.slices import IndexedSlices
from mpistrat.distribute.topology import DeviceAssignment, Topology
from mpistrat.distribute.values import Mirrored, PerReplica
from mpistrat.distribute.writes import VariableAggregation, VariableSynchronization
from mpistrat.feed.iterators import Optional

__all__ = [
    "IndexedSlices",
    "Tensor",
    "TensorSpec",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "abs",
    "add",
    "add_n",
    "argmax",
    "argmin",
    "bool",
    "broadcast_to",
    "cast",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "compat",
    "complex64",
    "complex128",
    "concat",
    "config",
    "constant",
    "control_dependencies",
    "convert_to_tensor",
    "cos",
    "data",
    "debugging",
    "device",
    "distribute",
    "divide",
    "equal",
    "errors",
    "executing_eagerly",
    "exp",
    "expand_dims",
    "experimental",
    "eye",
    "fill",
    "float16",
    "float32",
    "float64",
    "floor",
    "floordiv",
    "function",
    "gather",
    "get_replica_context",
    "greater",
    "greater_equal",
    "group",
    "identity",
    "int8",
    "int16",
    "int32",
    "int64",
    "is_tensor",
    "less",
    "less_equal",
    "linspace",
    "logical_and",
    "logical_not",
    "logical_or",
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
    "rank",
    "reduce_all",
    "reduce_any",
    "reduce_logsumexp",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_prod",
    "reduce_sum",
    "repeat",
    "reshape",
    "round",
    "shape",
    "sigmoid",
    "sign",
    "sin",
    "size",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "subtract",
    "tan",
    "tanh",
    "tile",
    "tpu",
    "train",
    "transpose",
    "truediv",
    "types",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "unstack",
    "version",
    "where",
    "zeros",
    "zeros_like",
]

__version__ = "2.21.0"  # of which TensorFlow the names are, for programs that compare it
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

_absent = _absent_from("tf")


def __getattr__(name: str) -> Any:
    if name == "bfloat16":  # of a package that need not be there
        with contextlib.suppress(ImportError):
            return importlib.import_module("ml_dtypes").bfloat16
    return _absent(name)


def _initialize_tpu_system(cluster_resolver: Any = None) -> Any:
    """Start nothing, and return ``mpistrat.Topology.read()``: which ranks share a node.

    Collective; `cluster_resolver` is ignored.
    """
    return Topology.read()


compat = _Names("tf.compat", v1=v1)
version = _Names("tf.version", VERSION=__version__)
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
tpu = _Names(
    "tf.tpu",
    experimental=_Names(
        "tf.tpu.experimental",
        DeviceAssignment=DeviceAssignment,
        Topology=Topology,
        initialize_tpu_system=_initialize_tpu_system,
        shutdown_tpu_system=no_op,
    ),
)
