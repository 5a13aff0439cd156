"""Fault injection: what fails, on which rank, in which part of which call.

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

from mpistrat.comm.base import Comm
from mpistrat.comm.mpi import MPIComm
from mpistrat.comm.session import Session
from mpistrat.errors import OptionError
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import Hooks

_PHASES = ("fn", "before", "proof", "payload", "after", "exit")
# What may follow the colon of an action: at most so much, in these words.
_CODE, _SECONDS = (255, "an exit code from 0 to 255"), (threading.TIMEOUT_MAX, "seconds")
_ACTIONS = dict.fromkeys(("kill", "stop", "raise", "bitflip"), (0.0, ""))
_ACTIONS |= {"exit": _CODE, "os_exit": _CODE, "sleep": _SECONDS}
_ENDING = ("kill", "stop", "os_exit")  # these need a process of their own
_KEYS = ("rank", "call", "phase", "do")
_METHODS = ("allgather", "allgatherv", "allreduce", "bcast", "barrier", "gatherv", "sendrecv")
# A rank that waits in the handshake for others that are late has sent its part by then.
_SENT = 0.05
_HANDSHAKE = Lockstep.handshake.__code__


class InjectedError(RuntimeError):
    """What ``do=raise`` raises."""


class Fault(NamedTuple):
    """What goes wrong.

    Attributes:
      rank: On which rank.
      phase: In which part of the call: ``fn``, ``before``, ``proof``, ``payload``, ``after`` or
        ``exit``.
      call: In which call; for ``fn`` in which ``run``; 0 for ``exit``.
      do: What the rank does: ``kill``, ``stop``, ``raise``, ``bitflip``, ``exit``, ``os_exit`` or
        ``sleep``.
      amount: The exit code, or the seconds.
      text: How it was written.
    """

    rank: int
    phase: str
    call: int
    do: str
    amount: float
    text: str


def parse(text: str, comm: Comm | None = None) -> Fault | None:
    """Return the fault that a text asks for; None for an empty string.

    Args:
      text: ``key=value`` pairs with semicolons between them: ``rank`` and ``do``, ``call`` unless
        the phase is ``exit``, and ``phase`` unless it is ``before``.
      comm: The ranks that it is for, if they are known.

    Raises:
      OptionError: The text cannot be read, or such a fault cannot happen there.

    Example:
      >>> parse("rank=1;call=5;do=sleep:2.5").amount
      2.5
    """
    if not text:
        return None
    want = functools.partial(_want, text)
    pairs = [pair.partition("=") for pair in text.split(";")]
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    unknown = sorted(fields.keys() - set(_KEYS))
    keys = f"; the keys are {', '.join(_KEYS)}"
    want(not unknown, f"unknown key {''.join(unknown[:1])!r}{keys}")
    want(len(fields) == len(pairs), f"a key that appears twice{keys}")
    phase = fields.get("phase", "before")
    for key in ("rank", "do") if phase == "exit" else ("rank", "do", "call"):
        want(fields.get(key), f"{key} is missing")
    for key, minimum in (("rank", 0), ("call", 1)):
        digits = fields.get(key, "1")
        right = digits.isdecimal() and int(digits) >= minimum
        want(right, f"{key} wants a whole number from {minimum}, not {digits!r}")
    action, colon, amount = fields["do"].partition(":")
    want(action in _ACTIONS, f"unknown do={action!r}; known: {', '.join(_ACTIONS)}")
    maximum, amount_text = _ACTIONS[action]
    number = math.nan if amount_text else 0.0
    with suppress(ValueError):
        number = float(amount if action == "sleep" else int(amount or "no"))
    want(amount_text or not colon, f"do={action} takes nothing after it")
    want(0 <= number <= maximum, f"do={action}:... wants {amount_text}, not {amount!r}")
    fault = Fault(int(fields["rank"]), phase, int(fields.get("call", 0)), action, number, text)
    _check(fault, want, comm)
    return fault


def _want(text: str, right: Any, reason: str) -> None:
    if not right:
        like = "rank=1;call=5;phase=proof;do=kill"
        raise OptionError(f"the fault {text!r} cannot be used: {reason}. Write it like {like}")


def _check(fault: Fault, want: Callable[[Any, str], None], comm: Comm | None) -> None:
    phase, action = fault.phase, fault.do
    want(phase in _PHASES, f"unknown phase={phase!r}; known: {', '.join(_PHASES)}")
    leaves = not fault.call and action in (*_ENDING, "sleep")
    reason = "phase=exit takes no call, and only kill, stop, os_exit or sleep"
    want(phase != "exit" or leaves, reason)
    reason = "do=bitflip wants phase=after, when data has arrived"
    want(action != "bitflip" or phase == "after", reason)
    # The others would take this rank's next message for its part of the payload.
    reason = (
        f"between handshake and payload nothing raises; do={action} wants phase=fn, before or after"
    )
    want(action not in ("raise", "exit") or phase not in ("proof", "payload"), reason)
    if comm is not None:
        want(fault.rank < comm.size, f"there are only {comm.size} ranks")
        reason = f"do={action} would end all ranks, which are threads of one process"
        want(action not in _ENDING or isinstance(comm, MPIComm), reason)


@final
class Injection:
    """A fault that waits for its moment in one session.

    Attributes:
      happened: The fault has been made.
      here: This is the rank that fails.
      before: How many calls of the session do not count.
    """

    def __init__(self, session: Session, fault: Fault, before: int = 0):
        """Create it, and put `fault` into `session` if this is the rank.

        Args:
          session: Whose calls are counted.
          fault: What goes wrong.
          before: How many calls of the session do not count.
        """
        self.happened = False
        self._session, self._fault = session, fault
        self._hooks = session.get_instance(Hooks)
        self.before = before
        self._call, self._runs = fault.call + before, 0
        self._leaving = False
        self._part = 0
        self._lock = threading.Lock()
        self._shadowed: list[tuple[Any, str, Any]] = []
        self.here = session.comm.rank == fault.rank
        if self.here:
            for name in _METHODS:
                method = getattr(session.comm, name)
                self._shadow(session.comm, name, functools.partial(self._move, method))
            self._shadow(session.board, "enter", self._enter(session.board.enter))
            self._shadow(session, "check", self._wrap_check(session.check))
            self._shadow(self._hooks, "on_fn", self._in_fn)
            self._shadow(self._hooks, "on_moved", self._moved)
            self._shadow(self._hooks, "on_moving", self._moving)

    def _shadow(self, owner: Any, name: str, value: Any) -> None:
        self._shadowed.append((owner, name, vars(owner).get(name, self)))
        setattr(owner, name, value)

    def remove(self) -> None:
        """Take the fault out again, whether it has happened or not."""
        while self._shadowed:
            owner, name, value = self._shadowed.pop()
            if value is self:  # it was a method of the class
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def _wrap_check(self, check: Callable[[], None]) -> Callable[[], None]:
        def checked() -> None:
            # Others ask too, which are only about to make a call; then it is too soon.
            callers = sys._getframe(1), sys._getframe(1).f_back
            proves = any(caller is not None and caller.f_code is _HANDSHAKE for caller in callers)
            phase = self._fault.phase
            if proves and phase == "before" and self._session.calls + 1 == self._call:
                self._act()
            check()

        return checked

    def _in_fn(self) -> None:
        if self._fault.phase == "fn":
            self._runs += 1
            if self._runs == self._fault.call:
                self._act()

    def _enter(self, enter: Callable[[int, str], None]) -> Callable[[int, str], None]:
        def entered(number: int, text: str) -> None:
            self._part = 0
            self._leaving = text == "leave the program"
            if self._leaving and self._fault.phase != "exit" and not self.happened:
                self._print_event(f"has not happened; the last call was {number - 1}")
            enter(number, text)

        return entered

    def _move(self, method: Callable[..., None], *args: Any) -> None:
        part, self._part = self._part, self._part + 1
        phase = self._fault.phase
        is_counted_call = self._leaving if phase == "exit" else self._session.calls == self._call
        # Through shared memory a payload takes several steps; the reducer says when it is through.
        acts_later = phase in ("after", "payload") and self._hooks.sharing
        if (
            not is_counted_call
            or self.happened
            or acts_later
            or part != (phase in ("payload", "after"))
        ):
            method(*args)
            return
        if phase == "payload":
            self._act()
        timer = threading.Timer(_SENT, self._act)
        timer.daemon = True
        if phase in ("proof", "exit") and self._fault.do in _ENDING:
            timer.start()
        method(*args)
        timer.cancel()
        if phase != "payload":
            arrays = [arg for arg in args if isinstance(arg, np.ndarray)]
            self._act(arrays[-1] if arrays else None)

    def _moving(self) -> None:
        if self._fault.phase == "payload" and self._session.calls == self._call:
            self._act()

    def _moved(self, results: list[Any]) -> None:
        if self._fault.phase == "after" and self._session.calls == self._call:
            self._act(results[0])

    def _print_event(self, event_text: str) -> None:
        rank_text = f"rank {self._session.comm.rank} of {self._session.comm.size}"
        text = f"mpistrat: injected fault {self._fault.text!r} {event_text} ({rank_text})."
        print(text, file=sys.stderr, flush=True)

    def _act(self, arrived: Any = None) -> None:
        with self._lock:
            if self.happened:
                return
            self.happened = True
        self._print_event("happens")
        action, amount = self._fault.do, self._fault.amount
        if action == "raise":
            raise InjectedError(f"injected fault: {self._fault.text}")
        if action == "exit":
            sys.exit(int(amount))
        elif action == "os_exit":
            os._exit(int(amount))
        elif action == "sleep":
            time.sleep(amount)
        elif action == "bitflip":
            # The last bit of the first number, where numbers are stored lowest byte first.
            if arrived is not None and arrived.size:
                arrived.reshape(-1).view(np.uint8)[0] ^= 1
        else:
            os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
