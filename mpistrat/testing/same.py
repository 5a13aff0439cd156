"""A check that fails on every rank or on no rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.arrays import as_array, digest, is_inexact, label
from mpistrat.comm.callsite import ranks_text
from mpistrat.comm.session import Session
from mpistrat.distribute.regroup import select
from mpistrat.lockstep.lockstep import Lockstep


def same(comm: Any, value: Any, wanted: Any = None) -> None:
    """Fail on every rank unless all ranks hold the same bits, and these equal `wanted`.

    Collective over `comm`. Cost: one handshake, with a digest of each leaf.

    Args:
      comm: An mpi4py intracommunicator or a `Comm`.
      value: Tree of arrays or numbers.
      wanted: A tree of the same structure with the right values, or None to compare ranks only.

    Raises:
      AssertionError: They differ; says on which ranks and in which leaf.
    """
    lockstep = Lockstep(Session.on(comm))
    with lockstep.preparing("same"):
        leaves, structure = nest.flatten(select(value))
        paths = nest.path_names(structure)
        arrays = [as_array(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
        difference = _wrong(arrays, structure, select(wanted)) if wanted is not None else ""
        prints = b"".join(digest([array]) for array in arrays)
    rows = lockstep.gather_payloads(f"same {nest.describe(structure)}", prints)
    complaints = lockstep.texts(difference.encode())
    for i, path in enumerate(paths):
        cells = [row[16 * i : 16 * i + 16] for row in rows]
        differ = [rank for rank, cell in enumerate(cells) if cell != cells[0]]
        if differ:
            raise AssertionError(f"{label(path)} differs from rank 0's on {ranks_text(differ)}.")
    messages = [f"rank {rank}: {text.decode()}" for rank, text in enumerate(complaints) if text]
    if messages:
        raise AssertionError("\n".join(messages))


def _wrong(arrays: list[Any], structure: nest.Structure, expected: Any) -> str:
    goals, theirs = nest.flatten(expected)
    if nest.describe(theirs) != nest.describe(structure):
        return f"the tree is {nest.describe(structure)}, expected {nest.describe(theirs)}"
    for array, goal, path in zip(arrays, goals, nest.path_names(structure), strict=True):
        if not np.array_equal(array, goal, equal_nan=is_inexact(array.dtype)):
            return f"{label(path)} is {array}, expected {goal}"
    return ""
