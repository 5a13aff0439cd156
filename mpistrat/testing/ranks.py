"""Ranks as threads of one process, checks that fail on all ranks or on none, injected faults."""

from __future__ import annotations

import contextvars
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import as_array, check_int, digest, is_inexact, label
from mpistrat.comm.callsite import group_by_key, ranks_text, shorten
from mpistrat.comm.loopback import Event, LoopbackComm, LoopbackWorld
from mpistrat.comm.session import Session, default_group, find_default_parent
from mpistrat.errors import RemoteError
from mpistrat.lockstep.ending import get_exit_code
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.inject import Injection, parse_fault
from mpistrat.lockstep.ranks import CallState
from mpistrat.lockstep.tracebacks import format_traceback
from mpistrat.variables.regroup import select_local
from mpistrat.watchdog.processes import get_current_frames, reading_frames


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
    check_int("run_ranks(fn, size, *args): size", size, 1, ValueError)
    world = LoopbackWorld(size, patience=timeout, seed=seed)
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    threads = [
        # A fresh context each: ranks must not see each other's strategy.
        threading.Thread(
            target=contextvars.Context().run,
            args=(_run_rank, LoopbackComm(world, rank), fn, args, results, errors),
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
    stuck_ranks = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if stuck_ranks or errors:
        message = _explain_failure(stuck_ranks, errors, threads, timeout)
        if seed is not None:
            message = f"{message}\nin the schedule of seed {seed}"
        raise RanksFailed(message, errors, world.trace)
    return results


def _run_rank(
    comm: LoopbackComm,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    results: list[Any],
    errors: dict[int, BaseException],
) -> None:
    failure: BaseException | None = None
    try:
        comm.world.begin(comm.rank)
        with default_group(comm):
            results[comm.rank] = fn(comm, *args)
    except BaseException as error:
        failure = errors[comm.rank] = error
    try:
        _leave_session(comm, failure)
    except Exception as error:
        errors.setdefault(comm.rank, error)
    finally:
        comm.free()
        comm.world.end(comm.rank)


def _leave_session(comm: LoopbackComm, failure: BaseException | None) -> None:
    # Leaving is a collective call, here as under MPI, but only after a strategy was made.
    session: Session | None = vars(comm).get("session")
    if session is not None and session.get_instance(CallState).closing_error is None:
        Lockstep(session).leave_program(get_exit_code(failure), failure)


def _explain_failure(
    stuck_ranks: list[int],
    errors: dict[int, BaseException],
    threads: list[threading.Thread],
    timeout: float,
) -> str:
    # In the order in which they failed; ranks that only heard of a failure come last.
    failed_ranks = sorted(errors, key=lambda rank: isinstance(errors[rank], RemoteError))
    texts = [f"{type(errors[rank]).__name__}: {errors[rank]}" for rank in failed_ranks]
    lines = shorten(
        [
            f"{ranks_text(ranks)} raised {text}"
            for text, ranks in group_by_key(texts, failed_ranks).items()
        ]
    )
    lines += [format_traceback(errors[rank]) for rank in failed_ranks[:1]]
    with reading_frames():
        frames = get_current_frames()
        for rank in stuck_ranks:
            lines.append(f"rank {rank} has not ended after {timeout:g} s; it is here:")
            frame = frames.get(threads[rank].ident or -1)
            lines += traceback.format_stack(frame) if frame is not None else []
    return "\n".join(lines)


def same(comm: Any, value: object, wanted: object = None) -> None:
    """Fail on every rank unless all ranks hold the same bits, and these equal `wanted`.

    Collective over `comm`. Cost: one handshake, with a digest of each leaf.

    Args:
      comm: An mpi4py intracommunicator or a `Comm`.
      value: Tree of arrays or numbers.
      wanted: A tree of the same structure with the right values, or None to compare ranks only.

    Raises:
      AssertionError: They differ; says on which ranks and in which leaf.
    """
    lockstep = Lockstep(Session.of_parent(comm))
    with lockstep.validating_collectively("same"):
        leaves, structure = pytree.flatten(select_local(value))
        paths = pytree.path_names(structure)
        arrays = [as_array(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
        difference = (
            _describe_difference(arrays, structure, select_local(wanted))
            if wanted is not None
            else ""
        )
        digests = b"".join(digest([array]) for array in arrays)
    payloads = lockstep.gather_payloads(f"same {pytree.describe(structure)}", digests)
    difference_texts = lockstep.gather_texts(difference.encode())
    for i, path in enumerate(paths):
        leaf_digests = [row[16 * i : 16 * i + 16] for row in payloads]
        differing_ranks = [
            rank for rank, cell in enumerate(leaf_digests) if cell != leaf_digests[0]
        ]
        if differing_ranks:
            raise AssertionError(
                f"{label(path)} differs from rank 0's on {ranks_text(differing_ranks)}."
            )
    messages = [
        f"rank {rank}: {text.decode()}" for rank, text in enumerate(difference_texts) if text
    ]
    if messages:
        raise AssertionError("\n".join(messages))


def _describe_difference(arrays: list[Any], structure: pytree.Structure, expected: object) -> str:
    expected_leaves, expected_structure = pytree.flatten(expected)
    tree_text, expected_text = pytree.describe(structure), pytree.describe(expected_structure)
    if tree_text != expected_text:
        return f"the tree is {tree_text}, expected {expected_text}"
    for array, expected_leaf, path in zip(
        arrays, expected_leaves, pytree.path_names(structure), strict=True
    ):
        if not np.array_equal(array, expected_leaf, equal_nan=is_inexact(array.dtype)):
            return f"{label(path)} is {array}, expected {expected_leaf}"
    return ""


@contextmanager
def inject(fault: str, comm: Any = None) -> Iterator[Injection]:
    """Make one rank fail in the calls of the body.

    All ranks make this call. It communicates only when a communicator is first used.
    For a whole job, without a change of its program, set ``MPISTRAT_FAULT`` to the same text; calls
    are then numbered as in the messages of mpistrat, from the start of the program.

    Args:
      fault: Pairs ``key=value`` with semicolons between them, such as
        ``rank=1;call=5;phase=proof;do=kill``:

        - ``rank``: the rank that fails.
        - ``call``: in which call of mpistrat, counted from 1 in the body. The end of ``run`` is one
          too.
        - ``phase``: ``before`` the call, which the other ranks do not notice (the default); in its
          ``proof``, the handshake; on the way into its ``payload``; ``after`` the first message
          of the payload has arrived, before it is used; in ``fn``, the function of
          ``run``, of which `call` then is the number; ``exit``, in the last handshake. Small
          values are sent in the handshake, and have no ``payload`` and no ``after``.
        - ``do``: ``raise`` an `InjectedError` or ``exit:K`` by ``sys.exit``, where the code of a
          program runs (``fn``, ``before``, ``after``); ``sleep:S`` seconds; ``bitflip``, in the
          arrived payload (``after``); ``kill``, ``stop`` or ``os_exit:K`` the process, which ranks
          that are threads refuse.
      comm: The ranks; None for the default ones.

    Yields:
      An object whose attribute ``happened`` says whether the fault happened on this rank.

    Raises:
      OptionError: The fault cannot be parsed, or cannot happen on these ranks.
      AssertionError: The body ended without the fault having happened.

    Example:
      >>> import mpistrat as ms
      >>> from mpistrat.testing import run_ranks
      >>> def program(comm):
      ...     strategy = ms.MirroredStrategy()
      ...     with inject("rank=1;call=1;do=raise"):
      ...         try:
      ...             strategy.run(lambda: ms.get_replica_context().all_reduce("sum", 1))
      ...         except RuntimeError as error:
      ...             return type(error).__name__
      >>> run_ranks(program, 3)
      ['RemoteError', 'InjectedError', 'RemoteError']
    """
    session = Session.of_parent(find_default_parent() if comm is None else comm)
    parsed_fault = parse_fault(fault, session.comm)
    if parsed_fault is None:
        raise ValueError("inject needs a fault, got an empty string.")
    injection = Injection(session, parsed_fault, skipped_call_count=session.calls)
    try:
        yield injection
    finally:
        injection.remove()
    if injection.is_failing_rank and not injection.happened and parsed_fault.phase != "exit":
        raise AssertionError(
            f"rank {parsed_fault.rank}: the fault {fault!r} has not happened; the body made "
            f"{session.calls - injection.skipped_call_count} calls."
        )
