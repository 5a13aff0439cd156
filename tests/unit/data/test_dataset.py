"""Datasets in one process: construction, the order of steps, epochs, arguments."""

from __future__ import annotations

import collections
import copy
import pickle

import numpy as np
import pytest

from mpistrat.data import pieces
from mpistrat.data.dataset import Dataset
from mpistrat.data.sources import INFINITE, Spec
from mpistrat.errors import DataError

Pair = collections.namedtuple("Pair", "x y")


def lists(dataset):
    return [np.asarray(element).tolist() for element in dataset]


COLUMNS = {"a": [1.0, 2.0], "b": [3, 4]}


def frame(**columns):
    return pytest.importorskip("pandas").DataFrame(COLUMNS | columns)


class ArrowColumn:
    """What a column of Arrow has of an array: no shape, but it converts."""

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)

    def __arrow_c_stream__(self, requested_schema=None):
        raise NotImplementedError

    def to_numpy(self):
        return np.array(self.values)


class ArrowTable:
    """What a table of Arrow has of an array; it can be iterated over by the old protocol."""

    column_names = tuple(COLUMNS)

    def __init__(self, **columns):
        self.columns = [ArrowColumn(values) for values in (COLUMNS | columns).values()]
        self.shape = (2, len(self.columns))

    def __getitem__(self, key):
        return self.columns[self.column_names.index(key) if isinstance(key, str) else key]

    def __arrow_c_stream__(self, requested_schema=None):
        raise NotImplementedError

    def __array__(self, dtype=None, copy=None):
        columns = [column.values for column in self.columns]
        texts = any(isinstance(value, str) for values in columns for value in values)
        return np.array(columns, object if texts else float).T


class ArrowReader:
    """An iterator of tables."""

    def __init__(self, tables):
        self.tables = iter(tables)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.tables)

    def __arrow_c_stream__(self, requested_schema=None):
        raise NotImplementedError


TABLES = {
    "DataFrame": frame,
    "Series": lambda: frame()["a"],
    "Arrow table": ArrowTable,
    "Arrow column": lambda: ArrowColumn([1.0]),
}


