"""The text program: the model of plain NumPy at any number of ranks, on every start."""

from __future__ import annotations

import re
import runpy
import threading
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import mpistrat as ms
from mpistrat.examples import text
from mpistrat.examples.text import TextSettings, train
from mpistrat.testing import run_ranks

PLAIN = runpy.run_path(str(Path(__file__).with_name("plain_text.py")))
MODULES = (
    *text.TRAINING_MODULES,
    *text.HELD_OUT_MODULES,
)  # before tests put shorter ones in their place
# 7 steps with evaluations after 3, 6 and 7; batches of 3 leave a fourth rank without pieces.
TINY = TextSettings(
    *(7, 3, 2, 8, 6, 2), lr=0.02, every=3, patience=2, seed=1, dtype="float64"
)  # fmt: skip
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


@pytest.fixture(scope="module", autouse=True)
def _one_thread_for_each_rank():
    """Threads of the linear algebra library that wait for a core would make these tests slow."""
    with threadpool_limits(1):
        yield


@pytest.fixture(autouse=True)
def _little_text(monkeypatch):
    monkeypatch.setattr(text, "TRAINING_MODULES", ("queue", "sched"))
    monkeypatch.setattr(text, "HELD_OUT_MODULES", ("this",))


def pieces(names):
    """The pieces of length 8, cut by hand."""
    whole = np.concatenate([text.read_source(name) for name in names])
    return np.array([whole[i : i + 9] for i in range(0, len(whole) - 8, 8)])


def run(size, directory, settings=TINY, progress=None):
    return run_ranks(lambda comm: train(ms.MirroredStrategy(), settings, directory, progress), size)


def assert_same_bits(results, wanted):
    for result in results:
        assert result.history.table().tobytes() == wanted.history.table().tobytes()
        for name, value in wanted.weights.items():
            assert result.weights[name].tobytes() == value.tobytes()


@SIZES
def test_training_is_that_of_plain_numpy(size, tmp_path):
    training, held_out = pieces(["queue", "sched"]), pieces(["this"])
    order = ms.Dataset(np.arange(len(training))).shuffle(seed=1).repeat().batch(3)
    batches = (training[rows] for rows in order)
    weights, history = PLAIN["simulate"](TINY, text.SYMBOL_COUNT, batches, held_out)
    assert history[-1, 1] < history[0, 1]  # it learns
    results = run(size, tmp_path)
    assert_same_bits(results, results[0])
    np.testing.assert_allclose(results[0].history.table(), history, rtol=1e-9)
    for name, value in weights.items():
        np.testing.assert_allclose(results[0].weights[name], value, rtol=0, atol=1e-9)


