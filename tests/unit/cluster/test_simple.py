"""Resolvers of what the program says, beyond what is recorded in tests/golden."""

from __future__ import annotations

import pytest

from mpistrat.cluster_resolver import (
    ClusterSpec,
    MPIClusterResolver,
    SimpleClusterResolver,
    UnionResolver,
)


def of(cluster, **more):
    return SimpleClusterResolver(ClusterSpec(cluster), **more)


def test_a_master_that_was_given():
    resolver = of({"worker": ["a:1"]}, master="m:1")
    assert resolver.master() == resolver.master("worker") == resolver.master(task_id=0) == "m:1"
    assert resolver.master(rpc_layer="grpc") == "grpc://m:1"
    with pytest.raises(ValueError, match="No task with index 1"):
        resolver.master("worker", 1)


def test_what_is_given_is_copied():
    counts = {"GPU": 1}
    resolver = of({}, num_accelerators=counts)
    counts["GPU"] = 2
    resolver.num_accelerators()["GPU"] = 3
    assert resolver.num_accelerators("worker", 0) == {"GPU": 1}


def test_accelerators_are_a_dict():
    with pytest.raises(TypeError, match=r"num_accelerators must be a dict.*, got 2"):
        SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), num_accelerators=2)


def test_names_can_be_set():
    first = of({"worker": ["a:1"]}, task_type="worker", task_id=0)
    union = UnionResolver(first)
    first.task_type, first.rpc_layer = "ps", "http"
    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 0, "http")
    union.task_type, union.task_id, union.rpc_layer = "chief", 3, "grpc"
    assert (union.task_type, union.task_id, union.rpc_layer) == ("chief", 3, "grpc")
    assert (first.task_type, first.task_id) == ("ps", 0)
    assert union.master("worker", 0) == "grpc://a:1"


def test_task_0_is_a_task():
    first = of({}, task_type="worker", task_id=5)
    assert UnionResolver(first, task_id=0).task_id == 0


def test_a_union_of_all_kinds():
    union = UnionResolver(MPIClusterResolver(1, 2), of({"ps": ["p:1"]}), of({"worker": ["w:1"]}))
    assert union.cluster_spec().as_dict() == {"worker": ["rank:0", "rank:1", "w:1"], "ps": ["p:1"]}
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 1, None)
    assert union.master("ps", 0) == "p:1"


def test_a_union_of_a_union():
    inner = UnionResolver(of({"w": ["a"]}), of({"w": {2: "c"}}))
    assert inner.cluster_spec().as_dict() == {"w": {0: "a", 2: "c"}}
    assert UnionResolver(inner, of({"w": {1: "b"}})).cluster_spec().as_dict() == {
        "w": ["a", "b", "c"]
    }
    with pytest.raises(KeyError, match=r"tasks \[0\] of job 'w'"):
        UnionResolver(inner, of({"w": ["b"]})).cluster_spec()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: SimpleClusterResolver({"worker": ["a:1"]}), TypeError, "must be a ClusterSpec"),
        (lambda: of({}, master=3), TypeError, "master must be a string, got 3"),
        (lambda: UnionResolver(), ValueError, "at least one ClusterResolver"),
        (lambda: UnionResolver(of({}), {"worker": []}), TypeError, "takes ClusterResolvers, got"),
        (lambda: UnionResolver(of({}), jobs=1), ValueError, r"task_id, not \['jobs'\]"),
    ],
    ids=["no spec", "no text", "none", "no resolver", "keyword"],
)
def test_what_is_no_resolver_or_cluster_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_union_answers_as_its_first():
    first = of({"worker": ["a:1"]}, master="m:1", num_accelerators={"GPU": 2}, environment="here")
    union = UnionResolver(first, of({"worker": ["b:1"]}), rpc_layer="grpc")
    assert union.master() == first.master()
    assert union.master("worker", 1) == "grpc://b:1"
    assert union.num_accelerators() == {"GPU": 2}
    assert union.environment == "here"
