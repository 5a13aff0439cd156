"""Datasets of tf.data that are made from the elements of others, beside lists of Python."""

import numpy as np
import pytest

import mpistrat as ms
import mpistrat.compat.tf as tf
from mpistrat.testing import run_ranks

Dataset = tf.data.Dataset
TEN = list(range(10))


def listed(dataset):
    return [np.asarray(element).tolist() for element in dataset]


def numbers(count=10):
    return Dataset.range(count).map(lambda x: x + 0)


class TestExamples:
    @pytest.mark.parametrize(
        ("made", "wanted"),
        [
            (lambda d: d.concatenate(numbers(3)), [*TEN, 0, 1, 2]),
            (lambda d: d.filter(lambda x: x % 3 == 0), [0, 3, 6, 9]),
            (lambda d: d.filter(lambda x: x > 99), []),
            (lambda d: d.take_while(lambda x: x < 4), [0, 1, 2, 3]),
            (lambda d: d.take(4).flat_map(lambda x: numbers(int(x))), [0, 0, 1, 0, 1, 2]),
            (lambda d: d.batch(4).unbatch(), TEN),
            (lambda d: d.apply(lambda data: data.skip(8)), [8, 9]),
        ],
    )
    def test_they_are_those_of_a_list(self, made, wanted):
        found = made(numbers())
        assert found.cardinality() == len(wanted)
        assert listed(found) == wanted
        # What comes after takes them as any others, in the signatures of the other library.
        again = found.shuffle(99, seed=1).repeat(2).batch(4, num_parallel_calls=2)
        assert sorted(x for batch in listed(again) for x in batch) == sorted(wanted * 2)

    def test_several_side_by_side(self):
        pairs = Dataset.zip((numbers(), Dataset.from_tensor_slices(np.eye(4)).repeat()))
        assert [(int(a), b.tolist()) for a, b in pairs.take(2)] == [
            (0, [1, 0, 0, 0]),
            (1, [0, 1, 0, 0]),
        ]
        trees = Dataset.zip({"a": numbers(3), "b": pairs})
        assert [sorted(tree) for tree in trees] == [["a", "b"]] * 3
        assert [(int(i), int(x)) for i, x in numbers(2).enumerate(5)] == [(5, 0), (6, 1)]
        assert listed(pairs.filter(lambda a, b: b[3] == 1).map(lambda a, b: a)) == [3, 7]

    def test_rows_of_rows(self):
        rows = Dataset.from_tensor_slices(np.arange(6).reshape(3, 2))
        assert listed(rows.unbatch()) == [0, 1, 2, 3, 4, 5]
        assert numbers().skip(9).get_single_element() == 9
        with pytest.raises(ValueError, match="several elements"):
            numbers().get_single_element()

    def test_a_generator(self):
        def function(count):
            return ((i, {"x": [i, 2.5]}) for i in range(count))

        signature = tf.TensorSpec((), tf.int64), {"x": tf.TensorSpec((2,), tf.float64)}
        data = Dataset.from_generator(function, output_signature=signature, args=(3,))
        (i, tree), *_ = data.batch(2)
        assert (i.dtype, tree["x"].dtype, data.cardinality()) == (np.int64, np.float64, 3)
        np.testing.assert_array_equal(tree["x"], [[0, 2.5], [1, 2.5]])
        assert listed(Dataset.from_generator(lambda: [1, 2], tf.float32)) == [1.0, 2.0]
        data = Dataset.from_generator(lambda: [(1, [2.0])], (tf.int32, tf.float32), ([], [None]))
        assert [leaf.dtype for leaf in next(iter(data))] == [tf.int32, tf.float32]


class TestBatches:
    def test_they_are_read_in_each_epoch(self):
        seen = []
        data = numbers(6).batch(2).map(lambda x: seen.append(len(x)) or x)
        kept = data.filter(lambda x: x[0] != 2)
        pairs = Dataset.zip((data, data))
        assert not seen
        for _ in range(2):
            assert listed(kept) == [[0, 1], [4, 5]]
        assert len(seen) == 6
        assert [a.tolist() == b.tolist() for a, b in pairs] == [True] * 3
        assert listed(data.concatenate(data.take(1)).rebatch(4)) == [[0, 1, 2, 3], [4, 5, 0, 1]]
        assert listed(data.take_while(lambda x: x[0] < 2)) == [[0, 1]]
        assert listed(data.flat_map(lambda x: data.take(int(x[0] == 4)))) == [[0, 1]]

    def test_they_may_have_no_end(self):
        data, more = numbers(4).batch(2), numbers(2).repeat().batch(2)
        assert [(a[0], b[0]) for a, b in Dataset.zip((data, more))] == [(0, 0), (2, 0)]
        assert listed(data.repeat().filter(lambda x: x[0] == 2).take(2)) == [[2, 3]] * 2
        assert listed(data.repeat().take_while(lambda x: x[0] == 0)) == [[0, 1]]
        assert listed(data.concatenate(more).take(4)) == [[0, 1], [2, 3], [0, 1], [0, 1]]


