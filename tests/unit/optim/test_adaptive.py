"""RMSprop and Adagrad over ranks with uneven and empty parts, beside torch on the whole batch."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import optim
from mpistrat.testing import run_ranks

ROWS = (0, 5, 1, 3, 2)  # of each replica; the first has none, but where it is alone
MAKE = {
    "rmsprop": lambda **more: optim.RMSprop(0.05, **more),
    "rmsprop momentum": lambda **more: optim.RMSprop(0.05, momentum=0.9, **more),
    "rmsprop centered": lambda **more: optim.RMSprop(0.05, centered=True, epsilon=1e-3, **more),
    "adagrad": lambda **more: optim.Adagrad(0.5, initial_accumulator_value=0.1, **more),
}
TORCH = {
    "rmsprop": ("RMSprop", {"lr": 0.05}),
    "rmsprop momentum": ("RMSprop", {"lr": 0.05, "momentum": 0.9}),
    "rmsprop centered": ("RMSprop", {"lr": 0.05, "centered": True, "eps": 1e-3}),
    "adagrad": ("Adagrad", {"lr": 0.5, "initial_accumulator_value": 0.1}),
}
names = pytest.mark.parametrize("name", MAKE)


def parts(size, step):
    """Return the rows and targets of each replica."""
    rng = np.random.default_rng(step)
    counts = [6] if size == 1 else [ROWS[(replica + step) % 5] for replica in range(size)]
    x = [rng.standard_normal((count, 3)) for count in counts]
    return [(rows, rows @ [1.0, -2.0, 0.5]) for rows in x]


def train(optimizer, w, size, rank, steps):
    def step(x, y):
        gradient = 2 * x.T @ (x @ w - y) / max(len(y), 1)
        optimizer.apply_gradients([(gradient, w)], weight=len(y))

    for number in steps:
        ms.get_strategy().run(step, args=parts(size, number)[rank])


@names
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_update_is_that_of_the_whole_batch(name, size):
    torch = pytest.importorskip("torch")
    kind, arguments = TORCH[name]
    weights = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = getattr(torch.optim, kind)([weights], **arguments)
    for number in range(6):
        rows = [np.concatenate(column) for column in zip(*parts(size, number), strict=True)]
        x, y = map(torch.tensor, rows)
        optimizer.zero_grad()
        ((x @ weights - y) ** 2).mean().backward()
        optimizer.step()

    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            w = ms.Variable(np.zeros(3), name="w")
            train(MAKE[name](), w, size, comm.rank, range(6))
        np.testing.assert_allclose(w.numpy(), weights.detach().numpy(), 1e-9)

    run_ranks(program, size)


@names
@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_continues_with_the_same_bits(name, size, tmp_path):
    def program(comm):
        with ms.MirroredStrategy().scope():
            w, other = (ms.Variable(np.zeros(3), name="w") for _ in range(2))
            first, second = MAKE[name](ema=0.5), MAKE[name](ema=0.5)
            train(first, w, size, comm.rank, range(3))
            path = ms.Checkpoint(w=w, optimizer=first).write(tmp_path / "state")
            train(first, w, size, comm.rank, range(3, 6))
            second.build([other])
            ms.Checkpoint(w=other, optimizer=second).read(path)
            train(second, other, size, comm.rank, range(3, 6))
            assert w.numpy().tobytes() == other.numpy().tobytes()
            for slot in first.slots():
                contents = [o.slot(v, slot).numpy() for o, v in ((first, w), (second, other))]
                assert contents[0].tobytes() == contents[1].tobytes()

    run_ranks(program, size)


@names
@pytest.mark.filterwarnings("ignore:.*the update after step 0 is left out:RuntimeWarning")
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_are_not_finite_change_nothing(name, size):
    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v, w = (ms.Variable(np.ones(3), name=key) for key in "vw")
        gradient = np.array([1.0, np.nan if comm.rank == size - 1 else 1.0, 1.0])
        raising, skipping = MAKE[name](), MAKE[name](nonfinite="skip")
        with pytest.raises(ms.NonFiniteError):
            strategy.run(lambda: raising.apply_gradients([(gradient, v)]))
        strategy.run(lambda: skipping.apply_gradients([(gradient, w)]))
        assert w.numpy().tolist() == [1.0, 1.0, 1.0] and np.isfinite(v.numpy()).all()
        assert not any(skipping.slot(w, slot).numpy().any() for slot in skipping.slots())

    run_ranks(program, size)


def test_groups_change_the_loop_and_the_numbers():
    groups = [optim.Group("*bias*", centered=True, beta_2=0.5)]
    settings = optim.RMSprop(0.1, groups=groups).of("a/bias", (3,))
    assert settings.slots() == ("mean_square", "momentum", "mean") and settings.beta_2 == 0.5
    groups = [optim.Group("*bias*", initial_accumulator_value=1.0)]
    assert optim.Adagrad(0.1, groups=groups).of("a/bias", (3,)).scalars(0)[2] == 1.0


def test_a_variance_that_rounding_makes_negative_counts_as_0():
    optimizer = optim.RMSprop(0.1, beta_2=0.5, centered=True, epsilon=1.0)
    for kernel in (optimizer.rule.update.reference, optimizer.rule.update.compiled()):
        w, slots = np.zeros(200), tuple(np.zeros(200) for _ in range(3))
        gradient = np.linspace(0.1, 1e3, 200)
        for step in range(80):
            kernel(w, gradient, slots, np.array(optimizer.scalars(step)), 0, 200, True)
        assert np.isfinite(w).all()


def test_a_schedule_is_the_decay_of_pytorch():
    torch = pytest.importorskip("torch")
    weights = torch.ones(2, dtype=torch.float64, requires_grad=True)
    other = torch.optim.Adagrad([weights], lr=0.5, lr_decay=0.1)
    optimizer = optim.Adagrad(lambda step: 0.5 / (1 + step * 0.1))
    w = ms.Variable(np.ones(2), name="w")
    for step in range(5):
        gradient = np.array([0.5, -1.0]) * (step + 1)
        weights.grad = torch.tensor(gradient)
        other.step()
        optimizer.apply_gradients([(gradient, w)])
    np.testing.assert_allclose(w.numpy(), weights.detach().numpy(), 1e-13)
