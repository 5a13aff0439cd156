"""Everyday names of tf.*: values against NumPy and the formulas, and what refuses."""

from __future__ import annotations

import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.checkpoint.files import latest_checkpoint
from mpistrat.compat import tf
from mpistrat.testing import run_ranks

X = np.array([[1.0, -2.0, 3.5], [0.25, 4.0, -1.0]], np.float32)
LOG = X - np.log(np.exp(X).sum(-1, keepdims=True))
LABELS = np.array([[0.0, 1.0, 0.0], [0.5, 0.25, 0.25]], np.float32)
NORM = np.sqrt((X.astype(float) ** 2).sum())
SLICES = ms.IndexedSlices(X, [4, 1], (5, 3))


@every(
    ("ours", "theirs"),
    [
        (tf.reduce_prod(X, axis=0), X.prod(0)),
        (tf.reduce_prod([2, 3]), np.int32(6)),
        (tf.reduce_any(X > 3, axis=1), np.array([True, True])),
        (tf.reduce_all(X > -2, axis=[1]), np.array([False, True])),
        (tf.reduce_logsumexp(X, 1), np.log(np.exp(X).sum(1))),
        (tf.reduce_logsumexp([1000.0, 1000.0]), np.float32(1000 + np.log(2))),
        (tf.math.reduce_std(X, 0, keepdims=True), X.std(0, keepdims=True)),
        (tf.math.reduce_variance(X), X.var()),
        (tf.add_n([X, 2 * X, X]), 4 * X),
        (tf.add_n([X, ms.IndexedSlices(X[:1], [1], (2, 3))]), X + np.stack([0 * X[0], X[0]])),
        (tf.clip_by_value(X, -1, 2.0), np.clip(X, -1, 2)),
        (tf.clip_by_value([1, 5, -5], -2, 2), np.array([1, 2, -2], np.int32)),
        (tf.clip_by_norm(X, 2.0), X * np.float32(2 / NORM)),
        (tf.clip_by_norm(X, 100.0), X),
        (tf.clip_by_norm(X, 1.0, axes=[1]), X / np.sqrt((X * X).sum(1, keepdims=True))),
        (tf.clip_by_norm(np.zeros(2, np.float32), 1.0), np.zeros(2, np.float32)),
        (tf.clip_by_norm(SLICES, 2.0).values, X * np.float32(2 / NORM)),
        (tf.gather(X, [1, 0, 1]), X[[1, 0, 1]]),
        (tf.gather(X, [[2], [0]], axis=-1), X[:, [[2], [0]]]),
        (tf.gather(X, [[2, 2], [0, 1]], axis=1, batch_dims=1), X[[[0], [1]], [[2, 2], [0, 1]]]),
        (tf.nn.log_softmax(X), LOG),
        (tf.nn.softmax_cross_entropy_with_logits(labels=LABELS, logits=X), -(LABELS * LOG).sum(1)),
        (
            tf.nn.softmax_cross_entropy_with_logits(LABELS.T, X.T, axis=0),
            -(LABELS * LOG).sum(1),
        ),
        (
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[2, 0], logits=X),
            -LOG[[0, 1], [2, 0]],
        ),
        (tf.nn.sparse_softmax_cross_entropy_with_logits(1, X[0]), -LOG[0, 1]),
        (
            tf.nn.softmax_cross_entropy_with_logits([0.0, 1.0], [1e4, -1e4]),
            np.float32(2e4),
        ),
        (
            tf.nn.sigmoid_cross_entropy_with_logits(labels=LABELS, logits=X),
            -LABELS * np.log(1 / (1 + np.exp(-X))) - (1 - LABELS) * np.log(1 / (1 + np.exp(X))),
        ),
        (tf.nn.l2_loss(X), np.float32(NORM**2 / 2)),
        (tf.nn.softplus(X), np.log1p(np.exp(X))),
        (tf.math.log_sigmoid(X), -np.log1p(np.exp(-X))),
        (tf.math.log1p([0.5]), np.log1p(np.array([0.5], np.float32))),
        (tf.round([0.5, 1.5, -2.5]), np.array([0, 2, -2], np.float32)),
        (tf.greater_equal(X, 1.0), X >= 1),
        (tf.math.mod(-7, 3), np.int32(2)),
        (tf.floordiv(-7, 2), np.int32(-4)),
        (tf.eye(2, 3), np.eye(2, 3, dtype=np.float32)),
        (tf.linspace(0.0, 1.0, 5), np.linspace(0, 1, 5, dtype=np.float32)),
        (tf.tile([[1, 2]], [2, 2]), np.array([[1, 2, 1, 2]] * 2, np.int32)),
        (tf.repeat([1, 2], 2), np.array([1, 1, 2, 2], np.int32)),
        (tf.broadcast_to([1.0], [2, 2]), np.ones((2, 2), np.float32)),
        (tf.split(X, 3, axis=1)[2], X[:, 2:]),
        (tf.split(X, [1, 2], axis=-1)[1], X[:, 1:]),
        (tf.split(X, [-1, 1], axis=1)[0], X[:, :2]),
        (tf.unstack(X, axis=1)[1], X[:, 1]),
        (tf.size(X), np.int32(6)),
        (tf.rank(X), np.int32(2)),
        (tf.gather_nd(X, [[1, 2], [0, 0]]), X[[1, 0], [2, 0]]),
        (tf.gather_nd(X, [[[1]]]), X[1][None, None]),
        (tf.gather_nd(X, [[2], [0]], batch_dims=1), X[[0, 1], [2, 0]]),
        (tf.boolean_mask(X, X > 0), X[X > 0]),
        (tf.boolean_mask(X, [True, False, True], axis=1), X[:, [0, 2]]),
        (tf.reverse(X, [1]), X[:, ::-1]),
        (tf.reverse(X, axis=[0, -1]), X[::-1, ::-1]),
        (tf.ensure_shape(X, [None, 3]), X),
        (tf.norm(X), np.float32(NORM)),
        (tf.linalg.global_norm([X, None, X]), np.float32(NORM * np.sqrt(2))),
        (tf.linalg.matmul(X, X, transpose_b=True), X @ X.T),
        (tf.norm(X, axis=1), np.sqrt((X * X).sum(1))),
        (tf.norm(X, axis=[1]), np.sqrt((X * X).sum(1))),
        (tf.norm(X, 1, axis=0), np.abs(X).sum(0)),
        (tf.norm(X, np.inf), np.abs(X).max()),
        (tf.norm(X, "fro", axis=[0, 1]), np.float32(NORM)),
        (tf.norm(X, keepdims=True), np.array([[NORM]], np.float32)),
        (tf.zeros_initializer()([2]), np.zeros(2, np.float32)),
        (tf.ones_initializer()(shape=[2], dtype=tf.int32), np.ones(2, np.int32)),
        (tf.constant_initializer(0.5)([2, 2]), np.full((2, 2), 0.5, np.float32)),
        (tf.constant_initializer([1, 2])([2, 1], dtype=tf.float64), np.array([[1.0], [2.0]])),
        (tf.dtypes.cast(X, tf.dtypes.float64), X.astype(np.float64)),
        (tf.ones([2])[tf.newaxis], np.ones((1, 2), np.float32)),
        # What follows was computed with TensorFlow 2.18.
        (tf.round([1, -2]), np.array([1, -2], np.int32)),
        (tf.divide(np.uint8([200]), np.uint8([3])), np.array([200 / 3], np.float32)),
        (tf.truediv(np.int16([1]), 3), np.array([1 / 3], np.float32)),
        (tf.truediv(1, 4), np.float64(0.25)),
        (tf.math.divide_no_nan([1, 2], [0, 3]), np.array([0, 2 / 3])),
        (tf.math.divide_no_nan(np.uint8(1), np.uint8(4)), np.float32(0.25)),
        (tf.range(np.int64(3)), np.arange(3)),
        (tf.range(np.int64(0), 2.5), np.arange(3, dtype=np.float32)),
        (tf.range(start=0, limit=5, delta=2), np.array([0, 2, 4], np.int32)),
        (tf.range(1, np.float64(3)), np.arange(1.0, 3)),
        (tf.one_hot([0, 2], 3, 5, -1), np.array([[5, -1, -1], [-1, -1, 5]], np.int32)),
        (tf.one_hot([0, -1], 2, on_value=2.0), np.array([[2, 0], [0, 0]], np.float32)),
        (tf.one_hot([0], 2, on_value=True, off_value=False), np.array([[True, False]])),
        (tf.one_hot([0], 2, off_value=3, dtype=tf.float64), np.array([[1.0, 3.0]])),
        (tf.one_hot([0, 2], 3, axis=0), np.array([[1, 0], [0, 0], [0, 1]], np.float32)),
        (tf.eye(2, batch_shape=[2]), np.array([np.eye(2)] * 2, np.float32)),
        (tf.linspace([0.0, 1.0], [1.0, 3.0], 2, axis=1), np.array([[0, 1], [1, 3]], np.float32)),
        (tf.matmul([[1 + 2j]], [[1j]], adjoint_a=True), np.array([[2 + 1j]])),
        (tf.transpose([[1j, 2.0]], conjugate=True), np.array([[-1j], [2.0]])),
        (tf.gather(X, [1], None, 1), X[:, 1:2]),
        # None is what TensorFlow's own arguments are by default, and stands for the same there.
        (tf.nn.softmax(X, axis=None), np.exp(LOG)),
        (tf.nn.log_softmax(X, axis=None), LOG),
        (tf.nn.softmax_cross_entropy_with_logits(LABELS, X, None), -(LABELS * LOG).sum(1)),
        (tf.argmax(X, None, None), X.argmax(0)),
        (tf.boolean_mask(X, [True, False], axis=None), X[:1]),
        (tf.reduce_sum(X, 0, keepdims=None), X.sum(0)),
        (tf.norm(X, axis=1, keepdims=None), np.sqrt((X * X).sum(1))),
        (tf.shape(X, None), np.array([2, 3], np.int32)),
        (tf.size(X, out_type=None), np.int32(6)),
        (tf.squeeze(X[:1, None], axis=[]), X[0]),
        (tf.clip_by_norm(X, -1.0), 0 * X),
        (tf.clip_by_global_norm([X], -1.0)[0][0], X),
        (
            tf.matmul(np.int8([[100]]), np.int8([[100]]), b_is_sparse=True, output_type="int32"),
            np.array([[10_000]], np.int32),
        ),
    ],
)
def test_values(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert ours.dtype == theirs.dtype
    assert isinstance(ours, tf.Tensor)


@pytest.mark.parametrize("limit", [1.0, 100.0])
def test_gradients_are_clipped_together(limit):
    given = [X, None, SLICES, np.array([3.0], np.float32)]
    norm = np.sqrt(2 * NORM**2 + 9)
    clipped, found = tf.clip_by_global_norm(given, limit)
    np.testing.assert_allclose(found, norm, rtol=1e-6)
    scale = min(1.0, limit / norm)
    assert clipped[1] is None
    assert isinstance(clipped[2], ms.IndexedSlices)
    for ours, theirs in [(clipped[0], X), (clipped[2].values, X), (clipped[3], given[3])]:
        np.testing.assert_allclose(ours, theirs * scale, rtol=1e-6)
        assert ours.dtype == np.float32
    again, used = tf.clip_by_global_norm(given, limit, use_norm=2 * limit)
    assert used == 2 * limit
    np.testing.assert_allclose(again[0], X / 2, rtol=1e-6)
    broken, norm = tf.clip_by_global_norm([X, np.array([np.inf], np.float32)], limit)
    assert np.isinf(norm)
    assert all(np.isnan(one).all() for one in broken)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: tf.gather(X, [2]), tf.errors.InvalidArgumentError, "index 2 is out of range for"),
        (lambda: tf.gather(X, [-1]), ValueError, "index -1 is out of range for the 2 slices"),
        (lambda: tf.gather(X, [0.5]), TypeError, "indices must be integers"),
        (
            lambda: tf.gather_nd(X, [[0, 3]]),
            ValueError,
            r"of \[\[0, 3\]\] is not in \(2, 3\)",
        ),
        (lambda: tf.gather_nd(X, [[-1]]), ValueError, "is not in"),
        (lambda: tf.gather_nd(X, [[0, 0, 0]]), ValueError, "is not in"),
        (lambda: tf.gather_nd(X, [[0.0]]), TypeError, "indices must be integers"),
        (lambda: tf.boolean_mask(X, [True]), ValueError, r"shape \(2,\), got bool \(1,\)"),
        (lambda: tf.boolean_mask(X, [1, 0]), ValueError, "got int64"),
        (lambda: tf.ensure_shape(X, [3, None]), ValueError, r"expected shape \(3, None\), got \(2"),
        (lambda: tf.ensure_shape(X, [None]), ValueError, "expected shape"),
        (lambda: tf.norm([3, 4]), TypeError, "expected floating point, got int32"),
        (lambda: tf.norm(X, "nuc"), ValueError, "got ord='nuc'"),
        (lambda: tf.Assert(X > 0, [X, "x"]), ValueError, "a condition that holds, got"),
        (lambda: tf.reduce_any(X), TypeError, "expected a tensor of bool, got float32"),
        (lambda: tf.reduce_mean(X > 1), TypeError, "got a tensor of bool; cast it first"),
        (lambda: tf.add_n([X > 1]), TypeError, "got a tensor of bool; cast it first"),
        (lambda: tf.clip_by_value([1, 2], 0, 1.5), TypeError, "limit 1.5 is no int32"),
        (lambda: tf.clip_by_norm([1, 2], 0.5), TypeError, "limit 0.5 is no int32"),
        (
            lambda: tf.clip_by_global_norm([[3, 4]], 1.0),
            TypeError,
            "floating-point tensors, got int",
        ),
        (lambda: tf.add_n([]), ValueError, "expected tensors of one shape, got none"),
        (lambda: tf.add_n([X, X[0]]), ValueError, r"got \[\(2, 3\), \(3,\)\]"),
        (lambda: tf.clip_by_global_norm(X, 1.0), TypeError, "expected a list of tensors"),
        (
            lambda: tf.nn.sparse_softmax_cross_entropy_with_logits([3, 0], X),
            ValueError,
            "label 3 is out of range for 3 classes",
        ),
        (
            lambda: tf.nn.sparse_softmax_cross_entropy_with_logits([-1, 0], X),
            ValueError,
            "label -1",
        ),
        (lambda: tf.nn.sparse_softmax_cross_entropy_with_logits([0], X), ValueError, "do not fit"),
        (
            lambda: tf.nn.sparse_softmax_cross_entropy_with_logits(LABELS[:, 0], X),
            TypeError,
            "labels must be integers",
        ),
        (lambda: tf.nn.softmax_cross_entropy_with_logits([1, 0], X), ValueError, "sparse_softmax"),
        (lambda: tf.split(X, [1, 1], 1), ValueError, "do not add up to 3"),
        (lambda: tf.split(X, [4, -1], 1), ValueError, "do not add up to 3"),
        (lambda: tf.debugging.assert_equal(1, 2, "step"), ValueError, "step: expected x == y, got"),
        (lambda: tf.debugging.assert_less(X, 3.0), ValueError, "expected x < y"),
        (lambda: tf.debugging.assert_positive(X), ValueError, "expected positive"),
        (lambda: tf.debugging.assert_near(1.0, 1.1), ValueError, "x near y"),
        (lambda: tf.debugging.check_numerics([np.nan], "loss"), ValueError, "loss: expected fini"),
        (lambda: tf.debugging.assert_rank(X, 1), ValueError, "expected 1 axes"),
        (lambda: tf.Tensor([1]), TypeError, r"tf\.constant\(value\) makes a tensor"),
        (lambda: tf.floordiv([1, 2], [1, 0]), tf.errors.InvalidArgumentError, "divided by 0"),
        (lambda: tf.math.mod(tf.constant(1), 0), tf.errors.InvalidArgumentError, "divided by 0"),
        (lambda: tf.reduce_logsumexp([1, 2]), TypeError, "expected floating point, got int32"),
        (lambda: tf.nn.softmax([1, 2]), TypeError, "softmax: expected floating point, got int32"),
        (lambda: tf.nn.log_softmax([1, 2]), TypeError, "expected floating point, got int32"),
        (lambda: tf.clip_by_norm(X, None), ValueError, "a limit is None"),
        (lambda: tf.clip_by_value(X, None, 1.0), ValueError, "a limit is None"),
        (lambda: tf.clip_by_global_norm([X], None), ValueError, "clip_norm is None"),
        (lambda: tf.concat([X, X], None), ValueError, "concat: axis is None"),
        (lambda: tf.reverse(X, None), ValueError, "reverse: axis is None"),
        (lambda: tf.where(None, X, X), ValueError, "where: condition is None"),
        (lambda: tf.shape(None), ValueError, "shape: input is None"),
        (lambda: tf.size(None), ValueError, "size: input is None"),
        (lambda: tf.rank(None), ValueError, "rank: input is None"),
        (lambda: tf.one_hot(None, 3), ValueError, "None"),
        (lambda: tf.one_hot([0.5], 3), TypeError, "one_hot: indices must be integers, got float32"),
        (lambda: tf.one_hot([0], -1), ValueError, "depth must be an integer of at least 0"),
        (lambda: tf.debugging.assert_none_equal(1, 1, 3, "m"), ValueError, "m: expected x != y"),
        (lambda: tf.train.latest_checkpoint(".", "a"), NotImplementedError, "Leave it out"),
        (lambda: tf.train.list_variables(None), TypeError, "must be a str or a path, not None"),
        (lambda: tf.nest.map_structure(None, [1]), TypeError, r"map_structure\(func\) must get a"),
        (lambda: tf.random.normal([2], stddev=None), ValueError, "stddev is None"),
        (lambda: tf.random.set_seed(1.5), TypeError, "seed must be an integer, got 1.5"),
        (
            lambda: tf.IndexedSlices(X, [0, 1], True),
            TypeError,
            r"\(dense_shape\): expected",
        ),
        (lambda: tf.IndexedSlices(X, [0, 1], [None, 3]), ValueError, "no rows of a whole"),
        (
            lambda: tf.train.CheckpointManager(tf.train.Checkpoint(), "a", 3).sync(),
            AttributeError,
            "Leave it out: when save",
        ),
    ],
)
def test_what_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("call", [tf.constant, tf.reduce_sum, lambda value: tf.stack([value])])
def test_what_is_not_an_array_says_why_itself(call):
    with pytest.raises(ValueError, match=r"^a PerReplica is not an array;") as error:
        call(ms.PerReplica(1.0))
    assert "pad them" not in str(error.value)
    with pytest.raises(ValueError, match=r"[^.]\. In an array all rows .*: pad them"):
        call([[1], [2, 3]])


