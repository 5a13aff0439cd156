"""Collectives as operations of JAX: how they are lowered, differentiated, transposed and batched.

An operation has an ordered effect, so XLA neither drops it nor makes it out of turn. The callback
reads its operands and writes its results where XLA has them. All operations are linear, except for
reductions that are not sums, so gradients follow from their transposes, in forward mode, too.

What a traced collective is, and how it is made when XLA comes to it.

XLA calls Python from the thread that called the jitted function, or from one of its own, perhaps
after that function has returned, if its arguments were still being computed. So the session is lent
to that thread; and the owning thread, before each call of its own, waits for all that it has
dispatched. Thus the calls of a rank have the order of its program, whatever thread makes them.
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
from mpistrat.strategy.all_reduce import in_replica
from mpistrat.strategy.context_stack import beside, current, refuse_unchosen
from mpistrat.strategy.reductions import gather
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.strategy.shared_state import broadcast_state
from mpistrat.strategy.strategies import current_strategy

__all__ = [
    "Site",
    "TracedCall",
    "bind",
    "group_here",
]


# Places in messages are those of the program: a backward pass is made by JAX.
add_library_directory(str(Path(jax.__file__).parent / "_src"))

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
    borrowed, run = session.get_instance(_Borrowed), session.get_instance(CallState).run
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
        if lockstep.session.await_borrowers is None:
            lockstep.session.await_borrowers = _awaiting(lockstep.session)

    def __eq__(self, other: object) -> bool:
        """Tell whether it is that of the same strategy."""
        return isinstance(other, Site) and other.replicas is self.replicas

    def __hash__(self) -> int:
        """Return a number that is equal for equal sites."""
        return hash(id(self.replicas))

    def call(self, make: Callable[[], None]) -> None:
        """Make a call from whatever thread XLA runs it in. Collective."""
        lockstep = self.replicas.lockstep
        with lockstep.session.allow_thread():
            try:
                make()
            except BaseException as error:
                if error is lockstep.state.raised:
                    lockstep.session.get_instance(_Borrowed).pending_error = error
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
        with naming_call_site(self.place):
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


jnp = jax.numpy

# JAX orders effects of this type, and lets them be in loops; it shows what they say of themselves.
(_io,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects
_Ordered: Any = type(_io)


class _Collective(_Ordered):
    """A call that all ranks make, in the order of the program."""

    def __repr__(self) -> str:
        """Return what JAX's errors show, which is where to say what helps."""
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


def bind(call: TracedCall, *args: Any) -> list[Any]:
    """Make a call, or trace it: one result for each operand but a weight."""
    results: list[Any] = _collective.bind(*args, call=call)
    return results


@_collective.def_impl
def _call_directly(*args: Any, call: TracedCall) -> list[Any]:
    return list(args) if call.local else call.call_directly(args)


@_collective.def_effectful_abstract_eval
def _shapes(*args: Any, call: TracedCall) -> tuple[list[Any], Any]:
    values = args[int(call.weighed) :]
    avals = [jax.core.ShapedArray(call.shape(x.shape), x.dtype) for x in values]
    return avals, frozenset() if call.local else _EFFECTS


_ONE_DEVICE = np.empty(1)


def _lowered(ctx: Any, *args: Any, call: TracedCall) -> Sequence[Any]:
    if call.local:
        return args
    count = len(args) + 1

    def run_call(_: Any, *memory: Any) -> tuple[()]:
        ins, outs = memory[1:count], memory[count + 1 :]  # the first of each is the token
        call.fill_outputs([*map(np.asarray, ins)], [*map(np.asarray, outs)])
        return ()

    platform = ctx.module_context.platforms[0]
    ctx.module_context.add_host_callback(run_call)
    index = np.uint64(len(ctx.module_context.host_callbacks) - 1)
    # The callback takes a token as an operand without dimensions.
    token = jax.core.ShapedArray((), np.dtype(bool))
    types = [
        mlir.ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))
        for aval in ctx.avals_out
    ]
    if platform != "cpu":
        raise NotImplementedError(
            f"{call!r} was traced for {platform}; collectives of mpistrat can be traced for the "
            "CPU only. Call it between two transformed functions, or set JAX_PLATFORMS=cpu."
        )
    context = ctx.module_context.axis_context  # of jit, or of shard_map, whose parts have no order
    if max(getattr(context, "num_devices", 1), getattr(context, "mesh", _ONE_DEVICE).size) > 1:
        raise NotImplementedError(
            f"{call!r} was traced for arrays that several devices of this process share. Call it "
            "between two transformed functions, or give these arrays of one device."
        )
    lower = jax.ffi.ffi_lowering(
        "xla_buffer_python_cpu_callback",
        has_side_effect=True,
        result_types=[mlir.token_type(), *types],
    )
    callback_ctx = ctx.replace(avals_in=[token, *ctx.avals_in], avals_out=[token, *ctx.avals_out])
    results: list[Any]
    done, *results = lower(callback_ctx, ctx.tokens_in.get(_EFFECT), *args, index=index)
    ctx.set_tokens_out(mlir.TokenSet({_EFFECT: done}))
    return results


mlir.register_lowering(_collective, _lowered)


