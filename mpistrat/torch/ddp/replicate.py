"""A model on every rank: alike at the start, and one gradient for all after each backward pass."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, final

import torch

from mpistrat.strategy.strategies import resolve_strategy
from mpistrat.torch.ddp.gradients import Gradients
from mpistrat.torch.ddp.rows import first_rows
from mpistrat.torch.states import GRADIENTS, all_gradients

__all__ = ["Replicated", "gradients_of", "no_sync", "replicate", "take_part"]

Model = TypeVar("Model", bound=torch.nn.Module)

_classes: dict[type, type] = {}


@final
class _Call:
    """The ``__call__`` of replicated models, which torch.compile leaves to Python.

    What it calls is compiled. Dynamo has to be told before it looks at a model, and to import it
    takes seconds; so that is done when a method is asked for.
    """

    def __init__(self) -> None:
        self._has_told_dynamo = False

    def __get__(self, model: Any, cls: type | None = None) -> Any:
        dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
        if not self._has_told_dynamo and hasattr(dynamo, "skip_code"):
            for function in (_call, Gradients.call, Gradients.can_have_backward):
                dynamo.skip_code(function.__code__)
            for name in ("_prepare", "_create_empty_output", "_watch"):  # with all that they call
                setattr(Gradients, name, torch.compiler.disable(getattr(Gradients, name)))
            self._has_told_dynamo = True
        return functools.partial(_call, model)


def _call(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the model, and note how many rows its gradients will be the mean of."""
    gradients, forward = model.__dict__.get(GRADIENTS), super(Replicated, model).__call__
    if gradients is None or not gradients.can_have_backward():
        return forward(*args, **kwargs)
    return gradients.call(forward, args, kwargs)


class Replicated(torch.nn.Module):
    """What `replicate` adds to the class of a model.

    Copies of the model, and what is pickled of it, are ordinary models of the class that it was.
    """

    __call__ = _Call()

    def __deepcopy__(self, memo: Any) -> Any:
        """Return an ordinary model, made in the way of its class: modules of torch.fx have one."""
        replicated, gradients = type(self), self.__dict__.pop(GRADIENTS, None)
        self.__class__ = _find_original_class(self)
        try:
            return copy.deepcopy(self, memo)
        finally:
            self.__class__ = replicated
            self.__dict__[GRADIENTS] = gradients

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to make an ordinary model of it, as it was before `replicate`."""
        state = super().__reduce_ex__(2)[2]
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != GRADIENTS}
        plain_class = _find_original_class(self)
        return copyreg._reconstructor, (plain_class, object, None), state  # type: ignore[attr-defined]


def _find_original_class(model: Any) -> type:
    """Return the class that a model was of before `replicate`."""
    classes = type(model).__mro__
    return classes[classes.index(Replicated) + 1] if Replicated in classes else classes[0]


def replicate(
    model: Model, strategy: Any = None, rows: Callable[..., float] | None = None
) -> Model:
    """Give all ranks replica 0's weights, and from now on the same gradients.

    After ``loss.backward()`` each ``p.grad`` is the mean over the rows of all ranks, in memory that
    the ranks of a node share, so what follows needs no change: ``clip_grad_norm_``, optimizers and
    schedulers of PyTorch. The next backward pass writes to that memory: keep ``p.grad.clone()`` of
    a gradient that is needed later. The loss has to be the mean over the rows of the batch. A rank
    with 3 of 4 rows counts for 3. A rank without rows does not run the model: calling it there
    gives an output of no rows, of the shapes that the model would give, and its backward pass takes
    part.

    Collective: all ranks call it, in the thread of the strategy, and so is each backward pass
    outside of `no_sync`. Call it again after the weights were set by anything else than an
    optimizer (``load_state_dict``), or parameters were replaced.

    Args:
      model: Any module on the CPU; it is changed where it is. Parameters that do not require grad
        are left alone. Names and ``state_dict`` stay as they are.
      strategy: The strategy; None for the current one.
      rows: How many rows a call stands for: ``rows(*args, **kwargs)`` of the arguments of the
        model. None: the first dimension of the first tensor in them, in objects of the program too.

    Returns:
      `model`, of a class derived from its own. Running statistics and other buffers of the model
      begin as replica 0's and are each rank's own then; see `SyncBatchNorm`.

    Raises:
      TypeError: `model` is not a module, `strategy` no strategy, or `rows` no function.
      ContextError: No strategy is in scope, in a job of several ranks.
      LeafTypeError: A parameter is not on the CPU, or lazy.
      LockstepError: Names, shapes, dtypes or the order of parameters differ between ranks.

    Cost: weights and buffers are broadcast. Then, in each backward pass, one copy of each gradient
    while it is in cache, and one all-reduce of all of them when it ends, at memory bandwidth on
    one node. One rank has nothing to reduce, and leaves gradients where PyTorch has made them; only
    passes that add up in `no_sync` are copied. Weights and the state of an optimizer of PyTorch are
    each rank's own; `FusedOptimizer` has both once per node.

    Example:
      >>> import mpistrat as ms
      >>> model = replicate(torch.nn.Linear(2, 1), ms.OneDeviceStrategy("cpu"))
      >>> model(torch.ones(4, 2)).mean().backward()
      >>> tuple(model.weight.grad.shape)
      (1, 2)
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"replicate: {model!r:.60} is not a torch.nn.Module. Write replicate(model, strategy)."
        )
    if rows is not None and not callable(rows):
        raise TypeError(
            f"replicate: rows is {rows!r:.60}; expected a function of what the model is called "
            "with, such as rows=lambda tokens, lengths: len(lengths)."
        )
    gradients = model.__dict__.get(GRADIENTS)
    if strategy is None and gradients is not None:
        strategy = gradients.strategy
    strategy = resolve_strategy(strategy, "replicate", "Write replicate(model, strategy)")
    if gradients is not None and gradients.strategy is strategy:
        gradients.begin_alike()
        return model
    plain_class = _find_original_class(model)
    if gradients is not None:
        gradients.close()
        gradients.renewed = None
    model.__dict__[GRADIENTS] = Gradients(model, strategy, rows or first_rows)
    if plain_class not in _classes:
        _classes[plain_class] = type(
            f"Replicated{plain_class.__name__}", (Replicated, plain_class), {}
        )
    model.__class__ = _classes[plain_class]
    return model