@every(
    "call",
    [
        lambda: tf.gather(3, [0]),
        lambda: tf.gather([1, 2], [0], axis=1),
        lambda: tf.gather_nd([1, 2], 0),
        lambda: tf.split(3, 1),
        lambda: tf.split(3, [1]),
    ],
)
def test_an_axis_that_is_not_there_is_an_invalid_argument(call):
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"axis .* is out of bounds"):
        call()


def test_assertions_that_hold_say_nothing():
    tf.debugging.assert_equal(X, X)
    tf.Assert(X.shape == (2, 3), [X])
    tf.debugging.assert_near(1.0, 1.0 + 1e-7)
    tf.debugging.assert_rank(X, 2)
    assert tf.debugging.check_numerics(X, "x") is X


def test_names_of_operations_have_no_effect():
    made = [
        tf.constant(1.0, name="one"),
        tf.zeros([], name="x") + 1,
        tf.reduce_sum([1.0], name="x"),
        tf.cast(1, tf.float32, name="x"),
        tf.nn.relu(1.0, name="x"),
        tf.argmax([0, 1], name="x"),
        tf.add_n([1.0], name="x"),
        tf.matmul([[1.0]], [[1.0]], name="x")[0, 0],
        tf.gather([1.0], 0, name="x"),
        tf.cast(1, tf.float32, "x"),
        tf.concat([[1.0]], 0, "x")[0],
        tf.reshape([1.0], [], None),
        tf.gather([1.0], 0, None, None, 0, "x"),
        tf.linspace(1.0, 2.0, 2, "x")[0],
        tf.data.Dataset.range(1).enumerate(1, "x").get_single_element("x")[0],
    ]
    assert [float(one) for one in made] == [1.0] * len(made)
    with pytest.raises(TypeError, match="2 positional arguments but 3 were given"):
        tf.cast(1, tf.float32, 3)


