"""``send`` and ``recv``: messages on a communicator of their own, never behind a collective."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from mpistrat.comm.callsite import find_call_site
from mpistrat.comm.point_to_point import MessageChannel, PendingMessage
from mpistrat.kernels.threads import block_signals
from mpistrat.lockstep.exits import exits
from mpistrat.torch.process_group.work import AnyWork, TimedOut, seconds_of
from mpistrat.torch.views import bytes_of, checked, rooms, settle, spec
from mpistrat.watchdog.exchange import threads_allowed
from mpistrat.watchdog.status_board import say

__all__ = ["PointToPoint", "PostWork"]

_LOOK = 2e-3  # seconds that a wait looks without a pause
_NAP, _SLOW = 5e-5, 1e-3
_LINGER = 1.0


class PostWork(AnyWork):
    """One message.

    Args:
      messages: Whose it is.
      what: The call in words.
      tensor: What is sent, or filled.
      room: The same in C order; the tensor itself, or one that stands for it.
      post: The message.
      receives: It is one that comes in.
    """

    def __init__(
        self,
        messages: PointToPoint,
        call_text: str,
        tensor: torch.Tensor,
        room: torch.Tensor,
        post: PendingMessage,
        receives: bool,
    ):
        """Start as a pending message."""
        super().__init__([tensor])
        self._messages, self._call_text, self._place = messages, call_text, find_call_site()
        self._tensor, self._room, self._post = tensor, room, post
        self._receives = receives
        self._turn = threading.Lock()
        self._is_over = False

    def is_completed(self) -> bool:
        """Look whether it has arrived; of what is sent, whether its memory may be used again."""
        with self._turn:
            if self._is_over:
                return True
            try:
                if not self._post.test():
                    return False
                self._settle()
            except Exception as error:
                self.failure_notice.error = error
            self._is_over = True
        self._messages.done(self)
        self.complete_future()
        return True

    def _settle(self) -> None:
        if not self._receives:
            return
        expected_spec, sent, ranks = spec(self._room), self._post.description, self._messages.ranks
        assert self._post.peer is not None  # it has come
        dtype, size = expected_spec.partition("[")[0], bytes_of(self._room).size
        if self._post.nbytes != size or sent.partition("[")[0] != dtype:
            raise ValueError(
                f"rank {self._messages.rank}{self._messages.group}: {self._call_text} in "
                f"{self._place} wants {expected_spec}, {size} bytes, and rank "
                f"{ranks[self._post.peer]} has sent {sent}, {self._post.nbytes} bytes. Give a "
                "tensor of the dtype that was sent, with as many elements."
            )
        settle([self._tensor], [self._room])

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until a received tensor has arrived, or the memory of a sent one is free again.

        Args:
          timeout: How long; 0 for the timeout of its group.

        Raises:
          TimedOut: The other rank did not come in time; names it.
          ValueError: The message has another size or dtype.
          KeyboardInterrupt: Ctrl-C came meanwhile. The message may still arrive.
        """
        main = threading.current_thread() is threading.main_thread()
        interrupted = exits().interrupted
        allowed = seconds_of(timeout) or self._messages.seconds
        start = time.monotonic()
        warn = start + self._messages.warn
        while not self.is_completed():
            current_time = time.monotonic()
            if current_time - start > allowed:
                self._time_out(allowed)
            if main and interrupted.pending:  # nothing is agreed on that it could break
                interrupted.check()
            if current_time > warn:
                say(f"mpistrat: {self._waits(current_time - start)}.")
                warn = float("inf")
            if current_time - start < _LOOK:
                os.sched_yield()
            else:
                time.sleep(_NAP)
        self.check()
        return True

    def _waits(self, seconds: float) -> str:
        peer = self._post.peer
        other = "any rank" if peer is None else f"rank {self._messages.ranks[peer]}"
        verb = "send" if self._receives else "receive"
        return (
            f"rank {self._messages.rank}{self._messages.group} has waited {seconds:.3g} s in "
            f"{self._place}, {self._call_text}, for {other} to {verb}"
        )

    def _time_out(self, seconds: float) -> None:
        text = f"{self._waits(seconds)}; that is the timeout."
        with self._turn:
            if self._is_over:
                return
            if self._receives:
                self._post.cancel()
            self.failure_notice.error = TimedOut(text)
            self._is_over = True
        self._messages.done(self)
        self.complete_future()

    def _source_rank(self) -> int:
        """Return the rank, in the group, whose message it was."""
        peer = self._post.peer
        return -1 if peer is None else peer


