"""``tf.nest`` as programs that import `mpistrat.compat.tf` see it.

Nodes are what `mpistrat.nest` says. A `PerReplica` is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpistrat import nest
from mpistrat.compat.absent import absent_from as _absent_from
from mpistrat.errors import StructureError

__all__ = ["assert_same_structure", "flatten", "is_nested", "map_structure", "pack_sequence_as"]

__getattr__ = _absent_from("tf.nest")


def is_nested(structure: Any) -> bool:
    """Tell whether `structure` is a node, and no leaf.

    Example:
      >>> is_nested([]), is_nested("text")
      (True, False)
    """
    return not nest.is_lone(nest.flatten(structure)[1])


def flatten(structure: Any) -> list[Any]:
    """Return the leaves of `structure`; those of a dict in the order of its sorted keys.

    Example:
      >>> flatten({"b": (2, 3), "a": 1})
      [1, 2, 3]
    """
    return nest.flatten(structure)[0]


def pack_sequence_as(structure: Any, flat_sequence: Any) -> Any:
    """Return a tree like `structure` with the leaves `flat_sequence`.

    Raises:
      StructureError: There are more or fewer leaves.

    Example:
      >>> pack_sequence_as({"b": 0, "a": 0}, [1, 2]) == {"a": 1, "b": 2}
      True
    """
    leaves, shape = nest.flatten(structure)
    flat = list(flat_sequence)
    if len(flat) != len(leaves):
        raise StructureError(f"pack_sequence_as: wanted {len(leaves)} leaves, got {len(flat)}.")
    return nest.unflatten(shape, flat)


def assert_same_structure(nest1: Any, nest2: Any) -> None:
    """Raise unless `nest1` and `nest2` have the same nodes.

    Raises:
      StructureError: They have not.
    """
    one, other = nest.flatten(nest1)[1], nest.flatten(nest2)[1]
    if one != other:
        raise StructureError(
            f"the structures differ: {nest.describe(one)} and {nest.describe(other)}."
        )


def map_structure(func: Callable[..., Any], *structure: Any) -> Any:
    """Return the tree of what `func` makes of the leaves of one or several trees.

    Raises:
      StructureError: The trees have different nodes.

    Example:
      >>> map_structure(lambda a, b: a + b, {"x": 1}, {"x": 2})
      {'x': 3}
    """
    first, *rest = structure
    for other in rest:
        assert_same_structure(first, other)
    return nest.map(func, first, *rest)
