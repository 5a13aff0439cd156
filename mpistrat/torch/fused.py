"""Optimizers of `mpistrat.optim` for models: weights and state once per node, one pass for all."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, final

import numpy as np
import torch
import xxhash

from mpistrat.arena.storage import LEAST, NodeStorage
from mpistrat.distribute.mode import as_replica
from mpistrat.distribute.reduce import in_replica
from mpistrat.distribute.variables import Variable
from mpistrat.errors import ContextError, LeafTypeError
from mpistrat.lockstep.guards import warn
from mpistrat.optim.optimizer import Optimizer
from mpistrat.sharedmem.overlay import tells_of_writes
from mpistrat.torch.replicate import gradients_of
from mpistrat.torch.stepping import all_alike
from mpistrat.torch.tensors import as_array, tensor_of

__all__ = ["FusedOptimizer"]

_SAVED = "A mpistrat.Checkpoint(model=model, optimizer=this one) saves and restores it"
_USED_UP = (
    "FusedOptimizer.step: there was no backward pass of the model since the last step() or "
    "zero_grad(), and gradients that are still there are used up. Call loss.backward() before each "
    "step(); gradients that the program sets itself are for apply_gradients of mpistrat.optim."
)
_RATES = (
    "Rates and groups are of its optimizer, as in mpistrat.optim.AdamW(mpistrat.optim.Cosine(1e-3, "
    "1000)), not of schedulers of PyTorch; a scaler of the loss is for float16, use torch.autocast "
    "with bfloat16"
)
_OF_TORCH = {
    **dict.fromkeys(("state", "state_dict", "load_state_dict"), _SAVED),
    **dict.fromkeys(("param_groups", "add_param_group", "defaults"), _RATES),
    **{name: f"Call optimizer.optimizer.{name}()" for name in ("flush", "discard")},
}
_address, _version = torch.Tensor.data_ptr, operator.attrgetter("_version")


@final
class FusedOptimizer:
    """Updates a replicated model by an optimizer of `mpistrat.optim`.

    Weights move to memory that the ranks of a node share; each rank maps it. ``step()`` reduces the
    gradients of all ranks and updates weights and state in one pass over memory, of which each rank
    does a part; then every rank sees the new weights. A backward pass does not communicate, and
    ``p.grad`` stays this rank's own gradient: to clip, use ``clip=`` of the optimizer. Weights are
    in C order from then on, as in checkpoints, also those that were ``channels_last``.

    If the program writes to a weight, only this rank's copy changes, and the next ``step()`` raises
    an error that names the parameter. A step of an optimizer of ``torch.optim`` that has some of
    the parameters raises an error on all ranks.

    Collective: all ranks create it, with the same optimizer.

    Args:
      model: What `replicate` returned.
      optimizer: An optimizer of `mpistrat.optim`, such as ``mpistrat.optim.AdamW(1e-3)``, with its
        schedules, groups, clipping, averages and ``shard="all"``.

    Attributes:
      optimizer: The optimizer of `mpistrat.optim`.
      variables: The weights by the names that the model gives them: of small ones each rank has a
        copy.

    Raises:
      TypeError: `model` is not replicated, or `optimizer` is not of `mpistrat.optim`.
      LeafTypeError: A parameter that requires grad is neither float32 nor float64, or shares
        memory with another parameter or a buffer.
      LockstepError: The ranks have other models or optimizers.

    Warns:
      RuntimeWarning: ``/proc/self/pagemap`` cannot be read on a node, so each rank has its own
        copy of weights and state.

    Cost: one copy of the weights, and the state.

    Example:
      >>> import mpistrat as ms
      >>> from mpistrat.torch.replicate import replicate
      >>> model = replicate(torch.nn.Linear(2, 1), ms.OneDeviceStrategy("cpu"))
      >>> optimizer = FusedOptimizer(model, ms.optim.SGD(0.5))
      >>> before = model.weight.detach().clone()
      >>> model(torch.ones(4, 2)).mean().backward()
      >>> optimizer.step()
      >>> bool((model.weight < before).all())
      True
    """

    def __init__(self, model: Any, optimizer: Optimizer):
        """Move the weights, and create the state."""
        self._gradients = gradients = gradients_of(model, "FusedOptimizer")
        given: Any = optimizer
        if not isinstance(given, Optimizer):
            what = given if isinstance(given, type) else type(given).__name__
            raise TypeError(
                f"FusedOptimizer: {what} is not an optimizer of mpistrat.optim, "
                "such as mpistrat.optim.AdamW(1e-3). One of torch.optim needs no FusedOptimizer."
            )
        self.optimizer, self._steps = optimizer, 0
        strategy = gradients.strategy
        with strategy.scope():
            with strategy.replicas.lockstep.preparing("FusedOptimizer"):
                for name, p in zip(gradients.names, gradients.params, strict=True):
                    if p.dtype not in (torch.float32, torch.float64):
                        raise LeafTypeError(
                            f"FusedOptimizer: parameter {name!r} is {p.dtype}; it updates float32 "
                            "and float64. Keep weights in float32 and compute in "
                            "torch.autocast('cpu', dtype=torch.bfloat16)."
                        )
                gradients.check_apart("FusedOptimizer")
            gradients.deferred = True
            if strategy.all_reduce(
                "MAX", int(not all(p.is_contiguous() for p in gradients.params))
            ):
                gradients.make_room()
            copies = strategy.replicas.reducer.node.arena.copies
            copies.sharing = self._watched()
            try:
                self.variables = {
                    name: _moved(name, p)
                    for name, p in zip(gradients.names, gradients.params, strict=True)
                }
                optimizer.build(self.variables.values())
            finally:
                copies.sharing = True
        self._note()
        gradients.renewed = self._renew

    def step(self) -> None:
        """Reduce the gradients of all ranks, and update weights and state.

        Collective: all ranks call it, after as many backward passes.

        Raises:
          ContextError: A weight was written to on this rank, or replaced, gradients were changed
            after the backward pass, or other parameters require grad than at the start; or there
            are gradients, but no backward pass since the last step. Without gradients nothing
            happens.
          NonFiniteError: A gradient is NaN or infinite; see `mpistrat.optim.Optimizer`.
          RemoteError: Another rank failed.

        Cost: that of ``apply_gradients``, one handshake in which the ranks tell which parameters
        have gradients, and a look at the page table, 1.5 ms for 100 MB.
        """
        gradients = self._gradients
        group = gradients.strategy.replicas
        group.lockstep.check()
        with as_replica(gradients.strategy, "FusedOptimizer.step"), torch.no_grad():
            with group.lockstep.preparing("FusedOptimizer.step"):
                gradients.check()
                if gradients.wrong is not None:
                    raise gradients.wrong
                self._check()
                small = self._digest_of_small()
                mine = np.array([*gradients.ready(), gradients.passes, small, -small], np.int32)
            *mine, passes, most, least = in_replica(group, "MAX", mine, None, None).tolist()
            self._compare(most != -least)
            if any(mine) and not passes:
                group.lockstep.fail(ContextError(_USED_UP))
            gradients.scale(passes)
            pairs = zip(gradients.arrays, self.variables.values(), mine, strict=True)
            given = [(array if used else None, variable) for array, variable, used in pairs]
            if any(mine):
                self.optimizer.apply_gradients(given, weight=gradients.weight)
        torch.autograd.graph.increment_version(gradients.params)
        gradients.forget()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as ``torch.optim.Optimizer.zero_grad`` does.

        Args:
          set_to_none: Set ``p.grad`` to None; else to zeros.
        """
        for p in self._gradients.params:
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad.zero_()
        self._gradients.forget()

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError that says, of an attribute of PyTorch's optimizers, what to use."""
        advice = f". {_OF_TORCH[name]}." if name in _OF_TORCH else ""
        raise AttributeError(f"FusedOptimizer has no attribute {name!r}{advice}")

    def tree(self) -> dict[str, Any]:
        """Return the variables that a checkpoint saves: the state, not the weights."""
        return self.optimizer.tree()

    def _check(self) -> None:
        """Raise ContextError if a weight is not where it was put, or has been written to."""
        gradients = self._gradients
        if self._stale():
            raise ContextError(
                "this FusedOptimizer is not that of the model any more: another was made of it, "
                "or other parameters require grad than then, or of another dtype, or replicate "
                "was called with another strategy. Make another one."
            )
        name = _odd(gradients.names, map(_version, gradients.views), gradients.versions)
        if name is not None:
            raise ContextError(
                f"the gradient of {name!r} was changed after the backward pass, where it is "
                "this rank's own. Clip by the optimizer, "
                "clip=mpistrat.optim.ClipByGlobalNorm(...), or use one of torch.optim."
            )
        name = _odd(gradients.names, map(_address, gradients.params), self._places)
        if name is not None:
            raise _wrong(name, "was given other memory (p.data = ...)")
        for name, storage in self._shared:
            if storage.written():
                raise _wrong(name, "was written to by something else than this optimizer")

    def _digest_of_small(self) -> int:
        """Return a number of small weights, of which each rank has a copy; cost: one pass."""
        found = xxhash.xxh3_64()
        for array in self._small:
            found.update(array.data)
        return found.intdigest() >> 33

    def _compare(self, apart: bool) -> None:
        """Compare weights of which each rank has a copy. Collective.

        Args:
          apart: Some small ones differ; alike on all ranks. Of the others one is compared now and
            then.
        """
        group = self._gradients.strategy.replicas
        every, self._steps = group.lockstep.options.check_every, self._steps + 1
        own, names = self._own, list(self._own) if apart else []
        if not apart and every and self._steps % every == 0:
            large = [n for n, v in own.items() if v.storage.array.nbytes >= LEAST]
            names = large and [large[self._steps // every % len(large)]]
        if names:
            all_alike(
                group,
                {name: own[name].component() for name in names},
                "Something else than this FusedOptimizer has written to it. Set weights on all "
                "ranks, and call mpistrat.torch.replicate(model) again, which gives all of them "
                "replica 0's.",
            )

    def _watched(self) -> bool:
        """Tell whether the systems of all ranks tell which pages were written to. Collective."""
        strategy = self._gradients.strategy
        watched = bool(strategy.all_reduce("MIN", int(tells_of_writes())))
        if not watched:
            warn(
                strategy.replicas.lockstep,
                "FusedOptimizer",
                "/proc/self/pagemap, which tells what a rank has written to, cannot be read on "
                "every node. So each rank has its own copy of the weights and their state, and "
                "what a rank writes to a weight itself is found only when a copy is compared, "
                "every MPISTRAT_CHECK_EVERY steps.",
                RuntimeWarning,
                stacklevel=4,
            )
        return watched

    def _stale(self) -> bool:
        """Tell whether the gradients are not of these variables any more; alike on all ranks."""
        gradients = self._gradients
        if gradients.renewed != self._renew:
            return True
        if gradients.params is self._params:  # `check` looks at these
            return False
        now = {n: str(p.dtype)[6:] for n, p in zip(gradients.names, gradients.params, strict=True)}
        return now != {name: variable.dtype.name for name, variable in self.variables.items()}

    def _renew(self) -> None:
        """Take the weights that `replicate` has given to all ranks. Collective."""
        gradients = self._gradients
        if self._stale():  # the program makes another one, and `step` says so
            gradients.variables, gradients.deferred = {}, False
            return
        with gradients.strategy.scope():
            pairs = zip(gradients.params, self.variables.values(), strict=True)
            for p, variable in pairs:
                value = p.detach().contiguous().numpy().copy()
                if isinstance(variable.storage, NodeStorage):
                    variable.storage.take_back()
                variable.assign(value)
                p.data = _seen(variable)
        self._note()

    def _note(self) -> None:
        """Remember where the weights are, and let checkpoints know."""
        self._params = params = self._gradients.params
        self._places = [*map(_address, params)]
        self._gradients.variables = dict(zip(map(id, params), self.variables.values(), strict=True))
        stored = {name: variable.storage for name, variable in self.variables.items()}
        self._shared = [(n, one) for n, one in stored.items() if isinstance(one, NodeStorage)]
        self._own = {
            n: v for n, v in self.variables.items() if not isinstance(v.storage, NodeStorage)
        }
        self._small = [one.array for one in stored.values() if one.array.nbytes < LEAST]


def _odd(names: list[str], now: Iterable[int], wanted: list[int]) -> str | None:
    """Return the first name whose number is not the one that is wanted; None if all are."""
    found = [*now]
    if found == wanted:
        return None
    return next((n for n, x, y in zip(names, found, wanted, strict=False) if x != y), None)


def _moved(name: str, p: Any) -> Variable:
    """Return a variable with the values of a parameter, which has its memory from now on."""
    made = Variable(as_array(p.detach().contiguous()), name=name)
    p.data = _seen(made)
    return made


def _seen(variable: Variable) -> Any:
    storage = variable.storage
    if isinstance(storage, NodeStorage):
        return tensor_of(storage.lend().reshape(variable.shape))
    return tensor_of(storage.array)


def _wrong(name: str, what: str) -> ContextError:
    return ContextError(
        f"parameter {name!r} {what} on this rank, so its weights are not the ones of the other "
        "ranks. To set weights, do it on all ranks and call mpistrat.torch.replicate(model) again, "
        "which gives all of them replica 0's, or use an optimizer of torch.optim."
    )
