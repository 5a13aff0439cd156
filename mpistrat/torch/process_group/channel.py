"""The ranks of one group: one communicator, one thread, one sequence of calls that is checked.

Communication in profiles of ``torch.profiler``: an event for each call, as long as the call.

Nothing is recorded, and nothing made, while no profiler is on in the thread that calls.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
import typing_extensions
from torch.autograd.profiler import record_function

from mpistrat.collectives.reducer import Reducer
from mpistrat.comm.callsite import (
    add_library_directory,
    find_call_site,
    naming_call_site,
    ranks_text,
)
from mpistrat.comm.mpi import MPIComm
from mpistrat.comm.session import Session
from mpistrat.errors import LockstepError
from mpistrat.kernels.threads import block_signals
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.torch.process_group.work import CallWork, FailureNotice, TimedOut, Worker
from mpistrat.watchdog.exchange import threads_allowed
from mpistrat.watchdog.status_board import say

__all__ = [
    "Arrivals",
    "GroupChannel",
    "begin_record",
    "is_profiled",
    "record_call",
]


is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled
_NO_RECORD = contextlib.nullcontext()
_WORD = re.compile(r"[\w.]+")


def record_call(text: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that records its body as an event.

    Args:
      text: The call in words. The event has its first word: ``"mpistrat:all_reduce"`` of
        ``"all_reduce(SUM) of float32[3]"``.
    """
    return record_function(_event_name(text)) if is_profiled() else _NO_RECORD


def begin_record(text: str) -> Callable[[], None] | None:
    """Begin the event of a call that another thread may end; return what ends it.

    Args:
      text: As `record_call` takes it.

    Returns:
      A function to call once, in any thread; None while no profiler is on.
    """
    if not is_profiled():
        return None
    record = record_function(_event_name(text))
    record.__enter__()
    # An event belongs to the thread that begins it; only a future may end it from another one.
    future: torch.futures.Future[None] = torch.futures.Future()
    record._call_end_callbacks_on_future(future)

    def end() -> None:
        future.set_result(None)

    return end


def _event_name(text: str) -> str:
    word = _WORD.match(text)
    return f"mpistrat:{word.group() if word else text}"


# Places in messages are those of the program, not of the library that it calls.
add_library_directory(str(Path(torch.__file__).parent))
add_library_directory(typing_extensions.__file__)  # wraps what torch calls deprecated

# Seconds that a thread looks without a pause for the others: the program's own, as it has nothing
# else to do, or where they are at the same call; the one beside it, which would take the program's
# core. (Ranks that nap between the pieces of a call find each other asleep.)
_LOOK, _GLANCE = 2e-3, 5e-5
_NAP = 5e-5
# Seconds after which a rank that waits tells the others that it has come.
_TELL_SECONDS = 0.25
_ALL = " All have come to it; one may be stopped."

# Seconds that the store has for an answer: its process may be stopped.
_ANSWERS = 2.0


@final
class Arrivals:
    """The calls that the ranks of one group have come to.

    MPI does not tell whose part of a call is missing.

    Args:
      rank: This rank, in the group.
      size: How many ranks the group has.

    Attributes:
      store: The store of the group, if there is one.
    """

    def __init__(self, rank: int, size: int):
        """Know of nobody."""
        self._rank, self._size = rank, size
        self.store: Any = None
        self._announced_number = -1

    def announce_call(self, number: int) -> None:
        """Tell the others that this rank waits in the call after so many others."""
        store, self._announced_number = self.store, number
        if store is not None:
            _run_in_thread(lambda: store.set(_key(self._rank), str(number)))

    def missing(self) -> tuple[int, ...] | None:
        """Return the ranks that have not come to this rank's last call; None if not known."""
        store, number = self.store, self._announced_number
        answers: list[tuple[int, ...]] = []

        def ask() -> None:
            late_ranks = []
            for rank in range(self._size):
                key = _key(rank)
                if not store.check([key]) or int(store.get(key)) < number:
                    late_ranks.append(rank)
            answers.append(tuple(late_ranks))

        if store is not None and number >= 0:
            _run_in_thread(ask).join(_ANSWERS)
        return answers[0] if answers and self._rank not in answers[0] else None


def _key(rank: int) -> str:
    return f"mpistrat/waits/{rank}"


def _run_in_thread(act: Callable[[], None]) -> threading.Thread:
    """Call a function that asks the store, in a thread, as the store may not answer."""

    def run() -> None:
        block_signals()
        with suppress(Exception):
            act()

    thread = threading.Thread(target=run, name="mpistrat arrivals", daemon=True)
    thread.start()
    return thread


