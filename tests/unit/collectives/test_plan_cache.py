"""All-reduces compiled before: the same bits, the same errors, on the same paths."""

from __future__ import annotations

import collections
import functools
import math
import sys

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.collectives.plan import ReductionInputs
from mpistrat.testing import run_ranks

Pair = collections.namedtuple("Pair", "a b")
_FOLDS = {"SUM": np.add, "MEAN": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}


def random(rank, turn, shape=(), dtype=np.float64):
    """Numbers whose sum depends on the order of the ranks."""
    return _made(rank, turn, shape, dtype).copy()


@functools.cache  # a generator costs more than what is done to its numbers
def _made(rank, turn, shape, dtype):
    rng = np.random.default_rng([rank, turn])
    scaled = rng.standard_normal(shape) * 10.0 ** rng.integers(-12, 12, shape)
    return np.asarray(scaled if np.dtype(dtype).kind == "f" else scaled.view(np.int64)).astype(
        dtype
    )


def wanted(op, values):
    with np.errstate(all="ignore"):
        total = functools.reduce(_FOLDS[op], values)
        return np.asarray(total / total.dtype.type(len(values)) if op == "MEAN" else total)


KINDS = {
    "number": lambda r, t: float(random(r, t)),
    "float64": lambda r, t: np.float64(random(r, t)),
    "float32": lambda r, t: np.float32(random(r, t, dtype=np.float32)),
    "0-d": lambda r, t: random(r, t),
    "vector": lambda r, t: random(r, t, (7,)),
    "matrix, of other layout": lambda r, t: random(r, t, (3, 2)).T[::-1],
    "list": lambda r, t: [random(r, t, (2,)), random(r, t + 1, (1, 3))],
    "lone list": lambda r, t: [random(r, t, (2,))],
    "dict": lambda r, t: {"b": np.float64(random(r, t)), "a": (random(r, t + 1, (3,)),)},
    "shared vector": lambda r, t: random(r, t, (700,)),
    "shared matrix, of other layout": lambda r, t: random(r, t, (30, 20), np.float32).T[::-1],
    "shared tree": lambda r, t: {
        "b": random(r, t, (90,)),
        "a": [random(r, t, ()), float(random(r, t))],
    },
    "named tuple in a list": lambda r, t: [Pair(random(r, t, (2,)), float(random(r, t)))],
}


@every("op", list(_FOLDS))
@every("kind", list(KINDS))
@every("size", [1, 2, 3, 5])
def test_the_second_time_has_the_bits_of_the_first(size, kind, op):
    make = KINDS[kind]

    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)

        def fn():
            ctx = ms.get_replica_context()
            return [ctx.all_reduce(op, make(comm.rank, turn)) for turn in (0, 10, 20)]

        strategy.run(fn)  # all kinds of numbers below are remembered by now
        results = strategy.run(fn)
        calls = strategy._replicas.plans
        return strategy.experimental_local_results(results)[comm.rank], len(calls)

    for results, remembered in run_ranks(program, size):
        assert remembered == 1
        for turn, result in zip((0, 10, 20), results, strict=True):
            given = [ms.pytree.flatten(make(rank, turn))[0] for rank in range(size)]
            got, structure = ms.pytree.flatten(result)
            assert structure == ms.pytree.flatten(make(0, turn))[1]
            for i, leaf in enumerate(got):
                want = wanted(op, [np.asarray(values[i]) for values in given])
                assert type(leaf) is (type(given[0][i]) if np.ndim(given[0][i]) else type(leaf))
                assert np.asarray(leaf).tobytes() == want.tobytes()
                assert (np.asarray(leaf).dtype, np.shape(leaf)) == (want.dtype, want.shape)
                assert isinstance(leaf, np.ndarray) == isinstance(given[0][i], np.ndarray)


