"""All-reduces that were compiled before, so that the next one costs little more than MPI."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from mpistrat import nest
from mpistrat.arrays import Array
from mpistrat.collectives.call import Call, Contribution, described, specs_of
from mpistrat.collectives.paths.frame import Frame
from mpistrat.collectives.paths.in_place import InPlace
from mpistrat.collectives.paths.path import Path
from mpistrat.collectives.paths.shared import Direct
from mpistrat.collectives.reducer import Reducer
from mpistrat.kernels.ops import ReduceOp

Lone: TypeAlias = Frame | Direct
# Programs have few structures; one that makes new ones forever must not fill the memory.
_MOST = 1024
_FLOATS = frozenset({float, np.float64})
_NUMBERS = _FLOATS | {complex, np.float32, np.int32, np.int64, np.complex64, np.complex128}
_TREES = frozenset({dict, list, tuple})
_OF_ARRAYS = 4  # parts that the key of a tree of arrays has
_ARRAYS = frozenset({np.ndarray})
_LEAVES = _NUMBERS | _ARRAYS
_writeable = operator.attrgetter("flags.writeable")


class Request(NamedTuple):
    """One call, as far as the cache looks at it.

    Attributes:
      key: What a call is remembered under. Operation, structure, and of arrays their dtypes and
        their shapes, else what each leaf is.
      leaves: The leaves.
      structure: The structure of the tree.
      kind: list or tuple, if the tree is one of arrays; else None.
    """

    key: tuple[Any, ...]
    leaves: list[Any]
    structure: nest.Structure
    kind: type | None = None

    def tree(self, results: list[Any]) -> Any:
        """Return these leaves as a tree of the same structure."""
        if self.kind is None:
            return nest.unflatten(self.structure, results)
        return results if self.kind is list else tuple(results)

    def places(self, value: Any, out: Any) -> list[Array] | None:
        """Return the leaves of `out` if arrays as those of `value` fit there, else None."""
        kind = type(out)
        if out is value and len(self.key) == _OF_ARRAYS and all(map(_writeable, self.leaves)):
            return self.leaves
        if kind is self.kind and set(map(type, out)) == _ARRAYS:
            places, same = list(out), len(out) == len(self.leaves)
        else:
            places, structure = nest.flatten(out)
            same = structure == self.structure and set(map(type, places)) == _ARRAYS
        if same and self.key[2:] == specs_of(places) and all(map(_writeable, places)):
            return places
        return None


def request(reduce_op: Any, value: Any) -> Request | None:
    """Return what is asked for, or None if it is nothing that is remembered."""
    if not isinstance(reduce_op, str | ReduceOp):
        return None
    kind = type(value)
    if kind not in _TREES and kind is not np.ndarray and kind not in _NUMBERS:
        return None
    if (kind is list or kind is tuple) and set(map(type, value)) == _ARRAYS:
        # What has hundreds of leaves is mostly this, and to walk it costs as much as to reduce it.
        structure = nest.flat(kind is list, len(value))
        leaves = list(value)
        return Request((reduce_op, structure, *specs_of(leaves)), leaves, structure, kind)
    leaves, structure = nest.flatten(value)
    try:
        hash(structure)
    except TypeError:  # as of a defaultdict whose factory has no hash
        return None
    kinds = set(map(type, leaves))
    if kinds == _ARRAYS:
        return Request((reduce_op, structure, *specs_of(leaves)), leaves, structure)
    if not kinds <= _LEAVES:
        return None
    specs = [(x.dtype, x.shape) if type(x) is np.ndarray else type(x) for x in leaves]
    return Request((reduce_op, structure, tuple(specs)), leaves, structure)


@final
class Calls:
    """The calls of one strategy that were compiled before, by what they are for.

    A small all-reduce takes some microseconds, and so does finding out what it is: to flatten the
    tree, check each leaf, write the text of the call and its digest. All that follows from the
    structure, shapes and dtypes, so it is found out once and remembered under them. What differs on
    one rank only has another digest there.
    """

    def __init__(self, reducer: Reducer):
        """Create an empty cache."""
        self._reducer = reducer
        self._known: dict[tuple[Any, ...], Call] = {}
        self._lone: dict[tuple[Any, ...], Lone] = {}
        self._last: dict[tuple[Any, ...], InPlace] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._known)

    def clear(self) -> None:
        """Forget all calls."""
        for known in (self._known, self._lone, self._last):
            known.clear()

    def lone(self, reduce_op: Any, value: Any) -> Lone | None:
        """Return the path of a lone array or number, without a weight, if it is known."""
        if self._reducer.node.arena.moving:
            return None  # which may be the array's own memory
        try:
            if type(value) is np.ndarray:
                path = self._lone.get((reduce_op, value.dtype, value.shape))
                return None if type(path) is Direct and not path.holds else path
            return self._lone.get((reduce_op, type(value)))
        except TypeError:  # no operation; the caller says so, on every rank
            return None

    def get(self, asked: Request | None, weighed: bool) -> Call | None:
        """Return the call of this request, if it was compiled before."""
        return None if asked is None else self._known.get((weighed, *asked.key))

    def given(
        self, name: str, op: ReduceOp, given: Sequence[Contribution], weigh: bool = False
    ) -> Call:
        """Return the call that reduces these, each by a weight of its own.

        Args:
          name: The text of the call, to which names, dtypes and shapes are added.
          op: The operation.
          given: One per leaf.
          weigh: As that of `Call`.
        """
        specs = [(one.dtypes, one.value.dtype, one.value.shape, one.path) for one in given]
        key = (name, op, weigh, *specs)
        call = self._known.get(key)
        if call is None:
            dtypes, shapes = [one.dtypes for one in given], [one.value.shape for one in given]
            raw = all(
                one.value.dtype == d.wire == d.result for one, d in zip(given, dtypes, strict=True)
            )
            text = described(name, given)
            call = Call(text, op, dtypes, shapes, len(given), weigh, raw=raw)
            self._remember(key, call)
        return call

    def again(self, reduce_op: Any, weighed: bool, value: Any) -> tuple[InPlace | None, list[Any]]:
        """Return how an array, or a list or tuple of them, was reduced in place, if it was last.

        Args:
          reduce_op: The operation.
          weighed: There is a weight.
          value: Any value.
        """
        kind = type(value)
        if not self._last or not (kind is np.ndarray or kind is list or kind is tuple):
            return None, []
        leaves = [value] if kind is np.ndarray else list(value)
        try:
            path = self._last.get((reduce_op, weighed, kind, len(leaves)))
        except TypeError:  # no operation
            return None, []
        return (path, leaves) if path is not None and path.has(leaves) else (None, [])

    def learn(self, asked: Request, call: Call, weighed: bool) -> None:
        """Remember a call that was made."""
        if self._reducer.watches:
            return  # every leaf is looked at, and its name is wanted
        self._remember((weighed, *asked.key), call)
        path: Path = call.went
        if self._reducer.seconds is not None:
            return
        if isinstance(path, InPlace):
            kind = np.ndarray if nest.is_lone(asked.structure) else asked.kind
            if kind is not None:
                self._last[asked.key[0], weighed, kind, len(asked.leaves)] = path
        elif isinstance(path, Frame | Direct) and not weighed and nest.is_lone(asked.structure):
            self._learn_lone(asked.key[0], asked.leaves[0], path)

    def _remember(self, key: tuple[Any, ...], call: Call) -> None:
        if len(self._known) >= _MOST:
            self.clear()
        self._known[key] = call

    def _learn_lone(self, reduce_op: Any, leaf: Any, path: Frame | Direct) -> None:
        if not path.call.raw:
            return
        if type(leaf) is np.ndarray:
            self._lone[reduce_op, leaf.dtype, leaf.shape] = path
        elif isinstance(path, Frame):
            self._lone[reduce_op, type(leaf)] = path
