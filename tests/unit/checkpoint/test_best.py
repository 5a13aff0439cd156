"""Checkpoints that are saved with metrics, and the one that stays because it is the best."""

from __future__ import annotations

import math
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint import inspection, sharded
from mpistrat.checkpoint.atomic import Criterion
from mpistrat.testing import run_ranks

SIZES = (1, 2, 3)


def list_names(paths):
    return [Path(path).stem for path in paths]


def make_manager(directory, max_to_keep=2, **options):
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        w = ms.Variable(0.0, name="w")
    return w, ms.CheckpointManager(ms.Checkpoint(w=w), directory, max_to_keep, **options)


def save_each(directory, values, **options):
    w, manager = make_manager(directory, keep_best="loss", **options)
    for value in values:
        w.assign(value)
        manager.save(metrics={"loss": value})
    manager.wait()
    return list_names(manager.checkpoints), list_names([manager.best_checkpoint])[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_background", [False, True])
def test_the_best_stays_beside_the_newest(tmp_path, size, is_background):
    outcomes = run_ranks(
        lambda comm: save_each(tmp_path, [3.0, 1.0, 2.0, 4.0, 5.0], background=is_background), size
    )
    assert outcomes == [(["ckpt-2", "ckpt-4", "ckpt-5"], "ckpt-2")] * size
    assert sorted(list_names(tmp_path.glob("ckpt-*"))) == ["ckpt-2", "ckpt-4", "ckpt-5"]


def test_a_better_one_takes_its_place(tmp_path):
    assert save_each(tmp_path, [1.0, 2.0, 3.0, 0.5, 4.0]) == (["ckpt-4", "ckpt-5"], "ckpt-4")


def test_high_values_may_be_good(tmp_path):
    outcome = save_each(tmp_path, [1.0, 3.0, 2.0, 0.5, 0.25], best_mode="max", max_to_keep=1)
    assert outcome == (["ckpt-2", "ckpt-5"], "ckpt-2")


def test_of_equal_values_the_first_is_best(tmp_path):
    assert save_each(tmp_path, [2.0, 1.0, 1.0, 1.0, 1.0])[1] == "ckpt-2"


def test_nan_is_never_best():
    criterion = Criterion("loss", "min")
    paths = [Path("a"), Path("b"), Path("c")]
    values = [math.nan, 2.0, 3.0]
    metrics = {path: {"loss": value} for path, value in zip(paths, values, strict=True)}
    assert criterion.find_best(metrics) == Path("b")
    assert criterion.find_best({paths[0]: {"loss": math.nan}, paths[1]: {}}) is None


@pytest.mark.parametrize("size", SIZES)
def test_another_start_knows_the_best(tmp_path, size):
    run_ranks(lambda comm: save_each(tmp_path, [3.0, 1.0, 2.0]), size)

    def continue_run(comm):
        w, manager = make_manager(tmp_path, keep_best="loss")
        best = list_names([manager.best_checkpoint])
        manager.restore_or_initialize()
        newest = float(w.numpy())
        for _ in range(3):
            manager.save()  # without metrics: never best
        manager.checkpoint.restore(manager.best_checkpoint)
        return best, newest, list_names(manager.checkpoints), float(w.numpy())

    expected = (["ckpt-2"], 2.0, ["ckpt-2", "ckpt-5", "ckpt-6"], 1.0)
    assert run_ranks(continue_run, size) == [expected] * size


def test_without_the_option_nothing_else_stays(tmp_path):
    _, manager = make_manager(tmp_path)
    for value in (1.0, 2.0, 3.0):
        manager.save(metrics={"loss": value})
    assert list_names(manager.checkpoints) == ["ckpt-2", "ckpt-3"]
    assert manager.best_checkpoint is None


def test_a_damaged_one_is_not_kept_as_the_best(tmp_path):
    save_each(tmp_path, [1.0, 2.0])
    (tmp_path / "ckpt-1.npz").write_bytes(b"no archive")
    _, manager = make_manager(tmp_path, keep_best="loss")
    assert manager.best_checkpoint.endswith("ckpt-2.npz")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("min_nbytes", [1, 1 << 30])  # directories, and files
def test_one_that_was_found_damaged_is_not_the_best(tmp_path, monkeypatch, size, min_nbytes):
    monkeypatch.setattr(sharded, "MIN_DIRECTORY_NBYTES", min_nbytes)
    run_ranks(lambda comm: save_each(tmp_path, [2.0, 1.0]), size)
    path = Path(ms.latest_checkpoint(tmp_path))
    path = path / "data-0.bin" if path.is_dir() else path
    encoded = path.read_bytes()
    value = np.float64(1.0).tobytes()
    assert encoded.count(value) == 1
    path.write_bytes(encoded.replace(value, np.float64(0.5).tobytes()))

    def restore(comm):
        w, manager = make_manager(tmp_path, keep_best="loss")
        names = list_names([manager.best_checkpoint])  # the manifest is not damaged
        manager.restore_or_initialize()
        names += list_names([manager.best_checkpoint])
        manager.save(2, metrics={"loss": 0.5})  # in place of the damaged one
        return float(w.numpy()), names + list_names([manager.best_checkpoint])

    expected = (2.0, ["ckpt-2", "ckpt-1", "ckpt-2"])
    assert run_ranks(restore, size) == [expected] * size


def test_a_pipe_with_the_name_of_a_checkpoint(tmp_path):
    save_each(tmp_path, [1.0])
    os.mkfifo(tmp_path / "ckpt-2.npz")
    _, manager = make_manager(tmp_path, keep_best="loss")
    assert list_names([manager.best_checkpoint]) == ["ckpt-1"]
    lines = inspection.list_checkpoints(str(tmp_path))[0]
    assert [line.rpartition("bytes  ")[2] for line in lines] == [
        "ok  loss 1",
        f"{tmp_path}/ckpt-2.npz is not a checkpoint: it is not a regular file.",
    ]


@pytest.mark.parametrize("keep_best", [None, "loss"])
@pytest.mark.parametrize("is_background", [False, True])
def test_only_metrics_of_checkpoints_that_are_there_are_kept(tmp_path, keep_best, is_background):
    def program(comm):
        options = {"keep_best": keep_best, "background": is_background}
        _, manager = make_manager(tmp_path, **options)
        for value in (1.0, 2.0, 3.0, 4.0, 5.0):
            manager.save(metrics={"loss": value})
        manager.wait()
        return list_names(manager._retention.metrics_by_path)

    expected = [] if keep_best is None else ["ckpt-1", "ckpt-4", "ckpt-5"]
    assert run_ranks(program, 2) == [expected] * 2


def test_directories_have_metrics_too(tmp_path, monkeypatch):
    monkeypatch.setattr(sharded, "MIN_DIRECTORY_NBYTES", 1)
    assert save_each(tmp_path, [1.0, 2.0, 3.0, 4.0])[0] == ["ckpt-1", "ckpt-3", "ckpt-4"]
    assert sharded.read_metrics(tmp_path / "ckpt-1.arrays") == {"loss": 1.0}


def test_ranks_with_different_metrics_are_told(tmp_path):
    def program(comm):
        _, manager = make_manager(tmp_path)
        with pytest.raises(ms.LockstepError, match=r"metrics=\{'loss': 1\.0\}"):
            manager.save(metrics={"loss": float(comm.rank)})

    run_ranks(program, 2)
    assert not list(tmp_path.glob("ckpt-*"))


@pytest.mark.parametrize(
    ("metrics", "error", "text"),
    [
        (0.5, TypeError, r"such as \{'loss': 0.5\}, got 0.5"),
        ({"loss": "low"}, TypeError, "got {'loss': 'low'}"),
        ({1: 0.5}, TypeError, "numbers by name"),
        ({}, TypeError, "at least one, such as"),
        ({"loss": "0.5"}, TypeError, "got {'loss': '0.5'}"),
        ({"loss": np.array("0.5")}, TypeError, "numbers by name"),
        ({"loss": True}, TypeError, "got {'loss': True}"),
        ({"loss": np.bool_(True)}, TypeError, "numbers by name"),
        ({"loss": np.zeros(1)}, TypeError, "numbers by name"),
        ({"loss": 1j}, TypeError, "numbers by name"),
        ({"accuracy": 0.5}, ValueError, r"has \['accuracy'\].*keep_best='loss'"),
    ],
)
def test_metrics_are_numbers_by_name(tmp_path, metrics, error, text):
    _, manager = make_manager(tmp_path, keep_best="loss")
    with pytest.raises(error, match=text):
        manager.save(metrics=metrics)


def test_arrays_of_one_number_are_numbers(tmp_path):
    _, manager = make_manager(tmp_path)
    metrics = {"loss": np.float32(0.5), "rows": np.array(3), "part": Fraction(1, 4), "count": 7}
    path = manager.save(metrics=metrics)
    expected = {"loss": 0.5, "rows": 3.0, "part": 0.25, "count": 7.0}
    assert sharded.read_metrics(Path(path)) == expected


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"keep_best": True}, TypeError, "name of a metric or None, got True"),
        ({"keep_best": "loss", "best_mode": "low"}, ValueError, "'min' or 'max', got 'low'"),
    ],
)
def test_options_are_checked(tmp_path, options, error, text):
    with pytest.raises(error, match=text):
        make_manager(tmp_path, **options)


