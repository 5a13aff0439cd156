"""Trees of values: taken apart into leaves and put together again, by optree.

Nodes are dict, OrderedDict, defaultdict, list, tuple and named tuple. Everything else is a leaf,
``None`` too. The leaves of a dict come in the order of its sorted keys, as in ``tf.nest``, so ranks
may fill their dicts in any order; only an OrderedDict keeps its own.
"""

from __future__ import annotations

import builtins
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import optree

from mpistrat.errors import StructureError

Structure = optree.PyTreeSpec
_NODES = (dict, list, tuple)
# What is most often a tree of its own; of these optree need not be asked.
_LEAVES = {type(None), bool, int, float, str, np.ndarray, np.float32, np.float64}
WHOLE = _LEAVES.copy()  # those of them that do not stand for a value of each replica
_LEAF: Any = 0
_LONE: Structure = optree.tree_structure(_LEAF, none_is_leaf=True)


def leaf(kind: type, whole: bool = True) -> None:
    """Note that instances of a class are leaves, so that optree need not be asked.

    Args:
      kind: One of this library's own, which nobody registers as a node.
      whole: They do not stand for a value of each replica.
    """
    _LEAVES.add(kind)
    if whole:
        WHOLE.add(kind)


def flatten(tree: Any, none_is_leaf: bool = True) -> tuple[list[Any], Structure]:
    """Return the leaves of a tree and its structure.

    Args:
      tree: Any value.
      none_is_leaf: Treat ``None`` as a leaf, not as an empty node.

    Example:
      >>> flatten({"b": 2, "a": [1]})[0]
      [1, 2]
    """
    if none_is_leaf:
        kind = type(tree)
        if kind in _LEAVES:
            return [tree], _LONE
        if (kind is tuple or kind is list) and _LEAVES.issuperset(builtins.map(type, tree)):
            return [*tree], flat(kind is list, len(tree))
    return optree.tree_flatten(tree, none_is_leaf=none_is_leaf)


@functools.lru_cache(maxsize=512)
def flat(is_list: bool, count: int) -> Structure:
    """Return the structure of a list, or else a tuple, of so many leaves.

    Example:
      >>> flat(True, 2) == flatten([1, 2])[1]
      True
    """
    leaves: Any = [0] * count if is_list else (0,) * count
    return optree.tree_structure(leaves, none_is_leaf=True)


_PAIR = flat(False, 2)


def unflatten(structure: Structure, leaves: list[Any]) -> Any:
    """Return the tree of that structure with these leaves."""
    if structure is _LONE:
        (lone,) = leaves
        return lone
    if len(leaves) == 2 and structure is _PAIR:  # as most elements of datasets are
        return leaves[0], leaves[1]
    return structure.unflatten(leaves)


def alike(structure: Structure) -> Structure:
    """Return the same structure, with the keys of its dicts in the order of their leaves.

    A dict that `unflatten` makes has its keys in the order in which they came into the one that was
    flattened, and equal structures may differ in that. Of this one it is the same on all ranks.

    Example:
      >>> leaves, structure = flatten({"b": 2, "a": 1})
      >>> unflatten(structure, leaves), unflatten(alike(structure), leaves)
      ({'b': 2, 'a': 1}, {'a': 1, 'b': 2})
    """
    try:
        hash(structure)
    except TypeError:  # as of a defaultdict whose factory has no hash
        return structure
    return _alike(structure)


@functools.lru_cache(maxsize=512)
def _alike(structure: Structure) -> Structure:
    return flatten(_in_order(structure, unflatten(structure, list(range(structure.num_leaves)))))[1]


def _in_order(structure: Structure, tree: Any) -> Any:
    if structure.is_leaf(strict=True):
        return tree
    entries, children = structure.entries(), structure.children()
    if structure.type in (dict, OrderedDict, defaultdict):
        pairs = zip(entries, children, strict=True)
        parts = {key: _in_order(child, tree[key]) for key, child in pairs}
        tree.clear()  # and filled again: a defaultdict keeps its factory
        tree.update(parts)
        return tree
    if not isinstance(tree, list | tuple):
        return tree  # of a kind that a program has registered
    inner = [_in_order(child, part) for child, part in zip(children, tree, strict=True)]
    return tree._make(inner) if hasattr(tree, "_make") else type(tree)(inner)


