"""Training on 1 to 4 ranks gives the weights of one process of plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")
mt = pytest.importorskip("mpistrat.torch")
nn, F = torch.nn, torch.nn.functional

SIZES = [1, 2, 3, 4]
# Of 4 ranks: 2 each, then 2, 2, 2, 1; then 1, 1, 1, 0; then 1, 0, 0, 0.
BATCHES = [8, 7, 3, 1]
WIDTH = 6


class Tied(nn.Module):
    """Embedding and last layer share their weight; one layer is frozen, one is never used."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.frozen, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.frozen(self.first(x))))[:, :1]


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.reentrant = reentrant

    def forward(self, x):
        run = torch.utils.checkpoint.checkpoint
        x = run(self.one, x.requires_grad_(), use_reentrant=self.reentrant)
        # The same weights once more: their gradients come in two parts.
        return self.two(run(lambda y: torch.tanh(self.one(y)), x, use_reentrant=self.reentrant))


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 1, 2))

    def forward(self, x):
        x = x[:, :, None, None] * torch.linspace(0.5, 1.5, 16).reshape(4, 4)
        x = x[:, :3].contiguous(memory_format=torch.channels_last)
        return self.net(x).flatten(1)


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.net(x).float()


MODELS = {
    "plain": lambda: nn.Sequential(nn.Linear(WIDTH, 300), nn.Tanh(), nn.Linear(300, 1)),
    "tied, frozen, unused": Tied,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "channels last": lambda: Pictures().to(memory_format=torch.channels_last),
    "autocast": Autocast,
}


_lock = threading.Lock()  # ranks that are threads have one generator


def made(kind, seed=0):
    with _lock, torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[kind]()


def batches():
    data = np.random.default_rng(1)
    return [
        (data.standard_normal((n, WIDTH)).astype("f4"), data.standard_normal((n, 1)).astype("f4"))
        for n in BATCHES
    ]


def piece(array, rank, size):
    each = -(-len(array) // size)
    return torch.from_numpy(array[rank * each : (rank + 1) * each])


def train(model, optimizer, rank=0, size=1, clip=None, sync=None):
    """A loop as anybody writes it; `sync` tells of each batch whether it is followed by a step."""
    for step, (x, y) in enumerate(batches()):
        last = sync is None or sync[step]
        with contextlib.nullcontext() if last or size == 0 else mt.no_sync(model):
            loss = F.mse_loss(model(piece(x, rank, size)), piece(y, rank, size))
            loss.backward()
        if last:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def alone(model, clip=None, sync=None):
    """The same in one process, of plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step, (x, y) in enumerate(batches()):
        F.mse_loss(model(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        if sync is None or sync[step]:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return {name: x.detach() for name, x in model.named_parameters()}


def close(model, wanted, **how):
    for name, x in model.named_parameters():
        torch.testing.assert_close(x.detach(), wanted[name], rtol=1e-4, atol=1e-5, **how)


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("size", SIZES)
def test_weights_are_those_of_one_process(size, kind):
    wanted = alone(made(kind))

    def program(comm):
        strategy = ms.MirroredStrategy()
        model = mt.replicate(made(kind, seed=comm.rank), strategy)  # replica 0's weights rule
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        train(model, optimizer, comm.rank, size)
        if kind != "autocast":
            close(model, wanted)
        strategy.check_same({name: x.detach() for name, x in model.named_parameters()})

    run_ranks(program, size)


@pytest.mark.parametrize("size", SIZES)
def test_clipping_and_accumulation_are_those_of_one_process(size):
    # Batches of 8 and 7 rows are no one mean: the rows of both count alike.
    sync, kind = [False, True, True, True], "plain"

    def means():
        (x, y), (x2, y2), *rest = batches()
        model = made(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        both = [torch.from_numpy(np.concatenate(pair)) for pair in ((x, x2), (y, y2))]
        todo = [(*both, 2)] + [(torch.from_numpy(x), torch.from_numpy(y), 1) for x, y in rest]
        for x, y, times in todo:
            (F.mse_loss(model(x), y) * times).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return {name: x.detach() for name, x in model.named_parameters()}

    wanted = means()

    def program(comm):
        model = mt.replicate(made(kind), ms.MirroredStrategy())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        train(model, optimizer, comm.rank, size, clip=0.1, sync=sync)
        close(model, wanted)

    run_ranks(program, size)
