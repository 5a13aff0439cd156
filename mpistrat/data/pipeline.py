"""A dataset as data: its source, the steps on its examples, the steps on its batches; its options.

`Examples` are rows of arrays before ``batch``, `Batches` are the elements after it, or of a source
of batches. Both are immutable, and an epoch of either follows from seeds and the number of the
epoch. `DatasetOptions` are the options of how a dataset is distributed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array, digest, find_array_kind, is_buffer
from mpistrat.data.filtered import BatchFilter, RowFilter, RowSelection
from mpistrat.data.pieces import (
    ExampleReader,
    LazyBatch,
    LoadedBatch,
    MapFn,
    Order,
    get_function_name,
    make_straight_order,
)
from mpistrat.data.sources import (
    INFINITE,
    ArrayTree,
    Files,
    ReadIterator,
    RowIndices,
    Stream,
    is_array,
)
from mpistrat.data.steps import (
    ArrangingStep,
    Batch,
    BatchMaker,
    EpochPath,
    Map,
    PaddedBatch,
    Rebatch,
    Seeds,
    Shuffle,
    Step,
    Stride,
)
from mpistrat.errors import DataError


@final
@dataclasses.dataclass(frozen=True)
class Examples:
    """A dataset before ``batch``: rows of arrays.

    Attributes:
      reader: The arrays and the maps on examples.
      steps: The steps that choose and order the rows.
    """

    reader: ExampleReader
    steps: tuple[ArrangingStep, ...] = ()

    def cardinality(self) -> int:
        """Return the number of examples in one epoch; a filter that has not run judges all rows."""
        end = max(
            (i + 1 for i, step in enumerate(self.steps) if isinstance(step, RowFilter)), default=0
        )
        count = self._without_shuffles(end).make_order((), (0,)).length if end else self.row_count
        return functools.reduce(lambda n, step: step.cardinality(n), self.steps[end:], count)

    def max_cardinality(self) -> int:
        """Return the number of examples in one epoch if filters kept all."""
        return functools.reduce(lambda n, step: step.cardinality(n), self.steps, self.row_count)

    @property
    def row_filters(self) -> tuple[RowFilter, ...]:
        """The filters, in their order."""
        return tuple(step for step in self.steps if isinstance(step, RowFilter))

    def add_filter(self, predicate: Callable[..., Any]) -> Examples:
        """Return those examples that a predicate keeps.

        Raises:
          DataError: There is no end, or each epoch takes other rows.
        """
        if self.max_cardinality() == INFINITE:
            raise DataError("An endless dataset has no rows to count; call filter before repeat().")
        kinds = [type(step) for step in self.steps]
        shuffle_index = next(
            (i for i, kind in enumerate(kinds) if issubclass(kind, Shuffle)), len(kinds)
        )
        if Stride in kinds[shuffle_index:]:
            raise DataError(
                "filter after shuffle and take, skip or shard would keep another number of rows in "
                "each epoch; call filter before shuffle, or before take."
            )
        list_candidates = self._without_shuffles(len(kinds)).list_rows
        selection = RowSelection(self.reader, predicate, list_candidates)
        step = RowFilter(predicate, len(self.reader.fns), selection)
        return dataclasses.replace(self, steps=(*self.steps, step))

    def list_rows(self) -> RowIndices:
        """Return the rows that an epoch reads, increasing."""
        order = self.make_order((), (0,))
        row_indices: RowIndices = np.unique(order.get_rows(0, order.length))
        return row_indices

    def _without_shuffles(self, end: int) -> Examples:
        """Return the examples after the first `end` steps, without the shuffles among these."""
        steps = tuple(step for step in self.steps[:end] if not isinstance(step, Shuffle))
        return dataclasses.replace(self, steps=steps)

    @property
    def row_count(self) -> int:
        """The number of rows of the arrays."""
        return self.reader.array_tree.row_count

    def make_order(self, seeds: Seeds, path: EpochPath) -> Order:
        """Return the rows of one epoch."""
        make: Callable[[EpochPath], Order] = self._make_first_order
        for step in self.steps:
            make = functools.partial(step.transform_order, make, seeds)
        return make(path)

    def _make_first_order(self, path: EpochPath) -> Order:
        return make_straight_order(self.row_count)

    def iterate_elements(self, seeds: Seeds, path: EpochPath) -> Iterator[Any]:
        """Iterate over the examples of one epoch."""
        order = self.make_order(seeds, path)
        endless = order.length == INFINITE
        positions = itertools.count() if endless else iter(range(order.length))
        return ReadIterator(
            positions,
            lambda position: self.reader.read_example(
                int(order.get_rows(position, position + 1)[0])
            ),
        )

    def make_spec(self, *leading: int | None) -> Any:
        """Return the tree of `Spec`, or None if only a map knows; see `ArrayTree.specs`."""
        return None if self.reader.fns else self.reader.array_tree.make_specs(*leading)

    def describe(self) -> str:
        """Return source, maps and steps as text, but not the contents of arrays."""
        maps = [f"Map({get_function_name(fn)})" for fn in self.reader.fns]
        return _join_descriptions(self.reader.array_tree.describe(), maps, self.steps)

    def digest_source(self) -> bytes:
        """Return a digest of rows and `describe`; empty if rows are not in memory, or filtered."""
        array_tree = self.reader.array_tree
        return _digest_source(array_tree.sample_rows(), self.describe(), self.steps)

    def add_map(self, fn: MapFn) -> Examples:
        """Return these examples with one more map; arranging and mapping do not interfere."""
        reader = ExampleReader(self.reader.array_tree, (*self.reader.fns, fn))
        return dataclasses.replace(self, reader=reader)


@final
@dataclasses.dataclass(frozen=True)
class Batches:
    """A dataset after ``batch``, or one that was given in batches.

    Attributes:
      batch_source: Examples with the step that joins them, a stream of batches, or files that are
        one batch each.
      steps: The steps on the batches.
    """

    batch_source: tuple[Examples, Batch | PaddedBatch] | Stream | Files
    steps: tuple[Step, ...] = ()

    def cardinality(self) -> int:
        """Return the number of batches in one epoch."""
        return self._count_batches(Examples.cardinality)

    def max_cardinality(self) -> int:
        """Return the number of batches in one epoch if filters of examples kept all."""
        return self._count_batches(Examples.max_cardinality)

    def _count_batches(self, count_examples: Callable[[Examples], int]) -> int:
        if isinstance(self.batch_source, Stream):
            count = self.batch_source.cardinality
        elif isinstance(self.batch_source, Files):
            count = len(self.batch_source.paths)
        else:
            examples, batch = self.batch_source
            count = batch.cardinality(count_examples(examples))
        return functools.reduce(lambda n, step: step.cardinality(n), self.steps, count)

    @property
    def row_filters(self) -> tuple[RowFilter, ...]:
        """The filters of the examples, in their order."""
        return self.batch_source[0].row_filters if isinstance(self.batch_source, tuple) else ()

    def add_filter(self, predicate: Callable[..., Any]) -> Batches:
        """Return those batches that a predicate keeps."""
        return dataclasses.replace(self, steps=(*self.steps, BatchFilter(predicate)))

    @property
    def is_shuffled(self) -> bool:
        """Whether examples or batches are shuffled."""
        example_steps = self.batch_source[0].steps if isinstance(self.batch_source, tuple) else ()
        return any(isinstance(step, Shuffle) for step in (*example_steps, *self.steps))

    def iterate_batches(self, seeds: Seeds, path: EpochPath) -> Iterator[LazyBatch]:
        """Iterate over one epoch."""
        make_batches: BatchMaker = functools.partial(self._make_batches, seeds)
        for step in self.steps:
            make_batches = functools.partial(step.transform_batches, make_batches, seeds)
        return make_batches(path)

    def iterate_elements(
        self, seeds: Seeds, path: EpochPath, passed_count: int = 0
    ) -> Iterator[Any]:
        """Iterate over the whole batches of one epoch, without the first `passed_count`."""
        lazy_batches = self.iterate_batches(seeds, path)
        remaining_batches = (
            itertools.islice(lazy_batches, passed_count, None) if passed_count else lazy_batches
        )
        return ReadIterator(remaining_batches, lambda lazy_batch: lazy_batch.read_part(0, 1))

    def make_spec(self) -> Any:
        """Return the tree of `Spec` of a batch, or None if it is not known before reading."""
        is_mapped = any(isinstance(step, Map) for step in self.steps)
        if is_mapped or not isinstance(self.batch_source, tuple):
            return None
        examples, batch = self.batch_source
        axes = [batch.size if batch.drop_remainder else None]
        for step in self.steps:
            if isinstance(step, Batch | Rebatch):
                row_axes = axes if isinstance(step, Batch) else axes[1:]
                axes = [step.size if step.drop_remainder else None, *row_axes]
        if isinstance(batch, Batch) or examples.reader.fns:
            return examples.make_spec(*axes)
        return batch.make_spec(examples.reader.array_tree, axes)

    def batch_size(self) -> int | None:
        """Return the rows of a full batch, or None if it is not known before reading."""
        size = self.batch_source[1].size if isinstance(self.batch_source, tuple) else None
        return functools.reduce(lambda n, step: step.batch_size(n), self.steps, size)

    def describe(self) -> str:
        """Return source and steps as text, but not the contents of arrays."""
        if isinstance(self.batch_source, Stream):
            source = f"{self.batch_source.cardinality} batches of a {self.batch_source.type_name}"
        elif isinstance(self.batch_source, Files):
            source = f"{self.batch_source.describe()}, {get_function_name(self.batch_source.read)}"
        else:
            source = f"{self.batch_source[0].describe()}, {self.batch_source[1]}"
        return _join_descriptions(source, [], self.steps)

    def sample_rows(self) -> list[Array | None]:
        """Return `ArrayTree.sample` of the arrays; of other sources nothing is looked at."""
        return (
            self.batch_source[0].reader.array_tree.sample_rows()
            if isinstance(self.batch_source, tuple)
            else []
        )

    def digest_source(self) -> bytes:
        """Return a digest of `sample_rows` and `describe`; empty if functions may drop rows."""
        if not isinstance(self.batch_source, tuple):
            return b""
        steps = (*self.batch_source[0].steps, *self.steps)
        return _digest_source(self.sample_rows(), self.describe(), steps)

    def _make_batches(self, seeds: Seeds, path: EpochPath) -> Iterator[LazyBatch]:
        if not isinstance(self.batch_source, tuple):
            return self._load_batches(self.batch_source)
        examples, batch = self.batch_source
        return batch.make_batches(examples.reader, examples.make_order(seeds, path))

    @staticmethod
    def _load_batches(batch_source: Stream | Files) -> Iterator[LazyBatch]:
        if isinstance(batch_source, Stream):
            for index, batch in enumerate(batch_source()):
                batch_name = f"batch {index} of the iterable"
                yield LoadedBatch(
                    functools.partial(ArrayTree, batch, batch_name), is_in_memory=True
                )
        else:
            for name in batch_source.paths:
                yield LoadedBatch(functools.partial(batch_source.open, name))


def _join_descriptions(source_text: str, maps: list[str], steps: tuple[Step, ...]) -> str:
    return ", ".join([source_text, *maps, *(repr(step) for step in steps)])


def _digest_source(sample: list[Array | None], description: str, steps: tuple[Step, ...]) -> bytes:
    for step in steps:
        if isinstance(step, RowFilter | BatchFilter) or (
            isinstance(step, Map) and not step.rowwise
        ):
            return b""
    arrays = [array for array in sample if array is not None and not array.dtype.hasobject]
    if not any(array.size for array in arrays):
        return b""
    return digest([*arrays, np.frombuffer(description.encode(), np.uint8)])


def make_pipeline(source: Any) -> Examples | Batches:
    """Return the dataset of a source: examples of a tree of arrays, or batches of anything else.

    Raises:
      DataError: The arrays do not fit together.
      TypeError: It is not a source.
    """
    array_kind = None if is_array(source) else find_array_kind(source)
    row_array = None if array_kind is None else array_kind.rows_of(source)
    source = source if row_array is None else row_array
    if is_array(source) or isinstance(source, (Mapping, tuple)) or is_buffer(source):
        return Examples(ExampleReader(ArrayTree(source, "the source of the dataset")))
    return Batches(Stream(source))


@final
class AutoShardPolicy(enum.IntEnum):
    """How ``experimental_distribute_dataset`` gives each replica its part.

    - AUTO, DATA, HINT: every global batch of L rows is divided into parts of ``ceil(L / n)`` rows;
      each replica reads its own part.
    - OFF: under ``MirroredStrategy`` the rows of all batches are dealt out in turns of the batch
      size B, of which replica i takes ``B // n`` rows, one more if ``i < B % n``; so a short last
      batch goes to the first replicas. Under ``MultiWorkerMirroredStrategy`` nothing is divided:
      every rank goes over its whole dataset, in batches of such sizes.
    - FILE: for `Dataset.from_files`: replica i reads files i, i + n and so on. For data that come
      from no files it is OFF under ``MirroredStrategy``, else an error.

    Like: ``tf.data.experimental.AutoShardPolicy``.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


