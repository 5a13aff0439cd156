"""Processes, from tables that stand for /proc."""

import errno
import os
import signal
from pathlib import Path

import pytest

from mpistrat.watchdog.processes import (
    LauncherProcesses,
    Process,
    has_signal_handler,
    is_process_finished,
    read_process,
)


def p(parent, name, start_ticks=1, state="S"):
    return Process(state, parent, start_ticks, name)


TREES = {
    # What was started, and which of its ancestors are launchers.
    "mpich": ({9: p(8, "python3"), 8: p(7, "hydra_pmi_proxy"), 7: p(3, "mpiexec.hydra"),
               3: p(1, "bash"), 1: p(0, "init")}, {8, 7}),
    "open mpi": ({9: p(7, "python3"), 7: p(3, "mpirun"), 3: p(1, "bash"), 1: p(0, "init")}, {7}),
    "a wrapper": ({9: p(8, "python3"), 8: p(7, "bash"), 7: p(3, "hydra_pmi_proxy"),
                   3: p(1, "sshd"), 1: p(0, "init")}, {7}),
    "srun": ({9: p(7, "python3"), 7: p(1, "slurmstepd"), 1: p(0, "init")}, {7}),
    "mpirun in a batch script": ({9: p(7, "python3"), 7: p(6, "mpirun"), 6: p(5, "bash"),
                                  5: p(1, "slurmstepd"), 1: p(0, "init")}, {7}),
}  # fmt: skip


@pytest.mark.parametrize(("table", "launchers"), TREES.values(), ids=TREES)
def test_launchers_and_nothing_else_are_watched(table, launchers):
    for pid in table.keys() - {9}:
        for gone in (None, table[pid]._replace(state="Z"), table[pid]._replace(start_ticks=2)):
            now = dict(table)
            launcher = LauncherProcesses(9, lambda: table[9].parent_pid, now.get)
            assert not launcher.is_any_gone()
            now[pid] = gone
            assert launcher.is_any_gone() == (pid in launchers)


def test_a_name_is_any_bytes():
    comm, before = Path("/proc/self/comm"), read_process(os.getpid())
    # SIGINT has none where a shell has begun the tests in the background.
    previous_handler = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    comm.write_bytes(b"\xe9\xff) R")
    try:
        assert read_process(os.getpid()) == before._replace(
            name=os.fsdecode(b"\xe9\xff) R"), state="R"
        )
        assert has_signal_handler(os.getpid(), signal.SIGUSR2)
    finally:
        comm.write_text(before.name)
        signal.signal(signal.SIGUSR2, previous_handler)


def test_without_a_known_launcher_the_parent_counts():
    table = {9: p(7, "python3"), 7: p(1, "strange"), 1: p(0, "init")}
    parents = [7]
    launcher = LauncherProcesses(9, lambda: parents[0], table.get)
    assert not launcher.is_any_gone()
    parents[0] = 1
    assert launcher.is_any_gone()


def test_without_proc_the_parent_counts():
    parents = [7]
    launcher = LauncherProcesses(9, lambda: parents[0], lambda pid: None)
    assert not launcher.is_any_gone()
    parents[0] = 1
    assert launcher.is_any_gone()


def test_this_process_is_found_and_a_past_one_is_not():
    mine = read_process(os.getpid())
    assert mine is not None
    assert mine.parent_pid == os.getppid()
    assert not is_process_finished(mine, mine.start_ticks)
    assert is_process_finished(mine, mine.start_ticks + 1)
    assert read_process(2**22 + 1) is None


def test_what_cannot_be_looked_at_has_not_ended(monkeypatch):
    """As by a process that has no file descriptor left; its job was ended as if alone."""
    mine, launcher = read_process(os.getpid()), LauncherProcesses(os.getpid(), os.getppid)

    def none_left(path, *args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(Path, "read_bytes", none_left)
    assert not is_process_finished(read_process(os.getpid()), mine.start_ticks)
    assert not launcher.is_any_gone()
    assert not LauncherProcesses(os.getpid(), os.getppid).is_any_gone()