# The names of tf.errors in the release that `tf.__version__` names.
ERRORS = [
    "AbortedError",
    "AlreadyExistsError",
    "CancelledError",
    "DataLossError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "OpError",
    "OperatorNotAllowedInGraphError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
]


@pytest.mark.parametrize("name", ERRORS)
def test_exceptions_can_be_caught_while_another_is_on_its_way(name):
    caught = getattr(tf.errors, name)
    assert issubclass(caught, Exception)
    assert caught is not Exception
    with pytest.raises(ZeroDivisionError):
        try:
            raise ZeroDivisionError
        except caught:
            pass


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_what_happens_here_is_caught_by_the_name_of_there(n, tmp_path):
    def program(comm):
        strategy = tf.distribute.MirroredStrategy()
        with strategy.scope():
            checkpoint = tf.train.Checkpoint(v=tf.Variable(0.0))
        with pytest.raises(tf.errors.NotFoundError):
            checkpoint.restore(tmp_path / "none")
        with pytest.raises(tf.errors.DataLossError):
            checkpoint.restore(tmp_path / "bad.npz")
        data = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(1).batch(1)))
        next(data)
        with pytest.raises(tf.errors.OutOfRangeError) as ended:
            data.get_next()
        assert isinstance(ended.value, tf.errors.OpError)

        def step():
            if comm.rank == n - 1:
                raise ValueError("mine")
            tf.distribute.get_replica_context().all_reduce("sum", 1.0)

        others = tf.errors.UnavailableError if comm.rank < n - 1 else ValueError
        with pytest.raises(others, match="mine"):
            strategy.run(step)

    (tmp_path / "bad.npz").write_bytes(b"bad")
    run_ranks(program, n)