def gradients_of(model: Any, call_name: str) -> Gradients:
    """Return the gradients of a replicated model; raise TypeError for another model.

    Args:
      model: The model, or a module that has it inside, such as ``torch.compile(model)``.
      call_name: The call that needs one, for the error.
    """
    candidates = all_gradients(model) if isinstance(model, torch.nn.Module) else []
    if len(candidates) != 1:
        count_text = (
            f"; in it are {len(candidates)} such models, give one of them" if candidates else ""
        )
        raise TypeError(
            f"{call_name}: {type(model).__name__} is not what replicate(model) "
            f"returned{count_text}. Give the model that mpistrat.torch.replicate(model, strategy) "
            "returned."
        )
    gradients: Gradients = candidates[0]
    return gradients


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Return a context manager in which backward passes add up gradients on this rank alone.

    The first backward pass after it makes them the same on all ranks: the mean over the rows of
    all these passes, times how many passes there were, as one process has it that adds up. To drop
    what was added up, all ranks call ``zero_grad`` of the model or of the optimizer that has all
    its parameters, to None or to zeros. What ``p.grad`` was before the first of these passes is
    put aside until then, and added as it is.

    Collective: all ranks enter it as often.

    Cost: from the second of these passes on, room for the gradients of one more until it ends.

    Args:
      model: What `replicate` returned.

    Raises:
      TypeError: It is not.
    """
    gradients = gradients_of(model, "no_sync")
    was_syncing, gradients.syncing, gradients.has_unsynced_passes = gradients.syncing, False, True
    try:
        yield
    finally:
        gradients.syncing = was_syncing


def take_part(model: Any) -> None:
    """Take part in a backward pass of the other ranks, with no rows and without a loss.

    For loops that do not call the model where a rank has no rows. Collective: the others are in
    ``loss.backward()``.

    Args:
      model: What `replicate` returned.

    Raises:
      TypeError: It is not.
    """
    gradients_of(model, "take_part").take_part()
