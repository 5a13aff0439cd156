"""The stand-in for ``sys.exit``; `tests/faults/test_leaving.py` holds the codes of programs."""

from __future__ import annotations

import json
import pickle
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm.loopback import LoopbackComm
from mpistrat.comm.mpi import MPIComm
from mpistrat.config import Options, passes_on_exit_code
from mpistrat.lockstep import ending, exits, mismatch, ranks, startup
from mpistrat.lockstep.exits import Exits, NotedExit
from mpistrat.lockstep.shutdown import extract_exit_text
from mpistrat.shm.arena import SharedMemory
from mpistrat.shm.storage import StorageFactory
from mpistrat.strategy import shared_state
from mpistrat.testing import RanksFailed, run_ranks


def raised(status):
    with pytest.raises(SystemExit) as found:
        Exits().exit(status)
    return found.value


@pytest.mark.parametrize("status", [None, 0, 3, "text", (1, 2)])
def test_it_is_a_system_exit_like_any_other(status):
    error, usual = raised(status), SystemExit(status)
    assert (error.code, error.args, str(error), repr(error)) == (
        *(usual.code, usual.args, str(usual), repr(usual)),
    )
    error.code = 7
    assert error.code == 7
    assert type(pickle.loads(pickle.dumps(error))) is SystemExit
    assert type(error) is NotedExit


def test_another_thread_raises_what_python_passes_over():
    kinds = []

    def work():
        try:
            Exits().exit(3)
        except SystemExit as error:
            kinds.append(type(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert kinds == [SystemExit]


def test_who_it_is_and_the_traceback_are_one_piece(monkeypatch):
    """Lines that two ranks print at once would be mixed."""
    pieces = []
    ways = Exits()
    ways._excepthook = sys.__excepthook__
    ways.failure = ValueError("mine")
    stream = SimpleNamespace(write=lambda text: text and pieces.append(text), flush=lambda: None)
    monkeypatch.setattr(sys, "stderr", stream)
    ways._print_failure("mpistrat: on rank 1 of 2:\n")
    assert pieces == ["mpistrat: on rank 1 of 2:\nValueError: mine\n"]


FAILED = ValueError("lost")


@pytest.mark.parametrize(
    ("left", "planned"),
    [
        ([(42, SystemExit(42))] * 3, True),
        ([(0, None)] * 3, False),
        ([(42, SystemExit(42)), (42, SystemExit(42)), (3, SystemExit(3))], False),
        ([(42, SystemExit(42)), (0, None), (42, SystemExit(42))], False),
        ([(1, FAILED)] * 3, False),
    ],
)
def test_ranks_that_leave_with_one_code_have_planned_it(left, planned):
    def program(comm):
        lockstep = ms.MirroredStrategy()._replicas.lockstep
        return lockstep.leave_program(*left[comm.rank]).is_planned

    assert run_ranks(program, 3) == [planned] * 3


HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_ID": "0"}
SRUN |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "PMI_RANK": "0"}


@pytest.mark.parametrize(
    ("env", "passes"),
    [
        (SRUN, True),
        (HYDRA, False),
        ({**SRUN, **HYDRA}, False),  # Hydra inside an allocation
        ({"OMPI_COMM_WORLD_SIZE": "2", "MPI_LOCALNRANKS": "2"}, True),
        ({}, False),
    ],
)
def test_launchers_that_pass_on_the_code_of_the_last_rank(env, passes):
    assert passes_on_exit_code(env) is passes


class Unprintable(Exception):
    """As one may be whose text asks a service that is not there."""

    def __init__(self, how):
        """Take what making its text raises."""
        self.how = how

    def __str__(self):
        """Fail."""
        raise self.how


@pytest.mark.parametrize("how", [ValueError(), SystemExit(3), KeyboardInterrupt()])
def test_what_has_no_text_is_told_nevertheless(how):
    told = json.loads(mismatch.encode_report(Unprintable(how)))
    assert told["text"] == f"<no text: its __str__ raised {type(how).__name__}>"
    assert "Unprintable" in told["traceback"]
    assert extract_exit_text(SystemExit(Unprintable(how))) == told["text"]


def test_a_traceback_that_another_thread_disturbs_is_made_again(monkeypatch):
    once, formatted = (
        iter([SystemError("AST constructor recursion depth")]),
        traceback.format_exception,
    )

    def disturbed(error):
        for failure in once:
            raise failure
        return formatted(error)

    monkeypatch.setattr(traceback, "format_exception", disturbed)
    assert (
        json.loads(mismatch.encode_report(ValueError("no rows")))["traceback"]
        == "ValueError: no rows\n"
    )


def test_a_hook_that_exits_has_printed(monkeypatch, capsys):
    found = Exits()
    found._excepthook = lambda kind, value, trace: (print(f"mine {value}"), sys.exit(3))
    found.failure = ValueError("why")
    found._print_failure()
    assert capsys.readouterr() == ("mine why\n", "")


def test_a_rank_does_not_leave_before_its_watching_thread_runs(monkeypatch):
    """Python 3.11.2 ends by SIGSEGV if a thread first runs while Python frees its state."""
    process_exits, watched_codes = Exits(), []

    def start_late(function, arguments):
        threading.Timer(0.2, function, arguments).start()

    def watch(code, is_watching, have_left):
        watched_codes.append(code)
        is_watching.set()

    monkeypatch.setattr(exits._thread, "start_new_thread", start_late)
    monkeypatch.setattr(process_exits, "_watch_leaving", watch)
    assert not process_exits._start_watching(3).is_set()
    assert watched_codes == [3]


class False_(Exception):
    """As one that is a collection, and empty, or asks its fields."""

    def __bool__(self):
        """Be false, or fail."""
        if self.args:
            raise ValueError
        return False


@pytest.mark.parametrize("failure", [False_(), False_("odd")])
def test_what_is_false_is_a_failure_too(failure, monkeypatch, capsys):
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    found = Exits()
    found._excepthook = sys.__excepthook__
    found.failure = failure
    found.at_exit()
    assert found.failure is failure
    assert "False_" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hands_on", "fails", "printed"), [(False, False, 0), (True, False, 1), (False, True, 1)]
)
def test_the_programs_own_hook_is_told_by_the_runner_too(
    monkeypatch, capsys, hands_on, fails, printed
):
    found, told = Exits(), []
    found._excepthook = sys.__excepthook__

    def hook(*failure):
        told.append(failure[1])
        if hands_on:
            found.note_uncaught(*failure)
        if fails:
            raise RuntimeError("in the hook")

    monkeypatch.setattr(sys, "excepthook", hook)
    error = ValueError("what has happened")
    found.handle_end(error)
    found._print_failure()
    assert told == [error]
    assert found.failure is error
    assert capsys.readouterr().err.count("ValueError: what has happened") == printed


