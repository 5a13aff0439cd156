"""Differences of datasets, values, strategies, and what belongs to them."""

from __future__ import annotations

import numpy as np

from ..recorder import Copies, Each
from .kinds import Differs, Ranks, f32, fails, same, upto


def _copied(value, n):
    return Copies([value] * n)


EXTENDED = {
    "extended_reduce_to/bad_op": Differs(
        "D9", "the maximum of 1 to n times a vector", lambda n: _copied(f32([n, 2 * n]), n)
    ),
    "extended_reduce_to/batch_two_int32": Differs(
        "D17",
        "trees with int32 fail there",
        lambda n: [_copied(np.array(upto(n), np.int32), n)] * 2,
    ),
    "extended_reduce_to/batch_mixed_dest": Differs(
        "H6",
        "the second is for a label",
        lambda n: [
            _copied(f32([upto(n) + n, 2 * (upto(n) + n)]), n),
            f32([upto(n) + n, 2 * (upto(n) + n)]),
        ],
    ),
    "extended_reduce_to/batch_empty": Differs("H2", "nothing to reduce", lambda n: []),
    "extended_v1_misc/class": Differs("H1", "the name of a class", lambda n: "StrategyExtended"),
    "extended_v1_misc/{should_checkpoint|should_save_summary}": Differs(
        "H3", "one process writes files: the first", lambda n: Ranks(i == 0 for i in range(n))
    ),
    "extended_v1_misc/update_non_slot": Differs(
        "D17",
        "what differs is called Mirrored there",
        lambda n: Each(f32(2.0 * i) for i in range(n)),
    ),
    "extended_v1_misc/{worker_devices|parameter_devices|non_slot_devices}": Differs(
        "D19", "ranks, if nothing else is said", lambda n: [f"rank:{i}" for i in range(n)]
    ),
}
VALUES = {
    "dataset_partial_batches/unbatched_scalars": Differs(
        "D18",
        "one row for each replica",
        lambda n: [
            *(
                Each(np.arange(10)[at + i : min(at + i + 1, 10)] for i in range(n))
                for at in range(0, 10, n)
            ),
            "StopIteration",
        ],
    ),
    "v1_strategy/numpy_dataset_unbatched_distribute": Differs(
        "D18",
        "one row for each replica",
        lambda n: [
            *(
                Each(np.ones(10, np.float32)[at + i : min(at + i + 1, 10)] for i in range(n))
                for at in range(0, 10, n)
            ),
            "StopIteration",
        ],
    ),
    "distribute_values_from_function/contexts": Differs(
        "H3",
        "each rank makes its own value",
        lambda n: Ranks(
            [(i, n, f"tf.distribute.ValueContext(replica id {i},  total replicas in sync: {n})")]
            for i in range(n)
        ),
    ),
    "v1_strategy/ctx_type": Differs("H1", "the name of a class", same("ReplicaContext")),
    "scopes/default": Differs(
        "H1",
        "the names of two classes",
        lambda n: {
            "strategy": "DefaultStrategy",
            "has": False,
            "cross": False,
            "ctx": "ReplicaContext",
            "rid": 0,
            "rid_type": "int",
            "n": 1,
        },
    ),
    "options_and_enums/ReduceOp": Differs(
        "D9",
        "three more",
        lambda n: [(name, name) for name in ("SUM", "MEAN", "MIN", "MAX", "PROD")],
    ),
    "options_and_enums/mirrored_bad_device": Differs("D19", "one name, n ranks", lambda n: n),
    "cluster_resolvers/tfconfig": Differs(
        "H7",
        "the environment is '', not None",
        lambda n: {
            "spec": {"worker": ["h0:1", "h1:2"], "ps": ["p0:3"]},
            "type": "worker",
            "id": 1,
            "rpc": "grpc",
            "master": "grpc://h1:2",
            "master_ps0": "grpc://p0:3",
            "master_rpc": "http://p0:3",
            "env": "",
        },
    ),
    "one_device_strategy/replica_id_type": Differs("H1", "the name of a type", lambda n: "int"),
    "one_device_strategy/mirrored1_run_type": Differs(
        "D2", "wrapped with one replica too", lambda n: "PerReplica"
    ),
    "one_device_strategy/mirrored1_all_reduce_int_mean": Differs(
        "D8", "with one replica too", lambda n: Each([np.array(3.0)])
    ),
    "one_device_strategy/mirrored1_all_reduce_two_int32": Differs(
        "D17",
        "trees with int32 fail there",
        lambda n: [Each([np.array(3, np.int32)]), Each([np.array(0, np.int32)])],
    ),
    "one_device_strategy/mirrored1_reduce_plain_SUM": Differs(
        "D3", "with one replica too", fails("StructureError")
    ),
}
