"""Starts the third rung: the tests in `tests/mpi` on several ranks, with this environment's MPI.

Each number of ranks is one test here, which lists every failing test of that job once.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
from crowded import command
from every import every
from rank_report import Failure, RankLog, failures, read

from mpistrat.config import launched_by
from mpistrat.launch.process import Outcome, run_job

ROOT = Path(__file__).parent.parent
RUNG = ROOT / "tests" / "mpi"
LONGEST = 900  # seconds for all tests of a job; each has a time of its own (--rank-timeout)
# Plugins whose import costs more than the tests (1.3 s for each rank); ranks must not draw examples
# of their own anyway.
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:zarr")
TAIL = 3000  # characters of a job's output that a failure quotes
# What Open MPI's launcher ends with where it fails itself, before it starts any process
# (PRTE_ERR_SILENT), such as for want of file descriptors or of a directory for its session.
NOTHING_STARTED = 213
OWN = f"[pytest]\npythonpath = {ROOT}/tests/tools\n"  # configuration of a rung of its own

pytestmark = [
    pytest.mark.timeout(LONGEST + 30),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
    pytest.mark.filterwarnings("default:the launcher ended"),
]


class Job(NamedTuple):
    """A job of pytests: how it ended, what each rank wrote, what it printed."""

    outcome: Outcome
    logs: list[RankLog]
    output: str

    def failures(self) -> list[Failure]:
        return failures(self.logs, self.outcome.code)

    def report(self) -> str:
        """Every failing test once; the job's output if it did not come to its end."""
        parts = [str(failure) for failure in self.failures()]
        if self.outcome.has_timed_out:
            parts.insert(0, "the job was ended, as it took too long")
        if not all(log.is_complete for log in self.logs):
            parts.append(f"--- end of the job's output ---\n{self.output[-TAIL:]}")
        return "\n\n".join(parts)


def run_rung(size, tests, directory, *options, longest=LONGEST):
    """Run the tests in a directory, or in a list of files, on `size` ranks."""
    reports = directory / "ranks"
    paths = map(str, tests if isinstance(tests, list) else [tests])
    program = [sys.executable, "-m", "pytest", *paths, "--with-mpi", "-q", *WITHOUT]
    # pytest-timeout's clock stops this process only; the reporter's tells what all ranks do.
    program += ["--timeout=0", f"--rank-report={reports}", *options]
    printed = directory / "printed"

    def started():
        with printed.open("wb") as output:
            outcome = run_job(command(size, program), longest, output, cwd=ROOT)
        return Job(outcome, read(reports, size), printed.read_text(errors="replace"))

    job = started()
    if job.outcome.code == NOTHING_STARTED and not list(reports.glob("rank-*")):
        warnings.warn(
            f"the launcher ended with code {NOTHING_STARTED}, no rank has begun, and the job is "
            f"started once more; it had printed:\n{job.output[-TAIL:]}",
            stacklevel=2,
        )
        job = started()
    return job


@pytest.mark.parametrize(
    ("size", "tests"),
    [
        (2, RUNG),
        *(pytest.param(size, RUNG, marks=pytest.mark.mpi) for size in (1, 3, 4)),
        pytest.param(6, RUNG, marks=pytest.mark.nightly),
    ],
    ids=["2", "1", "3", "4", "6"],
)
def test_rung(size, tests, tmp_path):
    job = run_rung(size, tests, tmp_path)
    if job.failures():
        pytest.fail(f"on {size} ranks:\n\n{job.report()}", pytrace=False)
    assert all(log.passed_count for log in job.logs), job.report()


@pytest.mark.nightly
@pytest.mark.timeout(1230)
def test_slow_rung(tmp_path):
    """Arrays of more than 2**31 elements; where memory is short, these say so and are skipped."""
    options = ("-m", "nightly", "--rank-timeout=600", "-rs")
    job = run_rung(2, RUNG, tmp_path, *options, longest=1200)
    if job.failures():
        pytest.fail(f"on 2 ranks:\n\n{job.report()}", pytrace=False)
    if not all(log.passed_count for log in job.logs):
        pytest.skip(f"nothing could be tried: {job.output[-TAIL:]}")


# The driver itself: a rung of one test that goes wrong in one way.


def broken_rung(tmp_path, size, body, *options, longest=LONGEST):
    """Run one test function `test_it(world)` with this body, and tests before and after it.

    These two have their time on a machine that is busy, too, whatever the options say of the one.
    """
    rung = tmp_path / "rung"
    rung.mkdir()
    shutil.copy(RUNG / "conftest.py", rung)
    (rung / "test_broken.py").write_text(
        "import os, time\nimport pytest\n\n"
        "@pytest.mark.timeout(60)\ndef test_before(world):\n    assert world.size\n\n"
        f"def test_it(world):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n\n"
        "@pytest.mark.timeout(60)\ndef test_after(world):\n    world.Barrier()\n"
    )
    options = ("--rootdir", str(rung), "-c", str(rung / "pytest.ini"), *options)
    (rung / "pytest.ini").write_text(OWN)
    return run_rung(size, rung, tmp_path, *options, longest=longest)


