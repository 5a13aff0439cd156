"""What one rank gives to MPI in a reduction, made before the proof: after it nothing can fail."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpistrat.arrays import Array
from mpistrat.collectives import bucket
from mpistrat.collectives.forms import decode_order, encode_order, ordered
from mpistrat.comm.base import Comm
from mpistrat.kernels.ops import FOLDS, ReduceOp
from mpistrat.kernels.scaling import low_sum, multiply, power_for, real, rescue

__all__ = [
    "MPI_NAMES",
    "Message",
    "finished",
    "fold_by_mpi",
    "messages",
    "parts_of",
    "reduce_messages",
    "rescued",
    "scale",
    "travel",
]

# What MPI calls a fold; MEAN divides afterwards.
MPI_NAMES = {op: op.how.mpi for op in ReduceOp}


class Message(NamedTuple):
    """One bucket of leaves, ready to travel.

    Attributes:
      leaves: The positions of the leaves in the list.
      send: Their values, in one piece: a leaf where it lies, or several packed.
      recv: Where the fold goes; with a leading axis of ranks if all values are gathered instead.
      outs: Where each leaf's part goes; empty if `recv` is the result.
      gathered: MPI's own fold may lose a NaN, or MPI has none: every rank folds all values.
    """

    leaves: tuple[int, ...]
    send: Array
    recv: Array
    outs: tuple[Array, ...]
    gathered: bool


def messages(op: ReduceOp, wires: Sequence[Array], size: int) -> list[Message]:
    """Return what travels of these leaves among `size` ranks, with all the memory it takes."""
    found = []
    keys = [encode_order(w, op) if ordered(op, w.dtype) else w for w in wires]
    for b in bucket.plan(tuple((key.dtype, key.size) for key in keys)):
        parts = [keys[i] for i in b.leaves]
        send = parts[0] if len(parts) == 1 else np.concatenate([p.reshape(-1) for p in parts])
        gathered = not op.how.left_to_mpi(b.dtype)
        recv = np.empty((size, *send.shape) if gathered else send.shape, send.dtype)
        outs = tuple(np.empty_like(part) for part in parts) if len(parts) > 1 else ()
        found.append(Message(b.leaves, send, recv, outs, gathered))
    return found


def fold_by_mpi(comm: Comm, send: Array, recv: Array, op: ReduceOp) -> None:
    """Fold by the MPI library's own all-reduce; a NaN has the same bits on all ranks.

    Of two NaNs, and of where they came from, MPICH leaves other bits on other ranks.

    Collective; unproved. Cost: one MPI_Allreduce, and of floating point one pass over `recv`.
    """
    comm.allreduce(send, recv, MPI_NAMES[op])
    if recv.dtype.kind in "fc" and comm.size > 1:
        flat = real(recv).reshape(-1)
        missing = np.isnan(flat)
        if missing.any():
            flat[missing] = np.nan


def parts_of(
    leaves: Sequence[int], flat: Array, wires: Sequence[Array]
) -> Iterator[tuple[int, Array]]:
    """Yield the position of each leaf and its part of a message, as a flat array."""
    flat, at = flat.reshape(-1), 0
    for i in leaves:
        yield i, flat[at : at + wires[i].size]
        at += wires[i].size


def rescued(
    results: Sequence[Array],
    given: Iterable[tuple[int, Array]],
    divisors: Sequence[float],
    size: int,
    fold: Callable[[Array, Array], None],
) -> None:
    """Make those means anew whose sum has overflowed, from values scaled down before.

    Collective, where a result is not finite; unproved.

    Args:
      results: The means, contiguous; with the same bits on all ranks.
      given: The position of each leaf that travelled, and what this rank gave to its sum.
      divisors: What each sum was divided by; one per leaf, or one for all.
      size: How many ranks fold.
      fold: Folds an array of every rank into another one, on every rank.
    """
    power = power_for(size)
    for i, value in given:
        low = functools.partial(_low_fold, fold, value, power)
        rescue(results[i], low, divisors[i if len(divisors) > 1 else 0], power)


def _low_fold(
    fold: Callable[[Array, Array], None], value: Array, power: float, where: NDArray[np.intp]
) -> Array:
    send = low_sum([value], None, power, where)
    total = np.empty_like(send)
    fold(send, total)
    return total


def scale(given: Iterable[tuple[int, Array]], scales: Sequence[float]) -> None:
    """Multiply the part of each leaf by its scale, in place."""
    for i, part in given:
        multiply(part, scales[i])


def reduce_messages(comm: Comm, op: ReduceOp, wires: Sequence[Array]) -> list[Array]:
    """Fold these leaves over the ranks of `comm` by MPI's own operations. Collective; unproved."""
    return travel(comm, op, wires, messages(op, wires, comm.size))


def travel(
    comm: Comm, op: ReduceOp, wires: Sequence[Array], travelling: list[Message]
) -> list[Array]:
    """Send these messages of leaves, and return the folded leaves. Collective; unproved."""
    for i, message in enumerate(travelling):
        if message.gathered:
            comm.allgather(message.send, message.recv)
            fold: Any = FOLDS[op]
            travelling[i] = message._replace(recv=fold.reduce(message.recv, axis=0))
        else:
            fold_by_mpi(comm, message.send, message.recv, op)
    return finished(op, wires, travelling)


def finished(op: ReduceOp, wires: Sequence[Array], sent: Sequence[Message]) -> list[Array]:
    """Return the folded leaves, in their own dtypes; leaves that did not travel are empty."""
    totals = [np.empty_like(wire) if wire.size == 0 else wire for wire in wires]
    for message in sent:
        parts = parts_of(message.leaves, message.recv, wires)
        for (i, part), out in zip(parts, message.outs, strict=False):
            out.reshape(-1)[:] = part
            totals[i] = out
        if not message.outs:
            totals[message.leaves[0]] = message.recv
    return [
        decode_order(total, op) if ordered(op, wire.dtype) and wire.size else total
        for total, wire in zip(totals, wires, strict=True)
    ]
