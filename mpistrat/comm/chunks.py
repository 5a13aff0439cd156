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

from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Bytes.
LIMIT = 2**30
# A gather in rounds passes through so much memory; larger rounds are not faster.
_ROOM = 2**26


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


class Round(NamedTuple):
    """A part of an uneven gather: some bytes of every rank that has not given all yet.

    Attributes:
      begin: Where in each rank's bytes they begin.
      counts: How many each rank gives; 0 once it has given all.
    """

    begin: int
    counts: list[int]

    def places(self, counts: Sequence[int]) -> Iterator[tuple[slice, slice]]:
        """Yield where bytes that came are, and where they go among all, rank by rank.

        Args:
          counts: How many bytes each rank gives in all rounds.
        """
        received_offset = full_offset = 0
        for round_nbytes, rank_nbytes in zip(self.counts, counts, strict=True):
            if round_nbytes:
                to = full_offset + self.begin
                yield (
                    slice(received_offset, received_offset + round_nbytes),
                    slice(to, to + round_nbytes),
                )
            received_offset += round_nbytes
            full_offset += rank_nbytes


def rounds(counts: Sequence[int], limit: int) -> Iterator[Round]:
    """Cut a gather of so many bytes of each rank into rounds of at most `limit` bytes in all.

    All ranks give alike in each round, so that none waits while the others pass on its bytes.

    Example:
      >>> [step.counts for step in rounds([5, 0, 3], 6)]
      [[2, 0, 2], [2, 0, 1], [1, 0, 0]]
    """
    share = max(1, min(limit, _ROOM) // len(counts))
    for begin in range(0, max(counts), share):
        yield Round(begin, [min(max(count - begin, 0), share) for count in counts])
