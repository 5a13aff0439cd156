"""Replica 0's value given to every replica: by MPI, or by a class that the program chose."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_array, spec_text
from mpistrat.comm.codec import decode, encode
from mpistrat.distribute.base import StrategyBase
from mpistrat.distribute.choice import Ops, like
from mpistrat.distribute.destinations import check_destinations, place
from mpistrat.distribute.regroup import select
from mpistrat.distribute.updating import mirrored
from mpistrat.distribute.writes import prove_same


def broadcast(strategy: StrategyBase, tensor: Any, destinations: Any) -> Any:
    """Give replica 0's value to every replica by MPI; see `StrategyExtended.broadcast_to`."""
    group = strategy.replicas
    array = _checked(strategy, tensor, destinations)
    if not group.view.mirrors:
        return tensor
    if _is_python_number(tensor):
        kind, data = encode(tensor, whole=True)
        call = f"broadcast_to({type(tensor).__name__})"
        return decode(kind, group.lockstep.share(call, data)[0])
    group.lockstep.prove(f"broadcast_to({spec_text(array)}){place(destinations)}")
    group.lockstep.comm.bcast(array, 0)
    return array if isinstance(destinations, str) else mirrored(strategy, array)


def broadcast_as_chosen(strategy: StrategyBase, tensor: Any, destinations: Any) -> Any:
    """Do the same by the `CrossDeviceOps` of the program, if the strategy was given one.

    Collective. Cost: then two proofs, and what the class does.
    """
    delegate = strategy.replicas.delegate
    if delegate is None or not strategy.replicas.view.mirrors:
        return broadcast(strategy, tensor, destinations)
    ops = delegate.ops
    lockstep = strategy.replicas.lockstep
    array = _checked(strategy, tensor, destinations)
    by = f"{type(ops).__module__}.{type(ops).__qualname__}"
    call = f"broadcast_to({spec_text(array)}){place(destinations)} by {by}"
    lockstep.prove(call)
    contents, failure = _made(ops, array, destinations)
    advice = "A CrossDeviceOps must return the same on every rank."
    given = {"what the class returned": contents}
    prove_same(lockstep, f"{call}, made", given, advice, failure)
    if _is_python_number(tensor):
        return type(tensor)(contents.item())
    return contents if isinstance(destinations, str) else mirrored(strategy, contents)


def _is_python_number(tensor: Any) -> bool:
    # np.float64 is a float; but it is an array to programs, as every number of NumPy's.
    return isinstance(tensor, int | float) and not isinstance(tensor, np.generic)


def _checked(strategy: StrategyBase, tensor: Any, destinations: Any) -> Array:
    with strategy.replicas.lockstep.preparing("broadcast_to"):
        check_destinations(strategy, "broadcast_to", destinations)
        return np.array(as_array(select(tensor)), order="C")


def _made(ops: Ops, array: Array, destinations: Any) -> tuple[Array, Exception | None]:
    """Return what the class makes of a value, or what it raised."""
    try:
        return like(ops, ops.broadcast(array.copy(), destinations), array), None
    except Exception as error:
        return array, error