@final
class GroupChannel:
    """What a group of torch's is made of.

    Args:
      comm: A communicator that nobody else uses; its ranks are those of the group.
      name: What messages call the group; empty for the group of all ranks.
      seconds: How long a call may wait for the others that says nothing of it.

    Attributes:
      session: Counts the calls.
      lockstep: Proves them.
      reducer: Reduces, on the quickest way that there is.
      comm: Moves everything else.
      worker: The thread.
      arrivals: Who has come to the call that this rank waits in.
    """

    def __init__(self, comm: MPIComm, name: str, seconds: float):
        """Call nothing yet. Not collective."""
        self.name, self.seconds = name, seconds
        self.comm = comm.make_interruptible(self._await)
        # Its calls belong to no thread: the worker and the program take turns, one at a time.
        self.session = Session(self.comm, is_owned=False)
        self.lockstep = Lockstep(self.session)
        self.worker = Worker(f"mpistrat {name or 'world'}", threads_allowed())
        self._allowed, self._aside = seconds, True
        self._doing, self._number = "init_process_group()", 0
        self.arrivals = Arrivals(self.comm.rank, self.comm.size)
        self._abandon_error: Exception | None = None
        self._failed: list[tuple[weakref.ref[CallWork], FailureNotice]] = []
        self._thread_names: dict[int, str] = {}  # of threads of the program that have called

    @functools.cached_property
    def reducer(self) -> Reducer:
        """Reduces, on the quickest way that there is."""
        return Reducer(self.lockstep)

    @property
    def rank(self) -> int:
        """This rank, as messages name it."""
        return self.named(self.comm.rank)

    def named(self, rank: int) -> int:
        """Return a rank of the group as the program counts it.

        Raises:
          ValueError: The group has no such rank; the other ranks get an error, too.
        """
        ranks = self.lockstep.ranks
        if 0 <= rank < len(ranks):
            return ranks[rank]
        error = ValueError(
            f"rank {self.rank}: src or dst is rank {rank} of {self.name or 'the group'}, which has "
            f"ranks 0 to {len(ranks) - 1}."
        )
        self.refuse("a call with src or dst", error)
        raise error

    def _await(self, test: Callable[[], bool]) -> None:
        """Wait for the others until the timeout of the call, without this rank's own work."""
        if test():
            return
        start = time.monotonic()
        tell_delay = min(_TELL_SECONDS, self._allowed / 4)
        long = not self._aside or self.lockstep.hooks.sharing
        look = start + (_LOOK if long else _GLANCE)
        while time.monotonic() < look:
            if test():
                return
            if long:  # on one core it may be this process that the other waits for
                os.sched_yield()
        warn = start + self.session.options.warn if self.name else float("inf")
        is_announced = False
        while not test():
            current_time = time.monotonic()
            if current_time > start + tell_delay and not is_announced:
                is_announced = True
                self.arrivals.announce_call(self._number)
            if current_time > warn:
                warn = float("inf")
                self._warn(current_time - start)
            if current_time > start + self._allowed + tell_delay:  # who came in time has told so
                self._abandon_error = self.create_timeout_error(self._doing, self._allowed)
                raise self._abandon_error
            time.sleep(_NAP)

    def _warn(self, seconds: float) -> None:
        """Say who is waited for, once; of the group of all ranks the watchdog does."""
        missing = self.arrivals.missing()
        arrived_ranks = set(range(self.comm.size)) - set(missing or ())
        if missing and min(arrived_ranks) == self.comm.rank:
            say(f"mpistrat: {self._waits(f'{seconds:.3g} s', self._doing, missing)}.")

    def _waits(self, long: str, text: str, missing: Sequence[int] | None) -> str:
        waiting_rank = f"rank {self.rank} of {self.name or self.comm.size}"
        late_ranks = ranks_text([*map(self.named, missing)]) if missing else "the other ranks"
        call_site = find_call_site()
        return f"{waiting_rank} has waited {long} in {call_site} for {late_ranks} to call {text}"

    def check_tensor_per_rank(self, name: str, listed: Sequence[torch.Tensor], root: int) -> None:
        """Raise ValueError on the root unless a list has a tensor for each rank."""
        rank, size = self.comm.rank, self.comm.size
        if rank == root and len(listed) != size:
            raise ValueError(
                f"rank {self.rank}: {name} has {len(listed)} tensors, and the group {size} ranks. "
                "Give one for each."
            )

    def create_timeout_error(self, text: str, seconds: float) -> TimedOut:
        """Return the error of a call that has taken too long."""
        missing = self.arrivals.missing()
        arrivals_text = "" if missing else " Some have not come." if missing is None else _ALL
        return TimedOut(
            f"{self._waits(f'for a timeout of {seconds:g} s', text, missing)}.{arrivals_text} Look "
            "for a collective under `if rank == ...`, or give init_process_group or new_group a "
            "longer timeout."
        )

    def call(
        self,
        text: str,
        make: Callable[[], None],
        outputs: Sequence[torch.Tensor],
        beside: bool,
        seconds: float | None,
    ) -> CallWork:
        """Make a call here if the program waits for it, and have it made by the thread otherwise.

        A call that waits while others are queued is queued behind them.

        Args:
          text: The call, in the words of torch; for messages.
          make: Makes the handshake, and moves the bytes.
          outputs: The tensors that it fills.
          beside: The program wants to continue.
          seconds: How long it may wait for the others, if that was said.
        """
        allowed = seconds or self.seconds
        thread = threading.get_ident()
        if thread not in self._thread_names and not self.worker.has_turn():
            self._thread_names[thread] = threading.current_thread().name
        work = CallWork(outputs, self.worker, functools.partial(self.create_timeout_error, text))
        run = functools.partial(self._run, work, text, make, allowed, beside)
        if not beside and self.worker.take_turn():
            try:
                with record_call(text):
                    run("", False)
            finally:
                self.worker.end_turn()
        else:
            work.end_record = begin_record(text)
            self.worker.queue(functools.partial(run, find_call_site()))
        return work

    def at_once(self, text: str, make: Callable[[], None]) -> bool:
        """Make a call here and now, which raises what it fails with; tell whether that could be.

        It is the way of calls that are worth no object: nothing comes before them, and nothing has
        failed.

        Args:
          text: The call, in the words of torch; for messages.
          make: Makes the handshake, and moves the bytes.
        """
        if self._failed or self._abandon_error is not None or not self.worker.take_turn():
            return False
        self._aside, self._allowed, self._doing = False, self.seconds, text
        self._number = self.session.calls
        try:
            if is_profiled():
                with record_call(text):
                    make()
            else:
                make()
        except BaseException as failure:
            self._interrupted(text, failure)
            raise
        finally:
            self.worker.end_turn()
        return True

    def _interrupted(self, text: str, failure: BaseException) -> bool:
        """Abandon the group if Ctrl-C interrupted a call of it; return whether it did.

        The error of calls that differ says so if several threads have called.
        """
        if isinstance(failure, LockstepError) and len(self._thread_names) > 1:
            advice = self._advise_on_threads()
            if advice not in str(failure):  # else it is the error of an earlier call
                failure.args = (f"{failure}\n{advice}",)
        if isinstance(failure, Exception):
            return False
        self._abandon_error = dist.DistError(f"{text} was interrupted")
        return True

    def _advise_on_threads(self) -> str:
        return (
            f"  On this rank {len(self._thread_names)} threads have called "
            f"{self.name or 'the group of all ranks'} ({', '.join(self._thread_names.values())}), "
            "and the order of their calls may differ between ranks. Give each thread a group of "
            "its own, such as async_save(state, process_group=dist.new_group()), or wait for one "
            "before the other begins."
        )

    def refuse(self, text: str, error: Exception) -> None:
        """Tell the others that this rank could not make a call. It raises nothing here."""
        refuse = functools.partial(self.lockstep.refuse, text, error)
        work = self.call(text, refuse, (), beside=True, seconds=None)
        work.failure_notice.is_reported = True

    def unheard(self, only_abandoned: bool = False) -> Exception | None:
        """Return the error of an earlier call that was not raised yet; None without one.

        Args:
          only_abandoned: Whether calls are left out that the program may still wait for.
        """
        self._failed = [(work, notice) for work, notice in self._failed if not notice.is_reported]
        for work, notice in self._failed:
            if not only_abandoned or work() is None:
                notice.is_reported = True
                assert isinstance(notice.error, Exception)
                return notice.error
        return None

    def _run(
        self,
        work: CallWork,
        text: str,
        make: Callable[[], None],
        allowed: float,
        is_async: bool,
        place: str,
        aside: bool,
    ) -> None:
        """Make one call; its error is the work's."""
        error: BaseException | None = None
        try:
            if self._abandon_error is not None:
                raise self._abandon_error
            self._aside, self._allowed, self._doing = aside, allowed, text
            self._number = self.session.calls
            with naming_call_site(place):
                earlier = self.unheard(is_async) if self._failed else None
                if earlier is not None:
                    self.lockstep.refuse(text, earlier)
                make()
        except BaseException as failure:
            error = failure
            if self._interrupted(text, failure):
                raise
            self._failed.append((weakref.ref(work), work.failure_notice))
        finally:
            work.end(error)

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until nothing moves any more, so many seconds at most; tell whether that is so."""
        return self.worker.drain(seconds)

    @property
    def is_abandoned(self) -> bool:
        """Whether a call was given up: what others send for it may still come."""
        return self._abandon_error is not None

    def lose(self, reason: str) -> None:
        """Make no more calls: those that come are errors."""
        self._abandon_error = dist.DistError(f"{self.name or 'the group of all ranks'}: {reason}")

    def free(self) -> None:
        """Free the communicator."""
        self.lose("destroy_process_group has ended it.")
        self.session.is_freed = True
        for group in self.session.groups.values():
            group.free()
        self.comm.free()
