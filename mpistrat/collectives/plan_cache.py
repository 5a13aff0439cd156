"""The plans of calls that repeat.

To find out what a small all-reduce is (flatten the tree, check each leaf, write the text of the
call and its digest) takes as long as to make it. All of that follows from the operation, the
structure, the shapes and the dtypes, so it is done once, and kept under them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import Array
from mpistrat.collectives.allreduce import AllReduce
from mpistrat.collectives.plan import (
    Contribution,
    PlanOptions,
    ReductionPlan,
    described,
    specs_of,
)
from mpistrat.collectives.reducer import Reducer
from mpistrat.kernels.ops import ReduceOp

PlanKey: TypeAlias = tuple[Any, ...]

# A program that makes new structures forever must not fill the memory.
_MOST_PLANS = 1024
_NUMBERS = {float, complex, np.float32, np.float64, np.int32, np.int64, np.complex64, np.complex128}
_TREES = frozenset({dict, list, tuple})
_ARRAYS = frozenset({np.ndarray})
_LEAVES = _NUMBERS | _ARRAYS
_writeable = operator.attrgetter("flags.writeable")


class CallSignature(NamedTuple):
    """One all-reduce as the cache sees it.

    Attributes:
      key: The key of its plan: whether it is weighted, the operation, the structure, and the dtypes
        and shapes of arrays, else the types of leaves.
      leaves: The leaves.
      structure: The structure of the tree.
      specs: The dtypes and shapes of all leaves, if these are arrays; else None.
    """

    key: PlanKey
    leaves: list[Any]
    structure: pytree.Structure
    specs: tuple[Any, Any] | None = None

    def leaves_of_out(self, value: Any, out: Any) -> list[Array] | None:
        """Return the leaves of `out` if arrays like those of `value` fit there, else None."""
        if self.specs is None:
            return None
        if out is value:
            return self.leaves if all(map(_writeable, self.leaves)) else None
        places, structure = pytree.flatten(out)
        is_like = structure == self.structure and set(map(type, places)) == _ARRAYS
        if is_like and self.specs == specs_of(places) and all(map(_writeable, places)):
            return places
        return None


def signature_of(reduce_op: Any, is_weighted: bool, value: Any) -> CallSignature | None:
    """Return the signature of a call; None for operations and leaves whose plans are not kept."""
    kind = type(value)
    if not isinstance(reduce_op, str | ReduceOp) or not (
        kind is np.ndarray or kind in _TREES or kind in _NUMBERS
    ):
        return None
    leaves, structure = pytree.flatten(value)
    kinds = set(map(type, leaves))
    if kinds == _ARRAYS:
        specs = specs_of(leaves)
        key: PlanKey = (is_weighted, reduce_op, structure, specs)
    elif kinds <= _LEAVES:
        specs = None
        leaf_kinds = [(x.dtype, x.shape) if type(x) is np.ndarray else type(x) for x in leaves]
        key = (is_weighted, reduce_op, structure, tuple(leaf_kinds))
    else:
        return None
    return CallSignature(key, leaves, structure, specs)


@final
class PlanCache:
    """The plans of one strategy, each with the algorithms that were chosen for it.

    A leaf that differs on one rank only has another key there, and so another text.

    Args:
      reducer: The ranks.
    """

    def __init__(self, reducer: Reducer):
        """Create an empty cache."""
        self.reducer = reducer
        self._reductions: dict[PlanKey, AllReduce] = {}

    def __len__(self) -> int:
        """Return the number of plans."""
        return len(self._reductions)

    def clear(self) -> None:
        """Forget all plans."""
        self._reductions.clear()

    def find(self, key: PlanKey) -> AllReduce | None:
        """Return the reduction that was kept under this key."""
        try:
            return self._reductions.get(key)
        except TypeError:  # a defaultdict whose factory has no hash
            return None

    def add(self, key: PlanKey, plan: ReductionPlan) -> AllReduce:
        """Keep a plan under a key, and return its reduction."""
        if len(self._reductions) >= _MOST_PLANS:
            self.clear()
        reduction = AllReduce(self.reducer, plan)
        with contextlib.suppress(TypeError):  # as above
            self._reductions[key] = reduction
        return reduction

    def reduction_of(
        self, name: str, op: ReduceOp, contributions: Sequence[Contribution], is_weighting: bool
    ) -> AllReduce:
        """Return the reduction of these leaves, each with a weight of its own.

        Args:
          name: The text of the call, to which names, dtypes and shapes are added.
          op: The operation.
          contributions: One per leaf.
          is_weighting: As in `PlanOptions`.
        """
        specs = [(c.dtypes, c.value.dtype, c.value.shape, c.path) for c in contributions]
        key = (name, op, is_weighting, *specs)
        reduction = self.find(key)
        if reduction is None:
            dtypes, shapes = (
                [c.dtypes for c in contributions],
                [c.value.shape for c in contributions],
            )
            is_native = all(
                c.value.dtype == c.dtypes.wire == c.dtypes.result for c in contributions
            )
            options = PlanOptions(len(contributions), is_weighting, is_native=is_native)
            text = described(name, contributions)
            reduction = self.add(key, ReductionPlan(text, op, dtypes, shapes, options))
        return reduction
