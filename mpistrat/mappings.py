"""Mappings other than dict, as nodes of trees: how they come apart, and are made again."""

from __future__ import annotations

import copy
import functools
import threading
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, MutableSet
from typing import Any, final

import optree

from mpistrat.errors import StructureError, text_of

# The classes that are registered here are nodes of this library's trees alone.
NAMESPACE = "mpistrat"


@final
class _Shell:
    """A mapping without its values: what a structure knows of it.

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
        self.keys = self._order if isinstance(mapping, OrderedDict) else _sorted(self._order)
        self._empty: Any = None
        if not isinstance(mapping, dict | UserDict):
            return  # it is read, and comes back as a dict
        try:
            self._empty = _empty_copy(mapping)
        except Exception as error:
            raise self._refusal(error) from error

    def __eq__(self, other: object) -> bool:
        """Tell whether `other` is of a mapping of the same class and keys."""
        return isinstance(other, _Shell) and (self.kind, self.keys) == (other.kind, other.keys)

    def __hash__(self) -> int:
        """Return the hash of class and keys."""
        return hash((self.kind, self.keys))

    def __repr__(self) -> str:
        """Return the class and the keys."""
        return f"{self.kind.__name__}{list(self.keys)}"

    def filled(self, values: Iterable[Any]) -> Any:
        """Return a mapping like the one that was given, with these values, in the order of `keys`.

        Raises:
          StructureError: It does not take them.
        """
        by_key = dict(zip(self.keys, values, strict=True))
        pairs = {key: by_key[key] for key in self._order}
        if self._empty is None:
            return pairs
        try:
            mapping = _empty_copy(self._empty)
            for key, value in pairs.items():
                mapping[key] = value
        except Exception as error:
            raise self._refusal(error) from error
        return mapping

    def _refusal(self, error: Exception) -> StructureError:
        name = f"{self.kind.__module__}.{self.kind.__qualname__}"
        return StructureError(
            f"a {name} in a tree cannot be made again with other values, by clear() and "
            f"it[key] = value of a copy: {text_of(error)}. Give dict(it) instead."
        )


def _empty_copy(mapping: Any) -> Any:
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


def _sorted(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    def by_class(key: Any) -> tuple[str, Any]:
        return f"{type(key).__module__}.{type(key).__qualname__}", key

    for order in (None, by_class):
        try:
            return tuple(sorted(keys, key=order))
        except TypeError:  # they have no order
            continue
    return keys


def _flatten(mapping: Any) -> tuple[list[Any], _Shell, tuple[Any, ...]]:
    shell = _Shell(mapping)
    return [mapping[key] for key in shell.keys], shell, shell.keys


def _unflatten(shell: Any, values: Iterable[Any]) -> Any:
    return shell.filled(values)


def with_values(mapping: Mapping[Any, Any], values: Mapping[Any, Any]) -> Any:
    """Return a mapping of the same class and keys with other values; a dict of one to be read only.

    Raises:
      StructureError: The class cannot be made again.

    Example:
      >>> from collections import Counter
      >>> with_values(Counter("ab"), {"b": 2.5, "a": 1.5})
      Counter({'b': 2.5, 'a': 1.5})
    """
    shell = _Shell(mapping)
    return shell.filled([values[key] for key in shell.keys])


_registered: set[type] = set()
_registering = threading.Lock()


@functools.lru_cache(maxsize=512)
def _is_mapping(kind: type) -> bool:
    return issubclass(kind, Mapping)


def register(kind: type) -> bool:
    """Make a class of leaves one of nodes, if it is one of mappings; tell whether it is.

    Args:
      kind: The class of a leaf, so one that was not registered before.
    """
    if not _is_mapping(kind):
        return False
    with _registering:
        if kind not in _registered:
            optree.register_pytree_node(kind, _flatten, _unflatten, namespace=NAMESPACE)
            _registered.add(kind)
    return True
