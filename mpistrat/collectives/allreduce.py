"""All-reduces of lists of arrays: the choice of an algorithm from the table, and its run.

The choice follows from facts that are equal on all ranks. So a rank that repeats a call and a rank
that makes it for the first time take the same algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from mpistrat.collectives.algorithms import ALGORITHMS
from mpistrat.collectives.algorithms.algorithm import AllReduceAlgorithm
from mpistrat.collectives.overlap import Overlap
from mpistrat.collectives.plan import ReductionInputs, ReductionPlan
from mpistrat.collectives.reducer import Reducer

# Programs reduce few sets of arrays in place. With more sets the algorithms are made again.
_MAX_IN_PLACE_ALGORITHMS = 16


@final
class AllReduce:
    """A plan with the algorithms that were chosen for it.

    Args:
      reducer: The ranks.
      plan: The plan.
    """

    def __init__(self, reducer: Reducer, plan: ReductionPlan):
        """Create it without an algorithm."""
        self.reducer, self.plan = reducer, plan
        self._algorithm: AllReduceAlgorithm | None = None
        self._in_place: dict[tuple[int, ...], AllReduceAlgorithm] = {}

    def __call__(self, inputs: ReductionInputs) -> list[Any]:
        """Reduce leaves over all ranks.

        Collective. Cost: the handshake; unless everything is sent with it, at most two barriers of
        the node for each 8 MiB, or one MPI_Allreduce per message.

        Args:
          inputs: The leaves in native byte order, their weights, and where the results go. Leaves
            of the strategy's buffers that are value and out both may be reduced in place.

        Returns:
          One fresh array per leaf, or `outs`, with the same bits on all ranks; numbers of numbers.
        """
        reducer = self.reducer
        if reducer.seconds is not None and reducer.lockstep.call_seconds != reducer.seconds:
            with reducer.limit_seconds():
                return self(inputs)
        try:
            algorithm = self.choose_algorithm(inputs)
        except Exception as error:
            reducer.lockstep.fail_collectively(self.plan.text, error)
        return algorithm.run(inputs)

    def choose_algorithm(self, inputs: ReductionInputs) -> AllReduceAlgorithm:
        """Return the algorithm for these inputs; the same on all ranks that make the same call."""
        arena, outs = self.reducer.node.arena, inputs.outs
        if arena.moving_keys:
            arena.check_not_moving(self.plan.text, [*inputs.values, *(outs or ())])
        algorithm = self._algorithm
        if algorithm is not None and not algorithm.is_valid:
            algorithm = self._algorithm = None
        if outs is not None and self.plan.can_reduce_in_place and outs[0] is inputs.values[0]:
            key = tuple(map(id, outs))
            in_place = self._in_place.get(key)
            if in_place is None or not in_place.matches(inputs):
                in_place = self._create_algorithm(inputs, is_cacheable=False)
                if in_place is not None:
                    if len(self._in_place) >= _MAX_IN_PLACE_ALGORITHMS:
                        self._in_place.clear()
                    self._in_place[key] = in_place
            if in_place is not None:
                return in_place
        if algorithm is None:
            algorithm = self._algorithm = self._create_algorithm(inputs, is_cacheable=True)
            assert algorithm is not None
        return algorithm

    def _create_algorithm(
        self, inputs: ReductionInputs, is_cacheable: bool
    ) -> AllReduceAlgorithm | None:
        for algorithm_class in ALGORITHMS:
            if algorithm_class.is_cacheable == is_cacheable:
                algorithm = algorithm_class.try_create(self.reducer, self.plan, inputs)
                if algorithm is not None:
                    return algorithm
        return None


def start_all_reduce(
    reducer: Reducer, plan: ReductionPlan, inputs: ReductionInputs
) -> Callable[[], list[Any]]:
    """Begin an all-reduce, and return a function that waits for it and returns its results.

    Collective. Between nodes the transfer continues in a thread; on one node the all-reduce is
    complete when this function returns.
    """
    if reducer.seconds is None:
        wait = Overlap.lookup_overlap(reducer).start(reducer, plan, inputs)
        if wait is not None:
            return wait
    totals = AllReduce(reducer, plan)(inputs)
    return lambda: totals
