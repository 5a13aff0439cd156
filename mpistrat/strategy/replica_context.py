"""`ReplicaContext`, the calls of replica code; and functions that say where code runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, final

from mpistrat.advice import refuse_name
from mpistrat.arrays import as_int
from mpistrat.collectives.communication import CommunicationOptions
from mpistrat.errors import ContextError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.guards import warn_unweighted
from mpistrat.strategy.all_reduce import Handle, all_reduce_start, all_reduce_tree
from mpistrat.strategy.context_stack import (
    CodeContext,
    Replica,
    current_context,
    require_chosen_strategy,
    set_lasting_strategy,
)
from mpistrat.strategy.reductions import gather
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.strategy.run import call_merged, run_body
from mpistrat.strategy.shared_state import defer_same
from mpistrat.strategy.strategies import current_strategy, default_strategy
from mpistrat.strategy.strategy import Strategy
from mpistrat.variables.regroup import select_local


def get_strategy() -> Strategy:
    """Return the current strategy; the default strategy if none is in scope.

    Example:
      >>> get_strategy().num_replicas_in_sync
      1
    """
    return current_strategy()


def has_strategy() -> bool:
    """Tell whether a strategy other than the default one rules here."""
    return current_strategy() is not default_strategy()


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enter the scope of a strategy for the rest of the program, or of this thread.

    A strategy that was set before is left first. It does not communicate.

    Args:
      strategy: The strategy; None leaves the one that was set.

    Raises:
      ContextError: Called inside a scope or in replica code.
      TypeError: `strategy` is not a strategy.

    Like: ``tf.distribute.experimental_set_strategy``.

    Example:
      >>> import mpistrat as ms
      >>> experimental_set_strategy(ms.OneDeviceStrategy("cpu"))
      >>> has_strategy()
      True
      >>> experimental_set_strategy(None)
      >>> has_strategy()
      False
    """
    default = default_strategy()
    if strategy is not None and not hasattr(strategy, "_replicas"):
        text = f"experimental_set_strategy: expected a strategy or None, got {strategy!r}."
        raise TypeError(text)
    set_lasting_strategy(None if strategy is default else strategy)


def in_cross_replica_context() -> bool:
    """Tell whether this is cross-replica code: in a scope or a ``merge_fn``."""
    context = current_context()
    return context is not None and context.replica is None


# "| Any", not "| None": in replica code, where it is of use, it never is None.
def get_replica_context() -> ReplicaContext | Any:
    """Return the context of the replica that runs this code; None in cross-replica code.

    Outside of any strategy, and in other threads than that of the run, it is the context of the
    default strategy's single replica. In a job of several ranks the collective calls of that
    context raise ContextError.

    Example:
      >>> get_replica_context().replica_id_in_sync_group
      0
    """
    context = current_context()
    if context is None:
        return ReplicaContext(default_strategy(), 0)
    replica = context.replica
    if replica is not None and replica.context is None:
        strategy: Any = context.strategy
        replica.context = ReplicaContext(strategy, replica.id)
    return None if replica is None else replica.context


def _warn_unweighted_mean(group: ReplicaGroup, call: str, reduce_op: ReduceOp | str) -> None:
    with group.lockstep.validating_collectively(call):
        if ReduceOp.parse(reduce_op) is ReduceOp.MEAN:
            warn_unweighted(group.lockstep, call)


