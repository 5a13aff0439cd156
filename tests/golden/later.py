"""Recorded cases of parts of the interface that mpistrat does not have yet.

A row names what is missing; once that exists, the row must go and its cases be compared.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class Later(NamedTuple):
    """Why cases are not compared yet.

    Attributes:
      part: The part of the interface.
      missing: The path of what does not exist, from ``mpistrat``.
    """

    part: str
    missing: str


_COMMUNICATION = Later("options of collectives", "CommunicationOptions")
_GRADIENTS = Later("gradients through collectives, of autodiff libraries", "integrations")
_POLICY = Later("auto-shard policies", "AutoShardPolicy")
_V1 = Later("tf.compat.v1.distribute", "compat.tf.compat")
_V1_ITERATORS = Later("iterators of tf.compat.v1.distribute", "Strategy.make_dataset_iterator")
_OPTIONAL = Later("optional elements", "DistributedIterator.get_next_as_optional")
_INPUT_OPTIONS = Later("input options", "InputOptions")
_RUN_OPTIONS = Later("run options", "RunOptions")


def _resolver(name: str) -> Later:
    return Later("further cluster resolvers", f"cluster_resolver.{name}")


def _cross_device(name: str) -> Later:
    return Later("cross-device operations", name)


LATER = {
    "all_reduce_basic/options": _COMMUNICATION,
    "all_reduce_gradient/*": _GRADIENTS,
    "dataset_partial_batches/padded_batch": Later("padded batches", "Dataset.padded_batch"),
    "dataset_autoshard_policies/{DATA|OFF|FILE|HINT}_*": _POLICY,
    "dataset_iteration_protocol/{|drop_remainder_}element_spec": Later(
        "what a step looks like", "DistributedDataset.element_spec"
    ),
    "dataset_iteration_protocol/iterator_element_spec": Later(
        "what a step looks like", "DistributedIterator.element_spec"
    ),
    "dataset_iteration_protocol/get_next_*": Later(
        "another name for next()", "DistributedIterator.get_next"
    ),
    "dataset_iteration_protocol/optional_*": _OPTIONAL,
    "dataset_iteration_protocol/empty_dataset_optional": _OPTIONAL,
    "dataset_iteration_protocol/dataset_reduce_method": Later(
        "folds over a dataset", "DistributedDataset.reduce"
    ),
    "dataset_iteration_protocol/cardinality": Later(
        "how many steps there are", "DistributedDataset.cardinality"
    ),
    "gradients_and_variables/tape_around_run_and_reduce": _GRADIENTS,
    "extended_v1_misc/has_v1_methods_on_v2_strategy": _V1_ITERATORS,
    "v1_strategy/{has|reduce_axis_default_none|get_loss_reduction}": _V1,
    "v1_strategy/{|v2_}extended_is_v1{|_too}": _V1,
    "v1_strategy/make_*": _V1_ITERATORS,
    "v1_strategy/experimental_run*": _V1_ITERATORS,
    "options_and_enums/CommunicationImplementation": Later(
        "options of collectives", "CommunicationImplementation"
    ),
    "options_and_enums/CollectiveCommunication_is": Later(
        "options of collectives", "CollectiveCommunication"
    ),
    "options_and_enums/InputReplicationMode": Later("input options", "InputReplicationMode"),
    "options_and_enums/{InputReplicationMode|VariableAggregation}_v1": _V1,
    "options_and_enums/options_*": _COMMUNICATION,
    "options_and_enums/hints": Later("options of collectives", "CollectiveHints"),
    "options_and_enums/{RunOptions|run_options_ignored}": _RUN_OPTIONS,
    "options_and_enums/InputOptions": _INPUT_OPTIONS,
    "options_and_enums/{num_packs_negative|NcclAllReduce_*}": _cross_device("NcclAllReduce"),
    "options_and_enums/{hier_num_packs_negative|HierarchicalCopyAllReduce_*}": _cross_device(
        "HierarchicalCopyAllReduce"
    ),
    "options_and_enums/ReductionToOneDevice_*": _cross_device("ReductionToOneDevice"),
    "cluster_resolvers/simple*": _resolver("SimpleClusterResolver"),
    "cluster_resolvers/union_*": _resolver("UnionResolver"),
    "cluster_resolvers/{slurm_*|expand_*}": _resolver("SlurmClusterResolver"),
    "cluster_resolvers/k8s*": _resolver("KubernetesClusterResolver"),
    "cluster_resolvers/gce_*": _resolver("GCEClusterResolver"),
    "central_storage/*": Later("one copy of a variable", "CentralStorageStrategy"),
}


def exists(path: str) -> bool:
    """Tell whether mpistrat has something at this path."""
    found: Any = importlib.import_module("mpistrat")
    at = "mpistrat"
    for name in path.split("."):
        at = f"{at}.{name}"
        if name not in dir(found) and name not in vars(found):
            try:
                found = importlib.import_module(at)
            except ImportError:
                return False
        else:
            found = getattr(found, name)
    return True
