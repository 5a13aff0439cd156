"""Jobs of `fit` that are told to end, or die in a step, keep their bits."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher

JOB = Path(__file__).parent / "programs" / "fit_job.py"
LONGEST = 120  # tells a hang from a machine that is slow
EPOCHS, BATCHES = 4, 5  # of the validation

pytestmark = [
    pytest.mark.timeout(LONGEST * 6),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]


def run_job(size, directory, event="none", number=0):
    """Run the job; its exit code, the words that it prints, and its errors."""
    launcher, _ = find_launcher()
    words = [sys.executable, str(JOB), str(directory), event, str(number)]
    argv, env = launcher.build_command(size, words)[:2] if size > 1 else (words, {})
    path = os.pathsep.join(filter(None, [str(JOB.parents[3]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        argv,
        env={**os.environ, **env, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    return done.returncode, done.stdout.split(), done.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    code, words, errors = run_job(2, tmp_path_factory.mktemp("whole"))
    assert code == 0, errors
    assert words[-1] == str(EPOCHS * BATCHES)
    return words[:-1]


def rows_of(directory):
    with (directory / "history.csv").open() as file:
        return [row["step"] for row in csv.DictReader(file)]


def test_a_notice_in_a_validation_saves_at_once_and_the_restart_validates_first(whole, tmp_path):
    code, _, errors = run_job(2, tmp_path, "signal", BATCHES + 2)  # in the second epoch
    assert "told to end" in errors
    assert code != 0
    assert rows_of(tmp_path) == ["1"]
    code, words, errors = run_job(2, tmp_path)
    assert code == 0, errors
    assert words[:-1] == whole
    assert words[-1] == str(BATCHES * (EPOCHS - 1))  # all of the second one's is made again
    assert rows_of(tmp_path) == ["1", "2", "3", "4"]


def test_a_rank_that_dies_in_a_step_loses_the_steps_since_the_save(whole, tmp_path):
    code, _, _ = run_job(2, tmp_path, "die", 15)
    assert code != 0
    code, words, errors = run_job(2, tmp_path)
    assert code == 0, errors
    assert words[:-1] == whole
    assert rows_of(tmp_path) == ["1", "2", "3", "4"]


@pytest.mark.parametrize("size", [1, 2])
def test_ctrl_c_on_one_rank_saves_and_all_end_with_130(size, whole, tmp_path):
    code, _, errors = run_job(size, tmp_path, "interrupt", BATCHES + 2)
    assert code == (130 if size > 1 else -signal.SIGINT), errors  # which shells show as 130
    assert errors.count("Ctrl-C: saved as") == 1, errors
    assert "KeyboardInterrupt" in errors
    code, words, errors = run_job(2, tmp_path)
    assert code == 0, errors
    if size == 2:
        assert words[:-1] == whole
    assert rows_of(tmp_path) == ["1", "2", "3", "4"]


def test_a_second_ctrl_c_ends_at_once(whole, tmp_path):
    code, _, errors = run_job(2, tmp_path, "two interrupts", BATCHES + 2)
    assert code == 130, errors
    assert "Ctrl-C: saved as" not in errors
    code, words, errors = run_job(2, tmp_path)
    assert code == 0, errors
    assert words[:-1] == whole
