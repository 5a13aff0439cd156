"""Fault injection: a fault on one rank, in one part of one call.

A fault is written as ``rank=1;call=5;phase=proof;do=kill``. It is put around the communicator and
the board of one session on one rank, by shadowing their methods there, so a job without a fault has
nothing to pay for it.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.comm.base import Comm
from mpistrat.comm.mpi import MPIComm
from mpistrat.comm.session import Session
from mpistrat.errors import OptionError
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import FaultHooks

_PHASES = ("fn", "before", "proof", "payload", "after", "exit")
# The number behind the colon of an action: its maximum, and its description.
_CODE, _SECONDS = (255, "an exit code from 0 to 255"), (threading.TIMEOUT_MAX, "seconds")
_ACTIONS = dict.fromkeys(("kill", "stop", "raise", "bitflip"), (0.0, ""))
_ACTIONS |= {"exit": _CODE, "os_exit": _CODE, "sleep": _SECONDS}
_ENDING_ACTIONS = ("kill", "stop", "os_exit")  # these need a process of their own
_KEYS = ("rank", "call", "phase", "do")
_METHODS = ("allgather", "allgatherv", "allreduce", "bcast", "barrier", "gatherv", "sendrecv")
# A rank that waits in the handshake for others that are late has sent its part by then.
_SEND_SECONDS = 0.05
_HANDSHAKE = Lockstep.handshake.__code__


class InjectedError(RuntimeError):
    """The exception of ``do=raise``."""


class Fault(NamedTuple):
    """A fault as it was asked for.

    Attributes:
      rank: The rank that fails.
      phase: The part of the call: ``fn``, ``before``, ``proof``, ``payload``,
        ``after`` or ``exit``.
      call: The number of the call; for ``fn`` that of the ``run``; 0 for ``exit``.
      action: The action of the rank: ``kill``, ``stop``, ``raise``, ``bitflip``, ``exit``,
        ``os_exit`` or ``sleep``.
      amount: The exit code, or the seconds.
      text: The text that asked for it.
    """

    rank: int
    phase: str
    call: int
    action: str
    amount: float
    text: str


def parse_fault(text: str, comm: Comm | None = None) -> Fault | None:
    """Return the fault that a text describes; None for an empty string.

    Args:
      text: ``key=value`` pairs with semicolons between them: ``rank`` and ``do``, ``call``
        unless the phase is ``exit``, and ``phase`` unless it is ``before``.
      comm: The ranks that it is for, if they are known.

    Raises:
      OptionError: The text cannot be read, or such a fault cannot happen there.

    Example:
      >>> parse_fault("rank=1;call=5;do=sleep:2.5").amount
      2.5
    """
    if not text:
        return None
    require = functools.partial(_require, text)
    pairs = [pair.partition("=") for pair in text.split(";")]
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    unknown = sorted(fields.keys() - set(_KEYS))
    keys = f"; the keys are {', '.join(_KEYS)}"
    require(not unknown, f"unknown key {''.join(unknown[:1])!r}{keys}")
    require(len(fields) == len(pairs), f"a key that appears twice{keys}")
    phase = fields.get("phase", "before")
    for key in ("rank", "do") if phase == "exit" else ("rank", "do", "call"):
        require(fields.get(key), f"{key} is missing")
    for key, minimum in (("rank", 0), ("call", 1)):
        digits = fields.get(key, "1")
        is_valid = digits.isdecimal() and int(digits) >= minimum
        require(is_valid, f"{key} wants a whole number from {minimum}, not {digits!r}")
    action, colon, amount = fields["do"].partition(":")
    require(action in _ACTIONS, f"unknown do={action!r}; known: {', '.join(_ACTIONS)}")
    maximum, amount_text = _ACTIONS[action]
    number = math.nan if amount_text else 0.0
    with suppress(ValueError):
        number = float(amount if action == "sleep" else int(amount or "no"))
    require(amount_text or not colon, f"do={action} takes nothing after it")
    require(0 <= number <= maximum, f"do={action}:... wants {amount_text}, not {amount!r}")
    fault = Fault(int(fields["rank"]), phase, int(fields.get("call", 0)), action, number, text)
    _check(fault, require, comm)
    return fault


def _require(text: str, condition: object, reason: str) -> None:
    if not condition:
        like = "rank=1;call=5;phase=proof;do=kill"
        raise OptionError(f"the fault {text!r} cannot be used: {reason}. Write it like {like}")


def _check(fault: Fault, require: Callable[[object, str], None], comm: Comm | None) -> None:
    phase, action = fault.phase, fault.action
    require(phase in _PHASES, f"unknown phase={phase!r}; known: {', '.join(_PHASES)}")
    fits_exit = not fault.call and action in (*_ENDING_ACTIONS, "sleep")
    reason = "phase=exit takes no call, and only kill, stop, os_exit or sleep"
    require(phase != "exit" or fits_exit, reason)
    reason = "do=bitflip wants phase=after, when data has arrived"
    require(action != "bitflip" or phase == "after", reason)
    # The others would take this rank's next message for its part of the payload.
    reason = (
        f"between handshake and payload nothing raises; do={action} wants phase=fn, before or after"
    )
    require(action not in ("raise", "exit") or phase not in ("proof", "payload"), reason)
    if comm is not None:
        require(fault.rank < comm.size, f"there are only {comm.size} ranks")
        reason = f"do={action} would end all ranks, which are threads of one process"
        require(action not in _ENDING_ACTIONS or isinstance(comm, MPIComm), reason)


@final
class Injection:
    """A fault that waits for its call in one session.

    Attributes:
      happened: The fault has been made.
      is_failing_rank: This is the rank that fails.
      skipped_call_count: How many calls of the session do not count.
    """

    def __init__(self, session: Session, fault: Fault, skipped_call_count: int = 0):
        """Create it, and put `fault` into `session` if this rank is to fail.

        Args:
          session: The session whose calls are counted.
          fault: The fault.
          skipped_call_count: How many calls of the session do not count.
        """
        self.happened = False
        self._session, self._fault = session, fault
        self._hooks = session.get_instance(FaultHooks)
        self.skipped_call_count = skipped_call_count
        self._call, self._run_count = fault.call + skipped_call_count, 0
        self._is_leaving = False
        self._part_index = 0
        self._lock = threading.Lock()
        self._shadowed: list[tuple[object, str, Any]] = []
        self.is_failing_rank = session.comm.rank == fault.rank
        if self.is_failing_rank:
            for name in _METHODS:
                method = getattr(session.comm, name)
                self._shadow(session.comm, name, functools.partial(self._wrap_move, method))
            self._shadow(session.board, "enter", self._wrap_enter(session.board.enter))
            self._shadow(session, "check", self._wrap_check(session.check))
            self._shadow(self._hooks, "on_fn", self._on_fn)
            self._shadow(self._hooks, "on_moved", self._on_moved)
            self._shadow(self._hooks, "on_moving", self._on_moving)

    def _shadow(self, owner: object, name: str, method: Callable[..., Any]) -> None:
        self._shadowed.append((owner, name, vars(owner).get(name, self)))
        setattr(owner, name, method)

    def remove(self) -> None:
        """Remove the fault, whether it has happened or not."""
        while self._shadowed:
            owner, name, attribute = self._shadowed.pop()
            if attribute is self:  # it was a method of the class
                delattr(owner, name)
            else:
                setattr(owner, name, attribute)

    def _wrap_check(self, check: Callable[[], None]) -> Callable[[], None]:
        def checked() -> None:
            # Other callers are only about to make a call; then it is too early.
            callers = sys._getframe(1), sys._getframe(1).f_back
            in_handshake = any(
                caller is not None and caller.f_code is _HANDSHAKE for caller in callers
            )
            phase = self._fault.phase
            if in_handshake and phase == "before" and self._session.calls + 1 == self._call:
                self._make_fault()
            check()

        return checked

    def _on_fn(self) -> None:
        if self._fault.phase == "fn":
            self._run_count += 1
            if self._run_count == self._fault.call:
                self._make_fault()

    def _wrap_enter(self, enter: Callable[[int, str], None]) -> Callable[[int, str], None]:
        def entered(number: int, text: str) -> None:
            self._part_index = 0
            self._is_leaving = text == "leave the program"
            if self._is_leaving and self._fault.phase != "exit" and not self.happened:
                self._print_event(f"has not happened; the last call was {number - 1}")
            enter(number, text)

        return entered

    def _wrap_move(self, method: Callable[..., None], *args: Any) -> None:
        part_index, self._part_index = self._part_index, self._part_index + 1
        phase = self._fault.phase
        is_counted_call = self._is_leaving if phase == "exit" else self._session.calls == self._call
        # Through shared memory a payload takes several steps; the reducer calls when it has moved.
        acts_later = phase in ("after", "payload") and self._hooks.is_sharing
        if (
            not is_counted_call
            or self.happened
            or acts_later
            or part_index != (phase in ("payload", "after"))
        ):
            method(*args)
            return
        if phase == "payload":
            self._make_fault()
        timer = threading.Timer(_SEND_SECONDS, self._make_fault)
        timer.daemon = True
        if phase in ("proof", "exit") and self._fault.action in _ENDING_ACTIONS:
            timer.start()
        method(*args)
        timer.cancel()
        if phase != "payload":
            arrays = [arg for arg in args if isinstance(arg, np.ndarray)]
            self._make_fault(arrays[-1] if arrays else None)

    def _on_moving(self) -> None:
        if self._fault.phase == "payload" and self._session.calls == self._call:
            self._make_fault()

    def _on_moved(self, results: list[Array]) -> None:
        if self._fault.phase == "after" and self._session.calls == self._call:
            self._make_fault(results[0])

    def _print_event(self, event_text: str) -> None:
        rank_text = f"rank {self._session.comm.rank} of {self._session.comm.size}"
        text = f"mpistrat: injected fault {self._fault.text!r} {event_text} ({rank_text})."
        print(text, file=sys.stderr, flush=True)

    def _make_fault(self, received: Array | None = None) -> None:
        with self._lock:
            if self.happened:
                return
            self.happened = True
        self._print_event("happens")
        action, amount = self._fault.action, self._fault.amount
        if action == "raise":
            raise InjectedError(f"injected fault: {self._fault.text}")
        if action == "exit":
            sys.exit(int(amount))
        elif action == "os_exit":
            os._exit(int(amount))
        elif action == "sleep":
            time.sleep(amount)
        elif action == "bitflip":
            # The last bit of the first number, where the lowest byte of a number comes first.
            if received is not None and received.size:
                received.reshape(-1).view(np.uint8)[0] ^= 1
        else:
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