def ragged():
    """Two examples of length 2, then two of length 3."""
    two = Dataset.from_tensor_slices(np.arange(4.0).reshape(2, 2))
    return two.concatenate(Dataset.from_tensor_slices(np.arange(6.0).reshape(2, 3)))


RAGGED = [[0, 1], [2, 3], [0, 1, 2], [3, 4, 5]]


class TestExamplesOfOtherShapes:
    """They are elements like any other, until they are to be one array."""

    @pytest.mark.parametrize(
        ("made", "wanted"),
        [
            (lambda d: d, RAGGED),
            (lambda d: d.concatenate(d.skip(3)), [*RAGGED, RAGGED[3]]),
            (lambda d: Dataset.from_tensors(np.ones(1)).concatenate(d), [[1], *RAGGED]),
            (lambda d: d.repeat(2).skip(3), [RAGGED[3], *RAGGED]),
            (lambda d: d.map(lambda x: x[1:]), [x[1:] for x in RAGGED]),
            (lambda d: d.filter(lambda x: x[0] == 0), [RAGGED[0], RAGGED[2]]),
            (lambda d: d.filter(lambda x: x[0] > 9), []),
            (lambda d: d.take_while(lambda x: len(x) < 3), RAGGED[:2]),
            (lambda d: d.zip(d, d).map(lambda x, y: y), RAGGED),
            (lambda d: d.enumerate().map(lambda i, x: x + i), [
                [0, 1], [3, 4], [2, 3, 4], [6, 7, 8]]),
            (lambda d: d.unbatch(), [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]),
            (lambda d: d.flat_map(Dataset.from_tensors), RAGGED),
            (lambda d: d.take(1).flat_map(lambda x: d), RAGGED),
            (lambda d: Dataset.from_generator(lambda: [np.array(x) for x in RAGGED]), RAGGED),
            (lambda d: d.padded_batch(2, [3]).unbatch(), [
                [0, 1, 0], [2, 3, 0], *RAGGED[2:]]),
        ],
    )  # fmt: skip
    def test_they_are_those_of_a_list(self, made, wanted):
        found = made(ragged())
        assert found.cardinality() == len(wanted)
        assert listed(found) == wanted
        assert len(listed(found.shuffle(9, seed=1))) == len(wanted)
        if wanted and np.ndim(wanted[0]):
            (batch,) = listed(found.padded_batch(99))
            longest = max(map(len, wanted))
            assert batch == [[*x, *[0] * (longest - len(x))] for x in wanted]

    def test_of_trees_and_texts(self):
        one = Dataset.from_tensor_slices({"x": np.ones((1, 2)), "name": ["a"]})
        other = Dataset.from_tensor_slices({"x": np.ones((2, 3)), "name": ["bcd", "e"]})
        found = [(x["x"].shape, str(x["name"])) for x in one.concatenate(other)]
        assert found == [((2,), "a"), ((3,), "bcd"), ((3,), "e")]

    def test_the_caller_owns_them(self):
        for element in (data := ragged()):
            element += 1
        assert listed(data) == RAGGED

    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_replicas_share_padded_batches_of_them(self, n):
        def program(comm):
            strategy = tf.distribute.MirroredStrategy()
            data = strategy.experimental_distribute_dataset(ragged().padded_batch(4))
            return [float(strategy.reduce("sum", batch, axis=0).sum()) for batch in data]

        assert run_ranks(program, n) == [[21.0]] * n


