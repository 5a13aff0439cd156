"""The MPI library's own all-reduce, where its results are not good enough as they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.dtypes import decode_order, encode_order, ordered
from mpistrat.comm.base import Comm
from mpistrat.kernels.ops import UFUNCS, ReduceOp
from mpistrat.kernels.scaling import real


def reduce_by_mpi(comm: Comm, send: Array, recv: Array, op: ReduceOp) -> None:
    """Reduce by the MPI library's own all-reduce; a NaN has the same bits on all ranks.

    Of two NaNs, and of where they came from, MPICH leaves other bits on other ranks. Where MPI
    would lose a NaN, or has no such operation, everybody's values are gathered instead.

    Collective; unproved. Cost: one MPI_Allreduce, and of floating point one pass over `recv`.
    """
    if not op.how.left_to_mpi(send.dtype):
        rows = np.empty((comm.size, *send.shape), send.dtype)
        comm.allgather(send, rows)
        ufunc: Any = UFUNCS[op]
        ufunc.reduce(rows, axis=0, out=recv)
        return
    comm.allreduce(send, recv, op.how.mpi)
    if recv.dtype.kind in "fc" and comm.size > 1:
        flat = real(recv).reshape(-1)
        missing = np.isnan(flat)
        if missing.any():
            flat[missing] = np.nan


def reduce_array(comm: Comm, array: Array, op: ReduceOp) -> Array:
    """Return an array reduced by MPI's own operations, in memory of its own. Collective."""
    send = encode_order(array, op) if ordered(op, array.dtype) else array
    recv = np.empty_like(send)
    reduce_by_mpi(comm, send, recv, op)
    return recv if send is array else decode_order(recv, op)
