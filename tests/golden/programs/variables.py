"""Variables: every kind of them, their creation, and one training step by hand."""

from __future__ import annotations

import contextlib

from ..recorder import Recorder, variable_kind
from .common import ctx, fid, in_scope, ms, np, per_replica, rid, tf

S = ms.VariableSynchronization
A = ms.VariableAggregation


def variables_matrix(s, n, comm):
    r = Recorder(s, comm)
    for sync in S:
        for aggregation in A:
            r.prefix = f"{sync.name}/{aggregation.name}/"
            _one_kind(r, s, sync, aggregation)
    return r


def _one_kind(r, s, sync, aggregation):
    made = []

    def create():
        with s.scope():
            made.append(
                ms.Variable(tf.constant(1.0), synchronization=sync, aggregation=aggregation)
            )
        return variable_kind(made[0])

    r("create", create)
    if not made:
        return
    (v,) = made
    r("read_cross", v.read_value)
    r("convert_cross", lambda: np.array(v))
    r("numpy_cross", lambda: float(v.numpy()))
    r("plus_cross", lambda: v + 1.0)
    r("read_replica", lambda: s.run(v.read_value))
    for name, write in _writes(s, v):
        _set_copies(s, v, lambda: 1.0)
        r(name, write)
        r(f"{name}.components", lambda: _copies(s, v))
    _set_copies(s, v, lambda: fid() + 1.0)
    r("read_cross_when_components_differ", v.read_value)
    r("value_cross_when_components_differ", v.value)
    r("read_replica_when_components_differ", lambda: s.run(v.read_value))
    r("reduce_SUM", lambda: s.reduce("SUM", v, axis=None))
    r("reduce_MEAN", lambda: s.reduce("MEAN", v, axis=None))
    r("local_results", lambda: _copies(s, v))
    r("gather", lambda: s.gather(v, axis=0))
    r("all_reduce_var_in_replica", lambda: s.run(lambda: ctx().all_reduce("SUM", v)))


def _writes(s, v):
    six = tf.constant(6.0)

    def everywhere(write, value):
        return lambda: s.run(lambda: write(value()))

    def two():
        return fid() + 2.0

    def literal():
        return 6.0

    return [
        ("assign_cross_6", lambda: v.assign(6.0)),
        ("assign_add_cross_6", lambda: v.assign_add(6.0)),
        ("assign_sub_cross_6", lambda: v.assign_sub(6.0)),
        (
            "assign_cross_per_replica",
            lambda: v.assign(per_replica(s, lambda i: tf.constant(float(i)))),
        ),
        ("assign_replica_tensor", everywhere(v.assign, two)),
        ("assign_replica_literal", everywhere(v.assign, literal)),
        ("assign_add_replica_tensor", everywhere(v.assign_add, two)),
        ("assign_add_replica_literal", everywhere(v.assign_add, literal)),
        ("assign_sub_replica_tensor", everywhere(v.assign_sub, two)),
        ("assign_replica_same_tensor_object", everywhere(v.assign, lambda: six)),
    ]


def _set_copies(s, v, value):
    """Set every replica's own copy, as the recorded program did by hand.

    An ON_WRITE variable lets nobody write one copy: it is set to replica 0's value.
    """
    if v._is_on_read:
        s.run(lambda: v.assign(value()))
        return
    values = s.run(value)
    v.assign(np.float32(s.experimental_local_results(values)[0]))
    with contextlib.suppress(ValueError):  # the copy is read-only
        v._component()[...] = values.local


def _copies(s, v):
    return [float(copy) for copy in s.experimental_local_results(v)]


def variables_creation(s, n, comm):
    r = Recorder(s, comm)
    made = []
    calls = []

    def inside():
        made.append(ms.Variable(fid() + 10.0, name="inrun"))
        return made[0].read_value()

    def initial():
        calls.append(1)
        return tf.constant(3.0)

    def kinds():
        return {str(rank): kind for rank, kind in enumerate(r.exchange(variable_kind(made[0])))}

    name = "created_inside_run (same variable, replica 0 initial value)"
    r(name, lambda: s.run(inside))
    r("created_inside_run_types", kinds)
    r("callable_initial_value", lambda: in_scope(s, lambda: ms.Variable(initial, name="cb")))
    r("callable_initial_value_calls", lambda: len(calls))
    with s.scope():
        v = ms.Variable(tf.constant([1.0, 2.0]), name="w")
    with s.scope():
        w = ms.Variable(tf.constant(1.0), name="named", trainable=False)
    r(
        "attrs",
        lambda: {
            "name": w.name,
            "trainable": w.trainable,
            "dtype": w.dtype.name,
            "shape": list(v.shape),
            "sync": str(v.synchronization),
            "agg": str(v.aggregation),
            "type": variable_kind(v),
        },
    )
    _belonging(r, s, v)
    with ms.OneDeviceStrategy("cpu").scope():
        r("assign_under_other_strategy_scope", lambda: v.assign(v * 2.0))
    r("var_outside_scope_type", lambda: variable_kind(ms.Variable(1.0)))
    r("assign_outside_any_scope", lambda: v.assign([3.0, 4.0]))
    r("bad_aggregation", lambda: in_scope(s, lambda: ms.Variable(1.0, aggregation=9)))
    r("bad_synchronization", lambda: in_scope(s, lambda: ms.Variable(1.0, synchronization=9)))
    r(
        "operator_overloads",
        lambda: [v + 1.0, 1.0 + v, v * 2.0, -v, v**2.0, v[0], abs(v), v > 1.0],
    )
    r("handle_in_cross", lambda: v.handle)
    r(
        "read_value_in_merge_fn",
        lambda: s.run(lambda: ctx().merge_call(lambda st: v.read_value())),
    )
    return r


