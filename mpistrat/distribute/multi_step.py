"""Several steps in one call, and what the last of them gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, final

from mpistrat.distribute.mode import current
from mpistrat.errors import ContextError, StructureError
from mpistrat.kernels.ops import ReduceOp

if TYPE_CHECKING:
    from mpistrat.distribute.strategy import Strategy

__all__ = ["MultiStepContext", "run_steps"]


@final
class MultiStepContext:
    """What a step of several tells about itself; every step gets the same one.

    Attributes:
      last_step_outputs: By name, what the last step set.
      non_tensor_outputs: By name, what any step set that is no array.
      run_op: None; the steps have been made.
    """

    def __init__(self, strategy: Strategy, initial: Any = None):
        """Know nothing yet but the outputs that the program began with."""
        self._strategy = strategy
        self._reductions: dict[str, ReduceOp | None] = {}
        self.last_step_outputs: dict[str, Any] = dict(initial or {})
        self.non_tensor_outputs: dict[str, Any] = {}
        self.run_op = None

    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None) -> None:
        """Set what this step gave under `name`, over what the step before gave.

        Collective with a `reduce_op`: every rank calls it, in cross-replica code.

        Args:
          name: A name.
          output: A value per replica, or a tree of them.
          reduce_op: ``"SUM"`` or another operation: the output is folded over the replicas. None:
            it is kept as it is.

        Raises:
          ContextError: Called in replica code.
          ValueError: An earlier step folded it with another operation.
        """
        mode = current()
        if mode is not None and mode.replica is not None:
            raise ContextError(
                "set_last_step_output was called in replica code. Call it on what strategy.run "
                "returned, or inside merge_call."
            )
        op = None if reduce_op is None else ReduceOp.parse(reduce_op)
        if self._reductions.setdefault(name, op) is not op:
            raise StructureError(
                f"output {name!r} was set with {self._reductions[name]} before, now with {op}."
            )
        if op is not None:
            output = self._strategy.reduce(op, output, axis=None)
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Set something that is no array under `name`."""
        self.non_tensor_outputs[name] = output


def run_steps(
    strategy: Strategy,
    fn: Callable[..., Any],
    iterator: Iterator[Any],
    iterations: int,
    initial: Any = None,
) -> MultiStepContext:
    """Call ``fn(context, inputs)`` once per step, in cross-replica code. Collective.

    Args:
      strategy: Whose code it is.
      fn: One step; `inputs` is the next element of the iterator.
      iterator: A distributed iterator.
      iterations: How many steps.
      initial: Outputs by name, as they are before the first step; the steps then have to set no
        others.

    Raises:
      StopIteration: The data end before the steps do.
      StructureError: The outputs are not those of `initial`.
    """
    if iterations < 1:
        raise StructureError(f"iterations must be 1 or more, got {iterations}.")
    context = MultiStepContext(strategy, initial)
    with strategy.scope():
        for _ in range(iterations):
            fn(context, next(iterator))
    if initial is not None and set(initial) != set(context.last_step_outputs):
        raise StructureError(
            f"initial_loop_values are called {sorted(initial)}, the outputs of the steps "
            f"{sorted(context.last_step_outputs)}."
        )
    return context
