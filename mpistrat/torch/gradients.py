"""Gradients of a model in the memory of all ranks, made one at the end of each backward pass.

A backward pass of the CPU runs in the thread that calls it, hooks included, so it can end in a
collective call. Its steps:

1. the gradient of an output of the model arrives (`_came`): the pass is open, and its rows count;
2. the gradient of each parameter arrives (`_arrived`): it is copied to the shared buffer while it
   is in cache, and ``p.grad`` is a view of that from now on;
3. the pass ends (`_end`): buffers of parameters without a gradient are zeroed, and all are folded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpistrat import nest
from mpistrat.arrays import label
from mpistrat.distribute.mode import Mode, Replica, current, entered, same_strategy
from mpistrat.distribute.reduce import in_replica
from mpistrat.distribute.state import check_same
from mpistrat.errors import ContextError, LeafTypeError
from mpistrat.torch.tensors import as_array

__all__ = ["Gradients", "as_replica", "first_rows", "in_storage_order", "tensors_in"]


def tensors_in(value: Any) -> Iterator[Any]:
    """Iterate over the tensors in what a model takes or returns: trees, mappings, records.

    They come in the order in which the program has written them; of mappings `nest` sorts the keys.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple):
        inside = list(value)
    elif hasattr(value, "__dataclass_fields__"):
        inside = list(vars(value).values())
    else:
        inside = [leaf for leaf in nest.flatten(value)[0] if leaf is not value]
    for one in inside:
        yield from tensors_in(one)


def first_rows(*args: Any, **kwargs: Any) -> float:
    """Return the first dimension of the first tensor in the arguments of a model; 1 without any."""
    found = next((x for x in tensors_in([*args, *kwargs.values()]) if x.ndim), None)
    return 1 if found is None else len(found)


def in_storage_order(tensor: Any) -> tuple[Any, list[int]]:
    """Return a tensor with its dimensions in the order of memory, and the way back.

    Args:
      tensor: One that lies in memory without gaps, in whatever order of dimensions.

    Returns:
      The tensor, contiguous, and the order to `permute` it by to have the one that was given.
    """
    order = sorted(range(tensor.ndim), key=lambda i: -tensor.stride(i))
    if not tensor.permute(order).is_contiguous():
        order = list(range(tensor.ndim))
    return tensor.permute(order).contiguous(), [order.index(i) for i in range(tensor.ndim)]


def as_replica(strategy: Any) -> Any:
    """Return a context manager whose body is replica code of a strategy."""
    mode = current()
    if mode is None or mode.replica is None or mode.strategy is not strategy:
        same_strategy(strategy, "a call of mpistrat.torch")
        return entered(Mode(strategy, Replica(strategy.rank, strategy.num_replicas_in_sync)))
    return contextlib.nullcontext()


