"""Starts the tests of the backend of torch.distributed in `ranks/`, on several ranks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from rank_report import failures, read

from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.process import run_job

HERE = Path(__file__).parent
LONGEST = 900  # as in test_mpiexec.py

_spec = importlib.util.spec_from_file_location("hosted", HERE / "hosted.py")
hosted = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hosted)

pytestmark = [
    pytest.mark.job,
    pytest.mark.timeout(LONGEST + 30),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


@pytest.mark.parametrize(
    "size", [2, *(pytest.param(n, marks=pytest.mark.mpi) for n in (1, 3, 4))], ids=str
)
def test_ranks(size, tmp_path):
    launcher, _ = find_launcher()
    plugins = ("no:cacheprovider", "no:hypothesispytest", "no:zarr")
    program = [sys.executable, "-m", "pytest", str(HERE / "ranks"), "--with-mpi", "-q"]
    program += [word for plugin in plugins for word in ("-p", plugin)]
    # Torch says so of its own parts, and of names that are the only ones before 2.13.
    program += [f"-Wignore::{kind}" for kind in ("DeprecationWarning", "FutureWarning")]
    program += ["--timeout=0", f"--rank-report={tmp_path / 'ranks'}"]
    printed = tmp_path / "printed"
    with printed.open("wb") as output:
        outcome = run_job(
            launcher.build_command(size, program), LONGEST, output, cwd=HERE.parents[2]
        )
    logs = read(tmp_path / "ranks", size)
    wrong = "\n\n".join(map(str, failures(logs, outcome.code)))
    if wrong or outcome.has_timed_out or not all(log.passed_count for log in logs):
        pytest.fail(f"on {size} ranks:\n{wrong}\n{printed.read_text()[-3000:]}", pytrace=False)


def test_the_table_of_the_suite_says_why_a_test_did_not_pass():
    rows = hosted.recorded()
    assert sum(here == "passed" for here, _, _ in rows.values()) > 20
    for name, (here, gloo, why) in rows.items():
        assert here in ("passed", "skipped", "failed", "hung"), name
        assert here == "passed" or why, name
        if here in ("failed", "hung") and gloo == "passed":
            assert name in hosted.STANDS_OUT, name


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("size", [4, 8])
def test_the_suite_of_torch(size):
    """What passes with gloo passes here, or stands in `hosted.STANDS_OUT` with its reason.

    What `hosted.TABLE` has as passed on 4 ranks passes.
    """
    wrong, known = {}, hosted.recorded() if size == 4 else {}
    for name in hosted.names():
        how, why = hosted.run_one(name, "mpistrat", size)
        before, with_gloo, _ = known.get(name, ("", "", ""))
        if how in ("failed", "hung") and name not in hosted.STANDS_OUT:
            with_gloo = with_gloo or before or hosted.run_one(name, "gloo", size)[0]
            if with_gloo == "passed":
                wrong[name] = f"{how}: {why}"
        elif how == "skipped" and before == "passed":
            wrong[name] = f"passed before, and is skipped now: {why}"
    assert not wrong, "\n\n".join(f"{name} {why}" for name, why in wrong.items())