@final
class DistributeOptions:
    """The part of `DatasetOptions` that is about distribution.

    Attributes:
      num_devices: No effect.

    Like: ``tf.data.experimental.DistributeOptions``.
    """

    __slots__ = ("_policy", "num_devices")

    def __init__(self) -> None:
        """Create options that ask for nothing."""
        self._policy = AutoShardPolicy.AUTO
        self.num_devices: int | None = None

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """How each replica gets its part.

        Raises:
          TypeError: Set to something else than an `AutoShardPolicy`.
        """
        return self._policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, policy: AutoShardPolicy) -> None:
        if not isinstance(policy, AutoShardPolicy):
            raise TypeError(f"auto_shard_policy must be an AutoShardPolicy, got {policy!r}.")
        self._policy = policy

    def __eq__(self, other: object) -> bool:
        """Tell whether `other` asks for the same."""
        if not isinstance(other, DistributeOptions):
            return NotImplemented
        return (self._policy, self.num_devices) == (other._policy, other.num_devices)


class DatasetOptions:
    """What `Dataset.with_options` takes.

    Attributes:
      experimental_distribute: `DistributeOptions`.

    Like: ``tf.data.Options``.

    Example:
      >>> options = DatasetOptions()
      >>> options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    """

    __slots__ = ("experimental_distribute",)

    def __init__(self) -> None:
        """Create options that ask for nothing."""
        self.experimental_distribute = DistributeOptions()

    def __eq__(self, other: object) -> bool:
        """Tell whether `other` asks for the same."""
        if not isinstance(other, DatasetOptions):
            return NotImplemented
        return self.experimental_distribute == other.experimental_distribute
