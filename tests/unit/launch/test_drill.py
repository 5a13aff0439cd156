"""What a drill plans and compares; `tests/faults/test_drill.py` plays some."""

from __future__ import annotations

import signal

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint.inspection import compare_runs, find_newest_checkpoints
from mpistrat.launch import cli, drill
from mpistrat.launch.drill import Drill, fill_directory, plan_moments, plan_strikes


def save(path, times=1, **arrays):
    checkpoint = ms.Checkpoint(**{name: ms.Variable(value) for name, value in arrays.items()})
    for _ in range(times):
        checkpoint.save(path)


class TestPlan:
    def test_it_follows_from_the_seed(self):
        plans = [
            plan_strikes(Drill(("a.py",), 2, (2, 3, 1), 60, signal.SIGKILL, s)) for s in (1, 1, 2)
        ]
        assert plans[0] == plans[1] != plans[2]
        assert [strike.rank_count for strike in plans[0]] == [2, 3, 1] * 20
        assert {(strike.rank_count, strike.rank) for strike in plans[0]} == {
            (n, rank) for n in (1, 2, 3) for rank in range(n)
        }
        assert 3 < sum(strike.is_early for strike in plans[0]) < 25
        assert all(0 <= strike.time_fraction < 1 for strike in plans[0])

    @pytest.mark.parametrize("kills", [1, 20])
    @pytest.mark.parametrize(("saved", "whole"), [(0.5, 10.0), (5.0, 10.0), (10.0, 10.0)])
    def test_all_runs_together_leave_work_for_the_last(self, saved, whole, kills):
        when = plan_moments(saved, whole, kills)
        assert kills * when.window_seconds <= whole
        assert when.early_seconds <= whole
        assert when.wait_seconds <= whole

    def test_the_directory_is_an_argument(self, tmp_path):
        assert fill_directory(("-m", "train"), tmp_path) == [
            "-m",
            "train",
            "--checkpoint",
            str(tmp_path),
        ]
        assert fill_directory(("a.py", "{dir}/a", "{dir}"), tmp_path)[1:] == [
            f"{tmp_path}/a",
            f"{tmp_path}",
        ]


class TestCompare:
    def test_the_newest_of_each_name(self, tmp_path):
        save(tmp_path / "a" / "ckpt", 11, v=1.0)
        save(tmp_path / "best", 2, v=1.0)
        (tmp_path / "a" / "history.csv").touch()
        found = {name: path.name for name, path in find_newest_checkpoints(tmp_path).items()}
        assert found == {"a/ckpt": "ckpt-11.npz", "best": "best-2.npz"}
        assert find_newest_checkpoints(tmp_path / "nowhere") == {}

    @pytest.mark.parametrize(
        ("found", "tolerance", "told"),
        [
            ([1.0, np.nan], 0, []),
            ([1.0 + 2e-16, np.nan], 0, ["differs in 1 of 2 numbers, by up to 2.2e-16"]),
            ([1.0 + 2e-16, np.nan], 1e-12, []),
            ([1.0, 0.0], 1e-12, ["differs in 1 of 2 numbers, by up to inf"]),
            ([-0.0, np.nan], 0.5, ["by up to 1 of the largest"]),
            ([1.0], 0.5, [r"is float64[2] in the first and float64[1] in"]),
            ([1, 2], 0.5, ["is float64[2] in the first and int64[2] in"]),
        ],
    )
    def test_arrays(self, found, tolerance, told, tmp_path):
        save(tmp_path / "a" / "ckpt", 3, v=np.array([1.0, np.nan]), seconds=np.ones(3))
        save(tmp_path / "b" / "ckpt", 1, v=np.array(found), seconds=np.zeros(3))
        compared, lines = compare_runs(tmp_path / "a", tmp_path / "b", tolerance, ["sec*"])
        assert compared == 1
        assert len(lines) == len(told)
        for line, part in zip(lines, told, strict=True):
            assert line.startswith("ckpt: v ")
            assert part in line

    def test_integers_have_no_tolerance(self, tmp_path):
        save(tmp_path / "a" / "ckpt", v=np.arange(5), w=1.0)
        save(tmp_path / "b" / "ckpt", v=np.arange(5) * 10**9, x=1.0)
        compared, lines = compare_runs(tmp_path / "a", tmp_path / "b", 1e9, [])
        assert (compared, lines) == (
            3,
            [
                "ckpt: v differs in 4 of 5 numbers",
                "ckpt: w is in one of the two only",
                "ckpt: x is in one of the two only",
            ],
        )

    def test_names(self, tmp_path):
        save(tmp_path / "a" / "ckpt", v=1.0)
        save(tmp_path / "b" / "told_to_end", v=2.0)
        assert compare_runs(tmp_path / "a", tmp_path / "b", 0, []) == (
            0,
            ["ckpt: was saved by the reference run only"],
        )

    def test_what_is_damaged_is_told(self, tmp_path):
        for name in "ab":
            save(tmp_path / name / "ckpt", v=np.arange(100))
        path = tmp_path / "b" / "ckpt-1.npz"
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(ms.CheckpointError, match=r"b/ckpt-1\.npz"):
            compare_runs(tmp_path / "a", tmp_path / "b", 0, [])


