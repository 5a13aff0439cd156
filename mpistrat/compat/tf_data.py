"""``tf.data`` as programs that import `mpistrat.compat.tf` see it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import as_int, check_callable, check_int
from mpistrat.compat import tf_elements as _elements
from mpistrat.compat.absent import Advised as _Advised
from mpistrat.compat.absent import Namespace as _Namespace
from mpistrat.compat.absent import make_getattr as _make_getattr
from mpistrat.compat.absent import make_refusal as _make_refusal
from mpistrat.compat.tf_tensors import constant
from mpistrat.compat.tf_tensors import takes_name as _takes_name
from mpistrat.data import dataset
from mpistrat.data.pipeline import AutoShardPolicy, DistributeOptions
from mpistrat.data.pipeline import DatasetOptions as _DatasetOptions
from mpistrat.data.sources import convert_lists as _stacked

__all__ = ["AUTOTUNE", "INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY", "Dataset", "Options"]
__all__ += ["ThreadingOptions", "experimental"]

__getattr__ = _make_getattr("tf.data")

AUTOTUNE = -1
INFINITE_CARDINALITY = dataset.Dataset.INFINITE
UNKNOWN_CARDINALITY = dataset.Dataset.UNKNOWN


def _cardinality(dataset: Any) -> int:
    """Return ``dataset.cardinality()``: the elements of an epoch, or INFINITE or UNKNOWN."""
    if not hasattr(dataset, "cardinality"):
        kind = type(dataset).__name__
        raise TypeError(f"cardinality(dataset) needs a dataset, not {dataset!r:.60} ({kind}).")
    count: int = dataset.cardinality()
    return count


class _FixedAttributes:
    """Attributes that are there, and no others.

    Attributes:
      path: What messages call it.
      inert_names: The attributes that change nothing; each is None at first.
    """

    path = ""
    inert_names = ""

    def __init__(self) -> None:
        """Create options that ask for nothing."""
        vars(self).update(dict.fromkeys(self.inert_names.split()))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute that there is."""
        if name not in vars(self) and not hasattr(type(self), name):
            raise self._make_error(name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Raise an AttributeError that says which attributes there are."""
        raise AttributeError(name) if name.startswith("__") else self._make_error(name)

    def __eq__(self, other: object) -> bool:
        """Return whether `other` are options of the same kind, with all attributes alike."""
        is_equal = type(self) is type(other) and vars(self) == vars(other)
        return is_equal and (
            not isinstance(self, _DatasetOptions) or _DatasetOptions.__eq__(self, other)
        )

    def _make_error(self, name: str) -> AttributeError:
        option_names = [*_DatasetOptions.__slots__] if isinstance(self, _DatasetOptions) else []
        return AttributeError(
            f"{self.path} has no {name}. It has {', '.join([*option_names, *vars(self)])}."
        )


class AutotuneOptions(_FixedAttributes):
    """Like: ``tf.data.experimental.AutotuneOptions``; it changes nothing."""

    path = "tf.data.Options.autotune"
    inert_names = (
        "enabled autotune_algorithm cpu_budget initial_parallelism min_parallelism ram_budget"
    )


class OptimizationOptions(_FixedAttributes):
    """Like: ``tf.data.experimental.OptimizationOptions``; it changes nothing."""

    path = "tf.data.Options.experimental_optimization"
    inert_names = (
        "apply_default_optimizations filter_fusion filter_parallelization inject_prefetch "
        "map_and_batch_fusion map_and_filter_fusion map_fusion map_parallelization "
        "noop_elimination parallel_batch seq_interleave_prefetch shuffle_and_repeat_fusion"
    )


class ThreadingOptions(_FixedAttributes):
    """Like: ``tf.data.ThreadingOptions``; it changes nothing."""

    path = "tf.data.Options.threading"
    inert_names = "max_intra_op_parallelism private_threadpool_size"


class Options(_FixedAttributes, _DatasetOptions):
    """`mpistrat.DatasetOptions` with what else ``tf.data.Options`` has, which changes nothing.

    Elements come in one order always; only `Dataset.prefetch` sets how many are read ahead.

    Like: ``tf.data.Options``.

    Example:
      >>> options = Options()
      >>> options.threading.private_threadpool_size = 8
      >>> options.deterministic = False
    """

    path = "tf.data.Options"
    inert_names = (
        "dataset_name deterministic experimental_deterministic experimental_external_state_policy "
        "experimental_slack experimental_symbolic_checkpoint experimental_warm_start"
    )

    def __init__(self) -> None:
        """Create options that ask for nothing."""
        super().__init__()
        _DatasetOptions.__init__(self)
        threading = ThreadingOptions()
        vars(self).update(
            autotune=AutotuneOptions(),
            experimental_optimization=OptimizationOptions(),
            experimental_threading=threading,
            threading=threading,
        )


experimental = _Namespace(
    "tf.data.experimental",
    AUTOTUNE=AUTOTUNE,
    INFINITE_CARDINALITY=INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY=UNKNOWN_CARDINALITY,
    AutoShardPolicy=AutoShardPolicy,
    AutotuneOptions=AutotuneOptions,
    DistributeOptions=DistributeOptions,
    OptimizationOptions=OptimizationOptions,
    ThreadingOptions=ThreadingOptions,
    cardinality=_cardinality,
)


@final
class Dataset(dataset.Dataset, metaclass=_Advised):
    """An `mpistrat.Dataset` whose methods have the parameters of those of ``tf.data.Dataset``.

    Hints for its runtime (``num_parallel_calls``, ``deterministic``, ``synchronous``,
    ``use_unbounded_threadpool``, ``name``) change nothing.
    The error for a method that is missing (``interleave``, ``window``, ...) names a replacement.

    A method that makes a dataset of the elements of others reads these when it is called, if they
    are examples, and in each epoch, if they are batches; on each rank all of them. So shuffle after
    it: elements that were shuffled before have one order in all epochs, and are refused without a
    seed.

    Like: ``tf.data.Dataset``.

    Example:
      >>> [x.tolist() for x in Dataset.from_tensor_slices([1.0, 2.0, 3.0]).batch(2)]
      [[1.0, 2.0], [3.0]]
    """

    __slots__ = ()

    _where = "tf.data.Dataset"
    list_files = staticmethod(_make_refusal("tf.data.Dataset.list_files"))
    cardinality = _takes_name(dataset.Dataset.cardinality)
    padded_batch = _takes_name(dataset.Dataset.padded_batch)
    rebatch = _takes_name(dataset.Dataset.rebatch)
    shard = _takes_name(dataset.Dataset.shard)
    with_options = _takes_name(dataset.Dataset.with_options)

    def options(self) -> Options:
        """Return the options that `with_options` set."""
        options = Options()
        options.experimental_distribute.auto_shard_policy = self._policy
        return options

    def __len__(self) -> int:
        """Return how many elements an iteration has.

        Raises:
          TypeError: They never end, or the number is not known.

        Example:
          >>> len(Dataset.range(5).batch(2))
          3
        """
        count = self.cardinality()
        if count < 0:
            reason = (
                "repeats forever" if count == INFINITE_CARDINALITY else "is not known beforehand"
            )
            raise TypeError(f"len(dataset): the dataset {reason}; see dataset.cardinality().")
        return count

    def __bool__(self) -> bool:
        """Return True, for an empty dataset too."""
        return True

    def as_numpy_iterator(self) -> Any:
        """Return an iterator over the elements of the next epoch, which are arrays."""
        return iter(self)

    @staticmethod
    def from_tensor_slices(tensors: Any, name: Any = None) -> Dataset:
        """Return a dataset of the rows of `tensors`; lists are converted as by `constant`.

        Args:
          tensors: See `mpistrat.Dataset.from_tensor_slices`.
          name: No effect.
        """
        return Dataset(_stacked(tensors, _tensor))

    @staticmethod
    def from_tensors(tensors: Any, name: Any = None) -> Dataset:
        """Return a dataset of one example.

        Args:
          tensors: The example: a tree of arrays, where a list is an array.
          name: No effect.

        Example:
          >>> [x.tolist() for x in Dataset.from_tensors([1, 2]).repeat(2).batch(2)]
          [[[1, 2], [1, 2]]]
        """
        return Dataset(pytree.map(_as_row, _stacked(tensors, _tensor)))

    @staticmethod
    def from_generator(
        generator: Callable[..., Any],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Any = None,
        output_signature: Any = None,
        name: Any = None,
    ) -> Any:
        """Return a dataset of the examples that a generator gives; it is read to its end, now.

        Args:
          generator: A function that returns an iterable of examples, the same on all ranks.
          output_types: A tree of dtypes; None for those of the values.
          output_shapes: A tree of shapes like it, where None is any size; None for any.
          args: What the function is called with; nothing if None.
          output_signature: A tree of `TensorSpec`, instead of both.
          name: No effect.

        Raises:
          DataError: It gives nothing, examples of several structures, or more than 1 GiB.
          ValueError: An example has another shape than was said.

        Example:
          >>> Dataset.from_generator(lambda: iter([1.5, 2.5]), float).cardinality()
          2
        """
        types = output_types if output_signature is None else output_signature
        if output_shapes is not None:
            types = _elements.make_specs(types, output_shapes)
        return _elements.read_generator(Dataset, generator, () if args is None else args, types)

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: Any = None) -> Any:
        """Return a dataset of tuples, or trees, of the elements of several.

        Args:
          *args: Datasets, or one tree of them.
          datasets: The tree, by name.
          name: No effect.

        Example:
          >>> pairs = Dataset.zip(Dataset.range(2), Dataset.range(5, 9))
          >>> [(int(a), int(b)) for a, b in pairs]
          [(0, 5), (1, 6)]
        """
        trees = args if datasets is None else (datasets,)
        return _elements.zip_datasets(Dataset, trees[0] if len(trees) == 1 else trees)

    @_takes_name
    def concatenate(self, dataset: Any) -> Any:
        """Return the elements of this, then those of `dataset`, of the same kind.

        Examples may differ in shape; `padded_batch` joins these.

        Args:
          dataset: The other one; its elements have the same structure and dtypes.

        Raises:
          TypeError: It is no dataset, or its elements are of another kind.

        Example:
          >>> pairs, triples = (Dataset.from_tensors(np.ones(n)) for n in (2, 3))
          >>> next(iter(pairs.concatenate(triples).padded_batch(2))).tolist()
          [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
        """
        return _elements.concatenate_datasets(self, dataset)

    @_takes_name
    def enumerate(self, start: int = 0) -> Any:
        """Return a dataset of pairs: the number of an element, from `start`, and the element."""
        first = check_int("enumerate(start)", start, -(2**63))
        numbers = Dataset.range(first, first + _elements.count_elements(self, "enumerate"))
        return Dataset.zip(numbers, self)

    @_takes_name
    def filter(self, predicate: Callable[..., Any]) -> Any:
        """Return a dataset of the elements for which `predicate` is true."""
        return _elements.select_elements(
            self, check_callable("filter(predicate)", predicate), "filter"
        )

    @_takes_name
    def flat_map(self, map_func: Callable[..., Any]) -> Any:
        """Return the elements of the datasets that `map_func` makes of the elements, in a row."""
        return _elements.flat_map_dataset(self, check_callable("flat_map(map_func)", map_func))

    @_takes_name
    def take_while(self, predicate: Callable[..., Any]) -> Any:
        """Return the elements before the first for which `predicate` is not true."""
        return _elements.select_elements(
            self, check_callable("take_while(predicate)", predicate), "take_while"
        )

    @_takes_name
    def unbatch(self) -> Any:
        """Return a dataset of the rows of the elements."""
        return _elements.unbatch_dataset(self)

    def apply(self, transformation_func: Callable[[Any], Any]) -> Any:
        """Return ``transformation_func(dataset)``.

        Raises:
          TypeError: That is not a dataset.
        """
        transformed = check_callable("apply(transformation_func)", transformation_func)(self)
        if not isinstance(transformed, dataset.Dataset):
            raise TypeError(
                f"Dataset.apply wants a function that returns a dataset; got {transformed!r:.60}."
            )
        return transformed

    @_takes_name
    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold ``reduce_func(state, element)`` over the elements, and return the last state.

        Args:
          initial_state: The state before the first element; converted as by `constant`.
          reduce_func: Returns the next state, which is converted too.
        """
        return super().reduce(_tensors(initial_state), _returning_tensors(reduce_func))

    @_takes_name
    def get_single_element(self) -> Any:
        """Return the only element.

        Raises:
          ValueError: There are none, or several.
        """
        elements = [*super().take(2)]
        if len(elements) != 1:
            raise ValueError(
                f"get_single_element: the dataset has {'several elements' if elements else 'none'}."
            )
        return elements[0]

    @staticmethod
    def range(*args: int, output_type: Any = "int64", name: Any = None) -> Dataset:
        """Return a dataset of numbers, which are `output_type`; `name` has no effect.

        Example:
          >>> [x.tolist() for x in Dataset.range(3, output_type="float32").batch(2)]
          [[0.0, 1.0], [2.0]]
        """
        return Dataset(constant(range(*args), output_type))

    def shuffle(  # type: ignore[override]  # the signature of the other library, on purpose
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = None,
        name: Any = None,
    ) -> dataset.Dataset:
        """Return a dataset in random order: a permutation of the whole epoch, another for each.

        Args:
          buffer_size: No effect, but 1 means no shuffling, as it does there.
          seed: See `mpistrat.Dataset.shuffle`.
          reshuffle_each_iteration: See there; False needs a seed.
          name: No effect.

        Raises:
          RefusedError: `reshuffle_each_iteration` is False, and there is no seed.
          TypeError: `buffer_size` is not an integer.
          DataError: It is less than 1, and not UNKNOWN_CARDINALITY.
        """
        has_buffer_size = buffer_size != UNKNOWN_CARDINALITY
        if has_buffer_size and check_int("shuffle(buffer_size)", buffer_size, 1) == 1:
            return self
        return super().shuffle(seed=seed, reshuffle_each_iteration=reshuffle_each_iteration)

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: Any = None,
        deterministic: Any = None,
        name: Any = None,
    ) -> dataset.Dataset:
        """Return a dataset of successive elements joined; see `mpistrat.Dataset.batch`."""
        return super().batch(batch_size, drop_remainder)

    def map(  # type: ignore[override]  # the signature of the other library, on purpose
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: Any = None,
        deterministic: Any = None,
        synchronous: Any = None,
        use_unbounded_threadpool: bool = False,
        name: Any = None,
        *,
        rowwise: bool = False,
    ) -> dataset.Dataset:
        """Return a dataset of ``map_func(element)``; see `mpistrat.Dataset.map`.

        As there, a list that the function returns is a tuple, one inside of a tuple or a dict is
        an array, and Python numbers are converted as by `constant`.

        Example:
          >>> [(x, half)] = Dataset.range(2).map(lambda x: [[x, x + 1], 0.5]).batch(2)
          >>> x.tolist(), half.dtype
          ([[0, 1], [1, 2]], dtype('float32'))
        """
        return super().map(_returning_tensors(map_func), rowwise)

    def prefetch(self, buffer_size: int, name: Any = None) -> dataset.Dataset:
        """Return a dataset that holds `buffer_size` elements ready, two for `AUTOTUNE`.

        Args:
          buffer_size: How many.
          name: No effect.
        """
        return super().prefetch(2 if buffer_size == AUTOTUNE else buffer_size)

    def skip(self, count: int, name: Any = None) -> dataset.Dataset:
        """Return a dataset without the first `count` elements.

        Args:
          count: How many; all of them for any negative number.
          name: No effect.
        """
        return super().take(0) if _is_negative(count) else super().skip(count)

    def take(self, count: int, name: Any = None) -> dataset.Dataset:
        """Return a dataset of the first `count` elements.

        Args:
          count: How many; all of them for any negative number.
          name: No effect.
        """
        return self if _is_negative(count) else super().take(count)

    @_takes_name
    def repeat(self, count: int | None = None) -> dataset.Dataset:
        """Return a dataset of `count` epochs in a row; for None or any negative number, no end."""
        return super().repeat(None if _is_negative(count) else count)

    def cache(self, filename: str = "", name: Any = None) -> dataset.Dataset:
        """Return the dataset in the order of its first epoch; what it reads and maps is not kept.

        After a shuffle without a seed each epoch has another order, which TensorFlow keeps.

        Args:
          filename: No effect.
          name: No effect.
        """
        return _elements.cache_order(self)


def _is_negative(count: Any) -> bool:
    number = as_int(count)
    return number is not None and number < 0


def _returning_tensors(fn: Any) -> Any:
    """Return a function whose results are `fn`'s as tensors; others are unchanged."""
    if not callable(fn):
        return fn

    @functools.wraps(fn)
    def call(*element: Any) -> Any:
        result = fn(*element)
        if result is None:  # which `map` refuses
            return None
        return _tensors(result)

    return call


def _tensors(tree: Any) -> Any:
    return _stacked(tuple(tree) if type(tree) is list else tree, _tensor)


def _as_row(leaf: Any) -> Any:
    # Of a text of NumPy, leaf[None] would be one of its letters.
    return np.array([leaf]) if isinstance(leaf, np.character) else leaf[None]


def _tensor(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else constant(leaf)
