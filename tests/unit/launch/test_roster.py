"""Which rank a signal has ended first, and what a job that failed has left."""

import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpistrat.config import mapped_shm_files
from mpistrat.launch import roster
from mpistrat.launch.plan import LaunchOptions
from mpistrat.launch.roster import EndedRank, Roster, announce_begin, sign_in
from mpistrat.launch.run import run

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_mapped_file_may_have_any_name(tmp_path):
    path = tmp_path / os.fsdecode(b"\xe9\xff")
    path.write_bytes(b"data")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 4, prot=mmap.PROT_READ):
        assert str(path) not in mapped_shm_files()  # it is not in /dev/shm


@pytest.fixture
def ranks():
    found = [subprocess.Popen(SLEEPS) for _ in range(2)]
    yield found
    for process in found:
        process.kill()
        process.wait()


def signs(directory, ranks, files=()):
    for rank, process in enumerate(ranks):
        told = {"rank": rank, "pid": process.pid, "files": [str(file) for file in files]}
        (directory / f"rank-{rank}").write_text(json.dumps(told))


def seen(found):
    """Wait until the roster has taken note of the end of a rank."""
    found._thread.join(240)
    assert not found._thread.is_alive()
    found.close()


@pytest.mark.parametrize(
    ("come", "told"),
    [((0,), "Rank 1 has not come to it"), ((0, 1), "All have come to it"), ((), "Ranks 0, 1 have")],
)
def test_ranks_that_do_not_come_out_of_the_start_of_mpi_are_spoken_of(
    come, told, ranks, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("MPISTRAT_WARN", "0.01")
    signs(tmp_path, ranks[:1])
    for number in come:
        (tmp_path / f"begins-{number}").touch()
    found = Roster(tmp_path, 2)
    said = ""
    while "MPISTRAT_TIMEOUT" not in said:
        said += capfd.readouterr().err
    found.close()
    assert f"1 of 2 ranks have started MPI. {told}" in said


@pytest.mark.parametrize("name", ["PMI_RANK", "OMPI_COMM_WORLD_RANK"])
def test_a_rank_says_that_it_begins_to_start_mpi(name, tmp_path, monkeypatch):
    for other in ("PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("MPISTRAT_RECORD", str(tmp_path / "exit-code"))
    monkeypatch.setenv(name, "3")
    announce_begin()  # where nobody waits for ranks of this host
    assert not list(tmp_path.iterdir())
    Roster(tmp_path, 0).close()
    announce_begin()
    assert (tmp_path / "begins-3").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_the_first_rank_that_a_signal_ends_is_named(number, ranks, tmp_path):
    signs(tmp_path, ranks)
    found = Roster(tmp_path, 2)
    while len(found._signed_in) < 2:
        time.sleep(0.01)
    ranks[1].send_signal(number)
    seen(found)  # as a zombie, or on a new system: nobody has waited for it
    assert found.find_first_ended(code=number) == [EndedRank(1, ranks[1].pid, number, 0, True)]


@pytest.mark.parametrize(
    ("code", "numbers", "first"),
    [
        (11, (9, 11, 9), [1]),  # one crashed, and MPICH's launcher ended the others
        (15, (9, 9, 6), [2]),  # the same; its code is all of theirs together
        (9, (9, -9, 15), [1]),  # -9: one ended by itself, with that code
        (17, (9, 15, 9), []),  # MPI_Abort(17), which says so itself
        (137, (9, 15, 15), [0]),  # one was killed, and Open MPI's launcher ended the others
    ],
)
def test_ranks_that_a_launcher_has_ended_are_not_named(code, numbers, first, tmp_path):
    found = Roster(tmp_path, 3)
    found.close()
    found._are_all_known = True
    ended = [-number << 8 if number < 0 else number for number in numbers]
    found._ended_ranks = [(rank, 100 + rank, status) for rank, status in enumerate(ended)]
    assert [one.rank for one in found.find_first_ended(code)] == first


def test_one_that_has_ended_before_it_was_looked_at_counts(ranks, tmp_path):
    ranks[0].kill()
    ranks[0].wait()
    signs(tmp_path, ranks)
    found = Roster(tmp_path, 2)
    seen(found)
    assert found.find_first_ended(code=9) == [EndedRank(0, ranks[0].pid, 9, 0, False)]
    assert found.find_first_ended(code=137) == [EndedRank(0, ranks[0].pid, 9, 0, False)]
    assert found.find_first_ended(code=3) == [EndedRank(0, ranks[0].pid, 0, 3, False)]


def test_a_rank_that_ends_by_itself_was_not_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import os; os._exit(9)"])
    signs(tmp_path, [process])
    found = Roster(tmp_path, 1)
    seen(found)
    assert process.wait() == 9
    # On an older system, with a parent that was quicker, the code of the launcher is all there is.
    sure = found._ended_ranks[0][2] is not None
    want = EndedRank(0, process.pid, *((0, 9) if sure else (9, 0)), sure)
    assert found.find_first_ended(code=9) == [want]


def test_nobody_is_named_while_ranks_may_have_died_on_other_hosts(ranks, tmp_path):
    signs(tmp_path, ranks[:1])
    found = Roster(tmp_path, 2)
    while not found._signed_in:
        time.sleep(0.01)
    ranks[0].kill()
    seen(found)
    assert found.find_first_ended(code=9) == []


def test_nobody_is_named_if_one_that_signs_in_later_may_have_been_the_first(ranks, tmp_path):
    signs(tmp_path, ranks[:1])
    found = Roster(tmp_path, 2)
    while not found._signed_in:
        time.sleep(0.01)
    ranks[0].kill()
    found._thread.join(240)
    signs(tmp_path, ranks)
    found.close()
    assert found.find_first_ended(code=9) == []


@pytest.mark.parametrize(
    ("begun", "come", "waited"),
    [(2000, 1, "to start MPI"), (5, 1, ""), (2000, 2, ""), (None, 0, "")],
)
def test_whether_ranks_have_waited_for_others_to_start_mpi(ranks, tmp_path, begun, come, waited):
    signs(tmp_path, ranks[:come])
    if begun is not None:
        (tmp_path / "begins-0").touch()
        os.utime(tmp_path / "begins-0", (time.time() - begun,) * 2)
    found = Roster(tmp_path, 2)
    found.close()
    assert found.describe_wait(1, None) == waited
    assert not found.describe_wait(0, None)


@pytest.mark.parametrize("code", [signal.SIGALRM, 128 + signal.SIGALRM])
def test_whether_ranks_have_waited_for_others_to_end(tmp_path, code):
    found = Roster(tmp_path, 0)
    found.close()
    assert found.describe_wait(code, 0).startswith("to end")
    assert not found.describe_wait(code, None)  # a timer of the program
    assert not found.describe_wait(code, 3)


@pytest.mark.parametrize(("left", "waited"), [(1700, False), (1900, True)])
def test_a_rank_that_ended_with_its_stack_printed_has_waited(tmp_path, left, waited):
    """It ends with 1, which faulthandler gives; so may one that has not waited as long."""
    for file, ago in (("begins-0", 9000), (roster.RECORD_NAME, left)):
        (tmp_path / file).touch()
        os.utime(tmp_path / file, (time.time() - ago,) * 2)
    found = Roster(tmp_path, 0)
    found.close()
    assert found.describe_wait(1, 0).startswith("to end") == waited
    assert not found.describe_wait(1, 1)


def test_a_rank_that_is_stopped_when_the_first_gives_up_is_named(ranks, tmp_path):
    signs(tmp_path, ranks)
    found = Roster(tmp_path, 2)
    while len(found._signed_in) < 2:
        time.sleep(0.01)
    ranks[1].send_signal(signal.SIGSTOP)
    (tmp_path / roster.RECORD_NAME).touch()
    while not found._stopped_ranks:
        time.sleep(0.01)
    ranks[0].send_signal(signal.SIGALRM)
    seen(found)
    assert found.describe_wait(signal.SIGALRM, 0).endswith("; rank 1 was stopped by a signal")


def test_only_what_ranks_have_mapped_is_removed(ranks, tmp_path):
    theirs, others = tmp_path / "mpich_shm_1", tmp_path / "mpich_shm_2"
    for file in (theirs, others):
        file.write_bytes(b"x")
    found = Roster(tmp_path, 2)
    signs(tmp_path, ranks, [theirs])
    found.close()
    assert not theirs.exists()
    assert others.exists()


def test_a_rank_signs_in_with_the_files_that_it_has_mapped(tmp_path):
    before = mapped_shm_files()
    path = Path("/dev/shm", f"mpistrat-test-{os.getpid()}")
    with path.open("wb+") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            new = mapped_shm_files() - before
            path.unlink()
            assert mapped_shm_files() == before  # nothing is left of it to remove
    assert new == {str(path)}
    sign_in(tmp_path, 3, new)  # where nobody waits for ranks of this host
    assert not list(tmp_path.iterdir())
    Roster(tmp_path, 0).close()
    sign_in(tmp_path, 3, new)
    told = json.loads((tmp_path / "rank-3").read_text())
    assert told == {"rank": 3, "pid": os.getpid(), "files": [str(path)]}
    sign_in(tmp_path / "of another host", 3, new)  # is not there, and that is not an error


def test_the_kernel_says_whether_memory_was_exhausted(monkeypatch, tmp_path):
    count = [3]
    monkeypatch.setattr(roster, "_count_oom_kills", lambda: count[0])
    found = Roster(tmp_path, 1)
    assert not found.has_run_out_of_memory
    count[0] += 1
    assert found.has_run_out_of_memory
    found.close()


KILLED = """
import os, signal
import mpistrat as ms
strategy = ms.MirroredStrategy()
if strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group).local == 1:
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
strategy.run(lambda: ms.get_replica_context().all_reduce("sum", 1))
"""


@pytest.mark.job
def test_run_names_the_rank_and_leaves_nothing_in_shared_memory(tmp_path, capfd, monkeypatch):
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    signed = []
    close = Roster.close

    def closes(self):
        close(self)
        signed.extend(self._files)

    monkeypatch.setattr(Roster, "close", closes)
    assert run(LaunchOptions(3), [str(program)], timeout=240) in (9, 137)
    # Where the launcher was quick to end others, or this process slow, these stand there as well.
    (line,) = [line for line in capfd.readouterr().err.splitlines() if " ended by signal" in line]
    assert "signal 9 (SIGKILL)" in line
    assert re.match(r"mpistrat: ranks? .*\b1 \(process \d+\)", line)
    assert not [file for file in signed if file.exists()]


def test_a_process_that_ends_has_given_its_memory_back():
    child = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert roster._has_freed_memory(child.pid)
    child.wait()
    assert roster._has_freed_memory(child.pid)
    assert not roster._has_freed_memory(os.getpid())