@pytest.mark.beside
@every("begun", [False, True])
@every("code", [NOTHING_STARTED, 1, 139])
def test_a_job_of_which_nothing_began_is_started_once_more_and_that_is_said(
    code, begun, tmp_path, monkeypatch
):
    starts = []

    def start(call, longest, output, cwd):
        starts.append(call)
        output.write(b"no room")
        if begun:
            (directory / "ranks").mkdir(exist_ok=True)
            (directory / "ranks" / "rank-1.jsonl").touch()
        return Outcome(code, False)

    monkeypatch.setattr(sys.modules[__name__], "command", lambda size, program: program)
    monkeypatch.setattr(sys.modules[__name__], "run_job", start)
    directory = tmp_path / f"{code}-{begun}"
    directory.mkdir()
    again = code == NOTHING_STARTED and not begun
    with pytest.warns(UserWarning, match="no room") if again else contextlib.nullcontext():
        job = run_rung(2, RUNG, directory)
    assert len(starts) == 1 + again
    [failure] = job.failures()  # of the second job, too
    assert f"exit code {code}" in failure.text
    assert "no room" in job.report()


def test_failure_on_one_rank_is_reported_once_with_its_rank(tmp_path):
    job = broken_rung(tmp_path, 2, "assert world.rank != 1, 'one is wrong'")
    [failure] = job.failures()
    assert failure.test.endswith("test_broken.py::test_it")
    assert failure.ranks == [1]
    assert "one is wrong" in failure.text
    assert job.logs[0].passed_count == 3
    assert job.logs[1].passed_count == 2  # the tests before and after it


@pytest.mark.mpi
def test_failure_on_all_ranks_is_reported_once_with_the_text_of_the_lowest(tmp_path):
    job = broken_rung(tmp_path, 3, "assert world.rank == 0, f'rank {world.rank} is wrong'")
    [failure] = job.failures()
    assert failure.ranks == [1, 2]
    assert "rank 1 is wrong" in failure.text
    assert job.report().count("is wrong") == failure.text.count("is wrong")


def test_hang_names_the_test_the_ranks_in_it_and_where(tmp_path):
    body = "if world.rank == 1:\n    world.recv(source=1)"
    job = broken_rung(tmp_path, 2, body, "--rank-timeout=2")
    assert not job.outcome.has_timed_out
    [failure] = job.failures()
    assert failure.test.endswith("test_broken.py::test_it"), job.report()
    assert failure.ranks == [1], job.report()
    assert "HUNG" in failure.text
    assert "test_broken.py" in failure.text
    assert "in test_it" in failure.text
    assert "ranks [0] had left it" in failure.text


@pytest.mark.mpi
def test_hang_of_all_ranks_is_one_failure(tmp_path):
    job = broken_rung(tmp_path, 2, "time.sleep(600)", "--rank-timeout=2")
    [failure] = job.failures()
    assert failure.ranks == [0, 1]
    assert "HUNG" in failure.text


@pytest.mark.mpi
def test_rank_that_fails_while_others_wait_does_not_hang_the_job(tmp_path):
    body = "assert world.rank != 0, 'zero leaves'\nworld.Barrier()"
    job = broken_rung(tmp_path, 2, body, "--rank-patience=1")
    assert not job.outcome.has_timed_out
    [failure] = job.failures()
    assert failure.ranks == [0]
    assert "zero leaves" in failure.text
    assert "ranks [1] did not leave it in time" in failure.text


def test_rank_that_ends_its_process_is_a_failure(tmp_path):
    job = broken_rung(tmp_path, 2, "if world.rank == 1:\n    os._exit(3)\nworld.Barrier()")
    assert job.outcome.code != 0
    [failure] = job.failures()
    assert failure.test.endswith("test_broken.py::test_it")
    assert 1 in failure.ranks
    assert "ENDED" in failure.text


@pytest.mark.mpi
def test_rank_that_ends_its_process_with_code_0_is_a_failure(tmp_path):
    job = broken_rung(tmp_path, 2, "os._exit(0)")
    [failure] = job.failures()
    assert failure.test.endswith("test_broken.py::test_it")
    assert failure.ranks == [0, 1]


@pytest.mark.mpi
def test_module_that_one_rank_cannot_import_is_a_failure(tmp_path):
    rung = tmp_path / "rung"
    rung.mkdir()
    shutil.copy(RUNG / "conftest.py", rung)
    (rung / "pytest.ini").write_text(OWN)
    (rung / "test_half.py").write_text(
        "from mpi4py import MPI\n"
        "assert MPI.COMM_WORLD.rank == 0, 'only rank 0 may'\n\n"
        "def test_it(world):\n    world.Barrier()\n"
    )
    job = run_rung(2, rung, tmp_path, "-c", str(rung / "pytest.ini"))
    assert not job.outcome.has_timed_out
    [failure] = [failure for failure in job.failures() if "only rank 0 may" in failure.text]
    assert failure.ranks == [1]


@pytest.mark.nightly  # in time for its ranks to come to the test; else test_process.py
def test_job_that_never_ends_is_ended(tmp_path):
    job = broken_rung(tmp_path, 2, "time.sleep(600)", longest=20)
    assert job.outcome.has_timed_out
    [failure] = job.failures()
    assert failure.test.endswith("test_broken.py::test_it")
