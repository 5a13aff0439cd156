"""`mpistrat scaling`: what a study measures, and what it refuses to say."""

from __future__ import annotations

import csv
import json
import sys

import pytest

from mpistrat.comm.session import Session
from mpistrat.config import launched_by
from mpistrat.errors import LaunchError
from mpistrat.launch import cli
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.scaling import (
    Run,
    StepCounter,
    Study,
    build_run_words,
    build_table,
    format_table,
    list_doublings,
    measure_runs,
    parse_rates,
)
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.testing import run_ranks

STUDY = Study(("train.py",), (1, 2, 4))


def job(tmp_path, monkeypatch, told, says="", code=0):
    """Let `mpistrat run` be a program that tells of a job and prints."""
    package = tmp_path / "mpistrat"
    package.mkdir()
    (package / "__main__.py").write_text(
        "import os, sys\nfrom pathlib import Path\n"
        f"told = {told!r}\n"
        "if told: Path(os.environ['MPISTRAT_MEASURE']).write_text(told)\n"
        f"print({says!r}, os.environ['OMP_NUM_THREADS'])\nsys.exit({code})\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def raises(error):
    """Return a function that raises an error."""

    def call(*args, **words):
        raise error

    return call


def told(ranks, nodes, rate=10.0):
    found = {"ranks": ranks, "nodes": nodes, "cores": 8, "seconds": 2.0, "steps": 9}
    return json.dumps(found | {"steps_per_second": rate})


def test_numbers_that_double():
    assert [list_doublings(n) for n in (1, 2, 3, 8, 12)] == [
        *[(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8)],
        (1, 2, 4, 8, 12),
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("symbols per second  1,234.5\n", {"symbols per second": 1234.5}),
        ("Images per second: 12\nloss 3\nimages per second: 13", {"images per second": 13.0}),
        ("symbols per second  0\nper second 5\nabout 3 examples per second", {}),
    ],
)
def test_what_programs_print(text, found):
    assert parse_rates(text) == found


class TestRows:
    RUNS = (
        Run(1, 1, 4, 36.0, {"examples per second": 100.0, "runs per second": 1.0}),
        Run(2, 1, 4, 18.0, {"examples per second": 180.0, "runs per second": 1.0}),
        Run(8, 2, 4, 9.0, {"examples per second": 400.0, "runs per second": 1.0}),
    )

    def test_by_hand(self):
        kind, lines = build_table(STUDY, self.RUNS)
        assert kind == "examples per second"
        assert [row.speedup for row in lines] == [1.0, 1.8, 4.0]
        assert [row.efficiency for row in lines] == [1.0, 0.9, 0.5]
        assert [row.core_hours for row in lines] == [0.01, 0.01, 0.02]
        assert [row.crowded for row in lines] == [False, False, True]
        text = format_table(kind, lines).splitlines()
        assert len(text) == 4
        assert [line.endswith("more ranks than cores") for line in text] == [*[False] * 3, True]

    def test_the_first_need_not_be_one_rank(self):
        _, lines = build_table(STUDY, self.RUNS[1:])
        assert lines[-1].efficiency == pytest.approx(400 / 180 / 4)

    def test_cores_of_each_rank_count(self):
        _, lines = build_table(STUDY._replace(cores=3), self.RUNS)
        assert [row.crowded for row in lines] == [False, True, True]
        assert lines[0].core_hours == pytest.approx(0.03)

    def test_all_runs_have_the_same_kind_of_number(self):
        other = self.RUNS[1]._replace(rates={"runs per second": 2.0})
        kind, lines = build_table(STUDY, [self.RUNS[0], other])
        assert (kind, lines[1].speedup) == ("runs per second", 2.0)


