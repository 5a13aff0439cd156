"""Functions that every rank runs in cross-replica code, and the handshake that all did the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

import numpy as np

from mpistrat import nest
from mpistrat.arrays import sealed
from mpistrat.distribute import writes
from mpistrat.distribute.arguments import explain_arguments
from mpistrat.distribute.kinds import DistributedVariable
from mpistrat.distribute.mode import Mode
from mpistrat.distribute.regroup import select
from mpistrat.distribute.replica_group import StrategyBase
from mpistrat.distribute.values import Mirrored, PerReplica
from mpistrat.distribute.writes import is_data
from mpistrat.errors import LockstepError, StrategyError, StructureError
from mpistrat.lockstep.ranks import Caught

_ADVICE = (
    "fn must be given, write and return the same on every rank. What depends on the rank has to be "
    "reduced first: extended.reduce_to(op, value, variable)."
)
_PER_REPLICA_ARGUMENT = "a value per replica among the arguments"
_WRITTEN, _ARGUMENT, _RETURNED = "what fn wrote", "an argument", "what fn returned"


@final
class _DifferentArguments(StructureError, LockstepError):
    """Values per replica were given that differ, where all replicas need the same."""


# Programs know it by its bases.
_DifferentArguments.__name__ = _DifferentArguments.__qualname__ = StructureError.__name__
_DifferentArguments.__module__ = StructureError.__module__


def own_variable(strategy: StrategyBase, name: str, var: Any) -> None:
    """Raise StrategyError unless `var` is a variable of this strategy."""
    if not isinstance(var, DistributedVariable) or var.strategy is not strategy:
        raise StrategyError(
            f"{name}: expected a variable created in the scope of {strategy!r}, got {var!r:.80}."
        )


def mirrored(strategy: StrategyBase, tree: Any) -> Any:
    """Return `tree` with its data as `Mirrored`, where the view shows that."""
    if not strategy.replicas.view.wraps:
        return tree
    size = strategy.replicas.lockstep.comm.size
    return nest.map(lambda leaf: Mirrored(_seal_array(leaf), size) if is_data(leaf) else leaf, tree)


def _seal_array(leaf: Any) -> Any:
    return sealed(leaf) if type(leaf) is np.ndarray else leaf


def update(
    strategy: StrategyBase, var: Any, fn: Callable[..., Any], inputs: tuple[Any, Any], group: bool
) -> Any:
    """Let `fn` write this rank's copy of `var`; see `StrategyExtended.update`."""
    lockstep = strategy.replicas.lockstep
    with lockstep.preparing("update"):
        own_variable(strategy, "update", var)
    lockstep.check()
    if lockstep.state.unproved:
        # So that what is put back, if this fails, is what was there before this.
        lockstep.handshake(f"update({var.spec()}), what was written before it")
    with lockstep.preparing("update"):
        restore = var.storage.snapshot()
    result, call = None, f"update({var.spec()})"
    contents: dict[str, Any] = {}
    with Caught() as caught:  # a way out of the program is one that all ranks have to know
        local_args, named = select(inputs)
        with Mode(strategy, updating=var):
            try:
                result = fn(var, *local_args, **named)
            except TypeError as error:
                partial = functools.partial(fn, var)
                explain_arguments("update", partial, local_args, named, error)
                raise
        call += f" of {nest.describe(nest.flatten((inputs, result))[1])}"
        if not var.on_read and lockstep.comm.size > 1:
            # Each write to a large variable was compared already.
            contents = {} if var.large else {_WRITTEN: var.component()}
            # What an all-reduce gave to replica code is alike too, though `merge_call` brings it as
            # a value per replica; optimizers written for tf.distribute hand gradients on like that.
            contents[_ARGUMENT] = writes.contents(inputs, lockstep.session)
            local_values = _list_local_values(inputs)
            contents[_PER_REPLICA_ARGUMENT] = writes.contents(local_values, lockstep.session)
            contents[_RETURNED] = writes.contents(result, lockstep.session)
    try:
        kinds = {_PER_REPLICA_ARGUMENT: _DifferentArguments}
        writes.prove_same(lockstep, call, contents, _ADVICE, caught.failure, kinds)
    except BaseException:
        restore()
        raise
    return _returned(strategy, call, result, group, each=var.on_read)


def update_non_slot(
    strategy: StrategyBase, fn: Callable[..., Any], inputs: tuple[Any, Any], group: bool
) -> Any:
    """Let `fn` run on every rank; see `StrategyExtended.update_non_slot`."""
    lockstep = strategy.replicas.lockstep
    has_per_replica = any(isinstance(leaf, PerReplica) for leaf in nest.flatten(inputs)[0])
    result, call = None, "update_non_slot"
    contents: dict[str, Any] = {}
    with Caught() as caught:
        # Values per replica among the arguments differ; everything else must be the same.
        contents = {_ARGUMENT: writes.contents(inputs, lockstep.session)}
        local_args, named = select(inputs)
        with Mode(strategy):
            result = fn(*local_args, **named)
        call += f" of {nest.describe(nest.flatten((inputs, result))[1])}"
        if not has_per_replica:
            contents[_RETURNED] = writes.contents(result, lockstep.session)
    writes.prove_same(lockstep, call, contents, _ADVICE, caught.failure)
    return _returned(strategy, call, result, group, has_per_replica)


def _returned(strategy: StrategyBase, call: str, result: Any, group: bool, each: bool) -> Any:
    """Return the results of `fn`: mirrored, or, if `each` replica has its own, all of them."""
    if not each:
        return mirrored(strategy, result) if group else _ungrouped(strategy, result)
    visible_results = strategy.replicas.regroup.gathered(f"{call}, its results", result)
    return (
        visible_results if group else nest.map(strategy.experimental_local_results, visible_results)
    )


def _list_local_values(tree: Any) -> list[Any]:
    """Return what this replica has of the values per replica in a tree."""
    return [leaf.local for leaf in nest.flatten(tree)[0] if isinstance(leaf, PerReplica)]


def _ungrouped(strategy: StrategyBase, result: Any) -> Any:
    visible_count = strategy.replicas.lockstep.comm.size if strategy.replicas.view.wraps else 1
    return nest.map(lambda leaf: (leaf,) * visible_count, result)
