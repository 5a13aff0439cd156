"""Small names of tf.*, against NumPy, and what the others say."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.compat import tf
from mpistrat.testing import run_ranks

X = np.array([[1.0, -2.0, 3.5], [0.25, 4.0, -1.0]], np.float32)


@every(
    ("ours", "theirs"),
    [
        (tf.reduce_max(X, axis=1), X.max(axis=1)),
        (tf.reduce_min(X), X.min()),
        (tf.transpose(X), X.T),
        (tf.transpose(X, [1, 0]), X.T),
        (tf.shape(X), np.array([2, 3], np.int32)),
        (tf.expand_dims(X, 1), X[:, None]),
        (tf.squeeze(X[:1], axis=[0]), X[0]),
        (tf.where(X > 0, X, 0.0), np.maximum(X, 0)),
        (tf.nn.relu(X), np.maximum(X, 0)),
        (tf.one_hot([2, 0], 3), np.eye(3, dtype=np.float32)[[2, 0]]),
        (tf.abs(X), np.abs(X)),
        (tf.exp(X), np.exp(X)),
        (tf.math.log(tf.exp(X)), X),
        (tf.sigmoid(X), 1 / (1 + np.exp(-X))),
        (tf.math.rsqrt(np.abs(X)), np.abs(X) ** -0.5),
        (tf.add(X, 2), X + 2),
        (tf.subtract(1.0, X), 1 - X),
        (tf.multiply(X, X), X * X),
        (tf.maximum(X, 0.5), np.maximum(X, 0.5)),
        (tf.pow(X, 2), X**2),
        (tf.math.squared_difference(X, 1.0), (X - 1) ** 2),
        (tf.math.divide_no_nan(X, X * 0), X * 0),
        (tf.argmax(X, axis=1), X.argmax(axis=1)),
        (tf.argmin(X), X.argmin(axis=0)),
        (tf.nn.softmax(X), np.exp(X) / np.exp(X).sum(-1, keepdims=True)),
        (tf.matmul(X, X, transpose_b=True), X @ X.T),
        (tf.matmul(X, X, transpose_a=True), X.T @ X),
        (tf.add(1, 2), np.int32(3)),
        (tf.divide(1.0, 4.0), np.float32(0.25)),
    ],
)
def test_functions_give_what_numpy_gives_and_keep_the_dtype(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert ours.dtype == theirs.dtype


# What TensorFlow 2.18 has, without `name` and what shapes a graph.
PARAMETERS = """
add_n: inputs
argmax argmin: input axis output_type
boolean_mask: tensor mask axis
broadcast_to: input shape
cast: x dtype
clip_by_global_norm: t_list clip_norm use_norm
clip_by_norm: t clip_norm axes
clip_by_value: t clip_value_min clip_value_max
concat: values axis
constant: value dtype shape
constant_initializer: value support_partition
debugging.assert_none_equal: x y summarize message
ensure_shape: x shape
expand_dims squeeze: input axis
eye: num_rows num_columns batch_shape dtype
fill: dims value
gather: params indices validate_indices axis batch_dims
gather_nd: params indices batch_dims
identity rank: input
linspace: start stop num axis
math.divide_no_nan math.floordiv math.pow: x y
math.softplus nn.relu: features
matmul: a b transpose_a transpose_b adjoint_a adjoint_b a_is_sparse b_is_sparse output_type
nn.compute_average_loss: per_example_loss sample_weight global_batch_size
nn.softmax nn.log_softmax: logits axis
nn.softmax_cross_entropy_with_logits: labels logits axis
norm: tensor ord axis keepdims
one_hot: indices depth on_value off_value axis dtype
ones zeros: shape dtype
ones_like zeros_like: input dtype
random.normal: shape mean stddev dtype seed
random.uniform: shape minval maxval dtype seed
range: start limit delta dtype
reduce_all reduce_max reduce_mean reduce_sum math.reduce_std: input_tensor axis keepdims
repeat: input repeats axis
reshape: tensor shape
reverse: tensor axis
shape size: input out_type
split: value num_or_size_splits axis num
stack: values axis
tile: input multiples
transpose: a perm conjugate
unstack: value num axis
where: condition x y
"""


@every("line", PARAMETERS.strip().splitlines())
def test_functions_take_the_arguments_of_tensorflow(line):
    names, _, wanted = line.partition(": ")
    for name in names.split():
        ours = inspect.signature(functools.reduce(getattr, name.split("."), tf)).parameters
        assert [word for word in ours if word != "name"] == wanted.split(), name


def test_stacks_of_matrices_are_transposed_each():
    a = np.arange(12.0).reshape(2, 2, 3)
    np.testing.assert_allclose(tf.matmul(a, a, transpose_b=True), a @ a.transpose(0, 2, 1))


def test_functions_take_variables():
    v = tf.Variable(X)
    np.testing.assert_allclose(tf.math.square(v), X * X)
    np.testing.assert_allclose(tf.add(v, 1.0), X + 1)


def test_draws():
    assert tf.random.normal([2, 3]).shape == (2, 3)
    assert (tf.random.normal([9], seed=1) == tf.random.normal([9], seed=1)).all()
    assert (tf.random.normal([9]) != tf.random.normal([9])).any()
    drawn = tf.random.uniform([1000], 2, 5, tf.int32, seed=0)
    assert drawn.dtype == tf.int32
    assert set(drawn.tolist()) == {2, 3, 4}
    drawn = tf.random.uniform([1000], 2.0, 5.0, seed=0)
    assert drawn.dtype == tf.float32
    assert (2 <= drawn.min() < 2.1) and (4.9 < drawn.max() < 5)
    one = tf.random.Generator.from_seed(3)
    assert (one.normal([9]) != one.normal([9])).any()
    assert (
        tf.random.Generator.from_seed(3, alg="philox").normal([], name="draw").dtype == tf.float32
    )
    with pytest.raises(ValueError, match="maxval"):
        tf.random.uniform([1], dtype=tf.int32)
    with pytest.raises(ValueError, match=r"expected a list, such as \[3\], got 3"):
        tf.random.normal(3)
    for of in (one, tf.random.Generator):
        with pytest.raises(
            AttributeError, match=r"no tf\.random\.Generator\.split\. It has normal"
        ):
            of.split(2)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("where", ["before", "scope", "run"])
def test_a_generator_gives_each_replica_numbers_of_its_own(n, where):
    """As TensorFlow 2.18's, on logical CPUs: noise was the same on all replicas here."""

    def program(comm):
        made = tf.random.Generator.from_seed(3)
        strategy = tf.distribute.MirroredStrategy()
        if where == "scope":
            with strategy.scope():
                made = tf.random.Generator.from_seed(3)

        def draw():
            own = tf.random.Generator.from_seed(3) if where == "run" else made
            return own.normal([2]), own.uniform([2]), tf.random.normal([2], seed=3)

        found = [strategy.experimental_local_results(each) for each in strategy.run(draw)]
        assert all((one == found[2][0]).all() for one in found[2])  # a draw with a seed
        return np.ravel(found[:2]).tolist() + made.normal([3]).tolist()

    found = run_ranks(program, n)
    assert found == [found[0]] * n
    assert len({*found[0]}) == 4 * n + 3


