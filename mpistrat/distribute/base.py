"""The strategy as the modules below `Strategy` know it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpistrat.distribute.replica_group import ReplicaGroup


class StrategyBase:
    """A strategy, as functions of this room take one; `Strategy` says what its methods do.

    Attributes:
      replicas: What it is made of.
      device_labels: The labels of the replicas' devices.
      is_default: Whether it is the one that rules where no other does.
    """

    replicas: ReplicaGroup
    device_labels: tuple[str, ...]
    is_default = False

    scope: Callable[[], Any]
    run: Callable[..., Any]
    reduce: Callable[..., Any]
    experimental_local_results: Callable[[Any], tuple[Any, ...]]
    experimental_make_numpy_dataset: Callable[[Any], Any]
