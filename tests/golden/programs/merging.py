"""ReplicaContext.merge_call: what merge_fn sees, where it is, and its errors."""

from __future__ import annotations

from ..recorder import Recorder
from .common import ctx, fid, ms, rid, tf


def seed0_merge_call(s, n, comm):
    r = Recorder(s, comm)
    seen = {}

    def merge_fn(distribution, three_plus_replica_id):
        found = distribution.experimental_local_results(three_plus_replica_id)
        seen["type"] = type(three_plus_replica_id).__name__
        seen["local_results_len"] = len(found)
        return sum(found)

    def fn(three):
        replica = ms.get_replica_context()
        v = three + replica.replica_id_in_sync_group
        return replica.merge_call(merge_fn, args=(v,)) + v

    with s.scope():
        r("merged_results", lambda: s.run(fn, args=[3]))
        r("local_results", lambda: s.experimental_local_results(s.run(fn, args=[3])))
    r("seen", lambda: dict(seen))
    r("call_for_each_replica", lambda: s.extended.call_for_each_replica(fn, args=[3]))
    return r


def merge_call_args(s, n, comm):
    r = Recorder(s, comm)
    shared = tf.constant(5.0)
    log = []

    def describe(st, *a, **k):
        log.append((r.write(a), r.write(k)))

    def fn():
        args = (fid(), 3, "lit", None, shared, [fid(), 7], {"k": fid()}, (1, 2))
        ctx().merge_call(describe, args=args, kwargs={"kw": fid() + 1, "c": 2})

    s.run(fn)
    r("args_seen", lambda: log[-1][0])
    r("kwargs_seen", lambda: log[-1][1])

    def results(st, *values):
        log.append([st.experimental_local_results(v) for v in values])

    s.run(lambda: ctx().merge_call(results, args=(fid(), 3, [fid(), 7], [1, 2])))
    name = "local_results_of_args (PerReplica; plain 3; [PerReplica,7]; [1,2])"
    r(name, lambda: log[-1])

    called = []
    s.run(lambda: ctx().merge_call(lambda st: called.append(st is s)))
    r("merge_fn_called_once", lambda: len(called))
    who = []

    def mine():
        me = int(rid())
        ctx().merge_call(lambda st: who.append(me))

    s.run(mine)
    r("closure_used_is_that_of_replica", lambda: list(who))
    r("positional_strategy_is_s", lambda: list(called))
    return r


def merge_call_context(s, n, comm):
    r = Recorder(s, comm)
    found = {}
    inside = {}

    def flags():
        return {
            "in_cross": ms.in_cross_replica_context(),
            "has_strategy": ms.has_strategy(),
            "replica_ctx_is_none": ms.get_replica_context() is None,
            "get_strategy_is_s": ms.get_strategy() is s,
        }

    r("outside", flags)
    with s.scope():
        r("in_scope", flags)

    def fn():
        inside["replica"] = flags()
        ctx().merge_call(lambda st: inside.__setitem__("merge", flags()))
        inside["replica_after"] = flags()

    s.run(fn)
    r("inside_run", lambda: inside)
    with s.scope():
        v = ms.Variable(1.0)

    def update(copy):
        found.update(flags())
        return copy.assign_add(1.0)

    s.extended.update(v, update)
    r("inside_update", lambda: found)
    return r


def merge_call_errors(s, n, comm):
    r = Recorder(s, comm)
    caught = []
    kept = []

    def nested():
        outer = ctx()
        return outer.merge_call(lambda st: outer.merge_call(lambda st2: 1))

    def uneven():
        ctx().merge_call(lambda st: None)
        if int(rid()) == 0:
            ctx().merge_call(lambda st: None)
        return fid()

    def uneven_last():
        if int(rid()) == n - 1:
            ctx().merge_call(lambda st: None)

    def fails(st):
        raise ZeroDivisionError("in merge_fn")

    def catching():
        try:
            ctx().merge_call(fails)
        except BaseException as error:
            caught.append(type(error).__name__)
            raise

    def more(value):
        return value * (1 + int(rid()))

    r("merge_call_inside_merge_call", lambda: s.run(nested))
    r(
        "get_replica_context_in_merge_fn_merge_call",
        lambda: s.run(lambda: ctx().merge_call(lambda st: ctx().merge_call(lambda q: 1))),
    )
    r("uneven_number_of_merge_calls", lambda: s.run(uneven))
    r("only_last_replica_merge_calls", lambda: s.run(uneven_last))
    r("exception_in_merge_fn", lambda: s.run(lambda: ctx().merge_call(fails)))
    r("exception_in_merge_fn_seen_in_replica", lambda: s.run(catching))
    r("caught_types_in_replicas", lambda: list(caught))
    r(
        "args_structure_mismatch",
        lambda: s.run(lambda: ctx().merge_call(lambda st, v: 1, args=(more([1]),))),
    )
    r(
        "args_count_mismatch",
        lambda: s.run(lambda: ctx().merge_call(lambda st, *v: 1, args=more((1,)))),
    )
    s.run(lambda: kept.append(ctx()))
    r(
        "wrong_context_ctx_from_outer_run",
        lambda: s.run(lambda: kept[0].merge_call(lambda st: 1)),
    )
    r("ctx_used_outside_run", lambda: kept[0].merge_call(lambda st: 1))
    r(
        "nested_tf_function",
        lambda: s.run(lambda: ctx().merge_call(lambda st: tf.constant(1.0))),
    )
    return r


PROGRAMS = (seed0_merge_call, merge_call_args, merge_call_context, merge_call_errors)
