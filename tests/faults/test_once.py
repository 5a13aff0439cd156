"""A rank that works for the others is not a hang, for as long as it may take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.process import run_job

JOB = Path(__file__).parent / "programs" / "once_job.py"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]


@pytest.mark.parametrize(("most", "code"), [(60, 0), (2, 75)])
def test_only_what_takes_longer_than_it_may_is_ended(most, code, tmp_path):
    command = find_launcher()[0].build_command(2, [sys.executable, str(JOB), "8", str(most)])
    with (tmp_path / "said").open("w+b") as output:
        outcome = run_job(command, 240, output)
    said = (tmp_path / "said").read_text()
    assert outcome.code == code, said
    assert ("the job ends" in said) == bool(code), said
