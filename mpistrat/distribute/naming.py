"""Names of leaves in texts of calls and in errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat import nest
from mpistrat.distribute.kinds import DistributedVariable


def named(leaves: Sequence[Any], structure: nest.Structure) -> Sequence[str]:
    """Return the names of the leaves; of a variable it says which one it is."""
    paths = nest.path_names(structure)
    if not any(isinstance(leaf, DistributedVariable) for leaf in leaves):
        return paths
    return [
        f"{path}={leaf.name}(no. {leaf.number})" if isinstance(leaf, DistributedVariable) else path
        for leaf, path in zip(leaves, paths, strict=True)
    ]
