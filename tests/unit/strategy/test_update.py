"""`extended.update`: each rank writes its copy, and the copies stay equal."""

from __future__ import annotations

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

# On copies of each rank, and on copies that a node has in common.
pytestmark = pytest.mark.usefixtures("kept")

Sync, Agg = ms.VariableSynchronization, ms.VariableAggregation


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_arguments_and_results(make):
    def rank(comm):
        s = make()
        with s.scope():
            v = ms.Variable(np.zeros(2))
        step = lambda var, a, b=0.0: (var.assign_sub(a), var.assign_add([b, b]), np.ones(1))  # noqa: E731
        gradient = s.extended.reduce_to("SUM", ms.PerReplica(np.ones(2)), v)
        got = s.extended.update(v, step, args=(gradient,), kwargs={"b": 0.5})
        assert got[0] is v
        one = s.extended.update(v, step, args=(np.ones(2),), group=False)
        kind = type(got[2]).__name__
        return v.numpy().tolist(), kind, len(one[2])

    mirrored = make is ms.MirroredStrategy
    want = ([-3.5, -3.5], "Mirrored" if mirrored else "ndarray", 3 if mirrored else 1)
    assert run_ranks(rank, 3) == [([-3.5, -3.5], *want[1:])] * 3


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_not_grouped_each_leaf_is_a_tuple(make):
    def rank(comm):
        s = make()
        with s.scope():
            same = ms.Variable(1.0)
            own = ms.Variable(1.0, synchronization=Sync.ON_READ, aggregation=Agg.SUM)
        s.run(lambda: own.assign(float(comm.rank)))
        devices = s.extended.non_slot_devices([])
        fn = lambda var: {"a": 1, "b": [var.read_value()]}  # noqa: E731
        return (
            s.extended.update(same, fn, group=False),
            s.extended.update(own, fn, group=False),
            s.extended.update_non_slot(devices, lambda: {"c": 2, "d": None}, group=False),
            s.extended.update(same, lambda var: None, group=False),
        )

    for r, found in enumerate(run_ranks(rank, 3)):
        shown = range(3) if make is ms.MirroredStrategy else [r]
        n = len(shown)
        own = tuple(float(i) for i in shown)
        assert found == (
            {"a": (1,) * n, "b": [(1.0,) * n]},
            {"a": (1,) * n, "b": [own]},
            {"c": (2,) * n, "d": (None,) * n},
            (None,) * n,
        )