def test_devices(monkeypatch):
    assert [d.name for d in tf.config.list_physical_devices()] == ["/physical_device:CPU:0"]
    assert tf.config.list_physical_devices("GPU") == []
    (cpu,) = tf.config.list_logical_devices("CPU")
    assert (cpu.name, cpu.device_type) == ("/device:CPU:0", "CPU")
    assert tf.config.experimental.list_physical_devices("CPU") == tf.config.list_physical_devices()
    for gpu in tf.config.list_physical_devices("CPU"):
        assert tf.config.experimental.set_memory_growth(gpu, True) is None
    with pytest.raises(AttributeError, match=r"It is tf\.config\.experimental\.set_memory_growth"):
        tf.config.set_memory_growth(cpu, True)
    part = tf.config.LogicalDeviceConfiguration()
    with pytest.warns(UserWarning, match=r"each rank is one, .* mpistrat run -n 4 program\.py"):
        tf.config.set_logical_device_configuration(cpu, [part] * 4)
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "0")
    tf.config.set_logical_device_configuration(cpu, [part] * 4)  # no warning: each is a rank
    part = tf.config.experimental.VirtualDeviceConfiguration(memory_limit=1024)
    tf.config.experimental.set_virtual_device_configuration(cpu, [part])
    assert tf.config.list_logical_devices() == [cpu]
    assert tf.config.threading.set_intra_op_parallelism_threads(1) is None
    assert tf.compat.v1.enable_v2_behavior() is tf.compat.v1.enable_eager_execution() is None


