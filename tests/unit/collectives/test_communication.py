"""Options of collectives: their values, and how two of them become one."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.experimental import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)


def test_names_and_defaults():
    options = CommunicationOptions()
    assert (options.bytes_per_pack, options.timeout_seconds) == (0, None)
    assert options.implementation is CommunicationImplementation.AUTO
    assert CollectiveCommunication is CommunicationImplementation
    assert CommunicationOptions(implementation="nccl").implementation.value == "NCCL"
    assert CollectiveHints(3, 2.0) == CommunicationOptions(3, 2.0)
    assert ms.CommunicationOptions is CommunicationOptions


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"bytes_per_pack": -1}, "0 or more, got -1"),
        ({"bytes_per_pack": 1.5}, "must be an integer"),
        ({"bytes_per_pack": True}, "must be an integer"),
        ({"timeout_seconds": 0}, "must be a positive number"),
        ({"timeout_seconds": True}, "must be a positive number"),
        ({"timeout_seconds": "a"}, "must be a positive number"),
        ({"timeout_seconds": [1.0]}, "must be a positive number"),
        ({"bytes_per_pack": "1"}, "must be an integer"),
        ({"timeout_seconds": float("nan")}, "must be a positive number"),
        ({"implementation": "MPI"}, "'MPI' is not a valid CommunicationImplementation"),
        ({"implementation": 3}, "must be a CommunicationImplementation or its name"),
    ],
)
def test_wrong_values(wrong, text):
    with pytest.raises(ValueError, match=text):
        CommunicationOptions(**wrong)


def test_what_is_no_default_rules():
    first = CommunicationOptions(10, 5.0, "RING")
    assert first.merge(CommunicationOptions()) == first
    assert first.merge(None) == first
    assert first.merge(CommunicationOptions(7, 1.0, "NCCL")) == CommunicationOptions(7, 1, "NCCL")
    assert first.merge(CommunicationOptions(timeout_seconds=2)) == CommunicationOptions(
        10, 2, "RING"
    )


def test_a_strategy_takes_nothing_else():
    with pytest.raises(ValueError, match="communication_options must be an instance"):
        ms.MultiWorkerMirroredStrategy(communication_options="fast")
    with pytest.raises(ValueError, match="cluster_resolver must be an instance of ClusterRes"):
        ms.MultiWorkerMirroredStrategy(CommunicationOptions())


def test_the_older_order_of_arguments():
    resolver = ms.cluster_resolver.SimpleClusterResolver(
        ms.cluster_resolver.ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0
    )
    strategy = ms.experimental.MultiWorkerMirroredStrategy("ring", resolver)
    assert strategy.cluster_resolver is resolver
    assert isinstance(strategy, ms.MultiWorkerMirroredStrategy)
    assert strategy._replicas.options == CommunicationOptions(implementation="RING")
    with pytest.raises(ValueError, match="not a valid"):
        ms.experimental.MultiWorkerMirroredStrategy("fast")


def test_numbers_of_numpy_are_numbers():
    options = ms.CommunicationOptions(np.int64(5), np.float32(2.5))
    assert (options.bytes_per_pack, options.timeout_seconds) == (5, 2.5)
    assert type(options.bytes_per_pack) is int
    assert type(options.timeout_seconds) is float
    assert str(ms.CommunicationOptions(timeout_seconds=3)).startswith(
        "Options(bytes_per_pack=0,timeout_seconds=3,"
    )


def test_options_are_options_where_nothing_moves_too():
    one = ms.OneDeviceStrategy("cpu")
    for call in (
        lambda: one.run(lambda: ms.get_replica_context().all_reduce("SUM", 1.0, "fast")),
        lambda: one.run(lambda: ms.get_replica_context().all_gather(np.ones(1), 0, "fast")),
        lambda: one.extended.reduce_to("SUM", 1.0, "cpu", "fast"),
        lambda: one.extended.batch_reduce_to("SUM", [(1.0, "cpu")], 5),
    ):
        with pytest.raises(ValueError, match="must be an instance of CommunicationOptions"):
            call()
