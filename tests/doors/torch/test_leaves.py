"""Tensors are leaves of every call: they go in, and tensors come out."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks

torch = pytest.importorskip("torch", reason="wants PyTorch: pip install 'mpistrat[torch]'")

SIZES = [1, 2, 3, 4]


def tensors(rank):
    return {
        "w": torch.arange(6.0).reshape(2, 3) + rank,
        "half": torch.full((3,), 0.5 * rank, dtype=torch.bfloat16),
        "small": torch.full((2,), float(rank), dtype=torch.float16),
        "count": torch.tensor(rank),
        "steps": torch.arange(4, dtype=torch.int32).reshape(2, 2).T + rank,
    }


def expected(size):
    ranks = sum(range(size))
    return {
        "w": np.arange(6, dtype="f4").reshape(2, 3) * size + ranks,
        "half": np.full(3, 0.5 * ranks),
        "small": np.full(2, ranks, "f2"),
        "count": np.int64(ranks),
        "steps": np.arange(4, dtype="i4").reshape(2, 2).T * size + ranks,
    }


def same(got, wanted, like):
    assert type(got) is torch.Tensor
    assert got.dtype is like.dtype and tuple(got.shape) == tuple(like.shape)
    np.testing.assert_array_equal(got.double().numpy(), np.asarray(wanted, "f8"))


@pytest.mark.parametrize("size", SIZES)
def test_an_all_reduce_of_tensors_gives_tensors(size):
    def program(comm):
        strategy, mine = ms.MirroredStrategy(), tensors(comm.rank)
        outs = {
            name: torch.zeros_like(x, memory_format=torch.contiguous_format)
            for name, x in mine.items()
        }
        for _ in range(3):  # what was called before goes a shorter way
            found = strategy.all_reduce("sum", mine)
            assert strategy.all_reduce("sum", mine, out=outs) is outs
            for name, wanted in expected(size).items():
                same(found[name], wanted, mine[name])
                same(outs[name], wanted, mine[name])
        mean = strategy.all_reduce("mean", mine["w"], weight=comm.rank + 1)
        weights = np.arange(1, size + 1)
        each = np.stack([np.arange(6.0).reshape(2, 3) + r for r in range(size)])
        np.testing.assert_allclose(mean, np.average(each, axis=0, weights=weights), rtol=1e-6)
        handle = strategy.all_reduce_start("sum", mine["w"], out=outs["w"])
        assert handle.wait() is outs["w"]
        same(outs["w"], expected(size)["w"], mine["w"])
        inside = strategy.run(lambda: ms.get_replica_context().all_reduce("sum", mine["w"]))
        same(strategy.experimental_local_results(inside)[0], expected(size)["w"], mine["w"])

    run_ranks(program, size)


@pytest.mark.parametrize("size", SIZES)
def test_large_tensors_are_their_own_out_in_the_memory_of_buffers_and_outside(size):
    def program(comm):
        strategy = ms.MirroredStrategy()
        model = torch.nn.Linear(300, 200)  # parameters: only their shapes and dtypes are wanted
        buffers = strategy.gradient_buffers(dict(model.named_parameters()))
        plain = {name: torch.zeros(tuple(x.shape)) for name, x in model.named_parameters()}
        copies = strategy._replicas.reducer.node.arena
        for step in range(3):
            for tree in (buffers, plain):
                for one in tree.values():
                    one.fill_(comm.rank + step)
                assert strategy.all_reduce("sum", tree, out=tree) is tree
                for one in tree.values():
                    assert (one == sum(range(size)) + step * size).all()
        strategy.all_reduce_start("mean", list(buffers.values()), out=list(buffers.values())).wait()
        lies = [copies.find_address(ms.arrays.as_array(x)) is not None for x in buffers.values()]
        assert all(lies) or size == 1

    run_ranks(program, size)


@pytest.mark.parametrize("size", SIZES)
def test_values_per_replica_are_reduced_and_gathered(size):
    def program(comm):
        strategy = ms.MirroredStrategy()
        rows = torch.arange(comm.rank + 1.0)  # others have another number of them
        per_replica = strategy.run(lambda: rows)
        lone = strategy.run(lambda: torch.tensor(float(comm.rank)))
        total = strategy.reduce("sum", lone, axis=None)
        same(total, sum(range(size)), torch.tensor(0.0))
        mean = strategy.reduce("mean", per_replica, axis=0)
        every = np.concatenate([np.arange(r + 1.0) for r in range(size)])
        assert type(mean) is torch.Tensor and mean.ndim == 0
        np.testing.assert_allclose(float(mean), every.mean(), rtol=1e-6)
        like = torch.from_numpy(every.astype("f4"))
        same(strategy.gather(per_replica, axis=0), every, like)
        context = ms.get_replica_context
        gathered = strategy.run(lambda: context().all_gather(rows.bfloat16(), axis=0))
        mine = strategy.experimental_local_results(gathered)[comm.rank if size > 1 else 0]
        same(mine, every, like.bfloat16())
        assert all(type(one) is torch.Tensor for one in strategy.experimental_local_results(lone))

    run_ranks(program, size)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_and_check_same_take_tensors(size):
    def program(comm):
        strategy, mine = ms.MirroredStrategy(), tensors(comm.rank)
        found = strategy.broadcast(mine)
        for name, wanted in tensors(0).items():
            same(found[name], wanted.double().numpy(), wanted)
        strategy.check_same(found)
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
        with torch.no_grad():
            model[0].weight += comm.rank
        state = model.state_dict()
        if size > 1:
            with pytest.raises(ms.errors.DivergenceError, match=r"0\.weight"):
                strategy.check_same(state)
        assert strategy.broadcast(state, out=state) is state
        strategy.check_same(state)

    run_ranks(program, size)


def bad():
    parameter = torch.nn.Linear(2, 2).weight
    return [
        (parameter, r"requires grad.*detach.*replicate"),
        (parameter * 2, "requires grad"),
        (torch.empty(3, device="meta"), "no contents"),
        (torch.eye(3).to_sparse(), r"to_dense.*IndexedSlices"),
        (torch.nn.Linear(2, 2), "state_dict"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), r"float8.*value\.float\(\)"),
    ]


@pytest.mark.parametrize("case", range(len(bad())))
def test_what_is_no_tensor_of_this_process_says_what_to_do(case):
    def program(comm):
        value, words = bad()[case]
        strategy = ms.MirroredStrategy()
        for call in (
            lambda given: strategy.all_reduce("sum", given),
            strategy.broadcast,
            strategy.check_same,
        ):
            with pytest.raises(ms.errors.LeafTypeError, match=words) as caught:
                call({"x": value if comm.rank == 1 else torch.zeros(2)})
            assert "x" in str(caught.value)
        assert strategy.all_reduce("sum", 1) == 2  # the ranks are still together

    run_ranks(program, 2)


def test_an_out_of_another_kind_is_refused_with_what_was_wanted():
    strategy = ms.OneDeviceStrategy("cpu")
    with pytest.raises(ms.errors.LeafTypeError, match=r"float64\[2\]; the result is float32\[2\]"):
        strategy.all_reduce("sum", torch.zeros(2), out=torch.zeros(2, dtype=torch.float64))


def test_gradients_may_be_tensors():
    def program(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            w = ms.Variable(np.ones((40, 500), "f4"))
        optimizer = ms.optim.SGD(0.5)
        buffer = strategy.gradient_buffers([torch.zeros(40, 500)])[0]
        buffer.fill_(comm.rank)
        strategy.run(lambda: optimizer.apply_gradients([(buffer, w)], weight=1))
        strategy.run(lambda: optimizer.apply_gradients([(torch.ones(40, 500), w)], weight=1))
        np.testing.assert_allclose(w.numpy(), 1 - 0.5 * 0.5 - 0.5)

    run_ranks(program, 2)
