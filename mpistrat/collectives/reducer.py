"""All-reduce, all-gather and broadcast of lists of arrays.

Three paths, chosen from sizes and the number of ranks alone, so alike on all ranks:

- *small*: everything fits the proof's frame; folded locally, in rank order.
- *native*: MPI_Allreduce or MPI_Allgatherv; large leaves from where they lie, small ones packed.
- *gathered*: for MIN and MAX of dtypes that cannot travel as ordered integers (longdouble).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array, dtype_name, spec_text
from mpistrat.collectives.alarms import first_nonfinite
from mpistrat.collectives.lockstep import Lockstep
from mpistrat.collectives.messages import Message, divide, finished, messages, multiply, scale
from mpistrat.collectives.part import Part
from mpistrat.kernels.ops import FOLDS, ReduceOp

__all__ = ["Reducer", "described"]

# Whole numbers up to here are exact in float32.
_EXACT = 2**24
# A gather of more bytes than this is worth a second proof that every rank has the memory.
_LARGE = 16 * 1024 * 1024
_MPI_NAMES = {op: op.value for op in ReduceOp} | {ReduceOp.MEAN: "SUM"}


@final
class Reducer:
    """Makes the values of all ranks one.

    Args:
      lockstep: Proves each call, and carries what is small.
    """

    def __init__(self, lockstep: Lockstep):
        """Reduce over the ranks of `lockstep`."""
        self.lockstep = lockstep
        self.comm = lockstep.comm

    def all_reduce(
        self, call: str, op: ReduceOp, parts: Sequence[Part], weigh: bool = False
    ) -> list[Array]:
        """Fold every leaf over all ranks.

        Collective. Cost: the proof, and unless everything rides in it one MPI_Allreduce per bucket.

        Args:
          call: The text of the call; shapes and dtypes of the parts are added to it.
          op: The fold. MEAN divides by the sum of the weights.
          parts: One per leaf; equal shapes and dtypes on all ranks.
          weigh: Multiply the values by their weights first; otherwise they are sums over their
            examples already.

        Returns:
          One fresh array per leaf, of the form's result dtype, with the same bits on all ranks.
        """
        with np.errstate(all="ignore"):
            try:
                wires = [_wire(op, part, weigh) for part in parts]
                text = described(call, parts)
                header = _header(parts) if op is ReduceOp.MEAN else b""
                small = self.lockstep.fits(len(header) + sum(wire.nbytes for wire in wires))
                travelling = [] if small else messages(op, wires, self.comm.size)
                alarm = self._alarm(call, parts)
            except Exception as error:
                self.lockstep.refuse(call, error)
            riding = b"".join([wire.tobytes() for wire in wires]) if small else b""
            smalls = self.lockstep.share(text, header + riding, alarm=alarm)
            scales = _scales(smalls, len(parts), weigh) if header else None
            if small:
                totals = _fold_frames(op, wires, smalls, len(header), scales if weigh else None)
            else:
                if weigh and scales is not None:
                    for message in travelling:
                        scale(message, wires, scales[self.comm.rank])
                totals = self._native(op, wires, travelling)
            if scales is not None:
                for i, total in enumerate(totals):
                    divide(total, math.fsum(scales[:, i]))
            return [
                total.astype(part.form.result, copy=False)
                for total, part in zip(totals, parts, strict=True)
            ]

    def _alarm(self, call: str, parts: Sequence[Part]) -> str:
        if self.lockstep.options.nan == "off":
            return ""
        return first_nonfinite(call, self.lockstep.session.steps, parts)

    def _native(self, op: ReduceOp, wires: list[Array], travelling: list[Message]) -> list[Array]:
        for i, message in enumerate(travelling):
            if message.gathered:
                self.comm.allgather(message.send, message.recv)
                fold: Any = FOLDS[op]
                travelling[i] = message._replace(recv=fold.reduce(message.recv, axis=0))
            else:
                self.comm.allreduce(message.send, message.recv, _MPI_NAMES[op])
        return finished(op, wires, travelling)

    def all_gather(
        self, call: str, axis: Sequence[int], leaves: Sequence[Array], paths: Sequence[str]
    ) -> list[Array]:
        """Concatenate every leaf over all ranks, in rank order.

        Collective. Cost: the proof, and one MPI_Allgatherv per leaf unless all ride in the proof.

        Args:
          call: The text of the call; dtypes and the shapes that must agree are added to it.
          axis: The axis of each leaf, not negative.
          leaves: Arrays; sizes along the axis may differ between ranks, also be 0.
          paths: The names of the leaves.

        Returns:
          One fresh C-ordered array per leaf, with the same bits on all ranks.
        """
        with self.lockstep.preparing(call):
            fronts = [np.moveaxis(leaf, a, 0) for leaf, a in zip(leaves, axis, strict=True)]
            sends = [np.ascontiguousarray(front) for front in fronts]
            text = f"{call} {', '.join(map(_named, paths, map(_open_spec, leaves, axis)))}"
            sizes = np.array([len(send) for send in sends], np.int64)
            rides = self.lockstep.fits(sizes.nbytes + sum(send.nbytes for send in sends))
            data = b"".join(send.tobytes() for send in sends) if rides else b""
        proof = self.lockstep.prove(text, sizes.tobytes() + data, more=not rides)
        counts = self._counts(sizes, proof.smalls)
        if proof.smalls is None or proof.more:
            outs = self._rooms(call, sends, counts)
            for i, send in enumerate(sends):
                self._allgatherv(send, outs[i], counts[:, i])
        else:
            outs = [
                np.concatenate([_cut(s, counts[r], sends, i) for r, s in enumerate(proof.smalls)])
                for i in range(len(sends))
            ]
        return [
            np.ascontiguousarray(np.moveaxis(out, 0, a)) for out, a in zip(outs, axis, strict=True)
        ]

    def _rooms(self, call: str, sends: list[Array], counts: Array) -> list[Array]:
        # How much memory it takes is known only now; whether every rank has it, is asked again.
        with self.lockstep.preparing(f"{call}, room for it"):
            totals = counts.sum(axis=0).tolist()
            rooms = [
                np.empty((total, *send.shape[1:]), send.dtype)
                for total, send in zip(totals, sends, strict=True)
            ]
        if sum(room.nbytes for room in rooms) > _LARGE:
            self.lockstep.prove(f"{call}, room for it")
        return rooms

    def _counts(self, sizes: Array, smalls: list[bytes] | None) -> Array:
        if smalls is not None:
            return np.array([np.frombuffer(s[: sizes.nbytes], np.int64) for s in smalls])
        counts = np.empty((self.comm.size, sizes.size), np.int64)
        self.comm.allgather(sizes, counts)
        return counts

    def _allgatherv(self, send: Array, out: Array, rows: Array) -> None:
        row = math.prod(out.shape[1:]) * send.dtype.itemsize
        mine, everyones = send.reshape(-1).view(np.uint8), out.reshape(-1).view(np.uint8)
        self.comm.allgatherv(mine, everyones, (rows * row).tolist())


def described(call: str, parts: Sequence[Part]) -> str:
    """Return the text of a call with the names, dtypes and shapes of its parts."""
    return f"{call} {', '.join(_named(part.path, spec_text(part.value)) for part in parts)}"


def _named(path: str, spec: str) -> str:
    return f"{path}: {spec}" if path else spec


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


def _header(parts: Sequence[Part]) -> bytes:
    return struct.pack(f"<{len(parts)}d", *[part.weight for part in parts])


def _wire(op: ReduceOp, part: Part, weigh: bool) -> Array:
    dtype = part.form.wire
    if part.weight == 0 and op is ReduceOp.MEAN:
        return np.zeros(part.value.shape, dtype)
    if weigh:  # a copy, to be multiplied once all weights are known
        return np.array(part.value, dtype, order="C")
    return np.asarray(part.value, dtype, order="C")


def _scales(smalls: list[bytes], count: int, weigh: bool) -> Array:
    """Return every rank's weights (rows) of every leaf (columns), as far as they matter.

    Counts stay what they are: their products with values lose least. Other weights are taken
    relative to the largest, so that they keep within the range of float32 whatever they are.
    """
    table = np.array([np.frombuffer(small[: 8 * count], np.float64) for small in smalls])
    if not weigh:
        return table
    counts = (table <= _EXACT) & (table == np.floor(table))
    largest = table.max(axis=0)
    scales: Array = table / np.where(counts.all(axis=0) | (largest == 0), 1, largest)
    return scales


def _fold_frames(
    op: ReduceOp, wires: list[Array], smalls: list[bytes], start: int, scales: Array | None
) -> list[Array]:
    totals = []
    for i, wire in enumerate(wires):
        stop = start + wire.nbytes
        values = [np.frombuffer(small[start:stop], wire.dtype) for small in smalls]
        if scales is not None:
            values = [value.copy() for value in values]
            for value, weight in zip(values, scales[:, i], strict=True):
                multiply(value, weight)
        total = values[0].copy()
        for value in values[1:]:
            FOLDS[op](total, value, out=total)
        totals.append(total.reshape(wire.shape))
        start = stop
    return totals
