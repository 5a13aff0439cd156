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


class OptimizerCallback:
    """A callback that saves an optimizer."""

    def __init__(self, *parts):
        self.parts = parts

    def on_epoch(self, run):
        pass

    def checkpoint_state(self):
        return list(self.parts)

    def restore_state(self, state):
        pass


def update(optimizer, *variables):
    pairs = [(np.ones(()), variable) for variable in variables]
    return lambda: optimizer.apply_gradients(pairs, weight=1)


def train_by_optimizer(optimizer, directory, saved_names, callback_names=()):
    """Train two variables, and save some of the parts of the program."""
    parts = {name: ms.Variable(0.0, name=name) for name in ("v", "w")}
    step = update(optimizer, *parts.values())
    optimizer.build(parts.values())
    parts["optimizer"] = optimizer
    state = {name: parts[name] for name in saved_names}
    callbacks = [OptimizerCallback(*map(parts.get, callback_names))] if callback_names else []
    train(state, step, directory=directory, callbacks=callbacks, validate_every="2 steps")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("make_optimizer", "saved_names", "subjects"),
    [
        (lambda: ms.optim.Adam(0.1), ("v", "w"), "the state of Adam"),
        (lambda: ms.optim.Adam(0.1), ("v", "optimizer"), "variable 'w:0'"),
        (lambda: ms.optim.Adam(0.1), ("v",), "the state of Adam, variable 'w:0'"),
        (lambda: ms.optim.SGD(0.1), ("v",), "variable 'w:0'"),
        (lambda: ms.optim.SGD(lambda step: 0.1), ("v", "w"), "the state of SGD"),
        (lambda: ms.optim.SGD(0.1, accumulate=2), ("v", "w"), "the state of SGD"),
    ],
)
def test_changes_that_are_not_saved(make_optimizer, saved_names, subjects, size, tmp_path):
    def program(comm):
        train_by_optimizer(make_optimizer(), tmp_path, saved_names)

    (text,) = collect_warnings(program, size)
    assert text.startswith(f"fit: checkpoints of this run lack {subjects}, which steps")
    assert "'optimizer': optimizer}, after optimizer.build(variables)" in text


@pytest.mark.parametrize("size", [1, 2])
def test_changes_that_are_saved_or_need_not_be(size, tmp_path):
    def program(comm):
        train_by_optimizer(ms.optim.Adam(0.1), tmp_path / "a", ("v", "w", "optimizer"))
        train_by_optimizer(ms.optim.Adam(0.1), tmp_path / "b", ("v",), ("optimizer", "w"))
        train_by_optimizer(ms.optim.Adam(0.1), None, ("v",))
        train_by_optimizer(ms.optim.SGD(0.1), tmp_path / "c", ("v", "w"))
        x, y = ms.Variable(0.0, name="x"), ms.Variable(0.0, name="y")
        earlier_optimizer = ms.optim.Adam(0.1)
        ms.get_strategy().run(update(earlier_optimizer, y))
        train({"x": x}, lambda: x.assign_add(1.0), directory=tmp_path / "d")
        assert int(earlier_optimizer.iterations) == 1

    assert collect_warnings(program, size) == []


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
