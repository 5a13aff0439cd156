"""Variables: creation, reading, what each kind of write does, and what is refused."""

from __future__ import annotations

import copy
import operator
import pickle

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.compat import tf
from mpistrat.testing import run_ranks

# On copies of each rank, and on copies that a node has in common.
pytestmark = pytest.mark.usefixtures("kept")

Agg, Sync = ms.VariableAggregation, ms.VariableSynchronization
ctx = ms.get_replica_context


def made(strategy, *args, **kwargs):
    with strategy.scope():
        return ms.Variable(*args, **kwargs)


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
@pytest.mark.parametrize("value", [5.0, np.arange(3), np.arange(1000.0), "call"], ids=str)
def test_the_initial_value_is_that_of_rank_0(make, value):
    def rank(comm):
        base = np.arange(4.0) if isinstance(value, str) else np.asarray(value)
        mine = base + comm.rank
        v = made(make(), (lambda: mine) if isinstance(value, str) else mine, name="v")
        return v.numpy() - base

    for got in run_ranks(rank, 3):
        assert not np.any(got)


@every("shape", [(), (0,), (0, 3), (2, 2)])
@every("code", ["?", "i1", "u8", "f2", "f4", ">f8", "g", "c16", "bfloat16"])
def test_dtypes_and_shapes(shape, code):
    dtype = np.dtype(ml_dtypes.bfloat16 if code == "bfloat16" else code)

    def rank(comm):
        v = made(ms.MirroredStrategy(), np.ones(shape, dtype), aggregation=Agg.NONE)
        v.assign(np.zeros(shape, dtype))
        return v.dtype, v.shape, np.asarray(v).tolist()

    want = (dtype.newbyteorder("="), shape, np.zeros(shape, dtype).tolist())
    assert run_ranks(rank, 2) == [want, want]


def test_it_does_not_alias_what_it_was_made_from_or_assigned():
    def rank(comm):
        source = np.zeros(3)
        v = made(ms.MirroredStrategy(), source)
        source[:] = 7
        assert v.numpy().tolist() == [0, 0, 0]
        v.assign(source)
        source[:] = 9
        return v.numpy().tolist()

    assert run_ranks(rank, 2) == [[7, 7, 7]] * 2


def test_views_are_live_and_read_only_and_copies_are_copies():
    def rank(comm):
        v = made(ms.MirroredStrategy(), np.zeros(3))
        view, copy = np.asarray(v), v.numpy()
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        copy[:] = 5
        v.assign_add(np.ones(3))
        with pytest.raises(TypeError, match="assign"):
            np.add(v, 1, out=v)
        assert np.array(v, copy=True).flags.writeable
        with pytest.raises(ValueError, match="copy=False forbids"):
            v.__array__(np.dtype("f4"), copy=False)
        assert np.shares_memory(v.__array__(np.dtype("f8"), copy=False), view)
        assert np.asarray(v, np.float32).dtype == np.float32
        return view.tolist(), v.read_value().tolist(), v.value().tolist()

    assert run_ranks(rank, 2) == [([1] * 3,) * 3] * 2


def test_a_variable_is_a_mask_for_numpy():
    x, mask = np.array([1.0, 2.0, 4.0]), [True, False, True]
    for where in (ms.Variable(mask), ms.Mirrored(np.array(mask), 1)):
        assert np.add(ms.Variable(x), 1, where=where, out=np.zeros(3)).tolist() == [2, 0, 5]
        assert np.add.reduce(ms.Mirrored(x, 1), where=where) == 5
        assert np.sum(x, where=where) == 5


def test_operators_read():
    v = ms.Variable([1.0, 2.0])
    w = ms.Variable(3.0)
    assert (v + v).tolist() == [2, 4]
    assert (2 - v / w).tolist() == pytest.approx([5 / 3, 4 / 3])
    assert (v @ np.ones(2)) == 3
    assert (v == 1).tolist() == [True, False]
    assert np.concatenate([v, v]).tolist() == [1, 2, 1, 2]
    assert (v[1], float(w), int(w), bool(w)) == (2, 3.0, 3, True)
    assert len({v, w}) == 2
    assert isinstance(w.numpy(), np.float64)


