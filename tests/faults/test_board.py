"""Jobs in which a rank does not arrive: who is named, how the job ends, and when.

Each job runs with a warning after 1 s and an end after T = 2 s. The figure to reach is T + 2 s
after the fault; it is printed. The assertions only tell a job that ends from one that hangs.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MPIEXEC = Path(sys.executable).with_name("mpiexec")
JOB = HERE / "programs" / "board_job.py"
T = 2.0
SLACK = 120.0  # seconds that a loaded machine may add

pytestmark = [
    pytest.mark.job,
    pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec in this environment"),
]


def is_open_mpi():
    told = subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in told.stdout or "PRRTE" in told.stdout


def command(size, program, *args):
    """Return how to start a job, and its environment."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPISTRAT_WARN": "1", "MPISTRAT_TIMEOUT": str(T)}
    flags = []
    if is_open_mpi():
        flags = ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
        env |= {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
    start = [str(MPIEXEC), *flags, "-n", str(size), sys.executable, str(program), *map(str, args)]
    return start, env


class Job:
    """A running job whose standard output and error are read from files."""

    def __init__(self, tmp_path, size, program, *args, **env):
        start, base = command(size, program, *args)
        self.out, self.err = tmp_path / "out", tmp_path / "err"
        self.files = files()
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(start, stdout=out, stderr=err, env=base | env)
        self.seconds = 0.0

    def wait_for(self, pattern, seconds=120.0):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = re.findall(pattern, self.out.read_text())
            if found:
                return found
            time.sleep(0.02)
        self.process.kill()
        raise AssertionError(f"{pattern!r} was not printed: {self.said()}")

    def pids(self, size):
        self.wait_for(rf"(?s)(?:rank \d+ is \d+.*){{{size}}}")
        return {int(r): int(p) for r, p in re.findall(r"rank (\d+) is (\d+)", self.out.read_text())}

    def end(self, seconds=T + 2 + SLACK):
        """Wait for the end and return the exit code; a job that does not end is a failure."""
        fault = float(self.wait_for(r"fault at ([\d.]+)")[0])
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the job did not end: {self.said()}") from None
        self.seconds = time.time() - fault
        return code

    def said(self):
        return self.out.read_text() + self.err.read_text()


def line_of(marker):
    """Return ``file:line`` of the line of the program with that comment."""
    lines = JOB.read_text().splitlines()
    return f"{JOB.name}:{next(n for n, text in enumerate(lines, 1) if text.endswith(marker))}"


def own_memory(before):
    """Return whether anything is left; others on this machine may have files there for a while."""
    end = time.monotonic() + SLACK
    while (left := files() - before) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def files():
    room = Path("/dev/shm")
    return set(room.glob("mpistrat*")) if room.is_dir() else set()


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def gone(pids, seconds):
    """Return the seconds after which all processes are gone, or fail."""
    start = time.monotonic()
    while any(map(alive, pids)):
        assert time.monotonic() - start < seconds, f"still alive: {[p for p in pids if alive(p)]}"
        time.sleep(0.01)
    return time.monotonic() - start


@pytest.fixture
def figure(record_property, capsys):
    def note(what, value, limit):
        record_property(what, value)
        with capsys.disabled():
            print(f"\n  {what}: {value:.2f} s (to reach: {limit:g} s)", end="")

    return note


CASES = {
    "sleeping": "sleeping",
    "computing": "computing",
    "holding": "holds the GIL",
    "overdue": "over the time declared for 'evaluate'",
}


def one_of_two(shown):
    """Ranks 0 and 2, which take seconds each: one with `-m mpi`, the other at night."""
    marks = {shown: pytest.mark.mpi, 2 - shown: pytest.mark.nightly}
    return [pytest.param(rank, marks=mark) for rank, mark in sorted(marks.items())]


# The rank that reports is another one if it is rank 0 itself that does not arrive.
ON_MPI = [(case, 1) for case in CASES if case != "sleeping"] + [("sleeping", 0)]
WHO = [("sleeping", 1), *(pytest.param(*one, marks=pytest.mark.mpi) for one in ON_MPI)]
MORE = [pytest.param(case, 0, marks=pytest.mark.nightly) for case in CASES if case != "sleeping"]


@pytest.mark.parametrize(("case", "culprit"), WHO + MORE)
def test_a_rank_that_does_not_arrive_is_named_and_the_job_ends(case, culprit, tmp_path, figure):
    job = Job(tmp_path, 3, JOB, case, culprit)
    code = job.end()
    text = job.err.read_text()
    figure(f"{case}, rank {culprit}: end after the fault", job.seconds, T + 2)
    assert code == 75, text
    others = [rank for rank in range(3) if rank != culprit]
    assert re.search(rf"rank {culprit} \(.*\) has not reached call 4 for", text), text
    assert CASES[case] in text
    assert f"ranks {others[0]}, {others[1]} wait in {line_of('# waiting')} barrier no. 4" in text
    # A C call that holds the GIL shows its line only in the stack that faulthandler prints.
    place = line_of(f"# {case}")
    assert place in text or f'{JOB.name}", line {place.split(":")[1]} in {case}' in text, text
    assert "MPISTRAT_TIMEOUT" in text
    assert not own_memory(job.files)


@pytest.mark.parametrize("culprit", one_of_two(2))
def test_a_stopped_rank_is_named(culprit, tmp_path, figure):
    job = Job(tmp_path, 3, JOB, "sleeping", culprit)
    pids = job.pids(3)
    job.wait_for("fault at")
    time.sleep(0.5)
    os.kill(pids[culprit], signal.SIGSTOP)
    code = job.end()
    text = job.err.read_text()
    figure(f"stopped, rank {culprit}: end after the fault", job.seconds, T + 2)
    assert code == 75, text
    assert re.search(rf"rank {culprit} \(.*\) has not reached call 4 for", text), text
    assert f"It is in {line_of('# sleeping')} (stopped by a signal)" in text
    gone(pids.values(), 2 + SLACK)


def test_a_rank_that_has_left_is_named(tmp_path):
    job = Job(tmp_path, 2, JOB, "left", 1)
    assert job.end() == 75
    assert re.search(
        r"rank 1 \(.*\) has left the program or finalized MPI before call 4", job.err.read_text()
    )


@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.mpi), 1])
def test_a_killed_rank_ends_the_job_and_leaves_nothing(culprit, tmp_path, figure):
    job = Job(tmp_path, 3, JOB, "killed", culprit)
    pids = job.pids(3)
    code = job.end()
    figure(f"killed, rank {culprit}: end after the fault", job.seconds, 5)
    assert code != 0
    gone(pids.values(), 2 + SLACK)
    assert not own_memory(job.files)


