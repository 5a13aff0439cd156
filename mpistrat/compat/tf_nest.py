"""``tf.nest`` as programs that import `mpistrat.compat.tf` see it.

Containers are those of `mpistrat.pytree`, but leaves of an OrderedDict come in the order of its
sorted keys too. A `PerReplica` is a leaf, and so is an `IndexedSlices`, with ``expand_composites``
too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from mpistrat import pytree
from mpistrat.arrays import check_callable
from mpistrat.compat.absent import make_getattr as _make_getattr
from mpistrat.errors import StructureError

__all__ = ["assert_same_structure", "flatten", "is_nested", "map_structure", "pack_sequence_as"]

__getattr__ = _make_getattr("tf.nest")


def is_nested(structure: Any) -> bool:
    """Tell whether `structure` is a container, not a leaf.

    Example:
      >>> is_nested([]), is_nested("text")
      (True, False)
    """
    return not pytree.is_single_leaf(pytree.flatten(structure)[1])


def flatten(structure: Any, expand_composites: bool = False) -> list[Any]:
    """Return the leaves of `structure`; those of a dict in the order of its sorted keys.

    Args:
      structure: Any value.
      expand_composites: No effect.

    Example:
      >>> flatten({"b": (2, 3), "a": 1})
      [1, 2, 3]
    """
    leaves, shape = pytree.flatten(structure)
    return [leaves[at] for at in _order_leaves(shape)]


def pack_sequence_as(structure: Any, flat_sequence: Any, expand_composites: bool = False) -> Any:
    """Return a tree like `structure` with the leaves `flat_sequence`.

    Args:
      structure: Any value.
      flat_sequence: The leaves, in the order of `flatten`.
      expand_composites: No effect.

    Raises:
      StructureError: There are more or fewer leaves.

    Example:
      >>> pack_sequence_as({"b": 0, "a": 0}, [1, 2]) == {"a": 1, "b": 2}
      True
    """
    leaves, shape = pytree.flatten(structure)
    flat = list(flat_sequence)
    if len(flat) != len(leaves):
        raise StructureError(f"pack_sequence_as: expected {len(leaves)} leaves, got {len(flat)}.")
    leaves = [
        leaf for _, leaf in sorted(zip(_order_leaves(shape), flat, strict=True), key=itemgetter(0))
    ]
    return pytree.unflatten(shape, leaves)


def _order_leaves(shape: pytree.Structure, first: int = 0) -> list[int]:
    """Return which leaf of `mpistrat.pytree`, counted from `first`, comes next here."""
    if shape.is_leaf():
        return [first]
    parts = []
    for child in shape.children():
        parts.append(_order_leaves(child, first))
        first += child.num_leaves
    if shape.type is not None and issubclass(shape.type, OrderedDict):
        parts = [part for _, part in sorted(zip(shape.entries(), parts, strict=True))]
    return [at for part in parts for at in part]


def assert_same_structure(
    nest1: Any, nest2: Any, check_types: bool = True, expand_composites: bool = False
) -> None:
    """Raise unless `nest1` and `nest2` have the same structure; all kinds of dicts are alike.

    Args:
      nest1: Any value.
      nest2: Any value.
      check_types: False to take lists, tuples and named tuples for alike, too.
      expand_composites: No effect.

    Raises:
      StructureError: They differ.
    """
    pytree.map(
        lambda *_: None,
        _unify_containers(nest1, check_types),
        _unify_containers(nest2, check_types),
    )


def map_structure(
    func: Callable[..., Any],
    *structure: Any,
    check_types: bool = True,
    expand_composites: bool = False,
) -> Any:
    """Return a tree of the results of `func` for the leaves of one or several trees.

    Args:
      func: Takes a leaf of each.
      *structure: The trees; the result is like the first.
      check_types: See `assert_same_structure`.
      expand_composites: No effect.

    Raises:
      StructureError: The trees have different structures.
      ValueError: There is no tree.

    Example:
      >>> map_structure(lambda a, b: a + b, {"x": 1}, {"x": 2})
      {'x': 3}
    """
    if not structure:
        raise ValueError("map_structure wants one tree or several after the function; got none.")
    check_callable("map_structure(func)", func)
    if len(structure) == 1:
        return pytree.map(func, structure[0])
    for other in structure[1:]:
        assert_same_structure(structure[0], other, check_types)
    rows = zip(*map(flatten, structure), strict=True)
    return pack_sequence_as(structure[0], [func(*row) for row in rows])


def _unify_containers(tree: Any, check_types: bool) -> Any:
    """Return a tree where what counts as the same kind of container is of one type."""
    kind = type(tree)
    if isinstance(tree, Mapping):
        return {key: _unify_containers(value, check_types) for key, value in tree.items()}
    if kind not in (list, tuple) and not (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        return tree
    parts = [_unify_containers(part, check_types) for part in tree]
    if not check_types:
        return tuple(parts)
    return kind(*parts) if kind not in (list, tuple) else kind(parts)
