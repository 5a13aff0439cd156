"""Jobs in which a rank fails, leaves, hangs or is killed: each ends in time, and says who it was.

One test per row: B1 to B24 are the ways in which a process of a job can go wrong. The seconds after
the fault are printed; the figure to reach stands beside them. The assertions leave room for a
loaded machine. What is wrong with a board alone is in `test_board.py`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpistrat.errors import LaunchError
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.process import run_job

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
JOB = HERE / "programs" / "process_job.py"
MENDED = HERE / "programs" / "mended_job.py"
MARK = "PROCESS_TEST_JOB"
SIZE = 3
ALL = -1
T = 2.0  # seconds until a hang ends a job
SLACK = 8.0  # seconds that a loaded machine may add
LONGEST = 40.0


@functools.cache
def launcher():
    return find_launcher()[0]


def fits():
    try:
        launcher()
    except LaunchError:
        return False
    return True


pytestmark = [
    # Two minutes, and its clocks want a machine that does nothing else.
    pytest.mark.nightly,
    pytest.mark.skipif(not fits(), reason="no mpiexec that fits mpi4py"),
]


def is_open_mpi():
    return launcher().flavour.name == "Open MPI"


def of_job(mark):
    """Return the processes of a job, by the variable that it was started with."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = entry.joinpath("stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and mark in entry.joinpath("environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


class Job:
    """A job of three ranks; what it prints is read from files."""

    def __init__(self, directory, case, culprit=1, via="mpiexec", program=JOB, **env):
        words = [str(program), str(case), str(culprit)]
        if via == "run":
            argv = [sys.executable, "-m", "mpistrat", "run", "-n", str(SIZE), *words]
            extra = {}
        else:
            argv, extra = launcher().build_command(SIZE, [sys.executable, *words])[:2]
        self.mark = uuid.uuid4().hex.encode()
        base = {**os.environ, **extra, MARK: self.mark.decode(), "PYTHONPATH": str(ROOT)}
        self.out, self.err = directory / "out", directory / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                argv, stdout=out, stderr=err, env=base | env, start_new_session=True
            )
        self.began = time.time()
        self.code, self.seconds, self.leftover = -1, 0.0, 0.0

    def said(self):
        return self.out.read_text() + self.err.read_text()

    def wait_for(self, pattern, count=1):
        end = time.monotonic() + LONGEST
        while time.monotonic() < end:
            found = re.findall(pattern, self.said())
            if len(found) >= count:
                return found
            time.sleep(0.01)
        self._kill()
        raise AssertionError(f"{pattern!r} was not printed: {self.said()}")

    def pids(self):
        return {int(r): int(p) for r, p in self.wait_for(r"rank (\d+) is (\d+)", SIZE)}

    def end(self, since=None):
        """Wait for the end; nothing may be left of the job.

        The seconds count from the first fault that it printed, or from `since`.
        """
        try:
            self.code = self.process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            self._kill()
            raise AssertionError(f"the job did not end: {self.said()}") from None
        ended = time.time()
        faults = re.findall(r"fault at ([\d.]+)", self.said())
        since = since or (float(faults[0]) if faults else None)
        assert since is not None, f"there was no fault: {self.said()}"
        self.seconds = ended - since
        while of_job(self.mark):
            assert time.time() - ended < 2 + SLACK, f"still alive: {self._kill()}\n{self.said()}"
            time.sleep(0.02)
        self.leftover = time.time() - ended
        return self

    def _kill(self):
        left = of_job(self.mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return left


def own_memory():
    room = Path("/dev/shm")
    return list(room.glob("mpistrat*")) if room.is_dir() else []


def line_of(program, marker):
    """Return ``file:line`` of the line of a program with that comment."""
    lines = program.read_text().splitlines()
    return f"{program.name}:{next(n for n, text in enumerate(lines, 1) if text.endswith(marker))}"


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    end = time.monotonic() + SLACK
    while own_memory() and time.monotonic() < end:  # of another job on this machine, perhaps
        time.sleep(0.1)
    assert not own_memory(), "shared memory of mpistrat is left"


@pytest.fixture
def figure(record_property, capsys):
    def note(what, job, limit):
        seconds = job if isinstance(job, float) else job.seconds
        code = "" if isinstance(job, float) else f", exit code {job.code}"
        record_property(what, seconds)
        with capsys.disabled():
            print(f"\n  {what}: {seconds:.2f} s (to reach: {limit:g} s){code}", end="")
        assert seconds < limit + SLACK

    return note


@pytest.fixture(scope="module")
def mended(tmp_path_factory):
    """What every rank of one job told of faults that the program has caught."""
    printed = tmp_path_factory.mktemp("mended") / "printed"
    command = launcher().build_command(SIZE, [sys.executable, str(MENDED)])
    command = command._replace(env={**command.env, "PYTHONPATH": str(ROOT)})
    with printed.open("wb") as output:
        outcome = run_job(command, LONGEST, output)
    text = printed.read_text()
    assert outcome.code == 0, text
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"rank"')]
    assert len(rows) == SIZE, text
    return sorted(rows, key=lambda row: row["rank"])


def spread(rows, case, figure):
    """Check that a fault on rank 1 was raised everywhere within a second; return what was said."""
    cells = [row["found"][case] for row in rows]
    figure(
        f"{case}: raised on every rank",
        max(cell["end"] for cell in cells) - cells[1]["fault"],
        1,
    )
    for rank, cell in enumerate(cells):
        assert ("RemoteError" in cell["kinds"]) is (rank != 1), cell
        assert cell["total"] == SIZE  # and the program continues
    return cells


@pytest.mark.parametrize("row", ["fn", "merge_fn", "dataset"])
def test_b1_b2_b15_an_exception_on_one_rank_can_be_caught_on_all(row, mended, figure):
    cells = spread(mended, row, figure)
    assert all("ValueError" in cell["kinds"] for cell in cells)
    assert cells[1]["text"] == "mine"
    for rank in (0, 2):
        assert (
            f"replica 1 raised ValueError in {line_of(MENDED, '# raising')}" in cells[rank]["text"]
        )
        assert 'raise ValueError("mine")' in cells[rank]["text"]
    # Whatever was written before the fault was written everywhere or nowhere, and whole.
    held = {tuple(cell["variable"]) for cell in cells}
    assert held in ({(0.0, 0.0)}, {(7.0, 7.0)}), held


@pytest.mark.parametrize("case", ["raising", "outside", "merging", "reading"])
@pytest.mark.parametrize("via", ["mpiexec", "run"])
def test_b1_b2_b15_an_exception_on_one_rank_ends_the_job(case, via, tmp_path, figure):
    if via == "run" and case in ("merging", "reading"):
        pytest.skip("the way out is the same as that of the others")
    job = Job(tmp_path, case, via=via).end()
    figure(f"{case}, {via}: end after the fault", job, 1)
    assert job.code == 1, job.said()
    text = job.err.read_text()
    assert "on rank 1 of 3" in text
    assert text.count("Traceback") == text.count("ValueError: mine") == 1, text
    assert f'{JOB.name}", line {line_of(JOB, "# raising").split(":")[1]}, in raising' in text


def test_b3_the_same_exception_on_all_ranks_is_printed_once(tmp_path, figure):
    job = Job(tmp_path, "everywhere").end()
    figure("everywhere: end after the fault", job, 1)
    assert job.code == 1
    assert job.err.read_text().count("ValueError: mine") == 1
    assert "on 3 ranks of 3" in job.err.read_text()


@pytest.mark.parametrize("via", ["mpiexec", "run"])
@pytest.mark.parametrize(("case", "code"), [("leaving_with_3", 3), ("leaving_with_0", 77)])
def test_b4_sys_exit_on_one_rank_is_told_by_the_others(case, code, via, tmp_path, figure):
    job = Job(tmp_path, case, via=via).end()
    figure(f"{case}, {via}: end after the fault", job, 1)
    assert job.code == code, job.said()
    assert re.search(r"(rank|replica) 1\b.*(left|SystemExit)", job.err.read_text()), job.said()


@pytest.mark.parametrize("case", ["ending_with_3", "crashing", "aborting"])
def test_b5_a_process_that_ends_takes_the_job_with_it(case, tmp_path, figure):
    job = Job(tmp_path, case).end()
    figure(f"{case}: end after the fault", job, 5)
    # Not always the code of this rank: MPICH ends the others, and may report one of them.
    assert job.code not in (0, 75, 77), job.said()


@pytest.mark.parametrize("culprit", [1, ALL])
def test_b6_success_without_a_record_is_none(culprit, tmp_path, figure):
    """Under plain mpiexec of MPICH the launcher's code may be 0; `mpistrat run` knows better."""
    job = Job(tmp_path, "ending_with_0", culprit, via="run").end()
    figure("ending_with_0, run: end after the fault", job, 5)
    assert job.code != 0, job.said()
    if job.code == 70:
        assert "not every rank has left the program in order" in job.err.read_text()
    # Open MPI takes any end without MPI_Finalize for a failure.
    assert culprit != ALL or job.code == (1 if is_open_mpi() else 70), job.said()


CALLS = {
    "in the first handshake": "call=1;phase=proof",
    "in the preflight": "call=2;phase=proof",
    "in fn": "call=2;phase=fn",
    "before the handshake": "call=5;phase=before",
    "in the handshake": "call=5;phase=proof",
    "in the payload": "call=5;phase=payload",
    "before assign": "call=5;phase=after",
    "in the last handshake": "phase=exit",
}
PHASES = ["killed before MPI starts", *CALLS, "killed after the last handshake"]


@pytest.mark.parametrize("phase", PHASES)
def test_b7_a_rank_that_is_killed_ends_the_job(phase, tmp_path, figure):
    def killed(culprit):
        place = tmp_path / str(culprit)
        place.mkdir()
        if phase not in CALLS:
            return Job(place, phase, culprit).end()
        text = f"rank={culprit};{CALLS[phase]};do=kill"
        job = Job(place, "nothing", culprit, MPISTRAT_FAULT=text)
        job.wait_for(rf"happens \(rank {culprit} of {SIZE}\)")
        return job.end(time.time())

    with ThreadPoolExecutor(SIZE) as pool:
        jobs = list(pool.map(killed, range(SIZE)))
    for culprit, job in enumerate(jobs):
        figure(f"rank {culprit} killed, {phase}: end after the fault", job, 5)
        figure("  then until no process is left", job.leftover, 2)
        assert job.code not in (0, 75), job.said()


def test_b8_an_import_that_fails_on_one_rank_ends_the_job(tmp_path, figure):
    """`mpistrat run` only: of a rank that never starts MPI nobody else can know."""
    job = Job(tmp_path, "import", via="run").end()
    figure("import, run: end after the fault", job, 1)
    assert job.code == 1, job.said()
    text = job.err.read_text()
    assert "on rank 1 of 3" in text
    assert "No module named 'no_such_module'" in text


HANG = {"MPISTRAT_WARN": "1", "MPISTRAT_TIMEOUT": str(T)}


@pytest.mark.parametrize("via", ["mpiexec", "run"])
def test_b9_a_rank_that_sleeps_is_named(via, tmp_path, figure):
    job = Job(tmp_path, "sleeping", via=via, **HANG).end()
    figure(f"sleeping, {via}: end after the fault", job, T + 2)
    text = job.err.read_text()
    assert job.code == 75, text
    assert re.search(r"rank 1 \(.*\) has not reached call \d+ for", text), text
    assert f"It is in {line_of(JOB, '# sleeping')}" in text
    assert f"ranks 0, 2 wait in {line_of(JOB, '# waiting')} all_reduce(SUM" in text
    assert "MPISTRAT_TIMEOUT" in text


def test_b10_a_rank_that_is_stopped_is_named(tmp_path, figure):
    job = Job(tmp_path, "nothing", MPISTRAT_FAULT="rank=1;call=5;phase=before;do=stop", **HANG)
    job.wait_for("injected fault .* happens")
    job.end(time.time())
    figure("stopped: end after the fault", job, T + 2)
    text = job.err.read_text()
    assert job.code == 75, text
    assert re.search(r"rank 1 \(.*\) has not reached call 5 for .*stopped by a signal", text), text


def test_b11_a_rank_that_holds_the_gil_is_named(tmp_path, figure):
    job = Job(tmp_path, "holding", **HANG).end()
    figure("holding the GIL: end after the fault", job, T + 2)
    text = job.err.read_text()
    assert job.code == 75, text
    assert re.search(r"rank 1 \(.*\) has not reached call \d+ for .*holds the GIL", text), text


def test_b12_a_declared_long_operation_is_let_alone(tmp_path):
    job = Job(tmp_path, "declared", via="run", **HANG).end()
    assert job.code == 0, job.said()
    assert job.out.read_text().count("through") == SIZE
    assert "has not reached" not in job.err.read_text()


@pytest.mark.parametrize("via", ["mpiexec", "run"])
def test_b13_unequal_numbers_of_calls_are_told(via, tmp_path, figure):
    """For a hand-written loop; a distributed dataset gives empty batches instead (B14)."""
    job = Job(tmp_path, "uneven", via=via).end()
    figure(f"uneven, {via}: end after the fault", job, 1)
    text = job.err.read_text()
    assert job.code == 77, text
    assert "rank 1 has left the program (exit code 0) while others had more to do" in text
    assert line_of(JOB, "# waiting") in text
    assert text.count("LockstepError") == 1


# B14, empty parts of batches, is in tests/unit/data/test_cut.py and tests/golden.


def test_b16_a_second_thread_is_refused(mended):
    for row in mended:
        refused, sums, text = row["notes"]["threads"]
        assert refused == 200
        assert sums == [SIZE]
        assert f"rank {row['rank']}: " in text
        assert "thread 'stranger'" in text


def test_b17_forks_harm_nobody(mended):
    """A child that calls is refused and leaves with its own code; children of multiprocessing."""
    assert mended[1]["notes"]["forks"] == [41, 0, 0]
    assert [row["notes"]["after forks"] for row in mended] == [SIZE] * SIZE


INTERRUPT = r"(?m)^KeyboardInterrupt$"


def test_b18_ctrl_c_in_one_rank(tmp_path, figure):
    job = Job(tmp_path, "interrupted").end()
    figure("SIGINT in one rank: end after the fault", job, 2)
    assert job.code == 130, job.said()
    assert "on rank 1 of 3" in job.err.read_text()
    assert len(re.findall(INTERRUPT, job.err.read_text())) == 1, job.said()


@pytest.mark.parametrize("via", ["mpiexec", "run"])
def test_b18_ctrl_c_of_the_job(via, tmp_path, figure):
    job = Job(tmp_path, "waiting", via=via)
    job.wait_for("fault at", SIZE)
    time.sleep(0.3)
    since = time.time()
    job.process.send_signal(signal.SIGINT)
    job.end(since)
    figure(f"SIGINT to the launcher, {via}: end after the fault", job, 2)
    assert job.code not in (0, 75), job.said()
    assert len(re.findall(INTERRUPT, job.said())) <= 1, job.said()


def test_b19_an_abort_of_the_program_keeps_its_code(tmp_path, figure):
    job = Job(tmp_path, "aborting_mpi").end()
    figure("Abort(9): end after the fault", job, 5)
    assert job.code == 9, job.said()


def test_b20_a_lost_launcher_leaves_no_orphan(tmp_path, figure):
    # Orphans become children of this process, so that they are waited for.
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER of prctl(2)
    try:
        job = Job(tmp_path, "waiting")
        pids = job.pids()
        job.wait_for("fault at", SIZE)
        time.sleep(0.3)
        assert set(pids.values()) <= set(of_job(job.mark))
        since = time.time()
        job.process.kill()
        job.end(since)
        for pid in pids.values():
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                continue  # its own launcher daemon has seen it
    finally:
        libc.prctl(36, 0, 0, 0, 0)
    figure("launcher killed: no process left", job.leftover, 1)


def test_b21_calls_after_finalize_are_refused(tmp_path, figure):
    job = Job(tmp_path, "all finalize").end()
    figure("all finalize: end after the fault", job, 5)
    assert job.code == 1, job.said()
    for rank in range(SIZE):
        assert f"StrategyError: rank {rank}: MPI has been finalized" in job.err.read_text()


def test_b21_a_rank_that_finalizes_alone_is_named(tmp_path, figure):
    """It waits in MPI for the others, as they do for it; no handshake can end that."""
    job = Job(tmp_path, "one finalizes", **HANG).end()
    figure("one finalizes: end after the fault", job, T + 2)
    assert job.code == 75, job.said()
    assert re.search(
        r"rank 1 \(.*\) has left the program or finalized MPI before call", job.err.read_text()
    )


# B22, strategies made and dropped by the thousand, is in tests/mpi/test_session.py.
# B23, exceptions in reductions of the user's own, cannot happen: there are none.


def test_b24_a_collective_in_a_collective_is_refused(mended, figure):
    cells = spread(mended, "recursion", figure)
    assert all("ContextError" in cell["kinds"] for cell in cells)
    assert "replica 1 raised ContextError" in cells[0]["text"]
    for rank, row in enumerate(mended):
        cell = row["found"]["recursion everywhere"]
        assert cell["kinds"][0] == "ContextError"
        assert f"this is replica {rank} of {SIZE} inside run()" in cell["text"]
        assert cell["total"] == SIZE
