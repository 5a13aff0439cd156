"""What programs ask of the objects that the tf module gives them, as TensorFlow answers it."""

from __future__ import annotations

import copy
import inspect

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.compat import tf
from mpistrat.lockstep.exits import Exits
from mpistrat.testing import run_ranks

DISTRIBUTED = tf.types.experimental.distributed


@pytest.mark.parametrize("n", [1, 2])
def test_variables_of_replicas_count_as_values_of_replicas(n):
    """The classes of TensorFlow 2.21: MirroredVariable, SyncOnReadVariable, ResourceVariable."""

    def program(comm):
        with tf.distribute.MirroredStrategy().scope():
            copies = tf.Variable(1.0)
            sums = tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_READ)
        with tf.distribute.OneDeviceStrategy("cpu").scope():
            one = tf.Variable(1.0)
        kinds = (tf.distribute.DistributedValues, DISTRIBUTED.Mirrored, DISTRIBUTED.PerReplica)
        given = (copies, sums, one, ms.PerReplica(1), ms.Mirrored(1), 1.0)
        return [[isinstance(value, kind) for kind in kinds] for value in given]

    wanted = [
        [True, True, False],
        [True, False, False],
        [False, False, False],
        [True, False, True],
        [True, True, False],
        [False, False, False],
    ]
    assert run_ranks(program, n) == [wanted] * n


STAY = ms.experimental.TerminationConfig(termination_watcher_fn=lambda: False, exit_fn=lambda: None)


class Model:
    """A model as programs write it."""

    def __init__(self, scale):
        self.scale = scale

    @tf.function(reduce_retracing=True)
    def step(self, iterator, *, plus=0):
        """Take a step."""
        return int(self.scale * tf.reduce_sum(next(iterator)) + plus)


@pytest.mark.parametrize("n", [1, 2])
def test_data_that_end_in_a_function_are_out_of_range_to_its_caller(n):
    def program(comm):
        strategy = tf.distribute.MirroredStrategy()
        data = tf.data.Dataset.range(6).batch(3)
        distributed = strategy.experimental_distribute_dataset(data)

        @tf.function
        def total(iterator):
            local = strategy.run(tf.function(tf.reduce_sum), args=(next(iterator),))
            return int(strategy.reduce("SUM", local, axis=None))

        @tf.function
        def all_of(dataset):
            return sum(int(strategy.reduce("SUM", batch, axis=0)) for batch in dataset)

        found = []
        for begin, step in (
            (lambda: iter(distributed), total),
            (lambda: iter(data), Model(2).step),
        ):
            for caught in (tf.errors.OutOfRangeError, StopIteration):
                iterator = begin()
                found += [step(iterator), step(iterator)]
                with pytest.raises(caught):
                    step(iterator)
        return found, all_of(distributed)

    assert run_ranks(program, n) == [([3, 12] * 2 + [6, 24] * 2, 15)] * n


def test_what_a_function_is_asked_for():
    def plain(x, y=2):
        """Add."""
        return x + y

    made = tf.function(plain)
    assert made.python_function is plain
    assert (made(1), made(1, y=3), made.get_concrete_function(tf.TensorSpec([]))(1)) == (3, 4, 3)
    assert (made.__name__, inspect.signature(made)) == ("plain", inspect.signature(plain))
    assert made.__doc__ == "Add."
    assert copy.deepcopy(made)(1) == 3
    model, spec = Model(3), tf.TensorSpec([2])
    assert model.step.get_concrete_function(spec)(iter([1]), plus=1) == 4
    assert model.step.__name__ == "step" and Model.step(model, iter([2])) == 6
    with pytest.raises(AttributeError, match="nonsense"):
        made.nonsense  # noqa: B018


