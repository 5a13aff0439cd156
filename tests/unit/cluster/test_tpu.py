"""The resolver of the topology strategy: the MPI world under other words."""

from __future__ import annotations

import pytest

from mpistrat.cluster_resolver import TPUClusterResolver
from mpistrat.testing import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_it_is_the_world(size):
    def rank(comm):
        resolver = TPUClusterResolver.connect("local", zone="z", project="p")
        assert resolver.cluster_spec().as_dict() == {"worker": [f"rank:{r}" for r in range(size)]}
        assert resolver.master() == resolver.get_master() == "rank:0"
        assert resolver.master("worker", size - 1) == f"rank:{size - 1}"
        assert (resolver.task_type, resolver.get_job_name()) == ("worker", "worker")
        assert (resolver.tpu, resolver.environment) == ("local", "")
        assert resolver.num_accelerators() == {}  # no TPU is claimed
        return resolver.task_id

    assert run_ranks(rank, size) == list(range(size))


def test_other_names():
    def rank(comm):
        resolver = TPUClusterResolver(job_name="tpu_worker", coordinator_address="c:1")
        assert resolver.cluster_spec().as_dict() == {
            "tpu_worker": ["rank:0", "rank:1"],
            "coordinator": ["c:1"],
        }
        assert resolver.master("coordinator", 0) == "c:1"
        assert resolver.master() == "rank:0"
        named = TPUClusterResolver(coordinator_name="lead", coordinator_address="c:1")
        assert named.cluster_spec().jobs == ["lead", "worker"]
        return resolver.get_job_name(), resolver.task_type

    assert run_ranks(rank, 2) == [("tpu_worker", "tpu_worker")] * 2


@pytest.mark.parametrize("make", [TPUClusterResolver, TPUClusterResolver.connect])
def test_the_name_of_a_tpu_warns(make):
    with pytest.warns(RuntimeWarning, match="there is no TPU 'my-tpu' here"):
        make("my-tpu")
    for none in (None, "", "local"):
        assert make(none).task_type == "worker"
