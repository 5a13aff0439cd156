"""The calls of one group: one communicator, one worker, one sequence of calls that is compared.

`GroupChannel` makes the calls of a group one at a time, in the order in which the program called
them. `Arrivals` finds the ranks that have not come to a call. Each call is an event in a profile of
``torch.profiler`` (`record_call`, `begin_record`); without a profiler in the calling thread nothing
is recorded or created.
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
from mpistrat.torch.process_group.work import CallTimeoutError, CallWork, FailureNotice, Worker
from mpistrat.watchdog.exchange import has_thread_multiple
from mpistrat.watchdog.status_board import say

__all__ = [
    "Arrivals",
    "GroupChannel",
    "begin_record",
    "is_profiled",
    "record_call",
]

# Messages show places in the program, not in the library that it calls.
add_library_directory(str(Path(torch.__file__).parent))
add_library_directory(typing_extensions.__file__)  # wraps what torch calls deprecated

# Seconds for which a thread tests for the others without a pause: the program's own thread, which
# has nothing else to do, or any thread while data moves (ranks that nap between the parts of a call
# find each other asleep); and the worker, which would take the program's core.
_PROGRAM_LOOK_SECONDS, _WORKER_LOOK_SECONDS = 2e-3, 5e-5
_NAP_SECONDS = 5e-5
# Seconds after which a waiting rank announces its call to the others.
_ANNOUNCE_SECONDS = 0.25
# Seconds that the store has for an answer; its process may be stopped.
_STORE_SECONDS = 2.0

_STOPPED_RANK_TEXT = " All have come to it; one may be stopped."

is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled
_NO_RECORDING = contextlib.nullcontext()
_WORD = re.compile(r"[\w.]+")


def record_call(text: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that records its body as an event.

    Args:
      text: The call in words. The event has its first word: ``"mpistrat:all_reduce"`` of
        ``"all_reduce(SUM) of float32[3]"``.
    """
    return record_function(_event_name(text)) if is_profiled() else _NO_RECORDING


def begin_record(text: str) -> Callable[[], None] | None:
    """Begin the event of a call that another thread may end.

    Args:
      text: The call in words, as in `record_call`.

    Returns:
      A function that ends the event, to be called once, in any thread; None without a profiler.
    """
    if not is_profiled():
        return None
    record = record_function(_event_name(text))
    record.__enter__()
    # Only a future may end an event in another thread than the one that began it.
    future: torch.futures.Future[None] = torch.futures.Future()
    record._call_end_callbacks_on_future(future)

    def end() -> None:
        future.set_result(None)

    return end


def _event_name(text: str) -> str:
    word = _WORD.match(text)
    return f"mpistrat:{word.group() if word else text}"


@final
class Arrivals:
    """The calls that the ranks of one group have come to, in the store of the group.

    MPI does not show which ranks a call waits for.

    Args:
      rank: This rank, in the group.
      size: How many ranks the group has.

    Attributes:
      store: The store of the group, if there is one.
    """

    def __init__(self, rank: int, size: int):
        """Begin without a store."""
        self._rank, self._size = rank, size
        self.store: Any = None
        self._announced_number = -1

    def announce_call(self, number: int) -> None:
        """Write to the store that this rank waits in its call of this number."""
        store, self._announced_number = self.store, number
        if store is not None:
            _run_in_thread(lambda: store.set(_make_store_key(self._rank), str(number)))

    def find_missing_ranks(self) -> tuple[int, ...] | None:
        """Return the ranks that have not come to this rank's last call; None if not known."""
        store, number = self.store, self._announced_number
        answers: list[tuple[int, ...]] = []

        def ask() -> None:
            late_ranks = []
            for rank in range(self._size):
                key = _make_store_key(rank)
                if not store.check([key]) or int(store.get(key)) < number:
                    late_ranks.append(rank)
            answers.append(tuple(late_ranks))

        if store is not None and number >= 0:
            _run_in_thread(ask).join(_STORE_SECONDS)
        return answers[0] if answers and self._rank not in answers[0] else None


def _make_store_key(rank: int) -> str:
    return f"mpistrat/waits/{rank}"


def _run_in_thread(ask_store: Callable[[], None]) -> threading.Thread:
    """Call a function in a thread, as the store may not answer."""

    def run() -> None:
        block_signals()
        with suppress(Exception):
            ask_store()

    thread = threading.Thread(target=run, name="mpistrat arrivals", daemon=True)
    thread.start()
    return thread