@final
class PointToPoint:
    """The messages of one group.

    Args:
      posts: Moves them.
      name: What messages call the group; empty for the group of all ranks.
      seconds: How long a wait may take that says nothing of it.
      warn: Seconds after which it is said who is waited for.

    Attributes:
      ranks: The ranks of the group as messages name them.
    """

    def __init__(self, posts: MessageChannel, name: str, seconds: float, warn: float):
        """Send nothing yet."""
        self._posts, self.seconds, self.warn = posts, seconds, warn
        self.ranks: Sequence[int] = range(posts.comm.size)
        self.group = f" of {name}" if name else ""
        self._open: set[PostWork] = set()
        self._condition = threading.Condition()
        self._helper = not threads_allowed()
        self._end_reason = ""

    @property
    def rank(self) -> int:
        """This rank, as messages name it."""
        return self.ranks[self._posts.comm.rank]

    def send(self, tensor: torch.Tensor, dest: int, tag: int) -> PostWork:
        """Begin to send a tensor."""
        self._check_peer(dest)
        (tensor,) = checked([tensor])
        (room,) = rooms([tensor])
        post = self._posts.send(bytes_of(room), dest, tag, spec(tensor))
        call_text = f"send({spec(tensor)}, dst={self.ranks[dest]}, tag={tag})"
        return self._track_work(PostWork(self, call_text, tensor, room, post, receives=False))

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> PostWork:
        """Begin to receive a tensor; from any rank if `source` is None."""
        self._check_peer(source)
        (tensor,) = checked([tensor])
        (room,) = rooms([tensor], read=False)
        post = self._posts.receive(bytes_of(room), source, tag)
        named = None if source is None else self.ranks[source]
        call_text = f"recv({spec(tensor)}, src={named}, tag={tag})"
        return self._track_work(PostWork(self, call_text, tensor, room, post, receives=True))

    def _check_peer(self, peer: int | None) -> None:
        if self._end_reason:
            raise dist.DistError(f"rank {self.rank}{self.group}: {self._end_reason}")
        size = self._posts.comm.size
        if peer is not None and not 0 <= peer < size:
            raise ValueError(
                f"rank {self.rank}{self.group}: there is no rank {peer}; ranks are 0 to {size - 1}."
            )

    def _track_work(self, work: PostWork) -> PostWork:
        # What nobody waits for has to move too, and keeps its memory until it has.
        if work.is_completed():
            return work
        with self._condition:
            self._open.add(work)
            begins, self._helper = not self._helper, True
            self._condition.notify_all()
        if begins:
            threading.Thread(
                target=_help, args=(weakref.ref(self),), name="mpistrat messages", daemon=True
            ).start()
        return work

    def done(self, work: PostWork) -> None:
        """Note that a message has arrived."""
        with self._condition:
            self._open.discard(work)

    def push(self) -> bool:
        """Make progress on all pending messages; return whether any is left."""
        with self._condition:
            if not self._open and not self._condition.wait_for(lambda: self._open, _LINGER):
                self._helper = False
                return False
            pending_works = list(self._open)
        for work in pending_works:
            work.is_completed()
        return True

    def drain(self, seconds: float) -> bool:
        """Wait until nothing is in transit, so many seconds at most; tell whether that is so."""
        end = time.monotonic() + seconds
        while True:
            with self._condition:
                pending_works = list(self._open)
            if all([work.is_completed() for work in pending_works]):
                return True
            if time.monotonic() > end:
                return False
            time.sleep(_SLOW)

    def lose(self, reason: str) -> None:
        """Move no more messages: those that come are errors."""
        self._end_reason = reason

    def free(self) -> None:
        """Free the communicator."""
        self.lose("destroy_process_group has ended it.")
        self._posts.free()


def _help(messages: Callable[[], PointToPoint | None]) -> None:
    block_signals()
    while (point_to_point := messages()) is not None and point_to_point.push():
        del point_to_point
        time.sleep(_SLOW)
