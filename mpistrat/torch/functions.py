"""Collective calls that gradients pass, and batch normalisation over the rows of all ranks."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mpistrat import pytree
from mpistrat.arrays import label
from mpistrat.errors import ContextError, LeafTypeError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.strategy.all_reduce import all_reduce_tree
from mpistrat.strategy.context_stack import enter_replica
from mpistrat.strategy.reductions import gather
from mpistrat.strategy.strategies import resolve_strategy
from mpistrat.torch.process_group.channel import record_call

__all__ = ["SyncBatchNorm", "all_gather", "all_reduce"]


def _checked(
    call: str, strategy: Any, value: Any, stage: str | None
) -> tuple[list[Any], Any, list[torch.device]]:
    """Return the leaves, their structure and devices; raise on all ranks unless they are tensors.

    With `stage`, leaves of other devices are copied to the CPU, and gradients pass the copies.
    """
    with enter_replica(strategy, call), strategy._replicas.lockstep.preparing(call):
        leaves, structure = pytree.flatten(value)
        for leaf, path in zip(leaves, pytree.path_names(structure), strict=True):
            if not isinstance(leaf, torch.Tensor):
                raise LeafTypeError(
                    f"{call}: {label(path)} is {leaf!r:.60}; expected a tensor. Numbers and arrays "
                    "have no gradient: strategy.all_reduce takes them."
                )
        if stage not in (None, "host"):
            raise ValueError(f"{call}: stage={stage!r}; expected 'host', or None.")
        host_leaves = [leaf.cpu() for leaf in leaves] if stage else leaves
    return host_leaves, structure, [leaf.device for leaf in leaves]


def _restore_devices(structure: Any, results: Any, devices: list[torch.device]) -> Any:
    """Return a tree of results where the leaves were."""
    pairs = zip(results, devices, strict=True)
    return pytree.unflatten(structure, [result.to(device) for result, device in pairs])


def all_reduce(
    reduce_op: ReduceOp | str,
    value: Any,
    strategy: Any = None,
    *,
    weight: float | None = None,
    stage: str | None = None,
) -> Any:
    """Reduce the tensors of all ranks; gradients come back through it.

    The gradient by the value of a rank is that of the sum of all ranks' losses, as of
    `mpistrat.vjp.all_reduce`: of SUM the sum of the gradients of all ranks, of MEAN their mean, and
    with weights their sum times ``weight / sum of weights``.

    Collective: all ranks call it, and call ``backward`` as often, in the thread of the strategy.

    Args:
      reduce_op: ``"SUM"`` or ``"MEAN"``.
      value: Tree of tensors of floating point, which may require grad.
      strategy: The strategy; None for the current one.
      weight: For MEAN, how many examples the tensors of this rank stand for; a constant.
      stage: ``"host"`` takes tensors of other devices too: they are copied to the memory of the
        host, and results back. None: these are errors.

    Returns:
      The same tree of fresh tensors, with the same bits on every rank.

    Raises:
      TypeError: `strategy` is not one.
      ValueError: Another operation, or `stage`.
      LeafTypeError: A leaf is not a tensor that ranks can read.
      ContextError: No strategy is in scope, in a job of several ranks.
      LockstepError: The calls differ between ranks.

    Cost: an all-reduce, and one more of the same size when gradients come back.
    Like: ``torch.distributed.nn.functional.all_reduce``.

    Example:
      >>> import mpistrat as ms
      >>> x = torch.ones(2, requires_grad=True)
      >>> all_reduce("SUM", x * 3, ms.OneDeviceStrategy("cpu")).sum().backward()
      >>> x.grad
      tensor([3., 3.])
    """
    strategy = resolve_strategy(strategy, "all_reduce")
    leaves, structure, devices = _checked("all_reduce", strategy, value, stage)
    lockstep = strategy._replicas.lockstep
    with enter_replica(strategy, "all_reduce"), lockstep.preparing("all_reduce"):
        op = ReduceOp.parse(reduce_op)
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ValueError(f"mpistrat.torch.all_reduce is for SUM and MEAN, not for {op.value}.")
    return _restore_devices(structure, _AllReduce.apply(strategy, op, weight, *leaves), devices)


class _AllReduce(torch.autograd.Function):
    """An all-reduce of tensors as a node of the graph."""

    @staticmethod
    def forward(ctx: Any, strategy: Any, op: ReduceOp, weight: Any, *leaves: Any) -> Any:
        """Reduce the tensors."""
        ctx.call_options = strategy, op, weight
        return tuple(_reduced(strategy, op, list(leaves), weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Reduce the gradients."""
        strategy, op, weight = ctx.call_options
        if weight is None:
            return None, None, None, *_reduced(strategy, op, list(gradients))
        operands = [*map(_widen, gradients), torch.tensor(float(weight), dtype=torch.float64)]
        *sums, total = _reduced(strategy, ReduceOp.SUM, operands)
        share = float(weight) / float(total) if float(total) else float("nan")
        # Whatever the others bring: a value of weight 0 was never read.
        local_gradients = [s * share if weight else torch.zeros_like(s) for s in sums]
        return (
            None,
            None,
            None,
            *[o.to(g.dtype) for o, g in zip(local_gradients, gradients, strict=True)],
        )


