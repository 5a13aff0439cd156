"""All-reduce of lists of arrays: choose a path, stage, handshake, finish.

There is one implementation: what was compiled before, and what is compiled for one call and thrown
away, go the same path, which follows from what is alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.arrays import Array
from mpistrat.collectives.call import ONES, Call
from mpistrat.collectives.overlap import Overlap
from mpistrat.collectives.paths import PATHS
from mpistrat.collectives.paths.path import Path
from mpistrat.collectives.reducer import Reducer


def path_of(
    reducer: Reducer, call: Call, values: Sequence[Any], outs: Sequence[Array] | None
) -> Path:
    """Return the path of a call; alike on all ranks, if they make the same call."""
    arena = reducer.node.arena
    if arena.moving:
        arena.check_still(call.text, [*values, *(outs or ())])
    known: Path | None = call.path
    if known is not None and not (known.reducer is reducer and known.holds):
        known = None
    if known is not None and (outs is None or outs[0] is not values[0]):
        return known
    for kind in PATHS:
        if known is not None and type(known) is kind:
            return known
        path = kind.offer(reducer, call, values, outs)
        if path is not None:
            break
    assert path is not None
    if path.stays:
        call.path = path
    return path


def all_reduce(
    reducer: Reducer,
    call: Call,
    values: Sequence[Any],
    weights: Sequence[float] = ONES,
    outs: Sequence[Array] | None = None,
) -> list[Any]:
    """Reduce leaves over all ranks.

    Collective. Cost: the handshake; unless everything is sent with it, at most two barriers of the
    node for each 8 MiB, or one MPI_Allreduce per message.

    Args:
      reducer: The ranks.
      call: The call; equal on all ranks.
      values: The leaves, in native byte order; numbers only of a call that is `Call.raw`.
      weights: How many examples each stands for, or one number for all.
      outs: Where the results go: arrays of the dtypes that come back. Leaves of the strategy's
        buffers that are given as value and out both may be reduced in place.

    Returns:
      One fresh array per leaf, or `outs`, with the same bits on all ranks; numbers of numbers.
    """
    if reducer.seconds is not None and reducer.lockstep.seconds != reducer.seconds:
        with reducer.timed():
            return all_reduce(reducer, call, values, weights, outs)
    try:
        call.went = path = path_of(reducer, call, values, outs)
    except Exception as error:
        reducer.lockstep.refuse(call.text, error)
    return path.run(values, weights, outs)


def all_reduce_start(
    reducer: Reducer,
    call: Call,
    values: Sequence[Any],
    weights: Sequence[float],
    outs: Sequence[Array] | None,
) -> Callable[[], list[Any]]:
    """Begin what `all_reduce` does, and return what waits for it and gives the results.

    Collective. Between nodes it continues in a thread; else all is done when it returns.
    """
    if reducer.seconds is None:
        wait = Overlap.of(reducer).start(reducer, call, values, weights, outs)
        if wait is not None:
            return wait
    totals = all_reduce(reducer, call, values, weights, outs)
    return lambda: totals