def test_datasets_have_the_parameters_of_tf_data():
    dataset = tf.data.Dataset.range(8, output_type=tf.float32, name="a")
    dataset = dataset.take(-1, name="b").shard(num_shards=2, index=0, name="c").repeat(2, name="d")
    dataset = dataset.skip(1, name="e").batch(3, name="f").rebatch(4, name="g")
    assert [batch.tolist() for batch in dataset] == [[2, 4, 6, 0], [2, 4, 6]]
    assert next(iter(dataset)).dtype == np.float32
    for below in (-1, -2, np.int64(-7)):  # as the library of there does with all of them
        assert list(dataset.take(below)) and not list(dataset.skip(below))
        assert dataset.repeat(below).cardinality() == tf.data.INFINITE_CARDINALITY
    assert dataset.with_options(tf.data.Options(), name="h").cardinality(name="i") == -2
    assert dataset.reduce(0, lambda total, x: total + x.sum(), name="j") == 24
    twice = dataset.map(lambda x: 2 * x, 2, False, True, use_unbounded_threadpool=True)
    assert [batch.tolist() for batch in twice] == [[4, 8, 12, 0], [4, 8, 12]]
    made = tf.data.Dataset.from_generator(lambda: iter([1, 2]), tf.int32, args=None)
    assert [int(x) for x in made] == [1, 2]
    (padded,) = tf.data.Dataset.from_tensor_slices([[1], [2]]).padded_batch(2, padded_shapes=3)
    assert padded.tolist() == [[1, 0, 0], [2, 0, 0]]


@every("name", ["map", "filter", "flat_map", "take_while", "apply"])
def test_datasets_want_functions(name):
    with pytest.raises(TypeError, match=rf"^{name}\(.* must get a function, got 3 \(int\)\.$"):
        getattr(tf.data.Dataset.range(3), name)(3)
    with pytest.raises(TypeError, match=r"^reduce\(reduce_func\) must get a function, got None"):
        tf.data.Dataset.range(3).reduce(0, None)


def test_what_is_drawn():
    drawn = tf.random.uniform([1000, 2], [0.0, 5.0], [1.0, 6.0], seed=-1)
    assert (drawn.min(0) >= [0, 5]).all() and (drawn.max(0) < [1, 6]).all()
    assert (drawn == tf.random.uniform([1000, 2], [0, 5], [1, 6], seed=2**64 - 1)).all()
    assert (tf.random.Generator.from_seed(-2).normal([3], [0, 9, 99]) > [-9, 0, 90]).all()


PAIR = np.array([1, 2], np.float32)
BESIDE = {
    "where": lambda x: tf.where(x > 1, x, 0),
    "stack": lambda x: tf.stack([x[0], 1]),
    "concat": lambda x: tf.concat([x, [1, 2]], 0),
    "constant": lambda x: tf.constant([[x[0], 2], [0.5, 3]]),
    "reduce": lambda x: tf.reduce_sum([x[0], 1.5]),
    "divide_no_nan": lambda x: tf.math.divide_no_nan(1, x),
    "add_n": lambda x: tf.add_n([x[0], 1]),
    "add": lambda x: tf.add(x, [1, 2]),
    "squared_difference": lambda x: tf.math.squared_difference([1.5, 2], x),
    "matmul": lambda x: tf.matmul(x[None], [[1], [2]]),
    "linspace": lambda x: tf.linspace(x[0], 3, 3),
    "Variable": lambda x: tf.Variable([x[0], 2.5]),
    "no tensor": lambda x: tf.stack([1, 2.5]),
}