def order(tree: Any) -> str:
    """Return a string that is equal for trees of one structure if their dicts have one order.

    It is empty for a tree without dicts.

    Example:
      >>> order({"b": 0, "a": 1}), order([1, 2])
      ("'b', 'a'; ", '')
    """
    if not isinstance(tree, _NODES):
        return ""
    if not isinstance(tree, dict):
        return "".join([order(part) for part in tree if isinstance(part, _NODES)])
    inner = [order(part) for part in tree.values() if isinstance(part, _NODES)]
    return f"{', '.join([repr(key) for key in tree])}; {''.join(inner)}"


def is_lone(structure: Structure) -> bool:
    """Tell whether this is the structure of a lone leaf.

    Example:
      >>> is_lone(flatten(1)[1]), is_lone(flatten([1])[1])
      (True, False)
    """
    return bool(structure.is_leaf(strict=True))


def up_to(structure: Structure, tree: Any, what: str) -> list[Any]:
    """Return what stands in `tree` where the leaves of `structure` are; each may be a tree.

    Args:
      structure: The structure of another tree.
      tree: Any value.
      what: What to call `tree` in errors.

    Raises:
      StructureError: `tree` has other nodes above the leaves.

    Example:
      >>> up_to(flatten({"x": 0, "y": 0})[1], {"x": [1, 2], "y": None}, "sizes")
      [[1, 2], None]
    """
    try:
        return structure.flatten_up_to(tree)
    except ValueError as error:
        raise StructureError(
            f"{what} must have a value for each leaf of {describe(structure)}: {error}"
        ) from None


def map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return `tree` with every leaf replaced by ``fn(leaf, *leaves of rest)``.

    Raises:
      StructureError: A tree of `rest` has another structure.

    Example:
      >>> map(lambda a, b: a + b, {"x": 1}, {"x": 2})
      {'x': 3}
    """
    if rest:
        leaves, structure = flatten(tree)
        columns = [leaves]
        for other in rest:
            more, found = flatten(other)
            if found != structure:  # optree would take a tree for a leaf where `tree` has one
                raise StructureError(
                    f"the structures differ: {describe(structure)} and {describe(found)}."
                )
            columns.append(more)
        return unflatten(structure, [fn(*each) for each in zip(*columns, strict=True)])
    # What optree comes to as well, at a multiple of the price.
    kind = type(tree)
    if kind in _LEAVES:
        return fn(tree)
    if (kind is list or kind is tuple) and _LEAVES.issuperset(builtins.map(type, tree)):
        return kind([fn(part) for part in tree])
    if optree.tree_is_leaf(tree, none_is_leaf=True):
        return fn(tree)
    return optree.tree_map(fn, tree, none_is_leaf=True)


def paths(tree: Any) -> list[str]:
    """Return the name of each leaf, such as ``layers/3/kernel``, or ``""`` for a lone leaf."""
    return list(path_names(flatten(tree)[1]))


@functools.lru_cache(maxsize=512)
def path_names(structure: Structure) -> tuple[str, ...]:
    """Return the leaf names of a structure, in leaf order."""
    return tuple(
        "/".join(str(getattr(step, "field", step.entry)) for step in accessor)
        for accessor in structure.accessors()
    )


@functools.lru_cache(maxsize=512)
def describe(structure: Structure) -> str:
    """Return a string that is equal on two ranks exactly if the structures are.

    Example:
      >>> describe(flatten({"b": 0, "a": (0, 0)})[1])
      "{'a': (*, *), 'b': *}"
    """
    if structure.is_leaf(strict=True):
        return "*"
    inner = [describe(child) for child in structure.children()]
    kind = structure.type
    if kind in (list, tuple):
        return f"[{', '.join(inner)}]" if kind is list else f"({', '.join(inner)})"
    # Of a namedtuple the entries are numbers, but what a field is called is what a program uses.
    pairs = zip(getattr(kind, "_fields", structure.entries()), inner, strict=True)
    if kind is dict:
        return f"{{{', '.join(f'{key!r}: {text}' for key, text in pairs)}}}"
    # Of other kinds the name stands for the class: a defaultdict's factory has an address.
    named = ", ".join(f"{key!r}: {text}" for key, text in pairs)
    return f"{getattr(kind, '__name__', kind)}({named})"
