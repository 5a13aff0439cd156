"""The programs of the page: five lines differ, and both print the same number."""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import mpistrat
from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.process import run_job

pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")

PROGRAMS = Path(__file__).parents[3] / "docs" / "programs"
HERE = Path(mpistrat.__file__).parents[1]
NAMES = ("train_torch_alone.py", "train_torch_mpistrat.py")

pytestmark = [
    pytest.mark.timeout(270),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]


def lines(name):
    """The lines that do something, without imports, docstring and indentation."""
    text = (PROGRAMS / name).read_text().split('"""')[2]
    found = [line.strip() for line in text.splitlines() if line.strip()]
    return [line for line in found if not line.startswith(("import ", "from "))]


def test_at_most_five_lines_differ():
    new = [x for x in difflib.ndiff(*map(lines, NAMES)) if x.startswith("+ ")]
    assert len(new) <= 5, new


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.mpi)])
def test_both_print_the_same_number(size, tmp_path):
    launcher, _ = find_launcher()
    found = []
    for name, ranks in zip(NAMES, (1, size), strict=True):
        output = tmp_path / name
        command = launcher.build_command(ranks, [sys.executable, str(PROGRAMS / name)])
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        command = command._replace(env={**command.env, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
        with output.open("wb") as file:
            outcome = run_job(command, 240, file, cwd=tmp_path)
        assert outcome.code == 0, output.read_text()
        found.append(float(output.read_text()))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3)