@pytest.mark.parametrize("name", BESIDE)
def test_numbers_take_the_dtype_of_the_tensor_beside_them(name):
    assert BESIDE[name](PAIR).dtype == np.float32
    if name != "no tensor":
        assert BESIDE[name](PAIR.astype(np.float64)).dtype == np.float64


@pytest.mark.parametrize(
    "call",
    [
        lambda: tf.multiply(tf.constant([1]), 0.5),
        lambda: tf.where(True, tf.constant(1), 0.5),
        lambda: tf.constant([tf.constant(1), 0.5]),
    ],
)
def test_a_float_beside_integers_is_refused(call):
    with pytest.raises(TypeError, match="would be cut off"):
        call()


def test_the_largest_of_no_elements():
    rows = np.zeros((0, 2), np.float32)
    assert (tf.reduce_max(rows), tf.reduce_min(rows)) == (-np.inf, np.inf)
    assert tf.reduce_max(rows, axis=0, keepdims=True).tolist() == [[-np.inf, -np.inf]]
    assert tf.reduce_min(rows, axis=1).shape == (0,)
    whole = rows.astype(np.int8)
    assert (tf.reduce_max(whole), tf.reduce_min(whole)) == (-128, 127)
    assert tf.reduce_max(whole).dtype == np.int8 and tf.reduce_max(rows).dtype == np.float32


def test_numbers_are_no_names_of_one_another():
    makers = (tf.constant, lambda x: tf.fill([], x), lambda x: tf.cast(x, tf.float32), tf.identity)
    for make in (*makers, lambda x: tf.zeros([]) + x, lambda x: tf.zeros([]), tf.ones_like):
        total = first = make(0.0)
        before = float(first)
        total += 1.0
        assert (float(first), float(total), first.shape) == (before, before + 1, ())
        assert isinstance(first, tf.Tensor) and first.dtype == np.float32
    assert tf.constant([0.0]).shape == tf.fill([1], 0.0).shape == (1,)


def test_where_alone_gives_indices():
    found = tf.where([[True, False], [False, True]])
    assert (found.tolist(), found.dtype) == ([[0, 0], [1, 1]], np.int64)
    with pytest.raises(ValueError, match="both x and y"):
        tf.where([True], 1.0)


def test_the_length_of_a_dataset():
    dataset = tf.data.Dataset.range(5)
    assert (len(dataset), len(dataset.batch(2)), len(dataset.take(0))) == (5, 3, 0)
    assert dataset.take(0)
    with pytest.raises(TypeError, match="repeats forever"):
        len(dataset.repeat())
    with pytest.raises(TypeError, match="not known"):
        len(dataset.batch(2).filter(lambda x: x[0] > 1))


def test_what_map_returns_becomes_tensors():
    rows = tf.data.Dataset.range(3)
    pair = rows.map(lambda x: [x, 2 * x])  # a list is a tuple
    assert list(pair) == [(0, 0), (1, 2), (2, 4)]
    assert list(pair.map(lambda x, y: x + y)) == [0, 3, 6]
    ((ones, mixed),) = rows.map(lambda x: (1, {"a": [x, x], "b": 0.5})).batch(3)
    assert ones.dtype == np.int32 and mixed["b"].dtype == np.float32
    assert mixed["a"].tolist() == [[0, 0], [1, 1], [2, 2]]
    (batch,) = rows.batch(3).map(lambda x: [x, x + 1])
    assert type(batch) is tuple and batch[1].tolist() == [1, 2, 3]
    with pytest.raises(TypeError, match="must get a function"):
        rows.map(3)
    with pytest.raises(ms.DataError, match="<lambda>, returned None: look for a missing return"):
        list(rows.map(lambda x: None).batch(2))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_what_is_in_a_checkpoint(n, tmp_path):
    values = {
        "w": X,
        "b": np.arange(3).astype(ml_dtypes.bfloat16),
        "n": np.array(7),
        "e": np.zeros((0, 2)),
    }

    def program(comm):
        with ms.MirroredStrategy().scope():
            made = {name: ms.Variable(value) for name, value in values.items()}
        saved = tf.train.Checkpoint(model=made, step=4, note="a")
        path = saved.save(tmp_path / "ckpt", options=None)
        saved.restore(path, options=None).assert_consumed()
        assert saved.read(saved.write(tmp_path / "w", options=None), options=None).missing == ()
        with pytest.raises(ms.RefusedError, match=r"Checkpoint\.restore\(options=\) is refused"):
            saved.restore(path, options=path)
        end = "/.ATTRIBUTES/VARIABLE_VALUE"  # as TensorFlow 2.18 lists them
        wanted = [("model/b", [3]), ("model/e", [0, 2]), ("model/n", []), ("model/w", [2, 3])]
        wanted = [(name + end, shape) for name, shape in [*wanted, ("step", [])]]
        assert path == tf.train.latest_checkpoint(tmp_path) == latest_checkpoint(tmp_path)
        for given in (path, path.removesuffix(".npz"), tmp_path):
            assert tf.train.list_variables(given) == wanted
        reader = tf.train.load_checkpoint(path)
        assert reader.get_variable_to_shape_map() == dict(wanted)
        assert reader.get_variable_to_dtype_map()["model/w" + end] == tf.float32
        for name, value in values.items():
            found = reader.get_tensor(f"model/{name}")
            assert found.dtype == value.dtype
            np.testing.assert_array_equal(found, value)
        assert reader.has_tensor("model/n" + end)
        assert int(tf.train.load_variable(path, "model/n")) == 7
        assert int(tf.train.load_variable(path, "step")) == 4
        for kind in (ValueError, tf.errors.NotFoundError):
            with pytest.raises(kind, match=r"has no 'x'; it has \['model/b'"):
                reader.get_tensor("x")

    run_ranks(program, n)
    with pytest.raises(tf.errors.NotFoundError, match="no checkpoint in"):
        tf.train.load_checkpoint(tmp_path.parent)
    (tmp_path / "ckpt-1.npz").write_bytes((tmp_path / "ckpt-1.npz").read_bytes()[:-1])
    with pytest.raises(tf.errors.DataLossError):
        tf.train.list_variables(tmp_path)


