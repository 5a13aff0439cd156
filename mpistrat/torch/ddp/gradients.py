"""Gradients of a model in the memory of all ranks, made one at the end of each backward pass.

A backward pass of the CPU runs in the thread that calls it, hooks included, so it can end in a
collective call. Its steps:

1. the gradient of an output of the model arrives (`_watch`): the pass is open, and its rows count;
2. the gradient of each parameter arrives (`arrived`): it is copied to the shared buffer while it
   is in cache, and ``p.grad`` is a view of that from now on; where passes add up, what there was
   before is put aside (`coming`) and added when the pass ends and its rows are known;
3. the pass ends (`_end`): buffers of parameters without a gradient are zeroed, and all are reduced.
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
from mpistrat.torch.ddp.parameters import (
    GradientRoom,
    refuse_modules,
    refuse_orders,
)
from mpistrat.torch.ddp.rows import create_empty_output, watch, without_weight
from mpistrat.torch.ddp.stepping import StepComparison, watch_parameters
from mpistrat.torch.process_group.channel import record_call
from mpistrat.torch.tensors import as_array

__all__ = ["Gradients"]


def _addresses_of(tensors: Sequence[Any]) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


_gradient, _version = operator.attrgetter("grad"), operator.attrgetter("_version")


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
      syncing: Passes end in a reduction; else they add up on this rank.
      deferred: Whoever updates reduces, so passes do not.
      names: The names of the parameters that have gradients.
      params: These parameters.
      arrays: Their buffers, of `Strategy.gradient_buffers`, in the order of memory.
      views: The same memory as tensors that are laid out as the parameters.
      has_unsynced_passes: There was a `no_sync` since gradients were reduced.
      passes: How many backward passes this rank has added up.
      weight: How many rows the gradients are the mean of that this rank has added up.
      versions: Of the views, when the last pass ended.
      variables: What has the memory of parameters, by the identity of these.
      renewed: Is called when all weights were given again, by whoever updates.
      accumulation_error: Why the gradients that were added up have no weight, if so.
      reduced_rows: How many rows of this rank the gradients were last the mean of.
      stepped: How many steps took gradients that no pass has made; see `stepping`.
      steps: Compares what optimizers of ``torch.optim`` step by.
    """

    def __init__(self, model: Any, strategy: Any, rows: Callable[..., float]):
        """Begin alike; see `replicate`. Collective."""
        self._model, self.strategy, self._rows = model, strategy, rows
        self.syncing, self.deferred = True, False
        self._is_in_call = self._has_accumulated = self.has_unsynced_passes = False
        self._ending: Callable[[], Any] = _return_none
        self._hooks: list[Any] = []
        self._parameters = GradientRoom(model)
        self._has_meeting_layers = self._blind = False
        self.passes, self._base, self.weight = 0, 0.0, 0.0
        self.versions: list[int] = []
        self._at_end: list[Any] = []
        self._addresses: list[int | None] = []
        self._samples = b""
        self._waiting: set[int] = set()
        self._program_gradients: dict[int, Any] = {}
        self._aside: dict[int, Any] = {}
        self._pass, self._reductions, self._last, self._pass_rows = 0, 0, 1.0, 1.0
        self._calls: list[float] = []
        self.variables: dict[int, Any] = {}
        self.renewed: Callable[[], None] | None = None
        self.accumulation_error: ContextError | None = None
        self.reduced_rows, self.stepped = 0.0, 0
        self.steps = StepComparison(strategy._replicas.lockstep)
        self.begin_alike()

    # The parameters

    def begin_alike(self) -> None:
        """Give all ranks replica 0's weights and buffers, and room for gradients. Collective."""
        pairs = [*self._model.named_parameters(), *self._model.named_buffers()]
        with self.strategy.scope():
            with self.strategy._replicas.lockstep.preparing("replicate"):
                refuse_modules(self._model, self.strategy.num_replicas_in_sync)
            state = {name: tensor.detach() for name, tensor in pairs}
            self.strategy.broadcast(state, out=state)
            refuse_orders(self._model, self.strategy)
            new = not self._hooks or bool(self._parameters.differs())
            if self.strategy.all_reduce("MAX", int(new)):
                self.make_room()
        self.has_unsynced_passes = False
        self.forget()
        if self.renewed is not None:
            self.renewed()

    def make_room(self) -> None:
        """Take memory for the gradients of parameters that require grad. Collective."""
        self.close()
        # Layers that meet in every pass; a rank without rows has to be there.
        meeting_layers = [layer for layer in self._model.modules() if hasattr(layer, "of_ranks")]
        for layer in meeting_layers:
            layer.of_ranks(self.strategy)
        self._has_meeting_layers = bool(meeting_layers)
        self._parameters = room = GradientRoom(self._model)
        # An optimizer has the weights in C order, and so has a checkpoint.
        *_, self._used_flags = room.take_room(self.strategy, self.deferred)
        self._all = [*room.arrays, as_array(self._used_flags)]
        self.names, self.params = room.names, room.params
        self.arrays, self.views = room.arrays, room.views
        # Python's collector does not see the objects that the hooks of a tensor hold.
        self_ref = weakref.ref(self)
        for i, p in enumerate(self.params):
            p.grad = None
            coming_hook = functools.partial(_notify_gradients, self_ref, Gradients.coming, i)
            arrived_hook = functools.partial(_notify_gradients, self_ref, Gradients.arrived, i)
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

    def in_pass(self) -> bool:
        """Tell whether a backward pass has begun and not ended."""
        return self._ending() is not None

    def check(self) -> None:
        """Raise ContextError if the model has other parameters than room was made for."""
        self._parameters.checked()

    def check_apart(self, call_name: str) -> None:
        """Raise LeafTypeError, for a call, if a parameter shares memory with something else."""
        self._parameters.check_no_shared_memory(call_name)

    # Calls of the model

    def can_have_backward(self) -> bool:
        """Tell whether a call of the model may have a backward pass."""
        return not self._is_in_call and torch.is_grad_enabled()

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model, or make an output of no rows where it is given none."""
        rows = self._prepare(args, kwargs)
        if rows is None:
            return forward(*args, **kwargs)
        self._is_in_call = True
        try:
            runs = rows or self._has_meeting_layers or self.strategy.num_replicas_in_sync == 1
            out = forward(*args, **kwargs) if runs else self._create_empty_output(args, kwargs)
        finally:
            self._is_in_call = False
        self._watch(out, rows)
        return out

    def _prepare(self, args: Any, kwargs: Any) -> float | None:
        """Return how many rows the arguments are; None inside of torch.func and torch.export."""
        return float(self._rows(*args, **kwargs)) if self._parameters.checked() else None

    def _watch(self, out: Any, rows: float) -> None:
        """Count the rows of an output in each backward pass that comes through it."""
        self._last, counted_pass = rows, 0

        def count_rows() -> None:
            nonlocal counted_pass
            if not self.in_pass():
                self._begin()
            if counted_pass != self._pass:
                counted_pass = self._pass
                self._calls.append(rows)
                self._pass_rows = sum(self._calls)

        self._blind = not watch(out, count_rows)  # by what a backward pass comes is not known

    def _create_empty_output(self, args: Any, kwargs: Any) -> Any:
        return create_empty_output(self._model, args, kwargs)

    # Backward passes

    def _begin(self) -> None:
        end = functools.partial(self._end)
        self._ending = weakref.ref(end, self._failed)  # PyTorch drops it when the pass fails
        self._has_accumulated, self._calls, self._pass_rows, self._aside = False, [], self._last, {}
        self._arrived_indices: list[int] = []
        self._pass += 1
        self._parameters.put_back()
        if self.passes and self.dropped():
            self.forget()
        if self.passes and self.deferred:
            self.accumulation_error = self.accumulation_error or self.explain_change()
        if not self.passes and (self.deferred or not self.syncing):
            self._waiting = {i for i, p in enumerate(self.params) if p.grad is not None}
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _failed(self, _: Any) -> None:
        """Restore the gradients that parameters had before a pass that failed."""
        for i, earlier_gradient in self._aside.items():
            self.params[i].grad = earlier_gradient
        self._aside = {}

    def dropped(self) -> bool:
        """Tell whether the program has dropped what was added up, by None or by zeros."""
        return all(
            p.grad is None or (p.grad._version != version and not p.grad.any())
            for p, version in zip(self.params, self.versions, strict=True)
        )

    def coming(self, i: int) -> None:
        """Put aside what a parameter has, if passes add up, until the rows of this one are known.

        A pass counts by its rows, as it would in one process. What the program had kept before the
        first of them does not, and torch.autograd.grad leaves all as it was.
        """
        if not self.in_pass():  # the gradient of a penalty may come before those of outputs
            self._begin()
        if (self.passes or i in self._waiting) and i not in self._aside:
            self._aside[i], self.params[i].grad = self.params[i].grad, None

    def _join(self, i: int, earlier_gradient: Any, rows: float) -> None:
        """Add the gradient of a pass of so many rows to the gradient that was put aside."""
        p, view, gradient = self.params[i], self.views[i], self.params[i].grad
        if gradient is None or not rows:
            p.grad = earlier_gradient
            return
        if i in self._waiting:
            self._waiting.remove(i)
            self._program_gradients[i], earlier_gradient = earlier_gradient.clone(), None
        if earlier_gradient is not view:
            view.copy_(torch.zeros(()) if earlier_gradient is None else earlier_gradient)
        p.grad = view.add_(gradient, alpha=rows / self._base if self._base else 1.0)

    def arrived(self, i: int) -> None:
        """Keep the gradient of a parameter, which has just been accumulated."""
        self._has_accumulated = True
        p, view, gradient = self.params[i], self.views[i], self.params[i].grad
        if gradient is view or gradient is None:  # None: frozen since the forward pass
            return
        self._parameters.accept(i, gradient)
        if i in self._aside:
            return
        self._arrived_indices.append(i)
        if not self._can_skip_buffers():
            self._parameters.keep(i, gradient)
            p.grad = view

    def _can_skip_buffers(self) -> bool:
        """Tell whether gradients stay where PyTorch has made them, as no other rank reads them."""
        group = self.strategy._replicas
        return not self.deferred and group.lockstep.comm.size == 1 and not group.reducer.watches

    def _end(self) -> None:
        self._ending = _return_none
        aside, self._aside = self._aside, {}
        with torch.no_grad():
            for i, earlier_gradient in aside.items():
                self._join(i, earlier_gradient, self._pass_rows)
        # Then these are zeros, of `create_empty_output` or a penalty; perhaps no rank has used it.
        if not self._pass_rows:
            for i in self._arrived_indices:
                self.params[i].grad = None
        if not self._has_accumulated:  # torch.autograd.grad, which leaves p.grad alone
            return
        if not self._blind:
            self.accumulation_error = self.accumulation_error or without_weight(self._calls)
        self._count(self._pass_rows)

    def _count(self, rows: float) -> None:
        """Count a pass, and reduce if it is time."""
        self.strategy._replicas.lockstep.state.passes += 1
        self.passes += 1
        self.weight += rows
        self._base = self._base or rows
        self.versions = [*map(_version, self.views)]
        if self.deferred:
            self._at_end = [*map(_gradient, self.params)]
            self._addresses = _addresses_of(self._at_end)
            self._samples = self._parameters.read_samples()
        if self.syncing and not self.deferred:
            self._reduce()

    def explain_change(self, counted: bool = True) -> ContextError | None:
        """Return the error of gradients that were changed since the last pass; None if none was.

        Writes that PyTorch does not count, through ``.data`` and NumPy, show in samples only. A
        gradient that is None by now was dropped, as in one process.

        Args:
          counted: Whether writes that PyTorch counts are changes, whatever they wrote.
        """
        if not self.versions:
            return None
        current_gradients = [*map(_gradient, self.params)]
        triples = zip(self.names, current_gradients, self._at_end, strict=True)
        replaced = [name for name, x, before in triples if x is not None and x is not before]
        name, change = next(iter(replaced), None), "replaced (p.grad = ...)"
        addresses = _addresses_of(self._at_end)
        if name is None and addresses != self._addresses:
            moves = zip(self.names, self._addresses, addresses, strict=True)
            name = next(name for name, before, after in moves if before != after)
            change = "given other memory (p.grad.data = ...)"
        versions = [*map(_version, self.views)]
        if name is None and counted and versions != self.versions:
            pairs = zip(self.names, versions, self.versions, strict=True)
            name, change = next(n for n, x, y in pairs if x != y), "changed"
        elif name is None:
            name, change = self._parameters.changed_name(self._samples), "changed"
        if name is None:
            return None
        return ContextError(
            f"the gradient of {name!r} was {change} after the backward pass, where it is this "
            "rank's own. Clip by the optimizer, clip=mpistrat.optim.ClipByGlobalNorm(...), or use "
            "one of torch.optim."
        )

    def take_part(self) -> None:
        """Be in a backward pass without rows. Collective, unless passes add up."""
        self.check()
        self._pass += 1
        self._count(0.0)

    def fill_buffers(self) -> list[bool]:
        """Bring all gradients into the buffers; return which of them there are. `scale` follows."""
        self._parameters.put_back()
        gradients = [*map(_gradient, self.params)]
        for gradient, view in zip(gradients, self.views, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                view.copy_(gradient)
        return [gradient is not None for gradient in gradients]

    def scale(self, passes: int) -> None:
        """Make the buffers this rank's contribution: the mean over its rows, times `passes`.

        Args:
          passes: How many passes there were on the rank that has counted most of them: one that has
            no gradients, as it had no rows so far, cannot tell whether the program dropped some.
        """
        total = self._base * passes
        if self.weight and total != self.weight:
            for i, view in enumerate(self.views):
                if i not in self._waiting:
                    view *= total / self.weight
        while self._program_gradients:
            i, earlier_gradient = self._program_gradients.popitem()
            self.views[i] += earlier_gradient

    def _reduce(self) -> None:
        group = self.strategy._replicas
        group.lockstep.check()
        if self.accumulation_error is not None:
            error = self.accumulation_error
            self.forget()
            group.lockstep.refuse("backward", error)
        if self._can_skip_buffers() and self.passes == 1 and self.weight:
            self.has_unsynced_passes, self.reduced_rows = False, self.weight
            self.forget()
            return
        self._used_flags.copy_(torch.tensor(self.fill_buffers(), dtype=torch.float32))
        with enter_replica(self.strategy, "a backward pass"), record_call("replicate"):
            passes = self.passes
            if group.lockstep.comm.size > 1:
                self.steps.ride()
            if self.has_unsynced_passes:
                passes = int(all_reduce_tree(group, "MAX", np.array(passes), None, None))
            self.scale(passes)
            self._compare()
            all_reduce_tree(group, "MEAN", self._all, self.weight, self._all)
        self.has_unsynced_passes, self.reduced_rows = False, self.weight
        self.give((self._used_flags > 0).tolist())

    def give(self, used_flags: list[bool]) -> None:
        """Show the program the gradients, and start over."""
        for p, view, is_used in zip(self.params, self.views, used_flags, strict=True):
            p.grad = view if is_used else None
        self.forget()

    def forget(self) -> None:
        """Restart the accumulation."""
        self.passes, self._base, self.weight = 0, 0.0, 0.0
        self.versions, self._at_end, self._samples = [], [], b""
        self.accumulation_error = None
        self._waiting, self._program_gradients = set(), {}

    def _compare(self) -> None:
        """Compare one parameter of all ranks now and then, another one each time. Collective."""
        self._reductions += 1
        interval = self.strategy._replicas.lockstep.options.check_every
        if self.params and interval and self._reductions % interval == 0:
            i = self._reductions // interval % len(self.params)
            check_same(self.strategy._replicas, {self.names[i]: self.params[i].detach()})
