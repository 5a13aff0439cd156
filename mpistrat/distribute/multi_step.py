"""Several steps in one call, and the outputs of the last one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

from mpistrat.arrays import whole_number
from mpistrat.distribute.arguments import check_function
from mpistrat.distribute.mode import current
from mpistrat.distribute.replica_group import StrategyBase
from mpistrat.distribute.running import merged
from mpistrat.errors import ContextError, OutOfRangeError, StructureError
from mpistrat.kernels.ops import ReduceOp

_CALL = "experimental_run_steps_on_iterator"


@final
class MultiStepContext:
    """The outputs of the steps that one call makes; every step gets the same context.

    Attributes:
      last_step_outputs: By name, what the last step set.
      non_tensor_outputs: By name, what any step set that is not an array.
      run_op: None; the steps have been made.
    """

    def __init__(self, strategy: StrategyBase, initial: Any = None):
        """Create a context with the outputs that the program began with."""
        self._strategy = strategy
        self._reductions: dict[str, ReduceOp | None] = {}
        self.last_step_outputs: dict[str, Any] = dict(initial or {})
        self.non_tensor_outputs: dict[str, Any] = {}
        self.run_op = None

    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None) -> None:
        """Set the output `name` of this step, in place of that of the step before.

        Collective with a `reduce_op`: every rank calls it.

        Args:
          name: A name.
          output: A value per replica, or a tree of them; in replica code, this replica's.
          reduce_op: ``"SUM"`` or another operation: the output is reduced over the replicas. None:
            it is kept as it is.

        Raises:
          ContextError: Called in replica code without `reduce_op`: what one replica gives is
            not an output of the step.
          ValueError: There is no such operation, or an earlier step reduced it with another one.
        """
        if not _in_replica():
            with self._strategy.replicas.lockstep.preparing("set_last_step_output"):
                op = self._register_reduction(name, reduce_op)
            self._keep(name, output, op)
        elif reduce_op is None:
            raise ContextError(
                "set_last_step_output was called in replica code without reduce_op. Give it one, "
                "or call it on what strategy.run returned."
            )
        else:
            op = self._register_reduction(name, reduce_op)
            _merged(lambda _, value: self._keep(name, value, op), output)

    def _register_reduction(self, name: str, reduce_op: Any) -> ReduceOp | None:
        op = None if reduce_op is None else ReduceOp.parse(reduce_op)
        if self._reductions.setdefault(name, op) is not op:
            raise StructureError(
                f"output {name!r} was set with {self._reductions[name]} before, now with {op}."
            )
        return op

    def _keep(self, name: str, output: Any, op: ReduceOp | None) -> None:
        if op is not None:
            output = self._strategy.reduce(op, output, axis=None)
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Set something that is not an array under `name`.

        Collective in replica code: every replica calls it, and what is kept is the tuple of what
        all of them gave, as far as the strategy shows them.

        Args:
          name: A name.
          output: Anything; in replica code, anything that can be sent.
        """
        if not _in_replica():
            self.non_tensor_outputs[name] = output
            return

        def keep(strategy: StrategyBase, value: Any) -> None:
            self.non_tensor_outputs[name] = strategy.experimental_local_results(value)

        _merged(keep, output)


def _in_replica() -> bool:
    mode = current()
    return mode is not None and mode.replica is not None


def _merged(keep: Callable[[Any, Any], None], output: Any) -> None:
    mode = current()
    assert mode is not None  # this is replica code
    mode.strategy.replicas.lockstep.state.interrupted.check()
    merged(mode.strategy, keep, (output,))


def run_steps(
    strategy: StrategyBase,
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
      OutOfRangeError: The data end before the steps do.
      TypeError: `iterations` is not an integer, or `iterator` is not an iterator.
      StructureError: There are no steps to make, or the outputs are not those of `initial`.
    """
    lockstep = strategy.replicas.lockstep
    with lockstep.preparing(_CALL):
        iterations = whole_number(f"{_CALL}: iterations", iterations, 1, StructureError)
        check_function(_CALL, "fn", fn)
        if not hasattr(iterator, "__next__"):
            raise TypeError(
                f"{_CALL}: iterator must be an iterator, iter(distributed), got {iterator!r:.80}."
            )
        context = MultiStepContext(strategy, initial)
    with strategy.scope():
        for step in range(iterations):
            try:
                inputs = next(iterator)
            except StopIteration:
                lockstep.refuse(
                    _CALL,
                    OutOfRangeError(
                        f"{_CALL}: the data ended after {step} of {iterations} steps. Ask for "
                        "fewer, or repeat() the dataset."
                    ),
                )
            fn(context, inputs)
    with lockstep.preparing(_CALL):
        if initial is not None and set(initial) != set(context.last_step_outputs):
            raise StructureError(
                f"initial_loop_values are called {sorted(initial)}, the outputs of the steps "
                f"{sorted(context.last_step_outputs)}."
            )
    return context
