"""A dataset as data: its source, the steps on its examples, the steps on its batches.

`Examples` are rows of arrays before ``batch``, `Batches` are what comes after it or was given in
batches. Both are immutable, and an epoch of either follows from seeds and the number of the epoch.

Options for how a dataset is distributed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array, is_buffer, kind_of
from mpistrat.data.filtered import BatchFilter, Filter, RowChoice
from mpistrat.data.pieces import (
    BatchSlice,
    ExampleReader,
    Given,
    MapFn,
    Order,
    named,
    straight,
)
from mpistrat.data.sources import INFINITE, Arrays, Files, Reads, Rows, Stream, is_array
from mpistrat.data.steps import (
    Arrange,
    Batch,
    Map,
    PaddedBatch,
    Path,
    Pieces,
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
      steps: What arranges the rows.
    """

    reader: ExampleReader
    steps: tuple[Arrange, ...] = ()

    def cardinality(self) -> int:
        """Return the number of examples in one epoch; a filter that has not run judges all rows."""
        end = max(
            (i + 1 for i, step in enumerate(self.steps) if isinstance(step, Filter)), default=0
        )
        count = self._unshuffled(end).order((), (0,)).length if end else self.rows
        return functools.reduce(lambda n, step: step.cardinality(n), self.steps[end:], count)

    def upper_bound(self) -> int:
        """Return the number of examples as if filters kept all."""
        return functools.reduce(lambda n, step: step.cardinality(n), self.steps, self.rows)

    @property
    def filters(self) -> tuple[Filter, ...]:
        """The filters, in their order."""
        return tuple(step for step in self.steps if isinstance(step, Filter))

    def filtered(self, predicate: Callable[..., Any]) -> Examples:
        """Return those examples that a predicate keeps.

        Raises:
          DataError: There is no end, or each epoch takes other rows.
        """
        if self.upper_bound() == INFINITE:
            raise DataError("An endless dataset has no rows to count; call filter before repeat().")
        kinds = [type(step) for step in self.steps]
        shuffle = next((i for i, kind in enumerate(kinds) if issubclass(kind, Shuffle)), len(kinds))
        if Stride in kinds[shuffle:]:
            raise DataError(
                "filter after shuffle and take, skip or shard would keep another number of rows in "
                "each epoch; call filter before shuffle, or before take."
            )
        choice = RowChoice(self.reader, predicate, self._unshuffled(len(kinds)).reached_rows)
        step = Filter(predicate, len(self.reader.fns), choice)
        return dataclasses.replace(self, steps=(*self.steps, step))

    def reached_rows(self) -> Rows:
        """Return the rows that an epoch reads, increasing."""
        order = self.order((), (0,))
        rows: Rows = np.unique(order.span(0, order.length))
        return rows

    def _unshuffled(self, end: int) -> Examples:
        """Return the examples after the first `end` steps, without the shuffles among these."""
        steps = tuple(step for step in self.steps[:end] if not isinstance(step, Shuffle))
        return dataclasses.replace(self, steps=steps)

    @property
    def rows(self) -> int:
        """The number of rows of the arrays."""
        return self.reader.arrays.rows

    def order(self, seeds: Seeds, path: Path) -> Order:
        """Return the rows of one epoch."""
        make: Callable[[Path], Order] = self._begin
        for step in self.steps:
            make = functools.partial(step.order, make, seeds)
        return make(path)

    def _begin(self, path: Path) -> Order:
        return straight(self.rows)

    def elements(self, seeds: Seeds, path: Path) -> Iterator[Any]:
        """Iterate over the examples of one epoch."""
        order = self.order(seeds, path)
        endless = order.length == INFINITE
        positions = itertools.count() if endless else iter(range(order.length))
        return Reads(
            positions,
            lambda position: self.reader.example(int(order.span(position, position + 1)[0])),
        )

    def spec(self, *leading: int | None) -> Any:
        """Return the tree of `Spec`, or None if only a map knows; see `Arrays.specs`."""
        return None if self.reader.fns else self.reader.arrays.specs(*leading)

    def describe(self) -> str:
        """Return source, maps and steps as text, but not the contents of arrays."""
        maps = [f"Map({named(fn)})" for fn in self.reader.fns]
        return _listed(self.reader.arrays.describe(), maps, self.steps)

    def mapped(self, fn: MapFn) -> Examples:
        """Return these examples with one more map; arranging and mapping do not interfere."""
        reader = ExampleReader(self.reader.arrays, (*self.reader.fns, fn))
        return dataclasses.replace(self, reader=reader)