@final
class Gradients:
    """The gradients of a replicated model.

    Args:
      model: The model.
      strategy: The strategy.
      rows: How many rows a call of the model stands for.

    Attributes:
      strategy: The strategy.
      syncing: Passes end in a fold; else they add up on this rank.
      deferred: Whoever updates folds, so passes do not.
      names: The names of the parameters that have gradients.
      params: These parameters.
      arrays: Their buffers, of `Strategy.gradient_buffers`, in the order of memory.
      views: The same memory as tensors that are laid out as the parameters.
      weight: How many rows the gradients are the mean of that this rank has added up.
      versions: Of the views, when the last pass ended.
      variables: What has the memory of parameters, by the identity of these.
      renewed: Is called when all weights were given anew.
    """

    def __init__(self, model: Any, strategy: Any, rows: Callable[..., float]):
        """Begin alike; see `replicate`. Collective."""
        self._model, self.strategy, self._rows = model, strategy, rows
        self.syncing, self.deferred = True, False
        self._open = self._inside = self._seen = False
        self._hooks: list[Any] = []
        self._scaling: list[Any] = []
        self._slots: list[tuple[dict[str, Any], str, Any, bool]] | None = None
        self._meets = False
        self._passes, self._base, self.weight = 0, 0.0, 0.0
        self.versions: list[int] = []
        self._pass, self._folds, self._last, self._now = 0, 0, 1.0, 0.0
        self.variables: dict[int, Any] = {}
        self.renewed: Callable[[], None] = lambda: None
        self.begin_alike()

    # The parameters

    def begin_alike(self) -> None:
        """Give all ranks replica 0's weights and buffers, and room for gradients. Collective."""
        pairs = [*self._model.named_parameters(), *self._model.named_buffers()]
        with self.strategy.scope():
            with self.strategy.parts.lockstep.preparing("replicate"):
                for name, one in pairs:
                    if isinstance(one, torch.nn.parameter.UninitializedTensorMixin):
                        raise LeafTypeError(
                            f"{label(name)} has no shape yet (it is of a lazy module); call the "
                            "model once, on all ranks, before replicate."
                        )
            state = {name: one.detach() for name, one in pairs}
            self.strategy.broadcast(state, out=state)
            new = self._slots is None or bool(self._differs())
            if self.strategy.all_reduce("MAX", int(new)):
                self._make_room()
        self.forget()
        self.renewed()

    def _differs(self) -> str:
        """Return which parameter is another one than there was room made for; "" if none is."""
        for module, key, p, wants in self._slots or ():
            if module.get(key) is not p or (p is not None and p.requires_grad != wants):
                return key
        return ""

    def _make_room(self) -> None:
        """Take memory for the gradients of what requires grad, and hook it. Collective."""
        self.close()
        # Layers that meet in every pass; a rank without rows has to be there.
        meets = [one for one in self._model.modules() if hasattr(one, "of_ranks")]
        for one in meets:
            one.of_ranks(self.strategy)
        self._meets = bool(meets)
        named = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
        self.names, self.params = [n for n, _ in named], [p for _, p in named]
        laid = [in_storage_order(p.detach()) for p in self.params]
        specs = [*[one for one, _ in laid], torch.empty(len(named))]
        *buffers, self._used = self.strategy.gradient_buffers(specs)
        self.arrays = [as_array(one) for one in buffers]
        self._all = [*self.arrays, as_array(self._used)]
        self.views = [b.permute(back) for b, (_, back) in zip(buffers, laid, strict=True)]
        for i, p in enumerate(self.params):
            p.grad = None
            hook = functools.partial(self._arrived, i)
            self._hooks.append(p.register_post_accumulate_grad_hook(hook))
        self._slots = [
            (module._parameters, key, p, p is not None and p.requires_grad)
            for module in self._model.modules()
            for key, p in module._parameters.items()
        ]

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def check(self) -> None:
        """Raise ContextError if parameters were replaced, frozen or unfrozen."""
        which = self._differs()
        if which:
            raise ContextError(
                f"parameter {which!r} was replaced (load_state_dict(assign=True), setattr), frozen "
                "or unfrozen after replicate, so its gradients would stay on this rank. Call "
                "mpistrat.torch.replicate(model) again, on all ranks."
            )

    # Calls of the model

    def wanted(self) -> bool:
        """Tell whether a call of the model may have a backward pass."""
        return not self._inside and torch.is_grad_enabled()

    def call(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model, or make an output of no rows where it is given none."""
        rows = self._prepare(args, kwargs)
        self._inside = True
        try:
            runs = rows or self._meets or self.strategy.num_replicas_in_sync == 1
            out = forward(*args, **kwargs) if runs else self._nothing(args, kwargs)
        finally:
            self._inside = False
        self._watch(out, rows)
        return out

    def _prepare(self, args: Any, kwargs: Any) -> float:
        """Return how many rows the arguments are."""
        if torch._C._current_graph_task_id() == -1:
            self._open = False  # of a pass that has failed
        self.check()
        return float(self._rows(*args, **kwargs))

    def _watch(self, out: Any, rows: float) -> None:
        """Count the rows of an output in each backward pass that comes through it."""
        self._last, counted = rows, 0

        def came(_: Any) -> None:
            nonlocal counted
            self._begin()
            if counted != self._pass:
                counted = self._pass
                self._now += rows

        for one in tensors_in(out):
            if one.grad_fn is not None:
                one.register_hook(came)

    def _nothing(self, args: Any, kwargs: Any) -> Any:
        """Return what the model would give for no rows, without running it."""
        pairs = [*self._model.named_parameters(), *self._model.named_buffers()]
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # shapes without contents

        def fake(leaf: Any) -> Any:
            return mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

        try:
            with mode:
                mine = {name: fake(one) for name, one in pairs}
                some = [nest.map(fake, given) for given in (args, kwargs)]
                out = torch.func.functional_call(self._model, mine, *some)
        except Exception as error:
            raise ContextError(
                "this rank has no rows, and what the model would give for none is not known "
                f"without running it: {error}\n  Call mpistrat.torch.take_part(model) in place of "
                "the model, the loss and its backward pass where a rank has no rows."
            ) from error
        anchor = torch.zeros((), requires_grad=True)
        return nest.map(functools.partial(_empty, anchor), out)

    # Backward passes

    def _begin(self) -> None:
        if self._open:
            return
        self._open, self._seen, self._now = True, False, 0.0
        self._pass += 1
        if self._passes and all(p.grad is None for p in self.params):
            self.forget()  # the program has dropped what had been added up
        if self._passes:
            self._scaling = [p.register_hook(self._scaled) for p in self.params]
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _scaled(self, gradient: Any) -> Any:
        """Let passes that are added up count by their rows, as they would in one process."""
        now = self._now or self._last
        return gradient if now == self._base else gradient * (now / (self._base or now))

    def _arrived(self, i: int, p: Any) -> None:
        """Keep the gradient of a parameter, which has just been accumulated."""
        self._begin()
        self._seen = True
        gradient, view = p.grad, self.views[i]
        if gradient is view:
            return
        if gradient.layout is not torch.strided:
            raise LeafTypeError(
                f"the gradient of {self.names[i]!r} is sparse; of replicated models gradients are "
                "dense. Make the embedding with sparse=False."
            )
        if gradient.requires_grad:
            raise ContextError(
                f"the gradient of {self.names[i]!r} was made with create_graph=True, and no "
                "gradient passes the ranks' mean. Use torch.autograd.grad for higher gradients."
            )
        view.copy_(gradient)
        p.grad = view

    def _end(self) -> None:
        self._open = False
        for hook in self._scaling:
            hook.remove()
        self._scaling = []
        if not self._seen and self._now:  # torch.autograd.grad, which leaves p.grad alone
            return
        now = self._now if self._now or not self._seen else self._last
        self._passes += 1
        self.weight += now
        self._base = self._base or now
        self.versions = [view._version for view in self.views]
        if self.syncing and not self.deferred:
            self._fold()

    def take_part(self) -> None:
        """Be in a backward pass without rows. Collective, unless passes add up."""
        self._open = False
        self.check()
        self._pass += 1
        self._passes += 1
        if self.syncing and not self.deferred:
            self._fold()

    def ready(self) -> list[bool]:
        """Make the buffers what this rank has to give; return which of them have a gradient."""
        for p, view in zip(self.params, self.views, strict=True):
            if p.grad is None:
                view.zero_()
            elif p.grad is not view:
                view.copy_(p.grad)
        if self._passes > 1 and self.weight and self._base * self._passes != self.weight:
            for view in self.views:
                view *= self._base * self._passes / self.weight
        return [p.grad is not None for p in self.params]

    def _fold(self) -> None:
        parts = self.strategy.parts
        parts.lockstep.check()
        self._used.copy_(torch.tensor(self.ready(), dtype=torch.float32))
        with as_replica(self.strategy):
            self._compare()
            in_replica(parts, "MEAN", self._all, self.weight, self._all)
        self.give((self._used > 0).tolist())

    def give(self, used: list[bool]) -> None:
        """Show the program the gradients, and begin anew."""
        for p, view, has in zip(self.params, self.views, used, strict=True):
            p.grad = view if has else None
        self.forget()

    def forget(self) -> None:
        """Begin anew with adding up."""
        self._passes, self._base, self.weight = 0, 0.0, 0.0
        self.versions = []

    def _compare(self) -> None:
        """Compare one parameter of all ranks now and then, another one each time. Collective."""
        every, self._folds = self.strategy.parts.lockstep.options.check_every, self._folds + 1
        if self.params and every and self._folds % every == 0:
            i = self._folds // every % len(self.params)
            check_same(self.strategy.parts, {self.names[i]: self.params[i].detach()})


def _empty(anchor: Any, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not leaf.is_floating_point():
        return torch.zeros(leaf.shape, dtype=leaf.dtype)
    nothing = torch.full(leaf.shape, float("nan"), dtype=leaf.dtype)
    return nothing + anchor.to(leaf.dtype)