def test_no_hook_is_told_of_sys_exit(monkeypatch):
    found, told = Exits(), []
    monkeypatch.setattr(sys, "excepthook", lambda *failure: told.append(failure))
    found.handle_end(SystemExit(3))
    assert not told


def test_a_handler_of_a_signal_that_exits_inside_a_call_ends_the_job_with_its_code(monkeypatch):
    codes = []
    monkeypatch.setattr(ending, "end_job", codes.append)
    comm = SimpleNamespace(size=2, rank=1, name=MPIComm.name)
    none = SimpleNamespace(common_error=None)
    lockstep = SimpleNamespace(
        comm=comm, session=SimpleNamespace(comm=comm), state=none, ranks=range(2)
    )
    with pytest.raises(SystemExit), ending.aborting(lockstep, "all_reduce"):
        sys.exit(43)
    assert codes == [43]


class TimeIsUp(Exception):
    pass


class LittleMemory:
    """NumPy, as modules see it, which has no memory on rank 1."""

    def __getattr__(self, name):
        if name in ("empty", "concatenate") and threading.current_thread().name == "rank 1":
            raise MemoryError
        return getattr(np, name)


def by_a_handler(strategy):
    strategy.extended.broadcast_to(np.ones(3), "/cpu:0")


def without_memory_for_texts(strategy):
    strategy._replicas.lockstep.gather_texts(b"a text")


def without_memory_for_a_message(strategy):
    strategy.broadcast([np.ones(3), np.ones(4)])


@pytest.mark.parametrize(
    "raised", [by_a_handler, without_memory_for_texts, without_memory_for_a_message]
)
def test_what_is_raised_while_a_call_moves_data_ends_the_job(raised, monkeypatch, capsys):
    codes, move = [], LoopbackComm.bcast

    def bcast(comm, buffer, root):
        move(comm, buffer, root)
        if comm.rank == 1:
            raise TimeIsUp

    def program(comm):
        threading.current_thread().name = f"rank {comm.rank}"
        raised(ms.MirroredStrategy())

    monkeypatch.setattr(ending, "end_job", codes.append)
    monkeypatch.setattr(ending.mpi, "MPIComm", LoopbackComm)
    monkeypatch.setattr(LoopbackComm, "bcast", bcast)
    monkeypatch.setattr(ranks, "np", LittleMemory())
    monkeypatch.setattr(shared_state, "np", LittleMemory())
    with pytest.raises(RanksFailed):
        run_ranks(program, 2)
    assert codes[0] == 1
    assert "mpistrat: rank 1 of 2 failed inside" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "method"), [(StorageFactory, "make"), (SharedMemory, "block")])