def test_what_changes_nothing(capsys):
    with tf.device("/GPU:0"), tf.name_scope("loss") as scope, tf.control_dependencies([1]):
        assert scope == "loss/"
    with tf.init_scope():
        assert tf.executing_eagerly()
    assert tf.no_op() is None
    assert tf.config.experimental_connect_to_cluster("resolver") is None
    tf.print("a", 1, sep="-", summarize=3)
    assert capsys.readouterr() == ("", "a-1\n")
    assert tf.tpu.experimental.initialize_tpu_system("resolver").num_ranks == 1


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_average_loss_is_over_the_global_batch(n):
    losses = np.arange(1.0, 6.0, dtype=np.float32)  # five, so some ranks have fewer, or none

    def program(comm):
        strategy = ms.MirroredStrategy()
        (batch,) = strategy.experimental_distribute_dataset(ms.Dataset(losses).batch(5))
        even = np.full((2,), comm.rank, np.float32)

        def step(mine):
            return (
                tf.nn.compute_average_loss(mine, global_batch_size=5),
                tf.nn.compute_average_loss(mine, sample_weight=2.0, global_batch_size=5),
                tf.nn.compute_average_loss(even),
                tf.nn.scale_regularization_loss(3.0),
            )

        found = strategy.run(step, args=(batch,))
        return [float(strategy.reduce("sum", one, axis=None)) for one in found]

    for found in run_ranks(program, n):
        np.testing.assert_allclose(found, [3.0, 6.0, (n - 1) / 2, 3.0], rtol=1e-6)


def test_the_average_loss_has_its_place():
    assert tf.nn.compute_average_loss(np.zeros((0,), np.float32)) == 0
    with pytest.raises(ValueError, match="no axis"):
        tf.nn.compute_average_loss(1.0)
    with ms.MirroredStrategy().scope(), pytest.raises(RuntimeError, match="cross-replica"):
        tf.nn.compute_average_loss([1.0])
    with ms.MirroredStrategy().scope():  # as there, if nothing of a replica is asked for
        assert tf.nn.compute_average_loss([1.0], global_batch_size=2) == 0.5


