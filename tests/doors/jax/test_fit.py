"""`fit` trains with steps of JAX, and continues them, to the bits of an undisturbed run."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks

jax = pytest.importorskip("jax", reason="wants JAX: pip install 'mpistrat[jax]'")
import jax.numpy as jnp  # noqa: E402

import mpistrat.jax as mj  # noqa: E402

X = np.random.default_rng(0).standard_normal((37, 4)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5, 0.0], np.float32)


class Interrupted(Exception):
    """What ends the first start."""


class Interrupt:
    def on_step(self, run):
        if run.step == 8:
            raise Interrupted


def losses_of(w, rows, wanted):
    losses = (rows @ w - wanted) ** 2
    return losses.sum() / max(len(wanted), 1), losses


def train(comm, directory, is_interrupted):
    strategy = ms.MirroredStrategy(comm=comm)
    gradient = jax.grad(losses_of, has_aux=True)
    with strategy.scope():
        model = mj.TrainState(mj.replicate(jnp.zeros(4)))

    def step(batch):
        rows, wanted = batch
        gradients, losses = gradient(model.value, rows, wanted)
        model.value = model.value - 0.1 * mj.all_reduce("mean", gradients, weight=len(wanted))
        return {"loss": losses}

    try:
        history = ms.fit(
            step,
            ms.Dataset((X, Y)).shuffle(seed=0).batch(8),
            epochs=3,
            state={"model": model},
            directory=directory,
            every="3 steps",
            callbacks=[Interrupt()] if is_interrupted else [],
            strategy=strategy,
            verbose=False,
        )
    except Interrupted:
        return None
    return np.asarray(model.value).tobytes(), history["loss"][1].tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_an_interrupted_run_continues_to_the_same_bits(size, tmp_path):
    whole = run_ranks(train, size, tmp_path / "whole", False)
    assert run_ranks(train, size, tmp_path / "b", True) == [None] * size
    assert run_ranks(train, size, tmp_path / "b", False) == whole
    assert whole[0][1][-1] < whole[0][1][0]
