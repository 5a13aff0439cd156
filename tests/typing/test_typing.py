"""What programs annotate is so: for mypy, on each Python, and when they run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import annotated
import pytest

from mpistrat.testing import run_ranks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.parametrize("size", [1, 2])
def test_the_annotated_program_runs(size):
    losses = run_ranks(lambda comm: annotated.program(), size)
    assert all(0.0 < loss < 3.0 for loss in losses)


def test_mypy_looks_at_these_programs():
    """`mypy` alone, as CI and pre-commit run it, checks them with the package."""
    settings = (ROOT / "pyproject.toml").read_text()
    assert all(f'"tests/typing/{name}.py"' in settings for name in ("annotated", "mistaken"))


@pytest.mark.nightly  # half a minute each; `.ci/run` checks them for the Python that runs
@pytest.mark.timeout(300)
@pytest.mark.parametrize("python", ["3.10", "3.12", "3.14"])
def test_types_hold_for_each_python(python, tmp_path):
    programs = [HERE / "annotated.py", HERE / "mistaken.py"]
    # Errors in the package, such as those of NumPy's own types for older versions, do not count.
    options = ("--python-version", python, "--follow-imports=silent", f"--cache-dir={tmp_path}")
    call = [sys.executable, "-m", "mypy", *options, *map(str, programs)]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
