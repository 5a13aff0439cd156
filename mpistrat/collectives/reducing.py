"""What every way of making the values of all ranks one can do."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.folding import Folding
from mpistrat.collectives.node import NodeFolds
from mpistrat.collectives.part import Part, first_nonfinite
from mpistrat.collectives.spans import Placed
from mpistrat.collectives.texts import described
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.lockstep import Lockstep

__all__ = ["Reducing"]


class Reducing(abc.ABC):
    """Makes the values of all ranks one.

    Args:
      lockstep: Proves each call, and carries what is small.
      node: The shared memory of the ranks.

    Attributes:
      in_place: Values may be folded where they lie in shared memory.
      weights: What each rank (rows) has given with each leaf to the last MEAN, or with all of them.
    """

    in_place = False

    def __init__(self, lockstep: Lockstep, node: NodeFolds):
        """Reduce over the ranks of `lockstep`."""
        self.lockstep, self.comm, self.node = lockstep, lockstep.comm, node
        self.weights = np.empty((lockstep.comm.size, 0))

    @final
    def all_reduce(
        self, call: str, op: ReduceOp, parts: Sequence[Part], weigh: bool = False
    ) -> list[Array]:
        """Fold every leaf over all ranks.

        Collective. Cost: as `fold`.

        Args:
          call: The text of the call; shapes and dtypes of the parts are added to it.
          op: The fold. MEAN divides by the sum of the weights.
          parts: One per leaf; equal shapes and dtypes on all ranks.
          weigh: Multiply the values by their weights first; otherwise they are sums over their
            examples already.

        Returns:
          One fresh array per leaf, of the form's result dtype, with the same bits on all ranks.
        """
        with self.lockstep.preparing(call):
            text, alarm = described(call, parts), self.alarm(call, parts)
            values, weights = [part.value for part in parts], [part.weight for part in parts]
            shapes = [value.shape for value in values]
            what = Folding(text, op, [part.form for part in parts], shapes)
        return self.fold(what, values, weights, weigh, alarm=alarm)

    @abc.abstractmethod
    def fold(
        self,
        what: Folding,
        values: Sequence[Array],
        weights: Sequence[float],
        weigh: bool = False,
        outs: Sequence[Array] | None = None,
        alarm: str = "",
    ) -> list[Array]:
        """Fold leaves whose call has its text already; else as `all_reduce`. Collective.

        Args:
          what: The call; equal on all ranks.
          values: The leaves, in native byte order.
          weights: How many examples each stands for, or one number for all.
          weigh: Multiply the values by their weights first.
          outs: Where the results go: of the forms' result dtypes. Leaves of the strategy's buffers
            that are given as value and out both may be folded where they lie.
          alarm: What is wrong with the values, if anything is looked for.
        """

    def start(
        self,
        what: Folding,
        values: Sequence[Array],
        weight: float,
        weigh: bool,
        outs: Sequence[Array] | None,
        alarm: str,
    ) -> Callable[[], list[Array]]:
        """Begin what `fold` does, and return what waits for it and gives the results. Collective.

        Here all is done when it returns.
        """
        totals = self.fold(what, values, [weight], weigh, outs, alarm)
        return lambda: totals

    @abc.abstractmethod
    def fold_placed(
        self, what: Folding, placed: Placed, weight: float, weigh: bool, leaves: list[Array]
    ) -> None:
        """Fold arrays of the arena into themselves, if all is known of them; else as `fold`."""

    def meet(self, what: Folding, suffix: str, weight: float) -> None:
        """Prove a MEAN that the caller folds where it lies; `weights` has those of all ranks then.

        Collective.

        Args:
          what: The call; equal on all ranks.
          suffix: What its text says beside that.
          weight: How many examples this rank's values stand for.

        Raises:
          NotImplementedError: Values move in another way; see `in_place`.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def all_gather(
        self, call: str, axis: Sequence[int], leaves: Sequence[Array], paths: Sequence[str]
    ) -> list[Array]:
        """Concatenate every leaf over all ranks; see `Gatherer.all_gather`. Collective."""

    @property
    def delegates(self) -> bool:
        """Whether a class of the program's own moves values here."""
        return False

    def by_class(
        self, call: str, op: ReduceOp, values: Sequence[Any], check: Callable[[Any, Any], Any]
    ) -> list[Any]:
        """Fold values of any kind by a class of the program's own. Collective, with its own proof.

        Args:
          call: The text of the call; the name of the class is added to it.
          op: The fold.
          values: One per leaf.
          check: Makes the result of what the class returned, and the value; or raises.

        Raises:
          NotImplementedError: There is no such class; see `delegates`.
        """
        raise NotImplementedError

    @final
    def alarm(self, call: str, parts: Sequence[Part]) -> str:
        """Return what is wrong with the numbers that this rank is about to give, if asked for."""
        if self.lockstep.options.nan == "off":
            return ""
        return first_nonfinite(call, self.lockstep.state.steps, parts)
