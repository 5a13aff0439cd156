"""Constructors: what is wrong on one rank is told to all, and names that do not fit the ranks."""

from __future__ import annotations

import json
import warnings

import pytest

import mpistrat as ms
from mpistrat.cluster_resolver import ClusterSpec, MPIClusterResolver, SimpleClusterResolver
from mpistrat.compat import v1
from mpistrat.testing import run_ranks

MWMS = ms.MultiWorkerMirroredStrategy
TPU1 = v1.distribute.experimental.TPUStrategy

WRONG = {
    "devices twice": (lambda: ms.MirroredStrategy(["a", "a"]), ms.MirroredStrategy, ValueError),
    "devices a text": (lambda: ms.MirroredStrategy("ab"), ms.MirroredStrategy, TypeError),
    "devices numbers": (lambda: ms.MirroredStrategy([0, 1]), ms.MirroredStrategy, TypeError),
    "ops": (lambda: ms.MirroredStrategy(None, "nccl"), ms.MirroredStrategy, TypeError),
    "central": (lambda: ms.CentralStorageStrategy("ab"), ms.CentralStorageStrategy, TypeError),
    "resolver": (lambda: MWMS("worker"), MWMS, ValueError),
    "options": (lambda: MWMS(None, "fast"), MWMS, ValueError),
    "algorithm": (
        lambda: ms.experimental.MultiWorkerMirroredStrategy("fast"),
        ms.experimental.MultiWorkerMirroredStrategy,
        ValueError,
    ),
    "tpu resolver": (lambda: ms.TPUStrategy("local"), ms.TPUStrategy, TypeError),
    "assignment": (lambda: ms.TPUStrategy(None, [0]), ms.TPUStrategy, TypeError),
    "partitioned": (lambda: ms.TPUStrategy(None, None, True), ms.TPUStrategy, ValueError),
    "no steps": (lambda: TPU1(steps_per_run=0), TPU1, ValueError),
    "half steps": (lambda: TPU1(steps_per_run=2.5), TPU1, TypeError),
    "nodes": (lambda: ms.Topology.read(ranks_per_node=-1), ms.Topology.read, ValueError),
    "half nodes": (lambda: ms.Topology.read(ranks_per_node=1.5), ms.Topology.read, TypeError),
    "a mesh": (lambda: ms.Topology.read(mesh_shape=3), ms.Topology.read, TypeError),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_on_one_rank_in_the_first_strategy_of_all(case):
    bad, good, error = WRONG[case]

    def rank(comm):
        if comm.rank == 1:
            with pytest.raises(error) as found:
                bad()
            assert not isinstance(found.value, ms.RemoteError)
        else:
            with pytest.raises(error, match=r"(rank|replica) 1") as found:
                good()
                ms.MirroredStrategy().run(lambda: None)  # it may be the first that can tell
            assert isinstance(found.value, ms.RemoteError)
        return ms.MirroredStrategy().num_replicas_in_sync

    assert run_ranks(rank, 2) == [2, 2]


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.CentralStorageStrategy])
def test_another_number_of_labels_warns_on_rank_0(make):
    labels = [f"d{i}" for i in range(5)]
    with pytest.warns(UserWarning, match="given 5") as caught:  # around the threads: it is theirs
        found = run_ranks(lambda comm: make(labels)._device_labels, 2)
    assert found == [("d0", "d1")] * 2
    (warning,) = caught
    assert "mpistrat run -n 5" in str(warning.message)
    assert warning.filename == __file__


def config(number, kind="worker", workers=2):
    cluster = {"worker": [f"h{i}:1" for i in range(workers)], "ps": ["p:1"]}
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": number}})


def resolver(kind="worker", number=0, **jobs):
    spec = ClusterSpec({job: [f"{job}{i}:1" for i in range(n)] for job, n in jobs.items()})
    return SimpleClusterResolver(spec, task_type=kind, task_id=number)


@pytest.mark.parametrize(
    "given",
    [
        resolver(None, None, worker=2),
        resolver("worker", None, worker=2),
        resolver(None, 0, worker=2),
        resolver("worker", 99, worker=2),
        resolver("worker", -1, worker=2),
        resolver("chief", 0, worker=2),
        resolver("ps", 0, ps=2),
        resolver("ps", 0, worker=2, ps=1),
        resolver("trainer", 0, trainer=2),
        resolver("evaluator", 3, worker=1, evaluator=1),
    ],
    ids=lambda r: f"{r.task_type}-{r.task_id}",
)
def test_a_resolver_must_name_a_worker_of_its_cluster(given):
    def rank(comm):
        with pytest.raises(ValueError, match=r"task|job|calls this process"):
            MWMS(given)
        return MWMS().num_replicas_in_sync

    assert run_ranks(rank, 2) == [2, 2]


