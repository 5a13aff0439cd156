"""Runs N ranks as threads of one process."""

from __future__ import annotations

import contextvars
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.arrays import whole_number
from mpistrat.board.frames import current_frames, reading_frames
from mpistrat.comm.callsite import few, grouped, ranks_text
from mpistrat.comm.loopback import Event, LoopbackComm, LoopbackWorld
from mpistrat.comm.session import Session
from mpistrat.comm.world import as_world
from mpistrat.errors import RemoteError
from mpistrat.lockstep.ending import code_of
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.lockstep.ranks import CallState
from mpistrat.lockstep.tracebacks import traceback_of


class RanksFailed(AssertionError):
    """Some ranks raised, or did not end.

    Attributes:
      errors: The exception of each rank that raised one.
      trace: The events in their order, if the ranks ran with a seed.
    """

    def __init__(self, message: str, errors: dict[int, BaseException], trace: Sequence[Event] = ()):
        """Create the exception."""
        super().__init__(message)
        self.errors = errors
        self.trace = tuple(trace)


def run_ranks(
    fn: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0, seed: int | None = None
) -> list[Any]:
    """Call ``fn(comm, *args)`` on `size` ranks, each a thread, and return what each returned.

    In `fn` the group of ranks is also the default one, so programs that make a strategy without
    naming a communicator run unchanged.

    Args:
      fn: The program of one rank.
      size: The number of ranks.
      args: Further arguments.
      timeout: Seconds after which ranks that have not ended are a failure.
      seed: Run one rank at a time; at every call of the communicator the next one is drawn from
        this seed. The same seed repeats the same schedule, recorded in ``comm.world.trace``. A
        deadlock is reported at once, with the seed and the calls that the ranks wait in. None:
        all ranks run at once.

    Returns:
      The results in rank order.

    Raises:
      TypeError: `size` is not an integer.
      ValueError: `size` is less than 1.
      RanksFailed: A rank raised, or did not end in time; says which ranks, and where they are.

    Example:
      >>> import mpistrat as ms
      >>> def program(comm):
      ...     strategy = ms.MirroredStrategy()
      ...     return strategy.run(lambda: ms.get_replica_context().all_reduce("sum", 1)).local
      >>> [int(total) for total in run_ranks(program, 3)]
      [3, 3, 3]

      One schedule of many, the same each time:

      >>> def order(comm, came):
      ...     came.append(comm.rank)
      ...     ms.MirroredStrategy().run(lambda: None)
      ...     return came
      >>> run_ranks(order, 3, [], seed=7)[0] == run_ranks(order, 3, [], seed=7)[0]
      True
    """
    __tracebackhide__ = True  # pytest shows no frame that has it
    whole_number("run_ranks(fn, size, *args): size", size, 1, ValueError)
    world = LoopbackWorld(size, patience=timeout, seed=seed)
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    threads = [
        # A fresh context each: ranks must not see each other's strategy.
        threading.Thread(
            target=contextvars.Context().run,
            args=(_run, LoopbackComm(world, rank), fn, args, results, errors),
            name=f"rank {rank}",
            daemon=True,
        )
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout + 1
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if stuck or errors:
        message = _explain(stuck, errors, threads, timeout)
        if seed is not None:
            message = f"{message}\nin the schedule of seed {seed}"
        raise RanksFailed(message, errors, world.trace)
    return results


def _run(
    comm: LoopbackComm,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    results: list[Any],
    errors: dict[int, BaseException],
) -> None:
    failure: BaseException | None = None
    try:
        comm.world.begin(comm.rank)
        with as_world(comm):
            results[comm.rank] = fn(comm, *args)
    except BaseException as error:
        failure = errors[comm.rank] = error
    try:
        _leave(comm, failure)
    except Exception as error:
        errors.setdefault(comm.rank, error)
    finally:
        comm.free()
        comm.world.end(comm.rank)


def _leave(comm: LoopbackComm, failure: BaseException | None) -> None:
    # Leaving is a call, here as under MPI; but a program that made no strategy has none to leave.
    session: Session | None = vars(comm).get("session")
    if session is not None and session.kept(CallState).gone is None:
        Lockstep(session).leave(code_of(failure), failure)


def _explain(
    stuck: list[int],
    errors: dict[int, BaseException],
    threads: list[threading.Thread],
    timeout: float,
) -> str:
    # In the order in which they failed, those last that were told of the failure of another.
    failed = sorted(errors, key=lambda rank: isinstance(errors[rank], RemoteError))
    texts = [f"{type(errors[rank]).__name__}: {errors[rank]}" for rank in failed]
    lines = few(
        [f"{ranks_text(ranks)} raised {text}" for text, ranks in grouped(texts, failed).items()]
    )
    lines += [traceback_of(errors[rank]) for rank in failed[:1]]
    with reading_frames():
        frames = current_frames()
        for rank in stuck:
            lines.append(f"rank {rank} has not ended after {timeout:g} s; it is here:")
            frame = frames.get(threads[rank].ident or -1)
            lines += traceback.format_stack(frame) if frame is not None else []
    return "\n".join(lines)