def test_sizes_and_weights_of_the_average_loss():
    """As ``nn_loss_scaling_utilities_test.py`` of TensorFlow 2.21 has them."""
    five, share = [1, 2, 3, 4, 5], tf.nn.compute_average_loss
    assert share(five, global_batch_size=10) == 1.5
    assert share(five, global_batch_size=0) == 0.0
    for size, error in ([10], ValueError), (10.0, TypeError), (-1, ValueError), (True, TypeError):
        with pytest.raises(error, match="global_batch_size must be"):
            share(five, global_batch_size=size)
    for weights in (2.0, [2.0], [2.0] * 3, [[2.0]] * 3, np.full(3, 2.0)):
        found = share(np.float32([2, 4, 6]), sample_weight=weights)
        assert (found, found.dtype) == (8.0, np.float32)
    square = np.float32([[1, 2], [3, 4]])
    assert share(square, sample_weight=[1.0, 0.0]) == 1.5  # by rows, not by columns
    assert share(square, sample_weight=[[0.0, 1.0]] * 2) == 3.0
    for weights in ([0.2, 0.8], [[1.0, 2.0]] * 3, [[[1.0]]] * 3):
        with pytest.raises(ValueError):
            share([2.5, 6.2, 5.0], sample_weight=weights)

    def program(comm):
        strategy = ms.MirroredStrategy()
        half = strategy.run(tf.nn.scale_regularization_loss, args=([2, 3],))
        return float(strategy.reduce("sum", half, axis=None))

    assert run_ranks(program, 2) == [5.0, 5.0]  # not 2 * (5 // 2)


def test_operations_by_aggregation():
    of = tf.distribute.ReduceOp.from_variable_aggregation
    assert of(tf.VariableAggregation.SUM) is ms.ReduceOp.SUM
    assert of(tf.VariableAggregation.MEAN) is ms.ReduceOp.MEAN
    for none in (tf.VariableAggregation.NONE, tf.VariableAggregation.ONLY_FIRST_REPLICA):
        with pytest.raises(ValueError, match="Could not convert from"):
            of(none)


@pytest.mark.parametrize(
    ("get", "instead"),
    [
        (lambda: tf.GradientTape, "mpistrat.vjp"),
        (lambda: tf.gradients, "mpistrat.vjp"),
        (lambda: tf.train.Saver, "Checkpoint"),
        (lambda: tf.summary.create_file_writer, "should_save_summary"),
        (lambda: tf.keras.Model, "Models"),
        (lambda: tf.cond, "Python's own"),
        (lambda: tf.config.get_logical_device_configuration, "mpistrat run"),
        (lambda: tf.cumsum, r"numpy\.cumsum"),
        (lambda: tf.linalg.svd, r"numpy\.linalg"),
        (lambda: tf.math.cumsum, r"numpy\.cumsum"),
        (lambda: tf.train.get_checkpoint_state, r"\.checkpoints has"),
        (lambda: tf.train.CheckpointOptions(), "Leave it out"),
        (lambda: tf.data.experimental.unbatch(), "method of the dataset"),
        (lambda: tf.data.experimental.prefetch_to_device("gpu:0"), r"Dataset\.prefetch"),
        (lambda: tf.random.stateless_uniform, r"mpistrat\.random\.stream"),
        (lambda: tf.nn.moments, r"x\.var\(axis\)"),
        (lambda: tf.nonsense, "coming-from"),
        (lambda: tf.distribute.nonsense, r"docs/parity"),
        (lambda: tf.data.TFRecordDataset, "from_files"),
        (lambda: tf.data.Dataset.range(2).ragged_batch, "padded_batch"),
        (lambda: tf.data.Dataset.sample_from_datasets, "from_batches"),
        (lambda: tf.data.experimental.sample_from_datasets, "from_batches"),
        (lambda: tf.data.Dataset.load, "from_files"),
        (lambda: tf.data.Dataset.range(2).window, "from_batches"),
        (lambda: tf.data.Dataset.nonsense, "coming-from"),
        (lambda: tf.RaggedTensor, "dense"),
        (lambda: tf.sparse.from_dense, "dense"),
        (lambda: tf.py_function, "call functions"),
        (lambda: tf.train.ExponentialMovingAverage, "ema=0.999"),
        (lambda: tf.compat.v1.Variable, r"tf\.Variable"),
        (lambda: tf.compat.v1.logging.set_verbosity, "get_logger"),
        (lambda: tf.random_normal_initializer, r"tf\.random\.normal"),
        (lambda: tf.nest.flatten_up_to, "map_structure"),
        (lambda: tf.random.shuffle, r"numpy\.random\.default_rng"),
        (lambda: tf.scatter_nd, r"numpy\.add\.at.*all_gather"),
        (lambda: tf.math.top_k, r"numpy\.argsort"),
        (lambda: tf.nn.l2_normalize, r"numpy\.linalg\.norm"),
        (lambda: tf.nn.dropout, "program's own"),
        (lambda: tf.assert_equal, r"tf\.debugging"),
        (lambda: tf.compat.v1.get_variable, r"tf\.Variable"),
        (lambda: tf.compat.v1.disable_v2_behavior, "without graphs"),
        (lambda: tf.compat.v1.Session, "without graphs"),
        (lambda: tf.compat.v1.distribute.nonsense, r"docs/parity"),
        (lambda: tf.tpu.experimental.embedding, "coming-from"),
    ],
)
def test_names_that_are_missing_say_what_to_use(get, instead):
    with pytest.raises(AttributeError, match=rf"mpistrat\.compat\.tf has no tf\..*{instead}"):
        get()


