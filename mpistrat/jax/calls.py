"""What a traced collective is, and how it is made when XLA comes to it.

XLA calls Python from the thread that called the jitted function, or from one of its own, perhaps
after that function has returned, if its arguments were still being computed. So the session is lent
to that thread; and the owning thread, before each call of its own, waits for all that it has
dispatched. Thus the calls of a rank have the order of its program, whatever thread makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import jax
from jax._src import dispatch
from jax.experimental.xla_metadata import set_xla_metadata

from mpistrat.arrays import Array, as_array
from mpistrat.comm.callsite import pass_over, standing_for
from mpistrat.comm.session import Session
from mpistrat.distribute.gather import gather
from mpistrat.distribute.mode import beside, current, refuse_unchosen
from mpistrat.distribute.reduce import in_replica
from mpistrat.distribute.replica_group import ReplicaGroup
from mpistrat.distribute.state import broadcast_state
from mpistrat.distribute.strategies import current_strategy
from mpistrat.jax.arrays import place_results
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.ranks import CallState

__all__ = ["Site", "TracedCall", "group_here"]

# Places in messages are those of the program: a backward pass is made by JAX.
pass_over(str(Path(jax.__file__).parent / "_src"))

# Traces of one strategy are of no use to another, so JAX is told to keep them apart.
if hasattr(jax, "make_user_context"):
    _ruling = jax.make_user_context(None)
else:  # before JAX 0.7: what is said of the operations keeps traces apart as well

    def _ruling(lockstep: Any) -> Any:
        return set_xla_metadata(mpistrat=str(id(lockstep)))


beside(lambda strategy: _ruling(strategy.replicas.lockstep))


def group_here(call_name: str) -> ReplicaGroup:
    """Return the replica group of the current strategy, in replica code or in its scope.

    Args:
      call_name: The call that needs the group.

    Raises:
      ContextError: No strategy is in scope, in a job of several ranks.
      StrategyError: This is another thread than the strategy's.
    """
    if current() is None:
        refuse_unchosen(
            call_name, "Call it in strategy.scope(), or in the function of strategy.run"
        )
    group = current_strategy().replicas
    group.lockstep.check()
    group.lockstep.state.interrupted.check()
    return group


@final
class _Borrowed:
    """What other threads have done in the name of a session.

    Attributes:
      pending_error: What a call of theirs has raised on every rank, until the owning thread has
        been told.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.pending_error: BaseException | None = None


def _awaiting(session: Session) -> Callable[[], None]:
    """Return a function that waits until all computations of this thread have ended."""
    borrowed, run = session.kept(_Borrowed), session.kept(CallState).run
    run.carriers = (jax.errors.JaxRuntimeError,)

    def wait() -> None:
        try:
            jax.effects_barrier()
        except jax.errors.JaxRuntimeError:  # the result of that computation raises it, too
            dispatch.runtime_tokens.clear()  # or each later computation would fail with it
        error, borrowed.pending_error = borrowed.pending_error, None
        if error is not None and run.depth and run.failed is None:
            run.failed = error

    return wait


@final
class Site:
    """The ranks that a function was traced for.

    Attributes:
      group: Of the strategy.
      size: How many replicas there are.
      rank: Which of them this is.
    """

    def __init__(self, group: ReplicaGroup):
        """Let the ranks of this group be called from the threads of XLA."""
        self.replicas = group
        lockstep = group.lockstep
        self.size, self.rank = lockstep.comm.size, lockstep.comm.rank
        if lockstep.session.awaited is None:
            lockstep.session.awaited = _awaiting(lockstep.session)

    def __eq__(self, other: object) -> bool:
        """Tell whether it is that of the same strategy."""
        return isinstance(other, Site) and other.replicas is self.replicas

    def __hash__(self) -> int:
        """Return a number that is equal for equal sites."""
        return hash(id(self.replicas))

    def call(self, make: Callable[[], None]) -> None:
        """Make a call from whatever thread XLA runs it in. Collective."""
        lockstep = self.replicas.lockstep
        with lockstep.session.lent():
            try:
                make()
            except BaseException as error:
                if error is lockstep.state.raised:
                    lockstep.session.kept(_Borrowed).pending_error = error
                raise