def test_what_is_raised_while_ranks_make_memory_ends_the_job(monkeypatch, capsys, kind, method):
    def fails(*_):
        raise MemoryError

    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            ms.Variable(1.0) if kind is StorageFactory else strategy.buffers([np.ones(3)])

    codes = []
    monkeypatch.setattr(ending, "end_job", codes.append)
    monkeypatch.setattr(ending.mpi, "MPIComm", LoopbackComm)
    monkeypatch.setattr(kind, method, fails)
    with pytest.raises(RanksFailed, match="MemoryError"):
        run_ranks(program, 2)
    assert codes == [1, 1]
    assert "mpistrat: rank 1 of 2 failed inside" in capsys.readouterr().err


@pytest.mark.parametrize("first", [True, False])
def test_what_is_raised_while_ranks_meet_ends_the_job(monkeypatch, capsys, first):
    """Before the first session has its last handshake nothing else would tell the others."""

    def on(*_):
        raise MemoryError("no room for the page, or for the thread that limits the wait")

    comm, codes = MPIComm.__new__(MPIComm), []
    comm.rank, comm.size, comm.mpi = 1, 2, None
    monkeypatch.setattr(startup, "_watching_parent", on if first else lambda *_: nullcontext())
    monkeypatch.setattr(ending, "end_job", codes.append)
    monkeypatch.setattr(startup, "exits", MagicMock())
    monkeypatch.setattr(startup, "_get_whole_job", lambda comm: None)
    monkeypatch.setattr(MPIComm, "allreduce", lambda *_: None)
    monkeypatch.setattr(startup.WatchedBoard, "open", on)
    session = SimpleNamespace(
        comm=comm, is_initialized=False, board=None, describe_other_sessions=None
    )
    none = SimpleNamespace(common_error=None)
    with pytest.raises(MemoryError):
        startup.begin_session(
            SimpleNamespace(session=session, comm=comm, state=none, ranks=range(2))
        )
    assert codes == [1]
    assert "rank 1 of 2 failed inside the first strategy" in capsys.readouterr().err


class Signs:
    """The board of a session, by seconds before now."""

    def __init__(self, moved, still, idle, has_groups=False):
        now = time.monotonic_ns()
        self._moved, *self._signs = (now - int(x * 1e9) for x in (moved, still, idle))
        self.has_groups = lambda: has_groups

    def last_move(self):
        return self._moved

    def signs(self):
        return tuple(self._signs)


@pytest.mark.parametrize(
    ("group", "has_groups", "moved", "still", "idle", "quiet", "patience"),
    [
        (0, False, 40, 1, 1, 40, 30),  # one group: it may compute, but others wait for it
        (2, False, 40, 1, 1, 1, 1800),
        (0, True, 40, 1, 1, 1, 1800),  # this rank failed before it had a group
        (2, False, 40, 40, 40, 40, 30),
        (2, False, 40, 40, 1, 40, 1800),  # it computes, or polls
        (2, False, 5, 40, 40, 5, 30),
        (4, False, 40, 1, 1, 40, 30),  # a second communicator of all ranks is no group
    ],
)
def test_how_long_others_may_be_quiet(group, has_groups, moved, still, idle, quiet, patience):
    leaving = Exits()
    options = Options(grace=30.0, timeout=1800.0)
    for size in (4, group):
        board = Signs(moved, still, idle, has_groups)
        comm = SimpleNamespace(size=size)
        leaving.sessions.append(SimpleNamespace(comm=comm, board=board, options=options))
    del leaving.sessions[1 + bool(group) :]
    seconds, limit, name = leaving._measure_quiet(time.monotonic_ns() - int(60e9))
    assert abs(seconds - quiet) < 0.5
    assert (limit, name) == (patience, "MPISTRAT_GRACE" if patience == 30 else "MPISTRAT_TIMEOUT")


def test_who_gives_up_stops_its_watchdogs_first(monkeypatch):
    events = []
    leaving = Exits()
    for name in ("all", "group"):
        board = SimpleNamespace(stop_watching=lambda name=name: events.append(name))
        leaving.sessions.append(SimpleNamespace(comm=SimpleNamespace(rank=0, size=2), board=board))
    monkeypatch.setattr(exits, "say", lambda text: events.append(text.split(" for ")[-1]))
    monkeypatch.setattr(exits, "end_job", events.append)
    leaving._give_up(3, "2 s (MPISTRAT_GRACE)")
    assert events == ["all", "group", "2 s (MPISTRAT_GRACE); ending the job.", 3]
