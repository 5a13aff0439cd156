"""Names that are missing or refused, in two tables, with what to use instead.

`REFUSED` has names of tf.distribute without a meaning where every rank runs the same program. They
exist, so that importing them and asking ``isinstance`` work; using one raises `RefusedError`.
`INSTEAD` has other names of ``tf.*``, which do not exist: asking for one is an AttributeError. A
further name is one row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpistrat.errors import RefusedError

__all__ = ["INSTEAD", "REFUSED", "Advised", "Names", "ParameterServerStrategy", "Refusal"]
__all__ += ["Server", "absent", "absent_from", "refused", "refused_in", "refusing"]

_PARITY = "docs/parity.md lists every name of tf.distribute."
_ADVICE = (  # what to use, and instead of which names below tf.; names that begin so share it
    (
        "Nothing here differentiates: write the backward pass (mpistrat.vjp for gradients through "
        "collectives), or take gradients with an autodiff library (torch, JAX, autograd) on the "
        "arrays of one replica and give them to all_reduce.",
        "GradientTape gradients custom_gradient stop_gradient",
    ),
    (
        "tf.train.Checkpoint saves variables, and docs/concepts.md has a program that does.",
        "train.Saver saved_model compat.v1.train",
    ),
    ("Leave it out: files are written alike everywhere.", "train.CheckpointOptions"),
    (
        "What is saved by a name is given to Checkpoint(name=...), or set as an attribute.",
        "train.Checkpoint",
    ),
    ("Leave it out: when save() or restore() returns, all is done.", "train.Checkpoint.sync"),
    (
        "tf.train.CheckpointManager(...).checkpoints has the paths, the oldest first.",
        "train.get_checkpoint_state",
    ),
    (
        "Write numbers with any logger where strategy.extended.should_save_summary is true.",
        "summary",
    ),
    (
        "Models, layers, losses and optimizers are the program's own; this is for loops without.",
        "keras optimizers losses metrics initializers Module estimator compat.v1.layers",
    ),
    (
        "Use tf.Variable(initial_value, name=...) in strategy.scope().",
        "compat.v1.get_variable compat.v1.Variable variable_creator_scope",
    ),
    ("Variables have their values from the start.", "compat.v1.global_variables_initializer"),
    (
        "Everything runs at once, without graphs and sessions: use Python's own if, while and for, "
        "and call functions.",
        "cond case switch_case while_loop map_fn vectorized_map scan autograph Graph Session "
        "TensorArray py_function numpy_function compat.v1.py_func compat.v1.Session "
        "compat.v1.placeholder compat.v1.disable_v2_behavior compat.v1.disable_eager_execution",
    ),
    (
        "Devices are labels. `mpistrat run -n N program.py` starts N ranks, one replica each; "
        "strategy.num_replicas_in_sync is their number.",
        "config",
    ),
    ("It is tf.config.experimental.set_memory_growth.", "config.set_memory_growth"),
    ("A shape is a tuple of integers.", "TensorShape"),
    (
        "Arrays are dense: pad rows to one length, as Dataset.padded_batch does; the gradient of "
        "some rows is a tf.IndexedSlices.",
        "RaggedTensor RaggedTensorSpec SparseTensor SparseTensorSpec ragged sparse",
    ),
    (
        "Optimizers of mpistrat.optim keep one with ema=0.999. For other variables write "
        "average.assign(decay * average + (1 - decay) * variable) after each step.",
        "train.ExponentialMovingAverage",
    ),
    ("Use Python's logging; tf.get_logger() is a logger.", "compat.v1.logging"),
    (
        "Draw the value and give it to tf.Variable: tf.random.normal(shape, stddev=0.05, seed=7).",
        "random_normal_initializer random_uniform_initializer",
    ),
    (
        "Dataset.from_batches(function) and map take any function of NumPy that makes batches.",
        "image lookup feature_column queue",
    ),
    (
        "Seed each draw, tf.random.normal(shape, seed=7), or all of them, tf.random.set_seed(7); "
        "or keep a tf.random.Generator.from_seed(7).",
        "random",
    ),
    (
        "mpistrat.random.stream(seed, name) has numbers by example and step, without state.",
        "random.stateless_normal random.stateless_uniform",
    ),
    (
        "It has normal and uniform. In replica code each replica has numbers of its own; for other "
        "draws use a numpy.random.default_rng(seed), which a checkpoint saves, too.",
        "random.Generator",
    ),
    ("Give the generator around, or call tf.random.set_seed(7).", "random.get_global_generator"),
    (
        "Leave it out: what can be known of the number of elements is known.",
        "data.experimental.assert_cardinality",
    ),
    ("Use x.mean(axis) and x.var(axis) of the array.", "nn.moments"),
    ("Use numpy.linalg on the arrays.", "linalg"),
    ("Use numpy.fft on the arrays.", "signal"),
    ("Use numpy.load, h5py or zarr; Dataset.from_files reads a list of files.", "io"),
    (
        "mpistrat.Dataset.from_files(sorted(paths), read) takes a list of files and a function "
        "that reads one, and `rebatch` makes batches of their rows.",
        "data.TFRecordDataset data.TextLineDataset data.FixedLengthRecordDataset "
        "data.experimental.CsvDataset data.experimental.make_csv_dataset data.Dataset.interleave "
        "data.Dataset.list_files data.Dataset.load",
    ),
    (
        "Let a function yield batches of what it makes of the elements, and give it to "
        "mpistrat.Dataset.from_batches(function); `rebatch` makes batches of another size.",
        "data.Dataset.scan data.Dataset.window data.Dataset.random "
        "data.Dataset.group_by_window data.Dataset.rejection_resample data.Dataset.snapshot",
    ),
    (
        "Let a function yield a batch of one or the other, with a seed that is the same on all "
        "ranks, and use mpistrat.Dataset.from_batches(function).",
        "data.Dataset.sample_from_datasets data.Dataset.choose_from_datasets "
        "data.experimental.sample_from_datasets data.experimental.choose_from_datasets",
    ),
    ("Use numpy.unique before the dataset.", "data.Dataset.unique"),
    (
        "Use range(start, stop, step), with a stop; a function that yields batches needs none: "
        "mpistrat.Dataset.from_batches(function).",
        "data.Dataset.counter",
    ),
    (
        "Use iter(dataset), or a `for` loop; distributed, strategy.make_dataset_iterator(dataset).",
        "data.Dataset.make_one_shot_iterator data.Dataset.make_initializable_iterator "
        "data.Iterator compat.v1.data.make_one_shot_iterator",
    ),
    (
        "Arrays are dense: padded_batch(batch_size, padded_shapes) makes rows of one length.",
        "data.Dataset.ragged_batch data.Dataset.sparse_batch "
        "data.Dataset.bucket_by_sequence_length",
    ),
    ("Save the arrays: numpy.save, h5py or zarr.", "data.Dataset.save data.experimental.save"),
    ("dataset.element_spec has shapes and dtypes.", "data.DatasetSpec data.Dataset.output_types"),
    (
        "It is a method of the dataset, by this name or as repeat, shuffle, map and batch.",
        "data.experimental.enumerate_dataset data.experimental.map_and_batch "
        "data.experimental.shuffle_and_repeat data.experimental.take_while "
        "data.experimental.unbatch",
    ),
    (
        "Leave it out: arrays are in host memory. Dataset.prefetch(n) reads ahead.",
        "data.experimental.copy_to_device data.experimental.prefetch_to_device",
    ),
    ("docs/coming-from.md has the table of what datasets here can do.", "data"),
    ("Strings cannot be sent between ranks; give them numbers.", "string"),
    ("Strings cannot be sent between ranks; use Python's.", "strings"),
    ("It is ml_dtypes.bfloat16: pip install ml_dtypes.", "bfloat16"),
    ("Use numpy.testing, and MPISTRAT_NAN=raise for NaN.", "debugging"),
    ("Use pytest, and mpistrat.testing.run_ranks.", "test"),
    (_PARITY, "distribute compat.v1.distribute"),
    ("mpistrat.compat.tf.nest has flatten, map_structure, pack_sequence_as and two more.", "nest"),
)
INSTEAD = {f"tf.{name}": advice for advice, names in _ADVICE for name in names.split()}


class Refusal(NamedTuple):
    """Why a name has no meaning here, and what to use instead.

    Attributes:
      why: The reason, as half a sentence.
      instead: What to use, as sentences.
      function: The name is a function, not a class.
      static: Methods that programs call on the class.
    """

    why: str
    instead: str
    function: bool = False
    static: tuple[str, ...] = ()


_APART = (
    "workers would change variables that live on servers, each at its own time, and here every "
    "rank holds a copy that all ranks change together"
)
_WAITS = "it gives work to processes that wait for it, and here every rank runs the same program"
_LAUNCHED = "ranks are started by an MPI launcher and talk through MPI, so there is no server"
_PER_WORKER = Refusal(
    _WAITS,
    "A value of each replica is a PerReplica; "
    "strategy.experimental_distribute_values_from_function makes one.",
)
_RPC = Refusal(
    _LAUNCHED, "Use mpi4py's messages, or a library of remote calls.", static=("create",)
)

REFUSED: dict[str, Refusal] = {  # by path below mpistrat
    "ParameterServerStrategy": Refusal(
        _APART, "Use MultiWorkerMirroredStrategy or MirroredStrategy."
    ),
    "Server": Refusal(
        _LAUNCHED,
        "Start the program with `mpistrat run -n N program.py`; for TensorFlow's own servers "
        "cluster_resolver.write_tf_config names the ranks.",
        static=("create_local_server",),
    ),
    "coordinator.ClusterCoordinator": Refusal(
        _WAITS,
        "Let every rank call strategy.run. Tasks that do not depend on one another suit "
        "mpi4py.futures.MPIPoolExecutor.",
    ),
    "coordinator.PerWorkerValue": _PER_WORKER,
    "coordinator.RemoteValue": Refusal(_WAITS, "strategy.run returns the values themselves."),
    "coordinator.experimental_get_current_worker_index": Refusal(
        _WAITS, "Use get_replica_context().replica_id_in_sync_group.", function=True
    ),
    "experimental.coordinator.PerWorkerValues": _PER_WORKER,
    "experimental.rpc.Server": _RPC,
    "experimental.rpc.Client": _RPC,
}


def refusing(path: str, text: str = "") -> Callable[..., NoReturn]:
    """Return a function that raises `RefusedError`.

    Args:
      path: Its dotted name.
      text: What the error says; empty for what `absent` says of the name.

    Raises:
      RefusedError: What is returned is called.
    """
    where, _, name = path.rpartition(".")
    text = text or str(absent(where, name))

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RefusedError(text)

    refuse.__doc__ = f"{text}\n\nRaises:\n  RefusedError: It is used.\n"
    refuse.__name__ = refuse.__qualname__ = name
    return refuse


@functools.cache
def refused(path: str) -> Any:
    """Return what stands for a refused name: a class or function that raises when it is used.

    Args:
      path: A key of `REFUSED`.

    Raises:
      KeyError: The table has no such row.

    Example:
      >>> try:
      ...     refused("Server").create_local_server()
      ... except RefusedError as error:
      ...     print(str(error)[:26])
      mpistrat.Server is refused
    """
    row = REFUSED[path]
    full = f"mpistrat.{path}"
    where, _, name = full.rpartition(".")
    refuse = refusing(full, f"{full} is refused: {row.why}. {row.instead}")
    refuse.__module__ = where
    if row.function:
        return refuse
    facts = {"__module__": where, "__doc__": refuse.__doc__, "__new__": refuse}
    return type(name, (), {**facts, **dict.fromkeys(row.static, staticmethod(refuse))})


def refused_in(where: str) -> dict[str, Any]:
    """Return what stands for the refused names of a module, by name.

    Args:
      where: The module, by its path below mpistrat, such as ``coordinator``.
    """
    parts = {path: path.rpartition(".") for path in REFUSED}
    return {name: refused(path) for path, (home, _, name) in parts.items() if home == where}


def absent(where: str, name: str) -> AttributeError:
    """Return the error that says what to use instead of a name.

    Args:
      where: The module that was asked, such as ``tf.train`` or ``mpistrat.coordinator``.
      name: The name that it does not have.

    Example:
      >>> print(absent("tf", "TensorShape"))
      mpistrat.compat.tf has no tf.TensorShape. A shape is a tuple of integers.
    """
    if name.startswith("__"):  # Python itself looks for these
        return AttributeError(f"module {where!r} has no attribute {name!r}")
    if where.startswith("mpistrat"):
        return AttributeError(f"{where} has no {name}. {_PARITY}")
    path = f"{where}.{name}"
    found, rest = INSTEAD.get(path), path
    while found is None and "." in rest:
        rest = rest.rpartition(".")[0]
        found = INSTEAD.get(rest)
    if found is None and callable(getattr(np, name, None)):
        found = f"Tensors are NumPy arrays: numpy.{name} takes them."
    found = found or (
        "It has the few names that programs for tf.distribute without models need; "
        "docs/coming-from.md lists them."
    )
    return AttributeError(f"mpistrat.compat.tf has no {path}. {found}")


def absent_from(where: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module; its error is that of `absent`.

    Args:
      where: What the module stands for, such as ``tf.data``.

    Raises:
      AttributeError: What is returned is called, as Python does for a name that is not there.
    """

    def __getattr__(name: str) -> Any:
        raise absent(where, name)

    return __getattr__


class Advised(type):
    """A metaclass: what neither the class nor its instances have says what to use instead.

    The class has a text ``_where``: what it is called there.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **more: Any) -> Any:
        """Make the class, whose instances say the same."""
        made: Any = super().__new__(cls, name, bases, body, **more)
        made.__getattr__ = lambda self, name: cls.__getattr__(made, name)
        return made

    def __getattr__(cls, name: str) -> Any:
        """Raise an AttributeError that says what to use instead of `name`."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise absent(cls._where, name)


class Names(SimpleNamespace):
    """Some names of a module of TensorFlow; other names raise an error with a replacement.

    Args:
      where: What the module is called there.
      names: The names that there are.

    Example:
      >>> Names("tf.train", step=1).step
      1
    """

    def __init__(self, where: str, /, **names: Any):
        """Create the namespace."""
        super().__init__(**names)
        vars(self)["_where"] = where

    def __getattr__(self, name: str) -> Any:
        """Raise an AttributeError that says what to use instead of `name`."""
        raise absent(vars(self).get("_where", "tf"), name)


ParameterServerStrategy = refused("ParameterServerStrategy")
Server = refused("Server")
