"""Strategy.reduce with and without axis, and experimental_local_results."""

from __future__ import annotations

from ..recorder import Recorder
from .common import in_scope, ms, np, per_replica, tf


def reduce_axis_none(s, n, comm):
    r = Recorder(s, comm)

    def reduced(op, value):
        return s.reduce(op, value, axis=None)

    def each(f):
        return per_replica(s, f)

    for op in ("SUM", "MEAN", "sum"):
        r(f"{op}_scalar", lambda op=op: reduced(op, each(lambda i: tf.constant(float(i + 1)))))
        r(
            f"{op}_vector",
            lambda op=op: reduced(op, each(lambda i: tf.constant([1.0, 2.0]) * (i + 1))),
        )
        for name in ("int32", "int64"):
            r(
                f"{op}_{name}",
                lambda op=op, name=name: reduced(
                    op, each(lambda i: tf.constant([1, 2], name) * (i + 1) + i)
                ),
            )
    r("SUM_numpy_per_replica", lambda: reduced("SUM", each(lambda i: np.float32([1, 2]) * i)))
    r("SUM_python_float_per_replica", lambda: reduced("SUM", each(float)))
    r("plain_tensor_SUM", lambda: reduced("SUM", tf.constant(3.0)))
    r("plain_tensor_MEAN", lambda: reduced("MEAN", tf.constant(3.0)))
    r("plain_py_float_SUM", lambda: reduced("SUM", 3.0))
    r("plain_py_float_MEAN", lambda: reduced("MEAN", 3.0))
    r("plain_py_zero_SUM", lambda: reduced("SUM", 0))
    r("plain_np_zero_SUM", lambda: reduced("SUM", np.float32(0)))
    r("plain_np_zeros_SUM", lambda: reduced("SUM", np.zeros([2], "float32")))
    r("plain_tensor_zero_SUM", lambda: reduced("SUM", tf.constant(0.0)))
    r("run_constant_5_SUM", lambda: reduced("SUM", s.run(lambda: 5)))
    r("run_literal_float_SUM", lambda: reduced("SUM", s.run(lambda: 2.5)))

    def one(i):
        return tf.constant(float(i))

    def two(i):
        return tf.constant(2.0 * i)

    r("nest_dict_SUM", lambda: reduced("SUM", {"a": each(one), "b": [each(two)]}))
    r("nest_tuple_MEAN", lambda: reduced("MEAN", (each(one), each(two))))
    _reduce_errors(r, s, each(lambda i: tf.constant(1.0)))
    r("diff_shapes", lambda: reduced("SUM", each(lambda i: tf.ones([i + 1]))))
    r("broadcastable_shapes", lambda: reduced("SUM", each(lambda i: tf.ones([3 if i else 1]))))
    r("bool", lambda: reduced("SUM", each(lambda i: np.array(True))))
    r("string_dtype", lambda: reduced("SUM", each(lambda i: np.array("a"))))
    return r


def _reduce_errors(r, s, ones):
    r("bad_op", lambda: s.reduce("MAX", ones, axis=None))
    r("bad_op_type_none_axis", lambda: s.reduce(None, ones, axis=None))
    r("bad_op_type_axis0", lambda: s.reduce(None, per_replica(s, lambda i: tf.ones([1])), axis=0))
    r("axis_missing", lambda: s.reduce("SUM", ones))
    r("result_type", lambda: type(s.reduce("SUM", ones, axis=None)).__name__)
    r("works_in_scope_too", lambda: in_scope(s, lambda: s.reduce("SUM", ones, axis=None)))
    other = ms.OneDeviceStrategy("cpu")
    r("other_strategy_scope", lambda: in_scope(other, lambda: s.reduce("SUM", ones, axis=None)))


