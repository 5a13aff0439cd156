"""Scatter updates: arithmetic, what does not fit, and that nothing is half written."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

# On copies of each rank, and on copies that a node has in common.
pytestmark = pytest.mark.usefixtures("kept")

Agg, Sync = ms.VariableAggregation, ms.VariableSynchronization
KINDS = ["add", "sub", "mul", "div", "min", "max", "update"]
CODES = ["i1", "i4", "i8", "u2", "u8", "f2", "f4", "f8", "g", "c16", ml_dtypes.bfloat16]


def made(strategy, *args, **kwargs):
    with strategy.scope():
        return ms.Variable(*args, **kwargs)


def by_hand(start, kind, values, indices):
    """Element by element, with Python's own numbers."""
    found = start.tolist()
    for value, index in zip(values.tolist(), indices, strict=True):
        for j, x in enumerate(value):
            old = found[index][j]
            quotient = (
                abs(old) // abs(x) * (1 if old * x >= 0 else -1)
                if start.dtype.kind in "iu"
                else None
            )
            found[index][j] = {
                "add": lambda a=old, b=x: a + b,
                "sub": lambda a=old, b=x: a - b,
                "mul": lambda a=old, b=x: a * b,
                "div": lambda a=old, b=x, q=quotient: a / b if q is None else q,
                "min": lambda a=old, b=x: min(a, b),
                "max": lambda a=old, b=x: max(a, b),
                "update": lambda b=x: b,
            }[kind]()
    return found


@every("kind", KINDS)
@every("code", CODES)
def test_arithmetic_of_all_dtypes_with_rows_that_come_twice(kind, code):
    dtype = np.dtype(code)
    start = (np.arange(8).reshape(4, 2) * 3 + 40).astype(dtype)
    values = np.array([[2, 3], [4, 5], [2, 2]]).astype(dtype)
    if dtype.kind in "ifV":
        start[1] = -start[1]
        values[2, 1] = -values[2, 1]
    if kind in ("sub", "add", "mul") and code == "i1":
        start //= 8  # within its range
    delta = ms.IndexedSlices(values, [1, 3, 1])
    v = ms.Variable(start)
    if dtype.kind == "c" and kind in ("min", "max"):
        with pytest.raises(TypeError):
            v.scatter_min(delta)
        return
    getattr(v, f"scatter_{kind}")(delta)
    assert v.dtype == dtype
    want = np.array(
        by_hand(start, kind, values, [1, 3, 1]), dtype=None if dtype.kind == "u" else object
    )
    assert np.allclose(
        v.numpy().astype(complex), want.astype(complex), rtol=1e-2 if dtype.itemsize == 2 else 1e-7
    )


