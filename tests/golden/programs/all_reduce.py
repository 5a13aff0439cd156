"""ReplicaContext.all_reduce: operations, kinds of values, dtypes, differences between replicas."""

from __future__ import annotations

import ml_dtypes

from ..recorder import Recorder
from .common import ctx, fid, in_scope, ms, np, rid, tf

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "int32": np.int32,
    "uint32": np.uint32,
    "int64": np.int64,
    "uint64": np.uint64,
    "complex64": np.complex64,
    "complex128": np.complex128,
}


def _reduced(s, op, value):
    """Return what run shows of the all-reduce of ``value()``."""
    return s.run(lambda: ctx().all_reduce(op, value()))


def all_reduce_basic(s, n, comm):
    r = Recorder(s, comm)
    for op in ("SUM", "MEAN"):
        r(f"{op}_scalar", lambda op=op: _reduced(s, op, lambda: fid() + 1.0))
        r(
            f"{op}_matrix",
            lambda op=op: _reduced(s, op, lambda: tf.range(6.0).reshape(2, 3) * (fid() + 1.0)),
        )
        r(
            f"{op}_nest",
            lambda op=op: _reduced(s, op, lambda: {"a": fid(), "b": [fid() * 2, (fid() * 3,)]}),
        )
        r(f"{op}_empty_tensor", lambda op=op: _reduced(s, op, lambda: tf.zeros([0, 3])))
    r("enum_op", lambda: _reduced(s, ms.ReduceOp.SUM, fid))
    r("lower_case_op", lambda: _reduced(s, "sum", fid))
    r("mixed_case_op", lambda: _reduced(s, "Mean", fid))
    r("bad_op_MAX", lambda: _reduced(s, "MAX", fid))
    r("bad_op_int", lambda: _reduced(s, 3, fid))
    r("op_VariableAggregation", lambda: _reduced(s, ms.VariableAggregation.SUM, fid))
    r("python_float", lambda: _reduced(s, "SUM", lambda: 1.5))
    r("python_int", lambda: _reduced(s, "SUM", lambda: 2))
    r("python_float_per_replica", lambda: _reduced(s, "SUM", lambda: 1.5 + int(rid())))
    r(
        "numpy_array",
        lambda: _reduced(s, "SUM", lambda: np.array([1.0, 2.0], "float32") * (1 + int(rid()))),
    )
    four = tf.constant(4.0)
    r("same_tensor_object_on_all_replicas", lambda: _reduced(s, "SUM", lambda: four))
    r("same_tensor_object_MEAN", lambda: _reduced(s, "MEAN", lambda: four))
    r("tf_constant_literal", lambda: _reduced(s, "SUM", lambda: tf.constant(4.0)))
    r("tf_identity", lambda: _reduced(s, "SUM", lambda: tf.identity(4.0)))
    options = ms.CommunicationOptions(bytes_per_pack=1, timeout_seconds=30.0)
    r("options", lambda: s.run(lambda: ctx().all_reduce("SUM", [fid(), fid()], options)))
    r("empty_list", lambda: _reduced(s, "SUM", list))
    r("none", lambda: _reduced(s, "SUM", lambda: None))
    r(
        "return_type_in_replica",
        lambda: s.run(lambda: type(ctx().all_reduce("SUM", fid())).__name__),
    )
    r("result_of_run_type", lambda: type(_reduced(s, "SUM", fid)).__name__)
    r("in_cross_replica_context", lambda: in_scope(s, lambda: ctx().all_reduce("SUM", 1.0)))
    pair = tf.constant([1.0, 2.0])
    r("default_strategy", lambda: ms.get_replica_context().all_reduce("SUM", pair))
    r("default_strategy_mean", lambda: ms.get_replica_context().all_reduce("MEAN", pair))
    return r


def all_reduce_dtypes(s, n, comm):
    r = Recorder(s, comm)

    def value(name):
        if name == "bool":
            return np.array([True, False])
        if name == "string":
            return np.array(["a", "b"])
        return tf.cast(tf.constant([1, 2]) * (rid() + 1) + 1, DTYPES[name])

    for name in (*DTYPES, "bool", "string"):
        for op in ("SUM", "MEAN"):
            r(f"{op}_{name}", lambda op=op, name=name: _reduced(s, op, lambda: value(name)))
    return r


