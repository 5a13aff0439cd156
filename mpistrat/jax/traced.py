"""Collectives as operations of JAX: how they run, and are lowered, differentiated and batched.

A traced collective (`TracedCall`) is a primitive of JAX with an ordered effect, so XLA neither
drops it nor changes the order. The callback reads its operands and writes its results in the memory
of XLA. All operations are linear, except for MIN, MAX and PROD, so gradients in both modes follow
from their transposes.

XLA calls Python from the thread that called the jitted function, or from a thread of its own,
perhaps after that function has returned, if its arguments were still being computed. So
`Session.lent` lets that thread make calls; and the owning thread, before each call of its own,
waits for all computations that it has dispatched (`Session.awaited`, ``jax.effects_barrier``). Thus
the calls of a rank have the order of its program, whatever thread makes them. An error of such a
call, raised on all ranks, ends the run, as that of any other call does.

A context of the strategy's stack enters a context of JAX, so that traces of one strategy are not
used by another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import jax
import jax.ffi
import numpy as np
from jax._src import dispatch
from jax.experimental import io_callback
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpistrat.arrays import Array, as_array
from mpistrat.comm.callsite import add_library_directory, naming_call_site
from mpistrat.comm.session import Session
from mpistrat.jax.arrays import place_results
from mpistrat.kernels.ops import ReduceOp
from mpistrat.lockstep.ranks import CallState
from mpistrat.strategy.all_reduce import all_reduce_tree
from mpistrat.strategy.context_stack import (
    current_context,
    register_context_maker,
    require_chosen_strategy,
)
from mpistrat.strategy.reductions import gather
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.strategy.shared_state import broadcast_state
from mpistrat.strategy.strategies import current_strategy

__all__ = [
    "TracedCall",
    "TracedGroup",
    "bind",
    "find_group",
]


# Messages name places in the program, and JAX itself makes the backward pass.
add_library_directory(str(Path(jax.__file__).parent / "_src"))

# Another strategy cannot use the traces of one strategy, so JAX keeps them apart.
if hasattr(jax, "make_user_context"):
    _ruling = jax.make_user_context(None)
else:  # before JAX 0.7 metadata of the operations keep traces apart

    def _ruling(lockstep: Any) -> Any:
        return set_xla_metadata(mpistrat=str(id(lockstep)))


register_context_maker(lambda strategy: _ruling(strategy._replicas.lockstep))


def find_group(call_name: str) -> ReplicaGroup:
    """Return the replica group of the current strategy, in replica code or in its scope.

    Args:
      call_name: The call that needs the group.

    Raises:
      ContextError: No strategy is in scope, in a job of several ranks.
      StrategyError: This is another thread than the strategy's.
    """
    if current_context() is None:
        require_chosen_strategy(
            call_name, "Call it in strategy.scope(), or in the function of strategy.run"
        )
    group = current_strategy()._replicas
    group.lockstep.check()
    group.lockstep.state.kept_interrupt.raise_pending()
    return group


@final
class _BorrowedErrors:
    """Errors of calls that other threads have made with a session.

    Attributes:
      pending_error: The error of such a call on every rank, until the owning thread raises it.
    """

    def __init__(self) -> None:
        """Begin without an error."""
        self.pending_error: BaseException | None = None


def _make_waiter(session: Session) -> Callable[[], None]:
    """Return a function that waits until all computations of this thread have ended."""
    borrowed, run = session.get_instance(_BorrowedErrors), session.get_instance(CallState).run
    run.carrier_types = (jax.errors.JaxRuntimeError,)

    def wait() -> None:
        try:
            jax.effects_barrier()
        except jax.errors.JaxRuntimeError:  # the result of that computation raises it, too
            dispatch.runtime_tokens.clear()  # or each later computation would fail with it
        error, borrowed.pending_error = borrowed.pending_error, None
        if error is not None and run.depth and run.failure is None:
            run.failure = error

    return wait


@final
class TracedGroup:
    """The ranks that a function was traced for.

    Attributes:
      replicas: The replica group of the strategy.
      size: How many replicas there are.
      rank: The index of this replica.
    """

    def __init__(self, group: ReplicaGroup):
        """Let the ranks of this group be called from the threads of XLA."""
        self.replicas = group
        lockstep = group.lockstep
        self.size, self.rank = lockstep.comm.size, lockstep.comm.rank
        if lockstep.session.await_borrowers is None:
            lockstep.session.await_borrowers = _make_waiter(lockstep.session)

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is the group of the same strategy."""
        return isinstance(other, TracedGroup) and other.replicas is self.replicas

    def __hash__(self) -> int:
        """Return a number that is equal for equal groups."""
        return hash(id(self.replicas))

    def call(self, make: Callable[[], None]) -> None:
        """Make a call from whatever thread XLA runs it in. Collective."""
        lockstep = self.replicas.lockstep
        with lockstep.session.allow_thread():
            try:
                make()
            except BaseException as error:
                if error is lockstep.state.common_error:
                    lockstep.session.get_instance(_BorrowedErrors).pending_error = error
                raise