def test_what_a_tensor_is():
    assert isinstance(tf.reduce_sum([1.0, 2.0]), tf.Tensor)
    assert isinstance(tf.equal(1, 1), tf.Tensor)
    assert isinstance(tf.constant([1]), tf.Tensor)
    assert not isinstance(tf.Variable(1.0), tf.Tensor)  # as there
    assert not any(isinstance(other, tf.Tensor) for other in (1, 1.0, True, [1], "x", None))
    assert issubclass(np.ndarray, tf.Tensor)
    assert not isinstance(np.ones(1), tf.Variable)
    assert [tf.is_tensor(x) for x in (tf.Variable(1.0), np.float32(1), 1, [1])] == [
        True,
        True,
        False,
        False,
    ]
    strategy = tf.distribute.OneDeviceStrategy("cpu")
    assert isinstance(strategy.reduce("sum", strategy.run(lambda: np.ones(2)), axis=0), tf.Tensor)
    spec = tf.TensorSpec(shape=[None, 3], dtype=tf.int32, name="x")
    assert (spec.shape, spec.dtype, spec.name) == ((None, 3), tf.int32, "x")
    assert tf.function(input_signature=[spec])(len)([1]) == 1


def test_a_dtype_that_is_none_is_told_in_words():
    calls = {
        "constant": lambda dtype: tf.constant(1, dtype),
        "Variable": lambda dtype: tf.Variable(1, dtype=dtype),
        "ms.Variable": lambda dtype: ms.Variable(1, dtype=dtype),
        "cast": lambda dtype: tf.cast(1, dtype),
        "convert": lambda dtype: tf.convert_to_tensor(X, dtype),
        "zeros": lambda dtype: tf.zeros([1], dtype),
        "ones": lambda dtype: tf.ones([1], dtype),
        "zeros_like": lambda dtype: tf.zeros_like(X, dtype),
        "ones_like": lambda dtype: tf.ones_like(X, dtype),
        "range": lambda dtype: tf.range(3, dtype=dtype),
        "one_hot": lambda dtype: tf.one_hot([1], 2, dtype=dtype),
        "shape": lambda dtype: tf.shape(X, dtype),
        "size": lambda dtype: tf.size(X, dtype),
        "eye": lambda dtype: tf.eye(2, dtype=dtype),
        "argmax": lambda dtype: tf.argmax(X, 0, dtype),
        "normal": lambda dtype: tf.random.normal([1], dtype=dtype),
        "uniform": lambda dtype: tf.random.uniform([1], dtype=dtype),
        "partitioner": lambda dtype: ms.experimental.partitioners.MinSizePartitioner()([8], dtype),
    }
    for name, call in calls.items():
        for dtype in ("float23", "int33", 3):
            with pytest.raises(TypeError, match=r"pass one such as np\.float32") as error:
                call(dtype)
            assert f"{dtype!r} is not a dtype; pass" in str(error.value), name
        if name not in ("ms.Variable", "partitioner"):  # those of tf take Python's types as it does
            assert call(float).dtype == call("float").dtype == np.float32, name
            for dtype in (int, "int", complex):
                with pytest.raises(TypeError, match=r"dtype; pass one such as tf\.float32"):
                    call(dtype)
    assert tf.convert_to_tensor(X.astype(float), float).dtype == np.float32
    assert tf.as_dtype(float) == tf.TensorSpec([], float).dtype == np.float32
    for call in (lambda: tf.cast(X, None), lambda: tf.zeros([1], None), lambda: tf.as_dtype(None)):
        with pytest.raises(TypeError, match="None is not a dtype"):
            call()


