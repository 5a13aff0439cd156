"""Collective calls that gradients pass, and batch normalisation over the rows of all ranks."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from mpistrat import pytree
from mpistrat.arrays import label
from mpistrat.errors import LeafTypeError
from mpistrat.kernels.ops import ReduceOp
from mpistrat.strategy.all_reduce import all_reduce_tree
from mpistrat.strategy.context_stack import enter_replica
from mpistrat.strategy.reductions import gather
from mpistrat.strategy.strategies import resolve_strategy
from mpistrat.strategy.strategy import Strategy
from mpistrat.torch.process_group.channel import record_call

__all__ = ["SyncBatchNorm", "all_gather", "all_reduce"]


def _flatten_tensors(
    call: str, strategy: Strategy, value: Any, stage: str | None
) -> tuple[list[Any], Any, list[torch.device]]:
    """Return the leaves, their structure and devices; raise on all ranks unless all are tensors.

    With `stage`, leaves of other devices are copied to the CPU, and gradients pass the copies.
    """
    with enter_replica(strategy, call), strategy._replicas.lockstep.validating_collectively(call):
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
    """Return a tree of the results, each on the device of its leaf."""
    pairs = zip(results, devices, strict=True)
    return pytree.unflatten(structure, [result.to(device) for result, device in pairs])


def all_reduce(
    reduce_op: ReduceOp | str,
    value: Any,
    strategy: Strategy | None = None,
    *,
    weight: float | None = None,
    stage: str | None = None,
) -> Any:
    """Reduce the tensors of all ranks; gradients come back through it.

    The gradient by the value of a rank is the gradient of the sum of all ranks' losses, as in
    `mpistrat.vjp.all_reduce`: the sum of the gradients of all ranks for SUM, their mean for MEAN,
    and their sum times ``weight / sum of weights`` with weights.

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
      ValueError: `reduce_op` is another operation, or `stage` something else.
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
    leaves, structure, devices = _flatten_tensors("all_reduce", strategy, value, stage)
    lockstep = strategy._replicas.lockstep
    with enter_replica(strategy, "all_reduce"), lockstep.validating_collectively("all_reduce"):
        op = ReduceOp.parse(reduce_op)
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ValueError(f"mpistrat.torch.all_reduce is for SUM and MEAN, not for {op.value}.")
    return _restore_devices(
        structure, _ReduceOverRanks.apply(strategy, op, weight, *leaves), devices
    )