@pytest.mark.parametrize(
    "case",
    [
        "nothing",
        *(pytest.param(case, marks=pytest.mark.nightly) for case in ("declared", "pausing")),
    ],
)
def test_nothing_is_ended_that_goes_on(case, tmp_path):
    """A declared long operation of 2.5 T, a pause of 0.8 T."""
    # Where no rank is late on purpose, a machine that stops for two seconds must not end the job.
    patient = {"MPISTRAT_WARN": "20", "MPISTRAT_TIMEOUT": "40"} if case == "nothing" else {}
    job = Job(tmp_path, 2, JOB, case, 1, **patient)
    code = job.end()
    assert code == 0, job.said()
    assert job.out.read_text().count("is through") == 2
    assert "exit code 75" not in job.said()
    if case != "pausing":
        assert "mpistrat" not in job.err.read_text()


@pytest.mark.nightly
def test_a_job_that_was_suspended_as_a_whole_goes_on(tmp_path):
    """Others wait for 3.2 s, 2.5 s of which the whole job is stopped."""
    job = Job(tmp_path, 2, JOB, "longer", 1)
    pids = job.pids(2).values()
    job.wait_for("fault at")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2.5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert job.end() == 0, job.said()


def two_nodes():
    return {"BOARD_RANKS_PER_NODE": "2"}  # 0 and 1 | 2


@pytest.mark.mpi
def test_a_rank_that_the_signal_wakes_does_not_keep_the_job(tmp_path):
    """The signal that asks for the stacks ends the sleep of a rank, which goes on to its end."""
    job = Job(tmp_path, 4, JOB, "holding", 3, **two_nodes())
    assert job.end() == 75, job.said()
    assert "the job ends with exit code 75" in job.err.read_text()
    assert "the stacks of rank 3" in job.err.read_text()


