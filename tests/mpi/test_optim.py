"""Optimizers where ranks are processes: the same weights as a plain loop, state once per node."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import optim
from mpistrat.shm.storage import NodeStorage, SpreadStorage

pytestmark = pytest.mark.mpi

SHAPES = ((300, 100), (7,), ())


@pytest.fixture
def strategy():
    return ms.MirroredStrategy()


def gradient(step, shape, replica):
    return np.random.default_rng([step, replica, len(shape)]).standard_normal(shape)


def adam(w, gradients, rate=0.1):
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        w = w - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w


@pytest.mark.parametrize("in_buffers", [False, True], ids=["arrays", "buffers"])
@pytest.mark.parametrize("clip", [None, optim.ClipByGlobalNorm(1e6)], ids=["", "clipped"])
def test_all_ranks_train_as_one_loop_does(strategy, in_buffers, clip):
    size, rank = strategy.num_replicas_in_sync, strategy.rank
    rows = [r % 3 + 1 for r in range(size)]
    with strategy.scope():
        variables = [ms.Variable(np.ones(shape), name=f"v{len(shape)}") for shape in SHAPES]
    optimizer = optim.Adam(0.1, clip=clip)
    buffers = strategy.gradient_buffers(variables) if in_buffers else None

    def step(number):
        given = [gradient(number, shape, rank) for shape in SHAPES]
        if buffers is not None:
            for place, value in zip(buffers, given, strict=True):
                place[...] = value
            given = buffers
        optimizer.apply_gradients(zip(given, variables, strict=True), weight=rows[rank])

    for number in range(4):
        strategy.run(step, args=(number,))
    for v, shape in zip(variables, SHAPES, strict=True):
        means = [
            sum(n * gradient(s, shape, r) for r, n in enumerate(rows)) / sum(rows) for s in range(4)
        ]
        np.testing.assert_allclose(v.numpy(), adam(np.ones(shape), means), 1e-11)
    strategy.check_same([v.numpy() for v in (*variables, *optimizer.variables)])
    shares = strategy._replicas.reducer.node.arena.nodes().node_count < size
    assert isinstance(optimizer.slot(variables[0], "m")._storage, NodeStorage) == shares


@pytest.mark.parametrize("per_node", [1, 2])
def test_nodes_train_as_one_loop_does(per_node, monkeypatch):
    from mpi4py import MPI  # a group of its own: options are read once for each

    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    group = MPI.COMM_WORLD.Dup()
    test_all_ranks_train_as_one_loop_does(ms.MirroredStrategy(comm=group), True, None)
    group.Free()


@pytest.mark.parametrize("per_node", [1, 2])
def test_state_of_all_nodes_is_as_that_of_each(per_node, monkeypatch, tmp_path_factory):
    from mpi4py import MPI

    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    group = MPI.COMM_WORLD.Dup()
    strategy, found = ms.MirroredStrategy(comm=group), []
    size, rank = strategy.num_replicas_in_sync, strategy.rank
    path = strategy.broadcast(str(tmp_path_factory.mktemp("shard") / "c"))
    for shard in ("node", "all"):
        with strategy.scope():
            variables = [ms.Variable(np.ones(shape), name=f"v{len(shape)}") for shape in SHAPES]
        optimizer = optim.Adam(0.1, clip=optim.ClipByGlobalNorm(1.0), shard=shard)
        buffers = strategy.gradient_buffers(variables)
        for number in range(3):
            for place, shape in zip(buffers, SHAPES, strict=True):
                place[...] = gradient(number, shape, rank)
            pairs = list(zip(buffers, variables, strict=True))
            strategy.run(lambda o=optimizer, p=pairs: o.apply_gradients(p) and None)
        found.append([v.numpy() for v in (*variables, *optimizer.variables)])
        saved = ms.Checkpoint(v=variables, optimizer=optimizer)
        if shard == "node":
            saved.write(path)
    strategy.check_same(found)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-12, 1e-14)
    m = optimizer.slot(variables[0], "m")
    assert isinstance(m._storage, SpreadStorage) == (size > per_node and size % per_node == 0)
    m.assign(np.zeros(m.shape))
    saved.read(path).assert_consumed()
    np.testing.assert_array_equal(m, found[0][len(SHAPES) + 6])
    group.Free()


def test_a_gradient_that_is_not_finite_is_an_error_on_all(strategy):
    with strategy.scope():
        w = ms.Variable(np.ones(SHAPES[0]), name="w")
    optimizer, last = optim.Adam(0.1), strategy.num_replicas_in_sync - 1

    def step(bad):
        g = gradient(0, SHAPES[0], strategy.rank)
        if bad and strategy.rank == last:
            g[299, 7] = np.nan
        optimizer.apply_gradients([(g, w)])

    with pytest.raises(
        ms.NonFiniteError, match=rf"rank {last}: .*'w:0' is nan at index \(299, 7\)"
    ):
        strategy.run(step, args=(True,))
    strategy.run(step, args=(False,))
    assert optimizer.iterations.numpy() == 1


def test_state_comes_back(strategy, tmp_path_factory):
    path = strategy.broadcast(str(tmp_path_factory.mktemp("optim") / "c"))
    with strategy.scope():
        w = ms.Variable(np.ones(SHAPES[0]), name="w")
    one, two = optim.Adam(0.1), optim.Adam(0.1)

    def step(optimizer):
        optimizer.apply_gradients([(gradient(0, SHAPES[0], strategy.rank), w)])

    strategy.run(step, args=(one,))
    ms.Checkpoint(w=w, optimizer=one).write(path)
    strategy.run(step, args=(one,))
    wanted = w.numpy()
    two.build([w])
    ms.Checkpoint(w=w, optimizer=two).read(path).assert_consumed()
    strategy.run(step, args=(two,))
    np.testing.assert_array_equal(w.numpy(), wanted)


def test_windows_end_early_and_calls_without_rows_add_nothing(strategy):
    with strategy.scope():
        variables = [ms.Variable(np.zeros(shape), name=f"v{len(shape)}") for shape in SHAPES]
    optimizer = optim.SGD(1.0, accumulate=4)

    def call(value, weight):
        pairs = [(np.full(v.shape, value if weight else np.nan), v) for v in variables]
        strategy.run(lambda: optimizer.apply_gradients(pairs, weight=weight) and None)

    for value, weight in ((3.0, 1), (0.0, 0), (3.0, 1), (6.0, 1), (5.0, 1), (7.0, 3)):
        call(value, weight)
    strategy.run(optimizer.flush)  # the mean of 5 and three times 7
    assert [float(v.numpy().flat[0]) for v in variables] == [-10.5] * 3
    call(100.0, 1)
    strategy.run(optimizer.discard)
    for value in (1.0, 2.0, 3.0, 4.0):
        call(value, 1)
    for v in variables:
        np.testing.assert_array_equal(v.numpy(), np.full(v.shape, -13.0))


@pytest.mark.parametrize("cross", [False, True], ids=["replica", "cross-replica"])
def test_gradients_that_are_variables_count_as_they_were(strategy, cross):
    with strategy.scope():
        a, b = (
            ms.Variable(np.full(20_000, value), name=n) for n, value in (("a", 1.0), ("b", 2.0))
        )
    optimizer = optim.SGD(0.5)

    def step():
        optimizer.apply_gradients([(np.asarray(b), a), (np.asarray(a), b)])

    with strategy.scope():
        step() if cross else strategy.run(step)
    np.testing.assert_array_equal(a.numpy(), np.full(20_000, 1.0 - 0.5 * 2.0))
    np.testing.assert_array_equal(b.numpy(), np.full(20_000, 2.0 - 0.5 * 1.0))


def test_rates_of_groups_are_compared_by_variable(strategy):
    if strategy.num_replicas_in_sync == 1:
        return
    rates = (0.1, 0.2) if strategy.rank else (0.2, 0.1)
    with strategy.scope():
        a, b = (ms.Variable(np.zeros(3), name=name) for name in "ab")
    pairs = zip("ab", rates, strict=True)
    groups = [optim.Group(n, learning_rate=lambda step, rate=rate: rate) for n, rate in pairs]
    optimizer = optim.SGD(1.0, groups=groups)
    with pytest.raises(ms.LockstepError, match=r"0\.1 from no\. 1 \('b:0'\) on"):
        strategy.run(optimizer.apply_gradients, args=([(np.ones(3), a), (np.ones(3), b)],))
