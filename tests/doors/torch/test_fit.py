"""`fit` trains models of PyTorch, and continues them, to the bits of an undisturbed run."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
import mpistrat.torch as mt  # noqa: E402

X = np.random.default_rng(0).standard_normal((37, 4)).astype(np.float32)
Y = X @ np.array([[1.0], [-2.0], [0.5], [0.0]], np.float32)


def torch_adam(model):
    return torch.optim.Adam(model.parameters(), 0.02)


def fused_adam(model):
    return mt.FusedOptimizer(model, ms.optim.Adam(0.02))


class Interrupted(Exception):
    """What ends the first start."""


class Interrupt:
    def on_step(self, run):
        if run.step == 8:
            raise Interrupted


def train(comm, make_optimizer, directory, is_interrupted):
    strategy = ms.MirroredStrategy(comm=comm)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
    model = mt.replicate(torch.nn.Sequential(*layers), strategy)
    optimizer = make_optimizer(model)

    def step(batch):
        rows, wanted = batch
        losses = (model(rows) - wanted).square().mean(1)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": losses}

    def score(batch):
        rows, wanted = batch
        with torch.no_grad():
            losses = (model(rows) - wanted).square().mean(1)
        return {"loss": (losses.mean(), len(losses))}

    try:
        history = ms.fit(
            step,
            mt.batches((X, Y), strategy, batch_size=8, shuffle=True),
            epochs=3,
            state={"model": model, "optimizer": optimizer},
            validate=score,
            validation_data=mt.batches((X, Y), strategy, batch_size=16),
            directory=directory,
            every="3 steps",
            callbacks=[Interrupt()] if is_interrupted else [],
            strategy=strategy,
            verbose=False,
        )
    except Interrupted:
        return None
    weights = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return weights, history["loss"][1].tolist(), history["validation/loss"][1].tolist()


@pytest.mark.parametrize("make_optimizer", [torch_adam, fused_adam])
@pytest.mark.parametrize("size", [1, 2])
def test_an_interrupted_run_continues_to_the_same_bits(size, make_optimizer, tmp_path):
    whole = run_ranks(train, size, make_optimizer, tmp_path / "whole", False)
    assert run_ranks(train, size, make_optimizer, tmp_path / "b", True) == [None] * size
    assert run_ranks(train, size, make_optimizer, tmp_path / "b", False) == whole
    assert whole[0][2][-1] < whole[0][2][0]
