"""``send`` and ``recv``: messages on a communicator of their own, beside the collectives.

`PointToPoint` sends the messages of one group. A `MessageWork` is one message, for which a program
waits; a helper thread makes progress on messages for which nobody waits.
"""

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
from mpistrat.torch.process_group.work import BaseWork, CallTimeoutError, convert_timeout
from mpistrat.torch.views import (
    copy_back,
    describe_tensor,
    detach_cpu_tensors,
    make_contiguous,
    view_bytes,
)
from mpistrat.watchdog.exchange import has_thread_multiple
from mpistrat.watchdog.status_board import say

__all__ = ["MessageWork", "PointToPoint"]

_LOOK_SECONDS = 2e-3  # seconds for which a wait tests without a pause
_NAP_SECONDS, _POLL_SECONDS = 5e-5, 1e-3
_LINGER_SECONDS = 1.0


class MessageWork(BaseWork):
    """One message to or from another rank.

    Args:
      messages: The messages of its group.
      call_text: The call in words.
      tensor: The tensor that is sent or filled.
      buffer: The tensor, or a copy of it, in C order.
      post: The transfer.
      is_receive: Whether this rank receives.
    """

    def __init__(
        self,
        messages: PointToPoint,
        call_text: str,
        tensor: torch.Tensor,
        buffer: torch.Tensor,
        post: PendingMessage,
        *,
        is_receive: bool,
    ):
        """Start as a pending message."""
        super().__init__([tensor])
        self._messages, self._call_text, self._call_site = messages, call_text, find_call_site()
        self._tensor, self._buffer, self._post = tensor, buffer, post
        self._is_receive = is_receive
        self._state_lock = threading.Lock()
        self._is_over = False

    def is_completed(self) -> bool:
        """Return whether the transfer has ended, so that the memory may be used again."""
        with self._state_lock:
            if self._is_over:
                return True
            try:
                if not self._post.test():
                    return False
                self._copy_received()
            except Exception as error:
                self.failure_notice.error = error
            self._is_over = True
        self._messages.discard_work(self)
        self.complete_future()
        return True

    def _copy_received(self) -> None:
        if not self._is_receive:
            return
        expected_spec, sent_spec, ranks = (
            describe_tensor(self._buffer),
            self._post.description,
            self._messages.ranks,
        )
        assert self._post.peer is not None  # it has come
        dtype, nbytes = expected_spec.partition("[")[0], view_bytes(self._buffer).size
        if self._post.nbytes != nbytes or sent_spec.partition("[")[0] != dtype:
            raise ValueError(
                f"rank {self._messages.rank}{self._messages.group_text}: {self._call_text} in "
                f"{self._call_site} wants {expected_spec}, {nbytes} bytes, and rank "
                f"{ranks[self._post.peer]} has sent {sent_spec}, {self._post.nbytes} bytes. Give a "
                "tensor of the dtype that was sent, with as many elements."
            )
        copy_back([self._tensor], [self._buffer])

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until a received tensor has arrived, or the memory of a sent one is free again.

        Args:
          timeout: How long; 0 for the timeout of its group.

        Raises:
          CallTimeoutError: The other rank, which the error names, did not come in time.
          ValueError: The message has another size or dtype.
          KeyboardInterrupt: Ctrl-C came meanwhile. The message may still arrive.
        """
        is_main_thread = threading.current_thread() is threading.main_thread()
        kept_interrupt = exits().kept_interrupt
        allowed_seconds = convert_timeout(timeout) or self._messages.seconds
        start = time.monotonic()
        warn_at = start + self._messages.warn_seconds
        while not self.is_completed():
            current_time = time.monotonic()
            if current_time - start > allowed_seconds:
                self._time_out(allowed_seconds)
            if is_main_thread and kept_interrupt.is_pending:  # it breaks no agreement between ranks
                kept_interrupt.raise_pending()
            if current_time > warn_at:
                say(f"mpistrat: {self._describe_wait(current_time - start)}.")
                warn_at = float("inf")
            if current_time - start < _LOOK_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_NAP_SECONDS)
        self.raise_failure()
        return True

    def _describe_wait(self, seconds: float) -> str:
        peer = self._post.peer
        other_text = "any rank" if peer is None else f"rank {self._messages.ranks[peer]}"
        verb = "send" if self._is_receive else "receive"
        return (
            f"rank {self._messages.rank}{self._messages.group_text} has waited {seconds:.3g} s in "
            f"{self._call_site}, {self._call_text}, for {other_text} to {verb}"
        )

    def _time_out(self, seconds: float) -> None:
        text = f"{self._describe_wait(seconds)}; that is the timeout."
        with self._state_lock:
            if self._is_over:
                return
            if self._is_receive:
                self._post.cancel()
            self.failure_notice.error = CallTimeoutError(text)
            self._is_over = True
        self._messages.discard_work(self)
        self.complete_future()

    def _source_rank(self) -> int:
        """Return the rank, in the group, of the sender; -1 before a message from any rank."""
        peer = self._post.peer
        return -1 if peer is None else peer


@final
class PointToPoint:
    """The messages of one group.

    Args:
      posts: Makes the transfers.
      name: What messages call the group; empty for the group of all ranks.
      seconds: How long a wait without a timeout of its own may take.
      warn_seconds: Seconds after which a wait prints for which rank it waits.

    Attributes:
      ranks: The ranks of the group as messages name them.
    """

    def __init__(self, posts: MessageChannel, name: str, seconds: float, warn_seconds: float):
        """Begin without messages."""
        self._posts, self.seconds, self.warn_seconds = posts, seconds, warn_seconds
        self.ranks: Sequence[int] = range(posts.comm.size)
        self.group_text = f" of {name}" if name else ""
        self._pending_works: set[MessageWork] = set()
        self._condition = threading.Condition()
        self._has_helper = not has_thread_multiple()
        self._end_reason = ""

    @property
    def rank(self) -> int:
        """This rank, as messages name it."""
        return self.ranks[self._posts.comm.rank]

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> MessageWork:
        """Begin to send a tensor."""
        self._check_peer(destination)
        (tensor,) = detach_cpu_tensors([tensor])
        (buffer,) = make_contiguous([tensor])
        post = self._posts.send(view_bytes(buffer), destination, tag, describe_tensor(tensor))
        call_text = f"send({describe_tensor(tensor)}, dst={self.ranks[destination]}, tag={tag})"
        return self._track_work(
            MessageWork(self, call_text, tensor, buffer, post, is_receive=False)
        )

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> MessageWork:
        """Begin to receive a tensor; from any rank if `source` is None."""
        self._check_peer(source)
        (tensor,) = detach_cpu_tensors([tensor])
        (buffer,) = make_contiguous([tensor], needs_contents=False)
        post = self._posts.receive(view_bytes(buffer), source, tag)
        source_text = None if source is None else self.ranks[source]
        call_text = f"recv({describe_tensor(tensor)}, src={source_text}, tag={tag})"
        return self._track_work(MessageWork(self, call_text, tensor, buffer, post, is_receive=True))

    def _check_peer(self, peer: int | None) -> None:
        if self._end_reason:
            raise dist.DistError(f"rank {self.rank}{self.group_text}: {self._end_reason}")
        size = self._posts.comm.size
        if peer is not None and not 0 <= peer < size:
            raise ValueError(
                f"rank {self.rank}{self.group_text}: there is no rank {peer}; ranks are 0 to "
                f"{size - 1}."
            )

    def _track_work(self, work: MessageWork) -> MessageWork:
        # The helper moves messages for which nobody waits; they keep their memory until then.
        if work.is_completed():
            return work
        with self._condition:
            self._pending_works.add(work)
            needs_helper, self._has_helper = not self._has_helper, True
            self._condition.notify_all()
        if needs_helper:
            threading.Thread(
                target=_run_helper, args=(weakref.ref(self),), name="mpistrat messages", daemon=True
            ).start()
        return work

    def discard_work(self, work: MessageWork) -> None:
        """Remove a message that has ended from the pending ones."""
        with self._condition:
            self._pending_works.discard(work)

    def make_progress(self) -> bool:
        """Make progress on all pending messages; return False after a while without any."""
        with self._condition:
            if not self._pending_works and not self._condition.wait_for(
                lambda: self._pending_works, _LINGER_SECONDS
            ):
                self._has_helper = False
                return False
            pending_works = list(self._pending_works)
        for work in pending_works:
            work.is_completed()
        return True

    def drain(self, seconds: float) -> bool:
        """Wait until no message is pending, at most some seconds; return whether none is."""
        end_time = time.monotonic() + seconds
        while True:
            with self._condition:
                pending_works = list(self._pending_works)
            if all([work.is_completed() for work in pending_works]):
                return True
            if time.monotonic() > end_time:
                return False
            time.sleep(_POLL_SECONDS)

    def close(self, reason: str) -> None:
        """Let all later messages raise an error with this reason."""
        self._end_reason = reason

    def free(self) -> None:
        """Free the communicator."""
        self.close("destroy_process_group has ended it.")
        self._posts.free()


def _run_helper(get_messages: Callable[[], PointToPoint | None]) -> None:
    block_signals()
    while (messages := get_messages()) is not None and messages.make_progress():
        del messages
        time.sleep(_POLL_SECONDS)
