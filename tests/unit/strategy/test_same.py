"""What an all-reduce is told to be the same on all ranks: `same`."""

from __future__ import annotations

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

MAKE = [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy]
X = np.arange(6.0)


def plain(strategy, value, same, **options):
    return strategy.all_reduce("sum", value, same=same, **options)


def in_replica(strategy, value, same, **options):
    context = ms.get_replica_context
    total = strategy.run(lambda: context().all_reduce("sum", value, same=same, **options))
    return getattr(total, "local", total)


POINTS = {
    "an array": lambda odd: X + odd,
    "the last bit": lambda odd: np.nextafter(X, odd * np.inf) if odd else X,
    "a large array": lambda odd: np.append(np.zeros(50_000), odd),
    "a number": lambda odd: 3 + odd,
    "a tree": lambda odd: {"a": [X, odd], "b": "text"},
    "a text": lambda odd: "ab"[odd],
    "a complex number": lambda odd: 1j + odd,
    "a structure": lambda odd: [X] if odd else {"a": X},
    "a shape": lambda odd: X.reshape(2, 3) if odd else X,
    "a dtype": lambda odd: X.astype("f4" if odd else "f8"),
    "a sign": lambda odd: np.array([-0.0 if odd else 0.0]),
    "nothing beside something": lambda odd: [] if odd else [X],
}


@every("n", [2, 3, 4])
@every("call", [plain, in_replica])
@every("what", POINTS)
def test_a_difference_is_an_error_on_all_ranks_and_the_ranks_can_continue(what, call, n):
    def program(comm):
        strategy = MAKE[n % 2]()
        point = POINTS[what](int(comm.rank == n - 1))
        for value in (1.0, {"loss": 1.0, "gradient": np.ones(40_000)}):
            with pytest.raises(ms.DivergenceError) as caught:
                call(strategy, value, point)
        return str(caught.value), float(call(strategy, 1.0, POINTS[what](0)))

    for rank, (text, total) in enumerate(run_ranks(program, n)):
        assert total == n
        assert text.startswith("values given as same= differ between ranks")
        assert f"this is rank {rank} of {n}" in text
        others = {2: "rank 0:", 3: "ranks 0, 1:", 4: "ranks 0-2:"}[n]
        assert f"  {others}" in text and f"  rank {n - 1}:" in text
        assert "strategy.broadcast(x0)" in text and "seed" in text


@every("n", [1, 2, 3])
@every("call", [plain, in_replica])
@every("what", POINTS)
def test_what_is_the_same_changes_nothing(what, call, n):
    def program(comm):
        strategy, found = MAKE[n % 2](), []
        for _ in range(3):
            found.append(float(call(strategy, comm.rank + 1.0, POINTS[what](0))))
            out = np.full(40_000, comm.rank + 1.0)
            call(strategy, out, POINTS[what](0), out=out)
            found.append(float(out[-1]))
        with strategy.scope():
            w = ms.Variable(X)
        found.append(float(call(strategy, 1.0, w)))
        return found

    total = n * (n + 1) / 2
    assert run_ranks(program, n) == [[total] * 6 + [float(n)]] * n


@pytest.mark.parametrize("n", [2, 3])
def test_it_costs_no_handshake(n):
    def program(comm):
        strategy, count = ms.MirroredStrategy(), []
        inner = comm.allgather
        comm.allgather = lambda *args: (count.append(1), inner(*args))[1]
        strategy.all_reduce("sum", 1.0, same=X)
        return len(count)

    assert run_ranks(program, n) == [1] * n


def test_values_are_shown():
    def program(comm):
        with pytest.raises(ms.DivergenceError) as caught:
            ms.MirroredStrategy().all_reduce("sum", 1.0, same=np.array([comm.rank + 0.5, 7.0]))
        return str(caught.value)

    for text in run_ranks(program, 2):
        assert "0.5, ..." in text and "1.5, ..." in text
        assert text.count("test_same.py") == 2


@pytest.mark.parametrize("n", [66])
def test_of_more_ranks_than_exchange_frames(n):
    def program(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(ms.DivergenceError, match="ranks 0-64:"):
            strategy.all_reduce("sum", 1.0, same=int(comm.rank == 65))
        return float(strategy.all_reduce("sum", 1.0, same=3))

    assert run_ranks(program, n) == [n] * n


def test_other_calls_are_told_as_such():
    def program(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(ms.LockstepError, match="collective calls differ"):
            strategy.all_reduce("sum", 1.0, same=None if comm.rank else X)
        with pytest.raises(ms.LockstepError, match="collective calls differ"):
            strategy.all_reduce("max" if comm.rank else "sum", 1.0, same=X + comm.rank)
        with pytest.raises(ms.LeafTypeError):
            strategy.all_reduce("sum", 1.0, same=object() if comm.rank else X)
        with pytest.raises(ms.LeafTypeError):
            strategy.all_reduce("sum", "a" if comm.rank else 1.0, same=X)
        return float(strategy.all_reduce("sum", 1.0))

    assert run_ranks(program, 2) == [2.0, 2.0]


def test_a_solver_that_is_not_seeded_is_found():
    """Ranks whose numbers of calls agree, at points of their own."""
    optimize = pytest.importorskip("scipy.optimize")
    rows = np.random.default_rng(0).normal(size=(40, 3))

    def program(comm):
        strategy = ms.MirroredStrategy()
        own = strategy.local_rows(rows)

        def objective(w):
            return strategy.all_reduce("sum", ((own - w) ** 2).sum(), same=w)

        start = np.random.default_rng(comm.rank).normal(size=3)
        with pytest.raises(ms.DivergenceError):
            optimize.minimize(objective, start, method="Nelder-Mead")
        with pytest.raises(ms.DivergenceError):
            bounds = [(-1.0, 1.0)] * 3
            optimize.differential_evolution(objective, bounds, rng=comm.rank, maxiter=2)
        return optimize.minimize(objective, strategy.broadcast(start)).x

    for found in run_ranks(program, 2):
        assert np.allclose(found, rows.mean(axis=0), atol=1e-4)
