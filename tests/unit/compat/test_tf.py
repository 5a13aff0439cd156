"""The tf.* names: a program of the usual kind, and what each of them makes."""

from __future__ import annotations

import collections

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.compat import tf
from mpistrat.testing import run_ranks


def train(strategy, rows=50, epochs=3):
    """A custom training loop without models, as written for tf.distribute."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, 3)).astype(np.float32)
    y = tf.matmul(x, [[1.0], [-2.0], [0.5]])

    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = dataset.shuffle(buffer_size=rows, seed=1).batch(8, num_parallel_calls=2)
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    distributed = strategy.experimental_distribute_dataset(dataset.with_options(options))

    with strategy.scope():
        w = tf.Variable(tf.zeros([3, 1]), aggregation=tf.VariableAggregation.SUM)
        seen = tf.Variable(0, aggregation=tf.VariableAggregation.SUM)

    def step(features, target):
        off = tf.matmul(features, w) - target
        gradient = tf.matmul(features.T, off) * np.float32(2 / 8)
        w.assign_sub(tf.constant(0.1) * gradient)
        seen.assign_add(tf.constant(len(features)))
        return tf.reduce_sum(tf.square(off), axis=1)

    @tf.function
    def train_step(batch):
        losses = strategy.run(step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=0)

    for _ in range(epochs):
        for batch in distributed:
            loss = train_step(batch)
    return np.asarray(w), int(np.asarray(seen)), float(loss)


@pytest.fixture(scope="module")
def alone():
    return train(tf.distribute.OneDeviceStrategy("/cpu:0"))


def test_it_learns(alone):
    w, seen, loss = alone
    assert w.dtype == tf.float32
    np.testing.assert_allclose(w.ravel(), [1.0, -2.0, 0.5], atol=0.2)
    assert seen == 150
    assert loss < 0.1


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["MirroredStrategy", "MultiWorkerMirroredStrategy"])
def test_a_training_loop_gives_the_same_at_every_number_of_ranks(n, kind, alone):
    found = run_ranks(lambda comm: train(getattr(tf.distribute, kind)(comm=comm)), n)
    for w, seen, loss in found:
        np.testing.assert_allclose(w, alone[0], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(loss, alone[2], rtol=1e-3, atol=1e-6)
        assert seen == 150


def read(dataset):
    return [np.asarray(element).tolist() for element in dataset]


DATA = tf.data.Dataset


def test_datasets_take_lists_as_constants():
    spec = DATA.from_tensor_slices(({"a": [1, 2]}, [1.0, 2.0], np.arange(2))).element_spec
    assert [str(leaf.dtype) for leaf in tf.nest.flatten(spec)] == ["int32", "float32", "int64"]
    pair = collections.namedtuple("pair", "x y")
    (batch,) = DATA.from_tensor_slices(pair([1, 2], [3, 4])).batch(2)
    assert type(batch) is pair
    lists = collections.defaultdict(list, x=[1, 2])
    (batch,) = DATA.from_tensor_slices(lists).batch(2)
    assert (batch["x"].dtype, batch.default_factory) == (np.int32, list)
    assert read(DATA.from_tensors([1, 2])) == [[1, 2]]
    assert read(DATA.range(2, 5)) == [2, 3, 4]
    assert DATA.range(3).element_spec.dtype == np.int64


def test_shuffling_is_of_the_whole_epoch():
    ten = DATA.range(10)
    assert read(ten.shuffle(1)) == list(range(10))
    assert sorted(read(ten.shuffle(2, seed=3))) == list(range(10))
    assert read(ten.shuffle(2, seed=3)) == read(ms.Dataset.range(10).shuffle(seed=3))
    assert read(ten.shuffle(100, reshuffle_each_iteration=True, seed=3)) == read(ten.shuffle(10, 3))
    with pytest.raises(ms.RefusedError, match=r"Write shuffle\(seed=7, reshuffle_each_iteration"):
        ten.shuffle(10, reshuffle_each_iteration=False)
    with pytest.raises(TypeError):
        ten.shuffle()


def test_hints_change_nothing_and_methods_can_be_chained():
    dataset = DATA.range(6).map(lambda i: i * 2, num_parallel_calls=tf.data.AUTOTUNE).cache()
    dataset = dataset.batch(4, True, num_parallel_calls=1).prefetch(tf.data.AUTOTUNE)
    assert type(dataset) is DATA
    assert dataset._prefetch_depth == 2
    assert dataset.prefetch(5)._prefetch_depth == 5
    assert read(dataset) == [[0, 2, 4, 6]]
    assert read(dataset.map(np.negative, rowwise=True).take(1)) == [[0, -2, -4, -6]]
    assert isinstance(dataset.repeat().skip(1).shard(2, 0), DATA)
    assert DATA.range(3).repeat().cardinality() == tf.data.INFINITE_CARDINALITY
    assert DATA.range(3).repeat(-1).cardinality() == tf.data.INFINITE_CARDINALITY


def test_trees():
    tree = {"b": (2, None), "a": [1]}
    assert tf.nest.flatten(tree) == [1, 2, None]
    assert tf.nest.pack_sequence_as(tree, "xyz") == {"b": ("y", "z"), "a": ["x"]}
    ordered = collections.OrderedDict(z=1, a=collections.OrderedDict(q=2, b=(3, None)), m={})
    assert tf.nest.flatten([ordered, 4]) == [3, None, 2, 1, 4]  # as TensorFlow 2.18 has it
    assert tf.nest.pack_sequence_as([ordered, 4], [3, None, 2, 1, 4]) == [ordered, 4]
    assert tf.nest.map_structure(lambda a, b: a + b, [1, (2,)], [3, (4,)]) == [4, (6,)]
    assert [tf.nest.is_nested(x) for x in ((), {}, 1, None, np.ones(2))] == [True] * 2 + [False] * 3
    tf.nest.assert_same_structure([1, (2,)], ["a", ("b",)])
    for wrong in (
        lambda: tf.nest.assert_same_structure([1], (1,)),
        lambda: tf.nest.map_structure(lambda a, b: a, [1], [1, 2]),
        lambda: tf.nest.map_structure(lambda: 1),
        lambda: tf.nest.pack_sequence_as([1, 2], [1]),
    ):
        with pytest.raises(ValueError, match=r"differ|expected 2 leaves|got none"):
            wrong()
    per_replica = ms.PerReplica(1)
    assert tf.nest.flatten([per_replica]) == [per_replica]


def test_all_kinds_of_dicts_have_one_structure():
    plain, ordered = {"b": 1, "a": [2]}, collections.OrderedDict(b=10, a=[20])
    free = collections.defaultdict(int, ordered)
    for first in (plain, ordered, free):  # as TensorFlow 2.18 has it
        for other in (plain, ordered, free):
            tf.nest.assert_same_structure(first, other)
            found = tf.nest.map_structure(lambda a, b: a - b, first, other)
            assert (type(found), list(found)) == (type(first), ["b", "a"])
            assert found == {"b": first["b"] - other["b"], "a": [first["a"][0] - other["a"][0]]}
    add = tf.nest.map_structure
    assert add(lambda a, b: a + b, [1, {"a": 2}], (3, {"a": 4}), check_types=False) == [4, {"a": 6}]
    tf.nest.assert_same_structure([1, (2,)], ((3, [4])), check_types=False)
    assert add(lambda a: [a, a], [1], expand_composites=True) == [[1, 1]]
    assert tf.nest.flatten([1], expand_composites=True) == [1]
    assert tf.nest.pack_sequence_as((1,), [2], expand_composites=True) == (2,)
    for wrong in ({"b": 1, "c": [2]}, {"b": 1, "a": (2,)}, [1, [2]]):
        with pytest.raises(ms.StructureError, match=r"differ|dict"):
            add(lambda a, b: a, ordered, wrong)
    with pytest.raises(ms.StructureError):
        tf.nest.assert_same_structure([1], (1, 2), check_types=False)


def test_tensors():
    assert tf.fill([2, 1], 3).tolist() == [[3], [3]]
    assert tf.fill([2], 3).dtype == tf.zeros_like([1]).dtype == tf.int32
    assert tf.ones_like(np.ones(2, np.int8)).dtype == tf.int8
    assert tf.reshape([1, 2, 3, 4], [2, -1]).tolist() == [[1, 2], [3, 4]]
    assert tf.stack([1.0, 2.0]).dtype == tf.concat([[1.0], [2.0]], axis=0).dtype == tf.float32
    assert tf.concat([np.ones((1, 2)), np.zeros((1, 2))], 1).tolist() == [[1, 1, 0, 0]]
    assert tf.reduce_sum([[1, 2], [3, 4]], axis=[0, 1]) == 10
    assert tf.reduce_sum(np.array([200, 100], np.uint8)) == 300 % 256
    assert tf.reduce_mean([1, 2]) == 1
    assert tf.reduce_mean([1, 2]).dtype == tf.int32
    assert tf.reduce_mean(tf.constant([[1.0, 2.0]]), 0, keepdims=True).tolist() == [[1.0, 2.0]]
    assert tf.constant([np.float64(1), 2]).dtype == tf.float64
    array = np.ones(2)
    assert tf.convert_to_tensor(array) is array
    assert tf.convert_to_tensor(array, tf.float32).dtype == tf.float32
    for value, wanted in ((1, tf.float32), (array, tf.float64), ([1.5], tf.float32)):
        hint = tf.int32 if type(value) is list else tf.float32
        assert tf.convert_to_tensor(value, dtype_hint=hint).dtype == wanted
    for value in (None, [1, None], {"a": 1}):
        with pytest.raises(ValueError, match="expected numbers, got"):
            tf.constant(value, tf.float32)
    assert tf.square(3).dtype == tf.int32
    assert isinstance(tf.constant(1), tf.Tensor)


def test_the_rest():
    @tf.function(jit_compile=True)
    def twice(x):
        return 2 * x

    assert twice(2) == 4
    assert tf.executing_eagerly() is True
    assert tf.group(1, 2, name="no") is None
    assert tf.types.experimental.distributed.PerReplica is ms.PerReplica
    assert issubclass(ms.Mirrored, tf.types.experimental.distributed.Mirrored)
    for module in (tf.data, tf.nest):
        for name in module.__all__:
            assert getattr(module, name) is not None


@pytest.mark.parametrize(
    ("value", "dtype", "kept"),
    [
        (0.1, tf.float64, 0.1),
        (2**40, tf.int64, 2**40),
        ([2**40, 1], tf.int64, [2**40, 1]),
        (2**63, tf.uint64, 2**63),
        (3, tf.float64, 3.0),
        (-1, tf.int8, -1),
    ],
)
def test_the_dtype_is_looked_at_before_the_number_is_narrowed(value, dtype, kept):
    for made in (tf.constant(value, dtype=dtype), tf.Variable(value, dtype=dtype)):
        assert made.dtype == dtype
        assert np.asarray(made).tolist() == kept
    assert np.asarray(tf.Variable(lambda: value, dtype=dtype)).tolist() == kept
    assert tf.convert_to_tensor(value, dtype).tolist() == kept


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: tf.constant(2**40),
        lambda: tf.constant([1, -(2**31) - 1]),
        lambda: tf.constant(2**63),
        lambda: tf.constant(2**70),
        lambda: tf.constant(256, tf.uint8),
        lambda: tf.constant(-1, tf.uint32),
        lambda: tf.constant(np.int64(2**40), tf.int32),
        lambda: tf.Variable(2**40),
        lambda: tf.range(2**40, 2**40 + 2),
        lambda: tf.fill([2], 2**40),
        lambda: tf.data.Dataset.from_tensor_slices([2**40, 1]),
    ],
)
def test_what_does_not_fit_is_refused_and_never_wraps(wrong):
    with pytest.raises(ValueError, match=r"does not fit u?int"):
        wrong()


def test_the_limits_fit():
    assert tf.constant([2**31 - 1, -(2**31)]).tolist() == [2**31 - 1, -(2**31)]
    assert np.isinf(tf.constant(1e300))
    with pytest.raises(TypeError, match="cut off"):
        tf.constant(1.5, tf.int32)


def test_a_variable_is_an_instance_of_the_class():
    v = tf.Variable([1.0, 2.0], shape=[2], validate_shape=True, constraint=None, name="v")
    assert isinstance(v, tf.Variable)
    assert isinstance(v, ms.Variable)
    assert isinstance(ms.Variable(1), tf.Variable)
    assert issubclass(ms.Variable, tf.Variable)
    assert not isinstance(np.ones(2), tf.Variable)
    assert v.name == "v:0"
    for given in ({"validate_shape": False}, {"constraint": abs}, {"shape": [None]}):
        with pytest.raises(ms.RefusedError, match=next(iter(given))):
            tf.Variable([1.0], **given)
    with pytest.raises(ValueError, match=r"shape=\(2,\).*\(1,\)"):
        tf.Variable([1.0], shape=(2,))
    assert tf.Variable(1.0, experimental_enable_variable_lifting=False) == 1
    with pytest.raises(ValueError, match="expected numbers, got None"):
        tf.Variable()
    with pytest.raises(TypeError, match=r"^Variable\(\) got an unexpected"):
        tf.Variable(1.0, shapes=())