class TestOrderOfSteps:
    def test_repeat_before_batch_spans_the_epoch(self):
        assert lists(Dataset.range(3).repeat(2).batch(4)) == [[0, 1, 2, 0], [1, 2]]

    def test_repeat_after_batch_does_not(self):
        assert lists(Dataset.range(3).batch(2).repeat(2)) == [[0, 1], [2], [0, 1], [2]]

    def test_take_takes_elements_of_its_place(self):
        assert lists(Dataset.range(9).take(3).batch(2)) == [[0, 1], [2]]
        assert lists(Dataset.range(9).batch(2).take(3)) == [[0, 1], [2, 3], [4, 5]]
        assert lists(Dataset.range(2).repeat().take(5)) == [0, 1, 0, 1, 0]
        assert lists(Dataset.range(2).batch(1).repeat().take(3)) == [[0], [1], [0]]
        assert lists(Dataset.range(2).repeat(-1).take(5)) == [0, 1, 0, 1, 0]
        assert lists(Dataset.range(2).batch(1).repeat(np.int64(-1)).take(3)) == [[0], [1], [0]]
        assert lists(Dataset.range(3).take(9)) == [0, 1, 2]

    def test_a_batch_spans_several_short_epochs(self):
        assert lists(Dataset.range(2).repeat(4).batch(7)) == [[0, 1, 0, 1, 0, 1, 0], [1]]
        assert lists(Dataset.range(2).take(1).repeat(2).repeat(2).batch(9)) == [[0, 0, 0, 0]]

    def test_nothing_comes_after_what_has_no_end(self):
        def span(lo, hi):
            assert 0 <= lo <= hi  # or it would go backwards forever
            return np.arange(lo, hi) % 3

        for length in (INFINITE, 0):
            order = pieces.make_repeated_order(pieces.Order(INFINITE, span), None, length)
            assert (order.length, order.get_rows(2, 5).tolist()) == (length, [2, 0, 1])
        endless = Dataset.range(3).repeat()
        assert lists(endless.repeat(2).take(5)) == [0, 1, 2, 0, 1]
        assert lists(endless.repeat().shard(2, 1).batch(2).take(2)) == [[1, 0], [2, 1]]
        assert lists(endless.repeat(0)) == []

    def test_batch_of_batches_stacks(self):
        assert lists(Dataset.range(8).batch(2).batch(3)) == [[[0, 1], [2, 3], [4, 5]], [[6, 7]]]
        dropped = Dataset.range(8).batch(2).batch(3, drop_remainder=True)
        assert lists(dropped) == [[[0, 1], [2, 3], [4, 5]]]
        with pytest.raises(DataError, match=r"same shape.*drop_remainder"):
            lists(Dataset.range(5).batch(2).batch(3))

    def test_batches_of_batches_are_cut_along_the_new_axis(self):
        (piece,) = Dataset.range(6).batch(2).batch(5)._iterate_lazy_batches(0, [])
        assert piece.count_rows() == 3
        assert [piece.read_part(i, 3).tolist() for i in range(3)] == [[[0, 1]], [[2, 3]], [[4, 5]]]
        assert piece.read_part(3, 4).shape == (0, 2)

    @pytest.mark.parametrize("flag", [None, 0, -1, "False", [True]])
    def test_only_true_and_false_are_flags(self, flag):
        """``batch(4, AUTOTUNE)`` left out the last rows without a message."""
        data = Dataset.range(8)
        for call in (
            lambda: data.batch(4, flag),
            lambda: data.padded_batch(4, drop_remainder=flag),
            lambda: data.batch(2).rebatch(4, flag),
            lambda: data.batch(2).map(np.negative, rowwise=flag),
        ):
            with pytest.raises(TypeError, match="must be True or False, got"):
                call()
        if flag is not None:
            with pytest.raises(
                TypeError, match=r"reshuffle_each_iteration\) must be True or False"
            ):
                data.shuffle(seed=1, reshuffle_each_iteration=flag)
        assert len(lists(data.batch(3, np.bool_(True)))) == 2
        with pytest.raises(TypeError, match=r"from_files\(read\) must get a function, got "):
            Dataset.from_files(["a"], flag)

    def test_drop_remainder(self):
        assert lists(Dataset.range(5).batch(2, drop_remainder=True)) == [[0, 1], [2, 3]]
        assert lists(Dataset.range(4).batch(2, drop_remainder=True)) == [[0, 1], [2, 3]]
        assert lists(Dataset.range(1).batch(2, drop_remainder=True)) == []

    def test_shuffle_after_batch_moves_batches_only(self):
        got = lists(Dataset.range(64).batch(4).shuffle(seed=1))
        assert got != sorted(got)
        assert sorted(got) == lists(Dataset.range(64).batch(4))

    def test_shuffle_after_repeat_mixes_epochs(self):
        got = lists(Dataset.range(50).repeat(2).shuffle(seed=0))
        assert sorted(got) == sorted([*range(50)] * 2)
        assert len(set(got[:50])) < 50

    def test_shuffle_of_given_batches(self):
        given = [np.full(1, i) for i in range(30)]
        got = lists(Dataset(given).shuffle(seed=4))
        assert sorted(got) == [[i] for i in range(30)] != got

    def test_map_sees_tuples_unpacked_and_nothing_else(self):
        x, y = np.arange(3), np.arange(3) * 10
        assert lists(Dataset((x, y)).map(lambda a, b: a + b)) == [0, 11, 22]
        assert lists(Dataset(Pair(x, y)).map(lambda p: p.x + p.y)) == [0, 11, 22]
        assert lists(Dataset({"x": x}).map(lambda d: d["x"])) == [0, 1, 2]
        assert lists(Dataset((x, y)).batch(2).map(lambda a, b: a + b)) == [[0, 11], [22]]

    def test_map_keeps_dtypes(self):
        (batch,) = Dataset(np.arange(3, dtype=np.uint8)).map(lambda x: x).batch(3)
        assert batch.dtype == np.uint8

    @pytest.mark.parametrize(
        ("fn", "message"),
        [
            (lambda x: x.sum(), "result of map has no first dimension"),
            (lambda x: None, "<lambda>, returned None: look for a missing return"),
            (lambda x: {"a": x, "b": x[:1]}, "'a' has 3, 'b' has 1"),
            (lambda x: (), "holds no array"),
        ],
    )
    def test_a_map_of_batches_must_give_batches(self, fn, message):
        with pytest.raises(DataError, match=message):
            lists(Dataset.range(3).batch(3).map(fn))

    @pytest.mark.parametrize(
        ("fn", "message"),
        [
            (lambda x: np.zeros(x), r"\[\(0,\), \(1,\)\]"),
            (lambda x: {"a": x} if x else {"b": x}, "element 1 is"),
            (lambda x: None, "<lambda>, returned None: look for a missing return"),
        ],
    )
    def test_examples_that_do_not_fit_into_one_batch(self, fn, message):
        with pytest.raises(DataError, match=message):
            lists(Dataset.range(2).map(fn).batch(2))

    def test_errors_of_the_map_pass_unchanged(self):
        with pytest.raises(ZeroDivisionError):
            lists(Dataset.range(2).map(lambda x: 1 // int(x)))


class TestEpochs:
    def test_each_iteration_has_its_own_order(self):
        dataset = Dataset.range(40).shuffle(seed=3)
        epochs = [tuple(dataset) for _ in range(4)]
        assert len(set(epochs)) == 4
        assert all(sorted(epoch) == list(range(40)) for epoch in epochs)

    def test_each_repetition_has_its_own_order(self):
        for repeated in (
            Dataset.range(40).shuffle(seed=3).repeat(3).batch(40),
            Dataset.range(40).shuffle(seed=3).batch(40).repeat(3),
        ):
            orders = [tuple(batch) for epoch in range(2) for batch in repeated]
            assert len(set(orders)) == 6

    def test_the_same_seed_gives_the_same_orders(self):
        one, two = (
            Dataset.range(40).shuffle(seed=3).batch(8),
            Dataset.range(40).shuffle(seed=3).batch(8),
        )
        assert [lists(one) for _ in range(3)] == [lists(two) for _ in range(3)]
        assert lists(one) != lists(Dataset.range(40).shuffle(seed=4).batch(8))

    def test_iteration_and_pieces_agree(self):
        dataset = Dataset.range(40).shuffle(seed=3).batch(8)
        for epoch in range(3):
            pieces = [
                piece.read_part(0, 1).tolist() for piece in dataset._iterate_lazy_batches(epoch, [])
            ]
            assert lists(dataset) == pieces

    def test_the_order_is_the_one_of_seed_and_epoch(self):
        rng = np.random.default_rng(np.random.SeedSequence([3, 1]))
        (piece,) = Dataset.range(20).shuffle(seed=3).batch(20)._iterate_lazy_batches(1, [])
        assert piece.read_part(0, 1).tolist() == rng.permutation(20).tolist()

    def test_unseeded_orders_differ_and_leave_the_global_generator_alone(self):
        np.random.seed(0)
        before = np.random.get_state()[1].tolist()
        dataset = Dataset.range(40).shuffle()
        assert tuple(dataset) != tuple(dataset)
        assert tuple(Dataset.range(40).shuffle()) != tuple(Dataset.range(40).shuffle())
        assert np.random.get_state()[1].tolist() == before

    def test_a_method_leaves_its_dataset_as_it_was(self):
        dataset = Dataset.range(4)
        dataset.shuffle(seed=0).repeat(3).batch(2).prefetch(1).map(np.negative).take(1)
        assert lists(dataset) == [0, 1, 2, 3]
        assert (dataset.batched, dataset._prefetch_depth, dataset._seed_count) == (False, 0, 0)

    def test_two_iterations_at_once(self):
        dataset = Dataset.range(6).batch(2)
        assert [(a.tolist(), b.tolist()) for a, b in zip(dataset, dataset, strict=True)] == [
            ([0, 1], [0, 1]),
            ([2, 3], [2, 3]),
            ([4, 5], [4, 5]),
        ]


class TestStreams:
    def test_a_one_shot_iterator_serves_one_epoch(self):
        dataset = Dataset(np.ones(n) for n in (2, 1)).map(np.negative)
        assert lists(dataset) == [[-1, -1], [-1]]
        with pytest.raises(DataError, match="pass a callable instead"):
            list(dataset)

    @pytest.mark.parametrize("kind", [iter, lambda lots: zip(lots, lots, strict=True)])
    def test_iterators_of_any_kind(self, kind):
        dataset = Dataset(kind([np.ones(2)])).repeat(2)
        with pytest.raises(DataError, match="only once"):
            list(dataset)

    def test_a_callable_that_returns_a_used_iterator_is_found_out(self):
        lots = (np.ones(1) for _ in range(2))
        dataset = Dataset(lambda: lots)
        assert len(list(dataset)) == 2
        with pytest.raises(DataError, match="only once"):
            list(dataset)

    def test_an_unused_iteration_uses_nothing_up(self):
        dataset = Dataset(np.ones(1) for _ in range(2))
        iter(dataset)
        assert len(list(dataset)) == 2

    def test_a_callable_is_called_once_an_epoch(self):
        calls = []

        def batches():
            calls.append(1)
            yield {"x": np.arange(3), "y": (np.ones((3, 2)),)}

        dataset = Dataset(batches).repeat(2)
        assert len(list(dataset)) == len(calls) == 2
        assert dataset.cardinality() == Dataset.UNKNOWN

    def test_take_asks_for_no_more_than_it_gives(self):
        asked = []

        def batches():
            for i in range(9):
                asked.append(i)
                yield np.ones(1)

        assert len(list(Dataset(batches).take(2))) == 2
        assert len(list(Dataset(batches).take(0))) == 0
        assert asked == [0, 1]

    def test_an_abandoned_generator_is_closed(self):
        closed = []

        def batches():
            try:
                while True:
                    yield np.ones(1)
            finally:
                closed.append(True)

        dataset = Dataset(batches).take(2)
        assert len(list(dataset)) == 2
        assert closed == [True]  # while the dataset still lives

    def test_batches_can_hold_lists_of_arrays(self):
        (batch,) = Dataset.from_batches([[np.ones(2), np.zeros(2)]])
        assert [leaf.tolist() for leaf in batch] == [[1, 1], [0, 0]]

    def test_from_batches_takes_tuples_and_arrays_as_sequences(self):
        assert lists(Dataset.from_batches((np.ones(2), np.ones(1)))) == [[1, 1], [1]]
        assert lists(Dataset.from_batches(np.eye(2))) == [[1, 0], [0, 1]]

    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            ({"x": np.ones(3), "y": np.ones(2)}, "batch 1 of the iterable.*'x' has 3, 'y' has 2"),
            (3.0, "batch 1 of the iterable has no first dimension"),
            ([1, 2], "batch 1 of the iterable: leaf '0' has no first dimension"),
            ({}, "holds no array"),
            ({"x": None}, "leaf 'x' has no first dimension"),
        ],
    )
    def test_bad_batches_are_named(self, batch, message):
        with pytest.raises(DataError, match=message):
            list(Dataset([np.ones(2), batch]))

    def test_errors_of_the_source_pass_unchanged(self):
        def batches():
            yield np.ones(1)
            raise OSError("disk")

        iterator = iter(Dataset(batches))
        next(iterator)
        with pytest.raises(OSError, match="disk"):
            next(iterator)