@final
@dataclass(frozen=True, repr=False)
class TracedCall:
    """One collective of a traced program, without its operands.

    Attributes:
      traced_group: The ranks that make it.
      name: ``all_reduce``, ``all_gather`` or ``broadcast``.
      op: The reduction, of an all-reduce.
      axis: Along which arrays are gathered.
      weight: How many examples this replica stands for, if that is known when it is traced.
      has_traced_weight: The weight is known only when it runs: it is the first operand.
      has_shared_loss: All replicas have one loss in common; see `mpistrat.jax.all_reduce`.
      is_local: It does nothing: the transpose of a call with a shared loss, whose gradient is that
        of the loss itself.
      names: The names of the leaves, which the ranks compare; empty if a leaf has none of its own.
      call_site: The place of the call in the program, for messages.
    """

    traced_group: TracedGroup
    name: str
    op: ReduceOp = ReduceOp.SUM
    axis: int = 0
    weight: float | None = None
    has_traced_weight: bool = False
    has_shared_loss: bool = False
    is_local: bool = False
    names: tuple[str, ...] = ()
    call_site: str = field(default="", compare=False)

    def __repr__(self) -> str:
        """Return what a jaxpr shows."""
        return f"{self.name}({self.op.value})" if self.name == "all_reduce" else self.name

    @property
    def is_weighted(self) -> bool:
        """Whether it is a weighted mean."""
        return self.has_traced_weight or self.weight is not None

    def fill_outputs(self, operands: Sequence[Array], outs: Sequence[Array]) -> None:
        """Make the call, and put its results into `outs`. Collective; in any thread of XLA's."""
        with naming_call_site(self.call_site):
            self.traced_group.call(lambda: self._fill_outputs(operands, outs))

    def _fill_outputs(self, operands: Sequence[Array], outs: Sequence[Array]) -> None:
        group, outputs = self.traced_group.replicas, list(outs)
        if self.name == "all_reduce":
            values, weight = self._split_weight(operands)
            all_reduce_tree(
                group, self.op, self.build_tree(values), weight, self.build_tree(outputs)
            )
        elif self.name == "all_gather":
            for output, rows in zip(outputs, self._gather(operands), strict=True):
                output[...] = rows
        else:
            if self.traced_group.rank == 0:
                for output, value in zip(outputs, operands, strict=True):
                    output[...] = value
            broadcast_state(group, self.build_tree(outputs), self.build_tree(outputs))

    def call_directly(self, operands: Sequence[Any]) -> list[Any]:
        """Make the call in this thread, and return JAX arrays. Collective."""
        group, arrays = self.traced_group.replicas, [as_array(operand) for operand in operands]
        likes = list(operands[int(self.has_traced_weight) :])
        if self.name == "all_reduce":
            values, weight = self._split_weight(arrays)
            tree = self.build_tree(values)
            results = self.list_leaves(all_reduce_tree(group, self.op, tree, weight, None))
        elif self.name == "all_gather":
            results = self._gather(arrays)
        else:
            results = self.list_leaves(broadcast_state(group, self.build_tree(arrays), None))
        return place_results(results, likes)

    def _split_weight(self, operands: Sequence[Array]) -> tuple[list[Array], float | None]:
        if self.has_traced_weight:
            return list(operands[1:]), float(operands[0])
        return list(operands), self.weight

    def _gather(self, arrays: Sequence[Array]) -> list[Array]:
        # The shapes of all ranks have been traced from this rank's, so they have to be equal.
        shapes = f" of equal shapes {[array.shape for array in arrays]}"
        group, tree = self.traced_group.replicas, self.build_tree(arrays)
        return self.list_leaves(gather(group, "all_gather", tree, self.axis, shapes))

    def build_tree(self, leaves: Sequence[Any]) -> Any:
        """Return leaves under their names, by which the ranks compare them."""
        return dict(zip(self.names, leaves, strict=True)) if self.names else list(leaves)

    def list_leaves(self, tree: Any) -> list[Any]:
        """Return the leaves of such a tree, in their order."""
        return [tree[name] for name in self.names] if self.names else tree

    def select_leaves(self, *which: int) -> TracedCall:
        """Return the same call of some of the leaves."""
        return replace(self, names=tuple(self.names[i] for i in which) if self.names else ())

    def append_weight_sum(self, count: int) -> TracedCall:
        """Return the same call, of its first `count` leaves and the sum of the weights."""
        names = (*self.names[:count], "weight, summed up")
        return replace(self, names=names if self.names or not count else ())

    def infer_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the result of an operand."""
        if self.name != "all_gather":
            return shape
        axis = self.axis % len(shape)
        size = shape[axis] * self.traced_group.size
        return (*shape[:axis], size, *shape[axis + 1 :])


jnp = jax.numpy

# JAX orders effects of this type, allows them in loops, and shows their text in errors.
(_io,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects
_Ordered: Any = type(_io)


class _Collective(_Ordered):
    """A call that all ranks make, in the order of the program."""

    def __repr__(self) -> str:
        """Return the text in JAX's errors, which advises how to avoid them."""
        return (
            "a collective of mpistrat, which would be made once more when values are made again; "
            "keep it out of jax.checkpoint (remat), or give that the result as an argument"
        )

    __str__ = __repr__