@pytest.mark.parametrize(
    "text", [config(7), config(-1), config(0, "nobody"), config(0, "ps")], ids=range(4)
)
def test_so_must_tf_config(text, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=r"task|job|calls this process"):
        MWMS()


def told(size, made):
    """What a strategy with the resolver of ``made(rank)`` warns of, once."""

    def rank(comm):
        return MWMS(made(comm.rank)).extended.should_checkpoint

    with warnings.catch_warnings(record=True) as caught:  # around the threads: it is theirs
        warnings.simplefilter("always")
        found = run_ranks(rank, size)
    assert found == [r == 0 for r in range(size)]
    assert all(warning.category is RuntimeWarning for warning in caught)
    assert all(warning.filename == __file__ for warning in caught)
    assert len(caught) < 2
    return "".join(str(warning.message) for warning in caught)


def test_names_that_fit_are_silent():
    for size in (1, 2, 3, 4):
        assert told(size, lambda r: None) == ""
        assert told(size, lambda r, n=size: resolver("worker", r, worker=n)) == ""
        assert told(size, lambda r, n=size: MPIClusterResolver(r, n)) == ""
    assert told(2, lambda r: resolver("worker" if r else "chief", 0, chief=1, worker=1)) == ""
    assert told(2, lambda r: resolver(None, None)) == ""


def test_one_tf_config_for_all_ranks(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config(0))
    text = told(3, lambda r: None)
    assert "ranks 0-2 are all called worker 0" in text
    assert "2 workers, but there are 3 ranks" in text
    assert "Unset TF_CONFIG" in text


def test_other_numbers_of_workers_and_another_chief():
    assert "has 3 workers, but there are 2 ranks" in told(2, lambda r: resolver(number=r, worker=3))
    assert "2 workers, but there are 1 ranks" in told(1, lambda r: resolver(worker=2))
    turned = told(2, lambda r: resolver(number=1 - r, worker=2))
    assert "rank 1 is called the chief, but rank 0 writes files" in turned
    assert "are all called" not in turned


def test_a_warning_that_is_an_error_is_one_on_every_rank():
    def rank(comm):
        with pytest.raises(RuntimeWarning, match="are all called") as found:
            MWMS(resolver(worker=2))
        return isinstance(found.value, ms.RemoteError)

    assert run_ranks(rank, 2) == [False, True]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_who_writes_is_the_rank_that_is_called_task_0(order):
    def rank(comm):
        assignment = ms.DeviceAssignment(ms.Topology((0, 0, 0)), order)
        strategy = ms.TPUStrategy(None, assignment)
        extended = strategy.extended
        assert extended.should_save_summary is extended.should_checkpoint
        return extended.should_checkpoint, strategy.cluster_resolver.task_id == 0

    assert run_ranks(rank, 3) == [(True, True), (False, False), (False, False)]


def test_a_logical_device_is_a_context_anywhere():
    strategy = ms.TPUStrategy()
    device = strategy.extended.experimental_logical_device

    def replica():
        with device(0):
            return ms.get_replica_context().replica_id_in_sync_group

    assert strategy.run(replica).local == 0
    with device(0):
        assert not ms.in_cross_replica_context()
    with strategy.scope(), device(0):
        assert ms.in_cross_replica_context()


def test_a_topology_has_ranks():
    with pytest.raises(ValueError, match="at least one rank"):
        ms.Topology(())


@pytest.mark.parametrize(
    "make", [ms.TPUStrategy, ms.CentralStorageStrategy, MWMS, lambda: ms.OneDeviceStrategy("cpu")]
)
def test_a_pipeline_per_replica_is_for_mirrored_strategy(make):
    options = ms.InputOptions(
        experimental_replication_mode=ms.InputReplicationMode.PER_REPLICA,
    )
    strategy = make()
    data = ms.Dataset.range(2).batch(1)
    with pytest.raises(NotImplementedError, match="PER_REPLICA"):
        strategy.distribute_datasets_from_function(lambda c: data, options)
    for good in (ms.MirroredStrategy, v1.distribute.MirroredStrategy):
        assert list(good().distribute_datasets_from_function(lambda c: data, options))
