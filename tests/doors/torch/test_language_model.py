"""The transformer on Python's source text: the same losses at every number of ranks."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.examples import text
from mpistrat.testing import RanksFailed, run_ranks

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
from mpistrat.examples import language_model_torch as example  # noqa: E402

# Batches of 6 leave a fourth rank without rows.
TINY = example.TransformerSettings(
    *(100, 6, 12, 16, 2, 2), lr=0.01, every=40, seed=1
)  # fmt: skip


_lock = threading.Lock()  # ranks that are threads have one generator
_initial = example.make_model


def initial(settings):
    with _lock:
        return _initial(settings)


@pytest.fixture(autouse=True)
def _little_text(monkeypatch):
    monkeypatch.setattr(example, "make_model", initial)
    monkeypatch.setattr(text, "TRAINING_MODULES", ("queue", "sched"))
    monkeypatch.setattr(text, "HELD_OUT_MODULES", ("this",))


def run(size, directory, settings=TINY, progress=None):
    def program(comm):
        return example.train(ms.MultiWorkerMirroredStrategy(), settings, directory, progress)

    return run_ranks(program, size)


@functools.cache
def plain():
    """The losses of a loop of PyTorch alone, on whole batches."""
    strategy = ms.OneDeviceStrategy("cpu")
    model = initial(TINY)
    pieces = ms.Dataset(text.read_pieces(strategy, text.TRAINING_MODULES, TINY.length))
    batches = iter(pieces.shuffle(seed=TINY.seed).repeat().batch(TINY.batch))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.004)
    fall = ms.optim.Cosine(TINY.lr, TINY.steps - 10, TINY.lr / 10)
    rate, losses = ms.optim.WarmUp(fall, 10), []
    optimizer.param_groups[0]["weight_decay"] = ms.optim.AdamW().weight_decay
    for step in range(TINY.steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        loss = example.compute_loss(model, torch.from_numpy(next(batches)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("size", [1, 4])
def test_losses_are_those_of_one_process_of_pytorch(size, tmp_path):
    for result in run(size, tmp_path):
        np.testing.assert_allclose(result.losses, plain(), rtol=2e-3)
        assert result.history.last("training") < 0.8 * result.losses[0]


class Stops:
    """Ends a run after its second evaluation."""

    told = 0

    def advance(self):
        pass

    def print_line(self, line):
        self.told += 1
        if self.told == 2:
            raise InterruptedError(line)


def test_a_second_start_goes_on_at_another_number_of_ranks(tmp_path):
    short = TINY._replace(steps=20, every=5)
    whole = run(1, tmp_path / "whole", short)[0]

    def stopped(comm):
        strategy = ms.MultiWorkerMirroredStrategy()
        example.train(strategy, short, tmp_path / "parts", Stops())

    with pytest.raises(RanksFailed, match="update 10 of 20"):
        run_ranks(stopped, 2)
    again = run(1, tmp_path / "parts", short)[0]
    np.testing.assert_allclose(again.losses, whole.losses[5:], rtol=1e-3)
    np.testing.assert_allclose(again.history.table(), whole.history.table(), rtol=1e-3)


def test_the_program_writes_text_and_a_picture(tmp_path, capsys):
    words = "--steps 4 --every 2 --batch 4 --length 8 --channels 8 --heads 2 --layers 1"
    assert example.main([*words.split(), "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "held-out loss" in printed and "def " in printed
    assert (tmp_path / "curve.png").stat().st_size > 1000
