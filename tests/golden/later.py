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
_SLICES = Later("sparse values", "IndexedSlices")
_SCATTER = Later("sparse writes to variables", "Variable.scatter_add")
_GRADIENTS = Later("gradients through collectives, of autodiff libraries", "integrations")
_V1 = Later("tf.compat.v1.distribute", "compat.tf.compat")
_GLOBAL = Later("a strategy for the rest of the program", "experimental_set_strategy")
_COLOCATE = Later("colocation of variables", "StrategyExtended.colocate_vars_with")
_OWNER = Later("whose variable it is", "StrategyExtended.variable_created_in_scope")


def _extended(name: str) -> Later:
    return Later("StrategyExtended beyond reductions", f"StrategyExtended.{name}")


def _strategy(name: str) -> Later:
    return Later("older methods of strategies", f"Strategy.{name}")


def _cross_device(name: str) -> Later:
    return Later("cross-device operations", name)


LATER = {
    "all_reduce_basic/options": _COMMUNICATION,
    "all_reduce_gradient/*": _GRADIENTS,
    "all_reduce_indexed_slices/*": _SLICES,
    "all_gather_errors_int32/indexed_slices": _SLICES,
    "variables_creation/variable_created_in_scope_*": _OWNER,
    "variables_creation/colocate_vars_with*": _COLOCATE,
    "variables_creation/handle_in_cross": Later("handles of variables", "Variable.handle"),
    "variables_scatter/*": _SCATTER,
    "gradients_and_variables/tape_around_run_and_reduce": _GRADIENTS,
    "extended_v1_misc/parameter_devices": _extended("parameter_devices"),
    "extended_v1_misc/non_slot_devices": _extended("non_slot_devices"),
    "extended_v1_misc/experimental_between_graph": _extended("experimental_between_graph"),
    "extended_v1_misc/experimental_should_init": _extended("experimental_should_init"),
    "extended_v1_misc/experimental_require_static_shapes": _extended(
        "experimental_require_static_shapes"
    ),
    "extended_v1_misc/value_container_*": _extended("value_container"),
    "extended_v1_misc/read_var": _extended("read_var"),
    "extended_v1_misc/update_non_slot*": _extended("update_non_slot"),
    "extended_v1_misc/unwrap": _strategy("unwrap"),
    "extended_v1_misc/group": _strategy("group"),
    "extended_v1_misc/configure": _strategy("configure"),
    "extended_v1_misc/update_config_proto": _strategy("update_config_proto"),
    "extended_v1_misc/colocate_vars_with_on_strategy": _strategy("colocate_vars_with"),
    "extended_v1_misc/has_v1_methods_on_v2_strategy": _strategy("unwrap"),
    "extended_v1_misc/copy": Later("refusing copies of strategies", "Strategy.__copy__"),
    "v1_strategy/{has|reduce_axis_default_none|get_loss_reduction}": _V1,
    "v1_strategy/{|v2_}extended_is_v1{|_too}": _V1,
    "v1_strategy/experimental_run_steps_on_iterator{|@function}": _extended(
        "experimental_run_steps_on_iterator"
    ),
    "scopes/{set_strategy_in_scope|experimental_set_strategy|after_set_none}": _GLOBAL,
    "options_and_enums/CommunicationImplementation": Later(
        "options of collectives", "CommunicationImplementation"
    ),
    "options_and_enums/CollectiveCommunication_is": Later(
        "options of collectives", "CollectiveCommunication"
    ),
    "options_and_enums/{InputReplicationMode|VariableAggregation}_v1": _V1,
    "options_and_enums/options_*": _COMMUNICATION,
    "options_and_enums/hints": Later("options of collectives", "CollectiveHints"),
    "options_and_enums/{num_packs_negative|NcclAllReduce_*}": _cross_device("NcclAllReduce"),
    "options_and_enums/{hier_num_packs_negative|HierarchicalCopyAllReduce_*}": _cross_device(
        "HierarchicalCopyAllReduce"
    ),
    "options_and_enums/ReductionToOneDevice_*": _cross_device("ReductionToOneDevice"),
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