class TestCommand:
    @pytest.fixture
    def played(self, monkeypatch):
        """Record what `play` was asked for instead of playing it."""
        recorded = []

        def play(one, directory):
            recorded.append((one, directory))
            yield "a line"
            if one.strike_count == 9:
                raise ms.CheckpointError("1 array differs")

        monkeypatch.setattr(drill, "play_drill", play)
        return recorded

    def test_words(self, played, capsys, tmp_path):
        line = "-n 2 --kills 5 --signal sigusr1 --ranks 2,3 --tolerance 1e-6 --ignore a* --ignore b"
        argv = ["drill", *line.split(), "--seed", "7", "--timeout", "60"]
        argv += ["--directory", str(tmp_path / "new"), "--", "train.py", "-n", "9"]
        assert cli.main(argv) == 0
        program = ("train.py", "-n", "9")
        wanted = Drill(program, 2, (2, 3), 5, signal.SIGUSR1, 7, 1e-6, ("a*", "b"), 60.0)
        assert played == [(wanted, tmp_path / "new")]
        assert capsys.readouterr().out == f"seed 7, {tmp_path}/new\na line\n"
        assert (tmp_path / "new").is_dir()  # kept, as it was given

    def test_defaults(self, played):
        assert cli.main(["drill", "-n", "3", "-m", "pkg.train", "--epochs", "2"]) == 0
        [(one, directory)] = played
        assert one[:5] == (("-m", "pkg.train", "--epochs", "2"), 3, (3,), 3, signal.SIGKILL)
        assert not directory.exists()

    def test_a_difference_keeps_the_directory(self, played, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        assert cli.main(["drill", "-n", "2", "--kills", "9", "a.py"]) == 1
        assert played[0][1].is_dir()
        last = capsys.readouterr().out.splitlines()[-2:]
        assert last[0] == "mpistrat drill: 1 array differs"
        assert last[1] == f"  kept: {played[0][1]}; again: --seed {played[0][0].seed}"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("-n 2", "give a SCRIPT or -m MODULE"),
            ("-n 2 --signal NONE a.py", "'NONE' is not a signal"),
            ("-n 2 --ranks 2,0 a.py", "at least 1, got '0'"),
            ("-n 2 --kills 0 a.py", "at least 1, got '0'"),
            ("-n 2 --directory . a.py", "is not empty"),
        ],
    )
    def test_words_that_cannot_be_used(self, words, message, capsys, played):
        try:
            code = cli.main(["drill", *words.split()])
        except SystemExit as exit_:
            code = exit_.code
        assert code == 2
        assert message in capsys.readouterr().err
        assert not played
