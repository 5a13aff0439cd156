"""The ways to divide a dataset over replicas, without communication.

A `Sharding` is one way; `shard_by_policy` chooses one by the options of the dataset:

=========================  ======================================================================
way                        used for
=========================  ======================================================================
divide each batch          the policies AUTO, DATA, HINT
deal the rows out evenly   OFF
everything on each rank    OFF in the local view
files in turns             FILE
elements in turns          input functions of the older kind
a dataset of each rank     ``distribute_datasets_from_function``
a function of each rank    input functions that return a callable
=========================  ======================================================================
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpistrat import pytree
from mpistrat.arrays import Array, digest
from mpistrat.data.dataset import Dataset
from mpistrat.data.iterators import prefetch_elements
from mpistrat.data.pieces import LazyBatch
from mpistrat.data.pipeline import AutoShardPolicy, Batches
from mpistrat.data.sources import ReadIterator, Spec
from mpistrat.data.steps import divide_evenly, rejoin_batches
from mpistrat.errors import DataError, OutOfRangeError

UNSEEN = bytes(16)


class StepPart(NamedTuple):
    """A replica's part of a step.

    Attributes:
      element: The part.
      row_count: The number of rows of the global batch that was divided; -1 if there is none.
      contents: A digest of the arrays that every replica has read or made whole for it; `UNSEEN` if
        these are not compared in this step.
    """

    element: Any
    row_count: int = -1
    contents: bytes = UNSEEN

    def digest(self) -> bytes:
        """Return a digest of the part; `UNSEEN` if it has no elements."""
        arrays = [array for array in map(np.asarray, pytree.flatten(self.element)[0]) if array.size]
        return digest(arrays) if arrays else UNSEEN


Parts: TypeAlias = Iterator[StepPart]


class ShardSpec(NamedTuple):
    """The number of this replica, and the settings of its shard.

    Attributes:
      rank: The number of the replica.
      size: The number of replicas.
      is_local_view: Whether cross-replica code sees only this replica's data.
      check_interval: Contents are compared every so many steps of an epoch, from the first; 0 for
        never.
    """

    rank: int
    size: int
    is_local_view: bool
    check_interval: int = 0

    def digest_contents(
        self, step: int, lazy_batches: Iterable[LazyBatch], includes_results: bool = True
    ) -> bytes:
        """Return a digest of the arrays that all replicas hold whole; `UNSEEN` in most steps."""
        if not self.check_interval or step % self.check_interval:
            return UNSEEN
        arrays = itertools.chain.from_iterable(
            lazy_batch.iterate_replicated_arrays(includes_results) for lazy_batch in lazy_batches
        )
        return digest(arrays)


class Sharding(NamedTuple):
    """One way to divide a dataset over replicas.

    Attributes:
      method_text: The name of the way, for the handshake.
      dataset: The dataset that this replica reads.
      is_same_dataset: Whether all ranks hold the same dataset: then its description is checked, and
        its seeds are shared.
      is_cut: Whether every step divides one global batch, whose number of rows must agree.
      make_parts: ``make_parts(lazy_batches, passed_count)`` returns this replica's parts of one
        epoch, without the first `passed_count` steps; None to iterate over the dataset itself.
      fixed_row_count: The rows that each replica gets in every step, if that is known.
      compares_rows: Whether the rows that the ranks hold must be equal, if `is_same_dataset`.
      is_single_row: Whether the dataset has batches of one row, and each replica gets that row
        without its first axis.
    """

    method_text: str
    dataset: Dataset
    is_same_dataset: bool
    is_cut: bool
    make_parts: Callable[[Iterator[LazyBatch], int], Parts] | None
    fixed_row_count: int | None = None
    compares_rows: bool = True
    is_single_row: bool = False

    @property
    def element_spec(self) -> Any:
        """The tree of `Spec` of the elements; None if it is not known before reading."""
        spec = self.dataset.element_spec
        if spec is None or not self.is_single_row:
            return spec
        return pytree.map(lambda leaf: Spec(leaf.shape[1:], leaf.dtype), spec)

    def describe(self) -> str:
        """Return a text that must be equal on all ranks."""
        if self.is_same_dataset:
            return f"{self.method_text}: {self.dataset._describe()}"
        return self.method_text

    def sample_rows(self) -> list[Array | None]:
        """Return contents that have to be the same on all ranks, leaf by leaf; see `ArrayTree`."""
        pipeline = self.dataset._pipeline
        is_compared = self.is_same_dataset and self.compares_rows
        return pipeline.sample_rows() if is_compared and isinstance(pipeline, Batches) else []

    def without_comparison(self) -> Sharding:
        """Return the same way, for ranks that may hold different rows."""
        return self._replace(
            method_text=f"{self.method_text}, rows may differ", compares_rows=False
        )

    def iterate_epoch(self, epoch: int, seeds: Sequence[int], passed_count: int = 0) -> Parts:
        """Iterate over this replica's parts of an epoch, without `passed_count` first batches."""
        if self.make_parts is None:
            # Not a generator, which would end at the first error.
            return map(StepPart, self.dataset)
        parts = self.make_parts(self.dataset._iterate_lazy_batches(epoch, seeds), passed_count)
        depth = self.dataset._prefetch_depth
        return prefetch_elements(parts, depth) if depth else parts