@every(
    ("ask", "instead"),
    [
        (lambda x: tf.reduce_sum(x).numpy(), r"float\(x\)"),
        (lambda x: x.numpy(), r"np\.asarray\(x\)"),
        (lambda x: x.get_shape(), r"x\.shape"),
        (lambda x: x.shape.as_list(), r"list\(shape\)"),
        (lambda x: x.shape.rank, r"len\(shape\)"),
        (lambda x: x.dtype.is_floating, r"dtype\.kind"),
        (lambda x: tf.int32.as_numpy_dtype, r"dtype\.type"),
        (lambda x: tf.Variable(x)[0].assign([1, 2, 3]), r"scatter_update"),
        (lambda x: tf.Variable(x)[0, 0].assign_add(1), r"scatter_update"),
        (lambda x: tf.Variable(x).gather_nd([[0]]), r"v\[rows\]"),
        (lambda x: tf.Variable(x).initialized_value(), r"v\.numpy\(\)"),
    ],
)
def test_what_only_tensors_of_tensorflow_have_says_what_to_use(ask, instead):
    def program(comm):
        strategy = tf.distribute.MirroredStrategy()
        ways = [lambda *x: strategy.run(ask, args=x), tf.function(ask)]
        for way in [*ways, lambda *x: strategy.run(tf.function(ask), args=x)]:
            with pytest.raises(AttributeError, match=rf"here: use .*{instead}") as told:
                way(tf.ones([2, 3]))
            assert str(told.value).count("here: use") == 1
            assert told.value.name is None  # of which Python would say: Did you mean
        with pytest.raises(AttributeError, match=instead), strategy.scope():
            ask(tf.ones([2, 3]))
        with pytest.raises(AttributeError, match=r"'nonsense'$"):
            strategy.run(lambda: tf.ones([]).nonsense)

    run_ranks(program, 2)


def test_so_does_what_ends_a_program():
    ends = Exits()
    for ask, instead in (
        (lambda: tf.Variable([1.0, 2.0])[0].assign(3.0), "scatter_update"),
        (lambda: tf.reduce_sum([1.0]).numpy(), "float(x)"),
    ):
        with pytest.raises(AttributeError, match=r"attribute '[a-z]+'$") as told:
            ask()
        ends.note_uncaught(told.type, told.value, told.tb)
        assert "here: use " in str(ends.failure) and instead in str(ends.failure)
    ends.note_uncaught(KeyError, KeyError("numpy"), None)
    assert str(ends.failure) == "'numpy'"


@every("name", [*(f"scatter_nd_{how}" for how in ("add", "max", "min", "sub", "update")), "batch_"])
def test_rows_are_written_by_number(name):
    name = "batch_scatter_update" if name == "batch_" else name
    with pytest.raises(NotImplementedError, match=rf"^{name} of 'v:0' is refused.*IndexedSlices"):
        getattr(tf.Variable([1.0, 2.0], name="v"), name)([[0]], [1.0])


@every("wrong", [{"dtype": [1]}, {"shape": "a"}, {"shape": [None]}, {"constraint": abs}])
def test_a_variable_that_one_rank_refuses_is_an_error_on_all(wrong):
    def rank(comm):
        with tf.distribute.MirroredStrategy().scope():
            with pytest.raises((TypeError, NotImplementedError)) as error:
                tf.Variable(1.0, **(wrong if comm.rank == 1 else {}))
            assert isinstance(error.value, ms.RemoteError) == (comm.rank == 0)
            return tf.Variable(2.0).numpy()

    assert run_ranks(rank, 2) == [2, 2]


def test_none_is_the_synchronization_and_aggregation_of_tensorflow():
    with tf.distribute.MirroredStrategy().scope():
        v = tf.Variable(1.0, synchronization=None, aggregation=None)
    assert v.synchronization in (
        tf.VariableSynchronization.AUTO,
        tf.VariableSynchronization.ON_WRITE,
    )
    assert v.aggregation is tf.VariableAggregation.NONE


@every("method", ["save", "write", "restore", "read"])
def test_options_of_a_checkpoint_may_stand_second(method, tmp_path):
    v = tf.Variable(1.0)
    path = tf.train.Checkpoint(v=v).save(tmp_path / "a")
    assert getattr(tf.train.Checkpoint(v=v), method)(path, None)
    for second in (True, object()):  # `partial` is given by name
        with pytest.raises(NotImplementedError, match=r"\(options=\) is refused: leave it out"):
            getattr(tf.train.Checkpoint(v=v), method)(path, second)
    with pytest.raises(TypeError, match="background must be True or False, got 1"):
        tf.train.CheckpointManager(tf.train.Checkpoint(v=v), tmp_path, 3, background=1)
    if method in ("restore", "read"):
        with pytest.raises(TypeError, match=r"\(partial\) must be True or False, got 'no'"):
            getattr(tf.train.Checkpoint(v=v), method)(path, partial="no")


