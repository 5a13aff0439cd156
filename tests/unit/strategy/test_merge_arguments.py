"""What arrives in `merge_fn`: equal text, bytes and bools as they are, numbers per replica."""

from __future__ import annotations

import enum

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

ctx = ms.get_replica_context


class Mode(str, enum.Enum):
    TRAIN = "train"


class Name(str):
    pass


LONG = "λ" * 1000
PLAIN = ["sgd", "", LONG, b"", b"sgd", LONG.encode(), True, False, None, Mode.TRAIN, Name("a")]
WRAPPED = [1, 0.5, 1j, np.float64(2), np.bool_(True), np.ones(2), {"set"}, object]


def merged(strategy, args, kwargs=None):
    """What `merge_fn` saw."""
    seen = []

    def merge(strategy, *args, **kwargs):
        seen.append((args, kwargs))

    strategy.run(lambda: ctx().merge_call(merge, args, kwargs))
    return seen[0]


@every("ranks", [1, 2, 3, 4])
@every("value", PLAIN)
def test_what_is_equal_arrives_as_it_is(strategy_on, ranks, value):
    def rank(comm):
        strategy = strategy_on(comm)
        # Between ranks that send all values and ranks that send names only, whatever is beside it.
        beside = [7 ** (9 * comm.rank + i) for i in range(40)]
        (args, kwargs), (lone,) = (
            merged(strategy, (value, [value]), {"name": {"a": value}}),
            merged(strategy, (value,))[0],
        )
        (first, other), _ = merged(strategy, (value, beside))
        assert len(other) == 40
        assert all(type(each) is ms.PerReplica for each in other)
        return [*args, args[1][0], kwargs["name"]["a"], lone, first]

    for first, listed, *others in run_ranks(rank, ranks):
        assert listed == [value]
        for each in (first, *others):
            assert type(each) is type(value)
            assert each == value


@every("ranks", [1, 2, 3])
@every("value", WRAPPED)
def test_numbers_and_arrays_are_values_per_replica(strategy_on, ranks, value):
    def rank(comm):
        (args, _) = merged(strategy_on(comm), (value, "sgd"))
        return type(args[0]), args[1]

    assert run_ranks(rank, ranks) == [(ms.PerReplica, "sgd")] * ranks


@every("ranks", [2, 3])
@every("pair", [("a", "b"), (LONG, LONG + "!"), (True, False), (True, 1), ("a", b"a"), ("a", None),
                ("a", Name("a")), (LONG, "a"), (Mode.TRAIN, "train")])  # fmt: skip
def test_what_differs_is_a_value_per_replica(strategy_on, ranks, pair):
    def rank(comm):
        strategy = strategy_on(comm)
        mine = pair[comm.rank == ranks - 1]
        results = []

        def merge(strategy, x):
            assert type(x) is ms.PerReplica
            results.extend(strategy.experimental_local_results(x))

        strategy.run(lambda: ctx().merge_call(merge, args=(mine,)))
        return results

    want = [pair[0]] * (ranks - 1) + [pair[1]]
    for results in run_ranks(rank, ranks):
        assert results == want
        assert list(map(type, results)) == list(map(type, want))


def test_what_run_returns_is_wrapped_as_before(strategy_on):
    def rank(comm):
        strategy = strategy_on(comm)
        each = strategy.run(lambda: ["sgd", True, LONG])
        return [type(one) for one in each], strategy.experimental_local_results(each)

    results = [["sgd", True, LONG]] * 2
    assert run_ranks(rank, 2) == [([ms.PerReplica] * 3, tuple(results))] * 2


def test_a_plain_argument_costs_one_handshake():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        session = strategy._replicas.lockstep.session
        counts = []

        def step():
            before = session.calls
            ctx().merge_call(lambda s, *args: None, args=("sgd", True, LONG, b"x"))
            counts.append(session.calls - before)

        strategy.run(step)
        return counts

    assert run_ranks(rank, 2) == [[1]] * 2


@every("operation", [lambda x: x * 0.5, lambda x: 0.5 + x, lambda x: x < 1, float, bool])
def test_arithmetic_says_that_a_constant_comes_from_the_closure(operation):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(TypeError, match=r"merge_fn takes it from its closure"):
            strategy.run(lambda: ctx().merge_call(lambda s, x: operation(x), args=(0.5,)))

    run_ranks(rank, 2)


def test_a_value_per_replica_in_a_text_warns_once_on_rank_0():
    def rank(comm):
        each = ms.MirroredStrategy().run(lambda: 0.5)
        texts = [f"{each}/done", f"{each}", "{}".format(each)]  # noqa: UP032
        assert texts == [f"{each!r}/done", repr(each), str(each)]

    with pytest.warns(RuntimeWarning) as caught:
        run_ranks(rank, 2)
    (warning,) = caught
    assert "a PerReplica in a text" in str(warning.message)
    assert "value.local" in str(warning.message)
    assert warning.filename == __file__


def test_looking_at_a_value_per_replica_does_not_warn(recwarn):
    def rank(comm):
        each = ms.MirroredStrategy().run(lambda: 0.5)
        print(each, [each], f"{each.local}", f"{each!r}")

    run_ranks(rank, 2)
    assert not recwarn.list