_EFFECT = _Collective()
_EFFECTS = frozenset([_EFFECT])
_LINEAR = (ReduceOp.SUM, ReduceOp.MEAN)

_collective = Primitive("mpistrat")
_collective.multiple_results = True


def bind(traced_call: TracedCall, *args: Any) -> list[Any]:
    """Make a call, or trace it: one result for each operand but a weight."""
    results: list[Any] = _collective.bind(*args, traced_call=traced_call)
    return results


@_collective.def_impl
def _call_directly(*args: Any, traced_call: TracedCall) -> list[Any]:
    return list(args) if traced_call.is_local else traced_call.call_directly(args)


@_collective.def_effectful_abstract_eval
def _infer_shapes(*args: Any, traced_call: TracedCall) -> tuple[list[Any], Any]:
    values = args[int(traced_call.has_traced_weight) :]
    avals = [jax.core.ShapedArray(traced_call.infer_shape(x.shape), x.dtype) for x in values]
    return avals, frozenset() if traced_call.is_local else _EFFECTS


_ONE_DEVICE = np.empty(1)


def _lower(ctx: Any, *args: Any, traced_call: TracedCall) -> Sequence[Any]:
    if traced_call.is_local:
        return args
    count = len(args) + 1

    def run_call(_: Any, *memory: Any) -> tuple[()]:
        ins, outs = memory[1:count], memory[count + 1 :]  # the first of each is the token
        traced_call.fill_outputs([*map(np.asarray, ins)], [*map(np.asarray, outs)])
        return ()

    platform = ctx.module_context.platforms[0]
    ctx.module_context.add_host_callback(run_call)
    index = np.uint64(len(ctx.module_context.host_callbacks) - 1)
    token = jax.core.ShapedArray((), np.dtype(bool))  # for the callback without dimensions
    types = [
        mlir.ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))
        for aval in ctx.avals_out
    ]
    if platform != "cpu":
        raise NotImplementedError(
            f"{traced_call!r} was traced for {platform}; collectives of mpistrat can be traced for "
            "the CPU only. Call it between two transformed functions, or set JAX_PLATFORMS=cpu."
        )
    axis_context = ctx.module_context.axis_context  # of jit, or of shard_map without an order
    mesh = getattr(axis_context, "mesh", _ONE_DEVICE)
    if max(getattr(axis_context, "num_devices", 1), mesh.size) > 1:
        raise NotImplementedError(
            f"{traced_call!r} was traced for arrays that several devices of this process share. "
            "Call it between two transformed functions, or give these arrays of one device."
        )
    lower = jax.ffi.ffi_lowering(
        "xla_buffer_python_cpu_callback",
        has_side_effect=True,
        result_types=[mlir.token_type(), *types],
    )
    callback_ctx = ctx.replace(avals_in=[token, *ctx.avals_in], avals_out=[token, *ctx.avals_out])
    results: list[Any]
    token_after, *results = lower(callback_ctx, ctx.tokens_in.get(_EFFECT), *args, index=index)
    ctx.set_tokens_out(mlir.TokenSet({_EFFECT: token_after}))
    return results


