"""All-reduces that were made before, remembered, so that the next one costs little more than MPI.

A small all-reduce takes some microseconds, and so does finding out what it is: to flatten the tree,
check each leaf, write the text of the call and its digest. All that follows from the structure,
shapes and dtypes, so it is found out once, by the general path, and remembered under them. A call
that finds its plan moves, proves and folds exactly as the general path does; what differs from the
plan on one rank only has another digest there.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat import nest
from mpistrat.arena.headers import Headers
from mpistrat.arrays import Array
from mpistrat.collectives.folding import Folding, worth_a_place
from mpistrat.collectives.forms import Form
from mpistrat.collectives.node import NodeFolds
from mpistrat.collectives.part import Part
from mpistrat.collectives.planned import ONE, AnyPlan, NumberPlan, Plan, SharedPlan
from mpistrat.collectives.spans import Placed, placed
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.lockstep import Lockstep

__all__ = ["InPlace", "Plans", "Request", "Sketch", "request"]

# Programs have few structures; one that makes new ones for ever must not fill the memory.
_MOST = 1024
_FLOATS = frozenset({float, np.float64})
_NUMBERS = _FLOATS | {complex, np.float32, np.int32, np.int64, np.complex64, np.complex128}
_TREES = frozenset({dict, list, tuple})
_OF_ARRAYS = 4  # parts that the key of a tree of arrays has
_ARRAYS = frozenset({np.ndarray})
_LEAVES = _NUMBERS | _ARRAYS
_dtype = operator.attrgetter("dtype")
_shape = operator.attrgetter("shape")
_writeable = operator.attrgetter("flags.writeable")
_as_made = operator.attrgetter("flags.carray")  # without gaps, and to be written to


class Request(NamedTuple):
    """One call, as far as plans look at it.

    Attributes:
      key: What a plan is remembered under; equal for calls that move and fold alike. Operation,
        structure, and of arrays their dtypes and their shapes, else what each leaf is.
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

    @property
    def can_be_written_to(self) -> bool:
        """Whether all leaves are arrays, and none is read-only."""
        return len(self.key) == _OF_ARRAYS and all(map(_writeable, self.leaves))

    def places(self, out: Any) -> list[Array] | None:
        """Return the leaves of `out` if these arrays can be put there as they are, else None."""
        kind = type(out)
        if kind is self.kind and set(map(type, out)) == _ARRAYS:
            places, same = list(out), len(out) == len(self.leaves)
        else:
            places, structure = nest.flatten(out)
            same = structure == self.structure and set(map(type, places)) == _ARRAYS
        if same and self.key[2:] == _specs(places) and all(map(_writeable, places)):
            return places
        return None


def _specs(leaves: list[Array]) -> tuple[Any, Any]:
    # Not by a loop of Python's, which takes as long as to fold what has hundreds of leaves.
    return tuple(map(_dtype, leaves)), tuple(map(_shape, leaves))


def request(reduce_op: Any, value: Any) -> Request | None:
    """Return what is asked for, or None if it is nothing that plans are made for."""
    if not isinstance(reduce_op, str | ReduceOp):
        return None
    kind = type(value)
    if kind not in _TREES and kind is not np.ndarray and kind not in _NUMBERS:
        return None
    if (kind is list or kind is tuple) and set(map(type, value)) == _ARRAYS:
        # What has hundreds of leaves is mostly this, and to walk it costs as much as to fold it.
        structure = nest.flat(kind is list, len(value))
        leaves = list(value)
        return Request((reduce_op, structure, *_specs(leaves)), leaves, structure, kind)
    leaves, structure = nest.flatten(value)
    try:
        hash(structure)
    except TypeError:  # as of a defaultdict whose factory has no hash
        return None
    kinds = set(map(type, leaves))
    if kinds == _ARRAYS:
        return Request((reduce_op, structure, *_specs(leaves)), leaves, structure)
    if not kinds <= _LEAVES:
        return None
    specs = [(x.dtype, x.shape) if type(x) is np.ndarray else type(x) for x in leaves]
    return Request((reduce_op, structure, tuple(specs)), leaves, structure)


class Sketch(NamedTuple):
    """What the general path found out about a call, whatever its size.

    Attributes:
      what: The call.
      like: For each leaf whether it is a number, so that a number comes back.
    """

    what: Folding
    like: tuple[bool, ...]