class TestConstruction:
    def test_from_tensor_slices_makes_lists_arrays(self):
        assert lists(Dataset.from_tensor_slices([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
        a, b = np.ones(3), np.zeros(3)
        assert lists(Dataset.from_tensor_slices([a, b])) == [[1, 1, 1], [0, 0, 0]]
        assert len(list(Dataset.from_tensor_slices((a, b)))) == 3

    def test_from_tensor_slices_keeps_the_nodes(self):
        tree = {"p": Pair([1, 2], (np.ones(2),)), "o": collections.OrderedDict(z=[1, 2], a=[3, 4])}
        (element, _) = Dataset.from_tensor_slices(tree)
        assert type(element["p"]) is Pair
        assert type(element["o"]) is collections.OrderedDict
        assert list(element["o"]) == ["z", "a"]
        assert type(tree["p"].x) is list  # the caller's tree stays

    def test_unequal_first_dimensions_name_leaf_and_sizes(self):
        with pytest.raises(ValueError, match="'x' has 3, 'y' has 2"):
            Dataset.from_tensor_slices({"x": [1, 2, 3], "y": np.ones((2, 5))})
        with pytest.raises(DataError, match="'0' has 3, '1' has 2"):
            Dataset((np.ones(3), np.ones(2)))

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Dataset(np.float64(1)),
            lambda: Dataset({"x": np.array(1)}),
            lambda: Dataset({"x": np.ones(2), "y": None}),
            lambda: Dataset({}),
            lambda: Dataset(()),
            lambda: Dataset("abc"),
            lambda: Dataset((np.ones(2), [1, 2])),
            lambda: Dataset.from_tensor_slices(3),
            lambda: Dataset.from_tensor_slices([[1], [2, 3]]),
            lambda: Dataset.from_batches({"x": np.ones(2)}),
            lambda: Dataset(np.ma.array([1, 2], mask=[0, 1])),
        ],
    )
    def test_bad_sources_are_data_errors(self, make):
        with pytest.raises(DataError):
            make()

    @pytest.mark.parametrize("source", [3, None, 1.5, object(), Dataset.range(2)])
    def test_what_is_no_source_is_a_type_error(self, source):
        with pytest.raises(TypeError):
            Dataset(source)

    def test_pandas_is_sent_to_numpy(self):
        pandas = pytest.importorskip("pandas")
        with pytest.raises(DataError, match=r"to_numpy.* The index does not come along"):
            Dataset({"x": pandas.Series([1, 2], index=[1, 0])})
        with pytest.raises(DataError, match=r"to_numpy.* The index does not come along"):
            Dataset((pandas.DataFrame({"a": [1]}),))

    @pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
    @pytest.mark.parametrize(
        "given",
        [
            Dataset,
            Dataset.from_batches,
            lambda table: iter(Dataset(lambda: table)).next(),
        ],
        ids=["source", "batches", "function"],
    )
    def test_tables_and_columns_are_sent_to_numpy(self, make, given):
        """Iterated over, they would give columns, names or numbers in place of batches."""
        table = make()
        with pytest.raises(DataError, match=rf"{type(table).__name__}.*to_numpy\(\)"):
            given(table)

    def test_what_a_table_is_told_to_pass_is_a_dataset(self):
        for table, names in ((frame(), frame().columns), (ArrowTable(), ArrowTable.column_names)):
            data = Dataset({name: table[name].to_numpy() for name in names}).batch(2)
            (batch,) = data
            assert {name: rows.tolist() for name, rows in batch.items()} == COLUMNS

    def test_slices_of_a_table_are_its_rows_if_its_columns_are_of_one_type(self):
        for table in (frame(), ArrowTable()):
            assert lists(Dataset.from_tensor_slices(table)) == [[1.0, 3.0], [2.0, 4.0]]
        for table in (frame(b=["x", "y"]), ArrowTable(b=["x", "y"])):
            with pytest.raises(DataError, match="to_numpy"):
                Dataset.from_tensor_slices(table)

    def test_a_reader_of_tables_gives_batches(self):
        assert lists(Dataset(ArrowReader([ArrowTable()]))) == [[[1.0, 3.0], [2.0, 4.0]]]

    def test_range(self):
        assert lists(Dataset.range(4)) == [0, 1, 2, 3]
        assert lists(Dataset.range(8, 2, -3)) == [8, 5]
        assert Dataset.range(4).element_spec == Spec((), np.dtype("i8"))
        with pytest.raises(TypeError, match=r"each argument of range must be an integer, got 2.5"):
            Dataset.range(2.5)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda d: d.batch(0), DataError),
        (lambda d: d.begin_after(0.5), TypeError),
        (lambda d: d.begin_after(-2), DataError),
        (lambda d: d.batch(-1), DataError),
        (lambda d: d.batch(2.0), TypeError),
        (lambda d: d.batch("2"), TypeError),
        (lambda d: d.batch(True), TypeError),
        (lambda d: d.batch(None), TypeError),
        (lambda d: d.take(-1), DataError),
        (lambda d: d.take(1.5), TypeError),
        (lambda d: d.repeat(-2), DataError),
        (lambda d: d.repeat(1.5), TypeError),
        (lambda d: d.prefetch(-1), DataError),
        (lambda d: d.prefetch(None), TypeError),
        (lambda d: d.shuffle(seed=-1), DataError),
        (lambda d: d.shuffle(seed=0.5), TypeError),
        (lambda d: d.repeat().shuffle(seed=0), DataError),
        (lambda d: d.batch(2).repeat().shuffle(seed=0), DataError),
        (lambda d: Dataset(lambda: iter([])).shuffle(seed=0), DataError),
        (lambda d: d.map(3), TypeError),
        (lambda d: d.batch(2).map(None), TypeError),
        (lambda d: d.map(abs, rowwise=True), DataError),
    ],
)
def test_bad_arguments_are_refused_at_the_call(call, error):
    with pytest.raises(error) as caught:
        call(Dataset.range(4))
    assert len(str(caught.value)) > 20


