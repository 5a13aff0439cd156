"""Every name that tf.distribute exports, and whether it is the same here: data, and a table of it.

``python -m mpistrat.parity`` prints the table as Markdown. A name is in one row; what differs, or
why it is refused, stands beside it. Members of the classes that programs use follow in a second
table.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from mpistrat.refused import REFUSED

__all__ = ["PENDING", "Row", "Verdict", "counts", "markdown", "members", "rows"]


class Verdict(enum.Enum):
    """What a name is here."""

    SAME = "same"
    DIFFERS = "differs"
    REFUSED = "refused"
    PENDING = "to come"


class Row(NamedTuple):
    """One name.

    Attributes:
      name: As TensorFlow has it, such as ``tf.distribute.Strategy``.
      here: Its path below ``mpistrat``.
      verdict: Whether it is the same.
      why: What differs or why it is refused; empty for what is the same.
    """

    name: str
    here: str
    verdict: Verdict
    why: str = ""


# Rows below whose names do not exist yet; take a name away when it comes.
PENDING: frozenset[str] = frozenset()

_RANKS = "a replica is an MPI rank, and the launcher says how many there are"
_CHOOSES = "chooses how bytes move between ranks; there are no devices to copy from"
_PLACED = "replicas are placed on the ranks of a topology that is read from MPI; there is no TPU"
_SHARED = "each rank has a copy of a variable, and the copies are kept equal"

# By path below tf.distribute: what differs; "" if nothing does.
_NAMES: dict[str, str] = {
    "CrossDeviceOps": "`reduce_implementation` runs on every rank, and must return the same on "
    "all; what a program calls itself, it calls in the scope of the strategy",
    "DistributedDataset": "an incomplete last step is never dropped: replicas without rows get "
    "arrays with no rows",
    "DistributedIterator": "",
    "DistributedValues": "values of other replicas are on other ranks: `.values` has them once "
    "`experimental_local_results` has fetched them",
    "HierarchicalCopyAllReduce": _CHOOSES,
    "InputContext": "",
    "InputOptions": "what speaks of devices changes nothing",
    "InputReplicationMode": "a rank is a worker and a replica, so `distribute_datasets_from_"
    "function` calls its function once on each rank in both modes",
    "MirroredStrategy": f"{_RANKS}; device names are labels; every leaf that `run` returns is "
    "wrapped, with one replica too",
    "MultiWorkerMirroredStrategy": "each rank is a worker with one replica; the resolver names it, "
    "the rank comes from MPI; names that do not fit the ranks warn",
    "NcclAllReduce": "stands for the MPI library's own all-reduce",
    "OneDeviceStrategy": "",
    "ParameterServerStrategy": "",
    "ReduceOp": "has MIN, MAX and PROD too",
    "ReductionToOneDevice": _CHOOSES,
    "ReplicaContext": "the replica id is a Python integer; `with` one, a rank enters its own "
    "replica's, and leaving it is collective, as the end of `run`",
    "RunOptions": "",
    "Server": "",
    "Strategy": "another strategy is another choice of parts, not another `extended`",
    "StrategyExtended": "one class for all strategies",
    "TPUStrategy": _PLACED,
    "experimental_set_strategy": "",
    "get_replica_context": "",
    "get_strategy": "",
    "has_strategy": "",
    "in_cross_replica_context": "",
    "cluster_resolver.ClusterResolver": "",
    "cluster_resolver.GCEClusterResolver": "",
    "cluster_resolver.KubernetesClusterResolver": "",
    "cluster_resolver.KubernetesExecutableLocation": "",
    "cluster_resolver.SimpleClusterResolver": "",
    "cluster_resolver.SlurmClusterResolver": "works on nodes without GPUs too; hosts stand in the "
    "order of Slurm's list, in which `srun` numbers its tasks (n9 before n10), and are not sorted",
    "cluster_resolver.TFConfigClusterResolver": "`environment` is an empty text if nothing "
    "has set it",
    "cluster_resolver.TPUClusterResolver": "the ranks of the MPI world in a TPU's words; the name "
    "of a TPU warns",
    "cluster_resolver.UnionResolver": "a `task_id` of 0 counts; there it falls through to the "
    "first resolver's",
    "coordinator.ClusterCoordinator": "",
    "coordinator.PerWorkerValue": "",
    "coordinator.RemoteValue": "",
    "coordinator.experimental_get_current_worker_index": "",
    "experimental.CentralStorageStrategy": _SHARED,
    "experimental.CollectiveCommunication": "RING and NCCL are algorithms of ours and of MPI",
    "experimental.CollectiveHints": "on a timeout the job ends, because a rank that is blocked "
    "inside MPI cannot raise",
    "experimental.CommunicationImplementation": "RING and NCCL are algorithms of ours and of MPI",
    "experimental.CommunicationOptions": "on a timeout the job ends, because a rank that is "
    "blocked inside MPI cannot raise; has `wire` too",
    "experimental.MultiWorkerMirroredStrategy": "as `MultiWorkerMirroredStrategy`",
    "experimental.ParameterServerStrategy": "",
    "experimental.PreemptionCheckpointHandler": "ranks save at the step at which they "
    "learn of the notice, and replica 0 writes; no metadata server is asked unless a program does; "
    "a `Checkpoint` without a directory is a ValueError",
    "experimental.PreemptionWatcher": "",
    "experimental.TPUStrategy": _PLACED,
    "experimental.TerminationConfig": "has `signals` too; the same defaults on every platform",
    "experimental.ValueContext": "",
    "experimental.coordinator.ClusterCoordinator": "",
    "experimental.coordinator.PerWorkerValues": "",
    "experimental.coordinator.RemoteValue": "",
    "experimental.partitioners.FixedShardsPartitioner": "",
    "experimental.partitioners.MaxSizePartitioner": "",
    "experimental.partitioners.MinSizePartitioner": "",
    "experimental.partitioners.Partitioner": "",
    "experimental.rpc.Client": "",
    "experimental.rpc.Server": "",
}

# By the full name, with the path here.
_ELSEWHERE: dict[str, tuple[str, str]] = {
    "tf.VariableAggregation": (
        "VariableAggregation",
        "with NONE, replicas may only write what is the same on all; with SUM, a literal that n "
        "replicas write counts n times",
    ),
    "tf.VariableSynchronization": ("VariableSynchronization", ""),
    "tf.types.experimental.distributed.Mirrored": (
        "Mirrored",
        "what differs between replicas is never called that",
    ),
    "tf.types.experimental.distributed.PerReplica": (
        "PerReplica",
        "`.local` is this rank's value; the others are fetched by `experimental_local_results`",
    ),
}

# What tf.compat.v1.distribute has of these, and what differs there in other ways.
_V1 = (
    *("CrossDeviceOps", "HierarchicalCopyAllReduce", "InputContext", "InputReplicationMode"),
    *("MirroredStrategy", "NcclAllReduce", "OneDeviceStrategy", "ReduceOp", "ReductionToOneDevice"),
    *("ReplicaContext", "RunOptions", "Server", "Strategy", "StrategyExtended"),
    *("experimental_set_strategy", "get_loss_reduction", "get_replica_context", "get_strategy"),
    *("has_strategy", "in_cross_replica_context"),
    *(name for name in _NAMES if name.startswith("cluster_resolver.")),
    *("experimental.CentralStorageStrategy", "experimental.CollectiveCommunication"),
    *("experimental.CollectiveHints", "experimental.CommunicationImplementation"),
    *("experimental.CommunicationOptions", "experimental.MultiWorkerMirroredStrategy"),
    *("experimental.ParameterServerStrategy", "experimental.TPUStrategy"),
)
_V1_WHY = {
    "Strategy": "made of a newer strategy; `experimental_run_v2` is still there",
    "get_loss_reduction": "SUM always: there are no Estimators",
}

_SPEC = "shapes and dtypes are NumPy's"

# By path: what differs; "" if nothing does.
_STRATEGY: dict[str, str] = {
    "cluster_resolver": "",
    "colocate_vars_with": "",
    "configure": "does nothing: the launcher has said what ranks there are",
    "distribute_datasets_from_function": "one input pipeline is one rank, under `MirroredStrategy` "
    "too",
    "experimental_distribute_dataset": "an unbatched dataset is taken as if batched by the number "
    "of replicas",
    "experimental_distribute_datasets_from_function": "as `distribute_datasets_from_function`",
    "experimental_local_results": "collective under `MirroredStrategy`",
    "experimental_run": "",
    "extended": "",
    "group": "waits until every rank has come",
    "make_dataset_iterator": "",
    "make_input_fn_iterator": "the function is called on every rank, and so is a callable that it "
    "returns",
    "num_replicas_in_sync": "",
    "reduce": "takes MIN, MAX and PROD, trees with an axis, and lists of axes; dtypes are kept, "
    "but MEAN of integers is floating",
    "run": "replicas are processes that run at the same time; if one fails, all raise",
    "scope": "",
    "unwrap": "collective under `MirroredStrategy`",
    "update_config_proto": "gives a copy and sets nothing",
}
_MEMBERS: dict[str, dict[str, str]] = {
    "Strategy": {
        **_STRATEGY,
        "experimental_distribute_values_from_function": "each rank calls it for its own replica",
        "gather": "axes may be negative, and parts all empty",
    },
    "StrategyExtended": {
        "batch_reduce_to": "destinations are checked; the results are on every rank",
        "broadcast_to": "replica 0's value under `MirroredStrategy`; a Python number too",
        "call_for_each_replica": "as `Strategy.run`",
        "colocate_vars_with": "",
        "experimental_between_graph": "",
        "experimental_make_numpy_dataset": "",
        "experimental_require_static_shapes": "",
        "experimental_run_steps_on_iterator": "a loop in Python; a strategy with `steps_per_run` "
        "makes so many steps unless it is told",
        "experimental_should_init": "",
        "non_slot_devices": "labels of ranks",
        "parameter_devices": "labels of ranks",
        "read_var": "",
        "reduce_to": "destinations are checked; the result is on every rank",
        "should_checkpoint": "true on rank 0 only",
        "should_save_summary": "true on rank 0 only",
        "update": "values per replica are refused: mirrored copies cannot be made to differ",
        "update_non_slot": "results of values per replica are called `PerReplica`",
        "value_container": "",
        "variable_created_in_scope": "",
        "worker_devices": "labels of ranks",
    },
    "ReplicaContext": {
        "all_gather": "axes may be negative, and parts all empty",
        "all_reduce": "takes MIN, MAX, PROD, weights and numbers; gradients by `mpistrat.vjp`",
        "devices": "labels of ranks",
        "merge_call": "`merge_fn` runs on every rank, with the closure of that rank",
        "num_replicas_in_sync": "",
        "replica_id_in_sync_group": "a Python integer",
        "strategy": "",
    },
    "DistributedDataset": {"cardinality": "", "element_spec": _SPEC, "reduce": ""},
    "DistributedIterator": {
        "element_spec": _SPEC,
        "get_next": "raises `mpistrat.OutOfRangeError` at the end",
        "get_next_as_optional": "",
    },
}
_V1_MEMBERS = {
    **_STRATEGY,
    "experimental_make_numpy_dataset": "",
    "experimental_run_v2": "gone from TensorFlow 2.21; another name of `run` here",
    "reduce": f"as the newer one, but that the axis may be left out: {_STRATEGY['reduce']}",
}


def _row(name: str, here: str, why: str, pending: bool) -> Row:
    if pending:
        return Row(name, here, Verdict.PENDING, why)
    plain = here.removeprefix("compat.v1.distribute.")
    refusal = REFUSED.get(_SECOND_NAMES.get(plain, plain))
    if refusal is not None:
        return Row(name, here, Verdict.REFUSED, f"{refusal.why}. {refusal.instead}")
    return Row(name, here, Verdict.DIFFERS if why else Verdict.SAME, why)


_SECOND_NAMES = {  # refused names that are other names of what is refused
    "experimental.ParameterServerStrategy": "ParameterServerStrategy",
    "experimental.coordinator.ClusterCoordinator": "coordinator.ClusterCoordinator",
    "experimental.coordinator.RemoteValue": "coordinator.RemoteValue",
}


def rows() -> list[Row]:
    """Return a row for every exported name, in the order of the table.

    Example:
      >>> rows()[1].name, rows()[1].verdict.value
      ('tf.distribute.DistributedDataset', 'differs')
    """
    newer = [_row(f"tf.distribute.{n}", n, why, n in PENDING) for n, why in _NAMES.items()]
    beside = [_row(name, here, why, False) for name, (here, why) in _ELSEWHERE.items()]
    older = [
        _row(
            f"tf.compat.v1.distribute.{n}",
            f"compat.v1.distribute.{n}",
            _V1_WHY.get(n, _NAMES.get(n, "")),
            n in PENDING,
        )
        for n in _V1
    ]
    return newer + beside + older


def members() -> list[Row]:
    """Return a row for every member of the classes that programs use."""
    found = [
        _row(f"tf.distribute.{of}.{n}", f"{of}.{n}", why, f"{of}.{n}" in PENDING)
        for of, names in _MEMBERS.items()
        for n, why in names.items()
    ]
    older = "compat.v1.distribute.Strategy"
    return found + [
        _row(f"tf.{older}.{n}", f"{older}.{n}", why, False) for n, why in _V1_MEMBERS.items()
    ]


def counts() -> str:
    """Return in one line how many names are what.

    Example:
      >>> counts().startswith("101 names: ")
      True
    """
    found = [row.verdict for row in rows()]
    words = {Verdict.DIFFERS: "differ"}
    parts = [
        f"{found.count(kind)} {words.get(kind, kind.value)}" for kind in Verdict if kind in found
    ]
    return f"{len(found)} names: {', '.join(parts)}"


def _table(found: list[Row]) -> list[str]:
    lines = ["| name | in `mpistrat` | |", "|---|---|---|"]
    for row in found:
        why = f": {row.why}" if row.why else ""
        lines.append(f"| `{row.name}` | `{row.here}` | **{row.verdict.value}**{why} |")
    return lines


def markdown() -> str:
    """Return counts and both tables as Markdown."""
    return "\n".join(
        [f"{counts()}.", "", *_table(rows()), "", "Their members:", "", *_table(members())]
    )


if __name__ == "__main__":
    print(markdown())
