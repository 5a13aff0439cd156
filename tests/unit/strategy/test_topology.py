"""Where ranks are, which replica each is, and that everything follows."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.strategy.topology import PlacedStrategy
from mpistrat.testing import run_ranks

TWO = ms.Topology(nodes=(0, 0, 1, 1))


def ctx():
    return ms.get_replica_context()


def test_the_mesh():
    assert (TWO.mesh_shape, TWO.num_nodes, TWO.num_tasks, TWO.num_tpus_per_task) == (
        (2, 2),
        2,
        2,
        2,
    )
    assert [TWO.coordinates(rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert TWO.device_coordinates.tolist() == [[[0, 0], [0, 1]], [[1, 0], [1, 1]]]
    assert [TWO.rank_at(TWO.coordinates(rank)) for rank in range(4)] == [0, 1, 2, 3]
    assert TWO.task_ordinal_at_coordinates((1, 0)) == 1
    assert TWO.tpu_device_ordinal_at_coordinates((1, 1)) == 1
    asked = ms.Topology((0,) * 6, (3, 2))
    assert [asked.coordinates(rank) for rank in (1, 2, 5)] == [(0, 1), (1, 0), (2, 1)]
    assert ms.Topology((0, 1, 0, 1)).mesh_shape == (4,)
    uneven = ms.Topology((0, 0, 1))
    assert (uneven.mesh_shape, uneven.mesh_rank, uneven.ranks_of(0)) == ((3,), 1, (0, 1))
    with pytest.raises(ValueError, match="different numbers of ranks"):
        _ = uneven.num_tpus_per_task


@pytest.mark.parametrize(
    ("nodes", "mesh", "text"),
    [((0, 0), (3,), "no place for exactly 2"), ((0, 2), (), "without gaps"), ((1,), (), "gaps")],
)
def test_a_mesh_that_does_not_fit(nodes, mesh, text):
    with pytest.raises(ValueError, match=text):
        ms.Topology(nodes, mesh)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ((), ValueError, r"nodes is empty.*nodes=\(0, 0, 1, 1\).*Topology\.read\(\)"),
        (([],), ValueError, r"nodes is empty.*Topology\.read"),
        ((None,), TypeError, r"nodes must be a sequence of integers .*got None \(NoneType\)"),
        ((2,), TypeError, r"nodes must be .*such as \(0, 0, 1, 1\), got 2 \(int\)"),
        (("01",), TypeError, "nodes must be .*got '01'"),
        (((0.0, 1.0),), TypeError, "nodes must be"),
        (((0, "a"),), TypeError, "nodes must be"),
        (((False, True),), TypeError, "nodes must be"),
        (({0: 1},), TypeError, "nodes must be"),
        ((np.zeros((2, 1), int),), TypeError, "nodes must be"),
        (((0, 1), 2), TypeError, r"mesh_shape must be .*such as \(2, 2\), got 2"),
        (((0, 1), ("a",)), TypeError, "mesh_shape must be"),
        (((0, 1), (2.0,)), TypeError, "mesh_shape must be"),
    ],
)
def test_what_is_no_topology(given, kind, text):
    with pytest.raises(kind, match=text):
        ms.Topology(*given)


def test_any_sequence_of_integers_makes_the_same_topology():
    for nodes in (
        [0, 0, 1, 1],
        np.array([0, 0, 1, 1], np.int8),
        [np.int64(n) for n in (0, 0, 1, 1)],
    ):
        made = ms.Topology(nodes, np.array([2, 2]))
        assert (made, hash(made), repr(made)) == (TWO, hash(TWO), repr(TWO))


def test_what_is_no_topology_of_an_assignment():
    with pytest.raises(TypeError, match=r"must be a Topology, got 4.*Topology\.read"):
        ms.DeviceAssignment(4, [0, 1, 2, 3])


@pytest.mark.parametrize("place", [(2, 0), (0, -1), (0,), (0, 0, 0)])
def test_a_place_outside_of_the_mesh(place):
    with pytest.raises(ValueError, match="outside of the mesh"):
        TWO.rank_at(place)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_read_from_the_ranks(size):
    def rank(comm):
        whole, halves = ms.Topology.read(comm), ms.Topology.read(comm, ranks_per_node=2)
        column = ms.Topology.read(comm, (comm.size, 1))
        return whole.nodes, halves.nodes, column.coordinates(comm.rank)

    found = run_ranks(rank, size)
    for number, (whole, halves, place) in enumerate(found):
        assert whole == (0,) * size
        assert halves == tuple(r // 2 for r in range(size))
        assert place == (number, 0)

    def wrong(comm):
        with pytest.raises(ValueError, match="no place"):
            ms.Topology.read(comm, (9,))
        return True

    assert run_ranks(wrong, size) == [True] * size


def test_an_assignment():
    one = ms.DeviceAssignment(TWO, [[[1, 1]], [[0, 0]], [[1, 0]], [[0, 1]]])
    assert one.ranks == (3, 0, 2, 1)
    assert one == ms.DeviceAssignment(TWO, (3, 0, 2, 1))
    assert hash(one) == hash(ms.DeviceAssignment(TWO, (3, 0, 2, 1)))
    assert one != ms.DeviceAssignment.build(TWO)
    assert one.core_assignment.shape == (4, 1, 2)
    assert (one.num_replicas, one.num_cores_per_replica) == (4, 1)
    assert one.coordinates(0) == (1, 1)
    assert [one.lookup_replicas(node) for node in (0, 1)] == [[1, 3], [0, 2]]
    assert [one.tpu_ordinal(replica) for replica in range(4)] == [1, 0, 0, 1]
    assert (one.host_device(0), one.tpu_device(0)) == ("node:1", "rank:3")
    assert ms.DeviceAssignment.build(TWO, [1, 1], [1, 1], 4).ranks == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ((0, 1, 2), "must be one replica"),
        ((0, 1, 2, 2), "must be one replica"),
        ([[[0, 0], [0, 1]], [[1, 0], [1, 1]]], "2 devices per replica"),
        ([0.0, 1.0, 2.0, 3.0], "must be integers"),
        ([[0, 1], [2, 3]], "of shape"),
    ],
)
def test_an_assignment_that_leaves_ranks_out(places, text):
    with pytest.raises(ValueError, match=text):
        ms.DeviceAssignment(TWO, places)
    with pytest.raises(ValueError, match="one rank is one replica"):
        ms.DeviceAssignment.build(TWO, computation_shape=[1, 2])
    with pytest.raises(ValueError, match="no replica"):
        ms.DeviceAssignment.build(TWO).lookup_replicas(2)


ORDER = (3, 0, 2, 1)


def placed(comm):
    topology = ms.Topology.read(comm, (2, 2), ranks_per_node=2)
    assignment = ms.DeviceAssignment(topology, ORDER)
    return ms.TPUStrategy(experimental_device_assignment=assignment, comm=comm)


def test_everything_follows_the_assignment():
    """Ids, labels, shards, gathers, local results, initial values, broadcasts: by replica."""

    def rank(comm):
        strategy = placed(comm)
        mine = strategy.run(lambda: (ctx().replica_id_in_sync_group, ctx().devices[0]))
        dataset = strategy.experimental_distribute_dataset(ms.Dataset.range(10).batch(8))
        shards = [step.local.tolist() for step in dataset]
        with strategy.scope():
            v = ms.Variable(lambda: comm.rank, name="v")
        large = np.full(300, comm.rank)
        per_replica = strategy.run(lambda: large)
        results = strategy.experimental_local_results(per_replica)
        sent = strategy.extended.broadcast_to(np.array([comm.rank]), "rank:3")
        return {
            "id": mine[0].local,
            "label": mine[1].local,
            "shards": shards,
            "initial": int(v.numpy()),
            "gather": strategy.gather(strategy.run(lambda: np.array([comm.rank])), 0).tolist(),
            "large gather": strategy.gather(per_replica, 0)[::300].tolist(),
            "results": [int(one[0]) for one in results],
            "broadcast": sent.tolist(),
            "sum": int(strategy.reduce("SUM", per_replica, None)[0]),
            "first": strategy.run(lambda: ctx().all_gather(np.array([comm.rank]), 0)).local[0],
            "value": strategy.experimental_distribute_values_from_function(
                lambda c: c.replica_id_in_sync_group
            ).local,
            "labels": strategy.extended.worker_devices,
        }

    shards = [[[0, 1], [8]], [[2, 3], [9]], [[4, 5], []], [[6, 7], []]]
    found = run_ranks(rank, 4)
    for replica, number in enumerate(ORDER):
        assert found[number] == {
            "id": replica,
            "label": f"rank:{number}",
            "shards": shards[replica],
            "initial": ORDER[0],
            "gather": list(ORDER),
            "large gather": list(ORDER),
            "results": list(ORDER),
            "broadcast": [ORDER[0]],
            "sum": 6,
            "first": ORDER[0],
            "value": replica,
            "labels": tuple(f"rank:{r}" for r in ORDER),
        }


def test_folds_in_nodes_follow_the_assignment(monkeypatch):
    """Replicas 0 and 1 make one node: ranks 3 and 0; their first is rank 3."""
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "2")
    seen = []

    def rank(comm):
        strategy = placed(comm)
        total = strategy.run(lambda: ctx().all_reduce("SUM", np.full(300, 10.0**comm.rank)))
        nodes = strategy._replicas.reducer.node.arena.nodes()
        there = np.empty(nodes.node.size)
        nodes.node.allgather(np.array([float(comm.rank)]), there)
        seen.append((comm.rank, there.tolist(), nodes.node.rank == 0))
        return total.local[0]

    assert run_ranks(rank, 4) == [1111.0] * 4
    assert sorted(seen) == [
        (0, [3.0, 0.0], False),
        (1, [2.0, 1.0], False),
        (2, [2.0, 1.0], True),
        (3, [3.0, 0.0], True),
    ]


def test_one_sequence_of_calls_with_strategies_in_other_orders():
    def rank(comm):
        mirrored, tpu = ms.MirroredStrategy(comm=comm), placed(comm)
        assert mirrored._replicas.lockstep.session is tpu._replicas.lockstep.session
        for _ in range(2):
            a = mirrored.run(lambda: ctx().replica_id_in_sync_group).local
            b = tpu.run(lambda: ctx().replica_id_in_sync_group).local
        with pytest.raises(ms.LockstepError) as error:  # rank 2 calls the other strategy
            if comm.rank == 2:
                tpu.reduce("SUM", ms.PerReplica(1.0), None)
            else:
                mirrored.gather(ms.PerReplica(np.ones(1)), 0)
        assert f"this is rank {comm.rank} of 4" in str(error.value)
        return a, b

    assert run_ranks(rank, 4) == [(r, ORDER.index(r)) for r in range(4)]


def test_errors_name_ranks_not_replicas():
    def rank(comm):
        strategy = placed(comm)
        size = 1 + (comm.rank == 2)
        with pytest.raises(ms.LockstepError) as error:
            strategy.run(lambda: ctx().all_reduce("SUM", np.ones(size)))
        text = str(error.value)
        assert f"this is rank {comm.rank} of 4" in text
        assert "  rank 2: " in text
        assert "  ranks 0, 1, 3: " in text
        return True

    assert run_ranks(rank, 4) == [True] * 4


def test_ranks_with_other_assignments_are_told():
    def rank(comm):
        order = (0, 1) if comm.rank else (1, 0)
        topology = ms.Topology((0, 0))
        with pytest.raises(ms.LockstepError, match="TPUStrategy"):
            ms.TPUStrategy(None, ms.DeviceAssignment(topology, order), comm=comm)
        with pytest.raises(ValueError, match="places 4 replicas, but there are 2 ranks"):
            ms.TPUStrategy(None, ms.DeviceAssignment.build(TWO), comm=comm)
        return ms.TPUStrategy(comm=comm).run(lambda: comm.rank).local

    assert run_ranks(rank, 2) == [0, 1]


def test_three_constructors():
    resolver = ms.cluster_resolver.TPUClusterResolver(tpu="")
    assignment = ms.DeviceAssignment.build(ms.Topology((0,)))
    v2 = ms.TPUStrategy(resolver, assignment)
    older = ms.experimental.TPUStrategy(resolver, assignment)
    v1 = PlacedStrategy(resolver, 3, assignment)
    for strategy in (v2, older, v1):
        assert strategy.cluster_resolver is resolver
        assert strategy.device_assignment is assignment
        extended = strategy.extended
        assert (extended.num_hosts, extended.num_replicas_per_host) == (1, 1)
        with pytest.raises(NotImplementedError, match="no TPU"):
            _ = extended.tpu_hardware_feature
        assert strategy.experimental_assign_to_logical_device(5, 0) == 5
        assert strategy.experimental_replicate_to_logical_devices(5) == 5
        pair = np.ones((1, 2))
        assert strategy.experimental_split_to_logical_devices(pair, [1, 1]) is pair
        for call, args in (
            (strategy.experimental_assign_to_logical_device, (5, 1)),
            (extended.experimental_logical_device, (1,)),
            (strategy.experimental_split_to_logical_devices, (pair, [1, 2])),
            (strategy.experimental_split_to_logical_devices, (pair, [1])),
        ):
            with pytest.raises(ValueError, match=r"device|dimensions"):
                call(*args)
    assert (v1.steps_per_run, v1.extended.steps_per_run, v2.extended.steps_per_run) == (3, 3, 1)
    assert PlacedStrategy().cluster_resolver.task_type == "worker"


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: ms.TPUStrategy("local"), TypeError),
        (lambda: ms.TPUStrategy(None, [0]), TypeError),
        (lambda: ms.TPUStrategy(None, None, True), ValueError),
        (lambda: PlacedStrategy(steps_per_run=0), ValueError),
    ],
)
def test_wrong_arguments(make, error):
    with pytest.raises(error):
        make()


def test_central_storage_has_one_value():
    def rank(comm):
        strategy = ms.CentralStorageStrategy(["CPU:0", "CPU:1"], comm=comm)
        with strategy.scope():
            total = ms.VariableAggregation.SUM
            v = ms.Variable(comm.rank + 1.0, name="v", aggregation=total)
            w = ms.Variable(1.0)
        strategy.run(lambda: v.assign_add(comm.rank + 1.0))
        with pytest.raises(ValueError, match="aggregation"):
            strategy.run(lambda: w.assign_add(comm.rank + 1.0))
        return float(v.numpy()), float(w.numpy()), strategy.extended.parameter_devices

    assert run_ranks(rank, 2) == [(4.0, 1.0, ("CPU:0",))] * 2
    with pytest.raises(ValueError, match="different labels"):
        ms.CentralStorageStrategy(["a", "a"])


def test_messages_name_ranks_and_not_replicas(monkeypatch):
    monkeypatch.setenv("MPISTRAT_NAN", "raise")

    def rank(comm):
        s, texts = placed(comm), []

        def told(error, call):
            with pytest.raises(error) as caught:
                call()
            texts.append(str(caught.value))
            return caught.value

        large = s.run(lambda: np.full(100, comm.rank))
        nan = np.array([np.nan if comm.rank == 3 else 0.0])
        told(ms.NonFiniteError, lambda: s.run(lambda: ctx().all_reduce("SUM", nan)))
        with s.scope():
            pair = [ms.Variable(0.0), ms.Variable(0.0)]
        told(ms.LockstepError, lambda: s.run(lambda: pair[comm.rank == 3]))
        failed = []

        def fails():
            if comm.rank in (0, 3):
                raise KeyError(comm.rank)

        error = told(KeyError, lambda: s.run(fails))
        failed = error.rank if isinstance(error, ms.RemoteError) else None
        return repr(large), texts, failed

    for me, (shown, (nan, variables, failure), failed) in enumerate(run_ranks(rank, 4)):
        places = [f"  {i}: <on rank {rank}>" for i, rank in enumerate(ORDER) if rank != me]
        assert [line.rstrip(",") for line in shown.split("\n") if "on rank" in line] == places
        assert nan.startswith("rank 3: ")
        assert "no. 1 on rank 2, no. 2 on rank 3" in variables
        assert f"(this is rank {me} of 4)" in variables
        if me in (0, 3):
            continue
        assert failed == 3  # the first replica
        assert "(rank 0 failed too)" in failure


def test_copies_that_differ_are_told_by_rank(monkeypatch):
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", "1")

    def rank(comm):
        s = placed(comm)
        with s.scope():
            v = ms.Variable(np.zeros(3))
        if comm.rank == 3:
            v._storage.array[1] = 7.0
        with pytest.raises(ms.DivergenceError) as caught:
            s.run(lambda: None)
        return str(caught.value)

    for me, text in enumerate(run_ranks(rank, 4)):
        assert "rank 3 differs" in text
        assert f"this is rank {me} of 4" in text