@every("axis", [None, 0])
@every("shape", [(3,), (4, 200)])
@every("size", [1, 2, 3])
def test_reductions_of_what_runs_return_are_one_call_each_with_another_origin(size, shape, axis):
    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        found = []
        for turn in range(4):
            value = strategy.run(lambda turn=turn: random(comm.rank, turn, shape))
            found.append(strategy.reduce("MAX", value, axis))
        if size > 1:
            other = strategy.run(lambda: random(comm.rank, 9, shape))
            with pytest.raises(ms.LockstepError, match="of the value of call"):
                strategy.reduce("MAX", other if comm.rank else value, axis)
        return found, len(strategy._replicas.plans)

    for found, remembered in run_ranks(program, size):
        assert remembered == 1
        for turn, got in enumerate(found):
            each = np.stack([random(rank, turn, shape) for rank in range(size)])
            assert np.array_equal(got, each.max(0 if axis is None else (0, 1)))


@pytest.mark.parametrize("shape", [(), (3,), (400,), (100_000,)])
def test_what_was_said_of_the_first_values_is_not_said_of_the_next(shape):
    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        a, b = (strategy.run(lambda: np.ones(shape)) for _ in "ab")
        with pytest.raises(ms.LockstepError):  # where it is compiled, on each rank for another one
            strategy.reduce("SUM", b if comm.rank else a, None)
        return [float(np.max(strategy.reduce("SUM", x, None))) for x in (ms.PerReplica(a.local), a)]

    assert run_ranks(program, 2) == [[2.0, 2.0]] * 2


def test_values_that_do_not_align_in_the_frame():
    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        tree = [np.int8([1, -2, comm.rank]), np.float64([0.5, comm.rank]), np.int8([comm.rank])]
        fn = functools.partial(
            strategy.run, lambda: ms.get_replica_context().all_reduce("MAX", tree)
        )
        fn()
        return [leaf.local.tolist() for leaf in fn()], len(strategy._replicas.plans)

    assert run_ranks(program, 3) == [([[1, -2, 2], [0.5, 2.0], [2]], 1)] * 3


@pytest.mark.parametrize(
    ("value", "remembered"),
    [
        (np.array([1.0, 2.0], ">f8"), 0),
        (np.float16([1, 2]), 1),
        (np.int8([1, 2]), 1),
        (np.zeros(0), 1),
        (np.zeros(20_000), 1),
        (3, 0),
        (np.ma.zeros(2).filled(1).view(np.memmap), 0),
    ],
    ids=["swapped", "half", "bytes", "empty", "large", "int", "subclass"],
)
def test_what_is_not_remembered_goes_the_same_way(value, remembered):
    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        both = [
            strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", value)) for _ in "ab"
        ]
        a, b = (strategy.experimental_local_results(x)[0] for x in both)
        return np.array_equal(a, b) and np.array_equal(a, np.asarray(value) * 2)

    def count(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", value))
        return len(strategy._replicas.plans)

    assert run_ranks(program, 2) == [True, True]
    assert run_ranks(count, 2) == [remembered] * 2


def test_results_are_fresh_and_do_not_share_memory():
    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)

        def fn():
            ctx = ms.get_replica_context()
            tree = {"a": np.ones(3), "b": np.ones((1, 2))}
            ctx.all_reduce("SUM", tree)
            first, second = ctx.all_reduce("SUM", tree), ctx.all_reduce("SUM", tree)
            first["a"][:] = 7
            return first["b"].sum() == 2 * comm.size and second["a"].sum() == 3 * comm.size

        return bool(strategy.run(fn).local)

    assert run_ranks(program, 3) == [True] * 3


