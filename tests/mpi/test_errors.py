"""Whatever goes wrong on some ranks is raised on all of them, and the job continues."""

from __future__ import annotations

import random

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.lockstep.guards import VariableRegistry
from mpistrat.testing import same

pytestmark = pytest.mark.mpi
ctx = ms.get_replica_context


def caught(world, error, call):
    """Check that `call` raises `error` on every rank; return what it raised here."""
    found = None
    try:
        call()
    except Exception as raised:
        found = raised
    everyones = world.allgather(None if isinstance(found, error) else repr(found))
    assert everyones == [None] * world.size
    return found


DIFFERENT = {
    "op": lambda odd: ctx().all_reduce("MAX" if odd else "SUM", np.ones(3)),
    "shape": lambda odd: ctx().all_reduce("SUM", np.ones(3 + odd)),
    "large shape": lambda odd: ctx().all_reduce("SUM", np.ones(50_000 + odd)),
    "frame or not": lambda odd: ctx().all_reduce("SUM", np.ones(50_000 if odd else 3)),
    "dtype": lambda odd: ctx().all_reduce("SUM", np.ones(400, "i8" if odd else "f8")),
    "key": lambda odd: ctx().all_reduce("SUM", {"b" if odd else "a": np.ones(2)}),
    "axis": lambda odd: ctx().all_gather(np.ones((2, 2)), 1 if odd else 0),
    "gather or reduce": lambda odd: (
        ctx().all_gather(np.ones(2), 0) if odd else ctx().all_reduce("SUM", np.ones(2))
    ),
    "one call more": lambda odd: odd and ctx().all_reduce("SUM", np.ones(2)),
    "one call less": lambda odd: None if odd else ctx().merge_call(lambda s: 1),
    "result": lambda odd: [1] if odd else (1,),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", DIFFERENT)
def test_a_difference_raises_on_every_rank(world, case):
    strategy = ms.MirroredStrategy()
    odd = world.size - 1
    error = caught(
        world, ms.LockstepError, lambda: strategy.run(DIFFERENT[case], args=(world.rank == odd,))
    )
    assert f"rank {odd}:" in str(error)
    assert f"this is rank {world.rank} of {world.size}" in str(error)
    same(world, strategy.reduce("SUM", ms.PerReplica(1.0), None), float(world.size))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("place", ["fn", "merge_fn", "value_fn", "dataset", "update", "result"])
def test_an_exception_on_one_rank(world, place):
    strategy = ms.MirroredStrategy()
    odd = 1
    with strategy.scope():
        variable = ms.Variable(np.zeros(3))

    def maybe(*_):
        if world.rank == odd:
            raise KeyError("mine")
        return np.ones(2)

    def batches():
        yield np.ones(4)
        yield maybe()

    name = "experimental_distribute_values_from_function"
    data = strategy.experimental_distribute_dataset(ms.Dataset.from_batches(batches))
    calls = {
        "fn": lambda: strategy.run(lambda: (maybe(), ctx().all_reduce("SUM", np.ones(9000)))),
        "merge_fn": lambda: strategy.run(lambda: ctx().merge_call(maybe)),
        "value_fn": lambda: getattr(strategy, name)(maybe),
        "dataset": lambda: list(data),
        "update": lambda: strategy.extended.update(variable, maybe),
        "result": lambda: strategy.run(lambda: (ctx().all_reduce("SUM", 1.0), maybe())),
    }
    error = caught(world, KeyError, calls[place])
    assert isinstance(error, ms.RemoteError) is (world.rank != odd)
    same(world, strategy.reduce("SUM", ms.PerReplica(1.0), None), float(world.size))
    same(world, variable.numpy(), np.zeros(3))


@pytest.mark.mpi(min_size=2)
def test_a_long_text_of_one_rank_reaches_all(world):
    def fn():
        if world.rank == 1:
            raise ValueError("é" * 60_000)

    error = caught(world, ValueError, lambda: ms.MirroredStrategy().run(fn))
    same(world, np.int8("é" * 60_000 in str(error)), np.int8(1))


@pytest.mark.mpi(min_size=2)
def test_variables_that_differ(world):
    strategy = ms.MirroredStrategy()
    r = world.rank
    with strategy.scope():
        v = ms.Variable(np.full(3, float(r)), name="v")
        same(world, v.numpy(), np.zeros(3))
        caught(world, ms.LockstepError, lambda: ms.Variable(np.zeros(2 + (r == 1))))
        caught(
            world,
            ms.LockstepError,
            lambda: (
                ms.Variable(1.0) if r == 1 else strategy.reduce("SUM", ms.PerReplica(1.0), None)
            ),
        )
        w = ms.Variable(2.0, name="w")
    caught(world, ms.LockstepError, lambda: v.assign(np.full(3, float(r))))
    caught(world, ms.LockstepError, lambda: (v if r else w).assign_add(np.ones(3) if r else 1.0))
    caught(world, ms.LockstepError, lambda: strategy.run(lambda: v.assign(np.full(3, r + 1.0))))
    caught(world, ValueError, lambda: v.assign(ms.PerReplica(np.zeros(3))))
    same(world, [v.numpy(), w.numpy()], [np.zeros(3), 2.0])


def _fault(choice, odd, rank):
    if rank not in odd:
        ctx().all_reduce("SUM", np.ones(3))
        ctx().merge_call(lambda s, x: s.reduce("SUM", x, None), args=(1.0,))
        ctx().all_gather(np.ones(rank), 0)
        return 1
    if choice == 0:
        raise ValueError("fault")
    if choice == 1:
        return ctx().all_reduce("SUM", np.ones(4000))
    if choice == 2:
        return ctx().all_reduce("SUM", "text")
    if choice == 3:
        return 1
    if choice == 4:
        ctx().all_reduce("SUM", np.ones(3))
        return ctx().merge_call(lambda s, x: 1 / 0, args=(1.0,))
    return ctx().strategy.reduce("SUM", 1.0, None)


@pytest.mark.parametrize("limit", [0, 64])
def test_texts_of_few_and_of_many_ranks(world, limit, monkeypatch):
    """Numbers are gathered, or reduced as those of more than 64 ranks are."""
    monkeypatch.setattr("mpistrat.lockstep.ranks.FRAME_RANKS", limit)
    lockstep = ms.MirroredStrategy()._replicas.lockstep
    texts, others = lockstep.gather_distinct_texts(b"odd" if world.rank % 2 else b"even" * 50_000)
    ranks = list(range(world.size))
    assert [[*members] for members in texts.values()] == [ranks[::2], ranks[1::2]][: world.size]
    assert others == []
    assert lockstep.find_ranks_with(world.rank == 0) == [0]


def test_two_hundred_rounds_of_random_faults(world):
    strategy = ms.MirroredStrategy()
    draw = random.Random(world.size)
    rounds = []
    for _ in range(200):
        odd = set(draw.sample(range(world.size), draw.randrange(world.size + 1)))
        try:
            strategy.run(_fault, args=(draw.randrange(6), odd, world.rank))
            rounds.append(1)
        except (ValueError, TypeError, RuntimeError, ArithmeticError):
            rounds.append(0)
    same(world, np.array(rounds))
    assert 0 < sum(rounds) < 200
    same(world, strategy.reduce("SUM", ms.PerReplica(1.0), None), float(world.size))


@pytest.mark.parametrize("length", [1, 10_000])
def test_variables_without_names_that_differ(world, length):
    names = ["alpha", "beta"] if world.rank == 0 else ["beta", "alpha"]
    initial = {"alpha": np.ones(length), "beta": np.full(length, 2.0)}
    strategy = ms.MirroredStrategy()
    strategy._replicas.lockstep.session.get_instance(VariableRegistry).has_warned = False
    with strategy.scope():
        if world.size == 1:
            assert [ms.Variable(initial[name]).numpy()[0] for name in names] == [1.0, 2.0]
            return
        with pytest.raises(UserWarning, match=r"'Variable:0' no\. \d+ .* than on rank 0"):
            [ms.Variable(initial[name]) for name in names]
        assert ms.Variable(initial["beta"], name="beta").assign_add(initial["alpha"])[0] == 3.0
