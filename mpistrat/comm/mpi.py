"""Communication over MPI; the only module that imports mpi4py.

mpi4py starts MPI when its ``MPI`` module is imported; that happens in `library`, when the first
communicator is made, never when mpistrat is imported.

Messages that are too large for one call of MPI, cut into chunks.

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
such limits too, and a reduction takes as much memory again as it is given. So every library gets at
most `MAX_CALL_NBYTES` bytes in one call. Larger gathers are done in rounds, through a buffer of 64
MiB, to which all ranks contribute equally.

An element is never cut, and is reduced in one call. So a reduction has the bits of one without
pieces wherever the order in which the library adds does not depend on the position of an element.
"""

from __future__ import annotations

import faulthandler
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.comm.base import Buffer, Comm
from mpistrat.config import launched_by, mapped_shm_files, mark_rank, read_or_default
from mpistrat.shm.segments import Pages, shared_memory, shared_pages

# Bytes.
MAX_CALL_NBYTES = 2**30
# A gather in rounds passes through so much memory; larger rounds are not faster.
_ROUND_NBYTES = 2**26


def cut_into_slices(size: int, itemsize: int, limit: int) -> Iterator[slice]:
    """Cut `size` elements of `itemsize` bytes into runs of at most `limit` bytes.

    An element larger than that is a run of its own. Nothing is cut into nothing.

    Example:
      >>> [(piece.start, piece.stop) for piece in cut_into_slices(5, 4, 8)]
      [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, limit // itemsize)
    for low in range(0, size, step):
        yield slice(low, min(low + step, size))


class Round(NamedTuple):
    """A part of an uneven gather: some bytes of every rank that has not given all yet.

    Attributes:
      begin: The first of these bytes, counted in each rank's bytes.
      counts: How many each rank gives; 0 once it has given all.
    """

    begin: int
    counts: list[int]

    def iterate_slices(self, counts: Sequence[int]) -> Iterator[tuple[slice, slice]]:
        """Yield the slice of the received bytes and the slice of the result, rank by rank.

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


