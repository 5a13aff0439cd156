"""Differences of datasets, values, strategies, and what belongs to them."""

from __future__ import annotations

import numpy as np

from ..recorder import Copies, Each
from .kinds import Differs, Ranks, f32, fails, same, upto

_OLDER = (
    *("make_dataset_iterator", "make_input_fn_iterator", "experimental_run"),
    *("experimental_make_numpy_dataset", "experimental_run_v2", "unwrap", "group"),
    *("configure", "update_config_proto", "gather"),
    "experimental_distribute_values_from_function",
    *("cluster_resolver", "steps_per_run"),
)


def _copied(value, n):
    return Copies([value] * n)


def _cut(rows, batch):
    """Return the steps of range(rows) in batches, each cut in pieces of ceil(L / n)."""

    def dealt(n):
        batches = [np.arange(rows)[at : at + batch] for at in range(0, rows, batch)]
        found = []
        for whole in batches:
            each = -(-len(whole) // n)
            found.append(Each(whole[i * each : (i + 1) * each] for i in range(n)))
        return [*found, "StopIteration"]

    return dealt


def _spec(rows):
    def shown(n):
        spec = f"Spec(shape=({rows(n)},), dtype=dtype('int64'))"
        return f"PerReplicaSpec({', '.join([spec] * n)})"

    return shown


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
        "D18", "an IndexError there; one class of errors of data here", fails("DataError")
    ),
    "dataset_iteration_protocol/{|iterator_}element_spec": Differs(
        "H1", "the text of NumPy's shape and dtype", _spec(lambda n: None)
    ),
    "dataset_iteration_protocol/drop_remainder_element_spec": Differs(
        "H1", "the text of NumPy's shape and dtype", _spec(lambda n: 4 // n)
    ),
    **{
        f"dataset_autoshard_policies/HINT_range{rows}_batch{batch}": Differs(
            "D14", "every batch is cut", _cut(rows, batch), sizes=(size,)
        )
        for rows, batch, size in [(10, 4, 2), (14, 8, 2), (6, 8, 2), (13, 7, 2), (10, 5, 4)]
    },
    "dataset_autoshard_policies/HINT_range10_batch5_drop": Differs(
        "D14", "every batch is cut", _cut(10, 5), sizes=(4,)
    ),
    "v1_strategy/make_input_fn_iterator_callable": Differs(
        "H3", "each replica has a function that counts", same(np.array(1, np.int32))
    ),
    "extended_v1_misc/has_v1_methods_on_v2_strategy": Differs(
        "H9",
        "well-known programs call experimental_make_numpy_dataset on the newer strategies too",
        lambda n: {name: name not in ("experimental_run_v2", "steps_per_run") for name in _OLDER},
    ),
    "v1_strategy/has": Differs(
        "H9",
        "experimental_run_v2",
        lambda n: {
            name: name
            not in ("gather", "experimental_distribute_values_from_function", "steps_per_run")
            for name in (
                *_OLDER,
                *("reduce", "experimental_local_results", "colocate_vars_with"),
                "distribute_datasets_from_function",
                "experimental_distribute_datasets_from_function",
            )
        },
    ),
    "v1_strategy/numpy_dataset_unbatched_distribute": Differs(
        "D18", "an IndexError there; one class of errors of data here", fails("DataError")
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
    "scopes/default_merge_call": Differs(
        "D22", "a context of no strategy, in a job of several ranks", fails("ContextError")
    ),
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
        "five more",
        lambda n: [(name, name) for name in ("SUM", "MEAN", "MIN", "MAX", "PROD", "ALL", "ANY")],
    ),
    "options_and_enums/options_defaults": Differs(
        "H1",
        "the name of a class",
        lambda n: (
            0,
            None,
            "CommunicationImplementation.AUTO",
            "Options(bytes_per_pack=0,timeout_seconds=None, "
            "implementation=CommunicationImplementation.AUTO)",
            "CommunicationOptions",
        ),
    ),
    "central_storage/distribute_dataset_with_options": Differs(
        "D17",
        "a misspelt attribute",
        lambda n: [
            Each(np.arange(2 * i, 2 * i + 2) for i in range(2)),
            Each(np.arange(4 + i, 5) for i in range(2)),
            "StopIteration",
        ],
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
    "cluster_resolvers/slurm_no_gpu": Differs(
        "D17",
        "tasks without GPUs fail there",
        lambda n: {
            "spec": {
                "worker": [
                    *("t02n13:8888", "t02n13:8889", "t02n13:8890", "t02n13:8891"),
                    *("t02n41:8888", "t02n41:8889", "t02n41:8890", "t02n41:8891"),
                    *("t02n43:8888", "t02n43:8889"),
                ]
            },
            "info": ("worker", 5),
            "master": "grpc://t02n41:8889",
            "master_w0": "grpc://t02n13:8888",
            "acc": {"GPU": 0},
            "cuda": "0,1,2,3",
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
