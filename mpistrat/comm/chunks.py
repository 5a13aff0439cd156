"""Messages that are too large for one call of MPI, cut into chunks.

What two libraries did with 2**31 + 5 elements of int8 on 2 ranks, asked by mpi4py 4.1:

===========================================  =================  ===================
call                                         MPICH 5.0 (MPI 4)  Open MPI 5.0 (MPI 3)
===========================================  =================  ===================
Allreduce, Reduce, Bcast, Sendrecv           right              ``MPI_ERR_ARG``
Gatherv, Allgatherv: one count above 2**31   right              ``MPI_ERR_ARG``
the same: one displacement above 2**31       right              ``MPI_ERR_ARG``
the same: only the sum above 2**31           right              right
===========================================  =================  ===================

An MPI 4 has functions that count in 64 bits, which mpi4py takes; before, counts and displacements
are C ints. Inside the libraries, and in the system calls that they make, numbers of bytes meet
such limits too, and a reduction takes as much memory again as it is given. So every library gets
at most `LIMIT` bytes in one call.

An element is never cut, and reduced in one call, so a reduction is what it is without pieces
wherever the library adds in an order that does not depend on where an element lies.
"""

from __future__ import annotations

from collections.abc import Iterator

# Bytes.
LIMIT = 2**30


def slices(size: int, itemsize: int, limit: int) -> Iterator[slice]:
    """Cut `size` elements of `itemsize` bytes into runs of at most `limit` bytes.

    An element larger than that is a run of its own. Nothing is cut into nothing.

    Example:
      >>> [(piece.start, piece.stop) for piece in slices(5, 4, 8)]
      [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, limit // itemsize)
    for low in range(0, size, step):
        yield slice(low, min(low + step, size))
