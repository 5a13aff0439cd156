"""Advice for names of TensorFlow and other libraries that do not exist here: one table.

A further name is one row. Names that begin with the name of a row share its advice, where a module
or class is asked for them. Rows of tensors, variables, shapes, dtypes and replica contexts, which
are no classes of this library, are looked up when an AttributeError leaves a scope: see
`explain_program_error`. `refuse_name` is for strategies and replica contexts.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import FrameType
from typing import Any

import numpy as np

from mpistrat.variables.kinds import DistributedVariable

__all__ = [
    "ADVICE_BY_NAME",
    "CONTEXT_REPLACEMENTS",
    "PARITY_ADVICE",
    "STRATEGY_REPLACEMENTS",
    "explain_program_error",
    "refuse_name",
]


PARITY_ADVICE = "docs/parity.md lists every name of tf.distribute."
_ADVICE_ROWS = (  # the advice, and the names below tf. that it is for
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
    (
        "Leave it out: when save() or restore() returns, all is done.",
        "train.Checkpoint.sync train.CheckpointManager.sync",
    ),
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
        "compat.v1.placeholder compat.v1.disable_v2_behavior compat.v1.disable_eager_execution "
        "foldl foldr",
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
        "It has normal, uniform and Generator; for other draws, and for permutations, use a "
        "numpy.random.default_rng(seed), which a checkpoint saves, too.",
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
    (
        "Write x / numpy.linalg.norm(x, axis=axis, keepdims=True).",
        "math.l2_normalize nn.l2_normalize",
    ),
    ("Use numpy.linalg, numpy.diagonal or numpy.trace on the arrays.", "linalg"),
    (
        "Write to an array, x[tuple(indices.T)] = updates, or add by numpy.add.at(x, "
        "tuple(indices.T), updates). For the rows of all replicas call context.all_gather.",
        "scatter_nd tensor_scatter_nd_update tensor_scatter_nd_add tensor_scatter_nd_sub",
    ),
    ("Use numpy.add.at(zeros, ids, x).", "math.segment_sum math.unsorted_segment_sum"),
    (
        "Use numpy.argsort(-x, axis=-1, kind='stable')[..., :k].",
        "math.top_k math.in_top_k nn.top_k",
    ),
    ("mpistrat.metrics.Confusion counts it over all replicas.", "math.confusion_matrix"),
    ("Write x[start:stop].", "slice strided_slice"),
    ("Use tf.gather(table, ids).", "nn.embedding_lookup"),
    (
        "It has losses, cross entropies and activations, which docs/coming-from.md lists; layers "
        "are the program's own.",
        "nn",
    ),
    ("It is in tf.debugging.", "assert_equal assert_greater assert_less assert_rank"),
    ("Use a profiler of Python, such as cProfile, on each rank.", "profiler"),
    ("Use numpy.fft on the arrays.", "signal"),
    (
        "Use numpy.load, h5py or zarr; Dataset.from_files reads a list of files. For tf.io.gfile "
        "use Python: os.makedirs(path, exist_ok=True), os.path.exists, os.listdir, glob.glob, "
        "shutil.rmtree and open.",
        "io gfile compat.v1.gfile",
    ),
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
    ("Use the array itself, np.asarray(x), or float(x) of a number.", "Tensor.numpy"),
    ("Use the array itself.", "Tensor.eval"),
    ("Use x.shape.", "Tensor.get_shape"),
    ("Use tf.ensure_shape(x, shape), which checks it.", "Tensor.set_shape"),
    ("Use id(x).", "Tensor.ref Tensor.experimental_ref"),
    (
        "Use v.scatter_update(tf.IndexedSlices(rows, indices)) of the variable, or "
        "v.assign(array).",
        "Tensor.assign Tensor.assign_add Tensor.assign_sub",
    ),
    ("Use v.numpy().", "Variable.eval Variable.initial_value Variable.initialized_value"),
    ("Use v.assign(array).", "Variable.load"),
    ("Use v.assign_add(1).", "Variable.count_up_to"),
    ("Use v[rows], or tf.gather_nd(v, indices).", "Variable.gather_nd"),
    ("Use v[rows].", "Variable.sparse_read"),
    ("Use v.shape, which never changes.", "Variable.set_shape"),
    ("Use v.ref().", "Variable.experimental_ref"),
    (
        "Use isinstance(v, tf.distribute.DistributedValues).",
        "Variable.is_distributed_variable",
    ),
    ("Use list(shape).", "TensorShape.as_list"),
    ("Use shape.", "TensorShape.dims"),
    ("Use True.", "TensorShape.is_fully_defined"),
    ("Use len(shape).", "TensorShape.ndims TensorShape.rank"),
    ("Use math.prod(shape).", "TensorShape.num_elements"),
    ("Use dtype.type.", "DType.as_numpy_dtype"),
    ("Use dtype.", "DType.base_dtype"),
    ('Use dtype.kind == "b".', "DType.is_bool"),
    ('Use dtype.kind == "c".', "DType.is_complex"),
    ('Use dtype.kind in "fV".', "DType.is_floating"),
    ('Use dtype.kind in "iu".', "DType.is_integer"),
    ('Use dtype.kind == "u".', "DType.is_unsigned"),
    ("Use np.finfo(dtype), or np.iinfo(dtype) of integers.", "DType.max DType.min"),
    ("Use dtype.itemsize.", "DType.size"),
    ("Use strategy.gather(...).", "distribute.ReplicaContext.all_gather"),
    (
        "Use strategy.all_reduce(...) or strategy.reduce(...).",
        "distribute.ReplicaContext.all_reduce",
    ),
    ("Use the function itself.", "distribute.ReplicaContext.merge_call"),
    (
        "Use strategy.num_replicas_in_sync.",
        "distribute.ReplicaContext.num_replicas_in_sync",
    ),
    ("Use strategy.rank.", "distribute.ReplicaContext.replica_id_in_sync_group"),
    (PARITY_ADVICE, "distribute compat.v1.distribute"),
    ("mpistrat.compat.tf.nest has flatten, map_structure, pack_sequence_as and two more.", "nest"),
)
ADVICE_BY_NAME = {f"tf.{name}": advice for advice, names in _ADVICE_ROWS for name in names.split()}

# Names that other libraries have for members of strategies and replica contexts.
STRATEGY_REPLACEMENTS = {
    **dict.fromkeys(
        ("world_size", "num_replicas", "num_ranks", "Get_size"), "strategy.num_replicas_in_sync"
    ),
    **dict.fromkeys(
        ("replica_id", "replica_id_in_sync_group", "get_rank", "Get_rank"), "strategy.rank"
    ),
    **dict.fromkeys(("is_main_process", "is_master"), "strategy.is_chief"),
    **dict.fromkeys(("barrier", "Barrier"), "strategy.group(None), which waits for all ranks"),
    **dict.fromkeys(("bcast", "Bcast"), "strategy.broadcast(tree)"),
    **dict.fromkeys(("allreduce", "Allreduce"), 'strategy.all_reduce("sum", value)'),
    **dict.fromkeys(("allgather", "Allgather"), "strategy.gather(value, axis)"),
    "merge_call": "the function itself, as this is cross-replica code",
}
CONTEXT_REPLACEMENTS = {
    **dict.fromkeys(
        ("size", "world_size", "num_replicas", "num_ranks", "Get_size"), "ctx.num_replicas_in_sync"
    ),
    **dict.fromkeys(("rank", "replica_id", "get_rank", "Get_rank"), "ctx.replica_id_in_sync_group"),
    **dict.fromkeys(
        ("is_chief", "is_main_process", "is_master"), "ctx.replica_id_in_sync_group == 0"
    ),
    **dict.fromkeys(
        ("barrier", "Barrier", "group"),
        "strategy.group(None) outside of run(); every collective call waits for all replicas",
    ),
    **dict.fromkeys(("broadcast", "bcast", "Bcast"), "strategy.broadcast(tree), before run()"),
    **dict.fromkeys(("allreduce", "Allreduce", "reduce"), 'ctx.all_reduce("sum", value)'),
    **dict.fromkeys(("allgather", "Allgather", "gather"), "ctx.all_gather(value, axis)"),
    "run": "the function itself, as this is replica code",
}


_REBINDING_HINT = "is a variable outside of this function"
# NumPy's texts about a write to a read-only array.
_READ_ONLY_TEXTS = ("output array is read-only", "assignment destination is read-only")
_READ_ONLY_HINT = (
    "If it is the array of a variable: write by w.assign(x), w.assign_sub(x), w.assign_add(x), or "
    "compute with a copy, w.numpy()."
)
_NO_CONTEXT_TEXT = (
    "get_replica_context() is None in cross-replica code: in a scope, in a merge_fn, in a function "
    "given to update. Call {} in the function that Strategy.run calls; in cross-replica code, "
)
# The classes here, the classes of TensorFlow that programs take them for, and the beginning of the
# text.
_CLASS_ROWS: tuple[tuple[Any, str, str], ...] = (
    ((np.ndarray, np.generic), "tf.Tensor", "Tensors are NumPy's arrays and numbers here: "),
    (DistributedVariable, "tf.Variable", "Variables have no graph here: "),
    (tuple, "tf.TensorShape", "Shapes are tuples here: "),
    (np.dtype, "tf.DType", "Dtypes are NumPy's here: "),
    (type(None), "tf.distribute.ReplicaContext", _NO_CONTEXT_TEXT),
)


_FROZEN_HINT = (
    "Optimizers and options of mpistrat are fixed when they are made. A learning rate that changes "
    "is a function of the number of updates: SGD(lambda step: ...), or one of mpistrat.optim."
)


def explain_program_error(error: BaseException, is_cross_replica: bool) -> None:
    """Add the cure to an error that Python or NumPy raises in a program.

    It may be an attribute of tensors, which are arrays here, or of a replica context that is None,
    as it has to be in cross-replica code: programs for tf.distribute ask whether it is. Or a
    function rebinds the name of a variable, or writes to an array that may be a variable's. The
    cure is added when the error leaves a function or a scope, or ends the program.

    Args:
      error: The error; its text changes.
      is_cross_replica: The code that raised it is cross-replica code.
    """
    if isinstance(error, UnboundLocalError):
        _explain_rebinding(error)
    if isinstance(error, FrozenInstanceError):
        _explain_frozen(error)
    if type(error) is ValueError and str(error) in _READ_ONLY_TEXTS:
        error.args = (f"{error}\n  {_READ_ONLY_HINT}",)
    if not isinstance(error, AttributeError) or (error.obj is None and not is_cross_replica):
        return
    for classes, path, text in _CLASS_ROWS:
        advice = ADVICE_BY_NAME.get(f"{path}.{error.name}")
        if advice and isinstance(error.obj, classes) and not hasattr(error.obj, "_fields"):
            hint = text.format(error.name) + advice[0].lower() + advice[1:]
            if hint not in str(error):
                error.args = (f"{error}\n  {hint}",)
                error.name = None  # of which Python would guess what was meant
            return


def _find_innermost_frame(error: BaseException) -> FrameType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame


def _explain_frozen(error: FrozenInstanceError) -> None:
    """Say of an optimizer, or options of this library, how a value that changes is given."""
    frame = _find_innermost_frame(error)
    owner = None if frame is None else frame.f_locals.get("self")
    if type(owner).__module__.startswith("mpistrat.") and _FROZEN_HINT not in str(error):
        error.args = (f"{error}\n  {_FROZEN_HINT}",)


def _explain_rebinding(error: UnboundLocalError) -> None:
    """Add to the error of ``w = w - x`` in a function how to write to the variable `w`."""
    if _REBINDING_HINT in str(error):
        return
    frame = _find_innermost_frame(error)
    name = str(error).partition("'")[2].partition("'")[0]
    while frame is not None:
        value = frame.f_locals.get(name, frame.f_globals.get(name))
        if isinstance(value, DistributedVariable):
            error.args = (
                f"{error}\n  {name!r} {_REBINDING_HINT}, where an assignment makes a local name of "
                f"it. Write {name}.assign_sub(x), {name}.assign_add(x) or "
                f"{name}.assign({name} - x), or let optimizer.apply_gradients write.",
            )
            return
        frame = frame.f_back


def refuse_name(owner: object, name: str, is_context: bool) -> Any:
    """Raise for an attribute that a strategy or a replica context does not have.

    Args:
      owner: The strategy or the context.
      name: The attribute.
      is_context: It is a context.

    Raises:
      AttributeError: Always; says what to use if the name is known.
    """
    replacement = (CONTEXT_REPLACEMENTS if is_context else STRATEGY_REPLACEMENTS).get(name)
    if replacement is None or hasattr(type(owner), name):
        return object.__getattribute__(owner, name)  # which raises
    text = f"{type(owner).__name__!r} object has no attribute {name!r}. Use {replacement}."
    raise AttributeError(text, name=name, obj=owner)
