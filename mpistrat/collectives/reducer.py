"""What all-reduces of a strategy use: its handshake, the memory of its node, its options.

All-gather of lists of arrays, uneven and empty ones too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array, dtype_name
from mpistrat.collectives.communication import WIRES
from mpistrat.collectives.node import NodeReducer
from mpistrat.collectives.plan import Contribution, ReductionPlan, first_nonfinite, spec_of
from mpistrat.collectives.weights import Scales, scales_of
from mpistrat.lockstep.ending import aborting
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.shm.segments import ResultPool

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


@final
class Reducer:
    """Makes the values of all ranks one; `mpistrat.collectives.allreduce` does it.

    Args:
      lockstep: Proves each call, and carries what is small.
      wire: What float32 travels as between nodes; see `CommunicationOptions`.
      seconds: How long a call may take, if not as long as any; then the watchdog ends the job.
      caller_text: The class of the program that reduces, in texts of calls; empty without one.

    Attributes:
      node: The shared memory of the ranks.
      said: What texts of calls say of all this.
      pool: The memory of large results.
      weights: What each rank (rows) has given with each leaf to the last MEAN, or with all of them.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        wire: str = WIRES[0],
        seconds: float | None = None,
        caller_text: str = "",
    ):
        """Reduce over the ranks of `lockstep`."""
        self.lockstep, self.comm, self.node = lockstep, lockstep.comm, NodeReducer(lockstep, wire)
        self.seconds = seconds
        time_limit_text = "" if seconds is None else f" within {seconds:g} s"
        wire_text = "" if wire == WIRES[0] else f", {wire} between nodes"
        self._gathers = time_limit_text + caller_text
        self.said = time_limit_text + caller_text + wire_text
        self.weights = np.empty((lockstep.comm.size, 0))
        self.pool = lockstep.session.get_instance(ResultPool)

    @property
    def watches(self) -> bool:
        """Whether any rank may have an alarm to tell of its numbers."""
        return self.lockstep.options.nan != "off"

    def timed(self) -> Any:
        """Return a context in which calls may take as long as was chosen."""
        return (
            nullcontext() if self.seconds is None else self.lockstep.limiting_seconds(self.seconds)
        )

    def handshake(
        self,
        plan: ReductionPlan,
        text: str,
        payload: bytes,
        *,
        digest: bytes | None = None,
        alarm: str = "",
    ) -> tuple[Scales, Array]:
        """Make the handshake of a call; return the scales of values, and every rank's payload.

        Collective.

        Args:
          plan: The plan.
          text: The text of the call; equal on all ranks.
          payload: The weights, and what the algorithm adds to them; as long on all ranks.
          digest: `digest_of` the text, if it is known.
          alarm: The description of values that are not finite, if any is.
        """
        rows = self.lockstep.gather_rows(text, payload, digest, alarm)
        if plan.has_equal_weights:
            return (Scales(None, (float(self.comm.size),)) if plan.is_mean else Scales()), rows
        self.weights = rows[:, : 8 * plan.weight_count].copy().view(np.float64)
        return scales_of(self.weights, plan.is_weighting), rows

    def all_gather(
        self, call: str, axis: Sequence[int], leaves: Sequence[Array], paths: Sequence[str]
    ) -> list[Array]:
        """Concatenate every leaf over all ranks; see `gatherer.all_gather`. Collective."""
        with self.timed():
            text = f"{call}{self._gathers}"
            return all_gather(self.lockstep, text, axis, leaves, paths)

    def alarm(self, call: str, contributions: Sequence[Contribution]) -> str:
        """Return the description of this rank's numbers that are not finite, if asked for."""
        return (
            first_nonfinite(call, self.lockstep.state.steps, contributions) if self.watches else ""
        )
