"""Trees of values: taken apart into leaves and put together again, by optree.

Nodes are dict, list, tuple, named tuple, and mappings of other classes. Everything else is a leaf,
``None`` too. The leaves of a dict come in the order of its sorted keys, as in ``tf.nest``, so ranks
may fill their dicts in any order; only an OrderedDict keeps its own.

A class of mappings is registered with optree when its first instance comes
(`register_mapping_class`); `_MappingClass` is its part of a structure, and makes a mapping of the
same class again.
"""

from __future__ import annotations

import builtins
import copy
import functools
import re
import threading
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, MutableSet
from typing import Any, NoReturn, final

import numpy as np
import optree

from mpistrat.errors import StructureError, text_of

# The classes that are registered here are nodes of this library's trees alone.
NAMESPACE = "mpistrat"


@final
class _MappingClass:
    """A mapping without its values, as a part of a structure.

    It is equal to that of any mapping of the same class and keys.

    Args:
      mapping: The mapping.

    Attributes:
      kind: Its class.
      keys: Its keys, in the order of the leaves.

    Raises:
      StructureError: It is a kind of dict that cannot be copied and emptied.
    """

    def __init__(self, mapping: Mapping[Any, Any]):
        """Take the keys of `mapping`, and an empty copy of it if its class can be made again."""
        self.kind, self._order = type(mapping), tuple(mapping)
        self.keys = self._order if isinstance(mapping, OrderedDict) else _sort_keys(self._order)
        self._empty: Any = None
        if not isinstance(mapping, dict | UserDict):
            return  # it is read, and comes back as a dict
        try:
            self._empty = _copy_empty(mapping)
        except Exception as error:
            raise self._structure_error(error) from error

    def __eq__(self, other: object) -> bool:
        """Tell whether `other` is of a mapping of the same class and keys."""
        return isinstance(other, _MappingClass) and (self.kind, self.keys) == (
            other.kind,
            other.keys,
        )

    def __hash__(self) -> int:
        """Return the hash of class and keys."""
        return hash((self.kind, self.keys))

    def __repr__(self) -> str:
        """Return the class and the keys."""
        return f"{self.kind.__name__}{list(self.keys)}"

    def fill(self, values: Iterable[Any]) -> Any:
        """Return a mapping like the one that was given, with these values, in the order of `keys`.

        Raises:
          StructureError: It does not take them.
        """
        by_key = dict(zip(self.keys, values, strict=True))
        pairs = {key: by_key[key] for key in self._order}
        if self._empty is None:
            return pairs
        try:
            mapping = _copy_empty(self._empty)
            for key, value in pairs.items():
                mapping[key] = value
        except Exception as error:
            raise self._structure_error(error) from error
        return mapping

    def _structure_error(self, cause: Exception) -> StructureError:
        name = f"{self.kind.__module__}.{self.kind.__qualname__}"
        return StructureError(
            f"a {name} in a tree cannot be made again with other values, by clear() and "
            f"it[key] = value of a copy: {text_of(cause)}. Give dict(it) instead."
        )


def _copy_empty(mapping: Any) -> Any:
    """Return a mapping of the same class and attributes without keys.

    The mapping itself stays as it is, whatever `clear` of its class does: containers among the
    attributes are copied.
    """
    kind: Any = type(mapping)
    empty = kind.__new__(kind)
    if isinstance(mapping, defaultdict):
        empty.default_factory = mapping.default_factory
    names = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    slots = {name: getattr(mapping, name) for name in names if hasattr(mapping, name)}
    for name, value in {**slots, **getattr(mapping, "__dict__", {})}.items():
        is_container = isinstance(value, MutableMapping | MutableSequence | MutableSet)
        object.__setattr__(empty, name, copy.copy(value) if is_container else value)
    empty.clear()
    return empty