class _Stop(text.ProgressBar):
    """Ends training after a call for a batch, on every rank."""

    def __init__(self, calls):
        super().__init__(0, is_shown=False)
        self.left = calls

    def advance(self):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("size", "calls"), [(1, 7), (2, 9), (2, 14)])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(size, calls, tmp_path):
    settings = TINY._replace(dtype="float32")
    [wanted, *_] = run(size, tmp_path / "whole", settings)

    def stopped(comm):
        with pytest.raises(KeyboardInterrupt):
            train(ms.MirroredStrategy(), settings, tmp_path / "parts", _Stop(calls))

    run_ranks(stopped, size)
    there = sorted(path.name for path in (tmp_path / "parts").glob("ckpt*"))
    assert there == ["ckpt-1.npz", "ckpt-2.npz"][: 1 + calls // 13]
    assert_same_bits(run(size, tmp_path / "parts", settings), wanted)


@pytest.mark.parametrize("size", [1, 2])
def test_training_stops_early_with_the_best_weights(size, tmp_path, monkeypatch):
    seen = []  # the averages of output/bias at each evaluation, on rank 0

    def compute_test_loss(self, tests):
        if self.strategy.rank == 0:
            seen.append(self.optimizer.average(self.model["output/bias"]).numpy().copy())
        return [3.0, 2.0, 2.5, 2.25, 1.0][self.update_count - 1]

    monkeypatch.setattr(text.Trainer, "compute_test_loss", compute_test_loss)
    settings = TINY._replace(steps=5, every=1)
    for result in run(size, tmp_path, settings):
        assert result.history["held_out"][1].tolist() == [3.0, 2.0, 2.5, 2.25]
        np.testing.assert_array_equal(result.weights["output/bias"], seen[1])
    again = run(size, tmp_path, settings)  # there is nothing left to do
    assert len(seen) == 4
    np.testing.assert_array_equal(again[0].weights["output/bias"], seen[1])


@pytest.mark.parametrize(("size", "lacking"), [(1, 0), (2, 1)])
def test_a_module_that_is_not_there_is_an_error_on_every_rank(size, lacking, tmp_path, monkeypatch):
    real = text.read_source

    def source(module):
        mine = threading.current_thread().name == f"rank {lacking}"
        return real("no_such_module" if mine and module == "sched" else module)

    def program(comm):
        with pytest.raises(ImportError, match="source text of Python's module 'no_such_module'"):
            train(ms.MirroredStrategy(), TINY, tmp_path)

    monkeypatch.setattr(text, "read_source", source)
    run_ranks(program, size)


def test_a_module_without_source_is_named():
    with pytest.raises(ImportError, match="'sys'"):  # it is compiled in
        text.read_source("sys")


def test_another_text_on_one_rank_is_an_error_on_all(tmp_path, monkeypatch):
    real = text.read_source

    def source(module):
        other = threading.current_thread().name == "rank 1" and module == "sched"
        return real(module)[other:]

    def program(comm):
        with pytest.raises(ms.MpistratError, match="sched"):
            train(ms.MirroredStrategy(), TINY, tmp_path)

    monkeypatch.setattr(text, "read_source", source)
    run_ranks(program, 2)


WORDS = ["--steps", "2", "--batch", "2", "--length", "8", "--channels", "4"]
WORDS += ["--layers", "1", "--every", "1"]


def test_the_program_prints_its_figures_once_and_some_text(tmp_path, capsys):
    argv = [*WORDS, "--output", str(tmp_path)]
    assert run_ranks(lambda comm: text.main(argv), 2) == [0, 0]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("   ")[0] for line in lines[:2]] == ["update 1 of 2", "update 2 of 2"]
    assert lines[3].startswith("def ")
    assert [re.split("  +", line)[0] for line in lines[-4:]] == [
        "held-out loss",
        "symbols per second",
        "ranks",
        "picture",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {
        "ckpt-1.npz",
        "ckpt-2.npz",
        "curve.png",
        "job.json",
    }


@pytest.mark.parametrize("words", [["--steps", "0"], ["--layers", "-1"]])
def test_what_makes_no_sense_is_refused(words, capsys):
    with pytest.raises(SystemExit) as exit_:
        text.main(words)
    assert exit_.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_what_the_end_needs_is_looked_for_at_the_beginning(tmp_path, monkeypatch):
    def program(comm):
        with pytest.raises(ImportError, match=r"needs no_such_module: pip install"):
            text.main([*WORDS, "--output", str(tmp_path)])

    monkeypatch.setattr(text, "REQUIRED_PACKAGES", ("tqdm", "no_such_module"))
    run_ranks(program, 2)
    assert not list(tmp_path.iterdir())


def test_a_picture_that_cannot_be_written_is_an_error_on_every_rank(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("no room")

    def program(comm):
        with pytest.raises(OSError, match="no room"):
            text.main([*WORDS, "--output", str(tmp_path)])

    monkeypatch.setattr(ms.History, "_draw", fails)
    run_ranks(program, 2)


def test_the_modules_of_the_list_are_there():
    for module in MODULES:
        assert len(text.read_source(module)) > 1000
