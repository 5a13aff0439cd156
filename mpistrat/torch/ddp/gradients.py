"""Gradients of a model in node-shared memory, reduced at the end of each backward pass.

A backward pass on the CPU runs in the thread that calls it, hooks included, so it can end in a
collective call. Its steps:

1. the gradient of an output of the model arrives (`_watch_output`): the pass is open, and its rows
   count;
2. the gradient of each parameter arrives (`take_gradient`): it is copied to the shared buffer while
   it is in cache, and ``p.grad`` is a view of that from now on; where passes add up, the earlier
   gradient is put aside (`put_gradient_aside`) and added when the pass ends and its rows are known;
3. the pass ends (`_end_pass`): buffers of parameters without a gradient are zeroed, and all are
   reduced.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch

from mpistrat.errors import ContextError
from mpistrat.strategy.all_reduce import all_reduce_tree
from mpistrat.strategy.context_stack import enter_replica
from mpistrat.strategy.shared_state import check_same
from mpistrat.strategy.strategy import Strategy
from mpistrat.torch.ddp.parameters import (
    GradientBuffers,
    check_modules,
    check_parameter_order,
)
from mpistrat.torch.ddp.rows import create_empty_output, explain_missing_weight, watch_output
from mpistrat.torch.ddp.stepping import StepComparison, watch_parameters
from mpistrat.torch.process_group.channel import record_call
from mpistrat.torch.tensors import as_array

__all__ = ["Gradients"]


def _addresses_of(tensors: Sequence[Any]) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


_get_gradient, _get_version = operator.attrgetter("grad"), operator.attrgetter("_version")


def _return_none() -> None:
    """Return None, as a dead weak reference does: no backward pass is open."""


def _notify_gradients(
    gradients: weakref.ref[Gradients], method: Callable[..., None], i: int, _: Any
) -> None:
    """Call a method of gradients that are still alive, from the hook of parameter `i`."""
    owner = gradients()
    if owner is not None:
        method(owner, i)


@final
class Gradients:
    """The gradients of a replicated model.

    Args:
      model: The model.
      strategy: The strategy.
      count_rows: Returns how many rows a call of the model is for.

    Attributes:
      strategy: The strategy.
      is_syncing: Whether passes end in a reduction; else they add up on this rank.
      is_reduction_deferred: Whether the optimizer reduces, and passes do not.
      names: The names of the parameters that have gradients.
      params: These parameters.
      arrays: Their buffers, of `Strategy.gradient_buffers`, in the order of memory.
      views: The same memory as tensors that are laid out as the parameters.
      has_unsynced_passes: Whether there was a `no_sync` since gradients were reduced.
      pass_count: The number of backward passes that this rank has added up.
      weight: The number of rows in these passes.
      view_versions: The versions of the views when the last pass ended.
      variables_by_id: The variables that have the memory of parameters, by identity of these.
      on_weights_renewed: A callback of the optimizer for new weights on all ranks.
      accumulation_error: The reason why the gradients that were added up have no weight.
      reduced_rows: The number of rows of this rank in the last reduction.
      foreign_step_count: The number of steps by gradients that no pass has made; see `stepping`.
      step_comparison: Compares the numbers by which optimizers of ``torch.optim`` step.
    """

    def __init__(
        self, model: torch.nn.Module, strategy: Strategy, count_rows: Callable[..., float]
    ):
        """Give all ranks replica 0's weights; see `replicate`. Collective."""
        self._model, self.strategy, self._count_rows = model, strategy, count_rows
        self.is_syncing, self.is_reduction_deferred = True, False
        self._is_in_call = self._has_accumulated = self.has_unsynced_passes = False
        self._pass_end: Callable[[], Any] = _return_none
        self._hooks: list[Any] = []
        self._buffers = GradientBuffers(model)
        self._has_meeting_layers = self._is_output_unwatched = False
        self.pass_count, self._first_pass_rows, self.weight = 0, 0.0, 0.0
        self.view_versions: list[int] = []
        self._gradients_at_end: list[Any] = []
        self._addresses_at_end: list[int | None] = []
        self._samples_at_end = b""
        self._program_gradient_indices: set[int] = set()
        self._program_gradients: dict[int, Any] = {}
        self._gradients_aside: dict[int, Any] = {}
        self._pass_index = self._reduction_count = 0
        self._last_call_rows = self._pass_rows = 1.0
        self._rows_of_calls: list[float] = []
        self.variables_by_id: dict[int, Any] = {}
        self.on_weights_renewed: Callable[[], None] | None = None
        self.accumulation_error: ContextError | None = None
        self.reduced_rows, self.foreign_step_count = 0.0, 0
        self.step_comparison = StepComparison(strategy._replicas.lockstep)
        self.synchronize_weights()

    # The parameters

    def synchronize_weights(self) -> None:
        """Give all ranks replica 0's weights, and allocate buffers if needed. Collective."""
        pairs = [*self._model.named_parameters(), *self._model.named_buffers()]
        with self.strategy.scope():
            with self.strategy._replicas.lockstep.validating_collectively("replicate"):
                check_modules(self._model, self.strategy.num_replicas_in_sync)
            state = {name: tensor.detach() for name, tensor in pairs}
            self.strategy.broadcast(state, out=state)
            check_parameter_order(self._model, self.strategy)
            needs_buffers = not self._hooks or bool(self._buffers.find_changed_name())
            if self.strategy.all_reduce("MAX", int(needs_buffers)):
                self.allocate_buffers()
        self.has_unsynced_passes = False
        self.reset_accumulation()
        if self.on_weights_renewed is not None:
            self.on_weights_renewed()

    def allocate_buffers(self) -> None:
        """Allocate memory for the gradients of parameters that require grad. Collective."""
        self.close()
        # These layers communicate in every pass, also on a rank without rows.
        meeting_layers = [
            layer for layer in self._model.modules() if hasattr(layer, "_use_strategy")
        ]
        for layer in meeting_layers:
            layer._use_strategy(self.strategy)
        self._has_meeting_layers = bool(meeting_layers)
        self._buffers = buffers = GradientBuffers(self._model)
        # FusedOptimizer has the weights in C order, as checkpoints have them.
        *_, self._used_flags = buffers.allocate(self.strategy, self.is_reduction_deferred)
        self._reduced_arrays = [*buffers.arrays, as_array(self._used_flags)]
        self.names, self.params = buffers.names, buffers.params
        self.arrays, self.views = buffers.arrays, buffers.views
        # Python's collector does not see the objects that the hooks of a tensor hold.
        self_ref = weakref.ref(self)
        for i, p in enumerate(self.params):
            p.grad = None
            coming_hook = functools.partial(
                _notify_gradients, self_ref, Gradients.put_gradient_aside, i
            )
            arrived_hook = functools.partial(
                _notify_gradients, self_ref, Gradients.take_gradient, i
            )
            self._hooks += [
                p.register_hook(coming_hook),
                p.register_post_accumulate_grad_hook(arrived_hook),
            ]
        watch_parameters(self)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def is_in_pass(self) -> bool:
        """Return whether a backward pass has begun and not ended."""
        return self._pass_end() is not None

    def check_parameters(self) -> None:
        """Raise ContextError if the model has other parameters than the buffers are for."""
        self._buffers.check_parameters()

    def check_no_shared_memory(self, call_name: str) -> None:
        """Raise LeafTypeError if a parameter shares memory with another tensor of the model."""
        self._buffers.check_no_shared_memory(call_name)

    # Calls of the model

    def can_have_backward(self) -> bool:
        """Return whether a call of the model may have a backward pass."""
        return not self._is_in_call and torch.is_grad_enabled()

    def call_model(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the output of the model, which is not run on arguments without rows."""
        row_count = self._count_argument_rows(args, kwargs)
        if row_count is None:
            return forward(*args, **kwargs)
        self._is_in_call = True
        try:
            should_run = (
                row_count or self._has_meeting_layers or self.strategy.num_replicas_in_sync == 1
            )
            output = (
                forward(*args, **kwargs) if should_run else self._create_empty_output(args, kwargs)
            )
        finally:
            self._is_in_call = False
        self._watch_output(output, row_count)
        return output

    def _count_argument_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        """Return the number of rows; None inside of torch.func and torch.export."""
        return (
            float(self._count_rows(*args, **kwargs)) if self._buffers.check_parameters() else None
        )

    def _watch_output(self, output: Any, row_count: float) -> None:
        """Count the rows of an output in each backward pass that comes through it."""
        self._last_call_rows, counted_pass = row_count, 0

        def count_rows() -> None:
            nonlocal counted_pass
            if not self.is_in_pass():
                self._begin_pass()
            if counted_pass != self._pass_index:
                counted_pass = self._pass_index
                self._rows_of_calls.append(row_count)
                self._pass_rows = sum(self._rows_of_calls)

        # Without a watched output, a backward pass may come through any tensor.
        self._is_output_unwatched = not watch_output(output, count_rows)

    def _create_empty_output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return create_empty_output(self._model, args, kwargs)

    # Backward passes

    def _begin_pass(self) -> None:
        end_pass = functools.partial(self._end_pass)
        # PyTorch drops the callback if the pass fails.
        self._pass_end = weakref.ref(end_pass, self._restore_after_failure)
        self._has_accumulated, self._rows_of_calls = False, []
        self._pass_rows, self._gradients_aside = self._last_call_rows, {}
        self._arrived_indices: list[int] = []
        self._pass_index += 1
        self._buffers.restore_views()
        if self.pass_count and self.has_dropped_gradients():
            self.reset_accumulation()
        if self.pass_count and self.is_reduction_deferred:
            self.accumulation_error = self.accumulation_error or self.explain_change()
        if not self.pass_count and (self.is_reduction_deferred or not self.is_syncing):
            self._program_gradient_indices = {
                i for i, p in enumerate(self.params) if p.grad is not None
            }
        torch.autograd.Variable._execution_engine.queue_callback(end_pass)

    def _restore_after_failure(self, _: Any) -> None:
        """Restore the gradients that parameters had before a pass that failed."""
        for i, earlier_gradient in self._gradients_aside.items():
            self.params[i].grad = earlier_gradient
        self._gradients_aside = {}

    def has_dropped_gradients(self) -> bool:
        """Return whether the program has dropped what was added up, by None or by zeros."""
        return all(
            p.grad is None or (p.grad._version != version and not p.grad.any())
            for p, version in zip(self.params, self.view_versions, strict=True)
        )

    def put_gradient_aside(self, i: int) -> None:
        """Put an earlier gradient aside, if passes add up, until the rows of this one are known.

        A pass counts by its rows, as it would in one process. A gradient from before the first
        pass is added without a weight. torch.autograd.grad changes no gradient of a parameter.
        """
        if not self.is_in_pass():  # the gradient of a penalty may come before those of outputs
            self._begin_pass()
        if (
            self.pass_count or i in self._program_gradient_indices
        ) and i not in self._gradients_aside:
            self._gradients_aside[i], self.params[i].grad = self.params[i].grad, None

    def _add_earlier_gradient(self, i: int, earlier_gradient: Any, row_count: float) -> None:
        """Add the gradient of a pass, weighted by its rows, to the gradient that was put aside."""
        p, view, gradient = self.params[i], self.views[i], self.params[i].grad
        if gradient is None or not row_count:
            p.grad = earlier_gradient
            return
        if i in self._program_gradient_indices:
            self._program_gradient_indices.remove(i)
            self._program_gradients[i], earlier_gradient = earlier_gradient.clone(), None
        if earlier_gradient is not view:
            view.copy_(torch.zeros(()) if earlier_gradient is None else earlier_gradient)
        p.grad = view.add_(
            gradient, alpha=row_count / self._first_pass_rows if self._first_pass_rows else 1.0
        )

    def take_gradient(self, i: int) -> None:
        """Copy the gradient of a parameter, which PyTorch has just accumulated, to its buffer."""
        self._has_accumulated = True
        p, view, gradient = self.params[i], self.views[i], self.params[i].grad
        if gradient is view or gradient is None:  # None: frozen since the forward pass
            return
        self._buffers.check_gradient(i, gradient)
        if i in self._gradients_aside:
            return
        self._arrived_indices.append(i)
        if not self._can_skip_buffers():
            self._buffers.copy_gradient(i, gradient)
            p.grad = view

    def _can_skip_buffers(self) -> bool:
        """Return whether gradients can stay where PyTorch made them: no other rank reads them."""
        group = self.strategy._replicas
        return (
            not self.is_reduction_deferred
            and group.lockstep.comm.size == 1
            and not group.reducer.needs_finite_check
        )

    def _end_pass(self) -> None:
        self._pass_end = _return_none
        aside, self._gradients_aside = self._gradients_aside, {}
        with torch.no_grad():
            for i, earlier_gradient in aside.items():
                self._add_earlier_gradient(i, earlier_gradient, self._pass_rows)
        # Without rows, gradients are zeros, and perhaps no rank has used the parameter.
        if not self._pass_rows:
            for i in self._arrived_indices:
                self.params[i].grad = None
        if not self._has_accumulated:  # torch.autograd.grad, which leaves p.grad alone
            return
        if not self._is_output_unwatched:
            self.accumulation_error = self.accumulation_error or explain_missing_weight(
                self._rows_of_calls
            )
        self._count_pass(self._pass_rows)

    def _count_pass(self, row_count: float) -> None:
        """Count a pass, and reduce unless passes add up or the optimizer reduces."""
        self.strategy._replicas.lockstep.state.backward_count += 1
        self.pass_count += 1
        self.weight += row_count
        self._first_pass_rows = self._first_pass_rows or row_count
        self.view_versions = [*map(_get_version, self.views)]
        if self.is_reduction_deferred:
            self._gradients_at_end = [*map(_get_gradient, self.params)]
            self._addresses_at_end = _addresses_of(self._gradients_at_end)
            self._samples_at_end = self._buffers.read_samples()
        if self.is_syncing and not self.is_reduction_deferred:
            self._reduce()

    def explain_change(self, counts_versions: bool = True) -> ContextError | None:
        """Return an error if a gradient was changed since the last pass; else None.

        Writes that PyTorch does not count, through ``.data`` and NumPy, show in samples only. A
        gradient that is None by now was dropped, as in one process.

        Args:
          counts_versions: Whether writes that PyTorch counts are changes, whatever they wrote.
        """
        if not self.view_versions:
            return None
        current_gradients = [*map(_get_gradient, self.params)]
        triples = zip(self.names, current_gradients, self._gradients_at_end, strict=True)
        replaced = [name for name, x, y in triples if x is not None and x is not y]
        name, change = next(iter(replaced), None), "replaced (p.grad = ...)"
        addresses = _addresses_of(self._gradients_at_end)
        if name is None and addresses != self._addresses_at_end:
            moves = zip(self.names, self._addresses_at_end, addresses, strict=True)
            name = next(name for name, x, y in moves if x != y)
            change = "given other memory (p.grad.data = ...)"
        versions = [*map(_get_version, self.views)]
        if name is None and counts_versions and versions != self.view_versions:
            pairs = zip(self.names, versions, self.view_versions, strict=True)
            name, change = next(n for n, x, y in pairs if x != y), "changed"
        elif name is None:
            name, change = self._buffers.find_written_name(self._samples_at_end), "changed"
        if name is None:
            return None
        return ContextError(
            f"the gradient of {name!r} was {change} after the backward pass, where it is this "
            "rank's own. Clip by the optimizer, clip=mpistrat.optim.ClipByGlobalNorm(...), or use "
            "one of torch.optim."
        )

    def take_part(self) -> None:
        """Take part in a backward pass without rows. Collective, unless passes add up."""
        self.check_parameters()
        self._pass_index += 1
        self._count_pass(0.0)

    def fill_buffers(self) -> list[bool]:
        """Copy all gradients into the buffers, before `scale_buffers`.

        Returns:
          For each parameter, whether it has a gradient.
        """
        self._buffers.restore_views()
        gradients = [*map(_get_gradient, self.params)]
        for gradient, view in zip(gradients, self.views, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                view.copy_(gradient)
        return [gradient is not None for gradient in gradients]

    def scale_buffers(self, pass_count: int) -> None:
        """Scale the buffers to this rank's part: the mean over its rows, times `pass_count`.

        Args:
          pass_count: The largest number of passes that a rank has counted: a rank that has no
            gradients, as it had no rows so far, does not see whether the program dropped some.
        """
        total = self._first_pass_rows * pass_count
        if self.weight and total != self.weight:
            for i, view in enumerate(self.views):
                if i not in self._program_gradient_indices:
                    view *= total / self.weight
        while self._program_gradients:
            i, earlier_gradient = self._program_gradients.popitem()
            self.views[i] += earlier_gradient

    def _reduce(self) -> None:
        group = self.strategy._replicas
        group.lockstep.check()
        if self.accumulation_error is not None:
            error = self.accumulation_error
            self.reset_accumulation()
            group.lockstep.fail_collectively("backward", error)
        if self._can_skip_buffers() and self.pass_count == 1 and self.weight:
            self.has_unsynced_passes, self.reduced_rows = False, self.weight
            self.reset_accumulation()
            return
        self._used_flags.copy_(torch.tensor(self.fill_buffers(), dtype=torch.float32))
        with enter_replica(self.strategy, "a backward pass"), record_call("replicate"):
            pass_count = self.pass_count
            if group.lockstep.comm.size > 1:
                self.step_comparison.defer_comparison()
            if self.has_unsynced_passes:
                pass_count = int(all_reduce_tree(group, "MAX", np.array(pass_count), None, None))
            self.scale_buffers(pass_count)
            self._compare_one_parameter()
            all_reduce_tree(group, "MEAN", self._reduced_arrays, self.weight, self._reduced_arrays)
        self.has_unsynced_passes, self.reduced_rows = False, self.weight
        self.publish_gradients((self._used_flags > 0).tolist())

    def publish_gradients(self, used_flags: list[bool]) -> None:
        """Set ``p.grad`` to the reduced gradients, and restart the accumulation."""
        for p, view, is_used in zip(self.params, self.views, used_flags, strict=True):
            p.grad = view if is_used else None
        self.reset_accumulation()

    def reset_accumulation(self) -> None:
        """Restart the accumulation."""
        self.pass_count, self._first_pass_rows, self.weight = 0, 0.0, 0.0
        self.view_versions, self._gradients_at_end, self._samples_at_end = [], [], b""
        self.accumulation_error = None
        self._program_gradient_indices, self._program_gradients = set(), {}

    def _compare_one_parameter(self) -> None:
        """Compare one parameter between ranks every ``check_every`` reductions. Collective."""
        self._reduction_count += 1
        interval = self.strategy._replicas.lockstep.options.check_every
        if self.params and interval and self._reduction_count % interval == 0:
            i = self._reduction_count // interval % len(self.params)
            check_same(self.strategy._replicas, {self.names[i]: self.params[i].detach()})
