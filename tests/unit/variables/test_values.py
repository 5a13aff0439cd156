"""Values per replica and mirrored values: what they show, fetch, and compute."""

from __future__ import annotations

import copy
import functools
import math
import operator

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks


class Point:
    """An object that can be pickled."""

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return isinstance(other, Point) and other.x == self.x


class Sour:
    """One that pickles and does not come back."""

    def __reduce__(self):
        return (int, ("sour",))


def test_small_values_are_known_at_once_and_large_ones_when_asked_for():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        small, large = strategy.run(lambda: (comm.rank, np.full(100, comm.rank)))
        calls = strategy._replicas.lockstep.session.calls
        assert small.values == (0, 1)
        assert repr(small) == "PerReplica:{\n  0: 0,\n  1: 1\n}"
        assert f"<on rank {1 - comm.rank}>" in repr(large)
        with pytest.raises(ValueError, match="experimental_local_results"):
            large.values  # noqa: B018
        assert strategy.experimental_local_results(small) == (0, 1)
        assert strategy._replicas.lockstep.session.calls == calls
        for _ in range(2):
            got = strategy.experimental_local_results(large)
            assert [x.tolist() for x in got] == [[0] * 100, [1] * 100]
            assert strategy._replicas.lockstep.session.calls == calls + 1
        assert "<on rank" not in repr(large)
        assert len(large.values) == 2
        assert got[comm.rank] is not large.local  # which the program may still write to

    run_ranks(rank, 2)


