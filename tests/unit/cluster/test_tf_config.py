"""The text of TF_CONFIG, read back by the resolver of it."""

from __future__ import annotations

import json
import os

import pytest

from mpistrat.cluster.resolvers import create_placed_resolver, export_tf_config, format_tf_config
from mpistrat.cluster_resolver import (
    ClusterSpec,
    MPIClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)

SPEC = {"worker": ["a:1", "b:1"], "ps": {1: "c:1", 4: "d:1"}}


def simple(**given):
    return SimpleClusterResolver(ClusterSpec(SPEC), **given)


@pytest.mark.parametrize(
    "given",
    [
        {"task_type": "worker", "task_id": 0},
        {"task_type": "ps", "task_id": 4, "rpc_layer": "grpc", "environment": "cloud"},
        {"task_type": "evaluator", "task_id": 0},
    ],
    ids=str,
)
def test_it_is_read_back(given):
    told = simple(**given)
    read = TFConfigClusterResolver(env={"TF_CONFIG": format_tf_config(told)})
    assert read.cluster_spec() == told.cluster_spec()
    for name in ("task_type", "task_id", "rpc_layer", "environment"):
        assert getattr(read, name) == getattr(told, name)
    assert format_tf_config(read) == format_tf_config(told)


@pytest.mark.parametrize(
    ("resolver", "text"),
    [
        (simple(), "must also say which task.*task_type is None"),
        (simple(task_type="worker"), "task_id None"),
        (simple(task_type="worker", task_id=2), "No task with index 2"),
        (simple(task_type="zzz", task_id=0), "No such job"),
        (MPIClusterResolver(0, 2), "labels of ranks"),
    ],
)
def test_what_cannot_be_told(resolver, text):
    with pytest.raises(ValueError, match=text):
        format_tf_config(resolver)


@pytest.mark.parametrize("rank", range(5))
def test_ranks_on_hosts(rank):
    found = create_placed_resolver(["x", "x", "y", "x", "y"], rank, 9000)
    everyone = ["x:9000", "x:9001", "y:9000", "x:9002", "y:9001"]
    assert found.cluster_spec().as_dict() == {"worker": everyone}
    assert (found.task_type, found.task_id) == ("worker", rank)
    shared = create_placed_resolver(
        ["x", "x", "y", "x", "y"], rank, 9000, {"ps": 1, "chief": 1, "worker": 3}
    )
    assert json.loads(format_tf_config(shared)) == {
        "cluster": {"ps": everyone[:1], "chief": everyone[1:2], "worker": everyone[2:]},
        "task": {
            "type": ["ps", "chief", "worker", "worker", "worker"][rank],
            "index": [0, 0, 0, 1, 2][rank],
        },
    }


@pytest.mark.parametrize(
    ("port", "jobs", "text"),
    [
        (9000, {"worker": 1}, "add up to the 2 ranks"),
        (9000, {"worker": 3}, "add up to"),
        (9000, {"worker": 2, "ps": 0}, "at least one each"),
        (9000, {}, "add up to"),
        (0, None, "ports are 1 to 65535"),
        (65535, None, "leads to 65536"),
    ],
)
def test_what_cannot_be_placed(port, jobs, text):
    with pytest.raises(ValueError, match=text):
        create_placed_resolver(["x", "x"], 0, port, jobs)


def test_it_is_set(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "old")
    mine = {}
    export_tf_config("new", mine)
    assert (mine, os.environ["TF_CONFIG"]) == ({"TF_CONFIG": "new"}, "old")
    export_tf_config("newer")
    assert os.environ["TF_CONFIG"] == "newer"
