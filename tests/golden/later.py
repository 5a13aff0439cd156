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


def _cross_device(name: str) -> Later:
    return Later("cross-device operations", name)


LATER = {
    "all_reduce_basic/options": _COMMUNICATION,
    "options_and_enums/CommunicationImplementation": Later(
        "options of collectives", "CommunicationImplementation"
    ),
    "options_and_enums/CollectiveCommunication_is": Later(
        "options of collectives", "CollectiveCommunication"
    ),
    "options_and_enums/options_*": _COMMUNICATION,
    "options_and_enums/hints": Later("options of collectives", "CollectiveHints"),
    "options_and_enums/{num_packs_negative|NcclAllReduce_*}": _cross_device("NcclAllReduce"),
    "options_and_enums/{hier_num_packs_negative|HierarchicalCopyAllReduce_*}": _cross_device(
        "HierarchicalCopyAllReduce"
    ),
    "options_and_enums/ReductionToOneDevice_*": _cross_device("ReductionToOneDevice"),
    "central_storage/*": Later("one copy of a variable", "CentralStorageStrategy"),
    "v1_strategy/experimental_run_steps_on_iterator{|@function}": Later(
        "several steps per call", "StrategyExtended.experimental_run_steps_on_iterator"
    ),
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