@pytest.mark.parametrize("culprit", one_of_two(2))
def test_a_sleeping_rank_on_another_node_is_named(culprit, tmp_path, figure):
    job = Job(tmp_path, 3, JOB, "sleeping", culprit, **two_nodes())
    code = job.end()
    text = job.err.read_text()
    figure(f"two nodes, rank {culprit} sleeps: end after the fault", job.seconds, T + 2)
    assert code == 75, text
    others = [rank for rank in range(3) if rank != culprit]
    assert re.search(rf"rank {culprit} \(.*\) has not reached call 4 for", text), text
    assert f"It is in {line_of('# sleeping')} (sleeping" in text
    assert f"ranks {others[0]}, {others[1]} wait in {line_of('# waiting')} barrier no. 4" in text
    assert f"the stacks of rank {culprit}" in text


@pytest.mark.parametrize("culprit", one_of_two(0))
def test_a_silent_node_is_named(culprit, tmp_path, figure):
    """The only rank of a node stops, or the first one of the node that collects."""
    job = Job(tmp_path, 3, JOB, "sleeping", culprit, **two_nodes())
    pids = job.pids(3)
    job.wait_for("fault at")
    time.sleep(0.5)
    os.kill(pids[culprit], signal.SIGSTOP)
    code = job.end()
    text = job.err.read_text()
    figure(f"two nodes, rank {culprit} stops: end after the fault", job.seconds, T + 2)
    assert code == 75, text
    # The rank beside the stopped one knows more than the other node; who of them ends the job is a
    # race, and both name it.
    what = "stopped by a signal|node does not answer" if culprit == 0 else "node does not answer"
    assert re.search(rf"ranks? {culprit}.* \(.*\) ha.* not reached call 4 .*({what})", text), text
    gone(pids.values(), 2 + SLACK)


@pytest.mark.mpi
def test_a_lone_rank_on_a_node_of_mpi_is_named(tmp_path):
    if is_open_mpi():
        pytest.skip("only MPICH emulates nodes")
    job = Job(tmp_path, 3, JOB, "sleeping", 1, MPIR_CVAR_NUM_CLIQUES="2")  # 0 and 2 | 1
    assert job.end() == 75, job.said()
    assert re.search(r"rank 1 \(.*\) has not reached call 4 for", job.err.read_text())


@pytest.mark.parametrize("case", [pytest.param("computing", marks=pytest.mark.mpi), "sleeping"])
def test_a_lost_launcher_leaves_no_orphan(case, tmp_path, figure):
    # Orphans become children of this process, so that it sees their exit codes.
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER of prctl(2)
    try:
        job = Job(tmp_path, 2, JOB, case, 0, MPISTRAT_TIMEOUT="60", MPISTRAT_WARN="30")
        pids = job.pids(2)
        job.wait_for("fault at")
        job.process.kill()
        job.process.wait()
        figure(f"launcher killed, rank 0 {case}: ranks gone", gone(pids.values(), 1 + SLACK), 1)
        codes = {}
        for rank, pid in pids.items():
            try:
                codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            except ChildProcessError:
                codes[rank] = None  # its own launcher daemon has seen it
    finally:
        libc.prctl(36, 0, 0, 0, 0)
    # MPICH's proxy may be quicker with a signal.
    assert set(codes.values()) <= {76, None, -9, -15}, codes


def test_a_program_may_finalize_mpi_while_nodes_talk(tmp_path):
    start, env = command(2, HERE / "programs" / "board_finalize.py")
    ran = subprocess.run(start, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("finalized: True") == 2


@pytest.mark.parametrize(
    "times",
    [1, pytest.param(5, marks=pytest.mark.mpi), pytest.param(50, marks=pytest.mark.nightly)],
)
def test_leaving_is_clean(times, tmp_path):
    """Without `close`: the hook at exit stops the thread before MPI is finalized."""
    start, env = command(2, HERE / "programs" / "board_exit.py")
    for _ in range(times):
        ran = subprocess.run(start, env=env, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert "Fatal" not in ran.stderr and "rror" not in ran.stderr, ran.stderr