@final
@dataclass(frozen=True, repr=False)
class TracedCall:
    """One collective, as far as it is the same each time that a traced program comes to it.

    Attributes:
      site: Whose it is.
      name: ``all_reduce``, ``all_gather`` or ``broadcast``.
      op: The reduction, of an all-reduce.
      axis: Along which arrays are gathered.
      weight: How many examples this replica stands for, if that is known when it is traced.
      weighed: It is known only when it runs: the first operand.
      shared: The loss is one that all replicas have in common; see `mpistrat.jax.all_reduce`.
      local: It does nothing. For what is shared it is the transpose: the gradient is the loss's
        own.
      names: The names of the leaves, which the ranks compare; empty if a leaf has none of its own.
      place: Where the program has it.
    """

    site: Site
    name: str
    op: ReduceOp = ReduceOp.SUM
    axis: int = 0
    weight: float | None = None
    weighed: bool = False
    shared: bool = False
    local: bool = False
    names: tuple[str, ...] = ()
    place: str = field(default="", compare=False)

    def __repr__(self) -> str:
        """Return what a jaxpr shows."""
        return f"{self.name}({self.op.value})" if self.name == "all_reduce" else self.name

    @property
    def weighted(self) -> bool:
        """Whether it is a weighted mean."""
        return self.weighed or self.weight is not None

    def fill_outputs(self, operands: Sequence[Array], outs: Sequence[Array]) -> None:
        """Make the call, and put its results into `outs`. Collective; in any thread of XLA's."""
        with standing_for(self.place):
            self.site.call(lambda: self._fill_outputs(operands, outs))

    def _fill_outputs(self, operands: Sequence[Array], outs: Sequence[Array]) -> None:
        group, places = self.site.replicas, list(outs)
        if self.name == "all_reduce":
            values, weight = self._weighted(operands)
            in_replica(group, self.op, self.tree(values), weight, self.tree(places))
        elif self.name == "all_gather":
            for place, rows in zip(places, self._gathered(operands), strict=True):
                place[...] = rows
        else:
            if self.site.rank == 0:
                for place, value in zip(places, operands, strict=True):
                    place[...] = value
            broadcast_state(group, self.tree(places), self.tree(places))

    def call_directly(self, operands: Sequence[Any]) -> list[Any]:
        """Make the call in this thread, and return JAX arrays. Collective."""
        arrays, likes = (
            [as_array(operand) for operand in operands],
            list(operands[int(self.weighed) :]),
        )
        if self.name == "all_reduce":
            values, weight = self._weighted(arrays)
            tree = in_replica(self.site.replicas, self.op, self.tree(values), weight, None)
            results = self.leaves(tree)
        elif self.name == "all_gather":
            results = self._gathered(arrays)
        else:
            results = self.leaves(broadcast_state(self.site.replicas, self.tree(arrays), None))
        return place_results(results, likes)

    def _weighted(self, operands: Sequence[Array]) -> tuple[list[Array], float | None]:
        if self.weighed:
            return list(operands[1:]), float(operands[0])
        return list(operands), self.weight

    def _gathered(self, arrays: Sequence[Array]) -> list[Array]:
        # The shapes of all ranks have been traced from this rank's, so they have to be equal.
        shapes = f" of equal shapes {[array.shape for array in arrays]}"
        return self.leaves(
            gather(self.site.replicas, "all_gather", self.tree(arrays), self.axis, shapes)
        )

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Return leaves under their names, by which the ranks compare what they bring."""
        return dict(zip(self.names, leaves, strict=True)) if self.names else list(leaves)

    def leaves(self, tree: Any) -> list[Any]:
        """Return the leaves of such a tree, in their order."""
        return [tree[name] for name in self.names] if self.names else tree

    def select_leaves(self, *which: int) -> TracedCall:
        """Return the same call of some of the leaves."""
        return replace(self, names=tuple(self.names[i] for i in which) if self.names else ())

    def append_weight_sum(self, count: int) -> TracedCall:
        """Return the same call, of its first `count` leaves and the sum of the weights."""
        names = (*self.names[:count], "weight, summed up")
        return replace(self, names=names if self.names or not count else ())

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result of an operand."""
        if self.name != "all_gather":
            return shape
        axis = self.axis % len(shape)
        return (*shape[:axis], shape[axis] * self.site.size, *shape[axis + 1 :])
