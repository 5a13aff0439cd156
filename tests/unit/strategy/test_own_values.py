"""Values of each rank: gathered along an axis or as they are, and rows that are divided."""

from __future__ import annotations

import collections
import decimal
import enum

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

NUMBERS = [1, 2, 3, 4]
MAKE = [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy]


class TestAllGather:
    @every("n", NUMBERS)
    @every("make", MAKE)
    @every("axis", [0, -1])
    def test_it_is_the_concatenation_of_every_ranks_own_array(self, axis, make, n):
        def own(rank):
            return {"x": np.full((rank, 2), rank + 0.5), "f": np.ones((2, 1), bool)}

        def program(comm):
            strategy = make()
            if axis == 0:
                return strategy.all_gather(own(comm.rank), axis=0)
            return strategy.all_gather(own(comm.rank)["f"] * comm.rank, axis=axis)

        parts = [own(rank) for rank in range(n)]
        if axis == 0:
            wanted = {key: np.concatenate([part[key] for part in parts]) for key in "xf"}
        else:
            wanted = np.concatenate([parts[r]["f"] * r for r in range(n)], axis=-1)
        for found in run_ranks(program, n):
            if axis == 0:
                assert all(np.array_equal(found[key], wanted[key]) for key in "xf")
            else:
                assert np.array_equal(found, wanted)
                assert found.dtype == wanted.dtype

    @pytest.mark.parametrize("make", MAKE)
    def test_of_values_and_variables_of_replicas(self, make):
        def program(comm):
            strategy = make()
            with strategy.scope():
                own = ms.Variable(
                    np.zeros(1),
                    synchronization=ms.VariableSynchronization.ON_READ,
                    aggregation=ms.VariableAggregation.SUM,
                )
            local = strategy.run(lambda: np.full(2, comm.rank))
            strategy.run(lambda: own.assign(np.full(1, comm.rank + 1.0)) and None)
            with strategy.scope():
                return (
                    strategy.all_gather(local, 0).tolist(),
                    strategy.all_gather(own, 0).tolist(),
                    strategy.all_gather(np.zeros((0, 2)), 0).shape,
                )

        assert run_ranks(program, 2) == [([0, 0, 1, 1], [1.0, 2.0], (0, 2))] * 2

    def test_errors_are_on_all_ranks(self):
        def program(comm):
            strategy = ms.MirroredStrategy()
            with pytest.raises(ms.AxisError):
                strategy.all_gather(np.ones(2), axis=1)
            with pytest.raises(ms.LeafTypeError):
                strategy.all_gather(np.array(["a"]) if comm.rank else np.ones(1), axis=0)
            with pytest.raises(ms.LockstepError):
                strategy.all_gather(np.ones(2, "f4" if comm.rank else "f8"), axis=0)
            with pytest.raises(ms.ContextError, match=r"get_replica_context\(\)\.all_gather"):
                strategy.run(lambda: strategy.all_gather(np.ones(2), axis=0))
            with pytest.raises(ms.ContextError, match="no strategy is in scope"):
                ms.get_strategy().all_gather(np.ones(2), axis=0)
            return float(strategy.all_reduce("sum", 1.0))

        assert run_ranks(program, 2) == [2.0, 2.0]

    @pytest.mark.parametrize("make", [lambda: ms.OneDeviceStrategy("cpu"), ms.get_strategy])
    def test_of_one_replica_it_is_a_copy(self, make):
        x = np.arange(3.0)
        found = make().all_gather({"x": x}, axis=0)["x"]
        assert np.array_equal(found, x)
        assert not np.shares_memory(found, x)


Point = collections.namedtuple("Point", "x y")

