"""Who is the chief and who counts: the rules of tf.distribute, written out."""

from __future__ import annotations

import pytest

from mpistrat.cluster_resolver import ClusterSpec, SimpleClusterResolver
from mpistrat.strategy.strategies import Task, read_task

WORKERS = {"worker": ["a", "b"], "ps": ["c", "d"]}
CHIEFED = {"chief": ["a"], "worker": ["b", "c"], "ps": ["d"], "evaluator": ["e"]}


def task(cluster, kind, number):
    return read_task(SimpleClusterResolver(ClusterSpec(cluster), task_type=kind, task_id=number))


@pytest.mark.parametrize(
    ("cluster", "kind", "number", "count", "chief"),
    [
        (WORKERS, "worker", 0, 2, True),
        (WORKERS, "worker", 1, 2, False),
        (WORKERS, "evaluator", 0, 1, True),  # it need not be listed
        (CHIEFED, "chief", 0, 3, True),
        (CHIEFED, "worker", 0, 3, False),
        (CHIEFED, "worker", 1, 3, False),
        (CHIEFED, "evaluator", 0, 1, True),
        ({"chief": ["a"]}, "chief", 0, 1, True),
        ({"worker": {1: "b", 0: "a"}}, "worker", 1, 2, False),
    ],
)
def test_the_rules(cluster, kind, number, count, chief):
    assert task(cluster, kind, number) == Task(kind, number, count, chief)


@pytest.mark.parametrize(
    ("cluster", "kind", "number", "text"),
    [
        ({"boss": ["a"]}, "worker", 0, r"this cluster has \['boss'\]"),
        (WORKERS, "boss", 0, "task_type is one of .*'boss'"),
        (WORKERS, "ps", 0, "calls this process ps 0, but ranks are replicas"),
        (WORKERS, "chief", 0, "'chief' is not in the cluster"),
        ({"chief": ["a", "b"]}, "chief", 0, "at most one chief, this one 2"),
        ({"evaluator": ["a", "b"]}, "evaluator", 0, "at most one evaluator"),
        (WORKERS, "worker", 2, "this process worker 2, which ClusterSpec"),
        (CHIEFED, "evaluator", 1, "this process evaluator 1, which ClusterSpec"),
        (WORKERS, None, None, "must also say which task this process"),
    ],
)
def test_what_is_no_task(cluster, kind, number, text):
    with pytest.raises(ValueError, match=text):
        task(cluster, kind, number)


def test_a_process_in_no_cluster():
    assert task({}, None, None) == Task()
