"""The text program: the model of plain NumPy at any number of ranks, on every start."""

from __future__ import annotations

import re
import runpy
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import mpistrat as ms
from mpistrat.examples import text, text_data
from mpistrat.examples.text import TextSettings
from mpistrat.testing import run_ranks

PLAIN = runpy.run_path(str(Path(__file__).with_name("plain_text.py")))
MODULES = (
    *text_data.TRAINING_MODULES,
    *text_data.HELD_OUT_MODULES,
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
    monkeypatch.setattr(text_data, "TRAINING_MODULES", ("queue", "sched"))
    monkeypatch.setattr(text_data, "HELD_OUT_MODULES", ("this",))


def pieces(names):
    """The pieces of length 8, cut by hand."""
    whole = np.concatenate([text_data.read_source(name) for name in names])
    return np.array([whole[i : i + 9] for i in range(0, len(whole) - 8, 8)])


class Result(NamedTuple):
    """The averaged weights and the curves of a rank."""

    weights: dict[str, Any]
    history: ms.History

    @property
    def losses(self):
        """The update, the training loss and the loss on the held-out text, a row for each."""
        table = self.history.table("loss", "validation/loss")
        return table / [TINY.accumulate, 1, 1]


def train(strategy, settings, directory):
    chosen = replace(settings, checkpoint=str(directory))
    averages, history = text.train(strategy, chosen, verbose=False)
    return Result({name: value.numpy().copy() for name, value in averages.items()}, history)


def run(size, directory, settings=TINY):
    return run_ranks(lambda comm: train(ms.MirroredStrategy(), settings, directory), size)


def assert_same_bits(results, wanted):
    for result in results:
        assert result.losses.tobytes() == wanted.losses.tobytes()
        for name, value in wanted.weights.items():
            assert result.weights[name].tobytes() == value.tobytes()


@SIZES
def test_training_is_that_of_plain_numpy(size, tmp_path):
    training, held_out = pieces(["queue", "sched"]), pieces(["this"])
    order = ms.Dataset(np.arange(len(training))).shuffle(seed=1).repeat().batch(3)
    batches = (training[rows] for rows in order)
    weights, history = PLAIN["simulate"](TINY, text_data.SYMBOL_COUNT, batches, held_out)
    assert history[-1, 1] < history[0, 1]  # it learns
    results = run(size, tmp_path)
    assert_same_bits(results, results[0])
    np.testing.assert_allclose(results[0].losses, history, rtol=1e-9)
    for name, value in weights.items():
        np.testing.assert_allclose(results[0].weights[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("size", "step_count", "names"),
    [(1, 7, ["ckpt-1.npz"]), (2, 9, ["ckpt-1.npz"]), (2, 14, ["ckpt-1.npz", "ckpt-2.npz"])],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    size, step_count, names, tmp_path, monkeypatch
):
    settings = replace(TINY, dtype="float32")
    [wanted, *_] = run(size, tmp_path / "whole", settings)
    real, step_counts = text.train_step, defaultdict(int)

    def step(*args):
        step_counts[threading.current_thread().name] += 1
        if step_counts[threading.current_thread().name] == step_count:
            raise KeyboardInterrupt
        return real(*args)

    def stopped(comm):
        with pytest.raises(KeyboardInterrupt):
            train(ms.MirroredStrategy(), settings, tmp_path / "parts")

    monkeypatch.setattr(text, "train_step", step)
    run_ranks(stopped, size)
    monkeypatch.setattr(text, "train_step", real)
    assert sorted(path.name for path in (tmp_path / "parts").glob("ckpt*")) == names
    assert_same_bits(run(size, tmp_path / "parts", settings), wanted)
    [other] = run(1, tmp_path / "parts", settings)  # nothing is left to do
    assert_same_bits([other], wanted)


@pytest.mark.parametrize("size", [1, 2])
def test_training_stops_early_with_the_best_weights(size, tmp_path, monkeypatch):
    seen = []  # the averages of output/bias at each validation, on rank 0

    def measure_loss(averages, batch):
        if threading.current_thread().name == "rank 0":
            seen.append(averages["output/bias"].numpy().copy())
        counts[threading.current_thread().name] += 1
        number = (counts[threading.current_thread().name] - 1) // batch_count
        return {"loss": ([3.0, 2.0, 2.5, 2.25, 1.0][number], len(batch))}

    counts, batch_count = defaultdict(int), -(-len(pieces(["this"])) // TINY.batch)
    monkeypatch.setattr(text, "measure_loss", measure_loss)
    settings = replace(TINY, steps=5, every=1)
    for result in run(size, tmp_path, settings):
        assert result.history["validation/loss"][1].tolist() == [3.0, 2.0, 2.5, 2.25]
        np.testing.assert_array_equal(result.weights["output/bias"], seen[batch_count])
    again = run(size, tmp_path, settings)  # there is nothing left to do
    assert len(seen) == 4 * batch_count
    np.testing.assert_array_equal(again[0].weights["output/bias"], seen[batch_count])


@pytest.mark.parametrize(("size", "lacking"), [(1, 0), (2, 1)])
def test_a_module_that_is_not_there_is_an_error_on_every_rank(size, lacking, tmp_path, monkeypatch):
    real = text_data.read_source

    def source(module):
        mine = threading.current_thread().name == f"rank {lacking}"
        return real("no_such_module" if mine and module == "sched" else module)

    def program(comm):
        with pytest.raises(ImportError, match="source text of Python's module 'no_such_module'"):
            train(ms.MirroredStrategy(), TINY, tmp_path)

    monkeypatch.setattr(text_data, "read_source", source)
    run_ranks(program, size)


def test_a_module_without_source_is_named():
    with pytest.raises(ImportError, match="'sys'"):  # it is compiled in
        text_data.read_source("sys")


def test_another_text_on_one_rank_is_an_error_on_all(tmp_path, monkeypatch):
    real = text_data.read_source

    def source(module):
        other = threading.current_thread().name == "rank 1" and module == "sched"
        return real(module)[other:]

    def program(comm):
        with pytest.raises(ms.MpistratError, match="sched"):
            train(ms.MirroredStrategy(), TINY, tmp_path)

    monkeypatch.setattr(text_data, "read_source", source)
    run_ranks(program, 2)


WORDS = ["--steps", "2", "--batch", "2", "--length", "8", "--channels", "4"]
WORDS += ["--layers", "1", "--every", "1"]


def test_the_program_prints_its_figures_once_and_some_text(tmp_path, capsys):
    argv = [*WORDS, "--checkpoint", str(tmp_path)]
    assert run_ranks(lambda comm: text.main(argv), 2) == [0, 0]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("   ")[0] for line in lines[:2]] == ["step 2 of 4", "step 4 of 4"]
    assert lines[3].startswith("def ")
    assert [re.split("  +", line)[0] for line in lines[-4:]] == [
        "held-out loss",
        "symbols per second",
        "ranks",
        "directory",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("ckpt-1.npz", "ckpt-2.npz", "curves.png", "history.csv", "job.json"),
    }


@pytest.mark.parametrize("words", [["--steps", "0"], ["--layers", "-1"]])
def test_what_makes_no_sense_is_refused(words, capsys):
    with pytest.raises(SystemExit) as exit_:
        text.main(words)
    assert exit_.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_an_error_on_every_rank(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("no room")

    def program(comm):
        with pytest.raises(OSError, match="no room"):
            text.main([*WORDS, "--checkpoint", str(tmp_path)])

    monkeypatch.setattr(ms.History, "_draw", fails)
    run_ranks(program, 2)


def test_the_modules_of_the_list_are_there():
    for module in MODULES:
        assert len(text_data.read_source(module)) > 1000