def test_numpy_integers_are_integers():
    dataset = Dataset.range(10).shuffle(seed=np.uint8(3)).batch(np.int64(4)).take(np.int32(2))
    assert dataset.cardinality() == 2


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Dataset.range(10), 10),
        (Dataset.range(10).batch(4), 3),
        (Dataset.range(10).batch(4, drop_remainder=True), 2),
        (Dataset.range(10).batch(4).batch(2), 2),
        (Dataset.range(10).repeat(2).batch(4), 5),
        (Dataset.range(10).batch(4).repeat(2), 6),
        (Dataset.range(10).repeat(), -1),
        (Dataset.range(10).repeat().batch(4), -1),
        (Dataset.range(10).repeat(-1).batch(4), -1),
        (Dataset.range(10).repeat().take(7).batch(4), 2),
        (Dataset.range(10).repeat(0), 0),
        (Dataset.range(0).repeat(), 0),
        (Dataset.range(0).batch(3), 0),
        (Dataset.range(10).take(3).shuffle(seed=0).map(abs).prefetch(3), 3),
        (Dataset([np.ones(2)] * 3).batch(2).repeat(2), 4),
        (Dataset(lambda: []), -2),
        (Dataset(lambda: []).batch(2).repeat(2), -2),
        (Dataset(lambda: []).take(3), -2),
        (Dataset(lambda: []).take(0), 0),
        (Dataset(lambda: []).repeat(0), 0),
        (Dataset(lambda: []).repeat(), -1),
        (Dataset(lambda: []).repeat(-1), -1),
        (Dataset(iter([np.ones(1)])), -2),
    ],
)
def test_cardinality_is_what_iterating_finds(dataset, expected):
    assert dataset.cardinality() == expected
    assert (Dataset.INFINITE, Dataset.UNKNOWN) == (-1, -2)
    if expected >= 0:
        assert len(list(dataset)) == expected


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(0).repeat(),
        Dataset.range(0).repeat(-1),
        Dataset.range(0).shuffle(seed=0).batch(3),
        Dataset.range(0).repeat().batch(3),
        Dataset.range(0).batch(3).repeat(),
        Dataset.range(3).batch(3, drop_remainder=True).take(0).repeat(),
        Dataset([]),
        Dataset(lambda: []).repeat(),
        Dataset.range(5).repeat(0).batch(2),
    ],
)
def test_nothing_gives_nothing_and_ends(dataset):
    assert list(dataset) == []
    if dataset.batched:
        assert list(dataset._iterate_lazy_batches(0, [])) == []