@final
class ReplicaContext:
    """One replica, as its own code sees it inside ``Strategy.run``.

    Get it with `get_replica_context`; it is valid only in the run that it came from. A program may
    also create one: the body of ``with ReplicaContext(strategy, replica_id)`` is replica code.

    Collective: that ``with`` statement. All ranks enter it, each with the context of its own
    replica. It ends in one handshake, as `Strategy.run` does: an exception in the body on one rank
    is raised on all.

    Like: ``tf.distribute.ReplicaContext``.

    Example:
      >>> import numpy as np
      >>> ctx = get_replica_context()
      >>> ctx.all_reduce("sum", np.array([1.0, 2.0]))
      array([1., 2.])
    """

    _open_bodies: tuple[
        AbstractContextManager[None], ...
    ] = ()  # bodies that run, the innermost last

    def __init__(self, strategy: Strategy, replica_id_in_sync_group: int | None):
        """Be replica `replica_id_in_sync_group` of `strategy`; None for one that is not known.

        Raises:
          ValueError: The id is not an integer.
        """
        self._strategy = strategy
        self._id = as_int(replica_id_in_sync_group)
        if self._id is None and replica_id_in_sync_group is not None:
            raise ValueError(
                "replica_id_in_sync_group must be an integer or None, got "
                f"{replica_id_in_sync_group!r:.80}."
            )
        self._thread = threading.get_ident()  # for messages

    def __enter__(self) -> ReplicaContext:
        """Begin replica code of this replica, and return the context. All ranks do.

        Raises:
          ContextError: This rank is another replica, or this is replica code of another context.
          StrategyError: Another strategy is in scope.
          RemoteError: It could not begin on another rank.
        """
        replica_body = run_body(self._strategy, Replica(self._id, self.num_replicas_in_sync, self))
        replica_body.__enter__()
        self._open_bodies = (*self._open_bodies, replica_body)
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        """End it, in one handshake.

        Raises:
          ContextError: It was not entered.
          LockstepError: The ranks made different calls in it.
          RemoteError: The body failed on another rank.
        """
        if not self._open_bodies:
            raise ContextError(f"{self!r} was left, but not entered.")
        replica_body, self._open_bodies = self._open_bodies[-1], self._open_bodies[:-1]
        return replica_body.__exit__(*exception)

    if not TYPE_CHECKING:  # type checkers know which attributes there are

        def __getattr__(self, name: str) -> Any:
            """Refuse, and say what to use for a name that other libraries have.

            Raises:
              AttributeError: Always.
            """
            return refuse_name(self, name, is_context=True)

    @property
    def strategy(self) -> Strategy:
        """The strategy that this replica belongs to."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int | Any:
        """The number of this replica, from 0 to ``num_replicas_in_sync - 1``; None if not known."""
        return self._id

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """The label of this replica's device, as a tuple of one."""
        replica_id = self._strategy._replicas.lockstep.comm.rank if self._id is None else self._id
        return (self._strategy._device_labels[replica_id],)

    def __repr__(self) -> str:
        """Return which replica of which strategy this is."""
        return f"ReplicaContext({self._id} of {self.num_replicas_in_sync}, {self._strategy!r})"

    def _check_call(self, call: str, options: CommunicationOptions | None = None) -> ReplicaGroup:
        context = current_context()
        replica = None if context is None else context.replica
        group = self._strategy._replicas
        if replica is not None and replica.context is self:
            if group.lockstep.state.kept_interrupt.is_pending:
                group.lockstep.state.kept_interrupt.raise_pending()
        elif context is None and self._strategy is default_strategy():
            require_chosen_strategy(call)
        else:
            self._refuse(call, context)
        if options is None:
            return group
        with group.lockstep.validating_collectively(call):
            return group.replace_options(options)

    def _refuse(self, call: str, context: CodeContext | None) -> NoReturn:
        if threading.get_ident() != self._thread:
            place_text = f"in another thread ({threading.current_thread().name!r})"
        elif context is None or context.replica is not None:
            place_text = "outside run()" if context is None else "in another run"
        else:
            place_text = "in cross-replica code"
        raise ContextError(
            f"{call} of replica {self._id} of {self.num_replicas_in_sync} was called {place_text}. "
            "Call it on get_replica_context(), in the function that Strategy.run calls, in its "
            "thread."
        )

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: object,
        options: CommunicationOptions | None = None,
        *,
        weight: float | None = None,
        out: object = None,
        same: object = None,
    ) -> Any:
        """Reduce the values of all replicas, and return the result on each.

        Collective: every replica calls it, with the same structure, shapes and dtypes.

        Args:
          reduce_op: ``"SUM"``, ``"MEAN"``, ``"MIN"``, ``"MAX"`` or ``"PROD"``; of bool ``"ANY"``
            (as MAX) or ``"ALL"`` (as MIN).
          value: Tree of arrays or numbers, any layout and byte order. For `IndexedSlices` the rows
            of all replicas are concatenated, in replica order; SUM and MEAN only.
          options: Time and dtype between nodes, over those of the strategy; an implementation
            takes the place of its `CrossDeviceOps` too.
          weight: For MEAN, how many examples this replica's values stand for: the result is
            ``sum(weight * value) / sum(weight)``. A value of weight 0 is never read, so it may be
            NaN. With all weights 0 the result is NaN.
          out: Where the results go: a tree of the same structure, of writable arrays of the shapes
            and dtypes of the results. It may be `value` itself. Arrays of ``Strategy.buffers`` that
            are value and out both are reduced in place, without any copy. Other overlaps with
            `value` are allowed too: all of it is read before what it overlaps with is written.
          same: Tree of arrays, numbers and text that has to be the same on all ranks, to the bit,
            such as the point at which each computes its part of a sum; None for nothing.

        Returns:
          `out` if it was given, else the same tree. Arrays are fresh; numbers come back as NumPy
          scalars. dtypes are kept, except that MEAN of integers is float64 (float32 for 8 and 16
          bits). float16 and bfloat16 are reduced in float32. All replicas get the same bits.

        Raises:
          ContextError: Called outside the run that this context belongs to, or in another thread;
            or where no strategy is in scope, in a job of several ranks.
          LeafTypeError: A leaf is not an array, or its dtype cannot be reduced: objects, text, sums
            of bool; or a leaf of `out` is not an array that can take its result.
          OverflowError: A leaf is a Python integer, and the result might not fit int64.
          ValueError: The operation is unknown, or a weight is given for another one than MEAN.
          LockstepError: The calls differ between ranks.
          DivergenceError: The values of `same` differ between ranks; on all of them.
          RemoteError: Another rank failed.

        Cost: the handshake, with which up to about 200 bytes are sent. More are reduced in memory
        that the ranks of a node share: two barriers of the node, one copy in and one out (neither
        for arrays of ``Strategy.buffers``), and between nodes one ``MPI_Allreduce`` of each slice,
        or half the bytes in bfloat16, if `options` say so. Where it cannot be shared, one
        ``MPI_Allreduce`` per 4 MiB of small leaves and per leaf of 64 KiB or more. `same` costs one
        pass over it: its digest is part of the handshake.
        Like: ``tf.distribute.ReplicaContext.all_reduce``.
        """
        group = self._check_call("all_reduce", options)
        if same is not None:
            with group.lockstep.validating_collectively("all_reduce"):
                defer_same(group, same)
        if weight is None and group.lockstep.state.run.uneven_row_count is not None:
            _warn_unweighted_mean(group, "all_reduce", reduce_op)
        return all_reduce_tree(group, reduce_op, value, weight, out)

    def all_reduce_start(
        self,
        reduce_op: ReduceOp | str,
        value: object,
        options: CommunicationOptions | None = None,
        *,
        weight: float | None = None,
        out: object = None,
    ) -> Handle:
        """Start a non-blocking `all_reduce`; ``wait()`` of the returned handle completes it.

        Errors are raised here, on all ranks. Before ``wait()`` the program may make other calls,
        also more of these; they complete in the order in which they were started. Arrays of
        ``Strategy.buffers`` are reduced in place: until ``wait`` the program must neither
        read nor write them, and another call that is given them raises. Others are copied first, so
        the memory of a step is needed twice; those of `out` have the results after ``wait``.

        Between nodes the bytes move in a thread. It needs the GIL each time that it polls, so
        computations should release the GIL, as NumPy does for large arrays. Everything is done here
        on one node, whose ranks move the bytes themselves; of up to about 200 bytes, of
        `IndexedSlices` and with `options` or a class that chooses another way; where MPI has no
        ``THREAD_MULTIPLE``, and with Open MPI unless ``mpi_yield_when_idle`` is set, as
        ``mpistrat run`` does. If that is why, there is one warning, on rank 0.

        Collective: every replica calls it, with the same structure, shapes and dtypes. ``wait`` is
        not, and ranks may wait for several handles in different orders; but each has to be waited
        for before the run ends, or that is an error on every rank.

        Args:
          reduce_op: As of `all_reduce`, and so are the others.
          value: Tree of arrays or numbers.
          options: How the values are moved.
          weight: For MEAN, how many examples this replica's values stand for.
          out: Where the results go.

        Returns:
          A handle, whose ``wait()`` returns what `all_reduce` returns.

        Raises:
          ContextError: Called outside the run that this context belongs to, or in another thread;
            or where no strategy is in scope, in a job of several ranks.
          LeafTypeError: A leaf is not an array, or its dtype cannot be reduced; or of `out`.
          OverflowError: A leaf is a Python integer, and the result might not fit int64.
          ValueError: The operation is unknown, or a weight is given for another one than MEAN.
          LockstepError: The calls differ between ranks.
          RemoteError: Another rank failed.

        Cost: the handshake, one copy of arrays that are not in ``Strategy.buffers``, and the
        reduction over the ranks of the node; the first time also some splits of the communicator.

        Example:
          >>> import numpy as np
          >>> handle = get_replica_context().all_reduce_start("sum", np.array([1.0, 2.0]))
          >>> handle.wait()
          array([1., 2.])
        """
        group = self._check_call("all_reduce_start", options)
        if weight is None and group.lockstep.state.run.uneven_row_count is not None:
            _warn_unweighted_mean(group, "all_reduce_start", reduce_op)
        return all_reduce_start(group, reduce_op, value, weight, out)

    def all_gather(
        self, value: object, axis: int, options: CommunicationOptions | None = None
    ) -> Any:
        """Concatenate the values of all replicas along `axis`, and return the result on each.

        Collective: every replica calls it, with the same structure and dtypes. Sizes along `axis`
        may differ, and be 0; other sizes may not.

        Args:
          value: Tree of arrays with at least one dimension; any number dtype, or bool.
          axis: The number of the axis, counted from the end if negative.
          options: How the values are to move, over what the strategy was given.

        Returns:
          The same tree of fresh arrays, in replica order.

        Raises:
          ContextError: Called outside the run that this context belongs to, or in another thread;
            or where no strategy is in scope, in a job of several ranks.
          LeafTypeError: A leaf is not an array of numbers.
          NotImplementedError: A leaf is `IndexedSlices`.
          AxisError: A leaf has no such axis.
          LockstepError: The calls differ between ranks.
          RemoteError: Another rank failed.

        Cost: the handshake, which carries the sizes; for more than about 200 bytes, also one
        ``MPI_Allgatherv`` per leaf.
        Like: ``tf.distribute.ReplicaContext.all_gather``, and it also takes negative axes and
        values that are empty on every replica.
        """
        group = self._check_call("all_gather", options)
        return gather(group, "all_gather", select_local(value), axis)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Wait for all replicas, then run `merge_fn` in cross-replica code.

        Collective: every replica calls it, with arguments of the same structure.

        Args:
          merge_fn: ``merge_fn(strategy, *args, **kwargs)``; it runs on every rank. In it,
            ``strategy.experimental_local_results(arg)`` gives the values of all replicas
            (of this one only, under `MultiWorkerMirroredStrategy`).
          args: Positional arguments; trees of anything. Text, bytes and bools that are the same on
            all replicas, ``None`` and variables reach `merge_fn` as they are, all else as a
            `PerReplica`, numbers too: a constant that is computed with belongs into the closure.
          kwargs: Keyword arguments.

        Returns:
          The result of `merge_fn`, with this replica's component in place of every `PerReplica` and
          `Mirrored`. Dicts have their keys in its order.

        Raises:
          ContextError: Called outside the run that this context belongs to, or in another thread;
            or where no strategy is in scope, in a job of several ranks.
          TypeError: `merge_fn` is not a function, or `kwargs` no dict.
          ValueError: `args` is not a list or tuple.
          LockstepError: The structures of the arguments differ between ranks.
          RemoteError: Another rank failed.

        Cost: one handshake; small arguments are sent with it, larger ones move when they are asked
        for.
        Like: ``tf.distribute.ReplicaContext.merge_call``.
        """
        self._check_call("merge_call")
        return call_merged(self._strategy, merge_fn, args, kwargs)
