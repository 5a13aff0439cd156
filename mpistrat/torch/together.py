"""Large sums of the ranks of one node, through memory that they share.

A tensor of torch's lies in a rank's own memory, so some of it has to be copied to be seen by the
others, and the sums have to come back. Of `n` ranks each folds the n-th part: the others give it
theirs, it adds to its own where that lies, a piece at a time while it is in cache, and gives the
sums. Nothing is moved that is not needed elsewhere: of 2 ranks each copies one half in, folds one,
and copies one out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np
import torch

from mpistrat.arrays import Array
from mpistrat.comm.mpi import MPIComm

__all__ = ["SharedSums"]

_LEAST, _MOST = 1 << 16, 1 << 25  # bytes of a tensor from which on, and that are shared at once
_PIECE = 1 << 15  # elements that are folded at once: they stay in cache
_LINE = 64  # bytes; parts begin at cache lines

_FOLDS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "AVG": torch.add,
}
_NARROW = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_WHOLE = {torch.float32, torch.float64, torch.int32, torch.int64, *_NARROW}


@final
class SharedSums:
    """The shared rows of one group.

    Args:
      comm: The ranks.
    """

    def __init__(self, comm: MPIComm):
        """Share nothing yet."""
        self._comm = comm
        self._rows: Array | None = None
        self._possible: bool | None = None

    def fit(self, op: str, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is folded here; alike on all ranks that make the same call."""
        size = tensor.numel() * tensor.element_size()
        known = op in _FOLDS and tensor.dtype in _WHOLE
        return known and size >= _LEAST and self._comm.size > 1 and self._possible is not False

    def room(self, tensor: torch.Tensor) -> bool:
        """Make room for a tensor; tell whether there is. Collective, where there is none yet."""
        if self._possible is None:
            node = self._comm.by_node()
            self._possible = node is self._comm
            if not self._possible:
                node.free()
                return False
        wanted = min(_MOST, tensor.numel() * tensor.element_size() + _LINE)
        if self._rows is None or self._rows.shape[2] < wanted:
            each = min(_MOST, 1 << (wanted - 1).bit_length())
            shared = self._comm.shared(2 * self._comm.size * each)
            if shared is None:
                self._possible = False
                return False
            self._rows = np.frombuffer(shared, np.uint8).reshape(2, self._comm.size, each)
        return True

    def fold(self, op: str, tensor: torch.Tensor) -> None:
        """Fold a C-ordered tensor in place, in rank order. Collective."""
        assert self._rows is not None
        flat = tensor.view(-1)
        most = self._rows.shape[2] // flat.element_size()
        for number, begin in enumerate(range(0, len(flat), most)):
            # Two sides take turns: who still reads one is waited for before it is written again.
            rows = torch.from_numpy(self._rows[number % 2]).view(flat.dtype)
            self._part(op, flat[begin : begin + most], rows)
        # What comes next may write to the side that was read last.
        self._comm.barrier()

    def _part(self, op: str, mine: torch.Tensor, rows: torch.Tensor) -> None:
        rank, size = self._comm.rank, self._comm.size
        line = _LINE // mine.element_size()
        borders = [len(mine) * part // size // line * line for part in range(size)] + [len(mine)]
        for other in range(size):
            if other != rank:
                part = slice(borders[other], borders[other + 1])
                rows[rank, part] = mine[part]
        self._comm.barrier()
        low, high = borders[rank], borders[rank + 1]
        for begin in range(low, high, _PIECE):
            part = slice(begin, min(begin + _PIECE, high))
            total = self._folded(op, mine[part], rows[:, part])
            mine[part] = total
            rows[rank, part] = total
        self._comm.barrier()
        for other in range(size):
            if other != rank:
                part = slice(borders[other], borders[other + 1])
                mine[part] = rows[other, part]

    def _folded(self, op: str, mine: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the fold of what all ranks have given, in rank order; those of 16 bits widened."""
        rank, wide = self._comm.rank, _NARROW.get(mine.dtype)
        parts = [mine if other == rank else row for other, row in enumerate(rows)]
        if wide is not None:
            parts = [part.to(wide) for part in parts]
        total = _FOLDS[op](parts[0], parts[1])
        for part in parts[2:]:
            _FOLDS[op](total, part, out=total)
        return total.div_(len(parts)) if op == "AVG" else total
