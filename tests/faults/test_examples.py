"""Examples that are told to end leave with 42, and continue to the same weights."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mpistrat.checkpoint.inspection import compare_runs
from mpistrat.config import launched_by

LONGEST = 240
DIGITS = ("digits", "--epochs=40", "--output={dir}/digits.png")
TINY = ("--length=16", "--batch=8", "--channels=16", "--layers=1", "--every=10")
TEXT = ("text", "--steps=60", "--accumulate=1", *TINY)
TORCH = ("language_model_torch", "--steps=60", "--heads=2", *TINY)
JAX = ("digits_jax", "--epochs=40")

pytestmark = [
    pytest.mark.timeout(LONGEST * 3),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]


def start(example, directory):
    name, *words = example
    words = [word.format(dir=directory.parent) for word in words]
    program = ["-m", f"mpistrat.examples.{name}", f"--checkpoint={directory}", *words]
    argv = [sys.executable, "-m", "mpistrat", "run", "-n", "2", *program]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(job):
    try:
        out, _ = job.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        job.terminate()
        pytest.fail(f"the job did not end: {job.communicate()}")
    return job.returncode, out


def told(directory, job):
    """Tell rank 0 to end when it has made a step."""
    while True:
        try:
            claim = json.loads((directory / "job.json").read_text())
        except (FileNotFoundError, ValueError):
            claim = {}
        if "step" in claim or claim.get("saved"):
            os.kill(claim["pid"], signal.SIGUSR1)
            return
        assert job.poll() is None, job.communicate()
        time.sleep(0.005)


def read_curves(directory):
    """The rows of a run's curves, without its times."""
    with (directory / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for name in ("seconds", "waiting", "communicating"):
            del row[name]
    return rows


@pytest.mark.nightly
@pytest.mark.parametrize("example", [DIGITS, TEXT, TORCH, JAX], ids=lambda words: words[0])
def test_a_notice_changes_nothing_in_the_end(example, tmp_path):
    needs = {"language_model_torch": "torch", "digits_jax": "optax"}.get(example[0], "mpistrat")
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"needs {needs}")
    code, out = ended(start(example, tmp_path / "peace"))
    assert code == 0, out
    job = start(example, tmp_path / "told")
    told(tmp_path / "told", job)
    code, out = ended(job)
    assert code == 42, out
    assert "saved as" in out
    code, out = ended(start(example, tmp_path / "told"))
    assert code == 0, out
    assert "continues after" in out
    # A history is one array, and has seconds: all its other numbers are in the file of its curves.
    compared, lines = compare_runs(tmp_path / "peace", tmp_path / "told", 0.0, ["history/values"])
    assert compared > 5
    assert not lines
    peace, continued = (read_curves(tmp_path / name) for name in ("peace", "told"))
    assert peace == continued
