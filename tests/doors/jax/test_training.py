"""Keys, metrics, and whole programs with optax: the same at every number of ranks."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import RanksFailed, run_ranks

jax = pytest.importorskip("jax", reason="wants JAX: pip install 'mpistrat[jax]'")
import mpistrat.jax as mj  # noqa: E402

jnp = jax.numpy


@pytest.mark.parametrize("size", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_random_numbers_of_examples_do_not_depend_on_the_number_of_ranks(size):
    """Dropout and metrics over ten rows in batches of four: uneven parts, and empty ones."""
    rows = np.arange(10)

    def program(comm):
        strategy = ms.MirroredStrategy()
        batches = ms.Dataset((rows,)).shuffle(seed=3).batch(4)
        with strategy.scope():
            mean = ms.metrics.Mean("kept")
        seen = []

        def step(number, part):
            keys = mj.example_keys(7, number, part)
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (16,)).sum())(keys)
            assert kept.shape == part.shape
            mean.update_state(kept)
            seen.extend(zip(part.tolist(), kept.tolist(), strict=True))
            key = mj.step_key(7, number)
            assert bool((mj.all_gather(key[None], 0) == key).all())  # the same on all
            own = jax.random.key_data(mj.all_gather(mj.replica_key(7, number)[None], 0))
            assert len(np.unique(own, axis=0)) == size  # another on each

        for number, (part,) in enumerate(strategy.experimental_distribute_dataset(batches)):
            strategy.run(step, args=(number, part))
        return seen, float(mean.result())

    found = run_ranks(program, size)
    order = [row for (part,) in ms.Dataset((rows,)).shuffle(seed=3).batch(4) for row in part]
    want = {}
    for place, row in enumerate(order):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), place // 4), 2)
        drawn = jax.random.bernoulli(jax.random.fold_in(key, int(row)), 0.5, (16,))
        want[int(row)] = int(drawn.sum())
    assert {row: kept for seen, _ in found for row, kept in seen} == want
    for _, mean in found:
        assert mean == pytest.approx(np.mean(list(want.values())))


def test_kinds_of_keys_differ():
    keys = [mj.step_key(0, 0), mj.replica_key(0, 0), *mj.example_keys(0, 0, np.arange(3))]
    keys += [mj.step_key(0, 1), mj.step_key(1, 0)]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == len(keys)
    assert bool(mj.step_key(jax.random.key(0), 1) == mj.step_key(0, 1))
    assert mj.example_keys(0, 0, np.arange(0)).shape == (0,)


@pytest.mark.timeout(300)  # each rank compiles what it calls
@pytest.mark.parametrize(
    ("net", "size"),
    [
        ("mlp", 2),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("conv", 2), ("mlp", 4), ("conv", 4))
        ),
    ],
)
def test_digits_have_the_same_losses_on_any_number_of_ranks(net, size):
    pytest.importorskip("optax", reason="wants optax")
    pytest.importorskip("sklearn", reason="wants scikit-learn")
    from mpistrat.examples import digits_jax

    # An epoch of the net with convolutions takes as long as ten of the other.
    settings = digits_jax.JaxSettings(epochs=2 if net == "mlp" else 1, net=net)

    def program(comm):
        return digits_jax.train(ms.MirroredStrategy(), settings, verbose=False)

    ((parameters, history),) = run_ranks(program, 1)
    losses, accuracies = (history[name][1] for name in ("loss", "validation/accuracy"))
    if net == "mlp":
        assert losses[1] < 0.5 * losses[0]
    assert accuracies[-1] > (0.9 if net == "mlp" else 0.8)  # by chance 0.1
    for rank_parameters, rank_history in run_ranks(program, size):
        np.testing.assert_allclose(rank_history["loss"][1], losses, rtol=1e-4)
        np.testing.assert_allclose(rank_history["validation/accuracy"][1], accuracies, atol=0.01)
        leaves = map(jax.tree.leaves, (rank_parameters, parameters))
        for rank_array, array in zip(*leaves, strict=True):
            np.testing.assert_allclose(rank_array, array, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.timeout(300)  # each rank compiles what it calls
def test_digits_go_on_at_another_number_of_ranks(tmp_path, monkeypatch):
    pytest.importorskip("optax", reason="wants optax")
    pytest.importorskip("sklearn", reason="wants scikit-learn")
    from mpistrat.examples import digits_jax

    settings = digits_jax.JaxSettings(epochs=3)

    def program(comm, directory, epochs):
        chosen = replace(settings, checkpoint=str(directory), epochs=epochs)
        return digits_jax.train(ms.MirroredStrategy(), chosen, verbose=False)[1]

    class StopsAfterTwoEpochs:
        def on_epoch(self, run):
            if run.epoch == 2:
                raise InterruptedError("epoch 2")

    with monkeypatch.context() as patch:
        stopping_fit = functools.partial(ms.fit, callbacks=[StopsAfterTwoEpochs()])
        patch.setattr(digits_jax.ms, "fit", stopping_fit)
        with pytest.raises(RanksFailed, match="epoch 2"):
            run_ranks(lambda comm: program(comm, tmp_path / "parts", 3), 2)
    (again,) = run_ranks(lambda comm: program(comm, tmp_path / "parts", 3), 1)
    (whole,) = run_ranks(lambda comm: program(comm, tmp_path / "whole", 3), 1)
    np.testing.assert_allclose(again["loss"][1], whole["loss"][1], rtol=1e-4)
    np.testing.assert_allclose(*(h["validation/accuracy"][1] for h in (again, whole)), atol=0.01)


@pytest.mark.job
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_digits_have_the_same_losses_on_ranks_of_mpi(tmp_path):
    pytest.importorskip("optax", reason="wants optax")
    pytest.importorskip("sklearn", reason="wants scikit-learn")
    from mpistrat.launch.mpi_libraries import find_launcher
    from mpistrat.launch.process import run_job

    told = {}
    for size in (1, 2, 4):
        launcher, _ = find_launcher()
        program = [sys.executable, "-m", "mpistrat.examples.digits_jax"]
        printed = tmp_path / str(size)
        with printed.open("wb") as output:
            outcome = run_job(launcher.build_command(size, program), 120, output)
        assert outcome.code == 0, printed.read_text()
        lines = printed.read_text().splitlines()
        told[size] = [float(line.split()[5]) for line in lines if "loss" in line]
    assert len(told[1]) == 20
    for size in (2, 4):
        np.testing.assert_allclose(told[size], told[1], rtol=1e-3, atol=1e-4)


def test_jax_is_imported_only_where_it_is_used():
    ask = "import sys, mpistrat, mpistrat.testing; print('jax' in sys.modules)"
    got = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert got.stdout.split() == ["False"]


@pytest.mark.filterwarnings("ignore:Checkpoint.save. on ranks 1, 2 'train/step' differs")
@pytest.mark.parametrize("size", [1, 3])
def test_trees_are_saved_and_restored(size, tmp_path):
    optax = pytest.importorskip("optax", reason="wants optax")

    def state_of(rank, at):
        parameters = {"w": jnp.full((2, 3), at, jnp.bfloat16), "b": [jnp.arange(2.0) * at]}
        optimizer = optax.adam(0.1)
        tree = {"p": parameters, "o": optimizer.init(parameters), "step": at + rank}
        return tree | {"key": jax.random.key(at), "none": None}

    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            state = mj.TrainState(state_of(comm.rank, 5))
            beside = ms.Variable(3.0)
        checkpoint = ms.Checkpoint(train=state, beside=beside)
        path = checkpoint.save(tmp_path / "ckpt")
        state.value = state_of(comm.rank, 9)
        before = state.value["p"]["w"]
        kept = np.array(before)
        checkpoint.restore(path)
        want = state_of(0, 5)
        assert jax.tree.structure(state.value) == jax.tree.structure(want)
        for one, other in zip(*map(jax.tree.leaves, (state.value, want)), strict=True):
            assert type(one) is type(other)
            assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
            assert bool(np.all(np.asarray(one == other)))
        np.testing.assert_array_equal(before, kept)  # what was there before is as it was
        names = set(checkpoint.variables())
        assert {"train/p/w", "train/p/b/0", "train/step", "train/o/0/mu/w", "beside"} <= names
        state.value = {"p": jnp.ones(2)}
        with pytest.raises(ms.errors.StructureError, match="train/o/0/mu/w"):
            checkpoint.restore(path)
        with pytest.raises(ms.errors.StructureError, match=r"mpistrat\.jax\.TrainState"):
            ms.Checkpoint(w={"w": jnp.ones(2)}).save(tmp_path / "other")

    run_ranks(program, size)
