"""JAX arrays are leaves of every call: they go in as views, and come out as JAX arrays."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arrays import as_array
from mpistrat.errors import LeafTypeError, StructureError
from mpistrat.testing import run_ranks

jax = pytest.importorskip("jax", reason="wants JAX: pip install 'mpistrat[jax]'")
jnp = jax.numpy

SIZES = [1, 2, 3, 4]
LARGE = 1 << 19  # float32 numbers; enough for memory of its own


def arrays(rank):
    return {
        "w": jnp.arange(6.0).reshape(2, 3) + rank,
        "half": jnp.full((3,), 0.5 * rank, jnp.bfloat16),
        "count": jnp.int32(rank),
        "turned": (jnp.arange(6).reshape(2, 3) + rank).T,
        "large": jnp.full(LARGE, float(rank)),
    }


def address(array):
    return array.unsafe_buffer_pointer()


@pytest.mark.parametrize("size", SIZES)
def test_what_goes_in_as_jax_comes_out_as_jax(size):
    def program(comm):
        strategy, mine = ms.MirroredStrategy(), arrays(comm.rank)
        ranks = sum(range(size))
        like = {
            "w": np.arange(6, dtype="f4").reshape(2, 3) * size + ranks,
            "half": np.full(3, 0.5 * ranks, ml_dtypes.bfloat16),
            "count": np.int32(ranks),
            "turned": np.arange(6, dtype="i4").reshape(2, 3).T * size + ranks,
            "large": np.full(LARGE, ranks, "f4"),
        }

        def step():
            ctx = ms.get_replica_context()
            handle = ctx.all_reduce_start("sum", mine)
            return ctx.all_reduce("sum", mine), handle.wait(), ctx.all_reduce("sum", np.ones(2))

        *found, plain = strategy.run(step)
        found = [jax.tree.map(lambda x: x.local, tree) for tree in found]
        for tree in (*found, strategy.all_reduce("sum", mine)):
            for name, wanted in like.items():
                got = tree[name]
                assert isinstance(got, jax.Array) and got.dtype == mine[name].dtype, name
                np.testing.assert_array_equal(got, wanted)
        assert type(plain.local) is np.ndarray  # and NumPy stays NumPy
        rows = strategy.gather(strategy.run(lambda: mine["w"]), axis=0)
        assert isinstance(rows, jax.Array) and rows.shape == (2 * size, 3)
        first = strategy.broadcast(mine)
        assert isinstance(first["large"], jax.Array) and float(first["large"][0]) == 0
        mean = strategy.reduce("mean", strategy.run(lambda: mine["w"]), axis=0)
        assert isinstance(mean, jax.Array) and mean.shape == (3,)

    run_ranks(program, size)


def test_memory_comes_in_as_it_is():
    given = jnp.arange(8.0)
    seen = as_array(given)
    assert seen.ctypes.data == address(given) and not seen.flags.writeable
    half = jnp.ones(4, jnp.bfloat16)
    assert as_array(half).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_goes_out_as_it_is_and_is_not_used_again_while_jax_has_it(size, dtype, monkeypatch):
    """What an all-reduce wrote to is what JAX has, until JAX has dropped it."""
    from mpistrat.jax import arrays as door

    written = []
    give = door.place_results

    def place_results(results, likes):
        written.extend(result.ctypes.data for result in results)
        return give(results, likes)

    monkeypatch.setattr(door, "place_results", place_results)

    def program(comm):
        strategy = ms.MirroredStrategy()
        mine = jnp.full(LARGE, 1.0, dtype)
        kept = [strategy.all_reduce("sum", mine) for _ in range(4)]
        places = [address(one) for one in kept]
        assert len(set(places)) == 4 and set(places) <= set(written)
        later = kept[0] * 2  # may still be in transit while its memory is dropped
        del kept[0]
        gc.collect()
        more = [strategy.all_reduce("sum", mine * 3) for _ in range(2)]
        assert float(later[0]) == 2 * size and float(later[-1]) == 2 * size
        assert {float(one[-1]) for one in kept} == {size}
        assert not {address(one) for one in more} & set(places[1:])
        return [float(one[-1]) for one in more]

    assert run_ranks(program, size) == [[3 * size] * 2] * size


@pytest.mark.parametrize("size", [1, 2])
def test_buffers_and_out_are_never_what_jax_has(size):
    """They are written to at the next step, when JAX may not have read them yet."""

    def program(comm):
        strategy = ms.MirroredStrategy()
        mine = {"w": jnp.full(LARGE, 2.0)}
        buffers = strategy.buffers(mine)
        assert type(buffers["w"]) is np.ndarray
        got = strategy.all_reduce("sum", mine, out=buffers)
        assert got is buffers and type(got["w"]) is np.ndarray
        buffers["w"][...] = 1
        same = strategy.all_reduce("sum", buffers, out=buffers)
        assert same is buffers and type(same["w"]) is np.ndarray
        with pytest.raises(ValueError, match="read-only"):
            strategy.all_reduce("sum", mine, out={"w": jnp.zeros(LARGE)})
        fresh = strategy.all_reduce("sum", mine)
        buffers["w"][...] = -1
        assert float(fresh["w"].min()) == 2 * size

    run_ranks(program, size)


def test_what_has_no_numbers_is_refused_on_all_ranks():
    def program(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(LeafTypeError, match=r"key_data"):
            strategy.all_reduce("sum", {"k": jax.random.key(0)})
        with pytest.raises(LeafTypeError, match=r"'x' is traced .* mpistrat\.jax\.all_reduce"):
            jax.jit(lambda x: strategy.all_reduce("sum", {"x": x}))(jnp.ones(2))
        with pytest.raises(LeafTypeError, match="expected an array"):
            strategy.all_reduce("sum", jax.ShapeDtypeStruct((2,), np.float32))
        return float(strategy.all_reduce("sum", jnp.float32(1)))

    assert run_ranks(program, 2) == [2, 2]


def test_one_rank_may_give_numpy_where_another_gives_jax():
    def program(comm):
        mine = np.ones(3, np.float32)
        given = jnp.asarray(mine) if comm.rank else mine
        return type(ms.MirroredStrategy().all_reduce("sum", given)) is np.ndarray

    assert run_ranks(program, 2) == [True, False]


class Equal:
    """A key with an order, whose text is that of all others."""

    def __init__(self, number):
        self.number = number

    def __lt__(self, other):
        return self.number < other.number

    def __repr__(self):
        return "Equal()"


def test_keys_that_cannot_be_told_apart_are_refused():
    mj = pytest.importorskip("mpistrat.jax")

    def rank(comm):
        strategy = ms.MirroredStrategy()
        for tree in ({Equal(1): 1.0, Equal(2): 2.0}, {"a/b": 1.0, "a": {"b": 2.0}}):
            with pytest.raises(StructureError, match="told apart"):
                strategy.run(lambda: mj.all_reduce("sum", tree))  # noqa: B023
        with pytest.raises(ms.LockstepError):
            strategy.run(lambda: mj.all_reduce("sum", {1 if comm.rank else "1": 1.0}))
        with pytest.raises(StructureError, match=r"two leaves.*'Equal\(\)'"):
            mj.TrainState({Equal(1): jnp.ones(1), Equal(2): jnp.ones(1)}).tree()
        return float(strategy.run(lambda: mj.all_reduce("sum", {1: 1.0}))[1].local)

    assert run_ranks(rank, 2) == [2.0, 2.0]
