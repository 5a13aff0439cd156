"""Resolvers: names from MPI and from TF_CONFIG, which never decide the rank."""

from __future__ import annotations

import json

import pytest
from every import every

import mpistrat as ms
from mpistrat.cluster.resolvers import default_resolver
from mpistrat.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    MPIClusterResolver,
    TFConfigClusterResolver,
)
from mpistrat.testing import run_ranks

CLUSTER = {"worker": ["h1:1", "h2:2"], "ps": ["h3:3"]}


def config(kind="worker", index=1, **more):
    return {
        "TF_CONFIG": json.dumps(
            {"cluster": CLUSTER, "task": {"type": kind, "index": index}, **more}
        )
    }


def test_from_mpi():
    resolver = MPIClusterResolver(2, 4)
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 2, "")
    assert resolver.cluster_spec().num_tasks("worker") == 4
    assert resolver.master() == "rank:0"
    assert resolver.master("worker", 3) == "rank:3"
    with pytest.raises(ValueError, match="No task"):
        resolver.master("worker", 4)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_mpi_is_asked_where_no_rank_is_named(size):
    def rank(comm):
        resolver = MPIClusterResolver()
        return resolver.task_id, resolver.cluster_spec().num_tasks("worker")

    assert run_ranks(rank, size) == [(r, size) for r in range(size)]


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_ranks_that_are_none(rank, size):
    with pytest.raises(ValueError, match=f"got {rank}"):
        MPIClusterResolver(rank, size)


def test_names_can_be_set():
    for resolver in (MPIClusterResolver(0, 2), TFConfigClusterResolver(env=config())):
        resolver.task_type, resolver.task_id = "ps", 0
        assert (resolver.task_type, resolver.task_id) == ("ps", 0)
        assert resolver.num_accelerators() == {}
    resolver.rpc_layer = "x"
    assert resolver.master() == "x://h3:3"


def test_a_class_of_ones_own():
    class Mine(ClusterResolver):
        def cluster_spec(self):
            return ClusterSpec(CLUSTER)

        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return ""

    mine, other = Mine(), Mine()
    assert (mine.task_type, mine.task_id, mine.environment) == (None, None, "")
    mine.task_type, mine.task_id = "worker", 1
    assert (mine.task_type, mine.task_id) == ("worker", 1)
    assert (other.task_type, other.task_id) == (None, None)


def test_from_tf_config():
    resolver = TFConfigClusterResolver(env=config(rpc_layer="grpc", environment="cloud"))
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.rpc_layer, resolver.environment) == ("grpc", "cloud")
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    assert resolver.master() == "grpc://h2:2"
    assert resolver.master("ps", 0) == "grpc://h3:3"
    assert resolver.master("worker", 0, "mpi") == "mpi://h1:1"


def test_arguments_win():
    resolver = TFConfigClusterResolver("ps", 0, "x", "y", env=config(rpc_layer="grpc"))
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 0, "x")
    assert resolver.environment == "y"
    assert resolver.master() == "x://h3:3"
    assert TFConfigClusterResolver(task_id="0", env=config()).task_id == 0


@pytest.mark.parametrize("env", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}])
def test_without_a_cluster(env):
    resolver = TFConfigClusterResolver(env=env)
    assert resolver.task_type is None
    assert resolver.task_id is None
    assert resolver.master() == ""
    assert not resolver.cluster_spec()


def test_special_masters():
    assert TFConfigClusterResolver(env=config(session_master="mine")).master() == "mine"
    single = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}})}
    assert TFConfigClusterResolver(env=single).master() == ""


def test_it_is_read_at_each_question():
    env = config()
    resolver = TFConfigClusterResolver(env=env)
    assert resolver.task_type == "worker"
    env.update(config("ps", 0))
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)


def text(**parts):
    return json.dumps({"cluster": CLUSTER, **parts})


