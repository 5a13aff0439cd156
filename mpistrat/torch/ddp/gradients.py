"""Gradients of a model in the memory of all ranks, made one at the end of each backward pass.

A backward pass of the CPU runs in the thread that calls it, hooks included, so it can end in a
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
from mpistrat.strategy.all_reduce import in_replica
from mpistrat.strategy.context_stack import as_replica
from mpistrat.strategy.shared_state import check_same
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
    """Return what is left of a backward pass when there is none."""


def _notify_gradients(
    gradients: weakref.ref[Gradients], method: Callable[..., None], i: int, _: Any
) -> None:
    """Tell gradients, if there are any still, that one is coming, or has been accumulated."""
    owner = gradients()
    if owner is not None:
        method(owner, i)


@final
class Gradients:
    """The gradients of a replicated model.

    Args:
      model: The model.
      strategy: The strategy.
      rows: How many rows a call of the model stands for.

    Attributes:
      strategy: The strategy.
      is_syncing: Passes end in a reduction; else they add up on this rank.
      is_reduction_deferred: Whoever updates reduces, so passes do not.
      names: The names of the parameters that have gradients.
      params: These parameters.
      arrays: Their buffers, of `Strategy.gradient_buffers`, in the order of memory.
      views: The same memory as tensors that are laid out as the parameters.
      has_unsynced_passes: There was a `no_sync` since gradients were reduced.
      pass_count: How many backward passes this rank has added up.
      weight: How many rows the gradients are the mean of that this rank has added up.
      view_versions: Of the views, when the last pass ended.
      variables_by_id: What has the memory of parameters, by the identity of these.
      on_weights_renewed: Is called when all weights were given again, by whoever updates.
      accumulation_error: Why the gradients that were added up have no weight, if so.
      reduced_rows: How many rows of this rank the gradients were last the mean of.
      foreign_step_count: How many steps took gradients that no pass has made; see `stepping`.
      step_comparison: Compares what optimizers of ``torch.optim`` step by.
    """

    def __init__(self, model: Any, strategy: Any, count_rows: Callable[..., float]):
        """Begin alike; see `replicate`. Collective."""
        self._model, self.strategy, self._count_rows_of = model, strategy, count_rows
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
        self._pass_index, self._reduction_count, self._last_call_rows, self._pass_rows = (
            0,
            0,
            1.0,
            1.0,
        )
        self._rows_of_calls: list[float] = []
        self.variables_by_id: dict[int, Any] = {}
        self.on_weights_renewed: Callable[[], None] | None = None
        self.accumulation_error: ContextError | None = None
        self.reduced_rows, self.foreign_step_count = 0.0, 0
        self.step_comparison = StepComparison(strategy.replicas.lockstep)
        self.synchronize_weights()

    # The parameters

    def synchronize_weights(self) -> None:
        """Give all ranks replica 0's weights and buffers, and room for gradients. Collective."""
        pairs = [*self._model.named_parameters(), *self._model.named_buffers()]
        with self.strategy.scope():
            with self.strategy.replicas.lockstep.preparing("replicate"):
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
        """Take memory for the gradients of parameters that require grad. Collective."""
        self.close()
        # Layers that meet in every pass; a rank without rows has to be there.
        meeting_layers = [
            layer for layer in self._model.modules() if hasattr(layer, "_use_strategy")
        ]
        for layer in meeting_layers:
            layer._use_strategy(self.strategy)
        self._has_meeting_layers = bool(meeting_layers)
        self._buffers = buffers = GradientBuffers(self._model)
        # An optimizer has the weights in C order, and so has a checkpoint.
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
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def is_in_pass(self) -> bool:
        """Tell whether a backward pass has begun and not ended."""
        return self._pass_end() is not None

    def check_parameters(self) -> None:
        """Raise ContextError if the model has other parameters than room was made for."""
        self._buffers.check_parameters()

    def check_no_shared_memory(self, call_name: str) -> None:
        """Raise LeafTypeError, for a call, if a parameter shares memory with something else."""
        self._buffers.check_no_shared_memory(call_name)

    # Calls of the model

    def can_have_backward(self) -> bool:
        """Tell whether a call of the model may have a backward pass."""
        return not self._is_in_call and torch.is_grad_enabled()

    def call_model(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model, or make an output of no rows where it is given none."""
        row_count = self._count_rows(args, kwargs)
        if row_count is None:
            return forward(*args, **kwargs)
        self._is_in_call = True
        try:
            runs = row_count or self._has_meeting_layers or self.strategy.num_replicas_in_sync == 1
            output = forward(*args, **kwargs) if runs else self._create_empty_output(args, kwargs)
        finally:
            self._is_in_call = False
        self._watch_output(output, row_count)
        return output

    def _count_rows(self, args: Any, kwargs: Any) -> float | None:
        """Return how many rows the arguments are; None inside of torch.func and torch.export."""
        return (
            float(self._count_rows_of(*args, **kwargs))
            if self._buffers.check_parameters()
            else None
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

        self._is_output_unwatched = not watch_output(
            output, count_rows
        )  # by what a backward pass comes is not known

    def _create_empty_output(self, args: Any, kwargs: Any) -> Any:
        return create_empty_output(self._model, args, kwargs)

    # Backward passes

    def _begin_pass(self) -> None:
        end_pass = functools.partial(self._end_pass)
        self._pass_end = weakref.ref(
            end_pass, self._restore_after_failure
        )  # PyTorch drops it when the pass fails
        self._has_accumulated, self._rows_of_calls, self._pass_rows, self._gradients_aside = (
            False,
            [],
            self._last_call_rows,
            {},
        )
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
        """Tell whether the program has dropped what was added up, by None or by zeros."""
        return all(
            p.grad is None or (p.grad._version != version and not p.grad.any())
            for p, version in zip(self.params, self.view_versions, strict=True)
        )

    def put_gradient_aside(self, i: int) -> None:
        """Put aside what a parameter has, if passes add up, until the rows of this one are known.

        A pass counts by its rows, as it would in one process. What the program had kept before the
        first of them does not, and torch.autograd.grad leaves all as it was.
        """
        if not self.is_in_pass():  # the gradient of a penalty may come before those of outputs
            self._begin_pass()
        if (
            self.pass_count or i in self._program_gradient_indices
        ) and i not in self._gradients_aside:
            self._gradients_aside[i], self.params[i].grad = self.params[i].grad, None

    def _add_earlier_gradient(self, i: int, earlier_gradient: Any, row_count: float) -> None:
        """Add the gradient of a pass of so many rows to the gradient that was put aside."""
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
        """Keep the gradient of a parameter, which has just been accumulated."""
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
        """Tell whether gradients stay where PyTorch has made them, as no other rank reads them."""
        group = self.strategy.replicas
        return (
            not self.is_reduction_deferred
            and group.lockstep.comm.size == 1
            and not group.reducer.watches
        )

    def _end_pass(self) -> None:
        self._pass_end = _return_none
        aside, self._gradients_aside = self._gradients_aside, {}
        with torch.no_grad():
            for i, earlier_gradient in aside.items():
                self._add_earlier_gradient(i, earlier_gradient, self._pass_rows)
        # Then these are zeros, of `create_empty_output` or a penalty; perhaps no rank has used it.
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
        """Count a pass, and reduce if it is time."""
        self.strategy.replicas.lockstep.state.passes += 1
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
        """Return the error of gradients that were changed since the last pass; None if none was.

        Writes that PyTorch does not count, through ``.data`` and NumPy, show in samples only. A
        gradient that is None by now was dropped, as in one process.

        Args:
          counts_versions: Whether writes that PyTorch counts are changes, whatever they wrote.
        """
        if not self.view_versions:
            return None
        current_gradients = [*map(_get_gradient, self.params)]
        triples = zip(self.names, current_gradients, self._gradients_at_end, strict=True)
        replaced = [name for name, x, before in triples if x is not None and x is not before]
        name, change = next(iter(replaced), None), "replaced (p.grad = ...)"
        addresses = _addresses_of(self._gradients_at_end)
        if name is None and addresses != self._addresses_at_end:
            moves = zip(self.names, self._addresses_at_end, addresses, strict=True)
            name = next(name for name, before, after in moves if before != after)
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
        """Be in a backward pass without rows. Collective, unless passes add up."""
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
        """Make the buffers this rank's contribution: the mean over its rows, times `pass_count`.

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
        group = self.strategy.replicas
        group.lockstep.check()
        if self.accumulation_error is not None:
            error = self.accumulation_error
            self.reset_accumulation()
            group.lockstep.refuse("backward", error)
        if self._can_skip_buffers() and self.pass_count == 1 and self.weight:
            self.has_unsynced_passes, self.reduced_rows = False, self.weight
            self.reset_accumulation()
            return
        self._used_flags.copy_(torch.tensor(self.fill_buffers(), dtype=torch.float32))
        with as_replica(self.strategy, "a backward pass"), record_call("replicate"):
            pass_count = self.pass_count
            if group.lockstep.comm.size > 1:
                self.step_comparison.defer_comparison()
            if self.has_unsynced_passes:
                pass_count = int(in_replica(group, "MAX", np.array(pass_count), None, None))
            self.scale_buffers(pass_count)
            self._compare_one_parameter()
            in_replica(group, "MEAN", self._reduced_arrays, self.weight, self._reduced_arrays)
        self.has_unsynced_passes, self.reduced_rows = False, self.weight
        self.publish_gradients((self._used_flags > 0).tolist())

    def publish_gradients(self, used_flags: list[bool]) -> None:
        """Show the program the gradients, and start over."""
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
        """Compare one parameter of all ranks now and then, another one each time. Collective."""
        self._reduction_count += 1
        interval = self.strategy.replicas.lockstep.options.check_every
        if self.params and interval and self._reduction_count % interval == 0:
            i = self._reduction_count // interval % len(self.params)
            check_same(self.strategy.replicas, {self.names[i]: self.params[i].detach()})
