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


_GRADIENTS = Later("gradients through collectives, of autodiff libraries", "integrations")
_V1 = Later("tf.compat.v1.distribute", "compat.tf.compat")


LATER = {
    "all_reduce_gradient/*": _GRADIENTS,
    "gradients_and_variables/tape_around_run_and_reduce": _GRADIENTS,
    "v1_strategy/{has|reduce_axis_default_none|get_loss_reduction}": _V1,
    "v1_strategy/{|v2_}extended_is_v1{|_too}": _V1,
    "options_and_enums/{InputReplicationMode|VariableAggregation}_v1": _V1,
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