class Matrix:
    """What NumPy's arrays leave operators to, as to a sparse matrix of SciPy or an array of JAX."""

    __array_priority__ = 10.0

    def __rmatmul__(self, other):
        return "matmul of", type(other)

    __matmul__ = None

    def __rmul__(self, other):
        return "mul of", type(other)

    __eq__ = __rmul__
    __hash__ = None


@pytest.mark.parametrize("make", [ms.Variable, ms.Mirrored])
def test_operators_are_those_of_the_array(make):
    x, b = np.arange(6.0).reshape(2, 3), np.array([True, False])
    v, w = make(x), make(b)
    assert (v @ Matrix(), v * Matrix(), v == Matrix()) == (
        ("matmul of", np.ndarray),
        ("mul of", np.ndarray),
        ("mul of", np.ndarray),
    )
    assert (w**2).dtype == (b**2).dtype == np.int8  # other than of np.power
    assert (v == "text").tolist() == (x == "text").tolist()
    assert (divmod(7, make(2)), divmod(make(7), 2), 2 ** make(3)) == ((3, 1), (3, 1), 8)
    assert (2 << make(3), make(7) >> 1, 6 & make(3), 1 | make(2), make(7) ^ 2) == (16, 3, 2, 3, 5)
    assert ((v < 3) == (x < 3)).all() and ((v >= 3) == (x >= 3)).all()
    assert 4.0 in v and 7.0 not in v and True in w


def test_overlapping_writes_are_right():
    def rank(comm):
        v = made(ms.MirroredStrategy(), np.arange(1000.0))
        v.assign(np.asarray(v)[::-1])
        v.assign_add(np.asarray(v)[::-1])
        v.assign_sub(v)
        return v.numpy()

    for got in run_ranks(rank, 2):
        assert not got.any()


def test_created_on_one_rank_only_is_an_error_on_all_and_the_next_works():
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            for _ in range(2):
                with pytest.raises(ms.LockstepError):
                    if comm.rank == 0:
                        ms.Variable(1.0)
                    else:
                        s.reduce("SUM", ms.PerReplica(1.0), None)
            with pytest.raises(TypeError):
                ms.Variable("text" if comm.rank else 1.0)
            for bad in ({"name": f"v{comm.rank}"}, {"dtype": ["f4", "f8"][comm.rank]}):
                with pytest.raises(ms.LockstepError):
                    ms.Variable(1.0, **bad)
            with pytest.raises(ms.LockstepError):
                ms.Variable(np.zeros(2 + comm.rank))
            with pytest.raises(ms.LockstepError):
                ms.Variable(1.0, aggregation=[Agg.SUM, Agg.MEAN][comm.rank])
            return float(ms.Variable(2.0).numpy())

    assert run_ranks(rank, 2) == [2.0, 2.0]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"synchronization": Sync.NONE},
        {"synchronization": 9},
        {"aggregation": 9},
        {"aggregation": Agg.MEAN, "dtype": np.int32},
        {"aggregation": Agg.MEAN, "dtype": bool, "synchronization": Sync.ON_READ},
    ],
    ids=str,
)
def test_kinds_that_mean_nothing(kwargs):
    def rank(comm):
        s = ms.MirroredStrategy()
        with pytest.raises(ValueError, match=r"Variable:0"):
            made(s, True, **kwargs)
        v = made(s, 1, name="w")
        return v.synchronization, v.name, v.trainable, v.strategy is s, v.distribute_strategy is s

    assert run_ranks(rank, 2) == [(Sync.ON_WRITE, "w:0", True, True, True)] * 2


@pytest.mark.parametrize(
    "value", [[object()], ["a"], "text", None, object(), np.ma.ones(2), np.array(["a"])]
)
def test_what_is_no_number_cannot_be_a_variable(value):
    with pytest.raises(TypeError):
        ms.Variable(value)