MALFORMED = {
    "no json": "which is not JSON",
    "{": "which is not JSON",
    "{'cluster': {}}": "which is not JSON",
    "[1]": "not an object",
    "5": "not an object",
    "null": "not an object",
    text(cluster=["a:1", "b:1"]): "'cluster' that is not an object",
    text(cluster={"worker": 3}): "'cluster' that cannot be used",
    text(cluster=None): "'cluster' that is not an object",
    text(): "names 3 tasks, but has no 'type' in 'task'",
    text(task={}): "has no 'type' in 'task'",
    text(task="worker"): "'task' that is not an object: 'worker'",
    text(task=["worker", 0]): "'task' that is not an object",
    text(task={"index": 0}): "no 'type' in 'task'",
    text(task={"type": "worker"}): "no 'index' in 'task'",
    text(task={"type": 3, "index": 0}): "'type' is not a string: 3",
    **{
        text(task={"type": "worker", "index": index}): "'index' is not an integer of at least 0"
        for index in ("first", "", 1.0, 1.5, -1, "-1", True, [0], {})
    },
}


@every("given", MALFORMED)
def test_texts_that_are_no_configuration(given):
    with pytest.raises(ValueError, match="TF_CONFIG") as found:
        TFConfigClusterResolver(env={"TF_CONFIG": given})._check()
    said = str(found.value)
    assert said.startswith("the environment variable TF_CONFIG")
    assert MALFORMED[given] in said
    right = said[said.index('{"cluster": {"worker": ["host0') :].partition("}}.")[0] + "}}"
    resolver = TFConfigClusterResolver(env={"TF_CONFIG": right})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 0, "host0:2222")


def test_an_index_may_be_text():
    env = {"TF_CONFIG": text(task={"type": "worker", "index": "1"})}
    assert TFConfigClusterResolver(env=env).task_id == 1


@pytest.mark.parametrize("make", [ms.MultiWorkerMirroredStrategy, ms.TPUStrategy])
def test_a_strategy_finds_out_on_every_rank_before_anything_else(make, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text())

    def rank(comm):
        with pytest.raises(ms.errors.OptionError, match="TF_CONFIG names 3 tasks"):
            make()
        named = ms.cluster_resolver.MPIClusterResolver(comm.rank, comm.size)
        return make(named).num_replicas_in_sync

    assert run_ranks(rank, 2) == [2, 2]


def test_unknown_tasks():
    with pytest.raises(ValueError, match="No task with index 9 in job 'worker'"):
        TFConfigClusterResolver(env=config(index=9)).master()
    with pytest.raises(ValueError, match="No such job in cluster: 'zzz'"):
        TFConfigClusterResolver(env=config("zzz")).master()


def test_which_is_the_default():
    assert isinstance(default_resolver(0, 1, {}), MPIClusterResolver)
    assert isinstance(default_resolver(0, 1, config()), TFConfigClusterResolver)
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()


def test_the_rank_comes_from_mpi_whatever_tf_config_says(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config("worker", 1)["TF_CONFIG"])

    def rank(comm):
        strategy = ms.MultiWorkerMirroredStrategy()
        r = strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group)
        return r, strategy.num_replicas_in_sync, strategy.cluster_resolver.task_id

    with pytest.warns(RuntimeWarning, match="all called worker 1"):
        assert run_ranks(rank, 3) == [(r, 3, 1) for r in range(3)]


def test_a_resolver_of_ones_own():
    def rank(comm):
        mine = MPIClusterResolver(comm.rank, comm.size)
        strategy = ms.MultiWorkerMirroredStrategy(mine)
        with pytest.raises(ValueError, match="ClusterResolver"):
            ms.MultiWorkerMirroredStrategy("worker")
        return strategy.cluster_resolver is mine, ms.MirroredStrategy().cluster_resolver

    assert run_ranks(rank, 2) == [(True, None)] * 2


MANY = "9" * 5000


@pytest.mark.parametrize(
    "text",
    [
        '{"cluster": {"worker": {"9999999999": "a:1"}}, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": {"MANY": "a:1"}}, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": MANY}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "MANY"}}',
        "[" * 100_000,
    ],
)
def test_tf_config_of_absurd_size_is_named_and_costs_nothing(text):
    with pytest.raises(ValueError, match="TF_CONFIG") as error:
        default_resolver(0, 1, {"TF_CONFIG": text.replace("MANY", MANY)})
    assert len(str(error.value)) < 600


def test_indices_beyond_any_cluster():
    with pytest.raises(ValueError, match="end at 4194303, got a larger"):
        ClusterSpec({"worker": {10**12: "a:1"}})
    assert len(ClusterSpec({"worker": {1 << 20: "a:1"}}).job_tasks("worker")) == (1 << 20) + 1