def test_texts_are_of_one_kind_however_long():
    texts = Dataset.from_tensor_slices(np.array([b"a", b"bcd"]))
    longer = Dataset.from_tensors(np.bytes_(b"efghi"))
    assert listed(longer) == [b"efghi"]
    assert listed(texts.concatenate(longer)) == [b"a", b"bcd", b"efghi"]
    assert listed(texts.batch(1).concatenate(longer.batch(1))) == [[b"a"], [b"bcd"], [b"efghi"]]
    assert listed(texts.flat_map(Dataset.from_tensors)) == [b"a", b"bcd"]
    assert listed(Dataset.from_tensors((np.str_("ab"), 1)))[0] == ["ab", "1"]
    with pytest.raises(TypeError, match="their dtypes are S and U"):
        texts.concatenate(Dataset.from_tensor_slices(["a"]))


@pytest.mark.parametrize("batched", [False, True])
def test_a_cache_keeps_the_order_of_the_first_epoch(batched):
    def program(comm):
        shuffled = numbers(40).shuffle(40, seed=1)
        data = (shuffled.batch(1) if batched else shuffled).cache()
        data = data if batched else data.batch(1)
        strategy = tf.distribute.MirroredStrategy()

        def epoch(dataset):
            steps = strategy.experimental_distribute_dataset(dataset)
            return [int(strategy.reduce("sum", x, axis=0)) for x in steps]

        first, again = epoch(data), epoch(data)
        assert sorted(first) == list(range(40))
        assert first == again != list(range(40))
        assert [int(x[0]) for x in data.repeat(2)] == first * 2
        anew = shuffled.batch(1)
        assert epoch(anew) != epoch(anew)
        assert first == [int(x) for x in shuffled.cache()]
        after = data.shuffle(40, seed=2)
        assert epoch(after) != epoch(after)

    run_ranks(program, 2)


def test_replicas_share_them():
    def program(comm):
        strategy = tf.distribute.MirroredStrategy()
        data = numbers().filter(lambda x: x != 4).concatenate(numbers(2)).shuffle(99).batch(4)
        found = []
        for batch in strategy.experimental_distribute_dataset(data):
            local = strategy.experimental_local_results(batch)
            found += np.concatenate(local).tolist()
        return sorted(found)

    assert run_ranks(program, 3) == [[0, 0, 1, 1, 2, 3, 5, 6, 7, 8, 9]] * 3


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda d: d.shuffle(9).filter(bool), ms.RefusedError, "filter after shuffle"),
        (lambda d: d.repeat().filter(bool), ms.DataError, r"repeat\(\) after it"),
        (lambda d: d.concatenate(3), TypeError, "another dataset of examples"),
        (lambda d: d.concatenate(d.batch(2)), TypeError, "another dataset of examples"),
        (lambda d: d.concatenate(d.map(float)), TypeError, "dtypes are float32 and int64"),
        (lambda d: d.concatenate(d.zip(d, d)), TypeError, r"structures differ: \* and \(\*, \*\)"),
        (lambda d: d.zip(d, d).concatenate(d), TypeError, r"structures differ: \(\*, \*\) and \*"),
        (
            lambda d: Dataset.range(4).batch(2).concatenate(Dataset.from_tensors((1, 2)).batch(1)),
            TypeError,
            r"structures differ: \* and \(\*, \*\)",
        ),
        (
            lambda d: Dataset.range(4).batch(2).concatenate(Dataset.from_tensors(1).batch(1)),
            TypeError,
            "dtypes are int32 and int64",
        ),
        (lambda d: d.batch(2).enumerate(), ms.DataError, r"before batch.*own enumerate\(dataset\)"),
        (lambda d: d.repeat().batch(2).unbatch(), ms.DataError, r"call repeat\(\) after"),
        (lambda d: d.batch(2).repeat().flat_map(Dataset.range), ms.DataError, r"repeat\(\) after"),
        (lambda d: d.repeat().enumerate(), ms.DataError, "call repeat\\(\\) after"),
        (lambda d: d.flat_map(lambda x: x), TypeError, "returns datasets"),
        (lambda d: d.take(0).flat_map(Dataset.range), ms.DataError, "has no elements, so what"),
        (
            lambda d: d.filter(lambda x: x),
            ValueError,
            "filter: the predicate must return one truth",
        ),
        (lambda d: d.take_while(lambda x: None), ValueError, "take_while: the predicate must"),
        (lambda d: [*d.batch(2).filter(lambda x: x > 1)], ValueError, "one truth value"),
        (lambda d: d.unbatch(), ValueError, "numbers have no rows"),
        (lambda d: d.apply(len), TypeError, "function that returns a dataset; got 10"),
        (lambda d: Dataset.zip([d, d]), TypeError, "a tuple or a dict of them, not a list"),
        (lambda d: Dataset.zip((d, {"a": [d]})), TypeError, "not a list"),
        (lambda d: Dataset.from_tensor_slices([[1], [2, 3]]), ValueError, "one length: pad them"),
        (lambda d: Dataset.zip(1, 2), TypeError, "from_tensor_slices"),
        (lambda d: Dataset.from_generator([1], tf.int32), TypeError, "wants a function"),
        (lambda d: Dataset.from_generator(list, tf.int32), ms.DataError, "no elements"),
        (lambda d: Dataset.from_generator(lambda: [[1], (1, 2)]), ms.DataError, "fit together"),
        (lambda d: [*ragged().batch(3)], ms.DataError, r"shape.*\[\(2,\), \(3,\)\].*padded_batch"),
        (lambda d: ragged().concatenate(d), TypeError, "dtypes are float64 and int64"),
        (lambda d: Dataset.from_generator(lambda: [1], (tf.int32,)), TypeError, "structure"),
        (
            lambda d: Dataset.from_generator(lambda: [[1, 2, 3]], tf.int32, [2]),
            ValueError,
            r"from_generator: expected shape \(2,\), got \(3,\)",
        ),
        (
            lambda d: Dataset.from_generator(
                lambda: [(1, [2.0])], output_signature=(tf.TensorSpec([]), tf.TensorSpec([]))
            ),
            ValueError,
            r"expected shape \(\), got \(1,\)",
        ),
        (lambda d: d.shuffle(0), ms.DataError, "buffer_size.*at least 1, got 0"),
        (lambda d: d.shuffle(2.5), TypeError, "buffer_size.*an integer, got 2.5"),
    ],
)
def test_what_cannot_be_is_an_error_that_says_what_can(call, error, text):
    with pytest.raises(error, match=text):
        call(numbers())