def test_an_integer_is_a_shape_of_one_size():
    x = tf.ones([2, 3])
    assert tf.reshape(x, -1).shape == tf.reshape(x, np.int32(6)).shape == (6,)
    assert tf.ensure_shape(x[0], 3).shape == tf.fill(tf.constant(3), 1.0).shape == (3,)
    assert tf.Variable(x[0], shape=3).shape == tf.TensorSpec(3).shape == (3,)
    for wrong in (
        lambda: tf.reshape(x, [2.0, 3]),
        lambda: tf.TensorSpec("a"),
        lambda: tf.fill(1.5, 2),
    ):
        with pytest.raises(TypeError, match="expected a shape, such as"):
            wrong()
    for wrong in (
        lambda: tf.broadcast_to(x, 6),
        lambda: tf.tile(x, 2),
        lambda: tf.random.normal(3),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="expected a list, such as"):
            wrong()


@every(
    "call",
    [
        lambda **wrong: tf.function(**wrong)(print),
        lambda **wrong: tf.group(1, **wrong),
        lambda **wrong: tf.debugging.assert_near(1.0, 1.0, **wrong),
    ],
)
def test_an_argument_that_tensorflow_does_not_know_is_an_error(call):
    with pytest.raises(TypeError, match="'foo'"):
        call(foo=1)


def test_how_a_function_is_traced_has_no_effect():
    how = dict(input_signature=[tf.TensorSpec([])], autograph=False, jit_compile=True)
    assert tf.function(reduce_retracing=True, **how)(lambda x: x + 1)(1) == 2


def test_variables_are_keys_by_reference():
    v, w = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    named = {v.ref(): "v", w.ref(): "w"}
    assert (named[v.ref()], named[w.ref()]) == ("v", "w")
    assert v.ref().deref() is v and v.ref() == v.ref() != w.ref()
    assert v.ref() != "v" and len({v.ref(), v.ref(), w.ref()}) == 2
    assert repr(v.ref()) == f"<Reference to {v!r}>"
    assert v.get_shape() == (2,) and v.constraint is None


def test_options_of_datasets_that_change_speed_alone():
    options = tf.data.Options()
    options.deterministic = options.experimental_deterministic = False
    options.threading.private_threadpool_size = 8
    options.experimental_threading.max_intra_op_parallelism = 1
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = True
    options.threading = tf.data.ThreadingOptions()
    options.experimental_distribute.num_devices = 2
    off = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = off
    data = tf.data.Dataset.range(4).batch(2).with_options(options)
    assert data._policy is data.options().experimental_distribute.auto_shard_policy is off
    assert [batch.tolist() for batch in data] == [[0, 1], [2, 3]]
    data.options().deterministic = True  # as TensorFlow's own may be changed and given again
    assert copy.deepcopy(options).experimental_distribute.auto_shard_policy is off
    assert copy.deepcopy(options) == options != tf.data.Options() == tf.data.Options()
    other = copy.deepcopy(options)
    other.threading.private_threadpool_size = 4
    assert other != options != 5
    other = copy.deepcopy(options)
    other.experimental_distribute.num_devices = 3
    assert other != options
    assert ms.DatasetOptions() == ms.DatasetOptions()


@pytest.mark.parametrize(
    ("part", "name", "there"),
    [
        ("Options", "auto_shard_policy", "experimental_distribute"),
        ("Options", "determinstic", "deterministic"),
        ("Options.threading", "private_pool", "private_threadpool_size"),
        ("Options.autotune", "budget", "cpu_budget"),
        ("Options.experimental_optimization", "fusion", "map_fusion"),
    ],
)
def test_options_that_are_not_there_say_what_is(part, name, there):
    found = tf.data.Options()
    for attribute in part.split(".")[1:]:
        found = getattr(found, attribute)
    told = rf"^tf\.data\.{part} has no {name}\. It has .*{there}"
    with pytest.raises(AttributeError, match=told):
        setattr(found, name, 1)
    with pytest.raises(AttributeError, match=told):
        getattr(found, name)


def test_the_save_counter_is_read_as_a_variable(tmp_path):
    saved = tf.train.Checkpoint(v=tf.Variable(1.0))
    manager = tf.train.CheckpointManager(saved, tmp_path, max_to_keep=2)
    manager.save()
    path = saved.save(tmp_path / "ckpt")
    other = tf.train.Checkpoint(v=tf.Variable(0.0))
    other.restore(path).assert_consumed()
    assert isinstance(other, ms.Checkpoint)
    assert [int(one.save_counter) for one in (saved, other)] == [2, 2]
    assert (other.save_counter.numpy(), f"{other.save_counter:03d}") == (np.int64(2), "002")
    assert isinstance(other.save_counter.numpy(), np.integer)
    with pytest.raises(AttributeError, match=r"tf\.train\.Checkpoint\.sync\. Leave it out"):
        other.sync()
    with pytest.raises(AttributeError, match=r"Checkpoint\.model\. .* is given to Checkpoint\("):
        other.model  # noqa: B018
    with pytest.raises(AttributeError, match=r"no assert_all\. It has assert_consumed, "):
        other.restore(path).assert_all()