TREES = {
    "numbers": lambda rank: [rank, rank + 0.5, 2**70 + rank, 1j * rank, rank > 0, None],
    "texts": lambda rank: ["\u00e4" * rank, "", "\udc80"],
    "bytes": lambda rank: b"\0" * rank,
    "trees of other lengths": lambda rank: {f"epoch {i}": [i] * i for i in range(rank)},
    "other structures": lambda rank: [None, "a", {"b": [1]}, (2, 3)][rank],
    "keys": lambda rank: {1: "a", "1": "b", (2, "c"): "d", None: rank, 1.5: "e", b"f": "g"},
    "numbers of NumPy": lambda rank: [np.float32(rank), np.int8(rank), np.str_("a"), np.True_],
    "nothing": lambda rank: [(), [], {}][: rank % 4],
    "more than a frame": lambda rank: {"x": "x" * 300 * rank},
}
ARRAYS = {
    "float64": lambda rank: np.arange(5.0 * rank),
    "another byte order": lambda rank: np.arange(3, dtype=">i2").reshape(3, 1) + rank,
    "Fortran": lambda rank: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "0-d": lambda rank: np.array(rank),
    "text": lambda rank: np.array([f"file {i}" for i in range(rank)], "U9"),
    "bytes": lambda rank: np.array([b"a", b"bc"]),
    "dates": lambda rank: np.arange(rank + 1).astype("M8[s]"),
    "objects": lambda rank: np.array([["a", None], [2**70, (rank,)]], object),
    "strings": lambda rank: np.array(["a", "b" * rank], np.dtypes.StringDType()),
    "bfloat16": lambda rank: np.arange(3).astype(ml_dtypes.bfloat16),
    "large": lambda rank: np.full(100_000 * rank, rank),
}


class Color(enum.Enum):
    RED = 1


class TestGatherObjects:
    @every("n", NUMBERS)
    @every("make", MAKE)
    @every("what", TREES)
    def test_trees_come_as_they_are(self, what, make, n):
        wanted = [TREES[what](rank) for rank in range(n)]
        for found in run_ranks(lambda comm: make().gather_objects(TREES[what](comm.rank)), n):
            assert found == wanted
            assert repr(found) == repr(wanted)

    @every("n", NUMBERS)
    @every("what", ARRAYS)
    def test_arrays_keep_dtype_shape_and_contents(self, what, n):
        def program(comm):
            return ms.MirroredStrategy().gather_objects({"a": [ARRAYS[what](comm.rank)]})

        for found in run_ranks(program, n):
            for rank, tree in enumerate(found):
                (array,), wanted = tree["a"], ARRAYS[what](rank)
                assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape)
                assert array.tolist() == wanted.tolist()
                array[...] = array  # writable

    def test_what_comes_as_something_plainer(self):
        def program(comm):
            strategy = ms.MirroredStrategy()
            with strategy.scope():
                w = ms.Variable(np.ones(2))
            local = strategy.run(lambda: comm.rank)
            ordered = collections.OrderedDict(b=1, a=Point(2, 3))
            return strategy.gather_objects([ordered, w, local])

        for found in run_ranks(program, 2):
            for rank, (tree, w, local) in enumerate(found):
                assert (type(tree), list(tree), type(tree["a"])) == (dict, ["b", "a"], tuple)
                assert (w.tolist(), local) == ([1.0, 1.0], rank)

    @pytest.mark.parametrize(
        ("leaf", "text"),
        [
            ({1, 2}, r"\['files'\]\[1\] is of type set"),
            (Color.RED, "of type Color"),
            (decimal.Decimal(1), "of type Decimal"),
            (print, "of type builtin_function"),
            (np.ma.masked_less([1, 2], 2), "masked array"),
            (np.zeros(2, "i1,f8"), "give its fields as a dict"),
            (np.array([object()], object), "of type object"),
            (np.zeros(2, "V3"), "dtype"),
        ],
    )
    def test_others_are_an_error_on_all_ranks(self, leaf, text):
        def program(comm):
            strategy = ms.MirroredStrategy()
            value = {"files": ["a", leaf if comm.rank else "b"]}
            with pytest.raises(ms.LeafTypeError, match=text):
                strategy.gather_objects(value)
            return strategy.gather_objects(comm.rank)

        assert run_ranks(program, 2) == [[0, 1]] * 2

    def test_where_it_may_not_be_called(self):
        def program(comm):
            strategy = ms.MirroredStrategy()
            with pytest.raises(ms.ContextError, match="after run"):
                strategy.run(lambda: strategy.gather_objects("a"))
            with pytest.raises(ms.ContextError, match="no strategy is in scope"):
                ms.get_strategy().gather_objects("a")
            alone = ms.OneDeviceStrategy("cpu").gather_objects(comm.rank)
            return alone, strategy.gather_objects("a")

        assert run_ranks(program, 2) == [([rank], ["a", "a"]) for rank in range(2)]

    @pytest.mark.parametrize("n", [2, 3])
    def test_a_small_value_costs_one_handshake(self, n):
        def program(comm):
            strategy, count = ms.MirroredStrategy(), []
            inner = comm.allgather
            comm.allgather = lambda *args: (count.append(1), inner(*args))[1]
            strategy.gather_objects({"loss": 0.5, "name": "a"})
            return len(count)

        assert run_ranks(program, n) == [1] * n