def test_reading_and_writing_inside_are_local():
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(2.0, aggregation=Agg.SUM)

        def fn(var):
            assert ms.in_cross_replica_context()
            for _ in range(comm.rank):
                var.read_value()
            var.assign(var.read_value() * 3)
            return float(var.numpy())

        return np.asarray(s.extended.update(v, fn)).tolist(), float(v.numpy())

    assert run_ranks(rank, 2) == [(6.0, 6.0)] * 2


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda r: ms.PerReplica(np.full(2, float(r))), ms.StructureError),
        (lambda r: {"x": ms.PerReplica(float(r))}, ms.StructureError),
        (lambda r: np.full(2, float(r)), ms.LockstepError),
        (lambda r: float(r), ms.LockstepError),
        (lambda r: [np.float32(1.0), np.int32(1065353216)][r], ms.LockstepError),
        (lambda r: np.zeros([(2, 3), (3, 2)][r]), ms.LockstepError),
        (lambda r: [1.0] * (1 + r), ms.LockstepError),
    ],
    ids=[
        "per replica",
        "per replica in a tree",
        "array",
        "number",
        "same bits",
        "shape",
        "structure",
    ],
)
def test_arguments_that_would_make_the_copies_differ(make, error):
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(np.zeros(2))
        called: list[int] = []
        with pytest.raises(error):
            s.extended.update(v, lambda var, x: called.append(1), args=(make(comm.rank),))
        with pytest.raises(error):  # and what it has written is undone
            s.extended.update(v, lambda var, x: var.assign_add([1, 1]), args=(make(comm.rank),))
        return v.numpy().tolist(), float(s.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [([0, 0], 2.0)] * 2


@pytest.mark.parametrize("kind", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_gradients_that_were_reduced_in_replica_code(kind):
    """As optimizers for tf.distribute do: all_reduce, then merge_call, then update."""

    def rank(comm):
        s = kind(comm=comm)
        with s.scope():
            w, b = ms.Variable(np.zeros(3)), ms.Variable(0.0)

        def apply(strategy, pairs):
            for gradient, variable in pairs:
                strategy.extended.update(variable, lambda v, g: v.assign_sub(g), args=(gradient,))

        def step(own):
            given = [np.full(3, own), np.array(own)]
            context = ms.get_replica_context()
            reduced = context.all_reduce("sum", given)
            context.merge_call(apply, args=(list(zip(reduced, [w, b], strict=True)),))

        s.run(step, args=(ms.PerReplica(1.0 + comm.rank),))
        return w.numpy().tolist(), float(b.numpy())

    assert run_ranks(rank, 1) == [([-1.0] * 3, -1.0)]
    assert run_ranks(rank, 3) == [([-6.0] * 3, -6.0)] * 3


@pytest.mark.parametrize("broken", [False, True])
def test_what_it_writes_is_proved_and_undone(broken):
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(np.zeros(2))

        def fn(var):
            var.assign([3.0, 3.0 + (comm.rank and not broken)])
            if broken and comm.rank == 0:
                raise KeyError("after the write")

        with pytest.raises(KeyError if broken else ms.LockstepError):
            s.extended.update(v, fn)
        return v.numpy().tolist(), float(s.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [([0, 0], 2.0)] * 2


def test_mirrored_values_of_two_reductions_are_told_apart():
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(0.0)
        one, two = (s.extended.reduce_to("SUM", ms.PerReplica(float(k)), v) for k in (1, 7))
        with pytest.raises(ms.LockstepError):
            v.assign(one if comm.rank else two)
        array = s.extended.reduce_to("SUM", ms.PerReplica(np.ones(2)), v)
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(array)[0] = comm.rank
        v.assign(one)
        return float(v.numpy())

    assert run_ranks(rank, 2) == [2.0] * 2


def test_a_variable_that_each_replica_owns_takes_values_per_replica():
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(0.0, synchronization=Sync.ON_READ, aggregation=Agg.SUM)
        value = s.run(lambda: float(comm.rank + 1))
        s.extended.update(v, lambda var, x: var.assign(x), args=(value,))
        return float(v.numpy())

    assert run_ranks(rank, 3) == [6.0] * 3


def test_an_exception_on_one_rank_is_one_on_all():
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(0.0)

        def fn(var):
            if comm.rank == 1:
                raise KeyError("mine")

        with pytest.raises(KeyError) as caught:
            s.extended.update(v, fn)
        return isinstance(caught.value, ms.RemoteError), float(
            s.reduce("SUM", ms.PerReplica(1.0), None)
        )

    assert run_ranks(rank, 2) == [(True, 2.0), (False, 2.0)]


@pytest.mark.parametrize("what", [5, None, np.zeros(2), "other"], ids=str)
def test_what_is_no_variable_of_this_strategy(what):
    def rank(comm):
        s = ms.MirroredStrategy()
        var = ms.Variable(1.0) if isinstance(what, str) else what
        with pytest.raises(RuntimeError, match="update"):
            s.extended.update(var, lambda v: None)

    run_ranks(rank, 2)


def test_from_replica_code_it_goes_through_merge_call():
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(1.0)
        s.run(lambda: s.extended.update(v, lambda var: var.assign_add(1.0)) and None)
        return float(v.numpy())

    assert run_ranks(rank, 2) == [2.0, 2.0]


def test_an_update_after_a_write_of_the_same_run_is_undone_in_order():
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable([0, 0])

        def fn():
            if comm.rank == 0:
                raise ValueError("before its writes")
            v.assign([5, 5])
            s.extended.update(v, lambda var: var.assign_add([1, 1]))

        with pytest.raises(ValueError, match="before its writes"):
            s.run(fn)
        after = s.run(lambda: ms.get_replica_context().all_reduce("sum", 1.0))
        return v.numpy().tolist(), float(after.local)

    assert run_ranks(rank, 3) == [([0, 0], 3.0)] * 3


def told(comm, call):
    """What a call that differs between ranks says; of three ranks, the last is the odd one."""
    with pytest.raises(ms.LockstepError) as found:
        call("x" if comm.rank == 2 else "")
    return [line.strip() for line in str(found.value).splitlines()]


DIFFERENT = {
    "writes": (
        lambda s, v: (
            lambda odd: s.extended.update(
                v, lambda var: [var.assign([3.0, 5.0 if odd else 4.0]), None][1]
            )
        ),
        ["what fn wrote: [3.0, ...] on ranks 0, 1; [3.0, ...], but another, on rank 2"],
    ),
    "an argument and what is written": (
        lambda s, v: (
            lambda odd: s.extended.update(
                v, lambda var, x: [var.assign([x, x]), None][1], args=(2.0 + len(odd),)
            )
        ),
        [
            "what fn wrote: [2.0, ...] on ranks 0, 1; [3.0, ...] on rank 2",
            "an argument: one value on ranks 0, 1; another value on rank 2",
        ],
    ),
    "a result": (
        lambda s, v: lambda odd: s.extended.update(v, lambda var: 2.0 + len(odd)),
        ["what fn returned: one value on ranks 0, 1; another value on rank 2"],
    ),
    "a result without a variable": (
        lambda s, v: (
            lambda odd: s.extended.update_non_slot(
                s.extended.non_slot_devices([v]), lambda: 2.0 + len(odd)
            )
        ),
        ["what fn returned: one value on ranks 0, 1; another value on rank 2"],
    ),
    "a result that NumPy sees as an array": (
        lambda s, v: (
            lambda odd: s.extended.update_non_slot(
                s.extended.non_slot_devices([v]), lambda: memoryview(np.ones(2) + len(odd))
            )
        ),
        ["what fn returned: one value on ranks 0, 1; another value on rank 2"],
    ),
    "assign": (
        lambda s, v: lambda odd: v.assign([1.0 + len(odd), 0.0]),
        ["the value: [1.0, ...] on ranks 0, 1; [2.0, ...] on rank 2"],
    ),
    "rows": (
        lambda s, v: lambda odd: v.scatter_update(ms.IndexedSlices([7.0], [len(odd)])),
        ["the indices: 0 on ranks 0, 1; 1 on rank 2"],
    ),
}


@every("what", DIFFERENT)
@every("frames", [True, False])
def test_the_ranks_that_differ_are_named(what, frames, kept):
    make, want = DIFFERENT[what]
    if kept == "common" and want[0].startswith("what fn wrote"):
        # Of what is large each write is compared, in its line.
        want = [want[0].replace("what fn wrote", "the value")]

    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(np.zeros(2))
        s._replicas.lockstep.uses_frames = frames
        head, *lines = told(comm, make(s, v))
        assert f"(this is rank {comm.rank} of 3)" in head
        for name in (line.partition(":")[0] for line in want):
            assert name in head
        return lines[: len(want)], len(lines), v.numpy().tolist()

    assert run_ranks(rank, 3) == [(want, len(want) + 1, [0.0, 0.0])] * 3


class Lent:
    """Memory that another library lends by DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **asked):
        return self.array.__dlpack__(**asked)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_an_argument_is_the_same_whichever_way_a_rank_holds_it(kept):
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(np.zeros(2))
        held = [np.array, memoryview, Lent][comm.rank](np.ones(2))
        s.extended.update(v, lambda var, x: [var.assign_add(x), None][1], args=(held,))
        return v.numpy().tolist()

    assert run_ranks(rank, 3) == [[1.0, 1.0]] * 3


LARGE = (300, 70)  # 168 KB: what a node has in common


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("assign", lambda a: a[::-1]),
        ("assign", lambda a: a[:, ::-1]),
        ("assign_add", lambda a: a[::-1]),
        ("assign_sub", lambda a: np.broadcast_to(a[0], a.shape)),
        ("assign_add", lambda a: a),
    ],
)
def test_a_value_may_be_a_view_of_the_variable(size, kind, seen):
    start = np.random.default_rng(0).standard_normal(LARGE)
    want = start.copy()
    given = seen(start).copy()
    want = {"assign": given, "assign_add": want + given, "assign_sub": want - given}[kind]

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        with strategy.scope():
            v = ms.Variable(start)
        getattr(v, kind)(seen(np.asarray(v)))
        return v.numpy().tobytes()

    assert run_ranks(rank, size) == [want.tobytes()] * size


def test_a_proof_inside_the_function_shows_nothing_of_what_it_writes():
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        with strategy.scope():
            v, w = ms.Variable(np.zeros(LARGE)), ms.Variable(0.0)

        def fn(var):
            var.assign(np.full(LARGE, 10.0 + comm.rank))
            w.assign_add(1.0)

        def step():
            v.assign_add(np.ones(LARGE))
            strategy.extended.update(v, fn)

        with pytest.raises(ms.LockstepError):
            strategy.run(step)
        return v.numpy().min(), v.numpy().max()

    # What was written before the update has been shown alike, before its function was called.
    assert run_ranks(rank, 2) == [(1.0, 1.0)] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_an_update_inside_an_update(fails):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        with strategy.scope():
            v = ms.Variable(np.ones(LARGE))

        def inner(var):
            var.assign_add(np.ones(LARGE))

        def outer(var):
            var.assign(np.full(LARGE, 5.0))
            strategy.extended.update(var, inner)
            var.assign_add(np.full(LARGE, 10.0))
            if fails:
                raise ValueError("after all that")

        view = np.asarray(v)
        try:
            strategy.extended.update(v, outer)
        except ValueError:
            assert fails
        v.assign_add(np.full(LARGE, 100.0))
        return {float(x) for x in (view.min(), view.max(), v.numpy().min(), v.numpy().max())}

    assert run_ranks(rank, 2) == [{101.0 if fails else 116.0}] * 2


def test_an_exception_of_another_run_is_a_new_one():
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        with strategy.scope():
            v, w = ms.Variable(np.zeros(LARGE)), ms.Variable(0.0)
        with pytest.raises(ZeroDivisionError) as first:
            strategy.run(lambda: 1 / 0)

        def again(var):
            raise first.value

        def step():
            v.assign(np.full(LARGE, 7.0 + comm.rank))
            strategy.extended.update(w, again)

        with pytest.raises((ms.LockstepError, ZeroDivisionError)):
            strategy.run(step)
        v.assign_add(np.ones(LARGE))
        return float(v.numpy().min()), float(v.numpy().max())

    assert run_ranks(rank, 2) == [(1.0, 1.0)] * 2


def test_values_per_replica_that_differ_are_named(kept):
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(np.zeros(2))
        value = ms.PerReplica(np.full(2, float(comm.rank)))
        with pytest.raises(
            ms.StructureError, match=r"a value per replica among .* differs"
        ) as told:
            s.extended.update(v, lambda var, x, y: None, args=(value, 3.0))
        assert isinstance(told.value, ms.LockstepError)  # the calls of the ranks differ, too
        with pytest.raises(ms.LockstepError) as told:
            s.extended.update(v, lambda var, x, y: None, args=(ms.PerReplica(1.0), comm.rank))
        assert not isinstance(told.value, ms.StructureError)
        s.extended.update(
            v, lambda var, x, y: var.assign(x + y), args=(ms.PerReplica(np.ones(2)), 1)
        )
        return v.numpy().tolist()

    assert run_ranks(rank, 2) == [[2.0, 2.0]] * 2
