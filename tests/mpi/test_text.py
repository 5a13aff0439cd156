"""The text program under mpiexec trains the model that plain NumPy trains, on a second start."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.examples import text
from mpistrat.testing import same

PLAIN = Path(__file__).parents[1] / "unit" / "examples" / "plain_text.py"
SHORT = text.TextSettings(*(4, 3, 2, 8, 6, 2), lr=0.02, every=2, seed=2, dtype="float64")

pytestmark = pytest.mark.mpi


def test_weights_and_figures_are_those_of_plain_numpy(world, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "TRAINING_MODULES", ("queue", "sched"))
    monkeypatch.setattr(text, "HELD_OUT_MODULES", ("this",))
    strategy = ms.MirroredStrategy()
    directory = Path(world.bcast(str(tmp_path)))
    training = text.read_pieces(strategy, text.TRAINING_MODULES, SHORT.length)
    held_out = text.read_pieces(strategy, text.HELD_OUT_MODULES, SHORT.length)
    order = ms.Dataset(np.arange(len(training))).shuffle(seed=SHORT.seed).repeat().batch(3)
    batches = (training[rows] for rows in order)
    weights, history = runpy.run_path(str(PLAIN))["simulate"](
        SHORT, text.SYMBOL_COUNT, batches, held_out
    )
    for _ in range(2):  # the second time it is restored
        result = text.train(strategy, SHORT, directory)
        same(world, [result.history.table(), result.weights])
        np.testing.assert_allclose(result.history.table(), history, rtol=1e-9)
        for name, value in weights.items():
            np.testing.assert_allclose(result.weights[name], value, rtol=0, atol=1e-9)
