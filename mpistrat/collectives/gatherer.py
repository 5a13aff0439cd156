"""All-gather of lists of arrays, uneven and empty ones too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpistrat.arrays import Array, dtype_name
from mpistrat.collectives.plan import spec_of
from mpistrat.lockstep.abort import aborting
from mpistrat.lockstep.lockstep import Lockstep

# A gather of more bytes than this is worth a second handshake that every rank has the memory.
_LARGE = 16 * 1024 * 1024


def all_gather(
    lockstep: Lockstep,
    call: str,
    axis: Sequence[int],
    leaves: Sequence[Array],
    paths: Sequence[str],
) -> list[Array]:
    """Concatenate every leaf over all ranks, in rank order.

    Collective. Cost: the handshake, and one MPI_Allgatherv per leaf unless all are sent with the
    handshake.

    Args:
      lockstep: Proves the call, and carries what is small.
      call: The text of the call; dtypes and the shapes that must agree are added to it.
      axis: The axis of each leaf, not negative.
      leaves: Arrays; sizes along the axis may differ between ranks, also be 0.
      paths: The names of the leaves.

    Returns:
      One fresh C-ordered array per leaf, with the same bits on all ranks.
    """
    with lockstep.preparing(call):
        fronts = [np.moveaxis(leaf, a, 0) for leaf, a in zip(leaves, axis, strict=True)]
        sends = [np.ascontiguousarray(front) for front in fronts]
        text = f"{call} {', '.join(map(spec_of, paths, map(_open_spec, leaves, axis)))}"
        sizes = np.array([len(send) for send in sends], np.int64)
        rides = lockstep.fits(sizes.nbytes + sum(send.nbytes for send in sends))
        data = b"".join(send.tobytes() for send in sends) if rides else b""
    own_payload = sizes.tobytes() + data
    result = lockstep.handshake(text, own_payload, has_more=not rides)
    payloads = result.payloads
    if result.are_equal:
        payloads = [own_payload] * lockstep.comm.size
    if payloads is None:
        counts = np.empty((lockstep.comm.size, sizes.size), np.int64)
        lockstep.comm.allgather(sizes, counts)
    else:
        counts = np.array([np.frombuffer(s[: sizes.nbytes], np.int64) for s in payloads])
    if payloads is None or result.has_more:
        outs = _rooms(lockstep, call, sends, counts)
        with aborting(lockstep, text):
            for send, out, rows in zip(sends, outs, counts.T, strict=True):
                row = math.prod(out.shape[1:]) * out.itemsize
                send_bytes = send.reshape(-1).view(np.uint8)
                out_bytes = out.reshape(-1).view(np.uint8)
                lockstep.comm.allgatherv(send_bytes, out_bytes, (rows * row).tolist())
    else:
        outs = [
            np.concatenate([_cut(s, counts[r], sends, i) for r, s in enumerate(payloads)])
            for i in range(len(sends))
        ]
    return [np.ascontiguousarray(np.moveaxis(out, 0, a)) for out, a in zip(outs, axis, strict=True)]


def _rooms(lockstep: Lockstep, call: str, sends: list[Array], counts: Array) -> list[Array]:
    # How much memory it takes is known only now; whether every rank has it, is asked again.
    shapes = [
        (total, *send.shape[1:])
        for total, send in zip(counts.sum(axis=0).tolist(), sends, strict=True)
    ]
    pairs = list(zip(shapes, sends, strict=True))
    large = sum(math.prod(shape) * send.itemsize for shape, send in pairs) > _LARGE
    text = f"{call}, room for it"
    with lockstep.preparing(text) if large else aborting(lockstep, text):
        rooms = [np.empty(shape, send.dtype) for shape, send in pairs]
    if large:
        lockstep.handshake(text)
    return rooms


def _open_spec(leaf: Array, axis: int) -> str:
    dims = ["*" if i == axis else str(n) for i, n in enumerate(leaf.shape)]
    return f"{dtype_name(leaf.dtype)}[{','.join(dims)}]"


def _cut(small: bytes, counts: Array, sends: list[Array], index: int) -> Array:
    sizes = [
        int(count) * math.prod(send.shape[1:]) * send.dtype.itemsize
        for count, send in zip(counts, sends, strict=True)
    ]
    begin = counts.nbytes + sum(sizes[:index])
    send = sends[index]
    part = np.frombuffer(small[begin : begin + sizes[index]], send.dtype)
    return part.reshape(int(counts[index]), *send.shape[1:])
