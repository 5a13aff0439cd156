"""ReplicaContext.all_gather: axes, uneven and empty parts, dtypes, differences between replicas."""

from __future__ import annotations

from ..recorder import Recorder
from .common import ctx, fid, in_scope, ms, np, rid, tf


def _gathered(s, value, axis=0):
    """Return what run shows of the all-gather of ``value()``."""
    return s.run(lambda: ctx().all_gather(value(), axis=axis))


def _filled(rows, columns=2):
    return np.full([rows, columns], fid(), np.float32)


def seed1_all_gather(s, n, comm):
    r = Recorder(s, comm)

    def one():
        return tf.constant([1, 2, 3])

    def two():
        return [tf.constant([1, 2, 3]), tf.constant([[1, 2], [3, 4]])]

    r("gather_value", lambda: _gathered(s, one))
    r("gather_nest", lambda: _gathered(s, two))
    r("local_results_value", lambda: s.experimental_local_results(_gathered(s, one)))
    r("local_results_nest", lambda: s.experimental_local_results(_gathered(s, two)))
    return r


def all_gather_axes(s, n, comm):
    r = Recorder(s, comm)

    def box():
        return tf.range(6.0).reshape(1, 2, 3) + np.float32(100.0) * fid()

    for axis in (0, 1, 2):
        r(f"axis{axis}", lambda axis=axis: _gathered(s, box, axis))
    r(
        "dict_nest",
        lambda: _gathered(s, lambda: {"a": fid().reshape(1), "b": [fid().reshape(1, 1)]}),
    )
    r("uneven_axis0", lambda: _gathered(s, lambda: _filled(int(rid()) + 1)))
    # In a tf.function the program makes two rows on every replica.
    r("uneven_axis0@function", lambda: _gathered(s, lambda: _filled(2)))
    r("uneven_axis1", lambda: _gathered(s, lambda: _filled(2, int(rid()) + 1), 1))
    r("empty_on_replica_0", lambda: _gathered(s, lambda: _filled(int(rid()))))
    r("all_empty_int32", lambda: _gathered(s, lambda: tf.zeros([0, 2], tf.int32)))
    r("empty_list", lambda: _gathered(s, list))
    r("python_list_is_a_nest_of_scalars", lambda: _gathered(s, lambda: [1.0, 2.0]))

    def value(name):
        if name == "bool":
            return np.array([True])
        if name == "string":
            return np.array(["a"])
        return tf.cast((rid() + 1).reshape(1), np.dtype(name))

    for name in ("float16", "float64", "int32", "int64", "uint8", "bool", "complex64", "string"):
        r(f"dtype_{name}", lambda name=name: _gathered(s, lambda: value(name)))
    r("default_strategy", lambda: ms.get_replica_context().all_gather(tf.constant([1, 2]), axis=0))
    return r


def all_gather_negative_axis(s, n, comm):
    r = Recorder(s, comm)
    for axis in (-1, -2):
        r(
            f"int32_axis{axis}",
            lambda axis=axis: _gathered(s, lambda: tf.range(6).reshape(2, 3) + 100 * rid(), axis),
        )
    return r


def _negative_float(s, comm, axis):
    r = Recorder(s, comm)

    def value():
        return tf.range(6.0).reshape(2, 3) + np.float32(100.0) * fid()

    r(f"float_axis{axis}", lambda: _gathered(s, value, axis))
    return r


def all_gather_negative_axis_float(s, n, comm):
    return _negative_float(s, comm, -1)


def all_gather_negative_axis_float2(s, n, comm):
    return _negative_float(s, comm, -2)


def all_gather_all_empty_float(s, n, comm):
    r = Recorder(s, comm)
    # The recorded process died in this one, so that is the case's name.
    r("__process__", lambda: _gathered(s, lambda: tf.zeros([0, 2])))
    return r


def all_gather_scalar_float(s, n, comm):
    r = Recorder(s, comm)
    r("scalar_float", lambda: _gathered(s, fid))
    return r


def all_gather_errors_int32(s, n, comm):
    r = Recorder(s, comm)

    def more():
        return 1 + int(rid())

    def ones():
        return tf.ones([1], tf.int32)

    def rows():
        return ms.IndexedSlices(tf.ones([1, 1]), tf.constant([0]), [2, 1])

    r("scalar", lambda: _gathered(s, rid))
    r("indexed_slices", lambda: _gathered(s, rows))
    r("diff_non_axis_dim", lambda: _gathered(s, lambda: tf.ones([1, more()], tf.int32)))
    r("diff_rank", lambda: _gathered(s, lambda: tf.ones([1] * more(), tf.int32)))
    r("axis_out_of_range", lambda: _gathered(s, ones, 1))
    r("axis_none", lambda: _gathered(s, ones, None))
    r("in_cross_replica", lambda: in_scope(s, lambda: ctx().all_gather(tf.ones([1]), axis=0)))
    return r


def all_gather_float_diff_dim(s, n, comm):
    r = Recorder(s, comm)
    r("float_diff_non_axis_dim", lambda: _gathered(s, lambda: tf.ones([1, 1 + int(rid())])))
    return r


def all_gather_float_diff_rank(s, n, comm):
    r = Recorder(s, comm)
    r("float_diff_rank", lambda: _gathered(s, lambda: tf.ones([1] * (1 + int(rid())))))
    return r


def all_gather_axis_out_of_range_float(s, n, comm):
    r = Recorder(s, comm)
    r("float_axis_out_of_range", lambda: _gathered(s, lambda: tf.ones([1]), 1))
    return r


PROGRAMS = (
    seed1_all_gather,
    all_gather_axes,
    all_gather_negative_axis,
    all_gather_negative_axis_float,
    all_gather_negative_axis_float2,
    all_gather_all_empty_float,
    all_gather_scalar_float,
    all_gather_errors_int32,
    all_gather_float_diff_dim,
    all_gather_float_diff_rank,
    all_gather_axis_out_of_range_float,
)
