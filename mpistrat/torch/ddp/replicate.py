"""`replicate`: the same weights on every rank, and the same gradients after each backward pass."""

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
from mpistrat.strategy.strategy import Strategy
from mpistrat.torch.ddp.gradients import Gradients
from mpistrat.torch.ddp.rows import count_first_rows
from mpistrat.torch.states import GRADIENTS, find_gradients

__all__ = ["Replicated", "gradients_of", "no_sync", "replicate", "take_part"]

Model = TypeVar("Model", bound=torch.nn.Module)

_replicated_classes: dict[type, type] = {}


@final
class _CallDescriptor:
    """The ``__call__`` of replicated models, which torch.compile leaves to Python.

    Dynamo compiles the functions that it calls. Dynamo has to know that before it sees a model, and
    its import takes seconds; so `__get__` configures it if the program has imported it.
    """

    def __init__(self) -> None:
        self._has_told_dynamo = False

    def __get__(self, model: torch.nn.Module, cls: type | None = None) -> Any:
        dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
        if not self._has_told_dynamo and hasattr(dynamo, "skip_code"):
            for function in (_call_replicated, Gradients.call_model, Gradients.can_have_backward):
                dynamo.skip_code(function.__code__)
            for name in (
                "_count_argument_rows",
                "_create_empty_output",
                "_watch_output",
            ):  # with all that they call
                setattr(Gradients, name, torch.compiler.disable(getattr(Gradients, name)))
            self._has_told_dynamo = True
        return functools.partial(_call_replicated, model)


def _call_replicated(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the model, and record the number of rows for its gradients."""
    gradients, forward = model.__dict__.get(GRADIENTS), super(Replicated, model).__call__
    if gradients is None or not gradients.can_have_backward():
        return forward(*args, **kwargs)
    return gradients.call_model(forward, args, kwargs)


class Replicated(torch.nn.Module):
    """The base class that `replicate` adds to the class of a model.

    Copies and pickles of the model are ordinary models of its original class.
    """

    __call__ = _CallDescriptor()

    def __deepcopy__(self, memo: Any) -> Any:
        """Return an ordinary model, copied by its own class, as modules of torch.fx need."""
        replicated_class, gradients = type(self), self.__dict__.pop(GRADIENTS, None)
        self.__class__ = _find_original_class(self)
        try:
            return copy.deepcopy(self, memo)
        finally:
            self.__class__ = replicated_class
            self.__dict__[GRADIENTS] = gradients

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the pickle of an ordinary model of the original class."""
        state = super().__reduce_ex__(2)[2]
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != GRADIENTS}
        plain_class = _find_original_class(self)
        return copyreg._reconstructor, (plain_class, object, None), state  # type: ignore[attr-defined]


def _find_original_class(model: torch.nn.Module) -> type:
    """Return the class of a model before `replicate`."""
    classes = type(model).__mro__
    return classes[classes.index(Replicated) + 1] if Replicated in classes else classes[0]


def replicate(
    model: Model, strategy: Strategy | None = None, rows: Callable[..., float] | None = None
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
      model: Any module on the CPU; it is changed in place. Parameters that do not require grad are
        not changed, nor are names and ``state_dict``.
      strategy: The strategy; None for the current one.
      rows: Returns how many rows a call is for, ``rows(*args, **kwargs)`` of the arguments of the
        model. None: the first dimension of the first tensor in them, in objects of the program too.

    Returns:
      `model`, of a class derived from its own. Running statistics and other buffers of the model
      begin with replica 0's values and are each rank's own from then on; see `SyncBatchNorm`.

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
        gradients.synchronize_weights()
        return model
    plain_class = _find_original_class(model)
    if gradients is not None:
        gradients.close()
        gradients.on_weights_renewed = None
    model.__dict__[GRADIENTS] = Gradients(model, strategy, rows or count_first_rows)
    if plain_class not in _replicated_classes:
        _replicated_classes[plain_class] = type(
            f"Replicated{plain_class.__name__}", (Replicated, plain_class), {}
        )
    model.__class__ = _replicated_classes[plain_class]
    return model


def gradients_of(model: torch.nn.Module, call_name: str) -> Gradients:
    """Return the gradients of a replicated model; raise TypeError for another model.

    Args:
      model: The model, or a module that has it inside, such as ``torch.compile(model)``.
      call_name: The call that needs one, for the error.
    """
    candidates = find_gradients(model) if isinstance(model, torch.nn.Module) else []
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
def no_sync(model: torch.nn.Module) -> Iterator[None]:
    """Return a context manager in which backward passes add up gradients on this rank alone.

    The first backward pass after it makes them the same on all ranks: the mean over the rows of
    all these passes, times how many passes there were, as one process has it that adds up. To drop
    what was added up, all ranks call ``zero_grad`` of the model or of the optimizer that has all
    its parameters, to None or to zeros. A value of ``p.grad`` from before the first of these passes
    is put aside until then, and added without a weight.

    Collective: all ranks enter it as often.

    Cost: from the second of these passes on, room for the gradients of one more until it ends.

    Args:
      model: The result of `replicate`.

    Raises:
      TypeError: `model` was not replicated.
    """
    gradients = gradients_of(model, "no_sync")
    was_syncing, gradients.is_syncing, gradients.has_unsynced_passes = (
        gradients.is_syncing,
        False,
        True,
    )
    try:
        yield
    finally:
        gradients.is_syncing = was_syncing


def take_part(model: torch.nn.Module) -> None:
    """Take part in a backward pass of the other ranks, with no rows and without a loss.

    For loops that do not call the model where a rank has no rows. Collective: the others are in
    ``loss.backward()``.

    Args:
      model: The result of `replicate`.

    Raises:
      TypeError: `model` was not replicated.
    """
    gradients_of(model, "take_part").take_part()
