"""The `Reducer` of a strategy, and all-gather.

A `Reducer` holds the resources of all-reduces: the handshake, the shared memory of the node, the
options. `all_gather` concatenates lists of arrays over all ranks, uneven and empty ones too.
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
from mpistrat.collectives.plan import (
    Contribution,
    ReductionPlan,
    describe_first_nonfinite,
    format_leaf,
)
from mpistrat.collectives.weights import Scales, compute_equal_scales, compute_scales
from mpistrat.lockstep.ending import aborting
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.shm.segments import ResultPool

# A gather of more bytes makes a second handshake, which shows that every rank has the memory.
_LARGE = 16 * 1024 * 1024
_FLOAT64 = np.dtype(np.float64)


def all_gather(
    lockstep: Lockstep,
    call: str,
    axes: Sequence[int],
    leaves: Sequence[Array],
    paths: Sequence[str],
) -> list[Array]:
    """Concatenate every leaf over all ranks, in rank order.

    Collective. Cost: the handshake, and one MPI_Allgatherv per leaf unless all are sent with the
    handshake.

    Args:
      lockstep: The handshake; small arrays are sent with it.
      call: The text of the call; dtypes and the shapes that must agree are added to it.
      axes: The axis of each leaf, not negative.
      leaves: Arrays; sizes along the axis may differ between ranks, also be 0.
      paths: The names of the leaves.

    Returns:
      One fresh C-ordered array per leaf, with the same bits on all ranks.
    """
    with lockstep.validating_collectively(call):
        fronts = [np.moveaxis(leaf, axis, 0) for leaf, axis in zip(leaves, axes, strict=True)]
        sends = [np.ascontiguousarray(front) for front in fronts]
        shape_texts = map(_describe_open_shape, leaves, axes)
        text = f"{call} {', '.join(map(format_leaf, paths, shape_texts))}"
        sizes = np.array([len(send) for send in sends], np.int64)
        is_small = lockstep.can_carry(sizes.nbytes + sum(send.nbytes for send in sends))
        own_payload = sizes.tobytes()
        if is_small:
            own_payload += b"".join(send.tobytes() for send in sends)
    result = lockstep.handshake(text, own_payload, needs_followup=not is_small)
    payloads = result.payloads
    if result.are_equal:
        payloads = [own_payload] * lockstep.comm.size
    if payloads is None:
        counts = np.empty((lockstep.comm.size, sizes.size), np.int64)
        lockstep.comm.allgather(sizes, counts)
    else:
        counts = np.array([np.frombuffer(p[: sizes.nbytes], np.int64) for p in payloads])
    if payloads is None or result.needs_followup:
        outs = _gather_by_mpi(lockstep, call, text, sends, counts)
    else:
        outs = [_join_payloads(payloads, counts, sends, leaf) for leaf in range(len(sends))]
    moved = [np.moveaxis(out, 0, axis) for out, axis in zip(outs, axes, strict=True)]
    return [np.ascontiguousarray(array) for array in moved]


def _gather_by_mpi(
    lockstep: Lockstep, call: str, text: str, sends: list[Array], counts: Array
) -> list[Array]:
    """Return the concatenation of each leaf over all ranks. Collective; after the handshake."""
    # Only now the sizes are known. If they are large, a handshake asks whether every rank has the
    # memory.
    shapes = [
        (total, *send.shape[1:])
        for total, send in zip(counts.sum(axis=0).tolist(), sends, strict=True)
    ]
    shaped_sends = list(zip(shapes, sends, strict=True))
    is_large = sum(math.prod(shape) * send.itemsize for shape, send in shaped_sends) > _LARGE
    room_text = f"{call}, room for it"
    with lockstep.validating_collectively(room_text) if is_large else aborting(lockstep, room_text):
        outs = [np.empty(shape, send.dtype) for shape, send in shaped_sends]
    if is_large:
        lockstep.handshake(room_text)
    with aborting(lockstep, text):
        for send, out, row_counts in zip(sends, outs, counts.T, strict=True):
            row_nbytes = math.prod(out.shape[1:]) * out.itemsize
            send_bytes = send.reshape(-1).view(np.uint8)
            out_bytes = out.reshape(-1).view(np.uint8)
            lockstep.comm.allgatherv(send_bytes, out_bytes, (row_counts * row_nbytes).tolist())
    return outs


def _join_payloads(
    payloads: Sequence[bytes], counts: Array, sends: list[Array], leaf_index: int
) -> Array:
    """Return the concatenation of one leaf over all ranks, from the payloads of a handshake."""
    row_nbytes = [math.prod(send.shape[1:]) * send.dtype.itemsize for send in sends]
    nbytes = counts * np.array(row_nbytes, np.int64)
    starts = counts[0].nbytes + nbytes[:, :leaf_index].sum(axis=1)
    ends = starts + nbytes[:, leaf_index]
    parts = [
        np.frombuffer(payload[start:end], sends[leaf_index].dtype)
        for payload, start, end in zip(payloads, starts.tolist(), ends.tolist(), strict=True)
    ]
    row_count = int(counts[:, leaf_index].sum())
    return np.concatenate(parts).reshape(row_count, *sends[leaf_index].shape[1:])


def _describe_open_shape(leaf: Array, axis: int) -> str:
    dims = ["*" if i == axis else str(n) for i, n in enumerate(leaf.shape)]
    return f"{dtype_name(leaf.dtype)}[{','.join(dims)}]"


@final
class Reducer:
    """The resources of a strategy's all-reduces; `mpistrat.collectives.allreduce` uses them.

    Args:
      lockstep: The handshake.
      wire: The dtype in which float32 is sent between nodes; see `CommunicationOptions`.
      seconds: The seconds that a call may take before the watchdog ends the job; None for the time
        that any call may take.
      caller_text: The class of the program that reduces, in texts of calls; empty without one.

    Attributes:
      node: The shared memory of the ranks.
      options_text: The end of the text of each call, which names these options.
      pool: The memory of large results.
      weights: The weights of the last MEAN: a row for each rank, a column for each leaf, or one
        column for all leaves. Equal rows of many ranks are one row, broadcast.
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
        self._gather_options_text = time_limit_text + caller_text
        self.options_text = time_limit_text + caller_text + wire_text
        self.weights = np.empty((lockstep.comm.size, 0))
        self.pool = lockstep.session.get_instance(ResultPool)

    @property
    def needs_finite_check(self) -> bool:
        """Whether the options ask for a check that all numbers are finite."""
        return self.lockstep.options.nan != "off"

    def limit_seconds(self) -> Any:
        """Return a context in which each call may take the seconds of the options."""
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
        """Make the handshake of a call. Collective.

        Args:
          plan: The plan.
          text: The text of the call; equal on all ranks.
          payload: The weights, and then the bytes of the algorithm; of one length on all ranks.
          digest: `digest_call` the text, if it is known.
          alarm: The description of values that are not finite, if there are any.

        Returns:
          The scales of the values; and the payloads, a row for each rank.
        """
        rows = self.lockstep.gather_rows(text, payload, digest, alarm)
        if plan.has_equal_weights:
            return (Scales(None, (float(self.comm.size),)) if plan.is_mean else Scales()), rows
        if rows.strides[0]:
            self.weights = rows[:, : plan.weights_nbytes].copy().view(_FLOAT64)
            return compute_scales(self.weights, plan.is_weighting), rows
        # All ranks have the same row.
        weights = rows[0, : plan.weights_nbytes].copy().view(_FLOAT64)
        self.weights = np.broadcast_to(weights, (len(rows), len(weights)))
        return compute_equal_scales(weights.tolist(), len(rows), plan.is_weighting), rows

    def all_gather(
        self, call: str, axes: Sequence[int], leaves: Sequence[Array], paths: Sequence[str]
    ) -> list[Array]:
        """Concatenate every leaf over all ranks; see the function `all_gather`. Collective."""
        with self.limit_seconds():
            text = f"{call}{self._gather_options_text}"
            return all_gather(self.lockstep, text, axes, leaves, paths)

    def describe_alarm(self, call: str, contributions: Sequence[Contribution]) -> str:
        """Return the description of this rank's numbers that are not finite, or an empty string."""
        return (
            describe_first_nonfinite(call, self.lockstep.state.step_count, contributions)
            if self.needs_finite_check
            else ""
        )
