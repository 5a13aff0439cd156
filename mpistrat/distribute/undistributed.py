"""Batches of a dataset that is not distributed, where replica code is given them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.arrays import digest
from mpistrat.feed.iterators import latest
from mpistrat.lockstep.ranks import CallState

# A batch that the first runs were not given is not looked for in further runs.
_MOST_RUNS = 8


def note_batch(state: CallState, fn: Callable[..., Any], arguments: Any) -> None:
    """Keep a digest of the batch that was read last, if replica code is given it.

    Not collective: at the end of the run the ranks compare digests, once in a session. Of a dataset
    that each rank has taken its own part of, they differ.

    Args:
      state: Of the calls of this rank.
      fn: The function that runs; what it refers to counts as given.
      arguments: Tree of its arguments.
    """
    iterator = None if latest.iterator is None else latest.iterator()
    if iterator is None or state.batches_compared or state.batches_sought > _MOST_RUNS:
        latest.iterator = None
        return
    state.batches_sought += 1
    kinds = np.ndarray, np.number
    batch = [leaf for leaf in nest.flatten(iterator.element)[0] if isinstance(leaf, kinds)]
    if not any(leaf.size for leaf in batch):
        return
    parts = {*map(id, [iterator.element, *batch])}
    values = itertools.chain(nest.flatten(arguments)[0], _references(fn))
    if not parts.isdisjoint(map(id, values)):
        state.run.batch_digest = digest(map(np.asarray, batch))


def _references(fn: Callable[..., Any]) -> Iterator[Any]:
    """Iterate over what a function refers to by the names of its closure and of its module."""
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            yield cell.cell_contents
    code = getattr(fn, "__code__", None)
    if code is not None:
        yield from (fn.__globals__[name] for name in code.co_names if name in fn.__globals__)
