"""The state of a run before and after rows: what is warned of, when, and on which ranks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import RanksFailed, run_ranks
from mpistrat.training import state_check


def train(state, change_state=lambda: None, **options):
    """Train for some rows of one step; `change_state` is the step."""

    def step(x):
        change_state()
        return {"loss": x}

    options = {"epochs": 2, "validate_every": "1 step", "verbose": False} | options
    ms.fit(step, ms.Dataset(np.arange(12.0)).batch(3), state=state, **options)


def run_in_scope(program, size):
    """Run a program on ranks, in the scope of a strategy."""

    def run_program(comm):
        with ms.MirroredStrategy(comm=comm).scope():
            program(comm)

    run_ranks(run_program, size)


def collect_warnings(program, size):
    """The texts of the warnings of a program."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_in_scope(program, size)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("size", [2, 3])
def test_one_rank_replaces_a_variable(size):
    def program(comm):
        model = {"w": ms.Variable(0.0, name="w")}

        def replace():
            if comm.rank == 1:
                model["w"] = np.ones(())

        train(model, replace)

    (text,) = collect_warnings(program, size)
    assert text.startswith("fit: on rank 1 arrays have taken the place of variables")
    assert "in the state, 'w':" in text


def test_all_ranks_replace_a_variable():
    def program(comm):
        model = {"w": ms.Variable(0.0, name="w")}
        train(model, lambda: model.update(w=np.ones(())))

    for size in (1, 3):
        (text,) = collect_warnings(program, size)
        assert text.startswith("fit: arrays have taken the place of variables in the state, 'w':")


def test_a_variable_on_one_rank_and_an_array_on_another():
    def program(comm):
        w = ms.Variable(0.0, name="w")
        train({"w": w if comm.rank else np.zeros(())})

    with pytest.raises(RanksFailed) as caught:
        run_in_scope(program, 2)
    assert len(caught.value.errors) == 2
    for error in caught.value.errors.values():
        assert isinstance(error, ms.LockstepError)


def test_a_state_that_one_rank_cannot_read(monkeypatch):
    def digest(arrays):
        if arrays[0] == 1.0:
            raise ValueError("no memory here")
        return bytes(16)

    def program(comm):
        with pytest.raises((ValueError, ms.RemoteError), match="no memory here"):
            train({"w": np.array(float(comm.rank))})
        assert ms.get_strategy().all_reduce("sum", 1) == 3  # all ranks have left `fit`

    monkeypatch.setattr(state_check, "digest", digest)
    run_in_scope(program, 3)


class StepsAtWarning:
    """A callback that records after how many steps there were warnings."""

    def __init__(self, caught):
        self.caught, self.steps = caught, []

    def on_epoch(self, run):
        self.steps.append((run.step, len(self.caught)))


@pytest.mark.parametrize(
    ("max_steps", "expected_counts"), [(1000, [0] * 8), (5, [0] * 4 + [1] * 4)]
)
def test_when_it_is_said_that_nothing_changes(max_steps, expected_counts, monkeypatch):
    monkeypatch.setattr(state_check, "_MAX_UNCHANGED_STEPS", max_steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback = StepsAtWarning(caught)
        run_in_scope(lambda comm: train({"w": ms.Variable(0.0, name="w")}, callbacks=[callback]), 1)
    assert callback.steps == [*enumerate(expected_counts, 1)]
    (warning,) = caught
    assert "no step so far has changed 'w'" in str(warning.message)


def test_a_start_without_steps_says_nothing(tmp_path):
    def program(comm):
        w = ms.Variable(0.0, name="w")
        for _ in range(2):  # the second start has nothing to do
            train({"w": w}, lambda: w.assign_add(1.0), directory=tmp_path)

    assert collect_warnings(program, 2) == []


def test_a_difference_is_named_once_for_each_run(tmp_path):
    def program(comm):
        for name in ("a", "b"):
            model = {"w": np.full(3, float(comm.rank))}
            train(model, directory=tmp_path / name)
        ms.Checkpoint(w=np.full(3, float(comm.rank))).save(tmp_path / "other")
        train({"w": np.full(3, float(comm.rank))})
        train({"w": np.full(2, float(comm.rank))})

    texts = collect_warnings(program, 2)
    calls = [text.partition(": on rank 1 'w' differs from rank 0")[0] for text in texts]
    assert calls == ["fit", "fit", "Checkpoint.save", "fit", "fit"]