@pytest.mark.parametrize("kind", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("sync", [Sync.ON_WRITE, Sync.ON_READ])
def test_values_that_do_not_fit(kind, sync):
    def rank(comm):
        s = ms.MirroredStrategy()
        v = made(s, np.zeros(3, np.int32), synchronization=sync, aggregation=Agg.NONE)
        cases = [
            (np.zeros(2, np.int32), ValueError),
            (5, ValueError),
            (np.zeros((1, 3), np.int32), ValueError),
            (np.ones(3) * 0.5, TypeError),
            (np.zeros(3, complex), TypeError),
            ("text", TypeError),
            (ms.PerReplica(np.zeros(3, np.int32)), ValueError),
            (np.full(3, comm.rank, np.int32), ms.LockstepError),
        ]
        for value, error in cases:
            with pytest.raises(error):
                getattr(v, kind)(value)
        small = made(s, np.uint8(1))
        with pytest.raises(TypeError):
            getattr(small, kind)(-1)
        assert np.asarray(s.experimental_local_results(v)[0]).tolist() == [0, 0, 0]

    run_ranks(rank, 2)


@every("kind", ["assign", "assign_add", "assign_sub"])
@every("aggregation", [Agg.NONE, Agg.SUM, Agg.MEAN, Agg.ONLY_FIRST_REPLICA])
def test_a_value_per_replica_is_refused_for_what_it_is(kind, aggregation):
    def rank(comm):
        s = ms.MirroredStrategy()
        own = made(s, 1.0, synchronization=Sync.ON_READ, aggregation=aggregation)
        said = r"ON_READ variable .* takes one value for all\. .* in replica code \(strategy\.run\)"
        with pytest.raises(ms.StructureError, match=said) as caught:
            getattr(own, kind)(ms.PerReplica(2.0))
        assert "differ" not in str(caught.value)
        s.run(lambda: getattr(own, kind)(2.0))  # what it advises
        mirrored = made(s, 1.0, aggregation=aggregation)
        with pytest.raises(ms.StructureError, match="would make the copies differ"):
            getattr(mirrored, kind)(ms.PerReplica(2.0))
        return s.run(lambda: own.numpy())

    wanted = {"assign": 2.0, "assign_add": 3.0, "assign_sub": -1.0}[kind]
    assert [float(found.local) for found in run_ranks(rank, 2)] == [wanted] * 2


def test_a_value_that_depends_on_the_rank_names_both():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        v = made(strategy, 0.0)
        with pytest.raises(ms.LockstepError, match=r"0\.5 on rank 0; 1\.5 on rank 1"):
            v.assign(comm.rank + 0.5)
        known = strategy.extended.reduce_to("MEAN", ms.PerReplica(1.0), v)
        with pytest.raises(ms.LockstepError):
            v.assign(1.0 if comm.rank else known)
        return float(v.numpy())

    assert run_ranks(rank, 2) == [0.0, 0.0]


def test_equal_longdoubles_are_equal_whatever_their_padding():
    def rank(comm):
        x = np.array([1, 2], np.longdouble)
        if x.itemsize == 16:
            x.view(np.uint8).reshape(2, 16)[:, 10:] = comm.rank
        v = made(ms.MirroredStrategy(), np.zeros(2, np.longdouble))
        v.assign(x)
        with pytest.raises(ms.LockstepError):
            v.assign(x + comm.rank * np.longdouble(1e-17) * 8)
        return v.numpy().tolist()

    assert run_ranks(rank, 2) == [[1, 2]] * 2


def test_bfloat16_takes_floats():
    v = ms.Variable(np.zeros(2, ml_dtypes.bfloat16))
    v.assign([1.5, 2.0])
    v.assign_add(np.ones(2, np.float32))
    assert v.dtype == ml_dtypes.bfloat16
    assert v.numpy().tolist() == [2.5, 3]


def test_created_in_replica_code():
    def rank(comm):
        s = ms.MirroredStrategy()
        v = s.run(lambda: ms.Variable(np.full(2, float(comm.rank)), name="v"))
        assert isinstance(v, ms.Variable)
        with pytest.raises(ms.LockstepError):
            s.run(lambda: ms.Variable(1.0) if comm.rank == 0 else None)
        w = s.run(lambda: ms.Variable(3.0))
        return v.numpy().tolist(), v.strategy is s, float(w.numpy())

    assert run_ranks(rank, 2) == [([0, 0], True, 3.0)] * 2


BF = ml_dtypes.bfloat16


@every(
    ("value", "dtype"),
    [
        (1.5, int),
        (1.0, np.int32),
        ([1.5, 2.0], np.int64),
        (np.float32(2.0), np.uint8),
        (np.ones(3, BF), np.int16),
        (1j, np.float64),
        (np.ones(2, np.complex64), BF),
        (2, bool),
        (1.0, bool),
        (300, np.int8),
        (-1, np.uint64),
        (np.array([3, 2**40]), np.int32),
        ([0, -1], np.uint32),
    ],
)
@every("odd", [None, 1])
def test_initial_values_that_would_lose_something(value, dtype, odd):
    def rank(comm):
        s = ms.MirroredStrategy()
        good = np.zeros(np.shape(value), dtype)
        mine = value if odd in (None, comm.rank) else good
        with s.scope():
            with pytest.raises(ms.LeafTypeError) as found:
                ms.Variable(mine, dtype=dtype, name="w")
            assert "'w:0'" in str(found.value)
            assert "does not convert to" in str(found.value)
            v = ms.Variable(good, dtype=dtype)  # the ranks are in step still
        return v._number

    assert run_ranks(rank, 3) == [1] * 3


@every(
    ("value", "dtype"),
    [
        (1, np.float32),
        (True, np.float64),
        (True, np.int32),
        ([1, 2], np.uint8),
        ([True, False], BF),
        (np.array([1.5, 2.5]), np.float32),
        (np.array([1.5, 2.5]), BF),
        (np.array([1.5, 2.5], BF), np.float32),
        (1.5, np.complex64),
        (2**64 - 1, np.uint64),
        (np.array([-128, 127]), np.int8),
        (np.arange(3, dtype=np.uint64), np.int32),
        ([], np.int32),
        (np.zeros((0, 3), np.int64), np.uint8),
        (lambda: 7, np.float16),
    ],
)
def test_initial_values_that_convert(value, dtype):
    def rank(comm):
        with ms.MirroredStrategy().scope():
            v = ms.Variable(value, dtype=dtype)
        return v.dtype, np.asarray(v, np.complex128).tolist()

    want = np.array(value() if callable(value) else value).astype(np.complex128).tolist()
    assert run_ranks(rank, 2) == [(np.dtype(dtype), want)] * 2


def test_what_a_variable_does_not_do_says_what_to_do_instead():
    def rank(comm):
        s = ms.MirroredStrategy()
        v = made(s, np.arange(3.0), name="w")
        with pytest.raises(TypeError, match=r"'w:0'.*v\[0\] = .*scatter_update.*v\.assign\("):
            v[0] = 3
        with pytest.raises(TypeError, match="scatter_update"):
            v[0] += 1
        with pytest.raises(TypeError, match=r"'w:0'.*\(3,\).*np\.delete\(v\.numpy\(\)"):
            del v[0]
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError, match=r"'w:0' cannot be pickled.*np\.save.*v\.assign"):
                pickle.dumps({"weights": [v]}, protocol)
        # What the texts advise does work.
        v.scatter_update(ms.IndexedSlices([3.0], [0]))
        v.assign(pickle.loads(pickle.dumps(v.numpy())) + 1)
        with s.scope():
            fewer = ms.Variable(np.delete(v.numpy(), 0, axis=0))
        return v.numpy().tolist(), fewer.numpy().tolist()

    assert run_ranks(rank, 2) == [([4.0, 2.0, 3.0], [2.0, 3.0])] * 2


