"""`Strategy`: the façade over a `ReplicaGroup`, and the calls that programs make."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpistrat import pytree
from mpistrat.advice import refuse_name
from mpistrat.arrays import Array, check_sendable, dtype_name, find_array_kind, label
from mpistrat.collectives.communication import CommunicationOptions
from mpistrat.data.dataset import Dataset
from mpistrat.errors import LeafTypeError, StrategyError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.shm.arena import LINE
from mpistrat.strategy import context_stack, reductions
from mpistrat.strategy.all_reduce import Handle, all_reduce_start, all_reduce_tree
from mpistrat.strategy.context_stack import check_cross_replica
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.inputs import InputMethods
from mpistrat.strategy.reductions import gather, gather_leaves, gather_objects, local_rows
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.strategy.run import run
from mpistrat.strategy.shared_state import broadcast_state, check_same, defer_same
from mpistrat.variables.arguments import check_long_operation
from mpistrat.variables.kinds import LOCAL_VIEW, name_leaves
from mpistrat.variables.regroup import select_local

if TYPE_CHECKING:
    from mpistrat.cluster.resolver import ClusterResolver
    from mpistrat.strategy.inputs import InputIterator

ArraySpec = tuple[np.dtype[Any], tuple[int, ...]]


def make_buffers(group: ReplicaGroup, name: str, specs: object) -> Any:
    """Return a tree of zeroed arrays; see `Strategy.buffers`. Collective."""
    with group.lockstep.validating_collectively(name):
        leaves, structure = pytree.flatten(specs)
        paths = name_leaves(leaves, structure)
        array_specs = tuple(
            _read_spec(leaf, path) for leaf, path in zip(leaves, paths, strict=True)
        )
        shapes = ", ".join(f"{dtype_name(dtype)}{list(shape)}" for dtype, shape in array_specs)
    group.lockstep.handshake(f"{name}({pytree.describe(structure)} of {shapes})")
    arrays = group.reducer.node.create_buffers(array_specs)
    if arrays is None:
        if group.lockstep.comm.size > 1:
            group.reducer.node.warn_of_private_memory(name)
        arrays = [_make_aligned_array(dtype, shape) for dtype, shape in array_specs]
    kinds = map(find_array_kind, leaves)
    buffers = [
        array if kind is None else kind.as_buffer(array)
        for kind, array in zip(kinds, arrays, strict=True)
    ]
    return pytree.unflatten(structure, buffers)


def _read_spec(leaf: Any, path: str) -> ArraySpec:
    library = find_array_kind(leaf)
    try:
        if library is not None:
            return library.spec(leaf, path)
        dtype, shape = np.dtype(leaf.dtype), tuple(int(size) for size in leaf.shape)
    except (AttributeError, TypeError, ValueError):
        raise LeafTypeError(
            f"{label(path)} is {leaf!r:.60}; expected something with a dtype and a shape, such as "
            "an array or a variable."
        ) from None
    check_sendable(dtype, path)
    if min(shape, default=0) < 0:
        raise LeafTypeError(f"{label(path)} has shape {shape}, which no array has.")
    if math.prod(shape) * dtype.itemsize * 1024 > sys.maxsize:
        raise LeafTypeError(f"{label(path)} of shape {shape} is larger than any memory.")
    return dtype.newbyteorder("="), shape


def _make_aligned_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return a zeroed array of this rank that begins on a cache line, as shared ones do."""
    buffer = np.zeros(math.prod(shape) * dtype.itemsize + LINE, np.uint8)
    start = -buffer.ctypes.data % LINE
    return buffer[start : start + buffer.size - LINE].view(dtype).reshape(shape)


