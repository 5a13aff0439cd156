"""Each replica's share of the sums of metrics, saved in addition to the sums.

The sum is what reads afterwards. But what is added then rounds as it would have only with the same
parts; so small ones are saved too, and used where there are as many replicas as there were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint.cells import Cell
from mpistrat.checkpoint.entries import Entry
from mpistrat.lockstep.lockstep import Lockstep

PARTS = "/parts"
_MOST = 1 << 16  # bytes of a variable, of which a file has as many as there are replicas


def is_part(name: str, entries: Mapping[str, Entry]) -> bool:
    """Tell whether a name is that of the parts of another of these arrays."""
    whole = entries.get(name.removesuffix(PARTS)) if name.endswith(PARTS) else None
    return whole is not None and entries[name].fits(whole._replace(shape=(0, *whole.shape)))


def _sums(mine: Mapping[str, Any]) -> dict[str, Array]:
    """Return this replica's part of each sum that has parts, by the name of these.

    That is free but where a tree of the program and one in the root have names that meet.
    """
    return {
        name + PARTS: one.storage.array
        for name, one in mine.items()
        if one.of_metric and one.storage.array.nbytes <= _MOST and name + PARTS not in mine
    }


def parts_of(lockstep: Lockstep, mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is saved beside `mine`: parts of shape (replicas, ...). Collective; unproved."""
    sums = _sums(mine)
    if not sums or lockstep.comm.size == 1:
        return {}
    rows = lockstep.texts(b"".join(part.tobytes() for part in sums.values()))
    found, at = {}, 0
    for name, part in sums.items():
        each = [row[at : at + part.nbytes] for row in rows]
        at += part.nbytes
        found[name] = _cell(name, np.frombuffer(b"".join(each), part.dtype), part.shape)
    return found


def wanted_parts(mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what takes the parts from a file, if it has some; of no replicas yet."""
    return {
        name: _cell(name, part.reshape(-1)[:0], part.shape) for name, part in _sums(mine).items()
    }


def _cell(name: str, flat: Array, shape: tuple[int, ...]) -> Cell:
    rows = flat.reshape(-1 if flat.size else 0, *shape)
    return Cell(name, lambda: rows, lambda _: None, free=True)
