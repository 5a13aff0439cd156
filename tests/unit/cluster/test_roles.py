"""Who is the chief and who counts: the rules of tf.distribute, written out."""

from __future__ import annotations

import pytest

from mpistrat.cluster.roles import check_task, id_in_cluster, is_chief, leader, worker_count
from mpistrat.cluster_resolver import ClusterSpec

WORKERS = {"worker": ["a", "b"], "ps": ["c", "d"]}
CHIEFED = {"chief": ["a"], "worker": ["b", "c"], "ps": ["d"], "evaluator": ["e"]}


@pytest.mark.parametrize(
    ("cluster", "task", "chief", "number", "count"),
    [
        (WORKERS, ("worker", 0), True, 0, 2),
        (WORKERS, ("worker", 1), False, 1, 2),
        (WORKERS, ("evaluator", 0), True, 0, 1),  # it need not be listed
        (CHIEFED, ("chief", 0), True, 0, 3),
        (CHIEFED, ("worker", 0), False, 1, 3),
        (CHIEFED, ("worker", 1), False, 2, 3),
        (CHIEFED, ("evaluator", 0), True, 0, 1),
        ({"chief": ["a"]}, ("chief", 0), True, 0, 1),
        ({"worker": {1: "b", 0: "a"}}, ("worker", 1), False, 1, 2),
    ],
)
def test_the_rules(cluster, task, chief, number, count):
    for form in (cluster, ClusterSpec(cluster)):
        assert is_chief(form, *task) is chief
        assert id_in_cluster(form, *task) == number
        assert worker_count(form, task[0]) == count


@pytest.mark.parametrize(
    ("cluster", "task", "name"),
    [
        ({}, (None, None), ""),
        (WORKERS, ("worker", 1), "/job:worker/replica:0/task:0"),
        (CHIEFED, ("worker", 1), "/job:chief/replica:0/task:0"),
        (CHIEFED, ("ps", 0), "/job:chief/replica:0/task:0"),
        (CHIEFED, ("evaluator", 0), ""),
    ],
)
def test_who_leads(cluster, task, name):
    assert leader(cluster, *task) == name


def test_servers_do_not_count():
    assert is_chief(WORKERS, "ps", 0) is False
    with pytest.raises(ValueError, match="'ps' have no id"):
        id_in_cluster(WORKERS, "ps", 0)
    with pytest.raises(ValueError, match="'ps' do not count"):
        worker_count(WORKERS, "ps")


@pytest.mark.parametrize(
    ("cluster", "task", "text"),
    [
        ({"boss": ["a"]}, ("worker", 0), r"this cluster has \['boss'\]"),
        (WORKERS, ("boss", 0), "task_type is one of .*'boss'"),
        (WORKERS, ("chief", 0), "'chief' is not in the cluster"),
        ({"chief": ["a", "b"]}, ("chief", 0), "at most one chief, this one 2"),
        ({"evaluator": ["a", "b"]}, ("evaluator", 0), "at most one evaluator"),
        (WORKERS, ("worker", 2), "task_id 2 is too large: job 'worker' has 2"),
        (CHIEFED, ("evaluator", 1), "task_id 1 is too large"),
    ],
)
def test_what_is_no_task(cluster, task, text):
    for rule in (check_task, is_chief, leader, id_in_cluster):
        with pytest.raises(ValueError, match=text):
            rule(cluster, *task)


def test_a_process_in_no_job():
    assert check_task(WORKERS, None, None) == ClusterSpec(WORKERS)
    assert is_chief({}, None, None) is False
