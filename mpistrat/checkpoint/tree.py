"""The variables of a program by name.

A name is the way to a variable: keys of mappings, places in sequences and attributes of objects,
with ``/`` between them. It does not depend on the order in which things were made.
"""

from __future__ import annotations

import sys
import types
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, cast

from mpistrat.arrays import kind_of
from mpistrat.checkpoint.cells import Cell
from mpistrat.distribute.strategy import Strategy
from mpistrat.distribute.variables import Variable
from mpistrat.errors import StructureError
from mpistrat.metrics import Metric
from mpistrat.optim.optimizer import Optimizer

__all__ = ["first", "variables"]

# The attributes of their objects, as of those of Python's own modules, are their own affair.
_CLOSED = {"mpistrat", "numpy", "numba", "mpi4py"}
_TEXTS = (str, bytes, bytearray, memoryview, range)  # sequences that hold no variables


def variables(root: Any, trees: Mapping[str, Any]) -> dict[str, Variable]:
    """Return all variables below an object and some trees, by name, sorted.

    Mappings, lists and tuples are looked into, and so are the attributes of objects of the
    program's own classes. Attributes that hold no variables are passed over.

    Args:
      root: What is in it has names of its own; None for nothing.
      trees: What is in each has names that begin with its key.

    Raises:
      StructureError: A mapping or sequence that was given holds something else than variables, or
        one of `trees` no variable at all, or two ways have one name.
    """
    found: dict[str, Variable] = {}
    given = [("", root), *((_part(key), tree) for key, tree in trees.items())]
    for begin, tree in given:
        above = len(found)
        for name, variable in _walk(tree, begin, True, {}):
            if name in found:
                raise StructureError(f"two variables of the checkpoint have the name {name!r}.")
            found[name] = variable
        if isinstance(tree, Optimizer) and len(found) == above:
            raise StructureError(
                f"{begin or 'the root'} of the checkpoint ({type(tree).__name__}) has no state "
                "yet; create it first: optimizer.build(variables)."
            )
        if tree is not None and len(found) == above:
            raise StructureError(
                f"{begin or 'the root'} of the checkpoint ({type(tree).__name__}) holds no "
                "variable, so nothing of it would be saved. Give mpistrat.Variable, or dicts, "
                "lists and objects of your own classes that hold them."
            )
    return dict(sorted(found.items()))


def first(root: Any, trees: Mapping[str, Any]) -> Variable | None:
    """Return some variable of what cannot all be saved, if there is one."""
    return next((v for t in (root, *trees.values()) for _, v in _walk(t, "", False, {})), None)


def _walk(
    value: Any, path: str, given: bool, seen: dict[int, Any]
) -> Iterator[tuple[str, Variable]]:
    """Find variables below `value`; `given` tells that the program meant all of it to be saved."""
    if isinstance(value, Variable | Cell):
        yield path, cast("Variable", value)
    elif value is not None and id(value) not in seen:
        children = _children(value)
        if children is None and given:
            raise StructureError(
                f"{path!r} of the checkpoint is {value!r:.60} ({type(value).__name__}); only "
                "variables are saved. Make it an mpistrat.Variable, or leave it out."
            )
        seen[id(value)] = value  # kept alive: another object could have its number
        given = given and isinstance(value, Mapping | Sequence)
        for key in sorted(children or (), key=str):
            below = f"{path}/{_part(key)}" if path else _part(key)
            yield from _walk((children or {})[key], below, given, seen)


def _children(value: Any) -> Mapping[Any, Any] | None:
    """Return what a value holds by key, place or attribute; None if it is not to be looked into."""
    kind = kind_of(value)
    if kind is not None and (parts := kind.parts_of(value)) is not None:
        return parts
    attributes = _attributes(value) if _has_attributes(value) else {}
    if isinstance(value, Optimizer | Metric) or _is_ours(value):
        found: Mapping[str, Any] = value.tree()
        return found
    if isinstance(value, Mapping):
        return {**attributes, **value}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    if isinstance(value, Sequence) and not isinstance(value, _TEXTS):
        return {**attributes, **dict(enumerate(value))}
    if isinstance(value, Set) and any(isinstance(one, Variable) for one in value):
        raise StructureError(
            "a set of the checkpoint holds variables, which have no names there. Give a dict or a "
            "list of them."
        )
    return attributes if _has_attributes(value) else None


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("mpistrat.") and hasattr(value, "tree")


def _attributes(value: Any) -> dict[str, Any]:
    slots: list[str] = []
    for cls in type(value).__mro__:
        mine = vars(cls).get("__slots__", ())
        slots += [mine] if isinstance(mine, str) else mine
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {
        **{k: v for k, v in found.items() if not k.startswith("__")},
        **getattr(value, "__dict__", {}),
    }


def _has_attributes(value: Any) -> bool:
    if isinstance(value, types.SimpleNamespace):
        return True
    module = type(value).__module__.partition(".")[0]
    closed = module in _CLOSED or module in sys.stdlib_module_names
    if closed or isinstance(value, type | Strategy):
        return False
    return hasattr(value, "__dict__") or any("__slots__" in vars(c) for c in type(value).__mro__)


def _part(key: Any) -> str:
    """Return a key as a part of a name: no ``/``, and nothing that leads out of a directory."""
    text = urllib.parse.quote(str(key), safe=" ")
    return f"%2E{text[1:]}" if text.startswith(".") else text