def test_bfloat16_by_name(monkeypatch):
    assert tf.bfloat16 == ml_dtypes.bfloat16 and tf.bfloat16.name == "bfloat16"
    assert tf.constant([1.5], tf.bfloat16).dtype == tf.bfloat16
    assert tf.Variable([1.5], dtype=tf.bfloat16).dtype == tf.bfloat16
    assert float(tf.reduce_sum(tf.cast([1.5, 2.0], tf.bfloat16))) == 3.5
    # Where ml_dtypes has not been imported, NumPy does not know the name.
    real = np.dtype

    def dtype(given, *args):
        if isinstance(given, str) and given == "bfloat16":
            raise TypeError("data type 'bfloat16' not understood")
        return real(given, *args)

    with monkeypatch.context() as patch:
        patch.setattr("mpistrat.arrays.np.dtype", dtype)
        with pytest.raises(TypeError, match=r"expected a dtype, got 'bfloat16'; import ml_dtypes"):
            ms.Variable(1.0, dtype="bfloat16")
        with pytest.raises(TypeError, match=r"expected a dtype, got 'bfloat16'"):
            tf.constant(1.0, "bfloat16")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ml_dtypes", None)
        with pytest.raises(AttributeError, match="pip install ml_dtypes"):
            tf.bfloat16  # noqa: B018


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_one_seed_for_all_draws(n):
    def program(comm):
        tf.random.set_seed(5)
        drawn = [tf.random.normal([3]), tf.random.uniform([3]), tf.random.normal([3])]
        tf.random.set_seed(5)
        again = [tf.random.normal([3]), tf.random.uniform([3]), tf.random.normal([3])]
        np.testing.assert_array_equal(drawn, again)
        assert (drawn[0] != drawn[2]).any()
        return np.stack(drawn)

    try:
        found = run_ranks(program, n)
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(tf.random.normal([3])))
        thread.start()
        thread.join()
        np.testing.assert_array_equal(elsewhere[0], found[0][0])
        for drawn in found:
            np.testing.assert_array_equal(drawn, found[0])
    finally:
        tf.random.set_seed(None)
    assert (tf.random.normal([9]) != tf.random.normal([9])).any()


def test_the_version_is_that_of_the_recorded_values():
    assert tf.__version__ == tf.version.VERSION
    assert tuple(int(part) for part in tf.__version__.split(".")) >= (2, 4, 0)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sums_of_16_bit_do_not_stop_growing(dtype):
    ones = np.ones((4000, 2), dtype)
    losses = ones[:, 0].copy()
    for made, wanted in [
        (tf.reduce_sum(ones, 0), 4000),
        (tf.reduce_mean(ones, [0]), 1),
        (tf.nn.l2_loss(losses), 2000),
        (tf.nn.compute_average_loss(losses, global_batch_size=4000), 1),
        (tf.clip_by_global_norm([losses], 1.0)[1], np.sqrt(4000)),
        (tf.nn.softmax(losses), 1 / 4000),
        (tf.reduce_max(ones, 0), 1),
        (tf.norm(ones, axis=0), np.sqrt(4000)),
    ]:
        assert made.dtype == dtype
        np.testing.assert_allclose(np.asarray(made, np.float64), wanted, rtol=4e-3)


def test_sigmoid_of_large_negative_numbers_is_small_and_not_0():
    x = np.array([-80, -20, -1, 0, 1, 30, np.inf, -np.inf])
    wanted = [np.exp(-80), np.exp(-20), 1 / (1 + np.e), 0.5, 1 / (1 + np.exp(-1)), 1, 1, 0]
    for dtype, rtol in [(np.float32, 1e-6), (np.float64, 1e-8)]:
        made = tf.sigmoid(x.astype(dtype))
        assert made.dtype == dtype
        np.testing.assert_allclose(made, wanted, rtol)


def test_argmax_without_an_axis_is_that_along_the_first():
    assert tf.argmax([[1, 5], [7, 2]], None).tolist() == [1, 0]
    assert tf.math.argmin([[1, 5], [7, 2]], axis=None).tolist() == [0, 1]


def test_numbers_between_integers_are_not_cut_off():
    np.testing.assert_array_equal(tf.linspace(0, 1, 5), [0, 0.25, 0.5, 0.75, 1])


def test_uniform_never_draws_the_upper_bound():
    assert tf.random.uniform([100_000], dtype=np.float16, seed=1).max() < 1
    assert tf.random.uniform([100_000], 5, 6, ml_dtypes.bfloat16, seed=1).max() < 6


def test_results_have_the_dtype_of_what_they_are_of():
    x = tf.constant([[1.5, 2.0], [0.5, 4.0]], tf.bfloat16)
    assert tf.matmul(x, x).dtype == tf.linalg.matmul(x, x, transpose_b=True).dtype == tf.bfloat16
    assert tf.matmul(x, x).tolist() == [[3.25, 11.0], [2.75, 17.0]]
    z = tf.constant([3j, 4 + 0j], tf.complex64)
    for found in (tf.norm(z), tf.norm(z, axis=0), tf.norm(z, ord=2, axis=0)):
        assert (found.dtype, complex(found)) == (tf.complex64, 5 + 0j)
    assert (tf.norm(z, ord=1).dtype, float(tf.norm(z, ord=1))) == (tf.float32, 7.0)
    assert tf.math.squared_difference(z, 0).tolist() == [9 + 0j, 16 + 0j]
    np.testing.assert_allclose(tf.sigmoid(z), 1 / (1 + np.exp(-z)))
    assert tf.sigmoid(z).dtype == tf.complex64


def test_the_mean_of_integers_is_cut_off_and_of_none_it_is_0():
    assert tf.reduce_mean([[1, 2], [4, 3]], axis=0).tolist() == [2, 2]
    assert tf.reduce_mean([-1, -2], keepdims=True).tolist() == [-1]
    assert tf.reduce_mean(np.zeros((0, 2), "i4"), axis=0).tolist() == [0, 0]
    assert tf.reduce_mean(np.zeros((0, 2), "u1"), axis=1).shape == (0,)