def all_reduce_int_nests(s, n, comm):
    r = Recorder(s, comm)

    def long():
        return tf.cast(rid(), tf.int64)

    def stacked():
        return tf.constant([int(rid()), int(rid()) * 2])

    r("two_int32", lambda: _reduced(s, "SUM", lambda: [rid() + 1, rid() + 2]))
    r("int32_and_float32", lambda: _reduced(s, "SUM", lambda: [rid() + 1, fid()]))
    r("one_int32_in_list", lambda: _reduced(s, "SUM", lambda: [rid() + 1]))
    r("two_int64", lambda: _reduced(s, "SUM", lambda: [long(), long() + 1]))
    r("int64_and_float32", lambda: _reduced(s, "SUM", lambda: [long(), fid()]))
    r("int32_MEAN_exact", lambda: _reduced(s, "MEAN", lambda: tf.constant([2, 4])))
    r("int32_MEAN_inexact", lambda: _reduced(s, "MEAN", stacked))
    r("int64_MEAN_inexact", lambda: _reduced(s, "MEAN", lambda: tf.cast(stacked(), tf.int64)))
    r("int32_overflow_sum", lambda: _reduced(s, "SUM", lambda: tf.constant(2**31 - 1)))
    r("uint8_overflow_sum", lambda: _reduced(s, "SUM", lambda: np.uint8(200) + np.uint8(rid())))
    return r


def all_reduce_indexed_slices(s, n, comm):
    r = Recorder(s, comm)

    def rows(index):
        return lambda: ms.IndexedSlices((fid() + 1.0).reshape(1, 1), index(), [5, 1])

    def dense(op, value):
        return s.run(lambda: np.asarray(ctx().all_reduce(op, value())))

    own = rows(lambda: rid().reshape(1))
    for op in ("SUM", "MEAN"):
        r(op, lambda op=op: _reduced(s, op, own))
        r(f"{op}_dense", lambda op=op: dense(op, own))
    r("SUM_same_index_dense", lambda: dense("SUM", rows(lambda: tf.constant([2]))))
    return r


def all_reduce_shape_mismatch_float(s, n, comm):
    r = Recorder(s, comm)
    r("float_diff_len", lambda: _reduced(s, "SUM", lambda: tf.ones([1 + int(rid())])))
    return r


def all_reduce_shape_mismatch_int32(s, n, comm):
    r = Recorder(s, comm)
    r("int32_diff_len", lambda: _reduced(s, "SUM", lambda: tf.ones([1 + int(rid())], tf.int32)))
    r("float_after", lambda: _reduced(s, "SUM", fid))
    return r


def all_reduce_broadcastable_mismatch(s, n, comm):
    r = Recorder(s, comm)
    for name in ("int32", "float"):
        dtype = tf.int32 if name == "int32" else tf.float32
        r(
            f"[1]_vs_[3]_{name}",
            lambda dtype=dtype: _reduced(
                s, "SUM", lambda: tf.ones([1 if rid() == 0 else 3], dtype)
            ),
        )
    return r


def all_reduce_dtype_mismatch(s, n, comm):
    r = Recorder(s, comm)
    wide = (tf.float32, tf.float64)
    r("f32_vs_f64", lambda: _reduced(s, "SUM", lambda: tf.ones([2], wide[min(int(rid()), 1)])))
    return r


def all_reduce_structure_mismatch(s, n, comm):
    r = Recorder(s, comm)
    r("list1_vs_list2", lambda: _reduced(s, "SUM", lambda: [fid()] * (1 + int(rid()))))
    return r


def all_reduce_gradient(s, n, comm):
    """The recorded program, with the gradients of its losses by their results written out."""
    r = Recorder(s, comm)

    def one(op):
        mine = fid() + np.float32(1)
        y, pull = ms.vjp.all_reduce(op, tf.constant([1.0, 2.0]) * mine)
        return y, pull(np.float32(2) * y * mine)  # of sum(y * y) * mine

    def two(op):
        x = fid() + np.float32(1)
        y, pull = ms.vjp.all_reduce(op, [x * np.float32(2), x * np.float32(3)])
        first, second = pull([y[1], y[0]])  # of y[0] * y[1]
        return np.float32(2) * first + np.float32(3) * second

    for op in ("SUM", "MEAN"):
        r(op, lambda op=op: s.run(one, args=(op,)))
        r(f"{op}_nest", lambda op=op: s.run(two, args=(op,)))
    return r


PROGRAMS = (
    all_reduce_gradient,
    all_reduce_basic,
    all_reduce_dtypes,
    all_reduce_int_nests,
    all_reduce_indexed_slices,
    all_reduce_shape_mismatch_float,
    all_reduce_shape_mismatch_int32,
    all_reduce_broadcastable_mismatch,
    all_reduce_dtype_mismatch,
    all_reduce_structure_mismatch,
)
