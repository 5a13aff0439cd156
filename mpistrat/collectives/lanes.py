"""What the nodes have folded each, folded between them: one rank of each node for each slice."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpistrat.arrays import Array
from mpistrat.collectives.messages import fold_by_mpi, reduce_messages
from mpistrat.collectives.spans import Range
from mpistrat.comm.base import Comm
from mpistrat.kernels.ops import ReduceOp
from mpistrat.kernels.scaling import divide, real, rescue

__all__ = ["fold_between"]

# What goes between nodes at once, in elements; bounds what it takes beside the arena.
_LANE = 1 << 20


def fold_between(
    lane: Comm,
    op: ReduceOp,
    rows: Array,
    row: Array,
    mine: tuple[int, int],
    spans: Sequence[Range],
    power: float,
) -> None:
    """Fold this rank's slice of what the nodes have folded. Collective over `lane`; unproved.

    Args:
      lane: One rank of each node.
      op: How.
      rows: What the ranks of this node gave; of a mean that is not finite the second row has the
        sum times `power`.
      row: What they have together; takes the result.
      mine: The slice: its first column, and the one after its last.
      spans: What becomes of which columns.
      power: A power of two that keeps a sum of all ranks from overflowing.
    """
    low, high = mine
    for span in spans:
        start, stop = max(low, span.start), min(high, span.stop)
        for at in range(start, stop, _LANE):
            part = row[at : min(at + _LANE, stop)]
            (total,) = reduce_messages(lane, op, [part])
            if span.divisor != 1.0:
                divide(total, span.divisor)
                kept = None
                if span.scales is None and len(rows) > 1:
                    kept = rows[1, at : at + part.size]
                low_total = functools.partial(_low_total, lane, part, kept, power)
                rescue(total, low_total, span.divisor, power)
            part[:] = total


def _low_total(
    lane: Comm, part: Array, kept: Array | None, power: float, where: NDArray[np.intp]
) -> Array:
    """Add what the nodes have at some places, times `power`. Collective; unproved.

    Args:
      lane: One rank of each node.
      part: What the ranks of this node have together.
      kept: The same times `power`, where `part` is not finite; None if it was not kept.
      power: A power of two.
      where: Of `part`, as real numbers.
    """
    given = real(part)[where]
    send = given * given.dtype.type(power)
    if kept is not None:
        np.copyto(send, real(kept)[where], where=~np.isfinite(given))
    total: Array = np.empty_like(send)
    fold_by_mpi(lane, send, total, ReduceOp.MEAN)
    return total