@pytest.mark.parametrize("n", [1, 2])
def test_a_variable_that_is_attached_after_restore(n, tmp_path):
    """As TensorFlow's guide of checkpoints shows it ("Delayed restorations")."""

    def program(comm):
        with tf.distribute.MirroredStrategy().scope():
            path = tf.train.Checkpoint(v=tf.Variable([1.0, 2.0])).save(tmp_path / "ckpt")
            later = tf.train.Checkpoint()
            status = later.restore(path, options=None)
            with pytest.raises(AssertionError, match=r"nothing of .* was restored"):
                status.assert_nontrivial_match()
            later.v = tf.Variable([0.0, 0.0])
            assert status.assert_nontrivial_match() is status.assert_consumed() is status
            assert status.run_restore_ops() is status.initialize_or_restore() is None
            assert later.save_counter.numpy() == 1
            return later.v.numpy().tolist()

    assert run_ranks(program, n) == [[1.0, 2.0]] * n


@pytest.mark.parametrize("n", [1, 2])
def test_a_manager_saves_at_every_so_many_steps(n, tmp_path):
    """Which saves are made is what TensorFlow 2.18 recorded; none at a step that was saved."""

    def program(comm):
        with tf.distribute.MirroredStrategy().scope():
            step = tf.Variable(0, dtype=tf.int64)
        saved = tf.train.Checkpoint(step=step)

        def managed(**more):
            return tf.train.CheckpointManager(saved, tmp_path, 5, **more)

        manager = managed(step_counter=step, checkpoint_interval=3)
        made = []
        for _ in range(7):
            step.assign_add(1)
            made.append(manager.save() is not None)
        made.append(manager.save(check_interval=False) is not None)
        step.assign_add(1)
        made += [manager.save(check_interval=check) is not None for check in (True, False)]
        again = managed(step_counter=step, checkpoint_interval=3)
        again.restore_or_initialize()
        made += [again.save() is not None, again.checkpoint_interval == 3]
        handler = tf.distribute.experimental.PreemptionCheckpointHandler(
            None, again, termination_config=STAY
        )
        count = len(again.checkpoints)
        handler._notice.record("a test")  # is not a step that the interval passes over
        handler.save_checkpoint_if_preempted()
        made.append(len(again.checkpoints) == count + 1)
        with pytest.raises(ms.RefusedError, match=r"checkpoint\.save"):
            managed(keep_checkpoint_every_n_hours=1)
        with pytest.raises(ValueError, match="step_counter"):
            managed(checkpoint_interval=3)
        return made

    wanted = [True, False, False, True, False, False, True, False, False, True, False, True, True]
    assert run_ranks(program, n) == [wanted] * n


def test_dtypes_and_loggers():
    """Beside those of arrays they are keys of dicts, in sets, and the same objects."""
    for dtype in (tf.float32, tf.bool, tf.int64, tf.complex64, tf.TensorSpec([]).dtype):
        made = tf.zeros([2], dtype)
        assert {dtype: dtype.name}[made.dtype] == made.dtype.name == tf.as_dtype(dtype).name
        assert made.dtype in {dtype} and made.dtype is dtype == dtype.name
        assert isinstance(dtype, tf.DType) and tf.DType is tf.dtypes.DType
    assert tf.as_dtype("int32") == tf.as_dtype(tf.int32) == tf.dtypes.as_dtype(np.int32) == tf.int32
    assert tf.dtypes.bool is tf.bool and tf.dtypes.float16 is tf.float16
    with pytest.raises(TypeError, match="as_dtype"):
        tf.as_dtype("no")
    assert tf.get_logger().name == "tensorflow"


@pytest.mark.parametrize("name", ["io", "gfile"])
def test_files_are_those_of_python(name):
    with pytest.raises(AttributeError, match=r"os\.makedirs\(path, exist_ok=True\)"):
        getattr(tf, name).gfile.makedirs("a")
