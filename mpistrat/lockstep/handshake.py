"""The handshake: before any payload moves it shows that all ranks make the same call.

Every call begins with one exchange of one MPI signature, whatever a rank calls, so the handshake
cannot hang itself: an all-gather of frames of 256 bytes, or above `FRAME_RANKS` ranks an all-reduce
of seven words. The number of ranks alone decides between the two. `mpistrat.lockstep.frame` has the
bytes. The digest covers the text of the call: name, operation, axis, tree, shapes and dtypes, name
and number of a variable. If all digests are equal, nothing else moves.

A rank that failed before its call still takes part, with FAILED set. Then, or where calls differ,
texts move, and every rank raises: the failed rank its own exception, the others a `RemoteError`
that is also an instance of the built-in exception raised there; or all of them `LockstepError`.

With ``MPISTRAT_NAN`` a rank whose numbers contain NaN or infinity sets ALARM: rank, leaf, index and
step are then printed or raised.
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
from mpistrat.lockstep.ending import abort, aborting, encode_failure, end_broken_call
from mpistrat.lockstep.frame import (
    ALARM,
    ERRORS,
    FAILED,
    FOLLOWUP,
    FRAME_NBYTES,
    FRAME_RANKS,
    HEAD_NBYTES,
    LARGE,
    LEAVING,
    MAX_PAYLOAD,
    VERSION_BIT,
    VERSION_BITS,
    HandshakeResult,
    PayloadRows,
    pack_frame,
)
from mpistrat.lockstep.ranks import CollectiveValidation, PendingWrite, PendingWrites, Ranks
from mpistrat.watchdog.status_board import say

_EQUAL = HandshakeResult(True, None)


def digest_call(text: str) -> bytes:
    """Return the digest of a call in a frame. Cost: a quarter of a microsecond."""
    return xxhash.xxh3_128_digest(text.encode(errors="surrogatepass"))


@final
class Lockstep(Ranks):
    """Makes the handshakes of the calls of one session.

    Args:
      session: The session whose sequence of calls this is.
      max_frame_ranks: Up to this many ranks exchange frames; above, words. Equal on all ranks.
      order: The ranks in the order of the replicas; None for rank order. The calls
        are still those of the session: one sequence, whatever the orders of its strategies.

    Attributes:
      call_seconds: Seconds that each call may take until the watchdog ends the job; None for the
        time that every call may take.
      uses_frames: Whether the ranks exchange frames.
    """

    def __init__(
        self,
        session: Session,
        max_frame_ranks: int = FRAME_RANKS,
        order: Sequence[int] | None = None,
    ):
        """Create it for the calls of `session`."""
        super().__init__(session, order)
        self.state.end_broken_call = end_broken_call
        self.call_seconds: float | None = None
        self.uses_frames = self.comm.size <= max_frame_ranks
        self._own_frame = np.zeros(FRAME_NBYTES, np.uint8)
        self._is_alone = self.comm.size == 1
        # One rank receives what it sends.
        single_frame = self._own_frame.reshape(1, FRAME_NBYTES)
        all_frames = np.zeros((self.comm.size if self.uses_frames else 0, FRAME_NBYTES), np.uint8)
        self._frames_received = single_frame if self._is_alone else all_frames
        self._own_bytes = self._own_frame.data
        self._frame_starts = range(0, self._frames_received.nbytes, FRAME_NBYTES)

    @property
    def received_payloads(self) -> Array:
        """The payloads of the last handshake: uint8 of shape (number of ranks, `MAX_PAYLOAD`)."""
        return self._frames_received[:, HEAD_NBYTES:]

    def can_carry(self, nbytes: int) -> bool:
        """Tell whether payloads of that size are sent with the handshake."""
        return self.uses_frames and nbytes <= MAX_PAYLOAD

    def handshake(
        self,
        call: str,
        payload: bytes = b"",
        *,
        digest: bytes | None = None,
        failure: BaseException | None = None,
        needs_followup: bool = False,
        alarm: str = "",
    ) -> HandshakeResult:
        """Show that all ranks make this call, or raise on all of them.

        Collective. Cost: one all-gather of 256 bytes per rank; none on one rank.

        Args:
          call: Text of the call: name, operation, axis, structure, shapes, dtypes. Equal on all
            ranks exactly if the calls are the same.
          payload: Bytes that may differ between ranks. They are sent if they are at most
            `MAX_PAYLOAD` on every rank, and the ranks exchange frames.
          digest: `digest_call` of the text, if it is known.
          failure: The exception that this rank raised before it could make the call, if any.
          needs_followup: This rank needs another exchange after the handshake, such as for a longer
            payload; the result shows it on every rank.
          alarm: The description of the numbers of this rank that are not finite, if any is.

        Returns:
          The handshake's result. Payloads that were sent are in `received_payloads`, too.

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
        if failure is not None or state.closing_error is not None or state.run.failure is not None:
            self._raise_closed(failure)
        if self._is_alone and failure is None and not alarm:
            session.calls += 1
            if len(payload) <= MAX_PAYLOAD:
                self._own_bytes[HEAD_NBYTES : HEAD_NBYTES + len(payload)] = payload
            return HandshakeResult(True, None, FOLLOWUP) if needs_followup else _EQUAL
        if digest is None:
            digest = digest_call(call)
        if writes := state.pending_writes:
            writes, digest = self._take_pending_writes(digest)
        flags = FAILED * (failure is not None) | FOLLOWUP * needs_followup | ALARM * (alarm != "")
        if state.board_seconds != self.call_seconds:
            self._set_call_seconds(self.call_seconds)
        session.board.enter(session.calls + 1, call)
        try:
            result = self._exchange(digest, payload, flags | VERSION_BIT)
            if result is _EQUAL:
                return result
            if not result.is_same_call or result.flags & (ERRORS | VERSION_BITS) != VERSION_BIT:
                self._raise_explained(
                    call, failure, result, writes=writes, report=report, alarm=alarm
                )
            return result
        finally:
            session.board.leave()

    def compare_payloads(
        self,
        call: str,
        payload: bytes,
        failure: BaseException | None = None,
        *,
        needs_followup: bool = False,
    ) -> Sequence[bytes] | None:
        """Make a handshake; return every rank's payload, of any size, or None if all are equal.

        If some rank `needs_followup`, ``state.needs_comparison`` is true afterwards on all ranks.

        Collective. Cost: the handshake, and two gathers where payloads differ and were not sent.

        Args:
          call: As `handshake` takes it.
          payload: The bytes of this rank.
          failure: As `handshake` takes it.
          needs_followup: As `handshake` takes it.
        """
        result = self.handshake(call, payload, failure=failure, needs_followup=needs_followup)
        if result is _EQUAL:
            return None
        if result.flags & FOLLOWUP:
            self.state.needs_comparison = True
        if result.are_equal:
            return None
        payloads = result.payloads
        if payloads is not None:
            return payloads
        with aborting(self, call):
            if self.uses_frames or result.size_limit is None:
                texts = self.gather_texts(payload)
                return None if texts.count(payload) == len(texts) else texts
            own_row = np.zeros(1 + result.size_limit, np.uint8)
            own_row[: 1 + len(payload)] = np.frombuffer(bytes([len(payload)]) + payload, np.uint8)
            rows = np.empty((self.comm.size, own_row.size), np.uint8)
            self.comm.allgather(own_row, rows)
        return PayloadRows(rows)

    def gather_payloads(
        self, call: str, payload: bytes, failure: BaseException | None = None
    ) -> list[bytes]:
        """Make a handshake, and return every rank's payload, of any size, in rank order.

        Collective. Cost: as that of `compare_payloads`.
        """
        payloads = self.compare_payloads(call, payload, failure)
        return [payload] * self.comm.size if payloads is None else [*payloads]

    def gather_rows(
        self, call: str, row_bytes: bytes, digest: bytes | None = None, alarm: str = ""
    ) -> Array:
        """Make a handshake, and return every rank's row: uint8 of shape (ranks, bytes of a row).

        Collective. Cost: the handshake, and an all-gather where rows do not fit.

        Args:
          call: As `handshake` takes it.
          row_bytes: The bytes of this rank; as many on every rank. Rows that fit are not copied and
            change with the next handshake.
          digest: As `handshake` takes it.
          alarm: As `handshake` takes it.
        """
        result = self.handshake(call, row_bytes, digest=digest, alarm=alarm)
        if self.uses_frames and len(row_bytes) <= MAX_PAYLOAD:
            return self._frames_received[:, HEAD_NBYTES : HEAD_NBYTES + len(row_bytes)]
        own_row = np.frombuffer(row_bytes, np.uint8)
        if result.are_equal:
            return np.broadcast_to(own_row, (self.comm.size, len(row_bytes)))
        with aborting(self, call):
            rows = np.empty((self.comm.size, len(row_bytes)), np.uint8)
            self.comm.allgather(own_row, rows)
        return rows

    def _raise_explained(
        self,
        call: str,
        failure: BaseException | None,
        handshake_result: HandshakeResult,
        *,
        writes: PendingWrites,
        report: bytes,
        alarm: str,
    ) -> None:
        """Raise on every rank the error that a handshake has shown, or print its alarm."""
        if handshake_result.flags & VERSION_BITS != VERSION_BIT:
            self.raise_on_all_ranks(
                mismatch.explain_versions(self, handshake_result.flags & VERSION_BITS)
            )
        if handshake_result.is_same_call and not handshake_result.flags & (LEAVING | FAILED):
            self._report_alarm(call, alarm)
            return
        try:
            if writes:
                call = f"{call}, after {'; '.join(write.text() for write in writes)}"
            if handshake_result.flags & LEAVING:
                self.state.closing_error = shutdown.explain_departure(self, call, writes)
                self.raise_on_all_ranks(self.state.closing_error if failure is None else failure)
            shutdown.undo_unlike_writes(writes, shutdown.count_alike_writes(self, writes))
            if handshake_result.flags & FAILED:
                self.raise_on_all_ranks(mismatch.explain_failure(self, call, failure, report))
            self.raise_on_all_ranks(mismatch.explain_mismatch(self, call))
        except BaseException as error:
            if failure is not None and error is not failure:
                error.__context__ = failure  # so that the first failure is shown
            abort(self, call, error)

    def _report_alarm(self, call: str, alarm: str) -> None:
        with aborting(self, call):
            text, first = mismatch.gather_alarms(self, alarm)
        if self.options.nan == "raise":
            self.raise_on_all_ranks(NonFiniteError(text))
        if self.session.comm.rank == first:
            say(f"mpistrat: {text}")

    def leave_program(
        self, code: int, failure: BaseException | None = None, of_group: bool = False
    ) -> shutdown.Agreement:
        """Take part in the last handshake, and agree with the others on the exit code.

        Collective; the others may be in any call. No call is possible afterwards.

        Args:
          code: The exit code that this rank would leave with.
          failure: The exception that it leaves with, if any.
          of_group: Ranks of another session, such as a trial, have agreed on the code.
        """
        if self.session.await_borrowers is not None:
            self.session.await_borrowers()
        self._set_call_seconds(None)
        message = shutdown.describe_departure(self.state, code, failure, of_group)
        self.session.board.enter(self.session.calls + 1, shutdown.LEAVE)
        try:
            self._exchange(digest_call(shutdown.LEAVE), b"", LEAVING | VERSION_BIT)
            agreement = shutdown.agree_on_exit(self, message)
        finally:
            self.session.board.leave()
        self.state.closing_error = LockstepError("this rank has left the program.")
        self.state.exit_code = agreement.code
        return agreement

    @contextmanager
    def limiting_seconds(self, seconds: float) -> Iterator[None]:
        """Let each call of the body take so many seconds, instead of the time of other calls."""
        previous_seconds, self.call_seconds = self.call_seconds, seconds
        try:
            yield
        finally:
            self.call_seconds = previous_seconds

    def _set_call_seconds(self, seconds: float | None) -> None:
        # It lasts until the next handshake: data that move after this one belong to the same call.
        self.session.board.allow(seconds)
        self.state.board_seconds = seconds

    def check(self) -> None:
        """Raise the error that a collective call would raise here before it communicates."""
        self.session.check()
        if self.state.closing_error is not None or self.state.run.failure is not None:
            self._raise_closed(None)

    def defer_write(self, write: PendingWrite) -> None:
        """Check at the next handshake that all ranks make this write alike; undo it if not.

        It communicates nothing itself. At the latest the handshake that ends the run compares. A
        single rank has nobody to compare with.
        """
        if self._is_alone:
            return
        pending_writes = self.state.pending_writes
        if not pending_writes:  # else that was checked, and there was no handshake since
            self.check()
        pending_writes.append(write)

    def validating_collectively(self, name: str) -> CollectiveValidation:
        """Raise on every rank the exception that the body raises on this one.

        The body validates and converts, so that every possible failure comes before the handshake
        of the call proper. It may only make calls that raise an error of one rank on all.
        """
        return CollectiveValidation(self.fail_collectively, name)

    def fail_collectively(self, name: str, error: Exception) -> NoReturn:
        """Take part in the handshake of a call that this rank cannot make, and raise its error."""
        self.handshake(f"{name}, which failed", failure=error)
        raise error

    def _take_pending_writes(self, digest: bytes) -> tuple[PendingWrites, bytes]:
        """Return the writes that a handshake compares, and its digest with theirs included."""
        writes, self.state.pending_writes = self.state.pending_writes, []
        if writes:
            digest = xxhash.xxh3_128_digest(digest + shutdown.join_digests(writes))
        return writes, digest

    def _raise_closed(self, failure: BaseException | None) -> None:
        """Raise an error if no further call is possible, or if all ranks have raised `failure`."""
        session, state = self.session, self.state
        if failure is not None and failure is state.common_error:
            raise failure  # every rank has raised already
        if state.closing_error is not None:
            raise LockstepError(
                f"rank {session.comm.rank}: ranks have left the program, so no further call "
                f"is possible. {state.closing_error}"
            ) from failure
        run = state.run
        if run.failure is not None and run.depth:
            reason = text_of(run.failure)
            raise ContextError(
                f"rank {session.comm.rank}: this run has failed ({reason}); no call is possible "
                "until it has ended. Let the exception propagate out of fn."
            ) from (run.failure if failure is None else failure)

    def raise_on_all_ranks(self, error: BaseException) -> NoReturn:
        """Raise `error`, which every rank raises here, and close the runs that this rank is in."""
        self.state.common_error = error
        if self.state.run.depth:
            self.state.run.failure = error
        raise error

    def _exchange(self, digest: bytes, payload: bytes, flags: int) -> HandshakeResult:
        # Not before: a call that a handler of a signal has prevented does not count.
        self.session.calls = number = self.session.calls + 1
        if not self.uses_frames:
            return self._exchange_words(digest, payload, flags)
        if len(payload) > MAX_PAYLOAD:
            flags, payload = flags | LARGE, b""
        own_frame = pack_frame(digest, number, flags, len(payload), payload)
        self._own_bytes[:] = own_frame
        if not self._is_alone:
            try:
                self._raw_comm.allgather(self._own_frame, self._frames_received)
            except BaseException as error:
                received = self._frames_received[self.comm.rank]
                self._keep_exception(error, np.array_equal(received, self._own_frame))
        frames = self._frames_received.tobytes()
        if flags == VERSION_BIT:
            if frames == own_frame * self.comm.size:
                return _EQUAL
            heads = [frames[start : start + HEAD_NBYTES] for start in self._frame_starts]
            if heads.count(own_frame[:HEAD_NBYTES]) == len(heads):
                return HandshakeResult(False, frames)
        return frame.read_frames(frames, self.comm.rank)

    def _exchange_words(self, digest: bytes, payload: bytes, flags: int) -> HandshakeResult:
        own_words = frame.pack_words(digest, self.session.calls, payload, flags)
        words = np.zeros_like(own_words)
        try:
            self._raw_comm.allreduce(own_words, words, "BOR")
        except BaseException as error:
            self._keep_exception(error, np.array_equal(words & own_words, own_words))
        return frame.read_words(words)

    def _keep_exception(self, error: BaseException, is_exchanged: bool) -> None:
        if self.session.comm.is_interruptible or not self.state.kept_interrupt.try_keep(
            error, is_exchanged
        ):
            self.session.calls -= 1  # this call was not made
            raise error
