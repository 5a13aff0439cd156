"""Destinations of reductions, `broadcast` to them, and updates of variables.

Destinations are checked, and named in the texts of calls. `update` and `update_non_slot` let every
rank run a function of the program in cross-replica code, and end in a handshake that compares its
arguments, its results, and what it wrote to a small variable. If that fails, or the function leaves
by ``sys.exit`` or Ctrl-C, the variable is put back on every rank.
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
from mpistrat.lockstep.ranks import FailureCatcher
from mpistrat.strategy.context_stack import CodeContext
from mpistrat.strategy.replica_group import (
    CrossDeviceOpsBase,
    Delegate,
    StrategyBase,
    check_returned_array,
)
from mpistrat.variables.arguments import explain_arguments
from mpistrat.variables.indexed_slices import IndexedSlices
from mpistrat.variables.kinds import DistributedVariable
from mpistrat.variables.regroup import select_local
from mpistrat.variables.values import DistributedValues, Mirrored, PerReplica
from mpistrat.variables.writes import check_same_contents, digest_contents, is_comparable

_UPDATE_ADVICE = (
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


def check_own_variable(strategy: StrategyBase, name: str, candidate: object) -> None:
    """Raise StrategyError unless `candidate` is a variable of this strategy."""
    if not isinstance(candidate, DistributedVariable) or candidate.strategy is not strategy:
        raise StrategyError(
            f"{name}: expected a variable created in the scope of {strategy!r}, got "
            f"{candidate!r:.80}."
        )


def mirror_tree(strategy: StrategyBase, tree: object) -> Any:
    """Return `tree` with its data as `Mirrored`, where the view shows that."""
    if not strategy._replicas.view.should_wrap:
        return tree
    size = strategy._replicas.lockstep.comm.size
    return pytree.map(
        lambda leaf: Mirrored(_seal_array(leaf), size) if is_comparable(leaf) else leaf, tree
    )


def _seal_array(leaf: object) -> Any:
    return seal(leaf) if type(leaf) is np.ndarray else leaf


def update(
    strategy: StrategyBase,
    variable: Any,
    fn: Callable[..., Any],
    arguments: tuple[Any, Any],
    should_group: bool,
) -> Any:
    """Let `fn` write this rank's copy of `variable`; see `StrategyExtended.update`."""
    lockstep = strategy._replicas.lockstep
    with lockstep.validating_collectively("update"):
        check_own_variable(strategy, "update", variable)
    lockstep.check()
    if lockstep.state.pending_writes:
        # If this fails, the contents that were there before this are put back.
        lockstep.handshake(f"update({variable._spec()}), what was written before it")
    with lockstep.validating_collectively("update"):
        restore = variable._storage.snapshot()
    returned_tree, call = None, f"update({variable._spec()})"
    contents: dict[str, Any] = {}
    with FailureCatcher() as caught:  # also ways out of the program, which all ranks have to know
        local_arguments = select_local(arguments)
        with CodeContext(strategy, updated_variable=variable):
            returned_tree = _call_update(fn, variable, *local_arguments)
        call += f" of {pytree.describe(pytree.flatten((arguments, returned_tree))[1])}"
        if not variable._is_on_read and lockstep.comm.size > 1:
            contents = _digest_update(variable, arguments, returned_tree)
    error_classes = {_PER_REPLICA_ARGUMENT: _DifferentArguments}
    try:
        check_same_contents(
            lockstep, call, contents, _UPDATE_ADVICE, failure=caught.failure, errors=error_classes
        )
    except BaseException:
        restore()
        raise
    return _wrap_results(strategy, call, returned_tree, should_group, variable._is_on_read)


