"""What all programs use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import mpistrat as ms
from mpistrat.compat import tf

__all__ = ["ctx", "fid", "in_scope", "ms", "np", "per_replica", "rid", "steps", "tf"]


def ctx() -> Any:
    """Return the replica context of the running code."""
    return ms.get_replica_context()


def rid() -> Any:
    """Return the replica id as an int32 tensor."""
    return tf.constant(ctx().replica_id_in_sync_group)


def fid() -> Any:
    """Return the replica id as a float32 tensor."""
    return tf.cast(rid(), tf.float32)


def per_replica(s: Any, f: Callable[[int], Any]) -> Any:
    """Return a `PerReplica` with ``f(i)`` on replica i."""
    return s.experimental_distribute_values_from_function(lambda c: f(c.replica_id_in_sync_group))


def in_scope(s: Any, thunk: Callable[[], Any]) -> Any:
    """Return what `thunk` returns in the scope of `s`."""
    with s.scope():
        return thunk()


def steps(r: Any, iterator: Any, limit: int = 12) -> list[Any]:
    """Return the first elements of an iterator, and ``"StopIteration"`` at its end."""
    found: list[Any] = []
    while len(found) < limit:
        try:
            element = next(iterator)
        except StopIteration:
            return [*found, "StopIteration"]
        found.append(r.write(element))
    return found