class InPlace(NamedTuple):
    """A call whose arrays all lie in the arena, or of one rank, and are value and out both.

    Attributes:
      generation: The arena's when this was found out; nothing has come or gone while it is that.
      what: The call.
      placed: Where they lie.
      specs: Their dtypes, and their shapes, which a program might change where they are.
      ids: Which objects they are: none has come or gone since.
      headers: The same once more, for a quick look.
    """

    generation: int
    what: Folding
    placed: Placed
    specs: tuple[Any, Any]
    ids: tuple[int, ...]
    headers: Headers

    def names(self, leaves: list[Any]) -> bool:
        """Tell whether these are its arrays, as they were, and can be written to; as many."""
        if self.headers.known:
            return self.headers.same(leaves)
        return tuple(map(id, leaves)) == self.ids and self.has(leaves)

    def has(self, leaves: list[Array]) -> bool:
        """Tell whether its arrays are as they were, and can be written to."""
        return self.specs == _specs(leaves) and all(map(_as_made, leaves))


def _as_is(leaf: Any, value: Array, form: Form) -> bool:
    """Tell whether the bytes of a leaf travel and come back as they are."""
    same = form.wire == form.result == value.dtype
    return same and (type(leaf) is not np.ndarray or leaf.dtype == value.dtype) and value.size > 0


def _native(leaf: Any, part: Part) -> bool:
    return type(leaf) is not np.ndarray or leaf.dtype == part.value.dtype