def _belonging(r, s, v):
    outside = ms.Variable(tf.constant(1.0))

    def beside():
        with s.scope(), s.extended.colocate_vars_with(v):
            made = ms.Variable(tf.constant(5.0))
        pairs = zip(made.values, v.values, strict=True)
        return variable_kind(made), [made.device == v.device for _ in pairs]

    def entered(variable):
        with s.extended.colocate_vars_with(variable):
            pass

    created = s.extended.variable_created_in_scope
    r("variable_created_in_scope_yes", lambda: created(v))
    r("variable_created_in_scope_no", lambda: created(outside))
    r(
        "variable_created_in_scope_default",
        lambda: ms.get_strategy().extended.variable_created_in_scope(outside),
    )
    r("colocate_vars_with", beside)
    r("colocate_vars_with_outside_var", lambda: in_scope(s, lambda: entered(outside)))
    r("colocate_vars_with_out_of_scope", lambda: entered(v))


def variables_scatter(s, n, comm):
    r = Recorder(s, comm)
    kinds = ("add", "sub", "mul", "div", "min", "max", "update")

    def rows(values, indices):
        return ms.IndexedSlices(np.asarray(values, np.float32), indices, [3])

    def written(aggregation, kind):
        with s.scope():
            v = ms.Variable(tf.constant([4.0, 4.0, 4.0]), aggregation=aggregation)
        try:
            s.run(lambda: getattr(v, f"scatter_{kind}")(rows([fid() + 2.0], [1])))
        except Exception:
            assert v.numpy().tolist() == [4.0, 4.0, 4.0]
            raise
        return [np.array(copy).tolist() for copy in s.experimental_local_results(v)]

    def on_read():
        with s.scope():
            v = ms.Variable(
                tf.constant([4.0, 4.0, 4.0]), aggregation=A.SUM, synchronization=S.ON_READ
            )
        return s.run(lambda: v.scatter_add(rows([fid()], [1])))

    for aggregation in A:
        for kind in kinds:
            r(
                f"{aggregation.name}_scatter_{kind}_replica",
                lambda a=aggregation, k=kind: written(a, k),
            )
    r("ON_READ_scatter_add", on_read)
    return r


def variables_created_unevenly(s, n, comm):
    r = Recorder(s, comm)

    def only(rank):
        return lambda: ms.Variable(1.0) if int(rid()) == rank else None

    def twice():
        return [ms.Variable(tf.constant(x), name="x").read_value() for x in (1.0, 2.0)]

    r("only_on_replica_0", lambda: type(s.run(only(0))).__name__)
    r("only_on_last_replica", lambda: s.run(only(n - 1)))
    r("different_names", lambda: s.run(lambda: ms.Variable(fid(), name=f"a{int(rid())}")))
    r("same_name_twice_per_replica", lambda: s.run(twice))
    return r


def gradients_and_variables(s, n, comm):
    """The recorded program, with the gradient of its loss written out."""
    r = Recorder(s, comm)
    with s.scope():
        w = ms.Variable(tf.constant([1.0, -1.0]), aggregation=A.MEAN)
        count = ms.Variable(np.int64(0), aggregation=A.ONLY_FIRST_REPLICA)
    x = per_replica(s, lambda i: tf.constant([[1.0 + i, 2.0], [3.0, 4.0 - i]]))
    y = per_replica(s, lambda i: tf.constant([1.0, 0.0]) * (i + 1))

    def step(x, y):
        off = x @ w.read_value() - y
        loss = np.sum(off**2) / np.float32(2 * n)
        gradient = x.T @ off / np.float32(n)
        total = ctx().all_reduce("SUM", gradient)
        w.assign_sub(np.float32(0.1) * total)
        count.assign_add(1)
        return loss, gradient, total

    for i in (1, 2):
        r(f"step{i}", lambda: s.run(step, args=(x, y)))
        r(f"w_after_{i}", lambda: [np.array(c).tolist() for c in s.experimental_local_results(w)])
    r("steps", lambda: [int(c) for c in s.experimental_local_results(count)])

    def around():
        rows = s.run(lambda x: x @ w.read_value(), args=(x,))
        return in_scope(s, lambda: ms.vjp.all_reduce("SUM", rows.local))

    r("tape_around_run_and_reduce", around)
    return r


PROGRAMS = (
    variables_matrix,
    variables_creation,
    variables_scatter,
    variables_created_unevenly,
    gradients_and_variables,
)