def test_element_spec_is_known_without_reading(recorder):
    source = recorder(np.ones((4, 3), np.float32))
    dataset = Dataset({"x": source, "y": np.ones(4, ">i2")})
    assert dataset.element_spec == {"x": Spec((3,), np.dtype("f4")), "y": Spec((), np.dtype(">i2"))}
    batched = dataset.shuffle(seed=0).batch(2).repeat().prefetch(2)
    assert batched.element_spec["x"] == Spec((None, 3), np.dtype("f4"))
    assert batched.batch(2).element_spec["x"].shape == (None, None, 3)
    assert dataset.map(lambda d: d).element_spec is None
    assert batched.map(lambda d: d).element_spec is None
    assert Dataset([np.ones(2)]).element_spec is None
    assert source.keys == []


def test_batched_tells_examples_from_batches():
    assert not Dataset.range(3).shuffle(seed=0).repeat().batched
    assert Dataset.range(3).batch(2).batched
    assert Dataset([np.ones(3)]).batched


def test_repr_says_what_it_is():
    assert repr(Dataset.range(5).batch(2)) == "<Dataset of batches, cardinality 3>"
    assert repr(Dataset.range(5)) == "<Dataset of examples, cardinality 5>"


def test_a_buffer_size_is_not_taken_for_a_seed():
    with pytest.raises(TypeError, match=r"shuffle\(1000\).*whole epoch.*shuffle\(seed=7\)"):
        Dataset.range(4).shuffle(1000)
    with pytest.raises(TypeError, match=r"shuffle\(buffer_size=1000\).*whole epoch"):
        Dataset.range(4).shuffle(buffer_size=1000)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ([1.0, 2.0, 3.0, 4.0], r"\[1.0, 2.0, 3.0, \.\.\.\].*iterable of batches"),
        ([[1, 2], [3, 4]], r"\[1, 2\].*iterable of batches"),
        ({"x": [1.0, 2.0]}, r"\[1.0, 2.0\].*tree of its items"),
        ((np.ones(2), [1, 2]), r"\[1, 2\].*tree of its items"),
        ({"x": np.ones(2), "y": ["a", "b"]}, r"'a', 'b'.*tree of its items"),
    ],
)
def test_a_list_of_numbers_is_told_from_an_array(source, what):
    with pytest.raises(DataError, match=rf"{what}.*asarray.*from_tensor_slices"):
        Dataset(source)


def test_lists_of_arrays_are_batches_or_trees():
    assert Dataset([np.ones(2), np.ones(3)]).batched
    assert Dataset({"x": [np.ones(2), np.zeros(2)]}).cardinality() == 2
    assert Dataset([]).cardinality() == 0


def test_copies_begin_where_the_dataset_is_and_own_their_arrays():
    rows = np.arange(8.0)
    dataset = Dataset(rows).shuffle(seed=1).batch(3).prefetch(1)
    list(dataset)
    for other in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert (other.epoch, other._prefetch_depth) == (1, 1)
        assert sorted(np.concatenate(list(other)).tolist()) == rows.tolist()
    other = copy.deepcopy(dataset)
    again = [batch.tolist() for batch in dataset]
    rows[:] = -1
    assert [batch.tolist() for batch in other] == again


@pytest.mark.parametrize("do", [copy.deepcopy, pickle.dumps])
def test_a_dataset_of_an_iterator_stays_where_it_is(do):
    with pytest.raises(TypeError, match=r"iterator cannot be (copied|pickled).*function"):
        do(Dataset(iter([np.ones(2)])).rebatch(1))
