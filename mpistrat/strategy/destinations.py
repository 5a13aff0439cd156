"""Destinations of reductions: checked, and as texts of calls name them; and `broadcast` to them.

Functions that every rank runs in cross-replica code, and the handshake that all did the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import Array, as_array, is_scalar, seal, spec_text
from mpistrat.comm.serialization import decode, encode
from mpistrat.errors import LockstepError, StrategyError, StructureError
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import Caught
from mpistrat.strategy.context_stack import Mode
from mpistrat.strategy.replica_group import Delegate, Ops, StrategyBase, like
from mpistrat.variables import writes
from mpistrat.variables.arguments import explain_arguments
from mpistrat.variables.indexed_slices import IndexedSlices
from mpistrat.variables.kinds import DistributedVariable
from mpistrat.variables.regroup import select
from mpistrat.variables.values import DistributedValues, Mirrored, PerReplica
from mpistrat.variables.writes import is_data, prove_same

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
    return pytree.map(
        lambda leaf: Mirrored(_seal_array(leaf), size) if is_data(leaf) else leaf, tree
    )


def _seal_array(leaf: Any) -> Any:
    return seal(leaf) if type(leaf) is np.ndarray else leaf


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
        call += f" of {pytree.describe(pytree.flatten((inputs, result))[1])}"
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
    has_per_replica = any(isinstance(leaf, PerReplica) for leaf in pytree.flatten(inputs)[0])
    result, call = None, "update_non_slot"
    contents: dict[str, Any] = {}
    with Caught() as caught:
        # Values per replica among the arguments differ; everything else must be the same.
        contents = {_ARGUMENT: writes.contents(inputs, lockstep.session)}
        local_args, named = select(inputs)
        with Mode(strategy):
            result = fn(*local_args, **named)
        call += f" of {pytree.describe(pytree.flatten((inputs, result))[1])}"
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
        visible_results
        if group
        else pytree.map(strategy.experimental_local_results, visible_results)
    )


def _list_local_values(tree: Any) -> list[Any]:
    """Return what this replica has of the values per replica in a tree."""
    return [leaf.local for leaf in pytree.flatten(tree)[0] if isinstance(leaf, PerReplica)]


def _ungrouped(strategy: StrategyBase, result: Any) -> Any:
    visible_count = strategy.replicas.lockstep.comm.size if strategy.replicas.view.wraps else 1
    return pytree.map(lambda leaf: (leaf,) * visible_count, result)


# Programs for tf.distribute name devices in these ways; they choose nothing here.
_DEVICE = re.compile(r"(/\w+:\w+)*/?(device:)?(xla_)?[a-z]pu(:\d+|:\*)?", re.IGNORECASE)


def check_destinations(strategy: StrategyBase, name: str, destinations: Any) -> None:
    """Raise unless results of `strategy` can have these destinations.

    Args:
      strategy: Whose call it is.
      name: The call that they were given to.
      destinations: A variable, a distributed value (where values come unwrapped, an array, a number
        or `IndexedSlices`), a label of one of the strategy's devices, or a device as tf.distribute
        names them, such as ``"/cpu:0"``.

    Raises:
      StructureError: They are something else.
      StrategyError: It is the variable or value of another strategy.
    """
    if isinstance(destinations, DistributedValues | DistributedVariable):
        strategy.replicas.regroup.check(name, [destinations])
        return
    # Where values are not wrapped, each is a plain one, and can be a destination too.
    is_value = isinstance(destinations, np.ndarray | IndexedSlices) or is_scalar(destinations)
    if is_value and not strategy.replicas.view.wraps:
        return
    if not isinstance(destinations, str) or not destinations:
        raise StructureError(
            "destinations must be a variable, a distributed value or the label of a device, not "
            f"{destinations!r:.80}."
        )
    labels = strategy.device_labels
    device_names = {*labels, *(f"rank:{rank}" for rank in range(len(labels)))}
    device_names.add(getattr(strategy, "parameter_device", labels[0]))
    if destinations not in device_names and not _DEVICE.fullmatch(destinations):
        raise StructureError(
            f"{name}: destinations must be the label of a device, but there is no "
            f"{destinations!r:.80}; the devices of {strategy!r} are {list(labels)!r:.200}."
        )


def checked_pairs(
    strategy: StrategyBase, name: str, value_destination_pairs: Any
) -> list[tuple[Any, Any]]:
    """Return the pairs of value and destinations as a list.

    Args:
      strategy: Whose call it is.
      name: The call that they were given to.
      value_destination_pairs: What was given.

    Raises:
      StructureError: These are not tuples of two, or there are no such destinations.
      StrategyError: They are another strategy's.
    """
    try:
        pairs = list(value_destination_pairs)
    except TypeError:
        pairs = [None]
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise StructureError(
            f"{name}: expected a list of tuples (value, destinations), got "
            f"{value_destination_pairs!r:.80}."
        )
    for _, destinations in pairs:
        check_destinations(strategy, name, destinations)
    return pairs


def place(destinations: Any) -> str:
    """Return what the handshake says of the destinations."""
    if isinstance(destinations, DistributedVariable):
        return f" to {destinations.spec()}"
    return f" to {destinations!r}" if isinstance(destinations, str) else " to a value"


def at_destinations(results: Sequence[Any], pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Return the results of some values, each as its destinations want it: one device has one."""
    return [
        select(result) if isinstance(destinations, str) else result
        for result, (_, destinations) in zip(results, pairs, strict=True)
    ]


def broadcast(
    strategy: StrategyBase, tensor: Any, destinations: Any, delegate: Delegate | None = None
) -> Any:
    """Broadcast replica 0's value to all replicas; see `StrategyExtended.broadcast_to`. Collective.

    Args:
      strategy: Whose replicas.
      tensor: Array or number.
      destinations: As `check_destinations` takes them.
      delegate: The `CrossDeviceOps` of the program that moves it; None for MPI.

    Cost: one handshake and a broadcast; with a class of the program, two and what it does.
    """
    lockstep = strategy.replicas.lockstep
    with lockstep.preparing("broadcast_to"):
        check_destinations(strategy, "broadcast_to", destinations)
        array = np.array(as_array(select(tensor)), order="C")
    if not strategy.replicas.view.wraps:
        return tensor
    # np.float64 is a float; but it is an array to programs, as every number of NumPy's.
    is_number = isinstance(tensor, int | float) and not isinstance(tensor, np.generic)
    call = f"broadcast_to({spec_text(array)}){place(destinations)}"
    if delegate is not None:
        array = _by_class(lockstep, call, delegate.ops, array, destinations)
        if is_number:
            return type(tensor)(array.item())
    elif is_number:
        kind, data = encode(tensor, is_unlimited=True)
        return decode(
            kind, lockstep.gather_payloads(f"broadcast_to({type(tensor).__name__})", data)[0]
        )
    else:
        lockstep.handshake(call)
        lockstep.comm.bcast(array, 0)
    return array if isinstance(destinations, str) else mirrored(strategy, array)


def _by_class(lockstep: Lockstep, call: str, ops: Ops, array: Array, destinations: Any) -> Array:
    call = f"{call} by {type(ops).__module__}.{type(ops).__qualname__}"
    lockstep.handshake(call)
    result = array
    with Caught(Exception) as caught:
        result = like(ops, ops.broadcast(array.copy(), destinations), array)
    advice = "A CrossDeviceOps must return the same on every rank."
    compared_contents = {"what the class returned": result}
    prove_same(lockstep, f"{call}, made", compared_contents, advice, caught.failure)
    return result