def test_copies_of_a_variable():
    def rank(comm):
        v = made(ms.MirroredStrategy(), [1.0, 2.0])
        shallow, deep = copy.copy(v), copy.deepcopy(v)
        v.assign([3.0, 4.0])
        return shallow.numpy().tolist(), deep.numpy().tolist()

    assert run_ranks(rank, 2) == [([3.0, 4.0], [1.0, 2.0])] * 2


@every("kind", ["assign", "assign_add", "scatter_update"])
@every("where", ["cross", "replica", "update"])
@every(
    ("dtype", "value", "good"),
    [
        ("i4", np.array([2**40, 1]), False),
        ("i4", np.array([-(2**31), 2**31 - 1]), True),
        ("i4", np.array([0, 2**31]), False),
        ("u1", np.array([3, 1]), True),
        ("u1", np.array([3, -1]), False),
        ("u1", np.array([256, 1], "u2"), False),
        ("i8", np.array([2**63, 1], "u8"), False),
        ("i8", np.array([2**62, 1], "u8"), True),
        ("i2", np.array([True, False]), True),
        ("f4", np.array([2**40, 1]), True),
        ("?", np.array([1, 0]), False),
        ("i4", np.array([1.0, 2.0]), False),
    ],
)
def test_integers_are_written_only_if_the_dtype_holds_them(kind, where, dtype, value, good):
    if dtype == "?" and kind == "assign_add":
        pytest.skip("bool has no sum")

    def write(v, value):
        if kind == "scatter_update":
            return v.scatter_update(ms.IndexedSlices(np.asarray(value), np.arange(2)))
        return getattr(v, kind)(value)

    def rank(comm):
        s = ms.MirroredStrategy()
        v = made(s, np.zeros(2, dtype))
        for given in (value, value.tolist(), tuple(value)):
            if kind == "scatter_update" and given is not value:
                continue
            v.assign(np.zeros(2, dtype))
            calls = {
                "cross": lambda x: write(v, x),
                "replica": lambda x: s.run(lambda: write(v, x)),
                "update": lambda x: s.extended.update(v, lambda v, x: write(v, x), args=(x,)),
            }
            given = np.asarray(given) if where == "update" else given
            if good:
                calls[where](given)
                assert v.numpy().tolist() == value.astype(dtype).tolist()
                continue
            with pytest.raises(TypeError):
                calls[where](given)
            assert not v.numpy().any()
        return True

    assert all(run_ranks(rank, 2))


