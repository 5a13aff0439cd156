"""The few ``tf.*`` names that programs for tf.distribute without models need.

``from mpistrat.compat import tf`` instead of ``import tensorflow as tf``. A name that is not here
says what to use instead. Differences to know:

- Tensors are NumPy arrays, and they and what strategies return have no ``.numpy()``:
  write ``np.asarray(tensor)`` or ``float(loss)``, which both kinds understand.
- Python numbers become int32 and float32, as they do there; an integer that does not fit is a
  ValueError. Between arrays and NumPy's own scalars NumPy's rules hold: a float32 array times
  ``np.float64(2)``, or plus a list, is float64, where TensorFlow keeps float32. Write ``2.0``, and
  ``tf.add(x, [1, 2])``.
- Nothing is traced: the result of `function` calls its argument, and there are no gradients.
- Random numbers are NumPy's; without `random.set_seed` or a seed they differ between ranks.
- Exceptions under ``errors`` are those of this library and Python's own, so they have no
  ``.message``: write ``str(error)``.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import numpy as np

from mpistrat.compat import tf_arrays, tf_reductions, tf_system, v1
from mpistrat.compat import tf_data as data
from mpistrat.compat import tf_debugging as debugging
from mpistrat.compat import tf_distribute as distribute
from mpistrat.compat import tf_math as math
from mpistrat.compat import tf_nest as nest
from mpistrat.compat import tf_nn as nn
from mpistrat.compat import tf_random as random
from mpistrat.compat import tf_train as train
from mpistrat.compat.absent import Namespace as _Namespace
from mpistrat.compat.absent import make_absence_error as _make_absence_error
from mpistrat.compat.tf_system import config, errors, function
from mpistrat.compat.tf_tensors import Mirrored as _Mirrored
from mpistrat.compat.tf_tensors import Tensor, TensorSpec, Variable, is_tensor
from mpistrat.compat.tf_tensors import as_dtype as _as_dtype
from mpistrat.compat.tf_tensors import takes_name as _takes_name
from mpistrat.data.iterators import Optional
from mpistrat.strategy.replica_context import get_replica_context
from mpistrat.strategy.topology import DeviceAssignment, Topology
from mpistrat.variables.indexed_slices import IndexedSlices
from mpistrat.variables.kinds import VariableAggregation, VariableSynchronization
from mpistrat.variables.values import PerReplica

__all__ = ["Assert", "DType", "IndexedSlices", "Tensor", "TensorSpec", "Variable"]
__all__ += ["VariableAggregation", "VariableSynchronization", "as_dtype", "compat", "config"]
__all__ += ["data", "debugging"]
__all__ += ["distribute", "dtypes", "errors", "experimental", "function", "get_replica_context"]
__all__ += ["is_tensor", "linalg", "math", "nest", "nn", "random", "tpu", "train", "types"]
__all__ += ["version"]

__version__ = "2.21.0"  # of the TensorFlow whose names these are; programs compare it

DType = np.dtype
_DTYPES = (
    "bool complex128 complex64 float16 float32 float64 int16 int32 int64 int8 uint16 uint32 uint64 "
    "uint8"
)
_TABLE: dict[Any, str] = {  # where the other names are from
    math: (
        "abs add argmax argmin cos divide equal exp floor floordiv greater greater_equal less "
        "less_equal logical_and logical_not logical_or maximum minimum multiply negative "
        "not_equal pow round sigmoid sign sin sqrt square subtract tan tanh truediv"
    ),
    tf_system: (
        "control_dependencies device executing_eagerly get_logger group init_scope name_scope "
        "no_op print"
    ),
    tf_reductions: (
        "add_n clip_by_global_norm clip_by_norm clip_by_value norm reduce_all reduce_any "
        "reduce_logsumexp reduce_max reduce_mean reduce_min reduce_prod reduce_sum"
    ),
}
_ARRAYS = (
    "boolean_mask broadcast_to cast concat constant convert_to_tensor ensure_shape expand_dims eye "
    "fill gather gather_nd identity linspace matmul one_hot ones ones_like range rank repeat "
    "reshape reverse shape size split squeeze stack tile transpose unstack where zeros zeros_like "
)
_INITIALIZERS = "constant_initializer ones_initializer zeros_initializer"
# Not the types of NumPy's scalars, which are keys of a dict, and in a set, beside dtypes of arrays.
globals().update({name: np.dtype(name) for name in _DTYPES.split()})
globals().update(
    {name: getattr(module, name) for module in _TABLE for name in _TABLE[module].split()}
)
globals().update({name: _takes_name(getattr(tf_arrays, name)) for name in _ARRAYS.split()})
globals().update({name: getattr(tf_arrays, name) for name in _INITIALIZERS.split()})
__all__ += sorted(f"{_ARRAYS} {_DTYPES} {_INITIALIZERS} {' '.join(_TABLE.values())}".split())


def __getattr__(name: str) -> Any:
    if name == "bfloat16":  # of a package that may be missing
        with contextlib.suppress(ImportError):
            return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    raise _make_absence_error("tf", name)


def _initialize_tpu_system(cluster_resolver: Any = None) -> Any:
    """Start nothing, and return ``mpistrat.Topology.read()``: which ranks share a node.

    Collective; `cluster_resolver` is ignored.
    """
    return Topology.read()


def as_dtype(type_value: Any) -> np.dtype[Any]:
    """Return the dtype that `type_value` stands for; Python's ``float`` is float32."""
    return _as_dtype(type_value, "as_dtype")


Assert = debugging.Assert
newaxis = None
dtypes = _Namespace(
    "tf.dtypes",
    DType=DType,
    as_dtype=as_dtype,
    cast=globals()["cast"],
    **{name: globals()[name] for name in _DTYPES.split()},
)
compat = _Namespace("tf.compat", v1=v1)
linalg = _Namespace(
    "tf.linalg",
    global_norm=tf_reductions.global_norm,
    **{name: globals()[name] for name in ("eye", "matmul", "norm")},
)
version = _Namespace("tf.version", VERSION=__version__)
experimental = _Namespace("tf.experimental", Optional=Optional)
types = _Namespace(
    "tf.types",
    experimental=_Namespace(
        "tf.types.experimental",
        distributed=_Namespace(
            "tf.types.experimental.distributed", Mirrored=_Mirrored, PerReplica=PerReplica
        ),
    ),
)
tpu = _Namespace(
    "tf.tpu",
    experimental=_Namespace(
        "tf.tpu.experimental",
        DeviceAssignment=DeviceAssignment,
        Topology=Topology,
        initialize_tpu_system=_initialize_tpu_system,
        shutdown_tpu_system=tf_system.no_op,
    ),
)
