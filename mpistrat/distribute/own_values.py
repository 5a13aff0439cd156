"""Values that each rank has of its own: gathered as they are, and rows of arrays of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.arrays import as_array, kind_of, label
from mpistrat.comm.trees import decode_tree, encode_tree
from mpistrat.distribute.kinds import DistributedVariable, named
from mpistrat.distribute.regroup import select
from mpistrat.distribute.replica_group import ReplicaGroup
from mpistrat.errors import DataError
from mpistrat.feed.pieces import row_bounds


def gather_objects(group: ReplicaGroup, value: Any) -> list[Any]:
    """Return every replica's tree; see `Strategy.gather_objects`. Collective."""
    lockstep = group.lockstep
    with lockstep.preparing("gather_objects"):
        leaves, structure = nest.flatten(value)
        group.regroup.check("gather_objects", leaves)
        local_tree = nest.unflatten(structure, [_extract_array(leaf) for leaf in leaves])
        kind, content = encode_tree(local_tree)
    messages = lockstep.gather_payloads("gather_objects", kind + content)
    with lockstep.preparing("gather_objects"):
        return [decode_tree(message[:1], message[1:]) for message in messages]


def _extract_array(leaf: Any) -> Any:
    """Return the array of a variable or of another library; anything else unchanged."""
    value = leaf.component() if isinstance(leaf, DistributedVariable) else select(leaf)
    return value if isinstance(value, np.ndarray) or kind_of(value) is None else as_array(value)


def local_rows(group: ReplicaGroup, arrays: Any) -> Any:
    """Return a replica's rows of arrays that all hold alike; see `Strategy.local_rows`."""
    leaves, structure = nest.flatten(arrays)
    leaves = [np.asarray(x) if isinstance(x, DistributedVariable) else select(x) for x in leaves]
    names = list(map(label, named(leaves, structure)))
    counts = [_row_count(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
    if len(set(counts)) > 1:
        sizes = ", ".join(f"{name} has {n}" for name, n in zip(names, counts, strict=True))
        raise DataError(f"local_rows: the leaves must have the same number of rows, but {sizes}.")
    lo, hi = row_bounds(counts[0] if counts else 0, group.regroup.rank, group.regroup.size)
    return nest.unflatten(structure, [getattr(leaf, "iloc", leaf)[lo:hi] for leaf in leaves])


def _row_count(leaf: Any, name: str) -> int:
    shape = getattr(leaf, "shape", None)
    if not shape or not hasattr(leaf, "__getitem__"):
        raise DataError(
            f"local_rows: {name} is {leaf!r:.60} ({type(leaf).__name__}), which has no rows. Give "
            "an array, or a tree of arrays; of a list np.asarray(list)."
        )
    return int(shape[0])
