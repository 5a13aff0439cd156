"""Collectives in functions that JAX transforms: values, gradients, batches, loops."""

from __future__ import annotations

import collections
import functools

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import AxisError, ContextError, LeafTypeError, LockstepError
from mpistrat.testing import run_ranks

jax = pytest.importorskip("jax", reason="wants JAX: pip install 'mpistrat[jax]'")
import mpistrat.jax as mj  # noqa: E402

jnp = jax.numpy
SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])
FEW = pytest.mark.parametrize("size", [1, 3])  # each rank compiles its own
SHAPE = (3, 2)


def on_ranks(program, size):
    """Run ``program(rank)`` as replica code of each rank, with functions of its own."""

    def whole(comm):
        strategy = ms.MirroredStrategy()
        done = []
        strategy.run(lambda: done.append(program(comm.rank)))
        return done[0]

    return run_ranks(whole, size)


def mine(rank, dtype="float32"):
    return (jnp.arange(6).reshape(SHAPE) * (rank + 1)).astype(dtype)


def total(size, dtype="float32"):
    return (np.arange(6).reshape(SHAPE) * (size * (size + 1) // 2)).astype(dtype)


def equal(got, wanted):
    assert isinstance(got, jax.Array)
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-5)


# All that follows holds eagerly, in jit, and of functions of either.
WAYS = {"eager": lambda f: f, "jit": jax.jit}


@SIZES
def test_values(size):
    rows = [np.asarray(mine(r)) for r in range(size)]
    keys = jax.random.split(jax.random.key(12345), size)

    def everything(x, rank, key):
        tree = {"a": x, "b": [rank.astype("float32"), None, (jnp.zeros((0, 3)),)]}
        dtypes = ("complex64", "bfloat16", "int32", "uint8")
        same = mj.all_reduce("sum", tree)
        assert jax.tree.structure(same) == jax.tree.structure(tree)
        return {
            "sum": mj.all_reduce("sum", x),
            "max": mj.all_reduce("max", x),
            "mean": mj.all_reduce("mean", x),
            "dtypes": [mj.all_reduce("sum", x.astype(dtype)) for dtype in dtypes],
            "mean of integers": mj.all_reduce("mean", rank),
            "number": mj.all_reduce("sum", 1),
            "tree": same["b"][0],
            "rows": mj.all_gather(x[None], 0),
            "columns": mj.all_gather(x, -1),
            "scalars": mj.all_gather(rank[None], 0),
            "first": mj.broadcast(x),
            "first number": mj.broadcast(rank + 5),
            "keys": jax.random.key_data(mj.all_gather(key[None], 0)),
            "first key": jax.random.key_data(mj.broadcast(key)),
        }

    wanted = {
        "sum": total(size),
        "max": rows[-1],
        "mean": total(size) / size,
        "mean of integers": (size - 1) / 2,
        "number": size,
        "tree": sum(range(size)),
        "rows": rows,
        "columns": np.concatenate(rows, -1),
        "scalars": np.arange(size),
        "first": rows[0],
        "first number": 5,
        "keys": jax.random.key_data(keys),
        "first key": jax.random.key_data(keys[0]),
    }

    def program(rank):
        for way in WAYS.values():
            x = mine(rank)
            got = way(everything)(x, jnp.int32(rank), keys[rank])
            for one in got.pop("dtypes"):
                equal(one.astype("complex64"), total(size, one.dtype).astype("complex64"))
            for name, value in wanted.items():
                equal(got[name], value)
            equal(x, rows[rank])  # which is as it was

    on_ranks(program, size)


@FEW
def test_weighted_means_where_parts_are_uneven_or_empty(size):
    rows = [np.arange(3.0 * r, dtype="f4").reshape(r, 3) + r for r in range(size)]  # rank 0: none
    every = np.concatenate(rows)

    def program(rank):
        for way in WAYS.values():
            mean = way(lambda x: mj.all_reduce("mean", x.mean(axis=0), weight=len(x)))
            masked = way(lambda x, w: mj.all_reduce("mean", x.mean(axis=0), weight=w))
            for got in (
                mean(jnp.asarray(rows[rank])),
                masked(jnp.asarray(rows[rank]), jnp.int32(rank)),
                masked(jnp.asarray(rows[rank]), jnp.bfloat16(rank)),
            ):
                equal(got, every.mean(axis=0) if len(every) else np.full(3, np.nan))
            # the gradient of the mean over all rows by what each replica's rows are multiplied with
            back = way(jax.grad(lambda s, x, w: mj.all_reduce("mean", s * x, weight=w).sum()))
            got = back(1.0, jnp.full(2, np.nan if rank == 0 else 2.0), jnp.float32(rank))
            if size > 1 and rank:
                equal(got, size * 4 * rank / sum(range(size)))
            elif size > 1:
                assert not np.isfinite(got) or float(got) == 0

    on_ranks(program, size)


def weights_of(size):
    return [np.array([0, 1, 2], "f4") * (r + 1) + (0 if r else [0, 0, 1]) for r in range(size)]


@FEW
def test_a_batch_is_one_call(size):
    def program(rank):
        x = mine(rank)
        lockstep = ms.get_replica_context().strategy._replicas.lockstep
        weights = weights_of(size)
        for way in WAYS.values():
            f = way(jax.vmap(lambda x: mj.all_reduce("sum", x)))
            f(x)
            before = lockstep.session.calls
            equal(f(x), total(size))
            assert lockstep.session.calls == before + 1
            equal(way(jax.vmap(jax.vmap(lambda x: mj.all_reduce("sum", x))))(x), total(size))
            inner = jax.vmap(lambda x: mj.all_reduce("sum", (x, 2.0))[0], in_axes=1, out_axes=1)
            equal(way(inner)(x), total(size))
            rows = np.stack([mine(r) for r in range(size)])
            for axis in (0, -1):
                got = way(jax.vmap(lambda x, a=axis: mj.all_gather(x, a)))(x)
                equal(got, np.concatenate(list(rows), axis=1))
            equal(way(jax.vmap(mj.broadcast))(x), mine(0))
            got = way(jax.vmap(lambda x, w: mj.all_reduce("mean", x, weight=w)))(
                x.at[0].set(np.nan), jnp.asarray(weights[rank])
            )
            with np.errstate(all="ignore"):
                by = np.stack(weights)[..., None]
                wanted = (by * rows).sum(0) / by.sum(0)
            equal(got, wanted)

    on_ranks(program, size)


def numbers(size):
    return [np.linspace(1, 2, 4).astype("f4") + r for r in range(size)]


def losses(xs):
    """What `loss` is on each rank, in plain NumPy and float64, of the values of all ranks."""
    mean, whole = np.mean(xs, axis=0), np.concatenate(xs)
    w = np.arange(len(xs))
    weighted = np.average(xs, axis=0, weights=w) if w.any() else np.zeros(4)
    return [
        ((x - mean) ** 3).sum() * (r + 1)
        + (whole**2).sum() * x[0]
        + (np.sin(xs[0]) * x).sum()
        + (np.sum(xs, axis=0) * x**2).sum()
        + (weighted * x).sum()
        for r, x in enumerate(xs)
    ]


def loss(x, rank, size):
    weighted = mj.all_reduce("mean", x, weight=jnp.float32(rank)) if size > 1 else 0 * x
    return (
        ((x - mj.all_reduce("mean", x)) ** 3).sum() * (rank + 1)
        + (mj.all_gather(x, 0) ** 2).sum() * x[0]
        + (mj.broadcast(jnp.sin(x)) * x).sum()
        + (mj.all_reduce("sum", x) * x**2).sum()
        + (weighted * x).sum()
    )


@FEW
def test_gradients_are_those_of_the_sum_of_all_losses(size):
    xs = [x.astype("f8") for x in numbers(size)]
    wanted = np.empty((size, 4))
    for r in range(size):
        for i in range(4):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [x.copy() for x in xs]
                moved[r][i] += step
                ends.append(sum(losses(moved)))
            wanted[r, i] = (ends[0] - ends[1]) / 2e-5

    def program(rank):
        x = jnp.asarray(numbers(size)[rank])
        f = functools.partial(loss, rank=rank, size=size)
        for way in WAYS.values():
            value, back = way(jax.value_and_grad(f))(x)
            equal(value, losses(xs)[rank])
            np.testing.assert_allclose(back, wanted[rank], rtol=2e-3)
            # forward mode moves all replicas at once
            _, moved = way(lambda x: jax.jvp(lambda y: mj.all_reduce("sum", y), (x,), (x,)))(x)
            equal(moved, np.sum(xs, axis=0))

    on_ranks(program, size)


@FEW
def test_gradients_of_a_loss_that_all_have_in_common(size):
    """What programs for mpi4jax expect: a replica's own gradient of the one loss."""
    ones = np.ones(SHAPE, "f4")

    def program(rank):
        x = jnp.ones(SHAPE)
        shared = functools.partial(mj.all_reduce, "sum", shared_loss=True)
        mean = functools.partial(mj.all_reduce, "mean", shared_loss=True)
        for way in WAYS.values():
            value, back = way(jax.value_and_grad(lambda x: shared(x).sum()))(x)
            equal(value, 6 * size)
            equal(back, ones)
            _, pull = jax.vjp(way(shared), x)
            equal(pull(2 * x)[0], 2 * ones)

            def twice(x):  # one of them is not used, and called all the same
                y = shared(x)
                _ = x + 2 * y
                return shared(x).sum()

            value, back = way(jax.value_and_grad(twice))(x)
            equal(value, 6 * size)
            equal(back, ones)
            equal(way(jax.grad(lambda x: shared(x) + shared(x)))(0.0), 2.0)
            equal(way(jax.grad(lambda x: mean(x).sum()))(x), ones / size)
            rows = lambda x: (mj.all_gather(x, 0, shared_loss=True) ** 2).sum()  # noqa: E731
            equal(way(jax.grad(rows))(x * (rank + 1)), 2 * ones * (rank + 1))
            first = way(jax.grad(lambda x: mj.broadcast(x, shared_loss=True).sum()))(x)
            equal(first, ones if rank == 0 else 0 * ones)
            heavy = way(jax.grad(lambda x: mean(x, weight=jnp.float32(rank + 1)).sum()))(x)
            equal(heavy, ones * (rank + 1) / sum(range(1, size + 1)))

    on_ranks(program, size)


@FEW
def test_transposes(size):
    def program(rank):
        x = mine(rank)
        for f, wanted in [
            (lambda x: mj.all_reduce("sum", x), total(size)),
            (lambda x: mj.all_reduce("sum", x, shared_loss=True), mine(rank)),
        ]:
            once = lambda y, f=f: jax.linear_transpose(f, x)(y)[0]  # noqa: E731
            twice = lambda y, f=once: jax.linear_transpose(f, x)(y)[0]  # noqa: E731
            for way in WAYS.values():
                equal(way(once)(x), wanted)
                equal(way(twice)(x), total(size))

    on_ranks(program, size)


@FEW
def test_loops_and_branches(size):
    def program(rank):
        x = mine(rank)

        def body(carry, _):
            carry = mj.all_reduce("mean", carry) * 0.5 + jnp.sin(carry)
            return carry, mj.all_reduce("sum", carry.sum())

        def scanned(x):
            carry, sums = jax.lax.scan(body, x, None, length=3)
            return carry.sum() + sums.sum()

        def unrolled(x):
            found = 0.0
            for _ in range(3):
                x, one = body(x, None)
                found += one
            return x.sum() + found

        equal(jax.jit(scanned)(x), jax.jit(unrolled)(x))
        one, other = jax.jit(jax.grad(scanned))(x), jax.jit(jax.grad(unrolled))(x)
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
        double = lambda x: mj.all_reduce("sum", x)  # noqa: E731
        grown = jax.jit(lambda x: jax.lax.while_loop(lambda c: c < 100, lambda c: double(c) + 1, x))
        wanted = 1
        while wanted < 100:
            wanted = wanted * size + 1
        equal(grown(jnp.float32(1)), wanted)
        branch = jax.jit(lambda x: jax.lax.cond(x.sum() >= 0, double, lambda x: x, x))
        equal(branch(x), total(size))

    on_ranks(program, size)


def _shared_is_refused(strategy):
    """XLA has no place for a call of one process in a program of several devices."""
    mesh, part = jax.sharding.AbstractMesh((2,), ("a",)), jax.sharding.PartitionSpec("a")
    held = jax.sharding.NamedSharding(mesh, part)
    x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=held)

    def total(x):
        return mj.all_reduce("sum", x)

    mapped = jax.shard_map(total, mesh=mesh, in_specs=part, out_specs=part)
    for function in (total, mapped):
        with strategy.scope(), pytest.raises(NotImplementedError, match="several devices"):
            jax.jit(function).trace(x).lower(lowering_platforms=("cpu",))


