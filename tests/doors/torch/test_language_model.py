"""The transformer on Python's source text: the same losses at every number of ranks."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.examples import text_data
from mpistrat.testing import RanksFailed, run_ranks

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
from mpistrat.examples import language_model_torch as example  # noqa: E402

# Batches of 6 leave a fourth rank without rows.
TINY = example.TransformerSettings(
    *(100, 6, 12, 16, 2, 2), lr=0.01, every=5, seed=1
)  # fmt: skip


_lock = threading.Lock()  # ranks that are threads have one generator
_initial = example.make_model


def initial(settings):
    with _lock:
        return _initial(settings)


@pytest.fixture(autouse=True)
def _little_text(monkeypatch):
    monkeypatch.setattr(example, "make_model", initial)
    monkeypatch.setattr(text_data, "TRAINING_MODULES", ("queue", "sched"))
    monkeypatch.setattr(text_data, "HELD_OUT_MODULES", ("this",))


def run(size, directory, settings=TINY):
    """The curves of each rank."""
    settings = replace(settings, checkpoint=str(directory))

    def program(comm):
        return example.train(ms.MultiWorkerMirroredStrategy(), settings, verbose=False)[1]

    return run_ranks(program, size)


@functools.cache
def plain():
    """The losses of a loop of PyTorch alone, on whole batches."""
    strategy = ms.OneDeviceStrategy("cpu")
    model = initial(TINY)
    pieces = ms.Dataset(text_data.read_pieces(strategy, text_data.TRAINING_MODULES, TINY.length))
    batches = iter(pieces.shuffle(seed=TINY.seed).repeat().batch(TINY.batch))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.004)
    fall = ms.optim.Cosine(TINY.lr, TINY.steps - 10, TINY.lr / 10)
    rate, losses = ms.optim.WarmUp(fall, 10), []
    optimizer.param_groups[0]["weight_decay"] = ms.optim.AdamW().weight_decay
    for step in range(TINY.steps):
        optimizer.param_groups[0]["lr"] = rate(step)
        loss = example.compute_losses(model, torch.from_numpy(next(batches))).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("size", [1, 4])
def test_losses_are_those_of_one_process_of_pytorch(size, tmp_path):
    wanted = np.mean(np.reshape(plain(), (-1, TINY.every)), axis=1)
    assert wanted[-1] < 0.8 * wanted[0]
    for history in run(size, tmp_path):
        np.testing.assert_allclose(history["loss"][1], wanted, rtol=2e-3)


def test_a_second_start_goes_on_at_another_number_of_ranks(tmp_path, monkeypatch):
    short = replace(TINY, steps=20)
    whole = run(1, tmp_path / "whole", short)[0]
    real, batch_counts = example.train_step, defaultdict(int)

    def step(*args):
        batch_counts[threading.current_thread().name] += 1
        if batch_counts[threading.current_thread().name] == 13:
            raise InterruptedError("at step 13")
        return real(*args)

    monkeypatch.setattr(example, "train_step", step)
    with pytest.raises(RanksFailed, match="at step 13"):
        run(2, tmp_path / "parts", short)
    monkeypatch.setattr(example, "train_step", real)
    again = run(1, tmp_path / "parts", short)[0]
    curves = [history.table("loss", "validation/loss") for history in (again, whole)]
    np.testing.assert_allclose(*curves, rtol=1e-3)
    assert curves[0][:, 0].tolist() == [5, 10, 15, 20]


def test_the_program_writes_text_and_curves(tmp_path, capsys):
    words = "--steps 4 --every 2 --batch 4 --length 8 --channels 8 --heads 2 --layers 1"
    assert example.main([*words.split(), "--checkpoint", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "held-out loss" in printed and "def " in printed
    assert (tmp_path / "curves.png").stat().st_size > 1000