@final
class GroupChannel:
    """Makes the collective calls of one group.

    Args:
      comm: A communicator that nobody else uses; its ranks are those of the group.
      name: What messages call the group; empty for the group of all ranks.
      seconds: How long a call without a timeout of its own may wait for the others.

    Attributes:
      session: Counts the calls.
      lockstep: Makes the handshakes.
      reducer: Makes the reductions.
      comm: Makes all other transfers.
      worker: Makes calls beside the program.
      arrivals: Finds the ranks that have not come to a call.
    """

    def __init__(self, comm: MPIComm, name: str, seconds: float):
        """Create the session and the worker, without communication."""
        self.name, self.seconds = name, seconds
        self.comm = comm.make_interruptible(self._wait_for_ranks)
        # No thread owns the session: the worker and the program take turns.
        self.session = Session(self.comm, is_owned=False)
        self.lockstep = Lockstep(self.session)
        self.worker = Worker(f"mpistrat {name or 'world'}", has_thread_multiple())
        self._call_seconds, self._is_on_worker = seconds, True
        self._call_text, self._call_index = "init_process_group()", 0
        self.arrivals = Arrivals(self.comm.rank, self.comm.size)
        self._abandon_error: Exception | None = None
        self._failed_works: list[tuple[weakref.ref[CallWork], FailureNotice]] = []
        self._thread_names: dict[int, str] = {}  # of threads of the program that have called

    @functools.cached_property
    def reducer(self) -> Reducer:
        """Makes the reductions."""
        return Reducer(self.lockstep)

    @property
    def rank(self) -> int:
        """This rank, as messages name it."""
        return self.to_program_rank(self.comm.rank)

    def to_program_rank(self, rank: int) -> int:
        """Return the rank in the program of a rank of the group.

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

    def _wait_for_ranks(self, test: Callable[[], bool]) -> None:
        """Wait until a test is true, at most for the timeout of the call."""
        if test():
            return
        start = time.monotonic()
        announce_delay = min(_ANNOUNCE_SECONDS, self._call_seconds / 4)
        is_patient = not self._is_on_worker or self.lockstep.hooks.is_sharing
        look_until = start + (_PROGRAM_LOOK_SECONDS if is_patient else _WORKER_LOOK_SECONDS)
        while time.monotonic() < look_until:
            if test():
                return
            if is_patient:  # on one core it may be this process that the other waits for
                os.sched_yield()
        warn_at = start + self.session.options.warn if self.name else float("inf")
        is_announced = False
        while not test():
            current_time = time.monotonic()
            if current_time > start + announce_delay and not is_announced:
                is_announced = True
                self.arrivals.announce_call(self._call_index)
            if current_time > warn_at:
                warn_at = float("inf")
                self._warn_of_wait(current_time - start)
            if (
                current_time > start + self._call_seconds + announce_delay
            ):  # ranks that came in time have announced it
                self._abandon_error = self.create_timeout_error(self._call_text, self._call_seconds)
                raise self._abandon_error
            time.sleep(_NAP_SECONDS)

    def _warn_of_wait(self, seconds: float) -> None:
        """Print the ranks that a smaller group waits for; the watchdog has the group of all."""
        missing_ranks = self.arrivals.find_missing_ranks()
        arrived_ranks = set(range(self.comm.size)) - set(missing_ranks or ())
        if missing_ranks and min(arrived_ranks) == self.comm.rank:
            wait_text = self._describe_wait(f"{seconds:.3g} s", self._call_text, missing_ranks)
            say(f"mpistrat: {wait_text}.")

    def _describe_wait(
        self, duration_text: str, text: str, missing_ranks: Sequence[int] | None
    ) -> str:
        waiting_rank = f"rank {self.rank} of {self.name or self.comm.size}"
        late_ranks = (
            ranks_text([*map(self.to_program_rank, missing_ranks)])
            if missing_ranks
            else "the other ranks"
        )
        return (
            f"{waiting_rank} has waited {duration_text} in {find_call_site()} for {late_ranks} "
            f"to call {text}"
        )

    def check_tensor_per_rank(self, name: str, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Raise ValueError on the root unless there is a tensor for each rank."""
        rank, size = self.comm.rank, self.comm.size
        if rank == root and len(tensors) != size:
            raise ValueError(
                f"rank {self.rank}: {name} has {len(tensors)} tensors, and the group {size} ranks. "
                "Give one for each."
            )

    def create_timeout_error(self, text: str, seconds: float) -> CallTimeoutError:
        """Return the error of a call that has taken too long."""
        missing_ranks = self.arrivals.find_missing_ranks()
        arrivals_text = ""
        if not missing_ranks:
            arrivals_text = " Some have not come." if missing_ranks is None else _STOPPED_RANK_TEXT
        wait_text = self._describe_wait(f"for a timeout of {seconds:g} s", text, missing_ranks)
        return CallTimeoutError(
            f"{wait_text}.{arrivals_text} Look for a collective under `if rank == ...`, or give "
            "init_process_group or new_group a longer timeout."
        )

    def make_call(
        self,
        text: str,
        collective: Callable[[], None],
        outputs: Sequence[torch.Tensor],
        is_async: bool,
        seconds: float | None,
    ) -> CallWork:
        """Make a call in this thread if the program waits for it, else in the worker.

        If other calls are queued, the call is queued behind them.

        Args:
          text: The call, in the words of torch; for messages.
          collective: Makes the handshake, and moves the bytes.
          outputs: The tensors that the call fills.
          is_async: Whether the program continues meanwhile.
          seconds: How long the call may wait for the others; None for the timeout of the group.
        """
        allowed_seconds = seconds or self.seconds
        thread_id = threading.get_ident()
        if thread_id not in self._thread_names and not self.worker.has_turn():
            self._thread_names[thread_id] = threading.current_thread().name
        work = CallWork(outputs, self.worker, functools.partial(self.create_timeout_error, text))
        run = functools.partial(
            self._run_call,
            work,
            text,
            collective,
            allowed_seconds=allowed_seconds,
            is_async=is_async,
        )
        if not is_async and self.worker.take_turn():
            try:
                with record_call(text):
                    run("", False)
            finally:
                self.worker.end_turn()
        else:
            work.end_record = begin_record(text)
            self.worker.queue_call(functools.partial(run, find_call_site()))
        return work

    def try_call_now(self, text: str, collective: Callable[[], None]) -> bool:
        """Make a call at once in this thread, without a work object; it raises its own error.

        That is possible if no other call is queued, and no earlier call has failed.

        Args:
          text: The call, in the words of torch; for messages.
          collective: Makes the handshake, and moves the bytes.

        Returns:
          Whether the call was made.
        """
        if self._failed_works or self._abandon_error is not None or not self.worker.take_turn():
            return False
        self._is_on_worker, self._call_seconds, self._call_text = False, self.seconds, text
        self._call_index = self.session.calls
        try:
            if is_profiled():
                with record_call(text):
                    collective()
            else:
                collective()
        except BaseException as failure:
            self._handle_failure(text, failure)
            raise
        finally:
            self.worker.end_turn()
        return True

    def _handle_failure(self, text: str, failure: BaseException) -> bool:
        """Abandon the group if Ctrl-C interrupted a call; return whether it did.

        If several threads have called, an error of calls that differ gets advice on that.
        """
        if isinstance(failure, LockstepError) and len(self._thread_names) > 1:
            advice = self._advise_on_threads()
            if advice not in str(failure):  # an earlier error has it already
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
        """Send the error of a call that this rank could not make to the others; raise nothing."""
        refuse = functools.partial(self.lockstep.fail_collectively, text, error)
        work = self.make_call(text, refuse, (), is_async=True, seconds=None)
        work.failure_notice.is_reported = True

    def take_unreported_error(self, only_abandoned: bool = False) -> Exception | None:
        """Return the error of an earlier call that was not raised yet, as reported; else None.

        Args:
          only_abandoned: Whether to skip calls for which the program may still wait.
        """
        self._failed_works = [
            (work, notice) for work, notice in self._failed_works if not notice.is_reported
        ]
        for work, notice in self._failed_works:
            if not only_abandoned or work() is None:
                notice.is_reported = True
                assert isinstance(notice.error, Exception)
                return notice.error
        return None

    def _run_call(
        self,
        work: CallWork,
        text: str,
        collective: Callable[[], None],
        call_site: str,
        is_on_worker: bool,
        *,
        allowed_seconds: float,
        is_async: bool,
    ) -> None:
        """Make a call, and end its work with the error, if there is one."""
        error: BaseException | None = None
        try:
            if self._abandon_error is not None:
                raise self._abandon_error
            self._is_on_worker, self._call_seconds, self._call_text = (
                is_on_worker,
                allowed_seconds,
                text,
            )
            self._call_index = self.session.calls
            with naming_call_site(call_site):
                earlier_error = self.take_unreported_error(is_async) if self._failed_works else None
                if earlier_error is not None:
                    self.lockstep.fail_collectively(text, earlier_error)
                collective()
        except BaseException as failure:
            error = failure
            if self._handle_failure(text, failure):
                raise
            self._failed_works.append((weakref.ref(work), work.failure_notice))
        finally:
            work.end(error)

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until all calls have ended, at most some seconds; return whether they have."""
        return self.worker.drain(seconds)

    @property
    def is_abandoned(self) -> bool:
        """Whether a call was given up, for which bytes of others may still arrive."""
        return self._abandon_error is not None

    def close(self, reason: str) -> None:
        """Let all later calls raise an error with this reason."""
        self._abandon_error = dist.DistError(f"{self.name or 'the group of all ranks'}: {reason}")

    def free(self) -> None:
        """Free the communicator."""
        self.close("destroy_process_group has ended it.")
        self.session.is_freed = True
        for group in self.session.groups.values():
            group.free()
        self.comm.free()