class _ReduceOverRanks(torch.autograd.Function):
    """An all-reduce of tensors as a node of the graph."""

    @staticmethod
    def forward(
        ctx: Any, strategy: Strategy, op: ReduceOp, weight: float | None, *leaves: torch.Tensor
    ) -> Any:
        """Reduce the tensors."""
        ctx.call_options = strategy, op, weight
        return tuple(_reduce_leaves(strategy, op, list(leaves), weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Reduce the gradients."""
        strategy, op, weight = ctx.call_options
        if weight is None:
            return None, None, None, *_reduce_leaves(strategy, op, list(gradients))
        operands = [*map(_widen, gradients), torch.tensor(float(weight), dtype=torch.float64)]
        *sums, total = _reduce_leaves(strategy, ReduceOp.SUM, operands)
        weight_share = float(weight) / float(total) if float(total) else float("nan")
        # A value of weight 0 was not read, so its gradient is 0, even if the sum is not finite.
        local_gradients = [s * weight_share if weight else torch.zeros_like(s) for s in sums]
        return (
            None,
            None,
            None,
            *[o.to(g.dtype) for o, g in zip(local_gradients, gradients, strict=True)],
        )


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _reduce_leaves(
    strategy: Strategy, op: ReduceOp, leaves: list[Any], weight: float | None = None
) -> Any:
    strategy._replicas.lockstep.check()
    with enter_replica(strategy, "all_reduce"), record_call("all_reduce"):
        # Gradients of gradients are an error by `once_differentiable`, not here.
        return all_reduce_tree(
            strategy._replicas, op, [leaf.detach() for leaf in leaves], weight, None
        )


def all_gather(
    value: Any, axis: int = 0, strategy: Strategy | None = None, *, stage: str | None = None
) -> Any:
    """Concatenate the tensors of all ranks along an axis; gradients come back through it.

    The gradient by the value of a rank is the gradient of the sum of all ranks' losses: the sum of
    the gradients of all ranks, at the positions of the value in the result.

    Collective: all ranks call it, and call ``backward`` as often, in the thread of the strategy.

    Args:
      value: Tree of tensors, which may require grad; sizes along `axis` may differ, and be 0.
      axis: Which axis; counted from the end if negative.
      strategy: The strategy; None for the current one.
      stage: As in `all_reduce`.

    Returns:
      The same tree of fresh tensors, in the order of the ranks.

    Raises:
      TypeError: `strategy` is not one.
      LeafTypeError: A leaf is not a tensor that ranks can read.
      ValueError: `stage` is something else.
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
    leaves, structure, devices = _flatten_tensors("all_gather", strategy, value, stage)
    return _restore_devices(structure, _GatherOverRanks.apply(strategy, axis, *leaves), devices)


class _GatherOverRanks(torch.autograd.Function):
    """An all-gather of tensors as a node of the graph."""

    @staticmethod
    def forward(ctx: Any, strategy: Strategy, axis: int, *leaves: torch.Tensor) -> Any:
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
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Reduce the gradients, and return the part of this rank's value."""
        strategy, axis, starts, sizes = ctx.call_options
        sums = _reduce_leaves(strategy, ReduceOp.SUM, list(gradients))
        pairs = zip(sums, starts, sizes, strict=True)
        return (
            None,
            None,
            *[gradient_sum.narrow(axis, at, size) for gradient_sum, at, size in pairs],
        )


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """Batch normalisation by mean and variance over the rows of all ranks.

    Each row counts once, however the rows are spread: a rank may have one row, or none. In a
    replicated model the gradients are those of one process with all rows. A rank without rows runs
    a model that has such a layer, on no rows, as the others wait for it there.

    In ``DistributedDataParallel``, ``fully_shard`` or alone, in a process group of several ranks,
    the sums go through that group, on the CPU too. These average gradients over ranks and not over
    rows, so there the gradients are those of one process only if all ranks have equally many rows.

    Collective: in training all ranks call it, and its backward pass. Arguments and attributes are
    those of ``torch.nn.BatchNorm2d``; inputs have 2 dimensions or more. `replicate` gives it the
    strategy.

    Cost: in training an all-reduce of two numbers per channel, and one in the backward pass.
    Like: ``torch.nn.SyncBatchNorm``.

    Example:
      >>> tuple(SyncBatchNorm(3)(torch.randn(5, 3)).shape)
      (5, 3)
    """

    process_group: Any = None  # None for all ranks; not used in a replicated model
    _strategy_ref: Any = None

    @classmethod
    def convert(cls, model: torch.nn.Module, process_group: Any = None) -> Any:
        """Return a model with these layers in place of its layers of batch normalisation.

        Args:
          model: The model; its layers are replaced in place, before `replicate` or
            ``DistributedDataParallel``.
          process_group: The ranks that ``DistributedDataParallel`` has; None for all.
        """
        converted = model
        batch_norm_class = torch.nn.modules.batchnorm._BatchNorm
        if isinstance(model, batch_norm_class) and not isinstance(model, cls):
            converted = cls(model.num_features, model.eps, model.momentum, False, False)
            converted.affine, converted.track_running_stats = (
                model.affine,
                model.track_running_stats,
            )
            for name, parameter in model.named_parameters(recurse=False):
                converted.register_parameter(name, parameter)
            for name, buffer in model.named_buffers(recurse=False):
                converted.register_buffer(name, buffer)
            converted.training, converted.process_group = model.training, process_group
        for name, child in model.named_children():
            setattr(converted, name, cls.convert(child, process_group))
        return converted

    def _use_strategy(self, strategy: Strategy) -> None:
        """Normalise over the ranks of a strategy from now on; see `replicate`.

        Args:
          strategy: The strategy.
        """
        self._strategy_ref = weakref.ref(strategy)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which has no strategy."""
        return {key: value for key, value in self.__dict__.items() if key != "_strategy_ref"}

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"SyncBatchNorm wants 2 dimensions or more, got {tuple(input.shape)}.")

    def forward(self, input: torch.Tensor) -> Any:
        """Return the rows normalised.

        Args:
          input: Of shape (rows, channels, ...).

        Raises:
          ValueError: There is at most one value for each channel; on every rank.
        """
        sum_over_ranks = self._choose_sum() if self.training else None
        if sum_over_ranks is None:
            return super().forward(input)
        self._check_input_dim(input)
        weight, bias = self.weight, self.bias
        output, mean, variance, count = _NormalizeOverRanks.apply(
            input, weight, bias, self.eps, sum_over_ranks
        )
        if self.track_running_stats and self.running_mean is not None:
            self._update_running_statistics(mean, variance * (count / (count - 1)))
        return output

    def _choose_sum(self) -> _SumOverRanks | None:
        """Return how sums over the ranks are made; None in a job of one."""
        strategy = None if self._strategy_ref is None else self._strategy_ref()
        if strategy is not None:
            is_alone = strategy.num_replicas_in_sync == 1
            return None if is_alone else _SumOverRanks(strategy, None)
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return None
        is_alone = distributed.get_world_size(self.process_group) == 1
        return None if is_alone else _SumOverRanks(None, self.process_group)

    def _update_running_statistics(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        self.num_batches_tracked += 1
        momentum = self.momentum
        momentum = 1.0 / float(self.num_batches_tracked) if momentum is None else momentum
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


class _SumOverRanks(NamedTuple):
    """Sums over the replicas of a strategy, or without one over a process group.

    Attributes:
      strategy: The strategy, or None.
      group: The process group; None for all ranks.
    """

    strategy: Strategy | None
    group: Any

    def sum(self, tensors: list[torch.Tensor]) -> Any:
        """Return the sums. Collective."""
        if self.strategy is not None:
            return _reduce_leaves(self.strategy, ReduceOp.SUM, tensors)
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        torch.distributed.all_reduce(flat, group=self.group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def get_rank_and_size(self) -> tuple[int, int]:
        """Return the number of this rank, and the number of ranks."""
        if self.strategy is not None:
            return self.strategy.rank, self.strategy.num_replicas_in_sync
        distributed = torch.distributed
        return distributed.get_rank(self.group), distributed.get_world_size(self.group)

    def loss_weight(self, local_count: int, count: float) -> float:
        """Return the factor of this rank's loss in the loss of the job, up to a constant.

        A strategy weighs the mean loss of a rank by its rows; process groups do not.
        """
        return 1.0 if self.strategy is None else local_count / count


class _NormalizeOverRanks(torch.autograd.Function):
    """Batch normalisation over all ranks as a node of the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: Any,
        eps: float,
        sum_over_ranks: _SumOverRanks,
    ) -> Any:
        """Normalise by mean and variance of all rows."""
        axes = [0, *range(2, x.ndim)]
        local_count = x.numel() // x.shape[1]
        double_x = x.double()
        local_sums = [
            torch.tensor(float(local_count)).double(),
            double_x.sum(axes),
            (double_x * double_x).sum(axes),
        ]
        count, total, squares = sum_over_ranks.sum(local_sums)
        if count <= 1:
            rank, rank_count = sum_over_ranks.get_rank_and_size()
            raise ValueError(
                f"SyncBatchNorm wants more than 1 value per channel over all {rank_count} ranks, "
                f"got {count:.0f} (rank {rank} has {local_count}). Give larger batches, or call "
                "eval() of the model, which takes the running statistics."
            )
        mean = total / count
        variance = (squares / count - mean * mean).clamp_min(0)
        scale = (variance + eps).rsqrt()
        shape = [1, -1, *[1] * (x.ndim - 2)]
        normalized = ((double_x - mean.view(shape)) * scale.view(shape)).to(x.dtype)
        ctx.save_for_backward(normalized, weight, scale)
        ctx.call_options = sum_over_ranks, axes, shape, local_count, float(count)
        output = (
            normalized if weight is None else normalized * weight.view(shape) + bias.view(shape)
        )
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        """Return gradients whose weighted mean over the ranks is the gradient of one process."""
        normalized, weight, scale = ctx.saved_tensors
        sum_over_ranks, axes, shape, local_count, count = ctx.call_options
        double_gradient = gradient.double()
        bias_sums, weight_sums = double_gradient.sum(axes), (double_gradient * normalized).sum(axes)
        loss_weight = sum_over_ranks.loss_weight(local_count, count)
        scaled_sums = [bias_sums * loss_weight, weight_sums * loss_weight]
        bias_total, weight_total = sum_over_ranks.sum(scaled_sums)
        correction = bias_total.view(shape) + normalized * weight_total.view(shape)
        correction /= (count * loss_weight) or 1.0  # a rank without rows has no gradients
        input_gradient = (double_gradient - correction) * scale.view(shape)
        if weight is None:
            return input_gradient.to(gradient.dtype), None, None, None, None
        input_gradient = (input_gradient * weight.view(shape)).to(gradient.dtype)
        return input_gradient, weight_sums.to(weight.dtype), bias_sums.to(weight.dtype), None, None