@pytest.mark.parametrize("value", [np.int64(2**40), 2**40, np.array(2**40), -(2**31) - 1])
def test_a_lone_integer_that_the_dtype_does_not_hold_is_named(value):
    v = ms.Variable(np.int32(7))
    with pytest.raises(ms.LeafTypeError, match=rf"{value} does not fit in int32"):
        v.assign(value)
    assert v.numpy() == 7


def test_one_rank_s_number_that_does_not_fit_is_an_error_of_all():
    def rank(comm):
        v = made(ms.MirroredStrategy(), np.zeros(2, np.uint8))
        with pytest.raises(TypeError):
            v.assign([300 * comm.rank, 1])
        return v.assign([3, 1]).numpy().tolist()

    assert run_ranks(rank, 2) == [[3, 1]] * 2


def test_nothing_is_of_every_dtype():
    v = ms.Variable(np.zeros(0, np.int32))
    assert v.assign([]).shape == (0,)


IN_PLACE = "iadd isub imul imatmul itruediv ifloordiv imod ipow ilshift irshift iand ixor ior"


@every("make", [ms.Variable, tf.Variable])
@every("name", IN_PLACE.split())
def test_operators_in_place_are_refused(make, name):
    v = make(np.array([1, 2]))
    with pytest.raises(TypeError, match=r"(?s)v\.assign_add\(x\).*v = v [-+*@/%<>&^|]+ x\."):
        getattr(operator, name)(v, np.array([1, 2]))
    assert v.numpy().tolist() == [1, 2]


def test_a_variable_is_added_to_an_array_in_place_and_a_mirrored_value_never_changes():
    kept = ms.Variable([1.0, 2.0])
    m = mirrored = ms.Mirrored(np.ones(2), 2)
    m *= 3
    assert (type(m), m.tolist(), mirrored.numpy().tolist()) == (np.ndarray, [3, 3], [1, 1])
    array = np.zeros(2)
    array += kept
    assert array.tolist() == [1, 2]


@pytest.mark.parametrize("make", [ms.Variable, lambda x: ms.Mirrored(x, 2)])
def test_text_and_rounding(make):
    number = make(np.float64(2.34567))
    assert f"{number:.3f}" == "2.346"
    assert f"{number}" == str(number)
    assert round(number, 2) == 2.35
    assert round(number) == 2
    assert round(make(np.array([1.26, 2.34])), 1).tolist() == [1.3, 2.3]
    assert complex(number) == 2.34567
    with pytest.raises(TypeError):
        f"{make(np.ones(2)):.3f}"


@pytest.mark.parametrize("dtype", ["f8", "c8"])
def test_of_two_nans_all_ranks_keep_the_same(dtype, monkeypatch):
    # NumPy's loops leave one or the other, by the length and the layout of what they are given.
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "2")

    def rank(comm):
        s = ms.MirroredStrategy()
        v = made(s, np.full((130, 131), np.nan, dtype))
        v.assign_add(-v.numpy())
        s.check_same(v)

    run_ranks(rank, 3)
