"""Where the results of an all-reduce go, made before the proof."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.lib import array_utils

from mpistrat.arrays import Array
from mpistrat.collectives.folding import Folding
from mpistrat.collectives.packs import Pack

__all__ = ["Results", "results_for"]

# Smaller leaves of a pack come back in one piece of memory, since to allocate each costs as much
# as to copy it. A larger one has its own, so that keeping one keeps nothing else.
_OWN = 64 * 1024


@final
class Results:
    """The results of one all-reduce, leaf by leaf.

    Args:
      shapes: Of the leaves.
      arrays: Where each leaf goes; C-contiguous. None: to the memory that its pack comes back in.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], arrays: list[Array | None]):
        """Wait for what is folded."""
        self._shapes, self._arrays = shapes, arrays

    def take(self, pack: Pack, row: Array, own: bool = False) -> None:
        """Copy a pack's results out of shared memory; with `own`, `row` is this rank's already."""
        flat: Array | None = row if own else None
        for leaf, start, stop, column, _ in pack.pieces:
            end = column + stop - start
            array = self._arrays[leaf]
            if array is not None:
                np.copyto(array.reshape(-1)[start:stop], row[column:end], casting="unsafe")
                continue
            if flat is None:
                flat = row[: pack.columns].copy()
            self._arrays[leaf] = flat[column:end].reshape(self._shapes[leaf])

    def whole(self) -> list[Array]:
        """Return the results, once all packs have been taken."""
        return [array for array in self._arrays if array is not None]


def _bounds(array: Array) -> tuple[int, int]:
    return array_utils.byte_bounds(array) if array.size else (0, 0)


def _tangled(values: Sequence[Array], outs: Sequence[Array]) -> bool:
    """Tell whether some `out` may share memory with a value that is not read before it is written.

    Each leaf may be its own `out`; any other overlap counts, of outs among themselves too.
    """
    spans = []
    for value, out in zip(values, outs, strict=True):
        spans.append(_bounds(out))
        if value is not out:
            spans.append(_bounds(value))
    spans.sort()
    return any(low < end for (_, end), (low, _) in itertools.pairwise(spans) if end)


def results_for(what: Folding, values: Sequence[Array], outs: Sequence[Array] | None) -> Results:
    """Return where results go: to `outs` where they are, else to new memory."""
    if outs is not None and len(what.packs) > 1 and _tangled(values, outs):
        outs = None  # the caller copies them, when all values have been read
    together = [False] * len(what.forms)
    if outs is None:
        for pack in what.packs:
            for piece in pack.pieces:
                small = (piece.stop - piece.start) * pack.dtype.itemsize < _OWN
                same = what.forms[piece.leaf].result == pack.dtype
                together[piece.leaf] = piece.whole and small and same
    arrays: list[Array | None] = []
    for leaf, (shape, form) in enumerate(zip(what.shapes, what.forms, strict=True)):
        if outs is not None and outs[leaf].flags.c_contiguous:
            arrays.append(outs[leaf])
        else:
            arrays.append(None if together[leaf] else np.empty(shape, form.result))
    return Results(what.shapes, arrays)