def test_the_command_shows_them(tmp_path):
    save_each(tmp_path, [1.0, 0.25])
    lines = inspection.list_checkpoints(str(tmp_path))[0]
    assert [line.split("bytes")[1].split() for line in lines] == [
        ["ok", "loss", "1"],
        ["ok", "loss", "0.25"],
    ]
    assert "  metric loss = 0.25" in inspection.show_checkpoint(str(tmp_path))[0]


@pytest.mark.parametrize("size", SIZES)
def test_an_epoch_that_the_hook_saves_is_saved_once(tmp_path, size):
    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            w = ms.Variable(0.0)
        dataset = ms.Dataset(np.arange(8.0)).batch(4)
        checkpoint = ms.Checkpoint(w=w, data=dataset)
        manager = ms.CheckpointManager(checkpoint, tmp_path, None, keep_best="loss")

        def end_epoch():
            if dataset.epoch != 2:
                manager.save(metrics={"loss": float(dataset.epoch)})

        batches = strategy.experimental_distribute_dataset(dataset)
        for _ in manager.resume(batches, 3, on_epoch_end=end_epoch):
            strategy.run(lambda: None)
        metrics = [sharded.read_metrics(Path(path)) for path in manager.checkpoints]
        return metrics, list_names([manager.best_checkpoint])

    expected = ([{"loss": 1.0}, {}, {"loss": 3.0}], ["ckpt-1"])
    assert run_ranks(program, size) == [expected] * size