def _widen(tensor: Any) -> Any:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _reduced(strategy: Any, op: ReduceOp, leaves: list[Any], weight: Any = None) -> Any:
    strategy._replicas.lockstep.check()
    with enter_replica(strategy, "all_reduce"), record_call("all_reduce"):
        # Gradients of gradients are an error by `once_differentiable`, not here.
        return all_reduce_tree(
            strategy._replicas, op, [leaf.detach() for leaf in leaves], weight, None
        )


def all_gather(value: Any, axis: int = 0, strategy: Any = None, *, stage: str | None = None) -> Any:
    """Concatenate the tensors of all ranks along an axis; gradients come back through it.

    The gradient by the value of a rank is that of the sum of all ranks' losses: the sum of the
    gradients of all ranks, and of that the part where the value stands.

    Collective: all ranks call it, and call ``backward`` as often, in the thread of the strategy.

    Args:
      value: Tree of tensors, which may require grad; sizes along `axis` may differ, and be 0.
      axis: Which axis; counted from the end if negative.
      strategy: The strategy; None for the current one.
      stage: As of `all_reduce`.

    Returns:
      The same tree of fresh tensors, in the order of the ranks.

    Raises:
      TypeError: `strategy` is not one.
      LeafTypeError: A leaf is not a tensor that ranks can read.
      ValueError: Another `stage`.
      AxisError: A leaf has no such axis.
      ContextError: No strategy is in scope, in a job of several ranks.
      LockstepError: The calls differ between ranks.

    Cost: an all-gather, and an all-reduce of the size of the result when gradients come back.
    Like: ``torch.distributed.nn.functional.all_gather``.

    Example:
      >>> import mpistrat as ms
      >>> all_gather(torch.ones(2), strategy=ms.OneDeviceStrategy("cpu"))
      tensor([1., 1.])
    """
    strategy = resolve_strategy(strategy, "all_gather")
    leaves, structure, devices = _checked("all_gather", strategy, value, stage)
    return _restore_devices(structure, _AllGather.apply(strategy, axis, *leaves), devices)