def test_integers_divide_towards_zero_to_their_ends():
    v = ms.Variable(np.array([-7, 7, -(2**63), 2**63 - 1]))
    v.scatter_div(ms.IndexedSlices([2, -2, 3, 2, -1], [0, 1, 2, 3, 3]))
    assert v.numpy().tolist() == [-3, -3, -((2**63) // 3), -((2**63 - 1) // 2)]


def test_bools_are_set_and_nothing_else():
    v = ms.Variable([True, True])
    v.scatter_update(ms.IndexedSlices([False], [1]))
    assert v.numpy().tolist() == [True, False]
    for kind in KINDS[:-1]:
        with pytest.raises(TypeError, match="no meaning"):
            getattr(v, f"scatter_{kind}")(ms.IndexedSlices([True], [0]))


def test_values_that_are_the_variable_itself():
    v = ms.Variable(np.arange(4.0))
    v.scatter_update(ms.IndexedSlices(np.asarray(v)[::-1], np.arange(4)))
    assert v.numpy().tolist() == [3, 2, 1, 0]
    v.scatter_add(ms.IndexedSlices(np.asarray(v)[::-1], np.arange(4)))
    assert v.numpy().tolist() == [3, 3, 3, 3]
    rows = ms.Variable(np.array([1, 0]))
    rows.scatter_update(ms.IndexedSlices(np.asarray(rows), np.asarray(rows)))
    assert rows.numpy().tolist() == [0, 1]


@pytest.mark.parametrize("make", [ms.get_strategy, lambda: ms.OneDeviceStrategy("cpu")])
@pytest.mark.parametrize("agg", list(Agg))
def test_where_there_is_one_replica_every_kind_takes_every_update(make, agg):
    s = make()
    v = made(s, [4.0, 4.0], synchronization=Sync.ON_READ, aggregation=agg)
    v.scatter_max(ms.IndexedSlices([6.0], [0]))
    s.run(lambda: v.scatter_update(ms.IndexedSlices([5.0], [1])))
    assert v.numpy().tolist() == [6, 5]
    assert not v.trainable


@every(
    ("give", "error"),
    [
        (lambda r: np.ones(3), TypeError),
        (lambda r: ms.IndexedSlices([1j], [0]), TypeError),
        (lambda r: ms.IndexedSlices([[1.0]], [0]), ValueError),
        (lambda r: ms.IndexedSlices([1.0], [3]), IndexError),
        (lambda r: ms.IndexedSlices([1.0], [-1]), IndexError),
        (lambda r: ms.IndexedSlices([1.0], [3 if r else 0]), IndexError),
        (lambda r: None if r else ms.IndexedSlices([1.0], [0]), TypeError),
    ],
)
@every("agg", list(Agg))
@every("where", ["cross", "replica", "update"])
def test_what_does_not_fit_fails_on_every_rank_and_changes_nothing(give, error, agg, where):
    def rank(comm):
        s = ms.MirroredStrategy()
        v = made(s, np.zeros(3), aggregation=agg)
        delta = give(comm.rank)
        with pytest.raises(error):
            if where == "cross":
                v.scatter_add(delta)
            elif where == "replica":
                s.run(lambda: v.scatter_add(delta))
            else:
                s.extended.update(v, lambda var: var.scatter_add(delta))
        return v.numpy().tolist(), float(s.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [([0, 0, 0], 2.0)] * 2


def test_a_variable_without_rows_takes_none():
    with pytest.raises(ValueError, match="do not fit"):
        ms.Variable(1.0).scatter_add(ms.IndexedSlices([1.0], [0]))


def test_an_integer_divided_by_nothing_fails_before_anything_is_written():
    def rank(comm):
        v = made(ms.MirroredStrategy(), np.array([4, 4]), aggregation=Agg.SUM)
        with pytest.raises(ZeroDivisionError):
            v.strategy.run(lambda: v.scatter_div(ms.IndexedSlices([2 - 2 * comm.rank], [1])))
        return v.numpy().tolist()

    assert run_ranks(rank, 2) == [[4, 4]] * 2


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
def test_replicas_write_different_numbers_of_rows(make, n):
    def rank(comm):
        s = make()
        vs = [made(s, np.zeros((4, 2)), aggregation=agg) for agg in list(Agg)[1:]]
        mine = ms.IndexedSlices(np.full((comm.rank, 2), comm.rank + 1.0), np.arange(comm.rank))
        s.run(lambda: [v.scatter_add(mine) for v in vs] and None)
        return [v.numpy()[:, 0].tolist() for v in vs]

    total = np.zeros(4)
    for r in range(n):
        total[:r] += r + 1
    for found in run_ranks(rank, n):
        assert np.allclose(found, [total, total / n, np.zeros(4)])


def test_of_writes_without_aggregation_those_stay_that_all_have_made_alike():
    def rank(comm):
        s = ms.MirroredStrategy()
        v = made(s, np.arange(4.0))

        def fn():
            v.scatter_update(ms.IndexedSlices([9.0, 8.0], [1, 1]))
            v.assign_add(np.ones(4))
            v.scatter_mul(ms.IndexedSlices([2.0 + comm.rank], [1]))

        with pytest.raises(ms.LockstepError, match="scatter_mul"):
            s.run(fn)
        assert v.numpy().tolist() == [1, 9, 3, 4]
        s.run(lambda: v.scatter_mul(ms.IndexedSlices([2.0, 3.0], [1, 1])))
        return v.numpy().tolist()

    assert run_ranks(rank, 3) == [[1, 54, 3, 4]] * 3


@pytest.mark.parametrize("kind", ["assign", "assign_add", "scatter_add", "scatter_update"])
@pytest.mark.parametrize("at", [0, 1])
def test_the_advice_is_the_same_whichever_element_differs(kind, at):
    def rank(comm):
        v = made(ms.MirroredStrategy(), np.zeros(2))
        value = np.ones(2)
        value[at] += comm.rank
        given = ms.IndexedSlices(value, [0, 1]) if "scatter" in kind else value
        with pytest.raises(ms.LockstepError) as found:
            v.strategy.run(lambda: getattr(v, kind)(given))
        return str(found.value)

    for text in run_ranks(rank, 2):
        assert "create the variable with an aggregation" in text
        assert "calls differ" not in text or "it depends on the rank" in text.splitlines()[-1]


@pytest.mark.parametrize("differ", ["values", "rows", "number of rows", "order"])
def test_rows_that_depend_on_the_rank_are_refused(differ):
    def rank(comm):
        v = made(ms.MirroredStrategy(), np.zeros(3))
        r = comm.rank
        values, rows = {
            "values": ([1.0 + r], [0]),
            "rows": ([1.0], [r]),
            "number of rows": ([1.0] * (1 + r), [0] * (1 + r)),
            "order": ([1.0, 1.0], [r, 1 - r]),
        }[differ]
        with pytest.raises(ms.LockstepError):
            v.scatter_add(ms.IndexedSlices(values, rows))
        with pytest.raises(ms.LockstepError):
            v.strategy.run(lambda: v.scatter_add(ms.IndexedSlices(values, rows)))
        with pytest.raises(ms.LockstepError):
            if r:
                v.scatter_add(ms.IndexedSlices([1.0], [0]))
            else:
                v.scatter_sub(ms.IndexedSlices([1.0], [0]))
        return v.numpy().tolist()

    assert run_ranks(rank, 2) == [[0, 0, 0]] * 2


def test_a_warning_made_an_error_stops_no_write():
    """The write has been checked by then; what one rank's settings say comes too late."""

    def rank(comm):
        s = ms.MirroredStrategy()
        v = made(s, np.ones(2, np.float32))
        with np.errstate(all="raise" if comm.rank else "ignore"):
            v.scatter_div(ms.IndexedSlices(np.zeros(1, np.float32), [0]))
            v.assign_add(np.full(2, 3e38, np.float32))
            v.assign_add(np.full(2, 3e38, np.float32))
        return v.numpy().tolist()

    assert run_ranks(rank, 2) == [[np.inf, np.inf]] * 2


def test_large_variables_take_the_native_path():
    def rank(comm):
        s = ms.MirroredStrategy()
        vs = [made(s, np.zeros((500, 40)), aggregation=agg) for agg in Agg]
        rows = np.arange(300) + 10 * comm.rank
        mine = ms.IndexedSlices(np.full((300, 40), comm.rank + 1.0), rows)
        s.run(lambda: [v.scatter_add(mine) for v in vs[1:]] and None)
        with pytest.raises(ms.LockstepError):
            s.run(lambda: vs[0].scatter_add(mine))
        return [v.numpy().sum() for v in vs]

    total = 300 * 40 * (1 + 2 + 3)
    assert run_ranks(rank, 3) == [[0, total, pytest.approx(total / 3), 300 * 40]] * 3


@pytest.mark.parametrize("kind", ["add", "mul", "update"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_rows_of_the_variable_itself_written_to_others(n, kind):
    start = np.random.default_rng(0).standard_normal((500, 40))
    to = np.array([499, 1, 0, 250, 1])
    want = start.copy()
    given = start[[0, 1, 499, 3, 4]]
    for row, value in zip(to, given, strict=True):
        want[row] = {"add": want[row] + value, "mul": want[row] * value, "update": value}[kind]

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        v = made(strategy, start.copy())
        whole = made(strategy, np.arange(500))
        rows = np.asarray(whole)[[0, 1, 499, 3, 4]]

        def step():
            view = v._component()
            delta = np.stack([view[row] for row in rows])
            getattr(v, f"scatter_{kind}")(ms.IndexedSlices(delta, to))
            v.scatter_update(ms.IndexedSlices(view[:0], np.asarray(whole)[:0]))
            v.scatter_update(ms.IndexedSlices(view[40:42], np.asarray(whole)[60:62]))

        strategy.run(step)
        return v.numpy().tobytes()

    want[60:62] = want[40:42]
    assert run_ranks(rank, n) == [want.tobytes()] * n


@pytest.mark.parametrize("kind", ["scatter_add", "scatter_mul"])
def test_a_complex_nan_in_a_row_is_the_usual_one_on_all_ranks(kind):
    # Which of two NaNs NumPy keeps there depends on where arrays lie in memory.
    v = ms.Variable(np.array([1, complex(-np.nan, -np.nan), 3]))
    getattr(v, kind)(ms.IndexedSlices(np.array([complex(-np.nan, 1)]), [1]))
    usual = np.array([complex(np.nan, np.nan)])
    assert v.numpy()[[1]].real.tobytes() == usual.real.tobytes()
    assert v.numpy()[[0, 2]].tolist() == [1, 3]
