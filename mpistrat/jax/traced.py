"""Collectives as operations of JAX: how they are lowered, differentiated, transposed and batched.

An operation has an ordered effect, so XLA neither drops it nor makes it out of turn. The callback
reads its operands and writes its results where XLA has them. All operations are linear, except for
reductions that are not sums, so gradients follow from their transposes, in forward mode, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.ffi
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpistrat.jax.calls import TracedCall
from mpistrat.kernels.ops import ReduceOp

__all__ = ["bind"]

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
