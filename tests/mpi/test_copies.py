"""Variables that processes of a node have in common: one copy in memory, the same promises."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms

pytestmark = pytest.mark.mpi

SHAPE = (1000, 300)  # of float64: 2.4 MB
A = ms.VariableAggregation


def start(seed=0):
    return np.random.default_rng(seed).standard_normal(SHAPE)


@pytest.fixture
def strategy():
    return ms.MirroredStrategy()


def pss():
    """Return this process's share of memory in bytes: what k processes map counts 1/k for each.

    Without files: libraries count the less, the more processes of others have them too.
    """
    gc.collect()
    # What was freed, the C library may keep for later; it is nobody's.
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", text, re.MULTILINE)))


def everyones(strategy, value):
    return strategy.experimental_local_results(strategy.run(lambda: value))


def test_a_node_has_one_copy(strategy):
    size = strategy.num_replicas_in_sync
    # Larger than what the C library's allocator keeps when it is given back (mallopt(3)).
    count = 10_000_000
    before = everyones(strategy, pss())
    with strategy.scope():
        v = ms.Variable(np.ones(count))
    assert v._component().sum() == count  # every rank touches every page
    grown = [after - b for after, b in zip(everyones(strategy, pss()), before, strict=True)]
    assert 0.9 < sum(grown) / (8 * count) < 1.2, grown
    assert type(v._storage).__name__ == ("NodeStorage" if size > 1 else "PrivateStorage")


@pytest.mark.parametrize("shape", [(), (3,), SHAPE], ids=str)
def test_nobody_writes_through_what_was_proved(strategy, shape):
    with strategy.scope():
        v = ms.Variable(np.ones(shape))
    per_replica = strategy.run(lambda: np.ones(shape))
    total = strategy.extended.reduce_to("sum", per_replica, v)
    for view in (np.asarray(v), v._component(), np.asarray(total), *total.values):
        while isinstance(view, np.ndarray):
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.setflags(write=True)
            view = view.base
    assert (v.assign(total).numpy() == strategy.num_replicas_in_sync).all()


@pytest.mark.parametrize("aggregation", [A.NONE, A.SUM, A.MEAN, A.ONLY_FIRST_REPLICA])
def test_writes_in_replica_code(strategy, aggregation):
    size = strategy.num_replicas_in_sync
    with strategy.scope():
        v = ms.Variable(start(), aggregation=aggregation)
    view = np.asarray(v)
    factor = {A.SUM: sum(range(1, size + 1)), A.MEAN: (size + 1) / 2}.get(aggregation, 1)
    want = start()

    def step():
        mine = ms.get_replica_context().replica_id_in_sync_group + 1
        whole = np.full(SHAPE, 8.0 * (1 if aggregation is A.NONE else mine))
        v.assign_add(whole)
        np.testing.assert_array_equal(np.asarray(v), want + 8 * factor)
        v.assign_sub(whole)
        v.scatter_add(ms.IndexedSlices(whole[:3], np.array([7, 999, 7])))
        return v._component()[7, 0]

    for _ in range(3):
        seen = everyones(strategy, strategy.run(step).local)
        for row in (7, 999, 7):
            want[row] += 8 * factor
        np.testing.assert_allclose(view, want, rtol=0, atol=1e-9)
        want = np.array(view)
        assert set(seen) == {want[7, 0]}


def test_a_large_write_that_differs_is_never_made_and_raises_in_its_line(strategy):
    size = strategy.num_replicas_in_sync
    with strategy.scope():
        v, w = ms.Variable(start()), ms.Variable(start(1))
    view = np.asarray(v)
    w.assign_add(start(2))

    def step():
        mine = ms.get_replica_context().replica_id_in_sync_group
        w.assign_add(start(3))
        try:
            v.assign_add(np.full(SHAPE, float(mine == size - 1)))
        except ms.LockstepError:
            assert view[0, 0] == start()[0, 0]
            raise
        assert size == 1

    if size == 1:
        strategy.run(step)
        return
    with pytest.raises(ms.LockstepError, match="assign_add"):
        strategy.run(step)
    np.testing.assert_array_equal(view, start())
    np.testing.assert_array_equal(w.numpy(), start(1) + start(2) + start(3))  # it was alike
    strategy.run(lambda: v.assign_add(start(3)))
    np.testing.assert_array_equal(view, start() + start(3))


@pytest.mark.parametrize("alike", [True, False])
def test_few_rows_of_a_large_variable(strategy, alike):
    size = strategy.num_replicas_in_sync
    rows = np.array([3, 99_999, 0, 3, 50_000])
    added = np.random.default_rng(1).standard_normal((5, 32))
    with strategy.scope():
        v = ms.Variable(np.ones((100_000, 32)))
    view = np.asarray(v)
    want = np.ones((100_000, 32))

    def step():
        mine = ms.get_replica_context().replica_id_in_sync_group
        last = mine == size - 1 and not alike
        v.scatter_add(ms.IndexedSlices(added, rows + (rows == 50_000) * last))
        v.scatter_mul(ms.IndexedSlices(2 * added[:1], rows[1:2]))

    if alike or size == 1:
        strategy.run(step)
        np.add.at(want, rows + (size == 1 and not alike) * (rows == 50_000), added)
        want[99_999] *= 2 * added[0]
    else:
        with pytest.raises(ms.LockstepError, match="scatter_add"):
            strategy.run(step)
    np.testing.assert_array_equal(view, want)
    strategy.run(lambda: v.scatter_add(ms.IndexedSlices(added, rows[::-1])))
    np.add.at(want, rows[::-1], added)
    np.testing.assert_array_equal(view, want)


def test_update_writes_once(strategy):
    with strategy.scope():
        v = ms.Variable(start())
    view = np.asarray(v)

    def fn(var, value):
        var.assign_add(value)
        var.scatter_mul(ms.IndexedSlices(np.full((2, SHAPE[1]), 2.0), np.array([0, 0])))
        return var._component()[0, 0]

    strategy.extended.update(v, fn, args=(start(1),))
    want = start() + start(1)
    want[0] *= 4
    np.testing.assert_array_equal(view, want)

    def fails(var):
        var.assign(np.zeros(SHAPE))
        if strategy._replicas.lockstep.comm.rank == 0:
            raise ValueError("on the first rank only")

    with pytest.raises(ValueError, match="on the first rank only"):
        strategy.extended.update(v, fails)
    np.testing.assert_array_equal(view, want)


@pytest.mark.parametrize("per_node", [1, 2, 3])
def test_emulated_nodes(per_node, monkeypatch):
    from mpi4py import MPI  # a group of its own: options are read once for each

    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    group = MPI.COMM_WORLD.Dup()
    strategy = ms.MirroredStrategy(comm=group)
    with strategy.scope():
        v = ms.Variable(lambda: start(group.rank), name="v")
    np.testing.assert_array_equal(v.numpy(), start())
    v.assign(start(5))
    strategy.run(lambda: v.assign_add(start(6)))
    np.testing.assert_array_equal(v.numpy(), start(5) + start(6))
    common = type(v._storage).__name__ == "NodeStorage"
    assert common == (per_node > 1 and group.size > 1)
    group.Free()