class TestRuns:
    def test_nodes_are_asked_for(self):
        study = Study(("-m", "train"), (1, 2), per_node=8, timeout=60)
        assert build_run_words(study, 2)[:7] == [
            "run",
            "-n",
            "16",
            "--nodes",
            "2",
            "--per-node",
            "8",
        ]
        assert build_run_words(study, 2)[7:] == ["--timeout", "60", "-m", "train"]

    def test_what_is_printed_comes_first(self, tmp_path, monkeypatch):
        job(tmp_path, monkeypatch, told(1, 1), "examples per second 50")
        said = []
        (run,) = measure_runs(STUDY._replace(counts=(1,), cores=3), said.append)
        assert list(run.rates) == ["examples per second", "steps per second", "runs per second"]
        assert said == ["mpistrat run -n 1 train.py", "examples per second 50 3"]

    @pytest.mark.parametrize(
        ("text", "code", "said"),
        [
            (told(2, 1), 0, "8 ranks on 2 nodes were requested, but there were 2 on 1"),
            (told(8, 1), 0, "8 ranks on 2 nodes were requested, but there were 8 on 1"),
            ("", 0, "that all nodes see"),
            (told(8, 2), 3, "8 ranks on 2 nodes has failed with exit code 3"),
        ],
    )
    def test_no_more_nodes_than_there_were(self, text, code, said, tmp_path, monkeypatch):
        job(tmp_path, monkeypatch, text, code=code)
        study = Study(("train.py",), (2,), per_node=4)
        with pytest.raises(LaunchError, match=said):
            list(measure_runs(study, lambda text: None))

    def test_what_was_measured_before_a_failure_is_shown(self, tmp_path, monkeypatch, capsys):
        job(tmp_path, monkeypatch, told(1, 1))
        assert cli.main(["scaling", "--ranks", "2,1", "--", "train.py"]) == 1
        shown = capsys.readouterr()
        assert shown.out.splitlines()[1].split()[:3] == ["1", "1", "10.0"]
        assert len(shown.out.splitlines()) == 2
        assert "2 ranks were requested" in shown.err

    def test_a_place_for_the_table_that_cannot_be(self, tmp_path, capsys):
        (tmp_path / "file").touch()
        words = ["--output", str(tmp_path / "file" / "study"), "--", "train.py"]
        assert cli.main(["scaling", *words]) == 2
        assert f"File exists: '{tmp_path}/file'" in capsys.readouterr().err

    def test_one_rank_is_one(self, tmp_path, monkeypatch):
        job(tmp_path, monkeypatch, told(1, 1), code=2)
        with pytest.raises(LaunchError, match="the run on 1 rank has failed"):
            list(measure_runs(STUDY._replace(counts=(1,)), lambda text: None))

    @pytest.mark.parametrize("full", ["", '{"ranks": 1, "no'])
    def test_a_disk_that_is_full(self, full, tmp_path, monkeypatch, capsys):
        job(tmp_path, monkeypatch, full or " ")
        assert cli.main(["scaling", "--ranks", "1", "--", "train.py"]) == 1
        assert "with free space" in capsys.readouterr().err
        monkeypatch.setattr("tempfile.TemporaryDirectory", raises(OSError(28, "No space left")))
        assert cli.main(["scaling", "--ranks", "1", "--", "train.py"]) == 1
        assert "error: [Errno 28] No space left" in capsys.readouterr().err

    def test_no_program(self, capsys):
        assert cli.main(["scaling"]) == 2
        assert "a program to run" in capsys.readouterr().err


def test_steps_are_counted_from_the_second_on(tmp_path, monkeypatch):
    monkeypatch.setattr("mpistrat.launch.scaling.atexit.register", lambda fn: None)
    clock = iter([0.0, 10.0, 20.0, 21.0, 22.0, 30.0])

    def program(comm):
        lockstep = Lockstep(Session.of_parent(comm))
        if comm.rank:
            StepCounter(lockstep, "never")
            return
        monkeypatch.setattr("mpistrat.launch.scaling.time.perf_counter", lambda: next(clock))
        measured = StepCounter(lockstep, str(tmp_path / "told"))
        for _ in range(4):
            lockstep.hooks.on_fn()
        measured.write_report()

    run_ranks(program, 1)
    found = json.loads((tmp_path / "told").read_text())
    assert (found["ranks"], found["nodes"], found["seconds"], found["steps"]) == (1, 1, 30.0, 4)
    assert found["steps_per_second"] == 1.0


@pytest.mark.job
@pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job")
def test_real_runs(tmp_path, monkeypatch, capsys):
    find_launcher()  # or the reason why no job can be started here
    program = tmp_path / "train.py"
    program.write_text(
        "import time, mpistrat as ms\ns = ms.MirroredStrategy()\n"
        "for _ in range(5): s.run(lambda: time.sleep(0.01))\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["--ranks", "1,2", "--output", "out/study", "--", str(program)]
    assert cli.main(["scaling", *words]) == 0
    kind = capsys.readouterr().out.splitlines()[0]
    assert "steps per second" in kind
    with (tmp_path / "out/study.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [(row["ranks"], row["nodes"]) for row in found] == [("1", "1"), ("2", "1")]
    assert all(0 < float(row["steps_per_second"]) < 100 for row in found)
    drawn = (tmp_path / "out/study.png").exists()
    assert drawn or "matplotlib" not in sys.modules
