"""The MPI library's own all-reduce, with fixes for results that differ between ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.dtypes import decode_order, encode_order, ordered
from mpistrat.comm.base import Comm
from mpistrat.kernels.ops import UFUNCS, ReduceOp
from mpistrat.kernels.scaling import usual_nan


def reduce_by_mpi(comm: Comm, send: Array, recv: Array, op: ReduceOp) -> None:
    """Reduce by the MPI library's own all-reduce; a NaN has the same bits on all ranks.

    MPICH leaves other bits of a NaN on other ranks, which depend on where it came from. Where MPI
    would lose a NaN, integers that sort alike travel; where it has no such operation, or they have
    none, everybody's values are gathered instead.

    Collective; unproved. Cost: one MPI_Allreduce, and of floating point one pass over `recv`, or
    some over both for MIN and MAX.
    """
    if ordered(op, send.dtype):
        keys = encode_order(send, op)
        reduced_keys = np.empty_like(keys)
        comm.allreduce(keys, reduced_keys, op.how.mpi)
        recv[...] = decode_order(reduced_keys, op)
        return
    if not op.how.mpi or (op.how.loses_nan and send.dtype.kind == "f"):
        rows = np.empty((comm.size, *send.shape), send.dtype)
        comm.allgather(send, rows)
        ufunc: Any = UFUNCS[op]
        ufunc.reduce(rows, axis=0, out=recv)
        return
    comm.allreduce(send, recv, op.how.mpi)
    if comm.size > 1:
        usual_nan(recv)