def _jvp(primals: Any, tangents: Any, *, call: TracedCall) -> tuple[Any, Any]:
    results = bind(call, *primals)
    first = int(call.weighed)
    result_tangents = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    moving = [i for i, t in enumerate(tangents[first:]) if not isinstance(t, ad.Zero)]
    if not moving:
        return results, result_tangents
    if call.name == "all_reduce" and call.op not in _LINEAR:
        raise NotImplementedError(
            f"all_reduce({call.op.value}) has no gradient; SUM and MEAN have. For MAX and the like "
            "it is that of jnp.max of all_gather, or use jax.lax.stop_gradient."
        )
    operand_tangents = [ad.instantiate_zeros(tangents[first + i]) for i in moving]
    for i, tangent in zip(
        moving, bind(call.select_leaves(*moving), *primals[:first], *operand_tangents), strict=True
    ):
        result_tangents[i] = tangent
    return results, result_tangents


ad.primitive_jvps[_collective] = _jvp


def _transposed(gradients: Any, *args: Any, call: TracedCall) -> list[Any]:
    first = int(call.weighed)
    linear = [i for i, x in enumerate(args[first:]) if ad.is_undefined_primal(x)]
    result_gradients = [ad.instantiate_zeros(gradients[i]) for i in linear]
    weight = args[0] if call.weighed else call.weight
    sizes = [args[first + i].aval.shape for i in linear]
    call = call.select_leaves(*linear)
    operand_gradients: list[Any] = [None] * len(args)
    for i, operand_gradient in zip(
        linear, _transpose_call(call, weight, result_gradients, sizes), strict=True
    ):
        operand_gradients[first + i] = operand_gradient
    return operand_gradients


ad.primitive_transposes[_collective] = _transposed


def _transpose_call(
    call: TracedCall, weight: Any, gradients: list[Any], shapes: list[tuple[int, ...]]
) -> list[Any]:
    """Return the gradients by the operands, of gradients by the results."""
    if call.local:
        return bind(replace(call, local=False), *gradients)
    site = call.site
    sum_call = replace(call, name="all_reduce", op=ReduceOp.SUM, axis=0, weight=None, weighed=False)
    total = replace(sum_call, local=call.shared)
    if call.name == "all_reduce" and call.op is ReduceOp.MEAN:
        if call.weighted:
            return _transpose_weighted_mean(total, weight, gradients)
        if call.shared:
            return [gradient / site.size for gradient in bind(total, *gradients)]
        return bind(replace(total, op=ReduceOp.MEAN), *gradients)
    sums = bind(total, *gradients)
    if call.name == "broadcast":
        return sums if site.rank == 0 else [jnp.zeros_like(gradient) for gradient in sums]
    if call.name == "all_gather":
        pairs = zip(sums, shapes, strict=True)
        return [
            _part(gradient, call.axis % len(shape), shape, site.rank) for gradient, shape in pairs
        ]
    return sums


def _part(total: Any, axis: int, shape: tuple[int, ...], rank: int) -> Any:
    return jax.lax.slice_in_dim(total, rank * shape[axis], (rank + 1) * shape[axis], axis=axis)


def _transpose_weighted_mean(total: TracedCall, weight: Any, gradients: list[Any]) -> list[Any]:
    local_weight = jnp.asarray(weight, jnp.result_type(float))
    global_call = replace(total, shared=False, local=False)
    wide_gradients = [
        gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32)) for gradient in gradients
    ]
    if total.local:
        (weights,) = bind(global_call.append_weight_sum(0), local_weight)
        sums = bind(total, *wide_gradients)
    else:
        *sums, weights = bind(
            global_call.append_weight_sum(len(wide_gradients)), *wide_gradients, local_weight
        )
    # A value of weight 0 was never read, whatever the others bring; without any weight all are NaN.
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


def _batched(args: Any, dims: Any, *, call: TracedCall) -> tuple[list[Any], list[Any]]:
    _refuse_in_predicates()
    first = int(call.weighed)
    if first and dims[0] is not None:
        return _batched_weights(args, dims, call)
    values, places = list(args[first:]), list(dims[first:])
    if call.name == "all_gather":  # where it is counted from, the axis stays what it is
        end = -1 if call.axis >= 0 else 0
        for i, place in enumerate(places):
            if place is not None:
                values[i] = jnp.moveaxis(values[i], place, end)
                places[i] = end % values[i].ndim
    return bind(call, *args[:first], *values), places


def _batched_weights(args: Any, dims: Any, call: TracedCall) -> tuple[list[Any], list[Any]]:
    """Reduce with a weight for each example of a batch, in one call."""
    weights = jnp.moveaxis(args[0], dims[0], 0)
    weights = weights.astype(jnp.result_type(float))
    terms = []
    for value, place in zip(args[1:], dims[1:], strict=True):
        batch = value[None] if place is None else jnp.moveaxis(value, place, 0)
        wide_batch = batch.astype(jnp.promote_types(batch.dtype, jnp.float32))
        row_weights = weights.reshape(-1, *[1] * (wide_batch.ndim - 1)).astype(wide_batch.dtype)
        # Rows of weight 0 are never read.
        terms.append(jnp.where(row_weights == 0, 0, row_weights * wide_batch))
    total = replace(call, op=ReduceOp.SUM, weighed=False)
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


batching.primitive_batchers[_collective] = _batched