def test_what_is_wrong_is_said_where_it_is_traced():
    def program(comm):
        strategy = ms.MirroredStrategy()
        x = jnp.ones(2)

        def fails(error, match, f, *args):
            with pytest.raises(error, match=match):
                strategy.run(lambda: jax.jit(f)(*args or (x,)))

        fails(NotImplementedError, "jax.checkpoint", jax.grad(jax.checkpoint(
            lambda x: mj.all_reduce("sum", jnp.sin(x)).sum())))  # fmt: skip
        fails(NotImplementedError, "no gradient", jax.grad(lambda x: mj.all_reduce("max", x).sum()))
        fails(NotImplementedError, "predicate of a while", jax.vmap(lambda x: jax.lax.while_loop(
            lambda c: mj.all_reduce("max", c) < 9, lambda c: c + 1, x)))  # fmt: skip
        fails(AxisError, "no axis 0", lambda x: mj.all_gather(x.sum(), 0))
        fails(TypeError, "axis must be an integer, not 0.5", lambda x: mj.all_gather(x, 0.5))
        fails(LeafTypeError, "'a' is bool", lambda x: mj.all_reduce("sum", {"a": x > 0}))
        fails(ValueError, "weight is for MEAN", lambda x: mj.all_reduce("sum", x, weight=x.sum()))
        fails(ValueError, "number of examples", lambda x: mj.all_reduce("mean", x, weight=x))
        fails(LeafTypeError, "cannot be reduced", lambda x: mj.all_reduce("sum", jax.random.key(0)))
        _shared_is_refused(strategy)
        with pytest.raises(ValueError, match="0 or more, not -1"):
            strategy.run(lambda: jax.jit(lambda x: mj.all_reduce("mean", x, weight=x[0] - 2))(x))
        # and all continues
        return strategy.run(lambda: float(jax.jit(lambda x: mj.all_reduce("sum", x))(x)[0])).local

    assert run_ranks(program, 2) == [2, 2]


