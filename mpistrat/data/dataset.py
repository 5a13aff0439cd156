"""The public `Dataset`: examples or batches, rearranged and mapped lazily, equal on every rank."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, SupportsIndex

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import check_bool, check_callable, check_int, spec_text
from mpistrat.data.csv_files import read_csv
from mpistrat.data.iterators import DatasetIterator, prefetch_elements
from mpistrat.data.pieces import LazyBatch
from mpistrat.data.pipeline import AutoShardPolicy, Batches, DatasetOptions, Examples, make_pipeline
from mpistrat.data.position import EpochPosition, compute_position, draw_seeds
from mpistrat.data.sources import INFINITE, UNKNOWN, Files, Stream, convert_lists
from mpistrat.data.steps import Batch, Map, PaddedBatch, Rebatch, Repeat, Step, Stride, make_shuffle
from mpistrat.errors import DataError

_Path = str | os.PathLike[str]


class Dataset:
    """A lazy sequence of examples or batches; iteration reads them.

    Made from arrays, its elements are examples (rows) until `batch` joins them; made from an
    iterable, its elements are batches. Every method returns a new dataset; the order of calls
    matters as in ``tf.data``. A count out of range raises DataError at the call.

    A dataset never communicates. Equal datasets give equal elements on every rank, so each replica
    can take its own part of a global batch: of L rows, replica i of n takes
    ``[i * k, min((i + 1) * k, L))`` with ``k = ceil(L / n)``, and reads no other row of an array.
    The arrays it gives are NumPy arrays that the caller owns: copies, never views of the source.

    Args:
      source: One of

        - a tree (dict, tuple, named tuple, nested) of arrays with the same first dimension: NumPy,
          memmap, an HDF5 dataset, a Zarr array, anything with ``shape``, ``dtype`` and slicing
          ``a[lo:hi]``; a memoryview or the like. Integer index arrays are used where the source
          knows them;
        - an iterable of batches, which are trees of arrays with a leading axis of one size. An
          iterator serves for one epoch only;
        - a callable without arguments that returns such an iterable, called once an epoch.

    Raises:
      DataError: Leaves differ in their first dimension or have none, or there is no leaf. Or
        `source` is a list of numbers, which is ambiguous: `from_tensor_slices` makes it an array.
        Or it is a table of pandas, Arrow or Polars: pass its columns as arrays, by ``to_numpy()``,
        and its index, if needed, as another array.

    Example:
      >>> import numpy as np
      >>> dataset = Dataset({"x": np.arange(10.0), "y": np.arange(10)}).shuffle(seed=0).batch(4)
      >>> [len(batch["x"]) for batch in dataset]
      [4, 4, 2]

    """

    INFINITE: ClassVar[int] = INFINITE
    UNKNOWN: ClassVar[int] = UNKNOWN

    __slots__ = (
        "_epoch",
        "_is_batch_used",
        "_pipeline",
        "_policy",
        "_position",
        "_prefetch_depth",
        "_seed_count",
    )

    def __init__(self, source: Any, *others: NoReturn):
        """Create a dataset of the source; nothing is read but shapes and dtypes."""
        if others:
            raise TypeError(
                f"Dataset takes one source, got {1 + len(others)}. Examples of several arrays are "
                "a tuple or a dict of them: Dataset((x, y))."
            )
        if isinstance(source, Dataset):
            raise TypeError("This is a Dataset already; use it directly.")
        _refuse_lists(source)
        self._initialize(make_pipeline(source))

    def _initialize(
        self, pipeline: Examples | Batches, prefetch_depth: int = 0, seed_count: int = 0
    ) -> Dataset:
        self._pipeline = pipeline
        self._prefetch_depth = prefetch_depth
        self._seed_count = seed_count
        self._epoch = 0
        self._position: EpochPosition | None = None
        self._is_batch_used: Callable[[], bool] = bool
        self._policy = AutoShardPolicy.AUTO
        return self

    def _replace_pipeline(self, pipeline: Examples | Batches, seed_count: int = 0) -> Dataset:
        new = object.__new__(type(self))  # its methods may have the signatures of another library
        new._initialize(pipeline, self._prefetch_depth, self._seed_count + seed_count)
        new._policy = self._policy
        return new

    def _add_step(self, step: Step, seed_count: int = 0) -> Dataset:
        # A step on examples or on batches; examples only get an ArrangingStep here.
        steps: tuple[Any, ...] = (*self._pipeline.steps, step)
        return self._replace_pipeline(dataclasses.replace(self._pipeline, steps=steps), seed_count)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Return how to make it again in another process.

        Raises:
          TypeError: It reads an iterator, which cannot be read twice, or elsewhere.
        """
        self._refuse_iterator("pickled")
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Dataset:
        """Return a dataset of copies of its arrays, which begins with the same epoch.

        Raises:
          TypeError: It reads an iterator, which cannot be read twice.
        """
        self._refuse_iterator("copied")
        new = self._replace_pipeline(copy.deepcopy(self._pipeline, memo))
        new._prefetch_depth, new._seed_count, new._epoch = (
            self._prefetch_depth,
            self._seed_count,
            self._epoch,
        )
        return new

    def _refuse_iterator(self, operation: str) -> None:
        source = self._pipeline.batch_source if isinstance(self._pipeline, Batches) else None
        if isinstance(source, Stream) and isinstance(source._batches, Iterator):
            raise TypeError(
                f"a dataset of an iterator cannot be {operation}: its batches can be read only "
                "once, in this process. Pass Dataset a function that returns a new iterator "
                "each time it is called."
            )

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """Return a dataset of the rows of arrays, where a list is an array.

        Args:
          tensors: A tree as `Dataset` takes it. A list in it becomes one array, so ``[a, b]`` has
            two rows; ``(a, b)`` has as many as `a` and `b` each. A ragged list is a DataError. A
            table whose columns are of one type becomes an array of its rows, without its index.

        Example:
          >>> Dataset.from_tensor_slices(([1.0, 2.0], [3, 4])).cardinality()
          2
        """
        return Dataset(convert_lists(tensors))

    @staticmethod
    def from_batches(batches: Iterable[Any] | Callable[[], Iterable[Any]]) -> Dataset:
        """Return a dataset whose elements are batches.

        Args:
          batches: An iterable of batches, or a callable that returns one for every epoch. Here a
            tuple too is a sequence of batches. Each is a tree of arrays with a leading axis.

        Example:
          >>> [len(batch) for batch in Dataset.from_batches(lambda: (np.ones(n) for n in (3, 2)))]
          [3, 2]
        """
        return object.__new__(Dataset)._initialize(Batches(Stream(batches)))

    @staticmethod
    def from_files(paths: Iterable[Any], read: Callable[[str], Any]) -> Dataset:
        """Return a dataset whose elements are the files of a list, each one batch.

        Usually followed by `rebatch`. With `AutoShardPolicy.FILE` each replica opens its own files
        only; otherwise every rank calls `read` for every file, and takes its rows of it.

        Args:
          paths: Names of files, in the same order on every rank.
          read: ``read(path)`` returns a tree of arrays with the same first dimension: the rows of
            the file. Memory-mapped arrays are read by the rows that are needed.

        Example:
          >>> rows = {"a": np.arange(3), "b": np.arange(3, 5)}
          >>> dataset = Dataset.from_files(["a", "b"], rows.get).rebatch(2)
          >>> [batch.tolist() for batch in dataset]
          [[0, 1], [2, 3], [4]]
        """
        files = Files(tuple(map(os.fspath, paths)), check_callable("from_files(read)", read))
        return object.__new__(Dataset)._initialize(Batches(files))

    @staticmethod
    def from_csv(
        path: _Path,
        *,
        dtypes: Mapping[str, Any] | None = None,
        columns: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        delimiter: str = ",",
        encoding: str = "utf-8-sig",
    ) -> Dataset:
        """Return a dataset of the rows of a CSV file, each a dict of its columns by name.

        The file is read at once, by every rank that calls it; lines without a cell are left out.
        Where it does not fit into memory, read parts of it by `from_files` and `rebatch`.

        Args:
          path: The file.
          dtypes: Dtypes by column: integers, floats, bool (true, false, 1 or 0) or str. Others are
            int64 if all cells are such numbers; else float64, where an empty cell is NaN; else str,
            as are integers too large for int64. Give str for numbers like "007".
          columns: The names of those to read, in this order; None for all.
          names: The names of all columns, if the file has no first line with them.
          delimiter: What stands between cells.
          encoding: That of the file; by default UTF-8, with or without a mark of byte order.

        Raises:
          DataError: A cell is not of its dtype, or a line has another number of cells: the error
            names file, line and column. Or a column is not there, or twice; or there is no text.
          OSError: The file cannot be read.

        Cost:
          Reading the file, with its cells as Python strings in memory meanwhile.

        Example:
          >>> import tempfile
          >>> with tempfile.NamedTemporaryFile("w") as file:
          ...     for line in ("x,y,name", "1,0.5,a", "2,,b"):
          ...         print(line, file=file, flush=True)
          ...     dataset = Dataset.from_csv(file.name, columns=["x", "y"])
          >>> [(int(row["x"]), float(row["y"])) for row in dataset]
          [(1, 0.5), (2, nan)]
        """
        return Dataset(
            read_csv(
                os.fspath(path),
                dtypes=dtypes or {},
                columns=columns,
                names=names,
                delimiter=delimiter,
                encoding=encoding,
            )
        )

    @staticmethod
    def range(*args: int) -> Dataset:
        """Return a dataset of int64 numbers, with the arguments of the built-in ``range``.

        Example:
          >>> [batch.tolist() for batch in Dataset.range(5).batch(2)]
          [[0, 1], [2, 3], [4]]
        """
        bounds = [check_int("each argument of range", argument, -(2**63)) for argument in args]
        return Dataset(np.array(range(*bounds), np.int64))

    def shuffle(
        self,
        *args: object,
        buffer_size: object = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
    ) -> Dataset:
        """Return a dataset in random order: a permutation of the whole epoch, another for each.

        Seed and number of the epoch determine the order, on every rank alike and without NumPy's
        global generator. Before `batch` it permutes examples, after it batches.

        Args:
          args: Not supported: a number here might be meant as the buffer size or as the seed.
          buffer_size: Not supported: the whole epoch is shuffled.
          seed: At least 0. Without one, each plain iteration draws its own; all ranks of a
            distributed iteration use the one that rank 0 draws.
          reshuffle_each_iteration: False for one order in all epochs and repetitions, which needs a
            seed.

        Raises:
          RefusedError: `reshuffle_each_iteration` is False, and there is no seed.
          TypeError: A positional argument, or a buffer size.
          DataError: The end is unknown: after ``repeat()``, or for batches from a callable or
            iterator. Shuffle before ``repeat()``; pass batches as a list.

        Cost:
          Eight bytes of memory per example; batches of a list are all read before the first comes.

        Example:
          >>> sorted(Dataset.range(4).shuffle(seed=1)) == [0, 1, 2, 3]
          True
        """
        if args or buffer_size is not None:
            arguments = [*map(repr, args), *([] if args else [f"buffer_size={buffer_size!r}"])]
            raise TypeError(
                f"shuffle({', '.join(arguments)}): there is no buffer size; the "
                "whole epoch is always shuffled. Write shuffle(), or shuffle(seed=7) for a "
                "reproducible order."
            )
        step = make_shuffle(
            self._pipeline.max_cardinality(), seed, self._seed_count, reshuffle_each_iteration
        )
        return self._add_step(step, seed_count=seed is None)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Return a dataset of successive elements joined along a new first axis.

        Args:
          batch_size: How many, at least 1; for a distributed dataset the *global* batch size.
            Batches are joined to batches of batches; they must have the same shape then.
          drop_remainder: Leave out the last batch if it has fewer.

        Example:
          >>> [batch.tolist() for batch in Dataset.range(5).batch(2, drop_remainder=True)]
          [[0, 1], [2, 3]]
        """
        should_drop = check_bool("batch(drop_remainder)", drop_remainder)
        step = Batch(check_int("batch(batch_size)", batch_size, 1), should_drop)
        if isinstance(self._pipeline, Examples):
            return self._replace_pipeline(Batches((self._pipeline, step)))
        return self._add_step(step)

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Return a dataset of successive examples, padded to one shape and joined.

        Args:
          batch_size: How many, at least 1; for a distributed dataset the *global* batch size.
          padded_shapes: The shape of each leaf, in a tree like that of an example. None in a
            shape, or instead of it all, pads to the longest of the global batch; then **every
            rank reads every row**, as for a `map` after `batch`.
          padding_values: The padding: one number, or a tree of them; None for zeros.
          drop_remainder: Leave out the last batch if it has fewer.

        Raises:
          DataError: The elements are batches already. While reading: an example is larger than
            the shape, or what to pad with does not fit the dtype.

        Example:
          >>> ragged = Dataset.range(1, 4).map(lambda i: np.full(i, i))
          >>> next(iter(ragged.padded_batch(3, [3]))).tolist()
          [[1, 0, 0], [2, 2, 0], [3, 3, 3]]
        """
        size = check_int("padded_batch(batch_size)", batch_size, 1)
        if not isinstance(self._pipeline, Examples):
            raise DataError("padded_batch joins examples; the elements of this one are batches.")
        should_drop = check_bool("padded_batch(drop_remainder)", drop_remainder)
        step = PaddedBatch(size, padded_shapes, padding_values, should_drop)
        return self._replace_pipeline(Batches((self._pipeline, step)))

    def rebatch(self, batch_size: int | Sequence[int], drop_remainder: bool = False) -> Dataset:
        """Return a dataset of batches of another size, made of the rows of all in order.

        Args:
          batch_size: How many rows, at least 1; for a distributed dataset the *global* batch size.
            A list of sizes is taken in turns.
          drop_remainder: Leave out the last batch if it has fewer.

        Raises:
          DataError: The elements are not batches, or a size is below 1.

        Example:
          >>> [batch.tolist() for batch in Dataset.range(5).batch(4).rebatch(3)]
          [[0, 1, 2], [3, 4]]
        """
        has_several_sizes = isinstance(batch_size, list | tuple) or np.ndim(batch_size) == 1
        size_list: Any = batch_size if has_several_sizes else (batch_size,)
        sizes = tuple(check_int("rebatch(batch_size)", size, 1) for size in size_list)
        if not sizes:
            raise DataError("rebatch(batch_size) must have at least one size, got an empty list.")
        if not self.batched:
            raise DataError("rebatch takes batches apart, and these are examples; call batch.")
        return self._add_step(Rebatch(sizes, check_bool("rebatch(drop_remainder)", drop_remainder)))

    def repeat(self, count: int | None = None) -> Dataset:
        """Return a dataset of `count` epochs in a row, each shuffled again.

        With ``repeat(2).batch(n)`` a batch may span two epochs, with ``batch(n).repeat(2)`` not.

        Args:
          count: How many; None or -1 for no end, as in ``tf.data``.

        Raises:
          TypeError: `count` is not an integer.
          DataError: It is less than -1.

        Example:
          >>> [batch.tolist() for batch in Dataset.range(3).repeat(2).batch(4)]
          [[0, 1, 2, 0], [1, 2]]
          >>> Dataset.range(3).repeat(-1).cardinality() == Dataset.INFINITE
          True
        """
        if count is not None:
            count = check_int("repeat(count), where -1 is no end,", count, -1)
        return self._add_step(Repeat(None if count == -1 else count))

    def map(self, fn: Callable[..., Any], rowwise: bool = False) -> Dataset:
        """Return a dataset of ``fn(element)``, or ``fn(*element)`` for elements that are tuples.

        Before `batch`, `fn` gets one example. After it, `fn` gets the whole global batch, on every
        replica, because only then the result is the same at any number of replicas (for example
        when it subtracts the mean of the batch); so **every rank reads every row**. If `fn` treats
        each row independently, pass ``rowwise=True``: then a replica reads and maps its own rows
        only.

        Without ``rowwise=True`` the result must be the same on all ranks, so random numbers in `fn`
        need a seed. In a distributed dataset the number of rows is compared between ranks at each
        step, and the contents at the first step of an epoch and every ``MPISTRAT_CHECK_EVERY``
        steps after it. Contents of object arrays are not compared.

        A replica without rows calls a rowwise `fn` with arrays of 0 rows. For an `fn` before
        `batch` it shows dtype and shape of earlier examples; if it has not read any yet, it reads
        one row of the batch to learn them, although that row belongs to another replica.

        Args:
          fn: Returns a tree of arrays; for batches all with the same first dimension.
          rowwise: `fn` makes each row of its result from the same row of its arguments alone.

        Raises:
          DataError: `rowwise` before `batch`, where it has no meaning. While reading: the result is
            no batch, or a rowwise `fn` changed the number of rows.

        Example:
          >>> [x.tolist() for x in Dataset.range(3).map(lambda i: i * 10).batch(2).map(np.negative)]
          [[0, -10], [-20]]
        """
        check_callable("map(fn)", fn)
        if isinstance(self._pipeline, Batches):
            return self._add_step(Map(fn, check_bool("map(rowwise)", rowwise)))
        if rowwise:
            raise DataError("map before batch gets one example anyway; leave rowwise=True out.")
        return self._replace_pipeline(self._pipeline.add_map(fn))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Return a dataset of the elements for which ``predicate(element)`` is true.

        Elements that are tuples are unpacked, as by `map`. Before `batch`, the predicate judges one
        example, once: when the dataset is distributed each rank judges its share of the rows, and
        all ranks get to know which rows are kept; elsewhere this rank judges all, when the first is
        needed. From then on it is as if the source had these rows only, so that cardinality,
        shuffles, batches, shards and resuming in mid-epoch are exact at every number of ranks. The
        predicate must say the same of a row on every rank; its contents are not looked at again.

        After `batch`, and for batches from an iterable or files, the predicate judges whole batches
        as they come, in every epoch and on every rank, which **reads every row**; their number is
        `UNKNOWN`.

        Args:
          predicate: Returns True or False, as Python's or NumPy's, for one element.

        Raises:
          DataError: The dataset is endless, or a `take`, `skip` or `shard` after a `shuffle` takes
            other rows in each epoch. When it is distributed or read: the predicate returns
            something else.

        Cost:
          One pass over the rows, of which each rank reads its share. A byte of memory per row, and
          eight per kept row in each epoch. Distributing it costs one more handshake, which sends a
          bit per row.

        Example:
          >>> odd = Dataset.range(10).filter(lambda x: x % 2 == 1)
          >>> odd.cardinality(), [batch.tolist() for batch in odd.batch(3)]
          (5, [[1, 3, 5], [7, 9]])
        """
        check_callable("filter(predicate)", predicate)
        return self._replace_pipeline(self._pipeline.add_filter(predicate))

    def prefetch(self, buffer_size: int) -> Dataset:
        """Return a dataset that holds `buffer_size` elements ready, made in a background thread.

        It applies to the elements of the final dataset, wherever it is called; the last call
        counts, and 0 disables it. The thread ends with the iteration, finished or not.
        """
        new = self._replace_pipeline(self._pipeline)
        new._prefetch_depth = check_int("prefetch(buffer_size)", buffer_size, 0)
        return new

    def take(self, count: int) -> Dataset:
        """Return a dataset of the first `count` elements: of examples, after `batch` of batches.

        Example:
          >>> [batch.tolist() for batch in Dataset.range(9).batch(2).take(2)]
          [[0, 1], [2, 3]]
        """
        return self._add_step(Stride(0, check_int("take(count)", count, 0)))

    def skip(self, count: int) -> Dataset:
        """Return a dataset without the first `count` elements.

        Example:
          >>> [batch.tolist() for batch in Dataset.range(5).skip(2).batch(2)]
          [[2, 3], [4]]
        """
        return self._add_step(Stride(check_int("skip(count)", count, 0)))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Return a dataset of every `num_shards`-th element, from number `index`; no other is read.

        In a ``dataset_fn``, ``shard(context.num_input_pipelines, context.input_pipeline_id)``
        gives each replica its own part. Shard before shuffling without a seed.

        Raises:
          DataError: There is no such shard.

        Example:
          >>> [batch.tolist() for batch in Dataset.range(7).shard(3, 0).batch(2)]
          [[0, 3], [6]]
        """
        count = check_int("shard(num_shards)", num_shards, 1)
        index = check_int("shard(index)", index, 0)
        if index >= count:
            raise DataError(f"shard({count}, {index}): shards are numbered 0 to {count - 1}.")
        return self._add_step(Stride(index, step=count))

    def with_options(self, options: DatasetOptions) -> Dataset:
        """Return a dataset that is distributed as `options` say.

        Raises:
          TypeError: `options` is not a `DatasetOptions`.

        Example:
          >>> options = DatasetOptions()
          >>> options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
          >>> dataset = Dataset.range(4).batch(2).with_options(options)
          >>> dataset.options().experimental_distribute.auto_shard_policy.name
          'OFF'
        """
        if not isinstance(options, DatasetOptions):
            raise TypeError(f"with_options must get DatasetOptions, got {options!r:.60}.")
        new = self._replace_pipeline(self._pipeline)
        new._policy = options.experimental_distribute.auto_shard_policy
        return new

    def options(self) -> DatasetOptions:
        """Return the options that `with_options` set."""
        dataset_options = DatasetOptions()
        dataset_options.experimental_distribute.auto_shard_policy = self._policy
        return dataset_options

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold ``reduce_func(state, element)`` over the elements, and return the last state.

        Args:
          initial_state: The state before the first element.
          reduce_func: Returns the next state.

        Example:
          >>> int(Dataset.range(5).reduce(0, lambda total, x: total + x))
          10
        """
        return functools.reduce(
            check_callable("reduce(reduce_func)", reduce_func), self, initial_state
        )

    @property
    def batched(self) -> bool:
        """Whether the elements are batches; those of arrays without `batch` are examples."""
        return isinstance(self._pipeline, Batches)

    @property
    def batch_size(self) -> int | None:
        """The rows of a full batch; None for examples, or if it is not known before reading."""
        return self._pipeline.batch_size() if isinstance(self._pipeline, Batches) else None

    @property
    def _has_full_batches(self) -> bool:
        """Whether every batch is known to have `batch_size` rows."""
        specs = pytree.flatten(self.element_spec)[0]
        return self.batched and all(spec is not None and spec.shape[0] for spec in specs)

    @property
    def _file_count(self) -> int:
        """The number of files that the batches are read from; 0 for other sources."""
        source = self._pipeline.batch_source if isinstance(self._pipeline, Batches) else None
        return len(source.paths) if isinstance(source, Files) else 0

    def _select_files(self, index: int, count: int) -> Dataset:
        """Return the same dataset of every `count`-th file only, from number `index`.

        Raises:
          DataError: The batches come from no files.
        """
        pipeline = self._pipeline
        if not isinstance(pipeline, Batches) or not isinstance(pipeline.batch_source, Files):
            raise DataError("The batches of this dataset do not come from Dataset.from_files.")
        return self._replace_pipeline(
            dataclasses.replace(
                pipeline, batch_source=pipeline.batch_source.select_files(index, count)
            )
        )

    def _describe(self) -> str:
        """Return source and transformations as a string: seeds, row counts, dtypes, no contents.

        Equal on two ranks if they made the dataset alike.

        Example:
          >>> Dataset.range(4).batch(2)._describe()
          '4 rows of *: int64 (), Batch(size=2, drop_remainder=False), AUTO'
        """
        return f"{self._pipeline.describe()}, {self._policy.name}"

    def _describe_with_rows(self) -> str:
        """Return `_describe` and which rows filters keep; predicates run that have not run."""
        selections = [f", {step.selection.describe()}" for step in self._pipeline.row_filters]
        return "".join([self._describe(), *selections])

    @property
    def element_spec(self) -> Any:
        """The tree of `Spec(shape, dtype)` of an element, where None is a number of rows.

        None if it is not known before reading: after a map, or for batches from an iterable.
        """
        return self._pipeline.make_spec()

    def cardinality(self) -> int:
        """Return how many elements an iteration has, or `INFINITE` (-1), or `UNKNOWN` (-2)."""
        return self._pipeline.cardinality()

    @property
    def epoch(self) -> int:
        """The number of the next epoch, from 0."""
        return self._epoch

    def begin_after(self, epoch: int) -> None:
        """Set the next epoch to ``epoch + 1``. Call it alike on all ranks.

        Args:
          epoch: The number of the last epoch that is done; -1 if none is.

        Raises:
          TypeError: It is not an integer.
          DataError: It is below -1.
        """
        self._epoch = check_int("begin_after(epoch)", epoch, -1) + 1
        self._position = None

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the position in the data as a dict, as a `Checkpoint` saves it."""
        position = compute_position(self) or EpochPosition(self._epoch, 0, (), "")
        return {
            "epoch": position.epoch,
            "passed": position.passed_count,
            "seeds": list(position.seeds),
            "of": position.description,
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Set the position that `checkpoint_state` returned.

        `CheckpointManager.resume` continues there; any other iteration begins that epoch again.

        Args:
          state: A dict that `checkpoint_state` returned.
        """
        position = EpochPosition(
            state["epoch"], state["passed"], tuple(state["seeds"]), state["of"]
        )
        self._epoch, self._is_batch_used = position.epoch, bool
        self._position = position if position.description else None

    def __iter__(self) -> DatasetIterator:
        """Iterate over the whole elements of the next epoch; nothing is divided."""
        elements = self._pipeline.iterate_elements(draw_seeds(self._seed_count), (self.epoch,))
        self.begin_after(self.epoch)
        prefetched = prefetch_elements(elements, self._prefetch_depth)
        return DatasetIterator(prefetched, self.element_spec, self._pipeline.digest_source)

    def _iterate_lazy_batches(self, epoch: int, seeds: Sequence[int]) -> Iterator[LazyBatch]:
        """Iterate over the global batches of one epoch, not read yet; each replica reads its part.

        The same arguments give the same batches in the same order on every rank. Read the part of
        each before asking for the next batch.

        Args:
          epoch: The number of the epoch, at least 0.
          seeds: A number of at least 0 for each shuffle without a seed, equal on all ranks. They
            may stay the same for all epochs, which differ in their order anyway.

        Raises:
          DataError: The elements are not batches; there are too many or too few seeds.

        Example:
          >>> lazy_batches = Dataset.range(5).batch(4)._iterate_lazy_batches(0, [])
          >>> [lazy_batch.read_part(1, 2).tolist() for lazy_batch in lazy_batches]
          [[2, 3], []]
        """
        if not isinstance(self._pipeline, Batches):
            raise DataError(
                "Elements of this dataset are single examples, which cannot be divided between "
                "replicas; call batch(global_batch_size) first."
            )
        if len(seeds) != self._seed_count:
            raise DataError(
                f"This dataset needs {self._seed_count} seeds, {len(seeds)} were given."
            )
        path = (check_int("the epoch", epoch, 0),)
        checked_seeds = tuple(check_int("each of the seeds", seed, 0) for seed in seeds)
        return self._pipeline.iterate_batches(checked_seeds, path)

    def __repr__(self) -> str:
        """Return what the elements are and how many there are."""
        kind = "batches" if self.batched else "examples"
        if not all(step.selection.is_known for step in self._pipeline.row_filters):
            return f"<Dataset of {kind}, of which a filter has not been run>"
        return f"<Dataset of {kind}, cardinality {self.cardinality()}>"


def _refuse_lists(source: object) -> None:
    """Raise if a list of numbers, texts or different arrays was given where arrays were meant."""
    _refuse_array_list(source)
    plain_list = _find_number_list(source)
    if plain_list is not None:
        meaning = "an iterable of batches" if isinstance(source, list) else "a tree of its items"
        kind_text = "texts" if isinstance(plain_list[0], str) else "numbers"
        ending = ", ..." if len(plain_list) > 3 else ""
        item_texts = ", ".join(map(repr, plain_list[:3])) + ending
        raise DataError(
            f"Dataset got a list of {kind_text}, [{item_texts}]. A list is {meaning} here, and no "
            "array: give np.asarray(list), or call Dataset.from_tensor_slices, which makes arrays "
            "of lists."
        )


def _refuse_array_list(source: object) -> None:
    """Raise if arrays that cannot be batches of one dataset were given as a list."""
    if not isinstance(source, list) or not all(isinstance(item, np.ndarray) for item in source):
        return
    if len({(array.ndim, array.dtype.kind) for array in source}) > 1:
        specs = ", ".join(map(spec_text, source[:3])) + (", ..." if len(source) > 3 else "")
        raise DataError(
            f"Dataset got a list of arrays that differ in dimensions or kind, {specs}. A list is "
            "an iterable of batches here. Examples of several arrays are a tuple or a dict of "
            "them: Dataset((x, y))."
        )


def _find_number_list(tree: object) -> list[Any] | None:
    if isinstance(tree, list) and tree and isinstance(tree[0], numbers.Number | str):
        return tree
    if not isinstance(tree, list | tuple | Mapping):
        return None
    subtrees = tree.values() if isinstance(tree, Mapping) else tree
    # A list may be long, and its first item shows what the others are.
    sampled_subtrees = itertools.islice(subtrees, 1 if isinstance(tree, list) else None)
    return next(
        (
            number_list
            for subtree in sampled_subtrees
            if (number_list := _find_number_list(subtree)) is not None
        ),
        None,
    )