SPOILT = {
    "shape": lambda tree: tree | {"b": np.zeros(3)},
    "dtype": lambda tree: tree | {"b": np.zeros(2, np.float32)},
    "key": lambda tree: {"a": tree["a"], "c": tree["b"]},
    "kind of tree": lambda tree: list(tree.values()),
    "a leaf more": lambda tree: tree | {"c": np.zeros(1)},
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("how", list(SPOILT))
def test_one_leaf_replaced_on_one_rank_is_detected(how, size):
    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        good = {"a": np.ones(2), "b": np.ones(2)}
        odd = SPOILT[how](good)
        seen = []
        for culprit in range(size):
            for _ in range(2):
                strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", good))
            mine = odd if comm.rank == culprit else good
            with pytest.raises(ms.LockstepError):
                strategy.run(lambda tree=mine: ms.get_replica_context().all_reduce("SUM", tree))
            again = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", good))
            seen.append(bool((again["a"].local == size).all()))
        return seen

    assert run_ranks(program, size) == [[True] * size] * size


@pytest.mark.parametrize(("mine", "theirs"), [("SUM", "MEAN"), ("MAX", "MIN"), ("sum", "PROD")])
def test_another_operation_on_one_rank_is_detected(mine, theirs):
    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        for op in (mine, theirs):
            strategy.run(lambda op=op: ms.get_replica_context().all_reduce(op, 1.0))
        op = mine if comm.rank else theirs
        with pytest.raises(ms.LockstepError, match=mine.upper()):
            strategy.run(lambda: ms.get_replica_context().all_reduce(op, 1.0))
        return float(strategy.run(lambda: ms.get_replica_context().all_reduce(mine, 1.0)).local)

    assert len(set(run_ranks(program, 2))) == 1


def test_a_rank_that_fails_meets_one_that_has_made_the_call_before():
    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)

        def fn(value):
            return ms.get_replica_context().all_reduce("SUM", value)

        strategy.run(fn, (1.0,))
        with pytest.raises(TypeError, match=r"leaf|value|rank 1"):
            strategy.run(fn, ("text" if comm.rank == 1 else 1.0,))
        with pytest.raises(ValueError, match=r"ReduceOp|rank 0"):
            strategy.run(
                lambda: ms.get_replica_context().all_reduce("SUM" if comm.rank else "no", 1.0)
            )
        with pytest.raises(TypeError, match=r"reduce_op|rank 0"):
            strategy.run(
                lambda: ms.get_replica_context().all_reduce("SUM" if comm.rank else ["SUM"], 1.0)
            )
        return float(strategy.run(fn, (1.0,)).local)

    assert run_ranks(program, 3) == [3.0] * 3


def test_writes_that_came_before_are_proved_by_a_remembered_call():
    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        with strategy.scope():
            variable = ms.Variable(0.0)

        def fn(number):
            ctx = ms.get_replica_context()
            ctx.all_reduce("SUM", 1.0)
            variable.assign(number)
            return ctx.all_reduce("SUM", 1.0)

        strategy.run(fn, (1.0,))
        with pytest.raises(ms.LockstepError):
            strategy.run(fn, (float(comm.rank),))
        return float(variable._component())

    assert run_ranks(program, 2) == [1.0, 1.0]


def test_the_number_of_calls_is_bounded():
    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)

        def fn():
            ctx = ms.get_replica_context()
            for i in range(1500):
                ctx.all_reduce("SUM", {f"key{i}": 1.0})

        strategy.run(fn)
        return len(strategy._replicas.plans)

    (count,) = run_ranks(program, 1)
    assert 0 < count <= 1024


def test_a_value_that_depends_on_the_rank_is_called_that():
    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        with pytest.raises(
            ms.LockstepError, match=r"a value in them is not .* depends on the rank"
        ):
            strategy.reduce("MEAN", float(comm.rank), axis=None)
        with pytest.raises(ms.LockstepError) as told:
            strategy.run(
                lambda: ms.get_replica_context().all_reduce("MEAN", np.ones(2 + comm.rank))
            )
        return "Every rank must make the same calls" in str(told.value)

    assert run_ranks(program, 2) == [True, True]


