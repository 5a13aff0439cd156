"""The handshake: before any payload moves it shows that all ranks make the same call.

Whatever a rank calls, the first thing it does is one exchange of one MPI signature, so the
handshake cannot hang itself: an all-gather of frames of 256 bytes, or above `FRAME_RANKS` ranks an
all-reduce of seven words. Which of the two depends on the number of ranks alone.

`mpistrat.lockstep.frame` has the bytes.

A rank that failed before its call still takes part, with FAILED set. Then, and only then, texts
move, and every rank raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn, TypeAlias, final

import numpy as np
import xxhash

from mpistrat.arrays import Array
from mpistrat.board.reporter import say
from mpistrat.comm.session import Session
from mpistrat.errors import ContextError, LockstepError, NonFiniteError, text_of
from mpistrat.lockstep import frame, mismatch, shutdown
from mpistrat.lockstep.abort import abort, aborting, broken, told_of
from mpistrat.lockstep.frame import (
    ALARM,
    FAILED,
    FRAME,
    FRAME_RANKS,
    HEAD,
    LEAVING,
    MORE,
    ROOM,
    pack,
)
from mpistrat.lockstep.ranks import Preparing, Ranks, Unproved, Writes

Validator: TypeAlias = "Callable[[list[bytes] | None], BaseException | None]"


class Proof(NamedTuple):
    """What came with a handshake; of the same kind on every rank.

    Attributes:
      smalls: The payload of every rank, in rank order; None if some rank's was not sent with it.
      more: Some rank said that it has more to give than what rode.
    """

    smalls: list[bytes] | None
    more: bool


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
      frames_received: The frames of the last handshake: uint8 of shape (number of ranks, `FRAME`).
    """

    def __init__(
        self, session: Session, frame_ranks: int = FRAME_RANKS, order: Sequence[int] | None = None
    ):
        """Prove calls of `session`."""
        super().__init__(session, order)
        self.state.broken = broken
        self.seconds: float | None = None
        self.frames = self.comm.size <= frame_ranks
        self._send = np.zeros(FRAME, np.uint8)
        # Of one rank what it sends is what it gets.
        self._several = self.comm.size > 1
        rows, alone = (self.comm.size, FRAME), self._send.reshape(1, FRAME)
        self.frames_received = np.zeros(rows, np.uint8) if self._several else alone
        self._frame, self._got, self._alike = self._send.data, b"", True
        self._most: int | None = None  # above `FRAME_RANKS` ranks: bytes of the longest payload
        self._starts = range(0, self.frames_received.nbytes, FRAME)

    @property
    def received(self) -> Array:
        """The payloads of the last handshake: uint8 of shape (number of ranks, `ROOM`)."""
        return self.frames_received[:, HEAD:]

    def fits(self, nbytes: int) -> bool:
        """Tell whether payloads of that size are sent with the handshake."""
        return self.frames and nbytes <= ROOM

    def prove(
        self,
        call: str,
        small: bytes = b"",
        failure: BaseException | None = None,
        more: bool = False,
        alarm: str = "",
        validate: Validator | None = None,
    ) -> Proof:
        """Prove that all ranks make this call, or raise on all of them.

        Collective. Cost: one all-gather of 256 bytes per rank.

        Args:
          call: Text of the call: name, operation, axis, structure, shapes, dtypes. Equal on all
            ranks exactly if the calls are the same.
          small: Payload that may differ between ranks.
          failure: What this rank failed with before it could make the call, if it did.
          more: This rank has more to give than `small`; every rank is told.
          alarm: What is wrong with the numbers that this rank is about to give, if anything is.
          validate: Looks at the payloads, as `Proof` has them, alike on all ranks; what it returns
            is raised.

        Returns:
          The payload of every rank. It could not be sent with it if some rank's was larger than
          `ROOM`, or if there are more than `FRAME_RANKS` ranks and payloads differ.

        Raises:
          BaseException: `failure`, on the rank that gave it.
          RemoteError: Another rank failed.
          LockstepError: No rank failed, but the calls differ.
          NonFiniteError: Some rank has an alarm, and the options say that it is an error.
          ContextError: This run has failed already.
        """
        told = told_of(self, call, failure)
        self._check(failure)
        writes, digest = self._with_writes(digest_of(call))
        flags = FAILED * (failure is not None) | MORE * more | ALARM * bool(alarm)
        if self.state.allowed != self.seconds:
            self._allow(self.seconds)
        self.session.board.enter(self.session.calls + 1, call)
        try:
            union, same, smalls = self._exchange(digest, small, flags)
            if not same or union & (LEAVING | FAILED):
                self._explain(call, failure, union, writes, told)
            wrong = None if validate is None else validate(smalls)
            if wrong is not None:
                self.fail(wrong)
            if union & ALARM:
                self._sound(call, alarm)
            return Proof(smalls, bool(union & MORE))
        finally:
            self.session.board.leave()

    def ride(
        self, call: str, digest: bytes, payload: bytes
    ) -> tuple[int, list[bytes] | None] | None:
        """Prove a call that was checked before, and have every rank's payload in `received`.

        Collective. It is `prove` for what is called most, and does nothing twice that the first
        time has done: of the calls that it meets, and raises, it is the same.

        Args:
          call: As `prove` takes it.
          digest: `digest_of` it.
          payload: As long on all ranks as `call` says; up to `ROOM` bytes.

        Returns:
          None, if all frames begin alike, so that `received` has the payloads; else the flags of
          all ranks, of which none is an error, and the payloads as in `Proof`.
        """
        session, state = self.session, self.state
        session.check()
        if state.gone is not None or state.run.failed is not None:
            self._check(None)
        number = session.calls + 1
        if writes := state.unproved:
            writes, digest = self._with_writes(digest)
        board = session.board
        if state.allowed != self.seconds:
            self._allow(self.seconds)
        board.enter(number, call)
        try:
            if not self._several:
                session.calls = number
                self._frame[HEAD : HEAD + len(payload)] = payload
                return None
            head = pack(digest, number, 0, len(payload))
            mine, end = head + payload, HEAD + len(payload)
            self._frame[:end] = mine
            session.calls = number
            self._gather()
            self._got, self._alike = self.frames_received.tobytes(), True
            got = self._got
            for at in self._starts:
                if got[at : at + end] == mine:
                    continue
                self._alike = False
                if got[at : at + HEAD] != head:
                    union, same, smalls = frame.read(got, head, payload, 0)
                    if not same or union & (LEAVING | FAILED):
                        self._explain(call, None, union, writes, b"")
                    if union & ALARM:
                        self._sound(call, "")
                    return union, smalls
            return None
        finally:
            board.leave()

    def _sound(self, call: str, alarm: str) -> None:
        with aborting(self, call):
            text, first = mismatch.alarms(self, alarm)
        if self.options.nan == "raise":
            self.fail(NonFiniteError(text))
        if self.comm.rank == first:
            say(f"mpistrat: {text}")

    def _explain(
        self, call: str, failure: BaseException | None, union: int, writes: Writes, told: bytes
    ) -> NoReturn:
        try:
            if writes:
                call = f"{call}, after {'; '.join(write.text() for write in writes)}"
            if union & LEAVING:
                self.state.gone = shutdown.left(self, call, writes)
                self.fail(self.state.gone if failure is None else failure)
            shutdown.keep_alike(writes, self.texts(shutdown.digests(writes)))
            if union & FAILED:
                self.fail(mismatch.remote(self, call, failure, told))
            self.fail(mismatch.mismatch(self, call))
        except BaseException as error:
            if failure is not None and error is not failure:
                error.__context__ = failure  # so that it is told what failed first
            abort(self, call, error)

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
        if self.session.awaited is not None:
            self.session.awaited()
        self._allow(None)
        mine = shutdown.row(self.state, code, failure, of_group)
        self.session.board.enter(self.session.calls + 1, shutdown.LEAVE)
        try:
            self._exchange(digest_of(shutdown.LEAVE), b"", LEAVING)
            told = shutdown.farewell(self, mine)
        finally:
            self.session.board.leave()
        self.state.gone = LockstepError("this rank has left the program.")
        self.state.exit_code = told.code
        return told

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Let each call of the body take so many seconds, instead of what others may take."""
        before, self.seconds = self.seconds, seconds
        try:
            yield
        finally:
            self.seconds = before

    def _allow(self, seconds: float | None) -> None:
        # It lasts until the next handshake: what moves after this one is part of the same call.
        self.session.board.allow(seconds)
        self.state.allowed = seconds

    def check(self) -> None:
        """Raise what a collective call would raise here before it communicates."""
        self.session.check()
        if self.state.gone is not None or self.state.run.failed is not None:
            self._check(None)

    def defer(self, write: Unproved) -> None:
        """Check at the next handshake that all ranks make this write alike; undo it if not.

        No communication of its own. At the latest it is the handshake that ends the run.
        """
        unproved = self.state.unproved
        if not unproved:  # else that was checked, and there was no handshake since
            self.check()
        unproved.append(write)

    def share(
        self, call: str, small: bytes, failure: BaseException | None = None, alarm: str = ""
    ) -> list[bytes]:
        """Prove the call and return every rank's `small`, sent with the handshake if it fits."""
        told = self.compare(call, small, failure, alarm)
        return [small] * self.comm.size if told is None else told

    def compare(
        self, call: str, small: bytes, failure: BaseException | None = None, alarm: str = ""
    ) -> list[bytes] | None:
        """Do what `share` does; return None if every rank's is the same, as it mostly is."""
        if failure is not None or alarm or not self.frames or len(small) > ROOM:
            smalls = self.prove(call, small, failure, alarm=alarm).smalls
        elif not self._several:
            self.check()
            self.session.calls += 1
            self._frame[HEAD : HEAD + len(small)] = small
            return None
        else:
            odd = self.ride(call, digest_of(call), small)
            if odd is None and self._alike:
                return None
            if odd is None:
                got, end = self._got, HEAD + len(small)
                return [got[at + HEAD : at + end] for at in self._starts]
            smalls = odd[1]
        with aborting(self, call):
            told = self._payloads(small) if smalls is None else smalls
        return None if told.count(small) == len(told) else told

    def _payloads(self, small: bytes) -> list[bytes]:
        """Return every rank's payload, which the handshake did not have. Collective."""
        if self._most is None:
            return self.texts(small)
        send = np.zeros(self._most + 1, np.uint8)
        send[: len(small) + 1] = np.frombuffer(bytes([len(small)]) + small, np.uint8)
        rows = np.empty((self.comm.size, send.size), np.uint8)
        self.comm.allgather(send, rows)
        got = rows.tobytes()
        return [got[at + 1 : at + 1 + got[at]] for at in range(0, len(got), send.size)]

    def preparing(self, name: str) -> Preparing:
        """Raise on every rank what the body raises on this one.

        The body validates and converts, so that whatever can fail has failed before the handshake
        of the call proper. It may make only such calls as raise on all ranks what fails on one.
        """
        return Preparing(self.refuse, name)

    def refuse(self, name: str, error: Exception) -> NoReturn:
        """Take part in the handshake of a call that this rank could not make, and raise why."""
        self.prove(f"{name}, which failed", failure=error)
        raise error

    def _with_writes(self, digest: bytes) -> tuple[Writes, bytes]:
        """Return the writes that a handshake is to show to be alike, and its digest with theirs."""
        writes, self.state.unproved = self.state.unproved, []
        if writes:
            digest = xxhash.xxh3_128_digest(digest + shutdown.digests(writes))
        return writes, digest

    def _check(self, failure: BaseException | None) -> None:
        session, state = self.session, self.state
        session.check()
        if failure is None and state.gone is None and state.run.failed is None:
            return
        if failure is not None and failure is state.raised:
            raise failure  # every rank has raised already
        if state.gone is not None:
            raise LockstepError(
                f"rank {session.comm.rank}: ranks have left the program, so no further call "
                f"is possible. {state.gone}"
            ) from failure
        run = state.run
        if run.failed is not None and run.depth:
            why = text_of(run.failed)
            raise ContextError(
                f"rank {session.comm.rank}: this run has failed ({why}); no call is possible "
                "until it has ended. Let the exception propagate out of fn."
            ) from (run.failed if failure is None else failure)

    def fail(self, error: BaseException) -> NoReturn:
        """Raise `error`, which every rank raises here, and close the runs that this rank is in."""
        self.state.raised = error
        if self.state.run.depth:
            self.state.run.failed = error
        raise error

    def _exchange(self, digest: bytes, small: bytes, flags: int) -> frame.Heard:
        # Not before: a call that a handler of a signal has kept from being made does not count.
        self.session.calls = number = self.session.calls + 1
        if not self.frames:
            mine = frame.words(digest, number, small, flags)
            union = np.zeros_like(mine)
            try:
                self._raw.allreduce(mine, union, "BOR")
            except BaseException as error:
                self._keep(error, np.array_equal(union & mine, mine))
            sizes = int(union[6])
            self._most = None if sizes & frame.LARGE else sizes >> frame.SIZES
            return frame.read_words(union, small, self.comm.size)
        if len(small) > ROOM:
            flags, small = flags | frame.LARGE, b""
        head = pack(digest, number, flags, len(small))
        self._frame[: HEAD + len(small)] = head + small
        if self._several:
            self._gather()
        return frame.read(self.frames_received.tobytes(), head, small, flags)

    def _gather(self) -> None:
        try:
            self._raw.allgather(self._send, self.frames_received)
        except BaseException as error:
            self._keep(error, np.array_equal(self.frames_received[self.comm.rank], self._send))

    def _keep(self, error: BaseException, exchanged: bool) -> None:
        if self.session.comm.gives_up or not self.state.interrupted.keeps(error, exchanged):
            self.session.calls -= 1  # this call was not made
            raise error
