"""The plans of calls that repeat.

Preparing a small all-reduce (flatten the tree, check each leaf, write the text of the call and its
digest) takes as long as the all-reduce. All of it follows from the operation, the structure, the
shapes and the dtypes, so it is done once, and the plan is kept under these.
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
    describe_call,
    list_specs,
)
from mpistrat.collectives.reducer import Reducer
from mpistrat.kernels.ops import ReduceOp

PlanKey: TypeAlias = tuple[Any, ...]

# A program that never stops making new structures must not fill the memory.
_MAX_PLANS = 1024
_NUMBERS = {float, complex, np.float32, np.float64, np.int32, np.int64, np.complex64, np.complex128}
_TREES = frozenset({dict, list, tuple})
_ARRAYS = frozenset({np.ndarray})
_LEAVES = _NUMBERS | _ARRAYS
_is_writeable = operator.attrgetter("flags.writeable")


class CallSignature(NamedTuple):
    """The key of an all-reduce in the cache, and the leaves that were found meanwhile.

    Attributes:
      key: The key of its plan: whether it is weighted, the operation, the structure, and the dtypes
        and shapes of arrays, or the types of other leaves.
      leaves: The leaves.
      structure: The structure of the tree.
      specs: The dtypes and shapes of all leaves, if these are arrays; else None.
    """

    key: PlanKey
    leaves: list[Any]
    structure: pytree.Structure
    specs: tuple[Any, Any] | None = None

    def match_out_leaves(self, value: Any, out: Any) -> list[Array] | None:
        """Return the leaves of `out` if they are writeable arrays like those of `value`."""
        if self.specs is None:
            return None
        if out is value:
            return self.leaves if all(map(_is_writeable, self.leaves)) else None
        out_leaves, structure = pytree.flatten(out)
        is_like = structure == self.structure and set(map(type, out_leaves)) == _ARRAYS
        if is_like and self.specs == list_specs(out_leaves) and all(map(_is_writeable, out_leaves)):
            return out_leaves
        return None


def make_signature(reduce_op: Any, is_weighted: bool, value: Any) -> CallSignature | None:
    """Return the signature of a call; None for operations and leaves whose plans are not kept."""
    value_type = type(value)
    if not isinstance(reduce_op, str | ReduceOp) or not (
        value_type is np.ndarray or value_type in _TREES or value_type in _NUMBERS
    ):
        return None
    leaves, structure = pytree.flatten(value)
    leaf_types = set(map(type, leaves))
    if leaf_types == _ARRAYS:
        specs = list_specs(leaves)
        key: PlanKey = (is_weighted, reduce_op, structure, specs)
    elif leaf_types <= _LEAVES:
        specs = None
        leaf_specs = [(x.dtype, x.shape) if type(x) is np.ndarray else type(x) for x in leaves]
        key = (is_weighted, reduce_op, structure, tuple(leaf_specs))
    else:
        return None
    return CallSignature(key, leaves, structure, specs)


@final
class PlanCache:
    """The plans of one strategy, each with the algorithms that were chosen for it.

    If a leaf differs on one rank, that rank has another key, and so another text.

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

    def find_reduction(self, plan_key: PlanKey) -> AllReduce | None:
        """Return the reduction that is kept under this key, or None."""
        try:
            return self._reductions.get(plan_key)
        except TypeError:  # a defaultdict whose factory has no hash
            return None

    def add_plan(self, plan_key: PlanKey, plan: ReductionPlan) -> AllReduce:
        """Keep a plan under a key, and return its reduction."""
        if len(self._reductions) >= _MAX_PLANS:
            self.clear()
        reduction = AllReduce(self.reducer, plan)
        with contextlib.suppress(TypeError):  # as above
            self._reductions[plan_key] = reduction
        return reduction

    def find_weighted_reduction(
        self, call: str, op: ReduceOp, contributions: Sequence[Contribution], is_weighting: bool
    ) -> AllReduce:
        """Return the reduction of these leaves, each with a weight of its own.

        Args:
          call: The text of the call, to which names, dtypes and shapes are added.
          op: The operation.
          contributions: One per leaf.
          is_weighting: As in `PlanOptions`.
        """
        specs = [(c.dtypes, c.value.dtype, c.value.shape, c.path) for c in contributions]
        key = (call, op, is_weighting, *specs)
        reduction = self.find_reduction(key)
        if reduction is None:
            dtypes, shapes = (
                [c.dtypes for c in contributions],
                [c.value.shape for c in contributions],
            )
            is_native = all(
                c.value.dtype == c.dtypes.wire == c.dtypes.result for c in contributions
            )
            plan_options = PlanOptions(len(contributions), is_weighting, is_native=is_native)
            text = describe_call(call, contributions)
            reduction = self.add_plan(key, ReductionPlan(text, op, dtypes, shapes, plan_options))
        return reduction
