"""Strategy.run: arguments, results, errors."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

from ..recorder import Recorder
from .common import ctx, fid, ms, np, per_replica, rid, tf


class NT(NamedTuple):
    a: Any
    b: Any


def run_basic(s, n, comm):
    r = Recorder(s, comm)

    def one(value):
        return lambda i: tf.constant(value * i)

    def kinds():
        here = ctx()
        return (
            type(here.replica_id_in_sync_group).__name__,
            type(here.num_replicas_in_sync).__name__,
        )

    r("replica_id", lambda: s.run(lambda: ctx().replica_id_in_sync_group))
    r("num_replicas_in_sync", lambda: s.num_replicas_in_sync)
    r("types_inside", lambda: s.run(kinds))
    plain = (tf.constant(1.0), tf.constant([1.0, 2.0]))
    r("args_plain", lambda: s.run(lambda a, b: a + b * fid(), args=plain))
    r("args_list_ok", lambda: s.run(lambda a: a, args=[tf.constant(1.0)]))
    named = {"a": per_replica(s, one(1.0)), "b": 1.0}
    r("kwargs", lambda: s.run(lambda a, b: a - b, kwargs=named))
    r("args_per_replica", lambda: s.run(lambda a: a * 10.0, args=(per_replica(s, one(1.0)),)))
    nested = {"x": per_replica(s, one(1.0)), "y": [per_replica(s, one(10.0))], "z": 100.0}
    r(
        "args_nested_per_replica",
        lambda: s.run(lambda d: d["x"] + d["y"][0] + d["z"], args=(nested,)),
    )
    r("args_not_tuple_scalar", lambda: s.run(lambda a: a, args=3))
    r("args_not_tuple_tensor", lambda: s.run(lambda a: a, args=tf.constant(3.0)))
    r("args_numpy", lambda: s.run(lambda a: a, args=(np.array([1.0, 2.0], "float32"),)))
    return r


def run_return_identity_rule(s, n, comm):
    r = Recorder(s, comm)
    shared = tf.constant(7.0)
    r("none", lambda: s.run(lambda: None))
    r("small_int", lambda: s.run(lambda: 5))
    r("literal_str", lambda: s.run(lambda: "abc"))
    r("literal_float_same_code_object", lambda: s.run(lambda: 2.5))
    r("big_int_fresh", lambda: s.run(lambda: int("123456789")))
    r("fresh_float", lambda: s.run(lambda: float("2.5")))
    r("fresh_equal_tensor", lambda: s.run(lambda: tf.constant(7.0) + 0.0))
    r("shared_tensor", lambda: s.run(lambda: shared))
    r("tf_constant_literal", lambda: s.run(lambda: tf.constant(7.0)))
    r("fresh_str", lambda: s.run(lambda: f"id{int(rid())}"))
    r("bool", lambda: s.run(lambda: True))
    r("mixed_py_types", lambda: s.run(lambda: 1 if int(rid()) == 0 else "x"))
    r("object", lambda: type(s.run(lambda: object())).__name__)
    r("fn_returns_arg_plain", lambda: s.run(lambda a: a, args=(shared,)))
    r("fn_returns_arg_list", lambda: s.run(lambda a: a, args=([shared, 1],)))
    return r


def run_nests(s, n, comm):
    r = Recorder(s, comm)
    ordered = collections.OrderedDict
    r("dict", lambda: s.run(lambda: {"a": fid(), "b": fid() * 2}))
    r("list", lambda: s.run(lambda: [fid(), tf.constant(1.0)]))
    r("tuple", lambda: s.run(lambda: (fid(), [fid() + 1], {"k": (fid() + 2,)})))
    r("namedtuple", lambda: s.run(lambda: NT(fid(), 3)))
    r("ordereddict", lambda: s.run(lambda: ordered([("z", fid()), ("a", fid())])))
    r("with_none", lambda: s.run(lambda: (fid(), None)))
    r("empty_tuple", lambda: s.run(lambda: ()))
    r("empty_list", lambda: s.run(lambda: []))
    r("empty_dict", lambda: s.run(lambda: {}))
    r("list_len_mismatch", lambda: s.run(lambda: [fid()] * (1 + int(rid()))))
    r("tuple_len_mismatch", lambda: s.run(lambda: (fid(),) * (1 + int(rid()))))
    r("dict_key_mismatch", lambda: s.run(lambda: {f"k{int(rid())}": 1}))
    r("type_mismatch_list_tuple", lambda: s.run(lambda: [fid()] if rid() == 0 else (fid(),)))
    r("type_mismatch_tensor_list", lambda: s.run(lambda: fid() if rid() == 0 else [fid()]))
    return r


def run_errors(s, n, comm):
    r = Recorder(s, comm)
    order = []

    def boom():
        if int(rid()) == 1:
            raise ValueError("boom on replica 1")
        return fid()

    def log():
        order.append(int(rid()))
        if int(rid()) == 0:
            raise KeyError("boom on replica 0")

    def merged(fn, *args):
        return s.run(lambda: ctx().merge_call(fn, args=[a() for a in args]))

    def enter():
        with s.scope():
            return 1

    def distribute():
        return s.experimental_distribute_dataset(ms.Dataset.range(4).batch(2))

    r("exception_on_replica_1", lambda: s.run(boom))
    r("exception_on_replica_0", lambda: s.run(log))
    r("replicas_that_ran_when_0_raised", lambda: list(order))
    r("run_inside_run", lambda: s.run(lambda: s.run(lambda: fid())))
    r("reduce_inside_run", lambda: s.run(lambda: s.reduce("SUM", fid(), axis=None)))
    r("gather_inside_run", lambda: s.run(lambda: s.gather(fid().reshape(1), axis=0)))
    r(
        "call_for_each_replica_inside_run",
        lambda: s.run(lambda: s.extended.call_for_each_replica(lambda: 1)),
    )
    r("local_results_inside_run", lambda: s.run(lambda: s.experimental_local_results(fid())))
    r("scope_inside_run", lambda: s.run(enter))
    r("run_inside_merge_fn", lambda: merged(lambda st: st.run(lambda: fid())))
    r("reduce_inside_merge_fn", lambda: merged(lambda st, v: st.reduce("SUM", v, axis=None), fid))
    r("distribute_dataset_inside_run", lambda: type(s.run(distribute)).__name__)
    r("still_usable_afterwards", lambda: s.run(lambda: fid()))
    return r


PROGRAMS = (run_basic, run_return_identity_rule, run_nests, run_errors)