def cut_into_rounds(counts: Sequence[int], limit: int) -> Iterator[Round]:
    """Cut a gather of so many bytes of each rank into rounds of at most `limit` bytes in all.

    All ranks give alike in each round, so that none waits while the others pass on its bytes.

    Example:
      >>> [step.counts for step in cut_into_rounds([5, 0, 3], 6)]
      [[2, 0, 2], [2, 0, 1], [1, 0, 0]]
    """
    rank_nbytes = max(1, min(limit, _ROUND_NBYTES) // len(counts))
    for begin in range(0, max(counts), rank_nbytes):
        yield Round(begin, [min(max(count - begin, 0), rank_nbytes) for count in counts])


# Seconds that a thread sleeps between two looks at what it waits for. One that polls takes its time
# from the program on a machine whose cores are all in use: of 148 ms for 16.8 MB over 1 Gbit/s it
# computes for 25 this way (MPICH), and for all of them otherwise.
_NAP_SECONDS = 1e-4
_SEGMENT_PREFIXES = ("mpich_", "sm_segment.", "vader_segment.")  # of MPICH, Open MPI 5 and 4


@functools.cache
def library() -> Any:
    """Return ``mpi4py.MPI``, starting MPI if nobody has yet."""
    if "mpi4py.MPI" not in sys.modules and launched_by() is not None:
        with end_after_timeout():
            _start_with_all_ranks()
    from mpi4py import MPI

    mark_rank()
    return MPI


def _start_with_all_ranks() -> None:
    """Start MPI. Its name shows in the stack of a rank that waits for others here."""
    from mpi4py import MPI as MPI


@contextmanager
def end_after_timeout() -> Iterator[None]:
    """Print the stack of this process and end it if the body takes ``MPISTRAT_TIMEOUT`` seconds.

    For waits inside of MPI for ranks that may have ended before they started it. No Python runs
    then, so no thread could report them.
    """
    faulthandler.dump_traceback_later(read_or_default().timeout, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def is_mpi_running() -> bool:
    """Tell whether MPI has been started in this process and not yet been finalized."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    mpi = library()
    return bool(mpi.Is_initialized()) and not mpi.Is_finalized()


def is_communicator(value: object) -> bool:
    """Tell whether `value` is an mpi4py intracommunicator, without starting MPI."""
    return "mpi4py.MPI" in sys.modules and isinstance(value, library().Intracomm)


def world_size() -> int:
    """Return the number of ranks of ``MPI.COMM_WORLD``."""
    return int(library().COMM_WORLD.size)


@functools.cache
def largest_tag() -> int:
    """Return the largest tag of a message.

    MPI promises it of ``MPI.COMM_WORLD`` alone: a duplicate of a part has none with Open MPI 5.0.
    """
    return int(library().COMM_WORLD.Get_attr(library().TAG_UB))


def ranks_in_job(comm: Comm) -> Sequence[int]:
    """Return the ranks in ``MPI.COMM_WORLD`` of the ranks of `comm`."""
    return ranks_of(comm.mpi) if isinstance(comm, MPIComm) else range(comm.size)


def ranks_of(comm: Any) -> Sequence[int]:
    """Return the ranks in ``MPI.COMM_WORLD`` of the ranks of an mpi4py intracommunicator."""
    mpi, ranks = library(), range(comm.size)
    if mpi.Comm.Compare(comm, mpi.COMM_WORLD) in (mpi.IDENT, mpi.CONGRUENT):
        return ranks
    return list(mpi.Group.Translate_ranks(comm.group, list(ranks), mpi.COMM_WORLD.group))


_abort_callbacks: list[Callable[[int], object]] = []


def add_abort_callback(callback: Callable[[int], object]) -> None:
    """Call `callback` with the exit code before this process ends the job."""
    _abort_callbacks.append(callback)


def abort(code: int) -> None:
    """End the job with an exit code that every launcher passes on unchanged."""
    for call in _abort_callbacks:
        call(code)
    for file in mapped_shm_files():
        if Path(file).name.startswith(_SEGMENT_PREFIXES):  # MPI only removes them in MPI_Finalize
            with suppress(OSError):
                Path(file).unlink()
    library().COMM_WORLD.Abort(code)


def finalize() -> None:
    """End MPI in this process. Collective; nothing may communicate afterwards."""
    library().Finalize()


def needs_yielding() -> bool:
    """Tell whether this library has to be told to yield while it waits beside a computation."""
    return "Open MPI" in library().Get_library_version()


def _has_same_bits(size: int) -> bool:
    """Tell whether all-reduces that do not block have the bits of those that do, as far as seen."""
    return size <= 2 or library().Get_library_version().startswith("MPICH Version")


def _sleep_until(test: Callable[[], bool]) -> None:
    """Sleep until the test succeeds."""
    while not test():
        time.sleep(_NAP_SECONDS)


def _blocking_call(
    begin: Callable[..., Any], wait: Callable[[Callable[[], bool]], None]
) -> Callable[..., None]:
    """Return a blocking form of a call that begins and returns a request."""

    def call_and_wait(*args: object, **kwargs: object) -> None:
        wait(begin(*args, **kwargs).Test)

    return call_and_wait


def _as_bytes(buffer: Buffer) -> Buffer:
    return buffer.reshape(-1).view(np.uint8)


@final
class MPIComm(Comm):
    """A private duplicate of an MPI communicator; `mpi` is mpi4py's object for it.

    The duplicate is made once, so that traffic of the program on its own communicator and traffic
    of mpistrat never meet (MPI 4.1, section 7.4: contexts of communication).

    Attributes:
      limit: How many bytes MPI is given at once; see `mpistrat.comm.mpi`. Equal on all ranks.
    """

    name = "MPI"

    def __init__(self, parent: Any, is_owned: bool = False, limit: int = MAX_CALL_NBYTES):
        """Duplicate `parent`, an mpi4py intracommunicator. Collective over it.

        Args:
          parent: The communicator to duplicate.
          is_owned: It is ours already, so there is nothing to duplicate.
          limit: How many bytes MPI is given at once; equal on all ranks.
        """
        self._comm = self.mpi = parent if is_owned else parent.Dup()
        self.rank = self._comm.rank
        self.size = self._comm.size
        self.limit = limit
        # Looked up once: every handshake passes here, and it takes as long as some of these.
        self._allgather, self._byte = self._comm.Allgather, library().BYTE
        self._allreduce, self._barrier = self._comm.Allreduce, self._comm.Barrier
        self.is_ended = library().Is_finalized

    def allgather(self, send: Buffer, recv: Buffer) -> None:
        """Put every rank's `send` into `recv`, in rank order, by MPI_Allgather."""
        size = send.nbytes
        if size * self.size <= self.limit:
            self._allgather([send, size, self._byte], [recv, size, self._byte])
        else:
            self._gather_in_rounds(
                self._comm.Allgatherv, _as_bytes(send), _as_bytes(recv), [size] * self.size
            )

    def allgatherv(self, send: Buffer, recv: Buffer, counts: Sequence[int]) -> None:
        """Put every rank's bytes into `recv`, in rank order, by MPI_Allgatherv."""
        if sum(counts) <= self.limit:
            self._comm.Allgatherv([send, send.nbytes, self._byte], [recv, counts, self._byte])
        else:
            self._gather_in_rounds(self._comm.Allgatherv, send, recv, counts)

    def gatherv(self, send: Buffer, recv: Buffer | None, counts: Sequence[int], root: int) -> None:
        """Put every rank's bytes into `recv` of `root`, in rank order, by MPI_Gatherv."""
        gather = functools.partial(self._comm.Gatherv, root=root)
        if sum(counts) <= self.limit:
            receive_message = None if recv is None else [recv, counts, self._byte]
            gather([send, send.nbytes, self._byte], receive_message)
        else:
            self._gather_in_rounds(gather, send, recv, counts)

    def _gather_in_rounds(
        self, gather: Callable[..., None], send: Buffer, recv: Buffer | None, counts: Sequence[int]
    ) -> None:
        # The messages of one round are received in another array: in `recv` they are not side by
        # side, and MPI 3 cannot describe so large distances.
        round_bytes = None
        for step in cut_into_rounds(counts, self.limit):
            if recv is not None and round_bytes is None:
                round_bytes = np.empty(sum(step.counts), np.uint8)  # the first round is the largest
            send_part = send[step.begin : step.begin + step.counts[self.rank]]
            receive_message = (
                None if round_bytes is None else [round_bytes, step.counts, self._byte]
            )
            gather([send_part, send_part.size, self._byte], receive_message)
            if recv is not None and round_bytes is not None:
                for received_slice, target_slice in step.iterate_slices(counts):
                    recv[target_slice] = round_bytes[received_slice]

    def allreduce(self, send: Buffer, recv: Buffer, op: str) -> None:
        """Reduce every rank's `send` into `recv` by MPI_Allreduce, in pieces as every MPI takes."""
        mpi_op = getattr(library(), op)
        if send.nbytes <= self.limit:
            self._allreduce(send, recv, op=mpi_op)
            return
        flat_send, flat_recv = send.reshape(-1), recv.reshape(-1)
        for piece in cut_into_slices(send.size, send.itemsize, self.limit):
            self._allreduce(flat_send[piece], flat_recv[piece], op=mpi_op)

    def bcast(self, buffer: Buffer, root: int) -> None:
        """Copy `buffer` of `root` to every rank by MPI_Bcast, in pieces that every MPI takes."""
        flat = _as_bytes(buffer)
        for piece in cut_into_slices(flat.size, 1, self.limit):
            part = flat[piece]
            self._comm.Bcast([part, part.size, self._byte], root=root)

    def sendrecv(self, send: Buffer, dest: int, recv: Buffer, source: int) -> None:
        """Give `send` to `dest` and get `recv` from `source` by MPI_Sendrecv, in pieces."""
        send_bytes, receive_bytes = _as_bytes(send), _as_bytes(recv)
        for piece in cut_into_slices(max(send_bytes.size, receive_bytes.size), 1, self.limit):
            send_piece, receive_piece = send_bytes[piece], receive_bytes[piece]
            # The two may differ in size, and neighbours make as many calls as their own need: what
            # is not there must not be waited for.
            self._comm.Sendrecv(
                [send_piece, send_piece.size, self._byte],
                dest if send_piece.size else library().PROC_NULL,
                recvbuf=[receive_piece, receive_piece.size, self._byte],
                source=source if receive_piece.size else library().PROC_NULL,
            )

    def barrier(self) -> None:
        """Wait for every rank, by MPI_Barrier."""
        self._barrier()

    def alltoallv(
        self, send: Buffer, recv: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        """Send ``gives[r]`` bytes of uint8 `send` to rank r, receive ``gets[r]``; MPI_Alltoallv.

        Messages too large for one call of MPI go pair by pair, with the neighbours in turn.
        """
        send_offsets, receive_offsets = (
            np.cumsum([0, *send_counts]).tolist(),
            np.cumsum([0, *receive_counts]).tolist(),
        )
        if self.reduce_integer(max(send_offsets[-1], receive_offsets[-1]), "MAX") > self.limit:
            for step in range(self.size):
                dest, source = (self.rank + step) % self.size, (self.rank - step) % self.size
                self.sendrecv(
                    send[send_offsets[dest] : send_offsets[dest + 1]],
                    dest,
                    recv[receive_offsets[source] : receive_offsets[source + 1]],
                    source,
                )
            return
        self._comm.Alltoallv(
            [send, (send_counts, send_offsets[:-1]), self._byte],
            [recv, (receive_counts, receive_offsets[:-1]), self._byte],
        )

    def create_group(self, ranks: Sequence[int], tag: int) -> MPIComm:
        """Return the group of these ranks, in this order, by MPI_Comm_create_group.

        Collective over `ranks` only: the others need not call.

        Args:
          ranks: Ranks of this group; this one among them.
          tag: Distinguishes groups that are made at the same time; cut to the largest tag of MPI.
        """
        group = self._comm.group.Incl(list(ranks))
        try:
            group_comm = self._comm.Create_group(group, tag % largest_tag())
        finally:
            group.Free()
        return MPIComm(group_comm, is_owned=True, limit=self.limit)

    def make_interruptible(
        self, wait: Callable[[Callable[[], bool]], None] = _sleep_until
    ) -> MPIComm:
        """Return this group for a thread beside the program: it sleeps while it waits.

        Not where that may change the bits of a reduction, which then is made by calls that block.

        Args:
          wait: Takes a function that returns whether a message is there, and returns when it is;
            another one may look more often, or raise after some time.
        """
        patient_comm = MPIComm(self._comm, is_owned=True, limit=self.limit)
        patient_comm.is_interruptible = True
        patient_comm._allgather = _blocking_call(self._comm.Iallgather, wait)
        patient_comm._barrier = _blocking_call(self._comm.Ibarrier, wait)
        if _has_same_bits(self.size):
            patient_comm._allreduce = _blocking_call(self._comm.Iallreduce, wait)
        return patient_comm

    def split(self, color: int, key: int | None = None) -> MPIComm:
        """Return the ranks that give the same `color`, ordered by `key`, by MPI_Comm_split."""
        split_comm = self._comm.Split(color, self.rank if key is None else key)
        return MPIComm(split_comm, is_owned=True, limit=self.limit)

    def by_node(self) -> MPIComm:
        """Return the ranks that share memory with this one, by MPI_Comm_split_type."""
        node_comm = self._comm.Split_type(library().COMM_TYPE_SHARED, self.rank)
        if node_comm.size < self.size:
            return MPIComm(node_comm, is_owned=True, limit=self.limit)
        node_comm.Free()
        return self

    def shared(self, nbytes: int) -> memoryview | None:
        """Return zeroed bytes that the processes of this group map; None if they cannot."""
        return shared_memory(self._comm.allgather, self.rank == 0, nbytes, "arena")

    def pages(self, nbytes: int) -> Pages | None:
        """Return zeroed memory that the processes of this group map; None if they cannot."""
        return shared_pages(self._comm.allgather, self.rank == 0, nbytes)

    def free(self) -> None:
        """Free the duplicate. Collective; nothing happens once MPI is finalized."""
        if not library().Is_finalized() and self._comm != library().COMM_NULL:
            self._comm.Free()
