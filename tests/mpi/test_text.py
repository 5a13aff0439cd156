"""The text program under mpiexec trains the model that plain NumPy trains, on a second start."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.examples import text, text_data
from mpistrat.testing import same

PLAIN = Path(__file__).parents[1] / "unit" / "examples" / "plain_text.py"
SHORT = text.TextSettings(*(4, 3, 2, 8, 6, 2), lr=0.02, every=2, seed=2, dtype="float64")

pytestmark = pytest.mark.mpi


def test_weights_and_figures_are_those_of_plain_numpy(world, tmp_path, monkeypatch):
    monkeypatch.setattr(text_data, "TRAINING_MODULES", ("queue", "sched"))
    monkeypatch.setattr(text_data, "HELD_OUT_MODULES", ("this",))
    strategy = ms.MirroredStrategy()
    directory = Path(world.bcast(str(tmp_path)))
    training = text_data.read_pieces(strategy, text_data.TRAINING_MODULES, SHORT.length)
    held_out = text_data.read_pieces(strategy, text_data.HELD_OUT_MODULES, SHORT.length)
    order = ms.Dataset(np.arange(len(training))).shuffle(seed=SHORT.seed).repeat().batch(3)
    batches = (training[rows] for rows in order)
    weights, history = runpy.run_path(str(PLAIN))["simulate"](
        SHORT, text_data.SYMBOL_COUNT, batches, held_out
    )
    settings = replace(SHORT, checkpoint=str(directory))
    for _ in range(2):  # the second time it is restored
        averages, curves = text.train(strategy, settings, verbose=False)
        trained_weights = {name: value.numpy() for name, value in averages.items()}
        table = curves.table("loss", "validation/loss") / [SHORT.accumulate, 1, 1]
        same(world, [table, trained_weights])
        np.testing.assert_allclose(table, history, rtol=1e-9)
        for name, value in weights.items():
            np.testing.assert_allclose(trained_weights[name], value, rtol=0, atol=1e-9)
