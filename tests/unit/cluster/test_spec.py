"""Cluster specs: jobs, tasks and addresses."""

from __future__ import annotations

import json
from types import SimpleNamespace

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


def test_jobs_in_the_form_of_the_message():
    message = ClusterSpec({**DENSE, **{"sparse": SPARSE["worker"]}}).as_cluster_def()
    assert [(job.name, job.tasks) for job in message.job] == [
        ("ps", {0: "c:3"}),
        ("sparse", {1: "a:1", 3: "b:2"}),
        ("worker", {0: "a:1", 1: "b:2"}),
    ]
    assert ClusterSpec(message).as_dict() == {**DENSE, "sparse": SPARSE["worker"]}
    other = SimpleNamespace(job=[SimpleNamespace(name="w", tasks={0: "a"})])
    assert ClusterSpec(other) == ClusterSpec({"w": ["a"]})


def test_the_keys_of_json_are_indices():
    assert ClusterSpec(json.loads(json.dumps(SPARSE))) == ClusterSpec(SPARSE)


def test_dicts_are_sorted_by_index():
    assert list(ClusterSpec({"w": {3: "c", 0: "a", 2: "b"}}).as_dict()["w"]) == [0, 2, 3]


@pytest.mark.parametrize(
    ("cluster", "error", "text"),
    [
        ({"w": [5]}, TypeError, "an address of job 'w' is a string, got 5"),
        ({"w": {0: None}}, TypeError, "an address of job 'w'"),
        ({5: ["a"]}, TypeError, "a job is a string, got 5"),
        ({"w": {"one": "a"}}, TypeError, "an index of job 'w' must be an integer, got 'one'"),
        ({"w": {1.5: "a"}}, TypeError, "an index"),
        ({"w": {True: "a"}}, TypeError, "an index"),
        ({"w": {-1: "a"}}, ValueError, "of at least 0, got -1"),
        ({"w": {1: "a", "1": "b"}}, ValueError, "appears twice"),
    ],
)
def test_names_indices_and_addresses_of_other_types(cluster, error, text):
    with pytest.raises(error, match=text):
        ClusterSpec(cluster)


@pytest.mark.parametrize("cluster", [None, 5, ["a:1"], "a:1", {"w": "a:1"}, {"w": 5}, {"w": None}])
def test_what_is_no_cluster(cluster):
    with pytest.raises(TypeError):
        ClusterSpec(cluster)