class _AllGather(torch.autograd.Function):
    """An all-gather of tensors as a node of the graph."""

    @staticmethod
    def forward(ctx: Any, strategy: Any, axis: int, *leaves: Any) -> Any:
        """Concatenate the tensors."""
        tensors = [leaf.detach() for leaf in leaves]
        group = strategy._replicas
        group.lockstep.check()
        with enter_replica(strategy, "all_gather"):
            gathered = gather(group, "all_gather", tensors, axis)
            sizes = torch.tensor([[tensor.shape[axis] for tensor in tensors]])
            starts = gather(group, "all_gather, sizes", sizes, 0)[: strategy.rank].sum(0)
        ctx.call_options = strategy, axis, starts.tolist(), sizes[0].tolist()
        return tuple(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Reduce the gradients, and take this rank's part."""
        strategy, axis, starts, sizes = ctx.call_options
        sums = _reduced(strategy, ReduceOp.SUM, list(gradients))
        pairs = zip(sums, starts, sizes, strict=True)
        return (
            None,
            None,
            *[gradient_sum.narrow(axis, at, size) for gradient_sum, at, size in pairs],
        )


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Batch normalisation by mean and variance over the rows of all ranks.

    Each row counts once, however the rows are spread: a rank may have one, or none. In a model that
    was replicated the gradients are those of one process with all rows. A rank without rows runs a
    model that has such a layer, on no rows, as the others wait for it there.

    Collective: in training all ranks call it, and its backward pass. Arguments and attributes are
    those of ``torch.nn.BatchNorm2d``; inputs have 2 dimensions or more. `replicate` tells it the
    strategy.

    Cost: in training an all-reduce of two numbers per channel, and one in the backward pass.
    Like: ``torch.nn.SyncBatchNorm``.

    Example:
      >>> tuple(SyncBatchNorm(3)(torch.randn(5, 3)).shape)
      (5, 3)
    """

    _strategy: Any = None

    @classmethod
    def convert(cls, model: Any) -> Any:
        """Return a model with these in place of its layers of batch normalisation.

        Args:
          model: The model; its layers are replaced in place, before `replicate`.
        """
        converted = model
        kind = torch.nn.modules.batchnorm._BatchNorm
        if isinstance(model, kind) and not isinstance(model, cls):
            converted = cls(model.num_features, model.eps, model.momentum, False, False)
            converted.affine, converted.track_running_stats = (
                model.affine,
                model.track_running_stats,
            )
            for name, parameter in model.named_parameters(recurse=False):
                converted.register_parameter(name, parameter)
            for name, buffer in model.named_buffers(recurse=False):
                converted.register_buffer(name, buffer)
            converted.training = model.training
        for name, child in model.named_children():
            setattr(converted, name, cls.convert(child))
        return converted

    def of_ranks(self, strategy: Any) -> None:
        """Normalise over the ranks of a strategy from now on; see `replicate`.

        Args:
          strategy: The strategy.
        """
        self._strategy = weakref.ref(strategy)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: not the strategy."""
        return {key: value for key, value in self.__dict__.items() if key != "_strategy"}

    def _check_input_dim(self, input: Any) -> None:
        if input.ndim < 2:
            raise ValueError(f"SyncBatchNorm wants 2 dimensions or more, got {tuple(input.shape)}.")

    def forward(self, input: Any) -> Any:
        """Return the rows normalised.

        Args:
          input: Of shape (rows, channels, ...).

        Raises:
          ContextError: In training, in a group of several ranks: `replicate` was not called.
        """
        strategy = None if self._strategy is None else self._strategy()
        if strategy is None and self.training and _in_group():
            raise ContextError(
                "SyncBatchNorm: this model was not replicated, so the statistics would be those of "
                "each rank's rows. Use mpistrat.torch.replicate(model), not "
                "DistributedDataParallel; or, if that is meant, torch.nn.BatchNorm2d."
            )
        if strategy is None or not self.training or strategy.num_replicas_in_sync == 1:
            return super().forward(input)
        self._check_input_dim(input)
        weight, bias = self.weight, self.bias
        out, mean, variance, count = _Normalised.apply(input, weight, bias, self.eps, strategy)
        if self.track_running_stats and self.running_mean is not None:
            self._remember(mean, variance * (count / (count - 1)))
        return out

    def _remember(self, mean: Any, variance: Any) -> None:
        self.num_batches_tracked += 1
        rate = self.momentum
        rate = 1.0 / float(self.num_batches_tracked) if rate is None else rate
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
            self.running_var.lerp_(variance.to(self.running_var.dtype), rate)


def _in_group() -> bool:
    group = torch.distributed
    return bool(group.is_available() and group.is_initialized() and group.get_world_size() > 1)


class _Normalised(torch.autograd.Function):
    """Batch normalisation over all ranks as a node of the graph."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float, strategy: Any) -> Any:
        """Normalise by mean and variance of all rows."""
        axes = [0, *range(2, x.ndim)]
        local_count = x.numel() // x.shape[1]
        double_x = x.double()
        local_sums = [
            torch.tensor(float(local_count)).double(),
            double_x.sum(axes),
            (double_x * double_x).sum(axes),
        ]
        count, total, squares = _reduced(strategy, ReduceOp.SUM, local_sums)
        if count <= 1:
            raise ValueError("SyncBatchNorm wants more than 1 value per channel in all ranks.")
        mean = total / count
        variance = (squares / count - mean * mean).clamp_min(0)
        scale = (variance + eps).rsqrt()
        shape = [1, -1, *[1] * (x.ndim - 2)]
        normal = ((double_x - mean.view(shape)) * scale.view(shape)).to(x.dtype)
        ctx.save_for_backward(normal, weight, scale)
        ctx.call_options = strategy, axes, shape, local_count, float(count)
        out = normal if weight is None else normal * weight.view(shape) + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return out.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        """Return gradients whose mean over the rows of all ranks is that of one process."""
        normal, weight, scale = ctx.saved_tensors
        strategy, axes, shape, local_count, count = ctx.call_options
        double_gradient = gradient.double()
        by_bias, by_weight = double_gradient.sum(axes), (double_gradient * normal).sum(axes)
        # Each rank's loss is a mean over its own rows; all together count by their rows.
        scaled_sums = [by_bias * (local_count / count), by_weight * (local_count / count)]
        bias, weights = _reduced(strategy, ReduceOp.SUM, scaled_sums)
        correction = (bias.view(shape) + normal * weights.view(shape)) / max(local_count, 1)
        input_gradient = (double_gradient - correction) * scale.view(shape)
        if weight is None:
            return input_gradient.to(gradient.dtype), None, None, None, None
        input_gradient = (input_gradient * weight.view(shape)).to(gradient.dtype)
        return input_gradient, by_weight.to(weight.dtype), by_bias.to(weight.dtype), None, None