def test_one_function_serves_several_strategies():
    f = jax.jit(lambda x: mj.all_reduce("sum", x))

    def program(comm):
        alone, strategy = ms.OneDeviceStrategy("cpu"), ms.MirroredStrategy()
        for call in (f, mj.replicate):
            with pytest.raises(ContextError, match=r"Call it in strategy\.scope\(\), or in"):
                call(1.0)
        for _ in range(2):
            assert float(alone.run(lambda: f(1.0))) == 1
            assert float(strategy.run(lambda: f(1.0)).local) == 3
        with strategy.scope():
            return float(f(1.0))

    assert run_ranks(program, 3) == [3, 3, 3]


def test_a_backward_pass_that_differs_is_named_by_its_place_in_the_program():
    def program(comm):
        with ms.MirroredStrategy().scope():
            _, back = jax.vjp(lambda x: mj.all_reduce("sum", x), jnp.ones(2))
            with pytest.raises(LockstepError) as caught:
                back(jnp.ones(2)) if comm.rank else mj.all_reduce("sum", jnp.ones(3))
        assert str(caught.value).count("test_traced.py:") == 2

    run_ranks(program, 2)


@pytest.mark.parametrize("how", [jax.jit, lambda function: function])
def test_leaves_are_told_apart_by_their_names(how):
    """The shapes are equal, so that one would pass for another."""

    def program(comm):
        strategy, names = ms.MirroredStrategy(), "ab" if comm.rank else "ba"
        # Of this class JAX keeps the order in which a program has made it.
        tree = collections.OrderedDict((name, jnp.float32("ab".index(name))) for name in names)
        with strategy.scope():
            total = how(lambda tree: mj.all_reduce("sum", tree))(tree)
            first = how(mj.broadcast)(tree)
            each = how(lambda tree: mj.all_gather(tree, axis=0))(jax.tree.map(jnp.ravel, tree))
            own = mj.replicate(tree)
            slopes = how(jax.grad(lambda tree: 2 * mj.all_reduce("sum", tree)["b"]))(tree)
            with pytest.raises(Exception, match=r"calls differ between ranks[^$]*'b': \*"):
                jax.block_until_ready(
                    how(lambda x: mj.all_reduce("sum", {"ab"[comm.rank]: x}))(tree["a"])
                )
        assert (total["a"], total["b"], first["b"], own["b"]) == (0, 2, 1, 1)
        assert (each["b"].tolist(), float(slopes["a"]), float(slopes["b"])) == ([1, 1], 0, 4)

    run_ranks(program, 2)