@final
class Plans:
    """The plans of one strategy, by what they are for."""

    def __init__(self, lockstep: Lockstep, node: NodeFolds, learns: bool = True):
        """Remember nothing yet; nothing ever, unless it `learns`."""
        self._lockstep, self._node, self._learns = lockstep, node, learns
        self._known: dict[tuple[Any, ...], Plan | SharedPlan] = {}
        self._weighted: dict[tuple[Any, ...], Plan | SharedPlan] = {}
        self._sketches: dict[tuple[Any, ...], Sketch] = {}
        self._lone: dict[tuple[Any, ...], AnyPlan] = {}
        self._places: dict[tuple[Any, ...], InPlace] = {}
        self._last: dict[tuple[Any, ...], InPlace] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._known) + len(self._weighted) + len(self._lone)

    def lone(self, reduce_op: Any, value: Any) -> AnyPlan | None:
        """Return the plan for a lone array or number, if there is one."""
        try:
            if type(value) is np.ndarray:
                plan = self._lone.get((reduce_op, value.dtype, value.shape))
                return None if type(plan) is SharedPlan and self._node.arena.refused else plan
            return self._lone.get((reduce_op, type(value)))
        except TypeError:  # no operation; the general path says so, on every rank
            return None

    def find(self, asked: Request | None, weighted: bool = False) -> Plan | SharedPlan | None:
        """Return the plan of this request, if there is one."""
        known = self._weighted if weighted else self._known
        plan = None if asked is None else known.get(asked.key)
        # Since memory was refused, the general path on other ranks goes by MPI.
        return None if type(plan) is SharedPlan and self._node.arena.refused else plan

    def aside(self, plan: Plan | SharedPlan, asked: Request, outs: Sequence[Array]) -> bool:
        """Tell whether a plan may put totals into `outs`: not where they are folded in place."""
        if not worth_a_place(plan.nbytes, len(outs)) or outs[0] is not asked.leaves[0]:
            return True
        return self._lockstep.comm.size > 1 and self._node.arena.home(outs[0]) is None

    def sketch(self, asked: Request | None, weighted: bool) -> Sketch | None:
        """Return what is known of this request, if anything is."""
        return None if asked is None else self._sketches.get((weighted, *asked.key))

    def again(
        self, reduce_op: Any, weighted: bool, value: Any, leaves: list[Any]
    ) -> InPlace | None:
        """Return what is known of a list or tuple of the arena, if its like was folded last.

        Args:
          reduce_op: The fold.
          weighted: There is a weight.
          value: Any value.
          leaves: What is in it, if it is a list or a tuple; nobody else has this list.
        """
        kind = type(value)
        if not self._last or not leaves:
            return None
        try:
            found = self._last.get((reduce_op, weighted, kind, len(leaves)))
        except TypeError:  # no operation
            return None
        if found is None or self._node.arena.refused or self._node.arena.moving:
            return None
        known = found.generation == self._node.arena.generation and found.names(leaves)
        return found if known else None

    def in_place(self, key: tuple[Any, ...]) -> InPlace | None:
        """Return what is known of the arrays that `key` names, by address."""
        if self._node.arena.refused or self._node.arena.moving:
            return None  # as the general path has it, which other ranks may take
        found = self._places.get(key)
        return found if found and found.generation == self._node.arena.generation else None

    def learn_in_place(self, key: tuple[Any, ...], what: Folding, asked: Request) -> None:
        """Remember where the leaves lie, if all of them lie in the arena, or there is one rank."""
        leaves = asked.leaves
        if not all(map(_as_made, leaves)):
            return  # the general path says what is wrong, if anything is
        if self._lockstep.comm.size == 1:
            where = Placed("", [], [])
        elif (homes := self._node.homes(what, leaves, leaves)) is not None:
            where = placed(homes)
        else:
            return
        if len(self._places) >= _MOST:
            self._places.clear()
            self._last.clear()
        ids = tuple(map(id, leaves))
        known = InPlace(
            self._node.arena.generation, what, where, _specs(leaves), ids, Headers(leaves)
        )
        self._places[key] = known
        if asked.kind is not None:
            self._last[(*key[:2], asked.kind, len(leaves))] = known

    def learn(self, asked: Request, what: Folding, parts: Sequence[Part], weighted: bool) -> None:
        """Remember what the general path has found out about this request."""
        if not self._learns or self._lockstep.options.nan != "off":
            return  # it looks at every leaf, and wants its name
        if len(self._sketches) >= _MOST:
            self._sketches.clear()
        # A leaf of foreign byte order is converted by the general path only.
        if all(_native(leaf, part) for leaf, part in zip(asked.leaves, parts, strict=True)):
            like = tuple(type(leaf) is not np.ndarray for leaf in asked.leaves)
            self._sketches[(weighted, *asked.key)] = Sketch(what, like)
        self._plan(asked, what, [part.value for part in parts], weighted)

    def learn_again(
        self, asked: Request, what: Folding, values: Sequence[Array], weighted: bool
    ) -> None:
        """Remember a plan that could not be made before there was shared memory."""
        if not self._learns or not self._direct(what):
            return
        lone = nest.is_lone(asked.structure) and not weighted
        found = self.lone(asked.key[0], asked.leaves[0]) if lone else self.find(asked, weighted)
        if found is None:
            self._plan(asked, what, values, weighted)

    def _direct(self, what: Folding) -> bool:
        most = self._node.arena.direct if self._lockstep.frames and self._node.possible else 0
        return len(what.packs) == 1 and what.most <= most

    def _plan(self, asked: Request, what: Folding, values: Sequence[Array], weighted: bool) -> None:
        lockstep, op = self._lockstep, what.op
        header = ONE if op is ReduceOp.MEAN else b""
        if not all(map(_as_is, asked.leaves, values, what.forms)):
            return
        if len(self) >= _MOST:
            for known in (self._known, self._weighted, self._lone):
                known.clear()
        numbers = [type(leaf) is not np.ndarray for leaf in asked.leaves]
        plan: AnyPlan
        if lockstep.fits(len(header) + what.nbytes):
            plan = Plan(lockstep, op, what.text, values, header, numbers, weighted)
        elif self._direct(what):
            plan = SharedPlan(lockstep, self._node, what, numbers, weighted)
        else:
            return
        if weighted:
            self._weighted[asked.key] = plan
            return
        if not nest.is_lone(asked.structure):
            self._known[asked.key] = plan
            return
        (leaf,) = asked.leaves
        if type(leaf) is np.ndarray:
            self._lone[asked.key[0], leaf.dtype, leaf.shape] = plan
            return
        number = type(leaf) in _FLOATS and op in (ReduceOp.SUM, ReduceOp.MEAN)
        if number and isinstance(plan, Plan):
            plan = NumberPlan(lockstep, op, what.text, plan)
        self._lone[asked.key[0], type(leaf)] = plan