def reduce_axis(s, n, comm):
    r = Recorder(s, comm)

    def each(*args):
        return per_replica(s, lambda i: tf.constant(*args))

    def plus(dtype):
        return per_replica(s, lambda i: tf.constant([1, 2, 4], dtype) + tf.cast(i, dtype))

    def matrix():
        return per_replica(s, lambda i: tf.range(6.0).reshape(2, 3) + np.float32(10 * i))

    for op in ("SUM", "MEAN"):
        for axis in (0, 1, -1, -2, (0, 1), [0, 1], (-1,), ()):
            r(f"{op}_axis{axis}", lambda op=op, axis=axis: s.reduce(op, matrix(), axis=axis))
        r(f"{op}_axis2_out_of_range", lambda op=op: s.reduce(op, matrix(), axis=2))
        r(f"{op}_axis-3_out_of_range", lambda op=op: s.reduce(op, matrix(), axis=-3))
        r(f"{op}_axis_str", lambda op=op: s.reduce(op, matrix(), axis="0"))
        r(f"{op}_axis_float", lambda op=op: s.reduce(op, matrix(), axis=0.0))
        r(f"{op}_scalar_axis0", lambda op=op: s.reduce(op, each(1.0), axis=0))
        plain = tf.constant([1.0, 2.0, 6.0])
        r(f"{op}_plain_tensor_axis0", lambda op=op, plain=plain: s.reduce(op, plain, axis=0))
        r(f"{op}_nest_axis0", lambda op=op: s.reduce(op, {"a": matrix()}, axis=0))
        r(f"{op}_int32_axis0", lambda op=op: s.reduce(op, plus(tf.int32), axis=0))
        r(f"{op}_int64_axis0", lambda op=op: s.reduce(op, plus(tf.int64), axis=0))
        r(f"{op}_uint8_axis0", lambda op=op: s.reduce(op, each([100] * 3, np.uint8), axis=0))
        r(f"{op}_float16_axis0", lambda op=op: s.reduce(op, each([1, 2, 4], np.float16), axis=0))
        r(f"{op}_bool_axis0", lambda op=op: s.reduce(op, each([True]), axis=0))
    return r


def seed3_reduce_uneven(s, n, comm):
    r = Recorder(s, comm)
    none = tf.zeros([0])

    def full(i):
        return tf.range(4.0 * i, 4.0 * i + 4.0) if i < 2 else none

    def part(i):
        return tf.constant([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]][i]) if i < 2 else none

    def first(i):
        return tf.constant([8.0, 9.0]) if i == 0 else none

    def rows(i):
        return np.full([i + 1, 2], i, np.float32)

    def reduced(op, f, axis):
        return s.reduce(op, per_replica(s, f), axis=axis)

    def mean(v):
        with np.errstate(invalid="ignore"):
            return np.divide(v.sum(), np.float32(v.size))

    r("full_SUM_none", lambda: reduced("SUM", full, None))
    r("full_SUM_0", lambda: reduced("SUM", full, 0))
    r("part_SUM_none", lambda: reduced("SUM", part, None))
    r("part_SUM_0", lambda: reduced("SUM", part, 0))
    r("part_MEAN_0", lambda: reduced("MEAN", part, 0))
    means = s.run(mean, args=(per_replica(s, part),))
    r("part_MEAN_of_means", lambda: s.reduce("MEAN", means, axis=None))
    r("others_empty_SUM_0", lambda: reduced("SUM", first, 0))
    r("others_empty_MEAN_0", lambda: reduced("MEAN", first, 0))
    r("all_empty_SUM_0", lambda: reduced("SUM", lambda i: none, 0))
    r("all_empty_MEAN_0", lambda: reduced("MEAN", lambda i: none, 0))
    r("all_empty_MEAN_0_int", lambda: reduced("MEAN", lambda i: tf.zeros([0], tf.int32), 0))
    r("uneven_2d_MEAN_0", lambda: reduced("MEAN", rows, 0))
    r("uneven_2d_MEAN_1", lambda: reduced("MEAN", rows, 1))
    r("uneven_2d_SUM_1", lambda: reduced("SUM", rows, 1))
    r("uneven_2d_MEAN_01", lambda: reduced("MEAN", rows, (0, 1)))
    return r


def local_results(s, n, comm):
    r = Recorder(s, comm)
    local = s.experimental_local_results
    with s.scope():
        v = ms.Variable(tf.constant(1.5), name="v")
        o = ms.Variable(
            tf.constant(2.5),
            name="o",
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )

    def each(plus=0):
        return per_replica(s, lambda i: tf.constant(float(i) + plus))

    r("per_replica", lambda: local(each()))
    r("plain_tensor", lambda: local(tf.constant(1.0)))
    r("py_int", lambda: local(3))
    r("none", lambda: local(None))
    r("list_plain", lambda: local([1, 2]))
    r("tuple_plain", lambda: local((1, 2)))
    r("dict_mixed", lambda: local({"a": each(), "b": 7}))
    r("nested", lambda: local([each(), (each(1), 3)]))
    r("empty_list", lambda: local([]))
    r("mirrored_variable_types", lambda: [type(x).__name__ for x in local(v)])
    r("on_read_variable", lambda: local(o))
    shared = each()
    r("mirrored_value", lambda: local(s.extended.reduce_to("SUM", shared, shared)))
    r("numpy", lambda: local(np.array([1, 2])))
    r("string", lambda: local("abc"))
    return r


PROGRAMS = (reduce_axis_none, reduce_axis, seed3_reduce_uneven, local_results)