mlir.register_lowering(_collective, _lower)


def _jvp(primals: Any, tangents: Any, *, traced_call: TracedCall) -> tuple[Any, Any]:
    results = bind(traced_call, *primals)
    weight_count = int(traced_call.has_traced_weight)
    result_tangents = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    value_tangents = tangents[weight_count:]
    moving_indices = [i for i, t in enumerate(value_tangents) if not isinstance(t, ad.Zero)]
    if not moving_indices:
        return results, result_tangents
    if traced_call.name == "all_reduce" and traced_call.op not in _LINEAR:
        raise NotImplementedError(
            f"all_reduce({traced_call.op.value}) has no gradient; SUM and MEAN have. For MAX and "
            "the like it is that of jnp.max of all_gather, or use jax.lax.stop_gradient."
        )
    operand_tangents = [ad.instantiate_zeros(tangents[weight_count + i]) for i in moving_indices]
    moving_call = traced_call.select_leaves(*moving_indices)
    moving_results = bind(moving_call, *primals[:weight_count], *operand_tangents)
    for i, tangent in zip(moving_indices, moving_results, strict=True):
        result_tangents[i] = tangent
    return results, result_tangents


ad.primitive_jvps[_collective] = _jvp


def _transpose(gradients: Any, *args: Any, traced_call: TracedCall) -> list[Any]:
    weight_count = int(traced_call.has_traced_weight)
    linear_indices = [i for i, x in enumerate(args[weight_count:]) if ad.is_undefined_primal(x)]
    result_gradients = [ad.instantiate_zeros(gradients[i]) for i in linear_indices]
    weight = args[0] if traced_call.has_traced_weight else traced_call.weight
    sizes = [args[weight_count + i].aval.shape for i in linear_indices]
    linear_call = traced_call.select_leaves(*linear_indices)
    linear_gradients = _transpose_call(linear_call, weight, result_gradients, sizes)
    operand_gradients: list[Any] = [None] * len(args)
    for i, operand_gradient in zip(linear_indices, linear_gradients, strict=True):
        operand_gradients[weight_count + i] = operand_gradient
    return operand_gradients


ad.primitive_transposes[_collective] = _transpose


def _transpose_call(
    traced_call: TracedCall, weight: Any, gradients: list[Any], shapes: list[tuple[int, ...]]
) -> list[Any]:
    """Return the gradients by the operands, of gradients by the results."""
    if traced_call.is_local:
        return bind(replace(traced_call, is_local=False), *gradients)
    traced_group = traced_call.traced_group
    sum_call = replace(traced_call, name="all_reduce", op=ReduceOp.SUM, axis=0)
    sum_call = replace(sum_call, weight=None, has_traced_weight=False)
    total = replace(sum_call, is_local=traced_call.has_shared_loss)
    if traced_call.name == "all_reduce" and traced_call.op is ReduceOp.MEAN:
        if traced_call.is_weighted:
            return _transpose_weighted_mean(total, weight, gradients)
        if traced_call.has_shared_loss:
            return [gradient / traced_group.size for gradient in bind(total, *gradients)]
        return bind(replace(total, op=ReduceOp.MEAN), *gradients)
    sums = bind(total, *gradients)
    if traced_call.name == "broadcast":
        return sums if traced_group.rank == 0 else [jnp.zeros_like(gradient) for gradient in sums]
    if traced_call.name == "all_gather":
        pairs = zip(sums, shapes, strict=True)
        axis, rank = traced_call.axis, traced_group.rank
        return [_slice_rank(x, axis % len(shape), shape, rank) for x, shape in pairs]
    return sums