class Strategy(InputMethods):
    """Runs a program on all replicas; one MPI rank is one replica.

    Use one of the presets: `MirroredStrategy`, `MultiWorkerMirroredStrategy`, `OneDeviceStrategy`.
    Every method is cross-replica code: all ranks call it, in the same order.

    Args:
      group: The ranks, and how they communicate.
      devices: Labels of the replicas' devices; ranks beyond the list are called ``rank:k``.
      resolver: A `ClusterResolver` that names this process in the job, or None.

    Raises:
      TypeError: `group` is not a `ReplicaGroup`.

    Like: ``tf.distribute.Strategy``.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        devices: Sequence[str] = (),
        resolver: ClusterResolver | None = None,
    ):
        """Create a strategy over this group."""
        if not isinstance(group, ReplicaGroup):
            raise TypeError(
                f"Strategy() takes a ReplicaGroup, got {group!r:.60}: a strategy cannot be "
                "made from a StrategyExtended class here. Make a MirroredStrategy(), or one "
                "of the others."
            )
        self._replicas = group
        size = group.lockstep.comm.size
        self._device_labels = tuple(
            devices[rank] if rank < len(devices) else f"rank:{rank}" for rank in range(size)
        )
        self._resolver = resolver

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: it is ranks that are connected, and another process is not one of them.

        Raises:
          TypeError: Always; says what to do instead.
        """
        raise TypeError(
            f"{self!r} cannot be pickled: it connects the ranks of this job. Give another process "
            "arrays, and functions that take them; a program that needs a strategy makes its own."
        )

    def __copy__(self) -> Any:
        """Refuse: a copy would be a second strategy by the name of the first.

        Raises:
          StrategyError: Always.
        """
        raise StrategyError(
            f"{self!r} cannot be copied, only deep-copied. Share it, or make another."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """Return another strategy over the same ranks. Does not communicate.

        Raises:
          ValueError: It is a `MultiWorkerMirroredStrategy`.
        """
        if self._replicas.view is LOCAL_VIEW:
            raise ValueError(f"{self!r} cannot be copied. Make another one over the same ranks.")
        duplicate = object.__new__(type(self))
        duplicate.__dict__.update(self.__dict__)
        memo[id(self)] = duplicate
        return duplicate

    def __repr__(self) -> str:
        """Return the name and the number of replicas."""
        return f"{type(self).__name__}({self.num_replicas_in_sync} replicas)"

    if not TYPE_CHECKING:  # type checkers know which attributes there are

        def __getattr__(self, name: str) -> Any:
            """Refuse, and say what to use for a name that other libraries have.

            Raises:
              AttributeError: Always.
            """
            return refuse_name(self, name, is_context=False)

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are: the number of ranks."""
        return self._replicas.lockstep.comm.size

    @property
    def size(self) -> int:
        """The same as `num_replicas_in_sync`."""
        return self._replicas.lockstep.comm.size

    @property
    def is_chief(self) -> bool:
        """Whether this rank reports and writes files for all: rank 0 of the strategy.

        It is what ``extended.should_save_summary`` is in tf.distribute.
        """
        return self.extended.should_save_summary

    def print(self, *values: object) -> None:
        """Print values on the chief; other ranks print nothing. Never communicates.

        What is printed is flushed, so that it is in a batch log at once.

        Args:
          *values: As those of Python's ``print``.

        Example:
          >>> import mpistrat as ms
          >>> ms.MirroredStrategy().print("loss", 0.5)
          loss 0.5
        """
        if self.is_chief:
            print(*values, flush=True)

    @property
    def rank(self) -> int:
        """The number of this rank's replica, from 0 to ``num_replicas_in_sync - 1``.

        It is what `ReplicaContext.replica_id_in_sync_group` is in replica code, and the same in any
        code. It is the rank in MPI too, unless a `DeviceAssignment` has another order. For
        `OneDeviceStrategy` and the default strategy it is 0 on every rank.

        Example:
          >>> import mpistrat as ms
          >>> ms.OneDeviceStrategy("cpu").rank
          0
        """
        return self._replicas.lockstep.comm.rank

    @property
    def extended(self) -> StrategyExtended[Strategy]:
        """The lower-level methods."""
        return StrategyExtended(self)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The `ClusterResolver` that names this process in the job, if there is one."""
        return self._resolver

    def scope(self) -> AbstractContextManager[Strategy]:
        """Return a context manager whose body is cross-replica code of this strategy.

        Variables created in it belong to the strategy. It may be nested in itself, not in another
        strategy's, and may be entered again. That of the default strategy changes nothing.

        Raises:
          ContextError: Entered in replica code.
          StrategyError: Entered in another strategy's scope.

        Example:
          >>> import mpistrat as ms
          >>> strategy = ms.OneDeviceStrategy("cpu")
          >>> with strategy.scope():
          ...     ms.get_strategy() is strategy
          True
        """
        return context_stack.Scope(self, self._enter_scope)

    def _enter_scope(self) -> AbstractContextManager[Any]:
        if self._is_default:
            context_stack.check_same_strategy(self, "Strategy.scope()")
            return context_stack.choose_default_strategy()
        scope: AbstractContextManager[Any] = self._enter_cross_replica(
            "scope", "what you need; replica code is in the scope"
        )
        return scope

    def _enter_cross_replica(self, name: str, replacement: str) -> Any:
        return context_stack.enter_cross_replica(self, f"Strategy.{name}()", replacement)

    def _enter_own_values(self, name: str, replacement: str) -> Any:
        """Enter cross-replica code, where each rank of a job has given its own value."""
        context = self._enter_cross_replica(name, replacement)
        if self._is_default:
            context_stack.require_chosen_strategy(f"Strategy.{name}()")
        return context

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` on every replica.

        Collective: all ranks call it. It ends in one handshake on every rank whatever happened in
        `fn`: if it raises on one rank, it raises on all, so ``try`` around it is symmetric.

        Args:
          fn: The function; in it, `get_replica_context` gives the replica.
          args: Arguments. For each `PerReplica` and `Mirrored` in them, `fn` gets this replica's
            component.
          kwargs: The same by name.
          options: Ignored, as in tf.distribute outside of TPUs.

        Returns:
          Under `MirroredStrategy` the result of `fn`, with a `PerReplica` for every leaf but
          ``None``, variables and mirrored values; numbers of all replicas are known at once, arrays
          of other replicas when they are asked for. Elsewhere what `fn` returned here. Dicts have
          their keys in one order on all ranks: that of `fn`, or sorted if it differed.

        Raises:
          TypeError: `fn` is not a function, or `kwargs` not a dict.
          ValueError: `args` is not a list or tuple.
          Exception: The error of `fn`, on the rank where it raised.
          RemoteError: `fn` raised on another rank.
          LockstepError: The replicas returned different structures, or made different calls.
          ContextError: Called in replica code.

        Cost: one handshake.
        Like: ``tf.distribute.Strategy.run``.

        Example:
          >>> import mpistrat as ms
          >>> ms.OneDeviceStrategy("cpu").run(lambda x: x + 1, args=(2,))
          3
        """
        check_cross_replica(self, "Strategy.run()", "the function itself")
        return run(self, fn, args, kwargs)

    def reduce(self, reduce_op: ReduceOp | str, value: object, axis: object) -> Any:
        """Reduce values per replica to one value, on every rank.

        Collective: all ranks call it, in cross-replica code.

        Args:
          reduce_op: ``"SUM"``, ``"MEAN"``, ``"MIN"``, ``"MAX"`` or ``"PROD"``; of bool ``"ANY"``
            (as MAX) or ``"ALL"`` (as MIN).
          value: Tree of values per replica, as `run` returns them.
          axis: None: reduce elementwise over the replicas; shapes must agree. An integer or tuple
            of integers: also reduce over these axes of each replica's value, so sizes along them
            may differ and be 0. MEAN is then the mean of all elements, however they are spread.

        Returns:
          The same tree of NumPy arrays and scalars, with the same bits on every rank. dtypes are
          kept, except that MEAN of integers is float64 (float32 for 8 and 16 bits). A mean of
          nothing is NaN, and so is one of sums over `axis` that overflow with both signs on
          several replicas.

        Raises:
          ContextError: Called in replica code.
          StructureError: `axis` is None and a leaf is not a value per replica (SUM and PROD).
          AxisError: A leaf has no such axis.
          LeafTypeError: A leaf's dtype cannot be reduced.
          OverflowError: A leaf is a Python integer, and the result might not fit int64.
          LockstepError: Shapes that must agree differ between ranks.

        Cost: one pass over the local values; the handshake, which carries counts and results of
        some 200 bytes; beyond that one ``MPI_Allreduce`` per bucket.
        Like: ``tf.distribute.Strategy.reduce``.

        Example:
          >>> import mpistrat as ms, numpy as np
          >>> ms.OneDeviceStrategy("cpu").reduce("MEAN", np.array([1.0, 2.0, 6.0]), axis=0)
          np.float64(3.0)
        """
        with self._enter_cross_replica("reduce", "get_replica_context().all_reduce(...)"):
            if axis is None:
                return reductions.reduce_over_replicas(self._replicas, "reduce", reduce_op, value)
            return reductions.reduce_over_axis(self._replicas, reduce_op, value, axis)

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
        """Reduce each rank's own values over all ranks; see `ReplicaContext.all_reduce`.

        It is that call for cross-replica code, in a scope or outside. A plain value counts as this
        rank's own value: if n ranks all give 1, SUM is n.

        Collective: all ranks call it, in cross-replica code.

        Args:
          reduce_op: ``"SUM"``, ``"MEAN"``, ``"MIN"``, ``"MAX"`` or ``"PROD"``; of bool ``"ANY"``
            (as MAX) or ``"ALL"`` (as MIN).
          value: Tree of arrays or numbers of this rank; of a `PerReplica`, a `Mirrored` or a
            variable its component of this rank. Shapes and dtypes must agree.
          options: How the values are to move, over what the strategy was given.
          weight: For MEAN, how many examples the values of this rank stand for.
          out: Where the results go, as there.
          same: Values that have to be the same on all ranks, as there.

        Returns:
          `out` if it was given, else the same tree of fresh arrays, and NumPy scalars of numbers.

        Raises:
          ContextError: Called in replica code; or of the default strategy, where no strategy is in
            scope in a job of several ranks.
          StrategyError: A leaf is a value or variable of another strategy.
          LeafTypeError: A leaf is not an array, or its dtype cannot be reduced.
          OverflowError: A leaf is a Python integer, and the result might not fit int64.
          ValueError: The operation is unknown, or a weight is given for another one than MEAN.
          LockstepError: The calls differ between ranks.
          DivergenceError: The values of `same` differ between ranks.

        Cost: as `ReplicaContext.all_reduce`.

        Example:
          >>> import mpistrat as ms
          >>> ms.OneDeviceStrategy("cpu").all_reduce("MEAN", {"loss": 0.5}, weight=32)
          {'loss': np.float64(0.5)}
        """
        with self._enter_own_values("all_reduce", "get_replica_context().all_reduce(...)"):
            with self._replicas.lockstep.validating_collectively("all_reduce"):
                self._replicas.regrouper.check("all_reduce", pytree.flatten(value)[0])
                group = self._replicas.replace_options(options)
                if same is not None:
                    defer_same(group, same)
            with context_stack.CodeContext(
                self, context_stack.Replica(self.rank, self.num_replicas_in_sync)
            ):
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
        """Begin an `all_reduce`; see `ReplicaContext.all_reduce_start`.

        Collective: all ranks call it, in cross-replica code.

        Args:
          reduce_op: As of `all_reduce`, and so are the others.
          value: Tree of arrays or numbers of this rank.
          options: How the values are to move.
          weight: For MEAN, how many examples the values of this rank stand for.
          out: Where the results go.

        Returns:
          A handle, whose ``wait()`` returns what `all_reduce` returns.

        Raises:
          ContextError: Called in replica code; or of the default strategy, where no strategy is in
            scope in a job of several ranks.
          StrategyError: A leaf is a value or variable of another strategy.
          LeafTypeError: A leaf is not an array, or its dtype cannot be reduced.
          OverflowError: A leaf is a Python integer, and the result might not fit int64.
          ValueError: The operation is unknown, or a weight is given for another one than MEAN.
          LockstepError: The calls differ between ranks.

        Cost: as `ReplicaContext.all_reduce_start`.

        Example:
          >>> import mpistrat as ms
          >>> ms.OneDeviceStrategy("cpu").all_reduce_start("SUM", 1.5).wait()
          np.float64(1.5)
        """
        name = "all_reduce_start"
        with self._enter_own_values(name, "get_replica_context().all_reduce_start(...)"):
            with self._replicas.lockstep.validating_collectively(name):
                self._replicas.regrouper.check(name, pytree.flatten(value)[0])
                group = self._replicas.replace_options(options)
            with context_stack.CodeContext(
                self, context_stack.Replica(self.rank, self.num_replicas_in_sync)
            ):
                return all_reduce_start(group, reduce_op, value, weight, out)

    def all_gather(
        self, value: object, axis: int, options: CommunicationOptions | None = None
    ) -> Any:
        """Concatenate each rank's own values along `axis`; see `ReplicaContext.all_gather`.

        It is that call for cross-replica code, in a scope or outside. `gather` is for what `run`
        returned; here a plain array counts as this rank's own too.

        Collective: all ranks call it, in cross-replica code.

        Args:
          value: Tree of arrays of this rank, each with at least one dimension, of any number dtype
            or bool; of a `PerReplica`, a `Mirrored` or a variable its component of this rank. Sizes
            along `axis` may differ, and be 0; other sizes and dtypes may not.
          axis: The number of the axis, counted from the end if negative.
          options: How the values are to move, over what the strategy was given.

        Returns:
          The same tree of fresh arrays, in replica order, with the same bits on every rank.

        Raises:
          ContextError: Called in replica code; or of the default strategy, where no strategy is in
            scope in a job of several ranks.
          StrategyError: A leaf is a value or variable of another strategy.
          LeafTypeError: A leaf is not an array of numbers.
          AxisError: A leaf has no such axis.
          LockstepError: The calls differ between ranks.

        Cost: as `ReplicaContext.all_gather`.

        Example:
          >>> import mpistrat as ms, numpy as np
          >>> ms.OneDeviceStrategy("cpu").all_gather(np.array([1.0, 2.0]), axis=0)
          array([1., 2.])
        """
        with self._enter_own_values("all_gather", "get_replica_context().all_gather(...)"):
            with self._replicas.lockstep.validating_collectively("all_gather"):
                self._replicas.regrouper.check("all_gather", pytree.flatten(value)[0])
                group = self._replicas.replace_options(options)
            with context_stack.CodeContext(
                self, context_stack.Replica(self.rank, self.num_replicas_in_sync)
            ):
                return gather(group, "all_gather", select_local(value), axis)

    def gather_objects(self, value: object) -> list[Any]:
        """Return each rank's own value, on every rank, in replica order.

        For what is no array of numbers, or has another structure, shape or dtype on each rank:
        names, texts, trees of results. Nothing is pickled, and nothing is executed.

        Collective: all ranks call it, in cross-replica code.

        Args:
          value: A tree of dicts, lists and tuples, of any structure on each rank. Its leaves are
            numbers, text, bytes, None, arrays of numbers, text, dates and such objects, and arrays
            of other libraries; of a `PerReplica` or a variable this rank's component.

        Returns:
          A list of ``num_replicas_in_sync`` values. Subclasses of dict come as dicts, named tuples
          as tuples, arrays of other libraries as NumPy arrays; arrays are fresh.

        Raises:
          ContextError: Called in replica code; or of the default strategy, where no strategy is in
            scope in a job of several ranks.
          LeafTypeError: A leaf, which the error names, is something else: on its rank; elsewhere a
            `RemoteError` that is one too.
          StrategyError: A leaf is a value or variable of another strategy.

        Cost: one handshake, which carries up to about 200 bytes; else also one ``MPI_Allgatherv``.
        Every rank holds the values of all.

        Example:
          >>> import mpistrat as ms
          >>> ms.OneDeviceStrategy("cpu").gather_objects({"files": ["a", "b"]})
          [{'files': ['a', 'b']}]
        """
        with self._enter_own_values("gather_objects", "it after run(), on what fn returned"):
            return gather_objects(self._replicas, value)

    def local_rows(self, arrays: Any) -> Any:
        """Return this replica's rows of arrays that all ranks hold alike.

        Of L rows, replica i of n has ``[i * k, min((i + 1) * k, L))`` with ``k = ceil(L / n)``, as
        of a global batch: possibly none. All replicas together have each row once. With them,
        ``all_gather(results, axis=0)`` has the order of the rows.

        Not collective, and nothing is compared between ranks: arrays of another length on a rank
        would be divided otherwise there.

        Args:
          arrays: Tree of arrays with the same number of rows, the first axis: NumPy, sparse
            matrices with rows, tables of pandas, HDF5 datasets, of which only these rows are read.

        Returns:
          The same tree of ``array[lo:hi]``: views of NumPy arrays.

        Raises:
          DataError: A leaf has no rows, or the leaves differ in their number.

        Example:
          >>> import mpistrat as ms, numpy as np
          >>> ms.OneDeviceStrategy("cpu").local_rows(np.arange(3))
          array([0, 1, 2])
        """
        return local_rows(self._replicas, arrays)

    def broadcast(self, tree: object, out: object = None) -> Any:
        """Broadcast replica 0's values to all ranks.

        For state that is not a variable and should begin alike: weights of another library, plain
        arrays, numbers. A variable does not need it: it begins with replica 0's value.

        Collective: all ranks call it, in cross-replica code.

        Args:
          tree: Tree of arrays of any layout and dtype, bfloat16 too, of CPU tensors, numbers, text
            and ``None``. Structure, shapes, dtypes and types must agree; contents of other replicas
            than 0 are not read.
          out: Where the values go: a tree of the same structure, of writable arrays of these shapes
            and dtypes, or of CPU tensors whose memory NumPy can write to. It may be `tree` itself.
            Numbers have no place to write to, so a tree with numbers has no `out`.

        Returns:
          `out` if it was given, else the same tree: of each array or tensor a fresh array; Python
          numbers, text and ``None`` stay what they are, and NumPy scalars too.

        Raises:
          ContextError: Called in replica code; or of the default strategy, where no strategy is in
            scope in a job of several ranks.
          LeafTypeError: A leaf is neither of these; or a leaf of `out` cannot take its value.
          StructureError: `out` has another structure.
          ValueError: A leaf of `out` is read-only.
          StrategyError: A leaf is a value or variable of another strategy.
          LockstepError: The trees differ between ranks in more than contents.

        Cost: the handshake, with which numbers are sent; one ``MPI_Bcast`` of all small arrays
        together, and one of each of 64 KiB and more. Contiguous arrays that are their own `out` are
        not copied.

        Example:
          >>> import mpistrat as ms, numpy as np
          >>> weights = {"w": np.ones(2), "step": 3}
          >>> ms.OneDeviceStrategy("cpu").broadcast(weights)
          {'w': array([1., 1.]), 'step': 3}
        """
        with self._enter_own_values("broadcast", "it before run()"):
            return broadcast_state(self._replicas, tree, out)

    def check_same(self, tree: object) -> None:
        """Raise unless all ranks hold the same values, to the bit.

        For state that is not a variable, so that nothing else compares its copies. Bits are what is
        compared: a NaN is equal to one with the same bits, and -0.0 is another number than 0.0.

        Collective: all ranks call it, in cross-replica code.

        Args:
          tree: As `broadcast` takes it. For a variable, each rank's copy.

        Raises:
          DivergenceError: Contents differ; on every rank. It names the first leaf that differs, the
            first rank that has another value than replica 0 there, and the index.
          LockstepError: Structure, shapes, dtypes or types differ between ranks.
          ContextError: Called in replica code; or of the default strategy, where no strategy is in
            scope in a job of several ranks.
          LeafTypeError: A leaf is not an array, number or text.
          StrategyError: A leaf is a value or variable of another strategy.

        Cost: one pass over the values, at memory bandwidth, and the handshake, with which their
        digest is sent. If they differ, the first leaf that does is broadcast to be compared.

        Example:
          >>> import mpistrat as ms, numpy as np
          >>> ms.MirroredStrategy().check_same({"w": np.ones(2), "step": 3})
        """
        with self._enter_own_values("check_same", "it after run()"):
            check_same(self._replicas, tree)

    def gather(self, value: object, axis: int) -> Any:
        """Concatenate the values of all replicas along `axis`, on every rank.

        Collective: all ranks call it, in cross-replica code.

        Args:
          value: A `PerReplica` of arrays, or a tree of them; sizes along `axis` may differ. For a
            variable or a `Mirrored` value that is every replica's copy. Where cross-replica code
            sees all replicas (`MirroredStrategy`), other leaves are returned as they are; arrays
            and numbers among them have to be the same on all ranks.
          axis: The number of the axis, counted from the end if negative.

        Returns:
          The same tree of fresh arrays, in replica order.

        Raises:
          ContextError: Called in replica code.
          StrategyError: A leaf is a value or variable of another strategy.
          AxisError: A leaf has no such axis.
          LockstepError: The values do not fit together.
          NotImplementedError: A leaf is `IndexedSlices`, plain or per replica.

        Cost: as `ReplicaContext.all_gather`.
        Like: ``tf.distribute.Strategy.gather``.
        """
        with self._enter_cross_replica("gather", "get_replica_context().all_gather(...)"):
            return gather_leaves(self._replicas, value, axis)

    def experimental_local_results(self, value: object) -> tuple[Any, ...]:
        """Return the values of all replicas that this strategy shows, as a tuple.

        Collective under `MirroredStrategy` unless all values are known here already. The result is
        kept, so a second call moves nothing.

        Args:
          value: A result of `run`, or any tree.

        Returns:
          Under `MirroredStrategy` the value of every replica, in order: for a tree, the tree of
          each; for a plain value, that value alone. Elsewhere a tuple of one.

        Raises:
          LeafTypeError: A value is an object that cannot be sent.

        Cost: the handshake, and one ``MPI_Allgatherv`` of all values that are not known.
        Like: ``tf.distribute.Strategy.experimental_local_results``.

        Example:
          >>> import mpistrat as ms
          >>> ms.OneDeviceStrategy("cpu").experimental_local_results(5)
          (5,)
        """
        return self._replicas.regrouper.list_local_results(value)

    def unwrap(self, value: object) -> tuple[Any, ...]:
        """Return the values of all replicas; an older name of `experimental_local_results`.

        Collective, as that is.

        Args:
          value: A result of `run`, or any tree.
        """
        return self.experimental_local_results(value)

    def group(self, value: object, name: str | None = None) -> None:
        """Wait until every rank makes this call: a barrier.

        Collective: all ranks call it. All other calls are blocking, so there is nothing else to
        wait for. Cost: one handshake.

        Args:
          value: Ignored.
          name: Ignored.
        """
        self._replicas.lockstep.handshake("group")

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Do nothing: the launcher determines the ranks.

        Args:
          session_config: Ignored.
          cluster_spec: Ignored.
          task_type: Ignored.
          task_id: Ignored.
        """

    def update_config_proto(self, config_proto: object) -> Any:
        """Return a deep copy of `config_proto`; there is nothing to set in it."""
        return copy.deepcopy(config_proto)

    def colocate_vars_with(self, colocate_with_variable: object) -> AbstractContextManager[None]:
        """Return a context manager; see `StrategyExtended.colocate_vars_with`."""
        return self.extended.colocate_vars_with(colocate_with_variable)

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: InputIterator | None = None
    ) -> Any:
        """Call `fn` on every replica, with its part of the next element if there is an iterator.

        Collective; see `run`.

        Raises:
          TypeError: `input_iterator` is not such an iterator.
        """
        with self._enter_cross_replica("experimental_run", "the function itself"):
            with self._replicas.lockstep.validating_collectively("experimental_run"):
                if input_iterator is not None and not hasattr(input_iterator, "get_next"):
                    raise TypeError(
                        "experimental_run: input_iterator must be an iterator of a distributed "
                        f"dataset, iter(distributed), or None, got {input_iterator!r:.80}."
                    )
            args = () if input_iterator is None else (input_iterator.get_next(),)
            return run(self, fn, args, None)

    def buffers(self, specs: object) -> Any:
        """Return writable arrays that `ReplicaContext.all_reduce` reduces in place.

        The ranks of a node see each other's arrays, so ``ctx.all_reduce(op, b, out=b)`` copies
        nothing: each rank reduces its slice of the arrays of all ranks. Do not write to them during
        such a call. Otherwise use them like any array.

        Collective. Cost: the memory is reserved at once, about 0.25 s per GB of all ranks of a
        node.

        Args:
          specs: Tree of anything with a ``dtype`` and a ``shape``: arrays, variables, tensors.

        Returns:
          The same tree of zeroed arrays, C-ordered and aligned to 64 bytes; of a tensor a tensor.
          Their memory is given back when the last of them is gone; it has no name, so nothing is
          left after a crash.

        Raises:
          LeafTypeError: A leaf has no dtype and shape, or they are of no array that can be sent
            between ranks.
          LockstepError: The trees differ between ranks.

        Warns:
          RuntimeWarning: The ranks of a node cannot share memory; the arrays are ordinary ones.

        Example:
          >>> import numpy as np, mpistrat as ms
          >>> strategy = ms.OneDeviceStrategy("cpu")
          >>> b = strategy.buffers({"w": np.empty((2, 3), np.float32)})
          >>> b["w"][...] = 1
          >>> strategy.run(lambda: ms.get_replica_context().all_reduce("sum", b, out=b)["w"].sum())
          np.float32(6.0)
        """
        with self._enter_cross_replica(
            "buffers", "it before run(), and use the arrays in replica code"
        ):
            return make_buffers(self._replicas, "buffers", specs)

    def gradient_buffers(self, variables: Any) -> Any:
        """Return `buffers` for the gradients of variables: one array like each. Collective.

        Args:
          variables: Tree of variables, or of arrays.

        Returns:
          The same tree of zeroed arrays of their dtypes and shapes.

        Example:
          >>> import mpistrat as ms
          >>> strategy = ms.OneDeviceStrategy("cpu")
          >>> with strategy.scope():
          ...     w = ms.Variable([[1.0, 2.0]])
          >>> strategy.gradient_buffers([w])[0].shape
          (1, 2)
        """
        with self._enter_cross_replica(
            "gradient_buffers", "it before run(), and use the arrays there"
        ):
            return make_buffers(self._replicas, "gradient_buffers", variables)

    def experimental_make_numpy_dataset(self, numpy_input: object) -> Dataset:
        """Return an unbatched dataset of the rows of a tree of arrays; a list is stacked.

        Args:
          numpy_input: The tree.

        Raises:
          ContextError: Called in replica code.
        """
        with self._enter_cross_replica("experimental_make_numpy_dataset", "mpistrat.Dataset(...)"):
            return Dataset.from_tensor_slices(numpy_input)

    def long_operation(self, name: str, max_seconds: float) -> Any:
        """Return a context manager in whose body this rank may keep the others waiting.

        Not collective. The watchdog warns about a rank that others wait for after ``MPISTRAT_WARN``
        seconds, and ends the job after ``MPISTRAT_TIMEOUT`` seconds. It does neither while this
        body runs, for up to `max_seconds`.

        Args:
          name: A name for messages, such as ``"evaluate"``.
          max_seconds: How long it may take, in seconds.

        Raises:
          TypeError: `name` is not a string, or `max_seconds` not a number.
          ValueError: `max_seconds` is not positive.

        Example:
          >>> import mpistrat as ms
          >>> with ms.MirroredStrategy().long_operation("evaluate", max_seconds=600):
          ...     pass
        """
        check_long_operation(name, max_seconds)
        return self._replicas.lockstep.session.board.long_operation(name, float(max_seconds))

    def time_spent(self) -> tuple[float, float]:
        """Return how long this rank has waited for other ranks, and how long it has communicated.

        Not collective. Both are totals in seconds since the start, over all strategies; subtract
        two results for the time between them. The rest of the elapsed time was computation.
        Every call begins with a handshake. The shortest handshake so far is taken as the cost of
        communication; what a handshake took beyond that was waiting. Communication also includes
        the rest of a call: moving data by MPI, barriers of a node, ``wait`` of a handle. Copies and
        reductions in shared memory count as computation.

        Returns:
          ``(waiting, communicating)``; zeros with one rank, and where ranks are threads.

        Example:
          >>> import mpistrat as ms
          >>> ms.OneDeviceStrategy("cpu").time_spent()
          (0.0, 0.0)
        """
        return self._replicas.lockstep.session.board.spent()
