"""More than 64 ranks: one job that goes through calls, failures, uneven batches and leaving."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.process import run_job

PROGRAM = Path(__file__).parent / "programs" / "many_ranks.py"
LONGEST = 600  # most of it is the start of so many processes
CASES = (
    *("numbers", "uneven_batches", "mismatch", "failure", "same_failure"),
    *("checkpoint", "digits"),
)
LEFT_WITH = 7

pytestmark = [
    pytest.mark.job,
    pytest.mark.nightly,
    pytest.mark.timeout(2 * LONGEST + 60),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]


def run_program(rank_count, directory):
    """Run the program; its exit code, and all that it printed."""
    launcher, _ = find_launcher()
    directory.mkdir()
    output_path = directory / "output"
    words = [sys.executable, str(PROGRAM), str(directory)]
    with output_path.open("wb") as output:
        outcome = run_job(launcher.build_command(rank_count, words), LONGEST, output)
    text = output_path.read_text()
    assert not outcome.has_timed_out, text[-3000:]
    return outcome.code, text


def read_figures(text):
    return [float(word) for word in text.split("\ndigits ")[1].splitlines()[0].split()]


@pytest.mark.parametrize("rank_count", [66, 130])
def test_nothing_changes_above_64_ranks(tmp_path, rank_count):
    pytest.importorskip("sklearn")
    code, text = run_program(rank_count, tmp_path / "many")
    passed = [line.split()[1] for line in text.splitlines() if line.startswith("passed ")]
    assert passed == [f"check_{case}" for case in CASES], text[-3000:]
    assert code == LEFT_WITH, text[-3000:]
    assert f"rank {rank_count - 1}" in text, text[-3000:]
    alone = read_figures(run_program(3, tmp_path / "few")[1])
    np.testing.assert_allclose(read_figures(text), alone, rtol=1e-9)