def test_a_quicker_path_is_taken_when_there_is_memory_for_it():
    """The first call of its kind may come before the memory that the path passes through."""

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        values = [np.full(300, comm.rank + i, float) for i in range(20)]
        calls = strategy._replicas.plans
        taken = []

        def fn():
            ctx = ms.get_replica_context()
            for _ in range(4):
                found.append(ctx.all_reduce("SUM", values))
                (reduction,) = calls._reductions.values()
                taken.append(reduction.choose_algorithm(ReductionInputs(values)).name)

        found: list = []
        strategy.run(fn)
        assert taken == ["direct"] * 4  # the next call
        return [float(leaf[7]) for tree in found for leaf in tree]

    total = [float(sum(r + i for r in range(3))) for i in range(20)]
    assert run_ranks(rank, 3) == [total * 4] * 3


@every("how", ["subclass", "swapped", "in place"])
@every("count", [5, 700, 40_000])  # in the handshake, in small memory, and in pieces
@every("size", [2, 3])
def test_what_one_rank_remembers_another_may_make_anew(size, count, how):
    """Which way the bytes go is alike, whoever has to find it out again."""

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        odd, found = comm.rank == size - 1, []
        for turn in range(4):
            value, place = random(comm.rank, turn, (count,)), None
            if odd and how == "subclass":
                value = value.view(np.memmap)
            elif odd and how == "swapped":
                value = value.astype(">f8")
            elif odd:
                place = value
            total = strategy.all_reduce("SUM", value, out=place)
            found.append(bool((total == expected[turn]).all()))
        return found

    expected = [wanted("SUM", [random(r, t, (count,)) for r in range(size)]) for t in range(4)]
    assert run_ranks(rank, size) == [[True] * 4] * size


def wrong(outs, kind):
    """Outs that do not take the results, or are the values themselves in another order."""
    if kind == "read-only":
        outs[3].flags.writeable = False
    elif kind == "dtype":
        outs[3] = outs[3].astype("f4")
    elif kind == "shape":
        outs[3] = outs[3].reshape(-1, 1)
    elif kind == "structure":
        outs = tuple(outs)
    return outs


@pytest.mark.parametrize("kind", ["read-only", "dtype", "shape", "structure"])
def test_outs_that_do_not_fit_are_refused_by_a_remembered_call_too(kind):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        values = [np.full(30, comm.rank + i, float) for i in range(9)]
        fold = lambda out: ms.get_replica_context().all_reduce("SUM", values, out=out)  # noqa: E731
        good = [np.zeros(30) for _ in range(9)]
        for _ in range(3):
            strategy.run(lambda: fold(good) is good)
        bad = wrong([np.zeros(30) for _ in range(9)], kind) if comm.rank == 1 else list(good)
        with pytest.raises((ValueError, TypeError)) as caught:
            strategy.run(lambda: fold(bad))
        strategy.run(lambda: fold(good) is good)
        return isinstance(caught.value, ms.RemoteError), [float(leaf[-1]) for leaf in good]

    want = [3.0 * i + 3 for i in range(9)]
    assert run_ranks(rank, 3) == [(r != 1, want) for r in range(3)]


def test_outs_may_be_values_in_another_order():
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        ctx = ms.get_replica_context

        def fn():
            for _ in range(4):
                values = [np.full(30, comm.rank + i, float) for i in range(9)]
                ctx().all_reduce("SUM", values, out=values[::-1])
                found.append([float(leaf[3]) for leaf in values])

        found: list = []
        strategy.run(fn)
        return found

    assert run_ranks(rank, 2) == [[[2.0 * i + 1 for i in range(8, -1, -1)]] * 4] * 2


TREES = {
    # Neighbours of one shape, alone and in the middle, with and without dimensions.
    "alike": lambda r, t: [random(r, t + i, (9, 5)) for i in range(20)],
    "tuple": lambda r, t: tuple(random(r, t + i, (40,)) for i in range(20)),
    "runs": lambda r, t: [
        random(r, t + i, shape)
        for i, shape in enumerate([(200,), (3, 2), (3, 2), (), (), (1,), (1,), (2, 3), (200,)])
    ],
    "nested": lambda r, t: {"b": {"x": random(r, t, (300,))}, "a": (random(r, t + 1, (2, 50)),)},
    "lone": lambda r, t: random(r, t, (50, 9)),
}


