"""JAX on real ranks: large arrays, computations in transit, and what fails in them."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms

jax = pytest.importorskip("jax", reason="wants JAX: pip install 'mpistrat[jax]'")
import mpistrat.jax as mj  # noqa: E402

jnp = jax.numpy
pytestmark = pytest.mark.mpi
LARGE = 1 << 21


@pytest.fixture
def strategy(world):
    return ms.MultiWorkerMirroredStrategy()


def slow(x):
    """What takes so long that a call with its result returns first."""
    return jnp.sin(x @ x @ x @ x) * 0 + 1


def test_large_arrays_and_many_small_ones(world, strategy):
    tree = {"large": jnp.arange(LARGE, dtype="f4") + world.rank}
    # Without a program of XLA's for each shape.
    tree |= {f"{i:03}": jnp.asarray(np.full(i, world.rank + 1, "f4")) for i in range(100)}

    @jax.jit
    def f(tree):
        return mj.all_reduce("mean", tree, weight=jnp.int32(world.rank + 1))

    weights = np.arange(world.size) + 1
    for way in (f, f.__wrapped__):
        found = strategy.run(way, args=(tree,))
        mean = np.average(np.arange(world.size), weights=weights)
        np.testing.assert_allclose(found["large"], np.arange(LARGE) + mean, rtol=1e-6)
        np.testing.assert_allclose(found["099"], np.full(99, mean + 1), rtol=1e-6)


def test_calls_have_the_order_of_the_program_also_while_one_computes(world, strategy):
    f = jax.jit(lambda x: mj.all_reduce("sum", x.sum()) + mj.all_reduce("max", x[0, 0]))
    h = jax.jit(slow)

    def program():
        found = []
        for i in range(3):
            x = jnp.full((300, 300), 0.01 * i)
            found.append(f(h(x)))  # in transit, while
            found.append(ms.get_replica_context().all_reduce("sum", np.ones(i + 1)))
            found.append(mj.all_reduce("sum", jnp.float32(i)))
        found.append(f(h(x)))
        return found

    found = strategy.run(program)
    for i in range(3):
        assert float(found[3 * i]) == world.size * 90_000 + 1
        assert found[3 * i + 1].tolist() == [world.size] * (i + 1)
        assert float(found[3 * i + 2]) == world.size * i
    assert float(found[-1]) == world.size * 90_000 + 1


def test_what_fails_is_told_on_every_rank_and_the_program_goes_on(world, strategy):
    f = jax.jit(lambda x: mj.all_reduce("sum", x))
    h = jax.jit(slow)

    def other_programs():
        g = lambda x: mj.all_reduce("sum" if world.rank else "max", x)  # noqa: E731
        return jax.jit(g)(jnp.ones(3))

    def one_raises():
        if world.rank == world.size - 1:
            raise ValueError("rank raises")
        return f(jnp.ones(3))

    def other_counts():
        more = int(world.rank == 0)
        loop = lambda n: jax.lax.fori_loop(0, n, lambda i, x: f(x), jnp.ones(3))  # noqa: E731
        return jax.jit(loop)(3 + more)

    def other_counts_later():
        f(h(jnp.ones((300, 300))))
        if world.rank == 0:
            f(h(jnp.ones((300, 300))))

    failing = [one_raises]
    if world.size > 1:
        failing += [other_programs, other_counts, other_counts_later]
    for fn in failing:
        match = "rank raises" if fn is one_raises else "calls differ between ranks"
        with pytest.raises(Exception, match=match):
            strategy.run(fn)
        assert float(strategy.run(lambda: f(jnp.ones(3)))[0]) == world.size


def test_memory_of_results_is_not_used_again_while_an_update_waits_to_read_it(world, strategy):
    """Many steps of the documented pattern: jitted halves, and an all-reduce between them."""

    @jax.jit
    def gradient(w, x):
        return jax.tree.map(lambda w: w * 0 + x, w)

    @jax.jit
    def update(w, g):
        return jax.tree.map(lambda w, g: w + jnp.sort(g)[::-1] * 0 + g, w, g)

    def program():
        w = mj.replicate({"a": jnp.zeros(LARGE), "b": jnp.zeros(3) + world.rank})
        for i in range(8):
            w = update(w, mj.all_reduce("mean", gradient(w, jnp.float32(i + world.rank))))
        return w

    found = strategy.run(program)
    want = sum(range(8)) + 8 * (world.size - 1) / 2
    assert float(found["a"].min()) == float(found["a"].max()) == want
    assert found["b"].tolist() == [want] * 3