def test_a_generator_without_an_end_is_found(monkeypatch):
    monkeypatch.setattr("mpistrat.compat.tf_elements._MAX_GENERATED_NBYTES", 1 << 16)
    with pytest.raises(ms.DataError, match=r"has\s+not ended"):
        Dataset.from_generator(lambda: iter(int, 1), tf.int64)


def test_elements_look_like_the_specs_that_a_program_writes_down():
    number, rows = tf.TensorSpec([], tf.int64), tf.TensorSpec([None, 2], tf.float64)
    tree = Dataset.from_tensor_slices({"a": np.arange(3), "b": np.ones((3, 2))})
    assert Dataset.range(3).element_spec == number
    assert number == Dataset.range(3).element_spec
    assert tree.batch(2).element_spec == {"a": tf.TensorSpec([None], tf.int64), "b": rows}
    assert tf.nest.flatten((number, rows)) == [number, rows]
    assert len({number, tf.TensorSpec((), "int64"), rows}) == 2
    others = (tf.TensorSpec([]), tf.TensorSpec([1], tf.int64), tf.TensorSpec([], tf.int64, "x"))
    assert all(other != Dataset.range(3).element_spec != 5 for other in others)
    with pytest.raises(AttributeError, match=r"no tf\.TensorSpec\.from_tensor"):
        tf.TensorSpec.from_tensor(np.ones(2))


def test_the_state_of_a_reduction_is_made_of_tensors():
    found = numbers(4).reduce((0, 1.0), lambda state, x: [state[0] + 1, state[1] * 2])
    assert [(int(x), x.dtype) for x in found] == [(4, np.int32), (16, np.float32)]
    assert numbers(0).reduce(3, lambda state, x: state).dtype == np.int32


def test_examples_that_are_distributed_are_an_error_that_says_what_to_call():
    def program(comm):
        strategy = tf.distribute.MirroredStrategy()
        batches = Dataset.from_generator(lambda: np.arange(8.0).reshape(2, 4), tf.float64)
        with pytest.raises(ms.DataError, match=r"\.batch\(.*from_batches.*unbatched=True"):
            strategy.experimental_distribute_dataset(batches)
        strategy.experimental_distribute_dataset(batches.batch(2))
        data = strategy.experimental_distribute_dataset(batches, unbatched=True)
        return [x.local.shape for x in data]

    assert run_ranks(program, 2) == [[(1, 4)]] * 2