def _call_update(
    fn: Callable[..., Any],
    variable: DistributedVariable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    try:
        return fn(variable, *args, **kwargs)
    except TypeError as error:
        explain_arguments("update", functools.partial(fn, variable), args, kwargs, error)
        raise


def _digest_update(
    variable: DistributedVariable, arguments: tuple[Any, Any], returned_tree: object
) -> dict[str, Any]:
    """Return the contents that have to be the same on all ranks, by their names in messages."""
    session = variable.strategy._replicas.lockstep.session
    # Each write to a large variable was compared already.
    contents: dict[str, Any] = {} if variable._is_large else {_WRITTEN: variable._component()}
    # Results of an all-reduce in replica code are alike too, though `merge_call` brings them as
    # values per replica; optimizers written for tf.distribute hand gradients on like that.
    contents[_ARGUMENT] = digest_contents(arguments, session)
    contents[_PER_REPLICA_ARGUMENT] = digest_contents(_list_local_values(arguments), session)
    contents[_RETURNED] = digest_contents(returned_tree, session)
    return contents


def update_non_slot(
    strategy: StrategyBase, fn: Callable[..., Any], arguments: tuple[Any, Any], should_group: bool
) -> Any:
    """Let `fn` run on every rank; see `StrategyExtended.update_non_slot`."""
    lockstep = strategy._replicas.lockstep
    has_per_replica = any(isinstance(leaf, PerReplica) for leaf in pytree.flatten(arguments)[0])
    returned_tree, call = None, "update_non_slot"
    contents: dict[str, Any] = {}
    with FailureCatcher() as caught:
        # Values per replica among the arguments differ; everything else must be the same.
        contents = {_ARGUMENT: digest_contents(arguments, lockstep.session)}
        local_args, local_kwargs = select_local(arguments)
        with CodeContext(strategy):
            returned_tree = fn(*local_args, **local_kwargs)
        call += f" of {pytree.describe(pytree.flatten((arguments, returned_tree))[1])}"
        if not has_per_replica:
            contents[_RETURNED] = digest_contents(returned_tree, lockstep.session)
    check_same_contents(lockstep, call, contents, _UPDATE_ADVICE, failure=caught.failure)
    return _wrap_results(strategy, call, returned_tree, should_group, has_per_replica)


def _wrap_results(
    strategy: StrategyBase,
    call: str,
    returned_tree: object,
    should_group: bool,
    is_per_replica: bool,
) -> Any:
    """Return the results of `fn`: mirrored, or if `is_per_replica` those of every replica."""
    if not is_per_replica:
        return (
            mirror_tree(strategy, returned_tree)
            if should_group
            else _repeat_results(strategy, returned_tree)
        )
    visible_results = strategy._replicas.regrouper.regroup_tree(
        f"{call}, its results", returned_tree
    )
    return (
        visible_results
        if should_group
        else pytree.map(strategy.experimental_local_results, visible_results)
    )


def _list_local_values(tree: object) -> list[Any]:
    """Return this replica's values of the values per replica in a tree."""
    return [leaf.local for leaf in pytree.flatten(tree)[0] if isinstance(leaf, PerReplica)]


def _repeat_results(strategy: StrategyBase, returned_tree: object) -> Any:
    visible_count = (
        strategy._replicas.lockstep.comm.size if strategy._replicas.view.should_wrap else 1
    )
    return pytree.map(lambda leaf: (leaf,) * visible_count, returned_tree)


# Programs for tf.distribute name devices in these ways; they choose nothing here.
_DEVICE = re.compile(r"(/\w+:\w+)*/?(device:)?(xla_)?[a-z]pu(:\d+|:\*)?", re.IGNORECASE)


def check_destinations(strategy: StrategyBase, name: str, destinations: object) -> None:
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
        strategy._replicas.regrouper.check(name, [destinations])
        return
    # Where values are not wrapped, each is a plain one, and can be a destination too.
    is_value = isinstance(destinations, np.ndarray | IndexedSlices) or is_scalar(destinations)
    if is_value and not strategy._replicas.view.should_wrap:
        return
    if not isinstance(destinations, str) or not destinations:
        raise StructureError(
            "destinations must be a variable, a distributed value or the label of a device, not "
            f"{destinations!r:.80}."
        )
    labels = strategy._device_labels
    device_names = {*labels, *(f"rank:{rank}" for rank in range(len(labels)))}
    device_names.add(getattr(strategy, "_parameter_device", labels[0]))
    if destinations not in device_names and not _DEVICE.fullmatch(destinations):
        raise StructureError(
            f"{name}: destinations must be the label of a device, but there is no "
            f"{destinations!r:.80}; the devices of {strategy!r} are {list(labels)!r:.200}."
        )


def check_pairs(
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


def describe_destinations(destinations: object) -> str:
    """Return the text of the destinations, for handshakes."""
    if isinstance(destinations, DistributedVariable):
        return f" to {destinations._spec()}"
    return f" to {destinations!r}" if isinstance(destinations, str) else " to a value"


def unwrap_at_labels(results: Sequence[Any], pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Return the results of some values, each as its destinations want it: one device has one."""
    return [
        select_local(result) if isinstance(destinations, str) else result
        for result, (_, destinations) in zip(results, pairs, strict=True)
    ]


def broadcast(
    strategy: StrategyBase, tensor: Any, destinations: object, delegate: Delegate | None = None
) -> Any:
    """Broadcast replica 0's value to all replicas; see `StrategyExtended.broadcast_to`. Collective.

    Args:
      strategy: Whose replicas.
      tensor: Array or number.
      destinations: As `check_destinations` takes them.
      delegate: The `CrossDeviceOps` of the program that moves it; None for MPI.

    Cost: one handshake and a broadcast; with a class of the program, two and what it does.
    """
    lockstep = strategy._replicas.lockstep
    with lockstep.validating_collectively("broadcast_to"):
        check_destinations(strategy, "broadcast_to", destinations)
        array = np.array(as_array(select_local(tensor)), order="C")
    if not strategy._replicas.view.should_wrap:
        return tensor
    # np.float64 is a float; but it is an array to programs, as every number of NumPy's.
    is_number = isinstance(tensor, int | float) and not isinstance(tensor, np.generic)
    call = f"broadcast_to({spec_text(array)}){describe_destinations(destinations)}"
    if delegate is not None:
        array = _broadcast_by_class(lockstep, call, delegate.ops, array, destinations)
        if is_number:
            return type(tensor)(array.item())
    elif is_number:
        tag, content = encode(tensor, is_unlimited=True)
        return decode(
            tag, lockstep.gather_payloads(f"broadcast_to({type(tensor).__name__})", content)[0]
        )
    else:
        lockstep.handshake(call)
        lockstep.comm.bcast(array, 0)
    return array if isinstance(destinations, str) else mirror_tree(strategy, array)


def _broadcast_by_class(
    lockstep: Lockstep, call: str, ops: CrossDeviceOpsBase, array: Array, destinations: object
) -> Array:
    call = f"{call} by {type(ops).__module__}.{type(ops).__qualname__}"
    lockstep.handshake(call)
    returned_array = array
    with FailureCatcher(Exception) as caught:
        returned_array = check_returned_array(ops, ops.broadcast(array.copy(), destinations), array)
    advice = "A CrossDeviceOps must return the same on every rank."
    contents = {"what the class returned": returned_array}
    check_same_contents(lockstep, f"{call}, made", contents, advice, failure=caught.failure)
    return returned_array