@every("into", ["fresh", "others", "itself"])
@every("weights", [None, (3.0, 5.0, 0.25), (2, 0, 7), (1.0, 1.0, 1.0)])
@every("kind", list(TREES))
@every("forgetful", [False, True])  # the first rank takes the general path
@every("size", [2, 3])
def test_shared_trees_remembered_or_not(size, forgetful, kind, weights, into):
    make = TREES[kind]
    given = None if weights is None else weights[:size]

    def tree(rank, turn):
        made = make(rank, turn)
        if given is not None and given[rank] == 0:
            made = ms.pytree.map(lambda leaf: np.full_like(leaf, np.nan), made)  # never read
        return made

    def program(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        calls = strategy._replicas.plans
        outs = ms.pytree.map(lambda leaf: np.full(leaf.shape, -7.0), make(0, 0))

        def fn(turn):
            value = tree(comm.rank, turn)
            out = {"fresh": None, "others": outs, "itself": value}[into]
            weight = None if given is None else given[comm.rank]
            found = ms.get_replica_context().all_reduce("MEAN", value, weight=weight, out=out)
            assert out is None or found is out
            results.append(ms.pytree.map(np.copy, found))
            kept.append(found)

        results, kept = [], []
        for turn in (0, 100, 200, 300):
            if forgetful and comm.rank == 0:
                calls.clear()
            strategy.run(lambda turn=turn: fn(turn))
        if into != "others":  # what was given away is not written to again
            for one, two in zip(results, kept, strict=True):
                ms.pytree.map(np.testing.assert_array_equal, one, two)
        return results, len(calls)

    ranks = run_ranks(program, size)
    assert [count > 0 for _, count in ranks] == [True] * size
    for step, turn in enumerate((0, 100, 200, 300)):
        leaves = [ms.pytree.flatten(make(rank, turn))[0] for rank in range(size)]
        factors = given or (1.0,) * size
        want = [
            sum_in_order([0 * a if f == 0 else a * f for a, f in zip(each, factors, strict=True)])
            / math.fsum(factors)
            for each in zip(*leaves, strict=True)
        ]
        for results, _ in ranks:
            got, structure = ms.pytree.flatten(results[step])
            assert structure == ms.pytree.flatten(make(0, 0))[1]
            assert [leaf.shape for leaf in got] == [leaf.shape for leaf in leaves[0]]
            assert [leaf.tobytes() for leaf in got] == [np.asarray(leaf).tobytes() for leaf in want]


def sum_in_order(terms):
    return functools.reduce(np.add, terms)


def test_a_weight_that_is_none_is_refused_after_a_plan_too():
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        values = [np.full(30, comm.rank + 1.0) for _ in range(9)]
        fold = lambda w: ms.get_replica_context().all_reduce("MEAN", values, weight=w)  # noqa: E731
        for _ in range(3):
            strategy.run(lambda: fold(comm.rank + 1.0))
        for bad in (-1, np.nan, "3", [1.0]):
            with pytest.raises(ValueError, match="weight must be a number"):
                strategy.run(lambda bad=bad: fold(bad if comm.rank else 1.0))
        return float(strategy.run(lambda: fold(comm.rank + 1.0))[8].local[0])

    assert run_ranks(rank, 2) == [5 / 3] * 2


def test_arrays_in_place_cost_one_rank_a_handshake_and_a_look_at_them():
    """However large they are: nothing moves. Counted, as times depend on what else there is."""

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        buffers, counts = strategy.buffers([np.empty(30_000)] * 3), []

        def count(_, event, __):
            counts[-1] += event == "call"

        def fn():
            ctx = ms.get_replica_context()
            for _ in range(4):
                counts.append(0)
                sys.setprofile(count)
                ctx.all_reduce("SUM", buffers, out=buffers)
                sys.setprofile(None)

        strategy.run(fn)
        return counts

    ((*_, last),) = run_ranks(rank, 1)
    assert last <= 30