def use_own_datasets(dataset: Dataset) -> Sharding:
    """Return the way where each replica brings its own dataset, whole."""
    return Sharding(
        "a dataset of each rank", dataset, is_same_dataset=False, is_cut=False, make_parts=None
    )


def shard_function_calls(fn: Callable[[], Any]) -> Sharding:
    """Return the way where each replica calls a function for each element, until that has none."""

    def make_parts(lazy_batches: Iterator[LazyBatch], passed_count: int) -> Parts:
        return map(lambda _: StepPart(call_function()), itertools.repeat(None))

    def call_function() -> Any:
        try:
            return fn()
        except OutOfRangeError:
            raise StopIteration from None

    placeholder = Dataset.from_batches(lambda: ())  # nothing is known before the function is called
    return Sharding(
        "a function of each rank",
        placeholder,
        is_same_dataset=False,
        is_cut=False,
        make_parts=make_parts,
    )


def shard_in_turns(dataset: Dataset, shard_spec: ShardSpec) -> Sharding:
    """Return the way where the replicas get undivided elements in turns."""
    is_single_row = not dataset.batched
    batched_dataset = dataset.batch(1) if is_single_row else dataset

    def make_parts(lazy_batches: Iterator[LazyBatch], passed_count: int) -> Parts:
        rounds = (_take_round(lazy_batches, shard_spec, step) for step in itertools.count())
        local_batches = itertools.takewhile(lambda pair: pair[0] is not None, rounds)
        return ReadIterator(
            local_batches, lambda pair: StepPart(read_element(pair[0]), contents=pair[1])
        )

    def read_element(lazy_batch: LazyBatch) -> Any:
        batch = lazy_batch.read_part(0, 1)
        return pytree.map(lambda leaf: leaf[0], batch) if is_single_row else batch

    description = f"{'examples' if is_single_row else 'batches'} in turns"
    return Sharding(
        description,
        batched_dataset,
        is_same_dataset=True,
        is_cut=False,
        make_parts=make_parts,
        is_single_row=is_single_row,
    )


def _take_round(
    lazy_batches: Iterator[LazyBatch], shard_spec: ShardSpec, step: int
) -> tuple[Any, bytes]:
    """Return this replica's batch of the next round, or None; and a digest of the whole round.

    A round has one batch for each replica.
    """
    local_batch = None

    def take_batches() -> Iterator[LazyBatch]:  # holds no batch longer than needed
        nonlocal local_batch
        for index, lazy_batch in enumerate(itertools.islice(lazy_batches, shard_spec.size)):
            local_batch = lazy_batch if index == shard_spec.rank else local_batch
            yield lazy_batch

    round_batches = take_batches()
    contents = shard_spec.digest_contents(step, round_batches, includes_results=False)
    collections.deque(round_batches, maxlen=0)
    return local_batch, contents


def shard_by_policy(dataset: Dataset, shard_spec: ShardSpec) -> Sharding:
    """Return the way that a dataset of global batches has in its options.

    Raises:
      DataError: Files are to be divided, and there are none, or fewer than replicas.
    """
    policy = dataset._policy
    if policy is AutoShardPolicy.FILE and dataset._file_count:
        return _shard_files(dataset, shard_spec)
    if policy is AutoShardPolicy.FILE and shard_spec.is_local_view:
        raise DataError(
            "AutoShardPolicy.FILE divides the files of Dataset.from_files, and this dataset has "
            "none. Use AutoShardPolicy.DATA, which divides every batch."
        )
    if policy in (AutoShardPolicy.OFF, AutoShardPolicy.FILE):
        if shard_spec.is_local_view:
            return Sharding(
                "all on each rank",
                dataset,
                is_same_dataset=False,
                is_cut=False,
                make_parts=_make_parts_in_shares(dataset, shard_spec),
            )
        if dataset.batch_size is not None:
            return _shard_evenly(dataset, shard_spec, dataset.batch_size)
    return _shard_by_rows(dataset, shard_spec)