@pytest.mark.parametrize(
    "values",
    [
        (None, 1.0, 2.0),
        (None, "text", np.ones(50)),
        (np.ones(50), 1, 2),
        (1, 2, np.ones(50)),
        ("x" * 500, None, "y"),
        (Point(1), None, 3),
        (True, False, None),
        (np.int8(1), np.uint8(2), np.bool_(True)),
        (np.ones(2, bool), np.zeros(3, "u1"), np.array(b"ab")),
        ({1, 2}, 0, "z"),
        (1j, math.inf, -0.0),
        (np.datetime64("2020-01-01"), 10**30, "ü"),
        (np.float16(1.5), np.longdouble(2), np.complex64(3)),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_any_mixture_of_values_arrives(values):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        got = strategy.run(lambda: {"v": values[comm.rank]})
        known = got["v"]._is_known
        return strategy.experimental_local_results(got["v"]), known

    results = run_ranks(rank, 3)
    assert len({known for _, known in results}) == 1
    for got, _ in results:
        for one, want in zip(got, values, strict=True):
            assert type(one) is type(want)
            assert np.array_equal(one, want) if isinstance(want, np.ndarray) else one == want


def test_none_everywhere_stays_none_and_variables_stay_variables():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v = ms.Variable(1.0)
        m = ms.Mirrored(np.ones(2), 2)
        got = strategy.run(lambda: (None, v, m, 5))
        return got[0] is None and got[1] is v and got[2] is m and got[3].values == (5, 5)

    assert run_ranks(rank, 2) == [True, True]


@pytest.mark.parametrize("odd", [0, 1])
def test_what_cannot_be_sent_is_a_type_error_everywhere(odd):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        value = strategy.run(lambda: (lambda: 0) if comm.rank == odd else 1)
        assert callable(value.local) is (comm.rank == odd)
        with pytest.raises(TypeError, match="cannot be sent") as caught:
            strategy.experimental_local_results(value)
        after = strategy.experimental_local_results(strategy.run(lambda: comm.rank))
        return isinstance(caught.value, ms.RemoteError), after

    assert run_ranks(rank, 2) == [(odd != 0, (0, 1)), (odd != 1, (0, 1))]


def test_what_cannot_be_read_back_fails_everywhere():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        value = strategy.run(lambda: Sour() if comm.rank == 1 else 1)
        with pytest.raises(Exception, match=r"."):
            strategy.experimental_local_results(value)
        return strategy.experimental_local_results(strategy.run(lambda: comm.rank))

    assert run_ranks(rank, 2) == [(0, 1), (0, 1)]


def test_local_results_of_trees():
    def rank(comm):
        s = ms.MirroredStrategy()
        tree = s.run(lambda: {"a": comm.rank, "b": [np.full(99, comm.rank)] * 2})
        got = s.experimental_local_results(tree)
        plain = [s.experimental_local_results(x) for x in (5, "t", None, [1, 2], [], (3,))]
        return [(g["a"], g["b"][0][0], g["b"][1][0]) for g in got], plain

    for got, plain in run_ranks(rank, 2):
        assert got == [(0, 0, 0), (1, 1, 1)]
        assert plain == [(5,), ("t",), (None,), ([1, 2], [1, 2]), ([], []), ((3,), (3,))]


def test_results_of_one_rank_do_not_alias_those_of_another():
    def rank(comm):
        s = ms.MirroredStrategy()
        mine = np.full(3, float(comm.rank))
        got = s.experimental_local_results(s.run(lambda: mine))
        got[1 - comm.rank][:] = 99
        return mine.tolist()

    assert run_ranks(rank, 2) == [[0] * 3, [1] * 3]


class TestMirrored:
    """A mirrored value stands for the value itself."""

    def test_arithmetic(self):
        m = ms.Mirrored(np.array([1.0, 2.0]), 3)
        assert (m + 1).tolist() == [2, 3]
        assert (2 * m - m / 2).tolist() == [1.5, 3]
        assert (m @ m) == 5
        assert np.exp(m).tolist() == np.exp([1.0, 2.0]).tolist()
        assert np.asarray(m).tolist() == [1, 2]
        assert (m > 1).tolist() == [False, True]
        assert np.sum(m) == 3
        assert m[1] == 2
        assert len(m.values) == 3
        assert (m.shape, m.dtype) == ((2,), np.float64)
        assert (-m).tolist() == [-1, -2]
        assert (m + m).tolist() == [2, 4]

    def test_conversion(self):
        assert float(ms.Mirrored(2.5)) == 2.5
        assert int(ms.Mirrored(np.int32(7))) == 7
        assert bool(ms.Mirrored(0.0)) is False
        assert bool(ms.Mirrored(np.float64(1))) is True
        assert isinstance(ms.Mirrored(np.array(3.0)).numpy(), np.float64)
        with pytest.raises(ValueError, match="ambiguous"):
            bool(ms.Mirrored(np.ones(2)))

    def test_in_place_operators_neither_hang_nor_change_the_value_for_others(self):
        m = kept = ms.Mirrored(np.array([1.0, 2.0]), 2)
        try:
            m += 1
        except TypeError:
            return
        assert np.asarray(m).tolist() == [2, 3]
        assert np.asarray(kept).tolist() == [1, 2]

    def test_numpy_copies(self):
        m = ms.Mirrored(np.array([1.0, 2.0]), 2)
        m.numpy()[:] = 9
        assert np.asarray(m).tolist() == [1, 2]

    def test_repr(self):
        assert repr(ms.Mirrored(1.5, 2)) == "Mirrored:{\n  0: 1.5,\n  1: 1.5\n}"


def test_per_replica_values_do_not_compute():
    value = ms.PerReplica(np.ones(2))
    for act in (lambda: value + 1, lambda: len(value), lambda: value[0], lambda: float(value)):
        with pytest.raises(TypeError):
            act()


def test_a_value_per_replica_is_neither_true_nor_equal():
    def rank(comm):
        s = ms.MirroredStrategy()
        loss, other = s.run(lambda: (comm.rank < 1, comm.rank))
        for question in (
            lambda: bool(loss),
            lambda: 1 if loss else 0,
            lambda: not loss,
            lambda: loss == other,
            lambda: loss != other,
            lambda: loss == 1.0,
            lambda: loss != None,  # noqa: E711
            lambda: np.float64(1.0) == loss,
            lambda: np.ones(2) == loss,
        ):
            with pytest.raises(TypeError, match=r"strategy\.reduce"):
                question()
        assert loss == loss
        assert (loss != loss) is False
        assert loss in [loss]
        assert len({loss, other}) == 2
        # Inside of the library nothing looks at leaves that way.
        tree = {"a": [loss, other, loss], "b": (other,)}
        assert s.experimental_local_results(tree)[1]["a"] == [False, 1, False]
        s.reduce("SUM", [other, other], axis=None)
        s.extended.batch_reduce_to("SUM", [(other, other), (other, other)])
        s.run(lambda t: None, args=(tree,))
        return s.run(lambda: ms.get_replica_context().merge_call(lambda s, t: t, args=(tree,)))

    run_ranks(rank, 2)


SINGLE = {
    "has no arithmetic": [
        *(operator.add, operator.sub, operator.mul, operator.matmul, operator.truediv),
        *(operator.floordiv, operator.mod, operator.pow, divmod),
    ],
    "has no bits": [operator.lshift, operator.rshift, operator.and_, operator.xor, operator.or_],
    "cannot be compared": [operator.lt, operator.le, operator.gt, operator.ge],
}
OTHERS = {
    "int": lambda: 1,
    "scalar": lambda: np.float32(2),
    "array": lambda: np.ones(3),
    "Mirrored": lambda: ms.Mirrored(np.ones(2), 2),
    "PerReplica": lambda: ms.PerReplica(3.0),
    "Variable": lambda: ms.Variable(1.0),
    "text": lambda: "a",
}
ALONE = {
    "has no arithmetic": [operator.neg, operator.pos, abs],
    "has no bits": [operator.invert],
    "is not a number": [int, float, complex, round, lambda v: round(v, 2)],
    "has no length": [len],
    "cannot be iterated over": [iter, list, sorted, max, lambda v: [*v], lambda v: 1.0 in v],
    "has no parts": [lambda v: v[0], lambda v: v[:, 1]],
    "cannot be formatted as '.3f'": [lambda v: f"{v:.3f}"],
}


@pytest.mark.parametrize("kind", OTHERS)
def test_values_per_replica_are_no_operands(kind):
    value, other = ms.PerReplica(2.0), OTHERS[kind]()
    for told, operators in SINGLE.items():
        for operate in operators:
            turned = [] if kind == "text" and operate is operator.mod else [(other, value)]
            for pair in [(value, other), *turned]:
                with pytest.raises(TypeError, match=f"PerReplica {told}: each replica") as caught:
                    operate(*pair)
                for way in ("value.local", "experimental_local_results", "strategy.reduce"):
                    assert way in str(caught.value)
    with pytest.raises(TypeError, match="has no arithmetic"):
        value += other
    with pytest.raises(TypeError, match="has no arithmetic"):
        sum([value, value])


@pytest.mark.parametrize("told", ALONE)
def test_values_per_replica_are_not_one_value(told):
    for make in ALONE[told]:
        with pytest.raises(TypeError, match=f"a PerReplica {told}: each replica"):
            make(ms.PerReplica(2.0))
    assert f"{ms.PerReplica(2.0)}" == repr(ms.PerReplica(2.0))


@pytest.mark.parametrize("name", ["shape", "T", "mean", "item", "numpy", "dtype"])
def test_values_per_replica_have_no_attributes_of_arrays(name):
    value = ms.PerReplica(np.ones(2))
    with pytest.raises(AttributeError, match=f"a PerReplica has no '{name}': each replica"):
        getattr(value, name)
    assert not hasattr(value, name)


def test_a_mirrored_value_has_the_attributes_of_its_value():
    m = ms.Mirrored(np.arange(6.0).reshape(2, 3), 2)
    assert (m.ndim, m.size, m.T.shape, m.nbytes) == (2, 6, (3, 2), 48)
    assert (m.sum(), m.mean(axis=0).tolist(), m.tolist()) == (15, [1.5, 2.5, 3.5], m.local.tolist())
    assert m.astype("f4").dtype == np.float32
    assert m.reshape(-1).shape == (6,)
    number = ms.Mirrored(2.5, 2)
    assert (number.ndim, number.size, number.is_integer(), number.sum()) == (0, 1, False, 2.5)
    with pytest.raises(AttributeError):
        m.nothing  # noqa: B018
    assert copy.copy(m).size == 6
    assert copy.deepcopy(m).numpy().tolist() == m.tolist()


def test_a_function_that_returned_nothing_is_told_so():
    def rank(comm):
        s = ms.MirroredStrategy()
        nothing = s.run(lambda: None)
        for op in ("SUM", "MEAN", "MAX"):
            with pytest.raises(ms.StructureError, match="its function returned None"):
                s.reduce(op, nothing, axis=None)
        with pytest.raises(ms.StructureError, match="leaf 'b' is None"):
            s.reduce("MEAN", s.run(lambda: {"a": 1.0, "b": None}), axis=None)
        with pytest.raises(TypeError, match="None"):
            s.reduce("MEAN", nothing, axis=0)
        return float(s.reduce("SUM", s.run(lambda: 1.0), axis=None))

    assert run_ranks(rank, 2) == [2.0, 2.0]


async def _async():
    return 1.0


def _generator():
    yield 1.0


async def _both():
    yield 1.0


@pytest.mark.parametrize("fn", [_async, _generator, _both, functools.partial(_async)])
@pytest.mark.parametrize("kind", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_a_function_that_has_not_begun_is_refused(fn, kind):
    def rank(comm):
        s = kind()
        with pytest.raises(TypeError, match="nothing of it has run"):
            s.run(fn)
        with pytest.raises(TypeError, match="nothing of it has run"):
            s.run(fn if comm.rank else lambda: 1.0)
        return s.run(lambda: comm.rank) is not None

    assert run_ranks(rank, 2) == [True, True]
