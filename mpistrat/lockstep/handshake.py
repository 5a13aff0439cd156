"""The handshake: before any payload moves it shows that all ranks make the same call.

Whatever a rank calls, the first thing it does is one exchange of one MPI signature, so the
handshake cannot hang itself: an all-gather of frames of 256 bytes, or above `FRAME_RANKS` ranks an
all-reduce of seven words. Which of the two depends on the number of ranks alone.

`mpistrat.lockstep.frame` has the bytes.

A rank that failed before its call still takes part, with FAILED set. Then, and only then, texts
move, and every rank raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, final

import numpy as np
import xxhash

from mpistrat.arrays import Array
from mpistrat.comm.session import Session
from mpistrat.errors import ContextError, LockstepError, NonFiniteError, text_of
from mpistrat.lockstep import frame, mismatch, shutdown
from mpistrat.lockstep.ending import abort, aborting, broken, encode_failure
from mpistrat.lockstep.frame import (
    ALARM,
    ERRORS,
    FAILED,
    FRAME,
    FRAME_RANKS,
    HEAD,
    LARGE,
    LEAVING,
    MAX_PAYLOAD,
    MORE,
    VERSION_BIT,
    VERSION_BITS,
    HandshakeResult,
    pack_frame,
)
from mpistrat.lockstep.ranks import Preparing, Ranks, Unproved, Writes
from mpistrat.watchdog.status_board import say

_EQUAL = HandshakeResult(True, None)


def digest_of(text: str) -> bytes:
    """Return what a frame says of a call. Cost: a quarter of a microsecond."""
    return xxhash.xxh3_128_digest(text.encode(errors="surrogatepass"))


@final
class Lockstep(Ranks):
    """Proves calls on the communicator of one session.

    Args:
      session: The session whose sequence of calls this is.
      frame_ranks: Up to this many ranks exchange frames; above, words. Equal on all ranks.
      order: Which rank is the first replica, the second and so on; None for rank order. The calls
        are still those of the session: one sequence, whatever the orders of its strategies.

    Attributes:
      seconds: How long each call may take until the watchdog ends the job; None for what is allowed
        to every call.
    """

    def __init__(
        self, session: Session, frame_ranks: int = FRAME_RANKS, order: Sequence[int] | None = None
    ):
        """Prove calls of `session`."""
        super().__init__(session, order)
        self.state.broken = broken
        self.seconds: float | None = None
        self.frames = self.comm.size <= frame_ranks
        self._own_frame = np.zeros(FRAME, np.uint8)
        self._is_alone = self.comm.size == 1
        # One rank receives what it sends.
        single_frame = self._own_frame.reshape(1, FRAME)
        all_frames = np.zeros((self.comm.size if self.frames else 0, FRAME), np.uint8)
        self._frames_received = single_frame if self._is_alone else all_frames
        self._own_bytes = self._own_frame.data
        self._starts = range(0, self._frames_received.nbytes, FRAME)

    @property
    def received(self) -> Array:
        """The payloads of the last handshake: uint8 of shape (number of ranks, `MAX_PAYLOAD`)."""
        return self._frames_received[:, HEAD:]

    def fits(self, nbytes: int) -> bool:
        """Tell whether payloads of that size are sent with the handshake."""
        return self.frames and nbytes <= MAX_PAYLOAD

    def handshake(
        self,
        call: str,
        payload: bytes = b"",
        *,
        digest: bytes | None = None,
        failure: BaseException | None = None,
        has_more: bool = False,
        alarm: str = "",
    ) -> HandshakeResult:
        """Show that all ranks make this call, or raise on all of them.

        Collective. Cost: one all-gather of 256 bytes per rank; none on one rank.

        Args:
          call: Text of the call: name, operation, axis, structure, shapes, dtypes. Equal on all
            ranks exactly if the calls are the same.
          payload: Bytes that may differ between ranks. They are sent if they are at most
            `MAX_PAYLOAD` on every rank, and the ranks exchange frames.
          digest: `digest_of` the text, if it is known.
          failure: The exception that this rank raised before it could make the call, if any.
          has_more: This rank has more to give than `payload`; every rank is told.
          alarm: The description of the numbers of this rank that are not finite, if any is.

        Returns:
          What all ranks have said. Payloads that were sent are in `received`, too.

        Raises:
          BaseException: `failure`, on the rank that gave it.
          RemoteError: Another rank failed.
          LockstepError: No rank failed, but the calls differ.
          NonFiniteError: Some rank has an alarm, and the options say that it is an error.
          PreflightError: Ranks of other versions have another format.
          ContextError: This run has failed already.
        """
        session, state = self.session, self.state
        report = b"" if failure is None else encode_failure(self, call, failure)
        session.check()
        if failure is not None or state.gone is not None or state.run.failed is not None:
            self._raise_closed(failure)
        if self._is_alone and failure is None and not alarm:
            session.calls += 1
            if len(payload) <= MAX_PAYLOAD:
                self._own_bytes[HEAD : HEAD + len(payload)] = payload
            return HandshakeResult(True, None, MORE) if has_more else _EQUAL
        if digest is None:
            digest = digest_of(call)
        if writes := state.unproved:
            writes, digest = self._with_writes(digest)
        flags = FAILED * (failure is not None) | MORE * has_more | ALARM * (alarm != "")
        if state.allowed != self.seconds:
            self._allow(self.seconds)
        session.board.enter(session.calls + 1, call)
        try:
            result = self._exchange(digest, payload, flags | VERSION_BIT)
            if result is _EQUAL:
                return result
            if not result.is_same_call or result.flags & (ERRORS | VERSION_BITS) != VERSION_BIT:
                self._explain(call, failure, result, writes, report, alarm)
            return result
        finally:
            session.board.leave()

    def compare_payloads(
        self,
        call: str,
        payload: bytes,
        failure: BaseException | None = None,
        *,
        has_more: bool = False,
    ) -> list[bytes] | None:
        """Make a handshake; return every rank's payload, of any size, or None if all are equal.

        If some rank `has_more`, ``state.asked`` is true afterwards on all ranks.

        Collective. Cost: the handshake, and two gathers where payloads differ and were not sent.

        Args:
          call: As `handshake` takes it.
          payload: The bytes of this rank.
          failure: As `handshake` takes it.
          has_more: As `handshake` takes it.
        """
        result = self.handshake(call, payload, failure=failure, has_more=has_more)
        if result is _EQUAL:
            return None
        if result.flags & MORE:
            self.state.asked = True
        if result.are_equal:
            return None
        payloads = result.payloads
        if payloads is not None:
            return payloads
        with aborting(self, call):
            payloads = self._payloads(payload, result.size_limit)
        return None if payloads.count(payload) == len(payloads) else payloads

    def _payloads(self, payload: bytes, size_limit: int | None) -> list[bytes]:
        """Return every rank's payload, which the handshake did not send. Collective."""
        if self.frames or size_limit is None:
            return self.texts(payload)
        row = np.zeros(size_limit + 1, np.uint8)
        row[: len(payload) + 1] = np.frombuffer(bytes([len(payload)]) + payload, np.uint8)
        rows = np.empty((self.comm.size, row.size), np.uint8)
        self.comm.allgather(row, rows)
        return [bytes(rank_row[1 : 1 + rank_row[0]]) for rank_row in rows]

    def gather_payloads(
        self, call: str, payload: bytes, failure: BaseException | None = None
    ) -> list[bytes]:
        """Make a handshake, and return every rank's payload, of any size, in rank order.

        Collective. Cost: as that of `compare_payloads`.
        """
        payloads = self.compare_payloads(call, payload, failure)
        return [payload] * self.comm.size if payloads is None else payloads

    def gather_rows(
        self, call: str, row: bytes, digest: bytes | None = None, alarm: str = ""
    ) -> Array:
        """Make a handshake, and return every rank's row: uint8 of shape (ranks, bytes of a row).

        Collective. Cost: the handshake, and an all-gather where rows do not fit.

        Args:
          call: As `handshake` takes it.
          row: The bytes of this rank; as many on every rank. Rows that fit are not copied, and
            change with the next handshake.
          digest: As `handshake` takes it.
          alarm: As `handshake` takes it.
        """
        result = self.handshake(call, row, digest=digest, alarm=alarm)
        if self.frames and len(row) <= MAX_PAYLOAD:
            return self._frames_received[:, HEAD : HEAD + len(row)]
        own_row = np.frombuffer(row, np.uint8)
        if result.are_equal:
            return np.broadcast_to(own_row, (self.comm.size, len(row)))
        with aborting(self, call):
            rows = np.empty((self.comm.size, len(row)), np.uint8)
            self.comm.allgather(own_row, rows)
        return rows

    def _explain(
        self,
        call: str,
        failure: BaseException | None,
        result: HandshakeResult,
        writes: Writes,
        report: bytes,
        alarm: str,
    ) -> None:
        """Raise on every rank what is wrong with a handshake; print an alarm that is no error."""
        if result.flags & VERSION_BITS != VERSION_BIT:
            self.fail(mismatch.other_versions(self, result.flags & VERSION_BITS))
        if result.is_same_call and not result.flags & (LEAVING | FAILED):
            self._sound(call, alarm)
            return
        try:
            if writes:
                call = f"{call}, after {'; '.join(write.text() for write in writes)}"
            if result.flags & LEAVING:
                self.state.gone = shutdown.left(self, call, writes)
                self.fail(self.state.gone if failure is None else failure)
            shutdown.keep_alike(writes, shutdown.alike_count(self, writes))
            if result.flags & FAILED:
                self.fail(mismatch.remote(self, call, failure, report))
            self.fail(mismatch.mismatch(self, call))
        except BaseException as error:
            if failure is not None and error is not failure:
                error.__context__ = failure  # so that the first failure is shown
            abort(self, call, error)

    def _sound(self, call: str, alarm: str) -> None:
        with aborting(self, call):
            text, first = mismatch.alarms(self, alarm)
        if self.options.nan == "raise":
            self.fail(NonFiniteError(text))
        if self.session.comm.rank == first:
            say(f"mpistrat: {text}")

    def leave(
        self, code: int, failure: BaseException | None = None, of_group: bool = False
    ) -> shutdown.Agreement:
        """Take part in the last handshake, and agree with the others on the exit code.

        Collective with whatever the others call. Nothing may be called afterwards.

        Args:
          code: The exit code that this rank would leave with.
          failure: The exception that it leaves with, if any.
          of_group: The code is what ranks of another session, such as a trial, have agreed on.
        """
        if self.session.await_borrowers is not None:
            self.session.await_borrowers()
        self._allow(None)
        own_row = shutdown.row(self.state, code, failure, of_group)
        self.session.board.enter(self.session.calls + 1, shutdown.LEAVE)
        try:
            self._exchange(digest_of(shutdown.LEAVE), b"", LEAVING | VERSION_BIT)
            agreement = shutdown.farewell(self, own_row)
        finally:
            self.session.board.leave()
        self.state.gone = LockstepError("this rank has left the program.")
        self.state.exit_code = agreement.code
        return agreement

    @contextmanager
    def limiting_seconds(self, seconds: float) -> Iterator[None]:
        """Let each call of the body take so many seconds, instead of what others may take."""
        previous_seconds, self.seconds = self.seconds, seconds
        try:
            yield
        finally:
            self.seconds = previous_seconds

    def _allow(self, seconds: float | None) -> None:
        # It lasts until the next handshake: what moves after this one is part of the same call.
        self.session.board.allow(seconds)
        self.state.allowed = seconds

    def check(self) -> None:
        """Raise what a collective call would raise here before it communicates."""
        self.session.check()
        if self.state.gone is not None or self.state.run.failed is not None:
            self._raise_closed(None)

    def defer(self, write: Unproved) -> None:
        """Check at the next handshake that all ranks make this write alike; undo it if not.

        No communication of its own. At the latest it is the handshake that ends the run. One rank
        has nobody to compare with.
        """
        if self._is_alone:
            return
        unproved = self.state.unproved
        if not unproved:  # else that was checked, and there was no handshake since
            self.check()
        unproved.append(write)

    def preparing(self, name: str) -> Preparing:
        """Raise on every rank what the body raises on this one.

        The body validates and converts, so that whatever can fail has failed before the handshake
        of the call proper. It may make only such calls as raise on all ranks what fails on one.
        """
        return Preparing(self.refuse, name)

    def refuse(self, name: str, error: Exception) -> NoReturn:
        """Take part in the handshake of a call that this rank could not make, and raise why."""
        self.handshake(f"{name}, which failed", failure=error)
        raise error

    def _with_writes(self, digest: bytes) -> tuple[Writes, bytes]:
        """Return the writes that a handshake is to show to be alike, and its digest with theirs."""
        writes, self.state.unproved = self.state.unproved, []
        if writes:
            digest = xxhash.xxh3_128_digest(digest + shutdown.digests(writes))
        return writes, digest

    def _raise_closed(self, failure: BaseException | None) -> None:
        """Raise why no further call is possible, if so, or a failure that all ranks have raised."""
        session, state = self.session, self.state
        if failure is not None and failure is state.raised:
            raise failure  # every rank has raised already
        if state.gone is not None:
            raise LockstepError(
                f"rank {session.comm.rank}: ranks have left the program, so no further call "
                f"is possible. {state.gone}"
            ) from failure
        run = state.run
        if run.failed is not None and run.depth:
            reason = text_of(run.failed)
            raise ContextError(
                f"rank {session.comm.rank}: this run has failed ({reason}); no call is possible "
                "until it has ended. Let the exception propagate out of fn."
            ) from (run.failed if failure is None else failure)

    def fail(self, error: BaseException) -> NoReturn:
        """Raise `error`, which every rank raises here, and close the runs that this rank is in."""
        self.state.raised = error
        if self.state.run.depth:
            self.state.run.failed = error
        raise error

    def _exchange(self, digest: bytes, payload: bytes, flags: int) -> HandshakeResult:
        # Not before: a call that a handler of a signal has kept from being made does not count.
        self.session.calls = number = self.session.calls + 1
        if not self.frames:
            return self._exchange_words(digest, payload, flags)
        if len(payload) > MAX_PAYLOAD:
            flags, payload = flags | LARGE, b""
        own_frame = pack_frame(digest, number, flags, len(payload), payload)
        self._own_bytes[:] = own_frame
        if not self._is_alone:
            try:
                self._raw.allgather(self._own_frame, self._frames_received)
            except BaseException as error:
                received = self._frames_received[self.comm.rank]
                self._keep(error, np.array_equal(received, self._own_frame))
        frames = self._frames_received.tobytes()
        if flags == VERSION_BIT:
            if frames == own_frame * self.comm.size:
                return _EQUAL
            heads = [frames[start : start + HEAD] for start in self._starts]
            if heads.count(own_frame[:HEAD]) == len(heads):
                return HandshakeResult(False, frames)
        return frame.read_frames(frames, self.comm.rank)

    def _exchange_words(self, digest: bytes, payload: bytes, flags: int) -> HandshakeResult:
        own_words = frame.pack_words(digest, self.session.calls, payload, flags)
        words = np.zeros_like(own_words)
        try:
            self._raw.allreduce(own_words, words, "BOR")
        except BaseException as error:
            self._keep(error, np.array_equal(words & own_words, own_words))
        return frame.read_words(words)

    def _keep(self, error: BaseException, exchanged: bool) -> None:
        if self.session.comm.is_interruptible or not self.state.interrupted.can_continue(
            error, exchanged
        ):
            self.session.calls -= 1  # this call was not made
            raise error