def _shard_by_rows(dataset: Dataset, shard_spec: ShardSpec) -> Sharding:
    def make_reader() -> Callable[[LazyBatch], StepPart]:
        steps = itertools.count()

        def read_part(lazy_batch: LazyBatch) -> StepPart:
            contents = (
                shard_spec.digest_contents(next(steps), [lazy_batch])
                if shard_spec.check_interval
                else UNSEEN
            )
            return StepPart(
                *lazy_batch.read_part_and_count(shard_spec.rank, shard_spec.size), contents
            )

        return read_part

    return Sharding(
        "cut",
        dataset,
        is_same_dataset=True,
        is_cut=True,
        make_parts=_make_stepwise_parts(make_reader),
        fixed_row_count=_find_fixed_row_count(dataset, shard_spec),
    )


def _make_stepwise_parts(
    make_reader: Callable[[], Callable[[LazyBatch], StepPart]],
    join_batches: Callable[[Iterator[LazyBatch]], Iterator[LazyBatch]] = iter,
) -> Callable[[Iterator[LazyBatch], int], Parts]:
    """Return a `Sharding.make_parts` that reads one part of each batch, by a new reader.

    The first step of an epoch that is resumed is step 0 too: contents are compared in the first
    step that ranks take.
    """

    def make_parts(lazy_batches: Iterator[LazyBatch], passed_count: int) -> Parts:
        remaining_batches = (
            itertools.islice(join_batches(lazy_batches), passed_count, None)
            if passed_count
            else join_batches(lazy_batches)
        )
        return ReadIterator(remaining_batches, make_reader())

    return make_parts


def _find_fixed_row_count(dataset: Dataset, shard_spec: ShardSpec) -> int | None:
    if (
        shard_spec.is_local_view
        or not dataset._has_full_batches
        or (dataset.batch_size or 0) % shard_spec.size
    ):
        return None
    return dataset.batch_size and dataset.batch_size // shard_spec.size


def _shard_evenly(dataset: Dataset, shard_spec: ShardSpec, batch_size: int) -> Sharding:
    sizes = divide_evenly(batch_size, shard_spec.size)
    start, stop = sum(sizes[: shard_spec.rank]), sum(sizes[: shard_spec.rank + 1])

    def make_reader() -> Callable[[LazyBatch], StepPart]:
        steps = itertools.count()

        def read_part(lazy_batch: LazyBatch) -> StepPart:
            row_count = lazy_batch.count_rows()
            contents = shard_spec.digest_contents(next(steps), [lazy_batch])
            return StepPart(
                lazy_batch.read_rows(min(start, row_count), min(stop, row_count)),
                row_count,
                contents,
            )

        return read_part

    make_parts = _make_stepwise_parts(
        make_reader, lambda lazy_batches: rejoin_batches(lazy_batches, (batch_size,))
    )
    return Sharding(
        "dealt out",
        dataset,
        is_same_dataset=True,
        is_cut=True,
        make_parts=make_parts,
        fixed_row_count=_find_fixed_row_count(dataset, shard_spec),
    )


def _shard_files(dataset: Dataset, shard_spec: ShardSpec) -> Sharding:
    if dataset._file_count < shard_spec.size:
        raise DataError(
            f"AutoShardPolicy.FILE: {dataset._file_count} files cannot be divided between "
            f"{shard_spec.size} replicas. Use AutoShardPolicy.DATA, which divides every batch, or "
            "more files."
        )
    local_files = dataset._select_files(shard_spec.rank, shard_spec.size)
    description = f"files in turns: {dataset._describe()}"
    return Sharding(
        description,
        local_files,
        is_same_dataset=False,
        is_cut=False,
        make_parts=_make_parts_in_shares(dataset, shard_spec),
    )


def _make_parts_in_shares(
    dataset: Dataset, shard_spec: ShardSpec
) -> Callable[[Iterator[LazyBatch], int], Parts]:
    """Return a `Sharding.make_parts` for a replica that reads all of its dataset.

    Its steps have the sizes of the parts of a batch, in an order that differs between replicas.
    """
    batch_size = dataset.batch_size
    if batch_size is None:
        return lambda lazy_batches, _: ReadIterator(
            (
                (lazy_batch, index)
                for lazy_batch in lazy_batches
                for index in range(shard_spec.size)
            ),
            lambda each: StepPart(each[0].read_part(each[1], shard_spec.size)),
        )
    sizes = divide_evenly(batch_size, shard_spec.size)
    turned_sizes = sizes[shard_spec.rank :] + sizes[: shard_spec.rank]
    return lambda lazy_batches, _: ReadIterator(
        rejoin_batches(lazy_batches, turned_sizes),
        lambda lazy_batch: StepPart(lazy_batch.read_part(0, 1)),
    )
