"""`Optimizer`: the base class of all optimizers, with its public methods.

`mpistrat.optim.apply` implements the methods that communicate, and `mpistrat.optim.state` holds the
counters and slots.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mpistrat.errors import ContextError
from mpistrat.optim import apply
from mpistrat.optim.base import OptimizerSettings, Progress
from mpistrat.optim.state import State
from mpistrat.strategy.strategies import current_strategy
from mpistrat.variables.variable import Variable

__all__ = ["Optimizer"]


@dataclass(frozen=True)
class Optimizer(OptimizerSettings):
    """The hyper-parameters of an optimizer; its state is in slots and in `Progress`.

    A frozen value, compared by its contents; it can be pickled if its schedules and groups can.

    Attributes:
      learning_rate: A number, or a function of the step, from 0 (`mpistrat.optim.schedules`).
      groups: Hyper-parameters that are different for some of the variables.
      clip: `ClipByGlobalNorm` or `ClipByValue`; None for neither.
      accumulate: How many calls make one update, by the weighted mean of their gradients. More than
        1 costs one more slot, ``"pending"``. `flush` and `discard` end such a window early.
      ema: How much of the moving average of the weights stays in an update, such as 0.999; None for
        none. The average is one more slot, ``"ema"``, which begins as a copy of the weights before
        the first update.
      nonfinite: The effect of a gradient that is NaN or infinite. ``"raise"``: an error on all
        ranks; weights are finite then, but other blocks of 4096 elements may be updated.
        ``"skip"``: the update is left out on all ranks, at the cost of one more pass over the
        gradients, if `clip` does not need it anyway. ``"ignore"``: not checked.
      loss_scale: For gradients in float16; wants `nonfinite` to be ``"skip"``.
      shard: How the slots of variables of 64 KiB and more are divided. ``"node"``: the ranks of a
        node share them, and each updates a part. ``"all"``: they are sharded over all ranks, so
        each of n nodes holds an n-th; each rank updates its slice, and gets the updated weights of
        the other slices from other nodes. Reading such a slot is collective (`slot`). Weights and
        state are the same either way, except for rounding where an MPI library adds up gradients in
        another order. ``"all"`` is as ``"node"`` on one node, where nodes have different numbers of
        ranks or the ranks of a node share no memory, and for smaller variables.

    Raises:
      ValueError: A number is not finite, below 0 or too large; or options contradict each other.
      TypeError: An option is of the wrong type, or there is none of its name; for a name of
        PyTorch, optax or Keras, such as ``lr``, the error names the equivalent here.
    """

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the state for these variables; otherwise the first `apply_gradients` does.

        Call it before a checkpoint is restored. Further calls with the same variables, or some of
        them, do nothing.

        Collective: all ranks call it, with the same variables in the same order.

        Args:
          variables: ON_WRITE variables of one strategy, of float32 or float64.

        Raises:
          ValueError: `variables` is empty, or has a variable twice or one that is ON_READ; the
            optimizer was built for other variables; or a group has no variable.
          TypeError: One is not a variable.
          LeafTypeError: One has another dtype.
          StrategyError: They belong to several strategies, or another one is in scope.
          MemoryError: There is no memory to share for the state.
          LockstepError: The ranks give different variables, or have other options.

        Cost: that of creating the variables of the state: six numbers, and each slot.
        """
        apply.build(self, self._states, variables)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Variable]], weight: float | None = None
    ) -> Variable:
        """Update variables by their gradients, equally on all replicas.

        In replica code each replica gives its own gradients: the mean over its rows. They are
        reduced to the mean over all replicas. In cross-replica code gradients must be the same on
        all ranks: results of a reduction, or values that are compared.

        Collective: all ranks call it, with gradients of the same variables in the same order.

        Args:
          grads_and_vars: Pairs of gradient and variable. A gradient is an array of the shape of the
            variable, or `IndexedSlices` of some of its rows; with None, the variable and its state
            stay as they are. A view of a variable counts with its present
            contents. The contents of arrays of ``Strategy.gradient_buffers`` are undefined
            afterwards. For `IndexedSlices` those rows alone change, weights and state; but with
            `accumulate`, `ema`, and where the optimizer needs norms, as if it were dense.
          weight: How many rows this replica's gradients are the mean of, so that the update goes by
            the mean over all rows. A gradient of weight 0 is never read, and rows of
            `IndexedSlices` are not updated for its sake. None: replicas count alike. With
            `accumulate`, a call of weight 0 on all replicas counts as a call and adds nothing.

        Returns:
          `iterations`.

        Raises:
          ValueError: There is no gradient at all, or not of all variables with `accumulate`; a
            variable appears twice, is ON_READ, or is not one that the optimizer was built for; the
            weight is not a number of rows, or all are 0 (with `accumulate`, those of all calls of
            an update); the learning rate is not a finite number.
          StructureError: A gradient has another shape; or is a value per replica in cross-replica
            code; or `weight` is above 1 where this replica's part of the batch has no rows.
          LeafTypeError: A gradient does not convert to the dtype of its variable, or that is
            neither float32 nor float64.
          NonFiniteError: A gradient is NaN or infinite, with ``nonfinite="raise"``; says where.
          StrategyError: The variables belong to another strategy than the current one, or to
            several.
          ContextError: It is called in the function of ``extended.update``, or where no strategy is
            in scope in a job of several ranks.
          LockstepError: The ranks give other variables, have other options, or other gradients
            where these have to be the same.
          RemoteError: Another rank failed.

        Cost: one handshake. Gradients in ``Strategy.gradient_buffers`` are reduced and the
        variables updated in one pass over memory, in which each rank does its part of all variables
        of 64 KiB and more, then one barrier of the node; between nodes one ``MPI_Allreduce`` of
        each 2^20 elements of such a part, or half the bytes in bfloat16 (`CommunicationOptions`).
        Other gradients are copied there first, if there are such variables; without, it is an
        all-reduce.
        With ``shard="all"`` each rank gets the gradients of its slice only, in one message from
        each other node, and the weights by an ``MPI_Allgatherv`` of each variable between nodes: as
        many bytes; it ends with a barrier of all ranks. Norms, and
        ``nonfinite="skip"``, take one more pass over the gradients. `IndexedSlices` take a
        handshake and a gather more, and one handshake if all gradients are such and have weights.
        The first call creates the state.
        Like: ``tf.keras.optimizers.Optimizer.apply_gradients`` for what replicas give, with
        weights.

        Example:
          >>> import numpy as np, mpistrat as ms
          >>> strategy = ms.OneDeviceStrategy("cpu")
          >>> with strategy.scope():
          ...     w = ms.Variable(np.ones(2), name="w")
          >>> optimizer = ms.optim.SGD(0.5)
          >>> def step(x):
          ...     optimizer.apply_gradients([(x.mean(0) * w, w)], weight=len(x))
          >>> strategy.run(step, args=(np.array([[1.0, 2.0], [1.0, 0.0]]),))
          >>> w.numpy(), int(optimizer.iterations)
          (array([0.5, 0.5]), 1)
        """
        return apply.apply(self, self._states, grads_and_vars, weight)

    def flush(self) -> None:
        """Make the update for which calls have accumulated gradients, before all have come.

        It goes by the weighted mean of the calls that there are, and the next call begins another
        window. Call it at the end of the data. Without such calls, or if all had weight 0, weights
        and `iterations` stay as they are.

        Collective: all ranks call it, in replica code or in cross-replica code.

        Raises:
          NonFiniteError: An accumulated gradient is NaN or infinite, with ``nonfinite="raise"``.
          StrategyError: Another strategy is in scope.
          ContextError: It is called in the function of ``extended.update``.
          LockstepError: The ranks call something else, or have other options.

        Cost: one handshake; if there is an update, that of `apply_gradients` of one rank, and
        memory as large as the weights.

        Example:
          >>> import numpy as np, mpistrat as ms
          >>> w = ms.Variable(np.zeros(2), name="w")
          >>> optimizer = ms.optim.SGD(0.5, accumulate=4)
          >>> for gradient in np.ones(2), 3 * np.ones(2):
          ...     _ = optimizer.apply_gradients([(gradient, w)])
          >>> optimizer.flush()
          >>> w.numpy()
          array([-1., -1.])
        """
        state = self._find_state()
        if state is not None:
            apply.flush(self, state)

    def discard(self) -> None:
        """Drop the gradients that calls have accumulated for an update; weights stay.

        Call it before other data or other weights are trained on.

        Collective: all ranks call it, in replica code or in cross-replica code.

        Raises:
          StrategyError: Another strategy is in scope.
          ContextError: It is called in the function of ``extended.update``.
          LockstepError: The ranks call something else, or have other options.

        Cost: one handshake; if there is something to drop, zeros written to the slot ``"pending"``.
        """
        state = self._find_state()
        if state is not None:
            apply.discard(self, state)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The state: counters, then slots, named as ``"w/Adam/m"``; none before it is built."""
        state = self._find_state()
        return () if state is None else state.variables

    @property
    def iterations(self) -> Variable:
        """The number of updates so far: a variable, int64.

        Raises:
          ContextError: There is no state yet.
        """
        return self._require_state("iterations").counters["iterations"]

    @property
    def progress(self) -> Progress:
        """The counters as numbers; the initial ones before the state is created."""
        state = self._find_state()
        return Progress.start(self) if state is None else state.progress

    def slot(self, variable: Variable, name: str) -> Variable:
        """Return a slot of a variable; never communicates.

        With ``shard="all"`` no node has all of a large slot. Whatever reads it, such as `numpy`,
        arithmetic and indexing, is collective then: all ranks do it, at the cost of a handshake and
        two gathers, and get a copy. Its `repr` does not read it, and shows no values; `handle` and
        `values` raise StructureError. To assign to it works as always, and so does `Checkpoint`.

        Args:
          variable: One that the optimizer was built for.
          name: One of `slots`.

        Raises:
          ContextError: There is no state yet.
          ValueError: The variable or the slot is not known.
        """
        target = self._require_state("slots").targets.get(variable._number)
        if target is None:
            raise ValueError(
                f"{type(self).__name__} does not update {variable._label}, so it has no slot of "
                "it. Give the variable to apply_gradients, or to optimizer.build(variables)."
            )
        if name not in target.slots:
            raise ValueError(
                f"{type(self).__name__} has no slot {name!r} of {variable._label}; slots are "
                f"{', '.join(self.slots()) or 'none'}."
                + " For averages of the weights give it ema=0.99, say."
                * (name == "ema")
            )
        return target.slots[name]

    def average(self, variable: Variable) -> Variable:
        """Return the moving average of a variable's values; see the attribute `ema`.

        It is a slot: with ``shard="all"`` reading it is collective, as `slot` says.

        Args:
          variable: One that the optimizer was built for.

        Raises:
          ContextError: There is no state yet.
          ValueError: The variable is not known, or there are no averages.
        """
        return self.slot(variable, "ema")

    def tree(self) -> dict[str, Any]:
        """Return the state: counters, and slots by variable and name; empty before it is built."""
        state = self._find_state()
        return {} if state is None else state.tree()

    @functools.cached_property
    def _states(self) -> dict[Any, State]:
        """The state for each strategy whose variables it has updated; not a field of the value."""
        return {}

    def _find_state(self) -> State | None:
        states = self._states
        current_state = states.get(current_strategy())
        return current_state or (next(iter(states.values())) if len(states) == 1 else None)

    def _require_state(self, subject: str) -> State:
        state = self._find_state()
        if state is None:
            raise ContextError(
                f"{type(self).__name__} has no {subject} yet: its state is created by the first "
                "apply_gradients, or by optimizer.build(variables)."
            )
        return state

    def __getstate__(self) -> dict[str, Any]:
        """Return the hyper-parameters; a copy begins without state."""
        return {name: value for name, value in self.__dict__.items() if name != "_states"}
