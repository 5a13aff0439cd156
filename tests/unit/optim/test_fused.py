"""Small variables that are updated as one: what each becomes, and what an error leaves."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import optim
from mpistrat.kernels import jit
from mpistrat.optim import blocks, passes, state
from mpistrat.optim.fused import SquareSums
from mpistrat.testing import run_ranks

SIZES = (1, 2, 3)
SHAPES = [(7,), (3, 5), (), (0, 2), (130, 140), (64, 32), (4096,)]  # the fifth is large
OPTIMIZERS = {
    "momentum": lambda **more: optim.SGD(0.1, momentum=0.9, **more),
    "adam": lambda **more: optim.Adam(0.1, **more),
    "lion": lambda **more: optim.Lion(0.1, **more),
    "rmsprop": lambda **more: optim.RMSprop(0.1, momentum=0.5, **more),
    "adagrad": lambda **more: optim.Adagrad(0.1, **more),
}
MORE = {
    "plain": {},
    "ema and clipped": {"ema": 0.5, "clip": optim.ClipByValue(0.3)},
    "norm": {"clip": optim.ClipByGlobalNorm(0.3)},
    "accumulated": {"accumulate": 2},
    "scaled": {"nonfinite": "skip", "loss_scale": optim.LossScale(start=7.0), "accumulate": 2},
    "groups": {"groups": (optim.Group("v[01]", learning_rate=0.01),)},
}


def values(seed, dtype="f4"):
    rng = np.random.default_rng(seed)
    return [np.asfortranarray(rng.standard_normal(shape).astype(dtype)) for shape in SHAPES]


def trained(make, more, together, steps=3, way="arrays"):
    """Return weights, slots and averages after some steps, of one optimizer or of one for each."""
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        variables = [ms.Variable(v, name=f"v{i}") for i, v in enumerate(values(0))]
        variables += [ms.Variable(v, name=f"d{i}") for i, v in enumerate(values(1, "f8"))]
    groups = [variables] if together else [[one] for one in variables]
    each = [
        make(**more if together or "groups" not in more else _own(more, group[0]))
        for group in groups
    ]
    buffers = strategy.gradient_buffers(variables) if way == "buffers" else None

    def step(number):
        rank = strategy.rank
        given = [*values(10 * number + rank), *values(10 * number + rank + 5, "f8")]
        if buffers is not None:
            for place, gradient in zip(buffers, given, strict=True):
                place[...] = gradient
            given = buffers
        pairs = dict(zip(map(id, variables), given, strict=True))
        for optimizer, group in zip(each, groups, strict=True):
            optimizer.apply_gradients([(pairs[id(one)], one) for one in group], weight=rank + 1)

    for number in range(steps):
        strategy.run(step, args=(number,))
    found = {v.name: v.numpy().tobytes() for v in variables}
    for optimizer in each:
        slots = [one for one in optimizer.variables if one.name.count("/") == 2]
        found |= {one.name: one.numpy().tobytes() for one in slots}
    return found


def _own(more, variable):
    return more if variable.name in ("v0:0", "v1:0") else {}


@pytest.mark.parametrize("way", ("arrays", "buffers"))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("momentum", "plain"),
        ("adam", "ema and clipped"),
        ("lion", "plain"),
        ("momentum", "groups"),
    ],
)
def test_each_becomes_what_it_does_alone(name, more, size, way):
    def rank(comm):
        one, other = (trained(OPTIMIZERS[name], MORE[more], t, way=way) for t in (True, False))
        return [key for key in one if one[key] != other.get(key)], len(one)

    for different, count in run_ranks(rank, size):
        assert not different
        assert count >= 2 * 2 * len(SHAPES)


@pytest.mark.parametrize("more", ("norm", "accumulated", "scaled"))
@pytest.mark.parametrize("way", ("arrays", "buffers"))
@pytest.mark.parametrize("size", SIZES)
def test_several_as_one_have_the_bits_of_loops_over_each(size, way, more, monkeypatch):
    def rank(comm):
        return trained(OPTIMIZERS["adam"], MORE[more], True, way=way)

    together = run_ranks(rank, size)
    monkeypatch.setattr(state, "fuse_small_variables", lambda targets: [])
    assert run_ranks(rank, size) == together


@pytest.mark.parametrize("dtype", ("f4", "f8"))
@pytest.mark.parametrize(
    "sizes", [(1,), (0, 30, 1), (7, 512, 64), (513, 4096, 2, 1025), (0,), (300, 3)]
)
def test_sums_of_squares_have_the_bits_of_loops(sizes, dtype):
    rng, lanes = np.random.default_rng(len(sizes)), np.empty(blocks.LANES)
    parts = [rng.standard_normal(size).astype(dtype) for size in sizes]
    sums = SquareSums(parts)
    for _ in range(2):
        assert sums.compute() == [blocks.sum_squares.reference(part, lanes) for part in parts]
        for part in parts:
            part *= 3
    parts[-1][-1:] = np.nan
    assert np.isnan(sums.compute()[-1]) == bool(sizes[-1])


def test_compiled_loops_have_the_bits_of_numpy(monkeypatch):
    if not jit.is_compiling():
        pytest.skip("Numba is off, or not installed")
    twins = trained(OPTIMIZERS["adam"], {}, True)  # whose passes others compile, too
    monkeypatch.setattr(passes, "_COMPILE", 1)
    assert trained(OPTIMIZERS["adam"], {}, True) == twins


@pytest.mark.parametrize("more", [more for more in MORE if more != "scaled"])
@pytest.mark.parametrize("size", SIZES)
def test_a_gradient_that_is_not_finite_is_named_and_weights_stay_finite(more, size):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            variables = [ms.Variable(v, name=f"v{i}") for i, v in enumerate(values(0))]
        optimizer = optim.SGD(0.1, momentum=0.9, **MORE[more])

        def step(bad):
            given = [np.ones(v.shape, v.dtype) for v in variables]
            if bad and strategy.rank == strategy.num_replicas_in_sync - 1:
                given[5][3, 2] = np.nan
            optimizer.apply_gradients(zip(given, variables, strict=True))

        strategy.run(step, args=(False,))
        told = ""
        try:
            strategy.run(step, args=(True,))
        except ms.NonFiniteError as error:
            told = str(error)
        return told, all(np.isfinite(v.numpy()).all() for v in variables)

    for told, finite in run_ranks(rank, size):
        assert finite
        want = f"rank {size - 1}: the gradient of variable 'v5:0' is nan at index (3, 2)"
        assert want in told


def test_some_of_the_gradients_and_those_of_another_dtype():
    """What lies side by side is updated by itself where a neighbour has no gradient."""
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        variables = [ms.Variable(np.ones(4, np.float32)) for _ in range(3)]
    optimizer = optim.SGD(0.5, momentum=0.5)

    def step(given):
        optimizer.apply_gradients(zip(given, variables, strict=True))

    one = np.ones(4, np.float32)
    strategy.run(step, args=([one, one, one],))
    strategy.run(step, args=([one, None, np.ones(4)],))
    assert [v.numpy()[0].item() for v in variables] == [-0.25, 0.5, -0.25]
    slots = [optimizer.slot(v, "momentum").numpy()[0].item() for v in variables]
    assert slots == [1.5, 1.0, 1.5]


def test_what_programs_write_between_steps_counts():
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        variables = [ms.Variable(np.ones(2)) for _ in range(2)]
    optimizer = optim.SGD(0.5, momentum=0.5)
    seen = [np.asarray(v) for v in variables]

    def step():
        optimizer.apply_gradients([(np.ones(2), v) for v in variables])

    strategy.run(step)
    with strategy.scope():
        variables[0].assign([3.0, 3.0])
        optimizer.slot(variables[1], "momentum").assign([4.0, 4.0])
    strategy.run(step)
    assert [array.tolist() for array in seen] == [[2.25, 2.25], [-1.0, -1.0]]