def spaces(found, path):
    """The modules, and what stands for modules, that can be reached from one."""
    yield path, found
    for name in getattr(found, "__all__", None) or vars(found):
        value = getattr(found, name)
        if not name.startswith("_") and isinstance(value, types.ModuleType | types.SimpleNamespace):
            yield from spaces(value, f"{path}.{name}")


SPACES = dict(spaces(tf, "tf"))


def test_namespaces_are_found():
    assert {"tf.data.experimental", "tf.errors", "tf.distribute.experimental.rpc"} <= set(SPACES)
    assert len(SPACES) > 20


@every("path", SPACES)
def test_every_namespace_says_what_to_use_instead_of_a_missing_name(path):
    advice = r" has no .*\bnonsense\. .*(docs/|numpy|mpistrat\.|[Uu]se|tf\.\w|Devices)"
    with pytest.raises(AttributeError, match=advice):
        SPACES[path].nonsense  # noqa: B018
    assert not hasattr(SPACES[path], "__nonsense__")


@every("path", SPACES)
def test_namespaces_do_not_show_what_makes_their_errors(path):
    makers = ("mpistrat.compat.absent", "mpistrat.compat.absent")
    shown = [
        name
        for name, value in vars(SPACES[path]).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) in makers
        and vars(sys.modules[value.__module__]).get(getattr(value, "__name__", "")) is value
    ]
    assert shown == []


def test_what_tf_data_knows_of_cardinality():
    assert tf.data.experimental.INFINITE_CARDINALITY == tf.data.INFINITE_CARDINALITY == -1
    assert tf.data.experimental.UNKNOWN_CARDINALITY == tf.data.UNKNOWN_CARDINALITY == -2
    of = tf.data.experimental.cardinality
    assert of(tf.data.Dataset.range(5).batch(2)) == 3
    assert of(tf.data.Dataset.range(5).repeat()) == tf.data.experimental.INFINITE_CARDINALITY
    assert of(ms.Dataset(lambda: [])) == tf.data.experimental.UNKNOWN_CARDINALITY
    with pytest.raises(TypeError, match=r"cardinality\(dataset\) needs a dataset, not 3"):
        of(3)


def test_missing_names_are_missing_to_python_too():
    assert not hasattr(tf, "GradientTape")
    with pytest.raises(ImportError):
        from mpistrat.compat.tf import GradientTape  # noqa: F401


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda: tf.data.Dataset.list_files("*.npy"), "from_files"),
    ],
)
def test_sources_that_are_refused_say_what_to_use(call, instead):
    with pytest.raises(ms.RefusedError, match=instead):
        call()


def test_what_the_advice_on_datasets_leads_to():
    """Each way that a row names, against what the method that is missing does in TensorFlow."""
    x, y = np.arange(3), np.arange(3, 5)

    def read(data):
        return [np.asarray(batch).tolist() for batch in data]

    assert read(ms.Dataset(np.concatenate([x, y])).batch(3)) == [[0, 1, 2], [3, 4]]
    both = ms.Dataset.from_batches(lambda: (batch for batch in (x, y)))
    assert read(both.rebatch(4)) == [[0, 1, 2, 3], [4]]
    numbered = tf.data.Dataset.from_tensor_slices((np.arange(len(y)), y)).batch(2)
    assert [[one.tolist() for one in batch] for batch in numbered] == [[[0, 1], [3, 4]]]
    repeated = ms.Dataset.from_batches(lambda: (np.full(i, i) for i in x[1:]))  # flat_map
    assert read(repeated.rebatch(2)) == [[1, 2], [2]]
    wanted = ms.Dataset.from_batches(lambda: itertools.takewhile(lambda b: b[0] < 2, x[:, None]))
    assert read(wanted) == [[0], [1]]  # take_while
    assert next(iter(tf.data.Dataset.from_tensors(7).batch(1))).tolist() == [7]
    strategy = tf.distribute.OneDeviceStrategy("cpu")
    iterator = strategy.make_dataset_iterator(tf.data.Dataset.range(2).batch(2))
    assert next(iterator).tolist() == [0, 1]
