"""Cluster specs: jobs, tasks and addresses."""

from __future__ import annotations

import pytest

from mpistrat.cluster_resolver import ClusterSpec

DENSE = {"worker": ["a:1", "b:2"], "ps": ["c:3"]}
SPARSE = {"worker": {1: "a:1", 3: "b:2"}}


def test_a_dense_cluster():
    spec = ClusterSpec(DENSE)
    assert spec.jobs == ["ps", "worker"]
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [0, 1]
    assert spec.task_address("worker", 1) == "b:2"
    assert spec.job_tasks("worker") == ["a:1", "b:2"]
    assert spec.as_dict() == DENSE
    assert spec == ClusterSpec(spec) == ClusterSpec(DENSE)
    assert bool(spec)
    assert spec != ClusterSpec(SPARSE)
    assert spec != DENSE


def test_a_sparse_cluster():
    spec = ClusterSpec(SPARSE)
    assert spec.task_indices("worker") == [1, 3]
    assert spec.job_tasks("worker") == [None, "a:1", None, "b:2"]
    assert spec.as_dict() == SPARSE
    assert ClusterSpec({"w": {1: "b", 0: "a"}}).as_dict() == {"w": ["a", "b"]}


def test_nothing():
    assert not ClusterSpec({})
    assert ClusterSpec({}).jobs == []
    assert ClusterSpec({"w": []}).job_tasks("w") == []


def test_what_it_was_made_from_may_change():
    cluster = {"worker": {0: "a"}}
    spec = ClusterSpec(cluster)
    copy = ClusterSpec(spec)
    cluster["worker"][0] = "z"
    copy.as_dict()["worker"].append("y")
    assert spec.as_dict() == copy.as_dict() == {"worker": ["a"]}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: s.num_tasks("zzz"), "No such job in cluster: 'zzz'"),
        (lambda s: s.task_indices("zzz"), "No such job"),
        (lambda s: s.job_tasks("zzz"), "No such job"),
        (lambda s: s.task_address("zzz", 0), "No such job"),
        (lambda s: s.task_address("worker", 9), "No task with index 9 in job 'worker'"),
        (lambda s: s.task_address("worker", -1), "No task with index -1"),
    ],
)
def test_unknown_jobs_and_tasks(call, text):
    with pytest.raises(ValueError, match=text):
        call(ClusterSpec(DENSE))


@pytest.mark.parametrize("cluster", [None, 5, ["a:1"], "a:1", {"w": "a:1"}, {"w": 5}, {"w": None}])
def test_what_is_no_cluster(cluster):
    with pytest.raises(TypeError):
        ClusterSpec(cluster)
