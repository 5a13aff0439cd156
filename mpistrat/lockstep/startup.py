"""The beginning of a session, when the first strategy of a communicator is made.

`begin_session` arms the ways out of the process, opens the status board, and makes the first
handshake, which compares versions and options of all ranks (`PreflightError`, exit code 78).
`watching_meeting` limits the time in which ranks meet before there is a board.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NoReturn

import numpy as np

from mpistrat import config
from mpistrat.comm.base import Comm
from mpistrat.comm.callsite import find_call_site, group_by_key, ranks_text, shorten
from mpistrat.comm.mpi import MPIComm, ranks_of, world_size
from mpistrat.comm.session import Session, check_not_child, find_default_parent, find_torchrun_error
from mpistrat.config import (
    KEEP_THREADS,
    MASK_BYTES,
    PREFIX,
    Options,
    affinity_mask,
    complete_masks,
    cores_of_rank,
    cpu_quota,
    find_versions,
    has_thread_variable,
    job_size,
    launched_by,
    node_size,
    ranks_sharing_cores,
    threads_of_rank,
)
from mpistrat.errors import OptionError, PreflightError
from mpistrat.kernels.threads import Team, limit_threads
from mpistrat.lockstep.ending import aborting
from mpistrat.lockstep.exits import exits
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.inject import Injection, parse_fault
from mpistrat.watchdog.observer import HUNG, Limits
from mpistrat.watchdog.status_board import say
from mpistrat.watchdog.watchdog import WatchedBoard, end_stuck_job

_PACKAGES = ("mpistrat", "numpy", "numba", "mpi4py", "optree")
# Options that may differ between ranks: for files of rank 0, and for the terminal.
_PERSONAL = frozenset({"record", "terminal", "traceback"})
# The purpose of the ranks while they open the status board.
_FIRST = "make a strategy, or call init_process_group"
_OTHER_RANKS_SECONDS = 5.0  # for which ranks wait for the first or the last one to end the job
_UNKNOWN = "It is not known which ranks are missing; one may have failed earlier."


@functools.cache
def _versions() -> dict[str, str]:
    installed_versions = find_versions(_PACKAGES)
    return {"Python": platform.python_version()} | {
        name: installed_versions.get(name, "not installed") for name in _PACKAGES
    }


def collect_facts(session_options: Options) -> dict[str, str]:
    """Return the facts that all ranks must share: versions, and options that change results.

    Cost: some milliseconds, the first time.
    """
    return _versions() | {
        f"{PREFIX}{name.upper()}": str(value)
        for name, value in dataclasses.asdict(session_options).items()
        if name not in _PERSONAL
    }


def compare_facts(lockstep: Lockstep) -> None:
    """Compare the facts of all ranks.

    Collective. Cost: one handshake, unless they differ.

    Raises:
      PreflightError: They differ; on every rank, with a table.
    """
    own_facts = json.dumps(collect_facts(lockstep.options)).encode()
    messages = lockstep.compare_payloads("preflight", own_facts)
    if messages is not None:
        _raise_differences(lockstep, [json.loads(message) for message in messages])


def _raise_differences(lockstep: Lockstep, facts_of_ranks: list[dict[str, str]]) -> NoReturn:
    lines = ["the ranks of this job do not run the same thing:"]
    for name in facts_of_ranks[0]:
        values = [facts.get(name, "unknown") for facts in facts_of_ranks]
        ranks_by_value = group_by_key(values, range(len(values)))
        if len(ranks_by_value) > 1:
            value_texts = shorten(
                [f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_by_value.items()]
            )
            lines.append(f"  {name}: {'; '.join(value_texts)}")
    lines.append("  Start all ranks in one environment, with the same MPISTRAT_* variables.")
    lockstep.raise_on_all_ranks(PreflightError("\n".join(lines)))


def begin_lockstep(comm: Any = None) -> Lockstep:
    """Return the lockstep of all ranks of a communicator, with its session begun. Collective.

    Args:
      comm: An mpi4py intracommunicator or a `Comm`; None for the world.
    """
    exits().kept_interrupt.arm()  # from the start of MPI on the others wait for this rank
    if comm is not None and not isinstance(comm, Comm):
        check_not_child()
    parent = find_default_parent() if comm is None else comm
    lockstep = Lockstep(Session.of_parent(parent, _watching_parent))
    if lockstep.session.is_initialized:
        _warn_of_late_options(lockstep)
    begin_session(lockstep)
    return lockstep


def _warn_of_late_options(lockstep: Lockstep) -> None:
    """Warn, on replica 0, of options that were set after they had been read."""
    if lockstep.comm.rank:
        return
    used_options = dataclasses.asdict(lockstep.session.options)
    try:
        current_options = dataclasses.asdict(config.read_options())
        changed_names = ", ".join(
            f"{PREFIX}{n.upper()}"
            for n, value in current_options.items()
            if value != used_options[n]
        )
    except OptionError as error:
        changed_names = f"{error} It"
    if changed_names:
        text = (
            f"{changed_names} changed after the options had been read, which `mpistrat run` does "
            "before the program begins, so this has no effect. Set it in the environment of the "
            "job."
        )
        warnings.warn(text, RuntimeWarning, stacklevel=5)


def _watching_parent(parent: Any, purpose: str = "make a strategy") -> AbstractContextManager[None]:
    # Else it knows nothing of parts of the job, or has started it already.
    is_whole_job = Session.find_largest_size() == 1 and parent.size == world_size()
    advice = f" `mpistrat run -n {parent.size}` names it, and ends the job at once."
    return watching_meeting_of(parent.rank, ranks_of(parent), purpose, advice * is_whole_job)


def watching_meeting_of(
    rank: int, in_job: Sequence[int], purpose: str, advice: str = ""
) -> AbstractContextManager[None]:
    """Return a context for calls of MPI in which ranks meet before the watchdog sees them.

    Args:
      rank: The number of this rank among them.
      in_job: Their numbers in the job.
      purpose: Their purpose, in words, such as "make a strategy".
      advice: A hint for finding those that do not come.
    """
    size = len(in_job)
    rank_text = f"rank {rank} of {size}"
    if list(in_job) != list(range(size)):
        rank_text += f" (rank {in_job[rank]} of the job)"
    return watching_meeting(
        rank, size, rank_text, advice, _limits(config.read_or_default()), purpose=purpose
    )


@contextmanager
def watching_meeting(
    rank: int,
    size: int,
    rank_text: str,
    advice: str,
    limits: Limits,
    *,
    clock: Callable[[], float] = time.monotonic,
    purpose: str = "make a strategy",
) -> Iterator[None]:
    """Run the body, in which all ranks meet; warn if it takes long, and end the job at last.

    It is not known yet which rank is missing, so the first rank and the last one warn.

    Args:
      rank: The number of this rank.
      size: How many ranks meet. A single rank does not wait.
      rank_text: This rank, in words.
      advice: A hint for finding the missing ones; may be empty.
      limits: The times after which it warns, and ends the job.
      clock: Returns the time in seconds.
      purpose: The purpose of all ranks, in words.
    """
    if size == 1:
        yield
        return
    meeting_over = threading.Event()
    call_site = find_call_site()
    wait_text = (
        f"mpistrat: {rank_text} has waited {{:g}} s in {call_site} for all of them to {purpose}."
    )
    warning = f"{wait_text.format(limits.warn)} {_UNKNOWN}{advice}"
    ending = (
        f"{wait_text.format(limits.timeout)} The job ends with exit code {HUNG}; MPISTRAT_TIMEOUT "
        "changes that."
    )

    def watch() -> None:
        _watch_meeting(meeting_over, limits, warning, ending, rank in (0, size - 1), clock=clock)

    with suppress(RuntimeError):  # no thread can be started any more
        threading.Thread(target=watch, name="mpistrat meeting", daemon=True).start()
    try:
        yield
    finally:
        meeting_over.set()


def _watch_meeting(
    meeting_over: threading.Event,
    limits: Limits,
    warning: str,
    ending: str,
    is_speaker: bool,
    *,
    clock: Callable[[], float],
) -> None:
    """Print a warning if a meeting takes long, and end the job at last; the body of a thread."""
    wait_start = last_time = clock()
    has_warned = not is_speaker
    while not meeting_over.wait(limits.tick):
        current_time = clock()
        if current_time - last_time > limits.stale:  # it stood still, so perhaps all did
            wait_start = current_time
        last_time, waited_seconds = current_time, current_time - wait_start
        if not has_warned and waited_seconds >= limits.warn:
            has_warned = True
            say(warning)
        if waited_seconds >= limits.timeout + (0 if is_speaker else _OTHER_RANKS_SECONDS):
            say(ending)
            end_stuck_job(HUNG)
            return


def _limits(session_options: Options) -> Limits:
    # The ranks that are named when the job ends have been named before.
    return Limits(
        warn=min(session_options.warn, session_options.timeout / 2), timeout=session_options.timeout
    )


def begin_session(lockstep: Lockstep) -> None:
    """Watch the ranks, compare their facts, and lead their ways out through the last handshake.

    Collective at the first call for a session, if that has more than one rank.

    Raises:
      OptionError: A variable ``MPISTRAT_*`` cannot be used.
      PreflightError: The ranks run different versions or options, or have not found each other.
    """
    session = lockstep.session
    if session.is_initialized:
        return
    is_parallel = session.comm.size > 1
    _arm_first(session.comm)
    failure: Exception | None = None
    fault = None
    try:
        session.options = config.read_options()
        fault = parse_fault(session.options.fault, _get_whole_job(session.comm))
    except OptionError as error:
        # Not raised yet: the ways out come first, or the other ranks would never learn of it.
        failure = error
    if isinstance(session.comm, MPIComm):
        if is_parallel and not isinstance(session.board, WatchedBoard):
            _open_board(lockstep, session.comm)
        # This comes after the board: the last handler is called first at exit.
        exits().arm(session)
        if failure is None:
            failure = _find_rank_count_error(session.options.ranks, world_size())
    if fault is not None and _get_whole_job(session.comm):
        Injection(session, fault)
    if failure is not None or is_parallel:
        lockstep.handshake("read the options", failure=failure)
    if is_parallel:
        compare_facts(lockstep)
    _divide_cores(session)
    session.is_initialized = True


def _open_board(lockstep: Lockstep, comm: MPIComm) -> None:
    """Open the status board of a session, and start its watchdog. Collective."""
    session, limits = lockstep.session, _limits(lockstep.session.options)
    is_launched = launched_by() is not None
    # No last handshake reaches the others yet, and no watchdog sees ranks that do not come.
    with aborting(lockstep, "the first strategy"), _watching_parent(comm.mpi, _FIRST):
        # The options are not compared yet, and all ranks have to find their nodes in one way.
        ranks_per_node = np.array([session.options.ranks_per_node])
        comm.allreduce(ranks_per_node.copy(), ranks_per_node, "MIN")
        session.board = WatchedBoard.open(
            comm, limits, int(ranks_per_node[0]), is_launched, session.describe_other_sessions
        )


def _arm_first(comm: Comm) -> None:
    """Keep Ctrl-C for the calls of this process; without MPI only arm the exception hook."""
    if isinstance(comm, MPIComm):
        exits().kept_interrupt.arm(comm.size > 1)
    elif comm.size == 1:
        exits().arm_alone()


def _find_rank_count_error(requested_size: int, size: int) -> PreflightError | None:
    """Return the error if a launcher has started more ranks than have found each other."""
    if not requested_size and (error := find_torchrun_error(size)) is not None:
        return error
    started = requested_size or (job_size() or 1 if size == 1 else size)
    if started == size:
        return None
    return PreflightError(
        f"{started} ranks were started, but MPI says that this job has {size}: launcher and "
        "MPI library do not fit together, so each rank is a job of its own. Under srun use "
        "the PMI of the library: --mpi=pmi2 for MPICH, MVAPICH and Intel MPI, --mpi=pmix "
        "for Open MPI. `mpistrat run` chooses launcher and options, `mpistrat doctor` shows "
        "both. If jobs of one rank are intended, set MPISTRAT_RANKS=1."
    )


def _divide_cores(session: Session) -> None:
    """Give kernels, BLAS and other libraries their threads. Collective, once in a session."""
    masks, rank = _node_masks(session.comm)
    threads = session.options.threads or threads_of_rank(masks, rank, cpu_quota())
    session.team = Team(threads) if threads > 1 else None
    if isinstance(session.comm, MPIComm):
        _limit_libraries(session, masks, rank)


def _node_masks(comm: Comm) -> tuple[list[int], int]:
    """Return the cores of each rank of this node, and the number of this rank. Collective."""
    if not isinstance(comm, MPIComm):  # threads of one process, which may use the same cores
        return [affinity_mask()] * comm.size, comm.rank
    node = comm.by_node()
    own_mask = np.frombuffer(affinity_mask().to_bytes(MASK_BYTES, "little"), np.uint8)
    all_masks = np.empty((node.size, MASK_BYTES), np.uint8)
    node.allgather(own_mask, all_masks)
    masks, rank = [int.from_bytes(mask.tobytes(), "little") for mask in all_masks], node.rank
    if node is not comm:
        node.free()
    return masks, rank


# The share of a rank whose cores no other rank uses: no limit.
_ALL_CORES = np.iinfo(np.int64).max


def _limit_libraries(session: Session, masks: Sequence[int], rank: int) -> None:
    """Give libraries that multiply matrices this rank's share of the cores. Collective.

    It is the least share of all ranks: another number of threads rounds products in another way,
    and results that cross-replica code computes on every rank must have the same bits.

    Args:
      session: The session, whose options are equal on all ranks.
      masks: The cores of each rank of the session on this node.
      rank: The number of this rank among them.
    """
    thread_option = session.options.blas_threads
    if thread_option == KEEP_THREADS:
        return
    if thread_option:
        limit_threads(thread_option)
        return
    masks = complete_masks(masks, rank, node_size(), os.cpu_count() or 1)
    share = (
        cores_of_rank(masks, rank, cpu_quota())
        if len(ranks_sharing_cores(masks, rank)) > 1
        else _ALL_CORES
    )
    count = session.comm.reduce_integer(share, "MIN")
    if (
        count < _ALL_CORES
        and not has_thread_variable()
        and limit_threads(count)
        and not session.comm.rank
    ):
        say(
            f"mpistrat: BLAS, OpenMP and PyTorch use at most {count} thread{'s' * (count > 1)} in "
            "each rank, its share of the cores; OMP_NUM_THREADS, or MPISTRAT_BLAS_THREADS=keep, "
            "changes that."
        )


def _get_whole_job(comm: Comm) -> Comm | None:
    """Return `comm` if it has all ranks of the job, which ``MPISTRAT_FAULT`` counts; else None."""
    return comm if isinstance(comm, MPIComm) and comm.size == world_size() else None