def _sort_keys(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    def by_class(key: object) -> tuple[str, Any]:
        return f"{type(key).__module__}.{type(key).__qualname__}", key

    for order in (None, by_class):
        try:
            return tuple(sorted(keys, key=order))
        except TypeError:  # they have no order
            continue
    return keys


def _flatten(mapping: Any) -> tuple[list[Any], _MappingClass, tuple[Any, ...]]:
    shell = _MappingClass(mapping)
    return [mapping[key] for key in shell.keys], shell, shell.keys


def _unflatten(shell: Any, values: Iterable[Any]) -> Any:
    return shell.fill(values)


def with_values(mapping: Mapping[Any, Any], values_by_key: Mapping[Any, Any]) -> Any:
    """Return a mapping of the same class and keys with other values; a dict of one to be read only.

    Raises:
      StructureError: The class cannot be made again.

    Example:
      >>> from collections import Counter
      >>> with_values(Counter("ab"), {"b": 2.5, "a": 1.5})
      Counter({'b': 2.5, 'a': 1.5})
    """
    shell = _MappingClass(mapping)
    return shell.fill([values_by_key[key] for key in shell.keys])


_registered: set[type] = set()
_registering = threading.Lock()


@functools.lru_cache(maxsize=512)
def _is_mapping(leaf_class: type) -> bool:
    return issubclass(leaf_class, Mapping)


def register_mapping_class(leaf_class: type) -> bool:
    """Make a class of leaves one of nodes, if it is one of mappings; tell whether it is.

    Args:
      leaf_class: The class of a leaf, so one that was not registered before.
    """
    if not _is_mapping(leaf_class):
        return False
    with _registering:
        if leaf_class not in _registered:
            optree.register_pytree_node(leaf_class, _flatten, _unflatten, namespace=NAMESPACE)
            _registered.add(leaf_class)
    return True


Structure = optree.PyTreeSpec
_NODE_CLASSES = (dict, list, tuple, Mapping)
# The classes of most trees of one leaf; optree need not be asked about them.
_LEAF_CLASSES = {type(None), bool, int, float, str, np.ndarray, np.float32, np.float64}
REPLICATED_LEAVES = _LEAF_CLASSES.copy()  # those that do not represent a value of each replica
# By class, the function that makes the text of a key, where that is not `repr`.
KEY_TEXTS: dict[type, Callable[[Any], str]] = {}
_BUILT_IN = {type(None), bool, int, float, complex, str, bytes}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LEAF: Any = 0
_SINGLE_LEAF: Structure = optree.tree_structure(_LEAF, none_is_leaf=True)


def register_leaf_class(leaf_class: type, is_replicated: bool = True) -> None:
    """Note that instances of a class are leaves, so that optree need not be asked.

    Args:
      leaf_class: One of this library's own, which nobody registers as a node.
      is_replicated: They do not stand for a value of each replica.
    """
    _LEAF_CLASSES.add(leaf_class)
    if is_replicated:
        REPLICATED_LEAVES.add(leaf_class)


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
        if kind in _LEAF_CLASSES:
            return [tree], _SINGLE_LEAF
        if (kind is tuple or kind is list) and _LEAF_CLASSES.issuperset(builtins.map(type, tree)):
            return [*tree], flat_structure(kind is list, len(tree))
    leaves_and_structure = optree.tree_flatten(tree, none_is_leaf=none_is_leaf, namespace=NAMESPACE)
    if not _LEAF_CLASSES.issuperset(
        kinds := set(builtins.map(type, leaves_and_structure[0]))
    ) and any([register_mapping_class(kind) for kind in kinds]):
        return flatten(tree, none_is_leaf)
    return leaves_and_structure


@functools.lru_cache(maxsize=512)
def flat_structure(is_list: bool, count: int) -> Structure:
    """Return the structure of a list, or else a tuple, of so many leaves.

    Example:
      >>> flat_structure(True, 2) == flatten([1, 2])[1]
      True
    """
    leaves: Any = [0] * count if is_list else (0,) * count
    return optree.tree_structure(leaves, none_is_leaf=True)


_PAIR = flat_structure(False, 2)


def unflatten(structure: Structure, leaves: list[Any]) -> Any:
    """Return the tree of that structure with these leaves."""
    if structure is _SINGLE_LEAF:
        (lone,) = leaves
        return lone
    if len(leaves) == 2 and structure is _PAIR:  # as most elements of datasets are
        return leaves[0], leaves[1]
    return structure.unflatten(leaves)


def with_sorted_keys(structure: Structure) -> Structure:
    """Return the same structure, with the keys of its dicts in the order of their leaves.

    A dict that `unflatten` makes has its keys in the order in which they came into the one that was
    flattened, and equal structures may differ in that. In the returned structure it is the same on
    all ranks.

    Example:
      >>> leaves, structure = flatten({"b": 2, "a": 1})
      >>> unflatten(structure, leaves), unflatten(with_sorted_keys(structure), leaves)
      ({'b': 2, 'a': 1}, {'a': 1, 'b': 2})
    """
    return flatten(_sort_dicts(structure, unflatten(structure, list(range(structure.num_leaves)))))[
        1
    ]


def _sort_dicts(structure: Structure, tree: object) -> Any:
    if structure.is_leaf(strict=True):
        return tree
    entries, children = structure.entries(), structure.children()
    if isinstance(tree, MutableMapping):
        pairs = zip(entries, children, strict=True)
        parts = {key: _sort_dicts(child, tree[key]) for key, child in pairs}
        tree.clear()  # and filled again: a defaultdict keeps its factory
        for key, part in parts.items():
            tree[key] = part
        return tree
    if not isinstance(tree, list | tuple):
        return tree  # of a kind that a program has registered
    inner = [_sort_dicts(child, part) for child, part in zip(children, tree, strict=True)]
    return tree._make(inner) if hasattr(tree, "_make") else type(tree)(inner)


def key_order_text(tree: object) -> str:
    """Return a string that is equal for trees of one structure if their dicts have one order.

    It is empty for a tree without dicts.

    Example:
      >>> key_order_text({"b": 0, "a": 1}), key_order_text([1, 2])
      ("'b', 'a'; ", '')
    """
    if type(tree) in _LEAF_CLASSES or not isinstance(tree, _NODE_CLASSES):
        return ""
    if isinstance(tree, list | tuple):
        return "".join([key_order_text(part) for part in tree if type(part) not in _LEAF_CLASSES])
    inner = [key_order_text(part) for part in tree.values() if type(part) not in _LEAF_CLASSES]
    return f"{', '.join([key_text(key) for key in tree])}; {''.join(inner)}"


def is_single_leaf(structure: Structure) -> bool:
    """Tell whether this is the structure of a lone leaf.

    Example:
      >>> is_single_leaf(flatten(1)[1]), is_single_leaf(flatten([1])[1])
      (True, False)
    """
    return bool(structure.is_leaf(strict=True))


def flatten_up_to(structure: Structure, tree: Any, name: str) -> list[Any]:
    """Return the parts of `tree` at the leaves of `structure`; each part may be a tree.

    Args:
      structure: The structure of another tree.
      tree: Any value.
      name: The name of `tree` in errors.

    Raises:
      StructureError: `tree` has other nodes above the leaves.

    Example:
      >>> flatten_up_to(flatten({"x": 0, "y": 0})[1], {"x": [1, 2], "y": None}, "sizes")
      [[1, 2], None]
    """
    try:
        return structure.flatten_up_to(tree)
    except ValueError as error:
        raise StructureError(
            f"{name} must have a value for each leaf of {describe(structure)}: {error}"
        ) from None


def map(fn: Callable[..., Any], tree: Any, *rest: object) -> Any:
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
            other_leaves, other_structure = flatten(other)
            if other_structure != structure:  # optree would take a tree for a leaf of `tree`
                raise StructureError(
                    f"the structures differ: {describe(structure)} and {describe(other_structure)}."
                )
            columns.append(other_leaves)
        return unflatten(
            structure,
            [fn(*corresponding_leaves) for corresponding_leaves in zip(*columns, strict=True)],
        )
    # The result is that of optree, in a fraction of its time.
    kind = type(tree)
    if kind in _LEAF_CLASSES:
        return fn(tree)
    if (kind is list or kind is tuple) and _LEAF_CLASSES.issuperset(builtins.map(type, tree)):
        return kind([fn(part) for part in tree])
    leaves, structure = flatten(tree)
    return unflatten(structure, [fn(leaf) for leaf in leaves])


def leaf_paths(tree: object) -> list[str]:
    """Return the name of each leaf, such as ``layers/3/kernel``, or ``""`` for a lone leaf."""
    return list(path_names(flatten(tree)[1]))


@functools.lru_cache(maxsize=512)
def path_names(structure: Structure) -> tuple[str, ...]:
    """Return the leaf names of a structure, in leaf order.

    Raises:
      StructureError: Keys of a mapping cannot be told apart.
    """
    describe(structure)  # raises
    return tuple(
        "/".join(_step_name(getattr(step, "field", step.entry)) for step in accessor)
        for accessor in structure.accessors()
    )


def _step_name(key: object) -> str:
    """Return a key as a part of the name of a leaf, the same on all ranks."""
    name = str(key)
    return key_text(key) if isinstance(key, frozenset) or _ADDRESS.search(name) else name


def describe(structure: Structure) -> str:
    """Return a string that is equal on two ranks exactly if the structures are.

    Raises:
      StructureError: Keys of a mapping cannot be told apart.

    Example:
      >>> describe(flatten({"b": 0, "a": (0, 0)})[1])
      "{'a': (*, *), 'b': *}"
    """
    text, is_fixed = _describe_cached(structure)
    return text if is_fixed else _describe(structure)[0]


def _describe(structure: Structure) -> tuple[str, bool]:
    """Return that string, and whether all equal structures have it: 1 and True are equal keys."""
    if structure.is_leaf(strict=True):
        return "*", True
    inner, fixed = [], []
    for child in structure.children():
        text, is_fixed = _describe_cached(child)
        inner.append(text if is_fixed else _describe(child)[0])
        fixed.append(is_fixed)
    kind = structure.type
    if kind in (list, tuple):
        return f"[{', '.join(inner)}]" if kind is list else f"({', '.join(inner)})", all(fixed)
    # The entries of a namedtuple are numbers, but programs use the names of its fields.
    entries = getattr(kind, "_fields", structure.entries())
    keys = [key_text(key) for key in entries]
    if len(set(keys)) < len(keys):
        _refuse_keys(kind, keys)
    entries_text = ", ".join([f"{key}: {text}" for key, text in zip(keys, inner, strict=True)])
    # For other kinds the name represents the class: a defaultdict's factory has an address.
    text = (
        f"{{{entries_text}}}"
        if kind is dict
        else f"{getattr(kind, '__name__', kind)}({entries_text})"
    )
    return text, all(fixed) and all([type(key) is str for key in entries])


_describe_cached = functools.lru_cache(maxsize=512)(_describe)


def _refuse_keys(mapping_class: object, keys: list[str]) -> NoReturn:
    equal = sorted({key for key in keys if keys.count(key) > 1})
    raise StructureError(
        f"a {getattr(mapping_class, '__name__', mapping_class)} has keys that cannot be told apart "
        f"on another rank, where only their texts are known: several are {', '.join(equal):.200}. "
        "Take strings or numbers as keys, or give the class of the keys a __repr__ that tells "
        "them apart."
    )


def key_text(key: Any) -> str:
    """Return the text by which other ranks know a key of a mapping: its class, and its repr.

    Example:
      >>> key_text("1"), key_text(1), key_text((1, object()))
      ("'1'", '1', '(1, builtins.object <object object>)')
    """
    kind = type(key)
    if kind in _BUILT_IN:
        return repr(key)
    if kind in KEY_TEXTS:
        return KEY_TEXTS[kind](key)
    if kind is tuple or kind is frozenset:
        parts = [key_text(part) for part in key]
        return f"({', '.join(parts)})" if kind is tuple else f"{{{', '.join(sorted(parts))}}}"
    # An address is that of this process.
    return f"{kind.__module__}.{kind.__qualname__} {_ADDRESS.sub('', repr(key))}"