def _slice_rank(total: Any, axis: int, shape: tuple[int, ...], rank: int) -> Any:
    return jax.lax.slice_in_dim(total, rank * shape[axis], (rank + 1) * shape[axis], axis=axis)


def _transpose_weighted_mean(total: TracedCall, weight: Any, gradients: list[Any]) -> list[Any]:
    local_weight = jnp.asarray(weight, jnp.result_type(float))
    global_call = replace(total, has_shared_loss=False, is_local=False)
    wide_gradients = [
        gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32)) for gradient in gradients
    ]
    if total.is_local:
        (weights,) = bind(global_call.append_weight_sum(0), local_weight)
        sums = bind(total, *wide_gradients)
    else:
        *sums, weights = bind(
            global_call.append_weight_sum(len(wide_gradients)), *wide_gradients, local_weight
        )
    # A value of weight 0 was never read, so its gradient is 0; if all weights are 0, all gradients
    # are NaN.
    share = jnp.where(
        local_weight == 0, jnp.where(weights == 0, jnp.nan, 0), local_weight / weights
    )
    pairs = zip(sums, gradients, strict=True)
    return [
        jnp.where(share == 0, 0, gradient * share.astype(gradient.dtype)).astype(like.dtype)
        for gradient, like in pairs
    ]


def _refuse_in_predicates() -> None:
    """Raise in the predicate of a loop of which `vmap` has made a batch.

    Where a predicate has an ordered effect, JAX continues with elements of the batch that have
    ended.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code.co_name == "_while_loop_batching_rule":
            rule_locals = frame.f_locals  # the predicate is made a batch after the body
            if rule_locals.get("pred_bat") and "body_jaxpr_batched" in rule_locals:
                raise NotImplementedError(
                    "a collective in the predicate of a while_loop under vmap: JAX would continue "
                    "with elements of the batch that have ended. Make it in the body of the loop, "
                    "and keep its result in the carry."
                )
        frame = frame.f_back


def _batch(args: Any, dims: Any, *, traced_call: TracedCall) -> tuple[list[Any], list[Any]]:
    _refuse_in_predicates()
    weight_count = int(traced_call.has_traced_weight)
    if weight_count and dims[0] is not None:
        return _batch_weights(args, dims, traced_call)
    values, batch_axes = list(args[weight_count:]), list(dims[weight_count:])
    if traced_call.name == "all_gather":  # the batch goes where it changes no number of the axis
        end = -1 if traced_call.axis >= 0 else 0
        for i, batch_axis in enumerate(batch_axes):
            if batch_axis is not None:
                values[i] = jnp.moveaxis(values[i], batch_axis, end)
                batch_axes[i] = end % values[i].ndim
    return bind(traced_call, *args[:weight_count], *values), batch_axes


def _batch_weights(args: Any, dims: Any, traced_call: TracedCall) -> tuple[list[Any], list[Any]]:
    """Reduce with a weight for each example of a batch, in one call."""
    weights = jnp.moveaxis(args[0], dims[0], 0)
    weights = weights.astype(jnp.result_type(float))
    terms = []
    for value, batch_axis in zip(args[1:], dims[1:], strict=True):
        batch = value[None] if batch_axis is None else jnp.moveaxis(value, batch_axis, 0)
        wide_batch = batch.astype(jnp.promote_types(batch.dtype, jnp.float32))
        row_weights = weights.reshape(-1, *[1] * (wide_batch.ndim - 1)).astype(wide_batch.dtype)
        # Rows of weight 0 are never read.
        terms.append(jnp.where(row_weights == 0, 0, row_weights * wide_batch))
    total = replace(traced_call, op=ReduceOp.SUM, has_traced_weight=False)
    total = total.append_weight_sum(len(terms))
    *sums, counts = bind(total, *terms, jax.lax.stop_gradient(weights))
    means = [
        (
            total_value
            / counts.reshape(-1, *[1] * (total_value.ndim - 1)).astype(total_value.dtype)
        ).astype(value.dtype)
        for total_value, value in zip(sums, args[1:], strict=True)
    ]
    return means, [0] * len(means)


batching.primitive_batchers[_collective] = _batch
