"""The digits program under mpiexec trains the model that plain NumPy trains."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

import mpistrat
from mpistrat.examples.digits import DigitsSettings, train
from mpistrat.testing import same

PLAIN = Path(__file__).parents[1] / "unit" / "examples" / "plain_digits.py"
# 1,409 is 11 x 128 + 1 too: a last batch of one image in half as many steps.
SHORT = DigitsSettings(epochs=2, batch=128, seed=2, hidden=24)

# Each rank imports scikit-learn for two seconds; unit/examples compares 1 to 4 threads.
pytestmark = pytest.mark.mpi(min_size=3)


def test_parameters_and_figures_are_those_of_plain_numpy(world):
    images = mpistrat.Dataset(np.arange(1409)).shuffle(seed=SHORT.seed).batch(SHORT.batch)
    orders = [list(images) for _ in range(SHORT.epochs)]
    values, history = runpy.run_path(str(PLAIN))["simulate"](
        orders, seed=SHORT.seed, epochs=SHORT.epochs, lr=SHORT.lr, hidden=SHORT.hidden
    )
    model, curves = train(mpistrat.MirroredStrategy(), SHORT, verbose=False)
    parameters = [variable.numpy() for variable in model]
    same(world, parameters)
    for got, want in zip(parameters, values, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)
    got = curves.table("loss", "accuracy", "validation/accuracy")[:, 1:]
    np.testing.assert_allclose(got, history, rtol=0, atol=1e-11)
