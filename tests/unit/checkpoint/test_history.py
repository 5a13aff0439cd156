"""Curves that survive a resume."""

from __future__ import annotations

import csv
import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks


def made():
    with ms.MirroredStrategy().scope():
        history = ms.History()
    for epoch in range(1, 4):
        history.append(epoch, loss=0.1**epoch, accuracy=epoch / 4)
    history.append(7, test_loss=math.nan)
    return history


def test_curves_have_steps_of_their_own():
    history = made()
    assert history.names == ("loss", "accuracy", "test_loss")
    steps, values = history["accuracy"]
    assert (steps.tolist(), values.tolist()) == ([1, 2, 3], [0.25, 0.5, 0.75])
    np.testing.assert_array_equal(
        history.table("accuracy", "test_loss"),
        [[1, 0.25, np.nan], [2, 0.5, np.nan], [3, 0.75, np.nan], [7, np.nan, np.nan]],
    )
    assert ms.History().table().shape == (0, 1)


def test_steps_grow_and_values_are_numbers():
    history = made()
    with pytest.raises(ValueError, match="'loss' has step 3 already, and steps grow"):
        history.append(3, new=1, loss=2)
    for wrong in (None, "low", np.ones(3), 1j, 10**400, ms.PerReplica(1.0)):
        with pytest.raises(TypeError, match=r"History.append: loss must be a number, got "):
            history.append(8, new=1, loss=wrong)
    with pytest.raises(TypeError, match=r"step must be an integer of 64 bits, got 9223372036854"):
        history.append(2**63, loss=1)  # an array of steps could not hold it
    with pytest.raises(TypeError, match=r"History.append: step must be an integer of .*, got 8.5"):
        history.append(8.5, loss=1)
    assert history.names == ("loss", "accuracy", "test_loss")
    assert history.last("loss") == 0.1**3


def test_a_curve_that_is_not_there():
    history = made()
    for ask in (history.last, history.table, history.__getitem__):
        with pytest.raises(KeyError, match=r"'los' is not a curve of this history; it has .'loss'"):
            ask("los")
    with pytest.raises(TypeError, match=r"History.draw: panels must be a dict, got \['loss'\]"):
        history.draw("curves.png", ["loss"])


@pytest.mark.parametrize(("saved_on", "restored_on"), [(1, 2), (3, 1)])
def test_what_is_after_the_restored_step_is_dropped(saved_on, restored_on, tmp_path):
    def save(comm):
        history = made()
        empty = ms.History()
        path = ms.Checkpoint(v=ms.Variable(0), h=history, e=empty).save(tmp_path / "x")
        return path

    def program(comm):
        with ms.MirroredStrategy().scope():
            v, history, empty = ms.Variable(0), ms.History(), ms.History()
        checkpoint = ms.Checkpoint(v=v, h=history, e=empty)
        path = checkpoint.save(tmp_path / "x")
        for number in range(5):
            history.append(number, loss=number, accuracy=0.1)
            empty.append(number, x=1)
            if number == 2:
                path = checkpoint.save(tmp_path / "x")
        checkpoint.restore(path).assert_consumed()
        assert empty.table().tolist() == [[0, 1], [1, 1], [2, 1]]
        history.append(3, loss=7)
        return history.table("loss").tolist()

    def fresh(comm, path):
        with ms.MirroredStrategy().scope():
            v, history = ms.Variable(0), ms.History()
        ms.Checkpoint(v=v, h=history).restore(path, partial=True)
        history.append(9, loss=9)
        return history.table("loss").tolist()

    wanted = [[0, 0], [1, 1], [2, 2]]
    assert run_ranks(program, saved_on) == [[*wanted, [3, 7]]] * saved_on
    path = ms.latest_checkpoint(tmp_path)
    assert run_ranks(fresh, restored_on, path) == [[*wanted, [9, 9]]] * restored_on


def test_the_csv_is_written_by_one_rank(tmp_path):
    run_ranks(lambda comm: made().write_csv(tmp_path / "curves.csv"), 3)
    with (tmp_path / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "7"]
    assert [float(row["loss"]) for row in rows[:3]] == [0.1, 0.1**2, 0.1**3]
    assert rows[3] == {"step": "7", "loss": "", "accuracy": "", "test_loss": "nan"}
    assert [path.name for path in tmp_path.iterdir()] == ["curves.csv"]


def test_the_picture_is_drawn_by_one_rank(tmp_path):
    run_ranks(lambda comm: made().draw(tmp_path / "curves.png"), 2)
    from matplotlib.image import imread  # slow, and not for every worker

    pixels = imread(tmp_path / "curves.png")
    assert pixels.shape[0] >= 400
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 100
    ms.History().draw(tmp_path / "made" / "empty.png")
    assert (tmp_path / "made" / "empty.png").exists()


def test_title_axes_and_legend_are_written(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("matplotlib").rcParams, "svg.fonttype", "none")
    panels = {"nats": ["loss", "test_loss"], "part": ["accuracy"]}
    made().draw(tmp_path / "curves.svg", panels, title="the title", x="epoch")
    root = ET.parse(tmp_path / "curves.svg").getroot()
    texts = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")]
    for want in ("the title", "nats", "part", "epoch", "loss", "test loss", "accuracy"):
        assert want in texts


@pytest.mark.parametrize("write", ["write_csv", "draw"])
def test_what_cannot_be_written_is_an_error_on_all_ranks(write, tmp_path):
    def program(comm):
        with pytest.raises(OSError, match="absent"):
            getattr(made(), write)(tmp_path / "absent" / "x.svg")

    (tmp_path / "absent").touch()  # a file is not a directory
    run_ranks(program, 2)


def test_of_no_strategy_it_is_not_written_in_a_job_of_several(tmp_path):
    def program(comm):
        history = ms.History()
        with pytest.raises(ms.StrategyError, match="every rank would write"):
            history.write_csv(tmp_path / "x.csv")

    run_ranks(program, 2)