@final
@dataclasses.dataclass(frozen=True)
class Batches:
    """A dataset after ``batch``, or one that was given in batches.

    Attributes:
      source: Examples and how they are batched, a stream of batches, or files that are one each.
      steps: What happens to the batches.
    """

    source: tuple[Examples, Batch | PaddedBatch] | Stream | Files
    steps: tuple[Step, ...] = ()

    def cardinality(self) -> int:
        """Return the number of batches in one epoch."""
        return self._count(Examples.cardinality)

    def upper_bound(self) -> int:
        """Return the number of batches as if filters of examples kept all."""
        return self._count(Examples.upper_bound)

    def _count(self, count_examples: Callable[[Examples], int]) -> int:
        if isinstance(self.source, Stream):
            count = self.source.cardinality
        elif isinstance(self.source, Files):
            count = len(self.source.paths)
        else:
            examples, batch = self.source
            count = batch.cardinality(count_examples(examples))
        return functools.reduce(lambda n, step: step.cardinality(n), self.steps, count)

    @property
    def filters(self) -> tuple[Filter, ...]:
        """The filters of the examples, in their order."""
        return self.source[0].filters if isinstance(self.source, tuple) else ()

    def filtered(self, predicate: Callable[..., Any]) -> Batches:
        """Return those batches that a predicate keeps."""
        return dataclasses.replace(self, steps=(*self.steps, BatchFilter(predicate)))

    def stream(self, seeds: Seeds, path: Path) -> Iterator[BatchSlice]:
        """Iterate over one epoch."""
        make: Pieces = functools.partial(self._begin, seeds)
        for step in self.steps:
            make = functools.partial(step.stream, make, seeds)
        return make(path)

    def elements(self, seeds: Seeds, path: Path, passed_count: int = 0) -> Iterator[Any]:
        """Iterate over the whole batches of one epoch, without the first `passed_count`."""
        pieces = self.stream(seeds, path)
        remaining_pieces = itertools.islice(pieces, passed_count, None) if passed_count else pieces
        return Reads(remaining_pieces, lambda piece: piece.cut(0, 1))

    def spec(self) -> Any:
        """Return the tree of `Spec` of a batch, or None if only reading could tell."""
        mapped = any(isinstance(step, Map) for step in self.steps)
        if mapped or not isinstance(self.source, tuple):
            return None
        examples, batch = self.source
        axes = [batch.size if batch.drop_remainder else None]
        for step in self.steps:
            if isinstance(step, Batch | Rebatch):
                rest = axes if isinstance(step, Batch) else axes[1:]
                axes = [step.size if step.drop_remainder else None, *rest]
        if isinstance(batch, Batch) or examples.reader.fns:
            return examples.spec(*axes)
        return batch.spec(examples.reader.arrays, axes)

    def batch_size(self) -> int | None:
        """Return how many rows a full batch has, or None if only reading could tell."""
        size = self.source[1].size if isinstance(self.source, tuple) else None
        return functools.reduce(lambda n, step: step.batch_size(n), self.steps, size)

    def describe(self) -> str:
        """Return source and steps as text, but not the contents of arrays."""
        if isinstance(self.source, Stream):
            source = f"{self.source.cardinality} batches of a {self.source.kind}"
        elif isinstance(self.source, Files):
            source = f"{self.source.describe()}, {named(self.source.read)}"
        else:
            source = f"{self.source[0].describe()}, {self.source[1]}"
        return _listed(source, [], self.steps)

    def sample(self) -> list[Array | None]:
        """Return `Arrays.sample` of the arrays; of other sources nothing is looked at."""
        return self.source[0].reader.arrays.sample() if isinstance(self.source, tuple) else []

    def _begin(self, seeds: Seeds, path: Path) -> Iterator[BatchSlice]:
        if not isinstance(self.source, tuple):
            return self._given(self.source)
        examples, batch = self.source
        return batch.examples(examples.reader, examples.order(seeds, path))

    @staticmethod
    def _given(source: Stream | Files) -> Iterator[BatchSlice]:
        if isinstance(source, Stream):
            for index, batch in enumerate(source()):
                batch_name = f"batch {index} of the iterable"
                yield Given(functools.partial(Arrays, batch, batch_name), is_in_memory=True)
        else:
            for name in source.paths:
                yield Given(functools.partial(source.open, name))


def _listed(source: str, maps: list[str], steps: tuple[Step, ...]) -> str:
    return ", ".join([source, *maps, *(repr(step) for step in steps)])


def begin(source: Any) -> Examples | Batches:
    """Return the dataset of a source: examples of a tree of arrays, or batches of anything else.

    Raises:
      DataError: The arrays do not fit together.
      TypeError: It is not a source.
    """
    kind = None if is_array(source) else kind_of(source)
    rows = None if kind is None else kind.rows_of(source)
    source = source if rows is None else rows
    if is_array(source) or isinstance(source, (Mapping, tuple)) or is_buffer(source):
        return Examples(ExampleReader(Arrays(source, "the source of the dataset")))
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
