"""Destinations of reductions: checked, and as texts of calls name them; and `broadcast` to them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_array, is_scalar, spec_text
from mpistrat.comm.codec import decode, encode
from mpistrat.distribute.choice import Delegate, Ops, like
from mpistrat.distribute.kinds import DistributedVariable
from mpistrat.distribute.regroup import select
from mpistrat.distribute.replica_group import StrategyBase
from mpistrat.distribute.slices import IndexedSlices
from mpistrat.distribute.updating import mirrored
from mpistrat.distribute.values import DistributedValues
from mpistrat.distribute.writes import prove_same
from mpistrat.errors import StructureError
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.lockstep.ranks import Caught

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
        kind, data = encode(tensor, whole=True)
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
