"""The picture holds the numbers it was given."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib.image import imread

from mpistrat.examples.curves import Epoch, draw, draw_losses

HISTORY = [Epoch(1, 1.0, 0.5, 0.6, 0.1), Epoch(2, 0.1, 0.9, 0.8, 0.1)]


def test_png_is_a_picture_with_colours(tmp_path):
    draw(HISTORY, "title", tmp_path / "curves.png")
    pixels = imread(tmp_path / "curves.png")
    assert pixels.shape[0] >= 400
    assert pixels.shape[1] >= 800
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 100


def test_title_units_and_legend_are_written(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("matplotlib").rcParams, "svg.fonttype", "none")
    draw(HISTORY, "the title", tmp_path / "curves.svg")
    root = ET.parse(tmp_path / "curves.svg").getroot()
    texts = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")]
    for want in ("the title", "Loss", "Accuracy", "epoch", "training", "test, after the epoch"):
        assert want in texts
    assert any("nats" in text for text in texts)
    assert any("%" in text for text in texts)


def test_one_epoch_is_enough(tmp_path):
    draw(HISTORY[:1], "title", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size


def test_directory_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(OSError, match="absent"):
        draw(HISTORY, "title", tmp_path / "absent" / "curves.png")


def test_losses_are_drawn_with_their_unit(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("matplotlib").rcParams, "svg.fonttype", "none")
    draw_losses(np.array([[10.0, 2.0, 1.5]]), "the title", tmp_path / "curve.svg")
    root = ET.parse(tmp_path / "curve.svg").getroot()
    texts = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")]
    for want in ("the title", "updates", "training, since the last", "held out, averaged weights"):
        assert want in texts
    assert any("nats" in text for text in texts)