class TestLocalRows:
    @every("n", NUMBERS)
    @every("rows", [0, 1, 3, 8, 10])
    @every("make", MAKE)
    def test_they_are_the_rows_of_a_global_batch(self, make, rows, n):
        def program(comm):
            strategy, x = make(), np.arange(rows * 2.0).reshape(rows, 2)
            own = strategy.local_rows({"x": x, "y": (x[:, 0],)})
            inside = strategy.run(lambda: len(strategy.local_rows(x)))
            assert getattr(inside, "local", inside) == len(own["x"])
            assert own["x"].base is x.base  # no copy
            data = ms.Dataset(x).batch(max(rows, 1))
            for batch in strategy.experimental_distribute_dataset(data):
                assert np.array_equal(getattr(batch, "local", batch), own["x"])
            whole = strategy.all_gather(own, axis=0)
            return np.array_equal(whole["x"], x) and np.array_equal(whole["y"][0], x[:, 0])

        assert run_ranks(program, n) == [True] * n

    def test_other_kinds_of_arrays(self):
        import pandas

        table = pandas.DataFrame({"a": range(5)}, index=[3.5, 1.0, 2.0, 0.0, 9.0])

        def program(comm):
            strategy = ms.MirroredStrategy()
            with strategy.scope():
                w = ms.Variable(np.arange(5.0))
            rows, sparse, column, own = strategy.local_rows(
                (table, scipy.sparse.csr_matrix(np.eye(5)), table["a"], w)
            )
            return rows["a"].tolist(), sparse.toarray().shape, column.tolist(), own.tolist()

        assert run_ranks(program, 2) == [
            ([0, 1, 2], (3, 5), [0, 1, 2], [0.0, 1.0, 2.0]),
            ([3, 4], (2, 5), [3, 4], [3.0, 4.0]),
        ]

    @pytest.mark.parametrize(
        ("arrays", "text"),
        [
            ((np.ones(3), np.ones(4)), "same number of rows"),
            (np.float64(3), "no rows"),
            ({"a": "text"}, r"'a'.*no rows"),
            ([1, 2], r"np\.asarray\(list\)"),
        ],
    )
    def test_what_has_no_rows(self, arrays, text):
        with pytest.raises(ms.DataError, match=text):
            ms.MirroredStrategy().local_rows(arrays)

    @pytest.mark.parametrize("make", [lambda: ms.OneDeviceStrategy("cpu"), ms.get_strategy])
    def test_of_one_replica_they_are_all(self, make):
        assert make().local_rows(np.arange(3)).tolist() == [0, 1, 2]
        assert make().local_rows(()) == ()
