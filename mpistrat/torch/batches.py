"""Datasets of PyTorch as sources, and batches of tensors for a loop in the style of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from mpistrat import pytree
from mpistrat.data.dataset import Dataset
from mpistrat.errors import DataError
from mpistrat.strategy.strategies import resolve_strategy
from mpistrat.strategy.strategy import Strategy
from mpistrat.torch.items import rows_of
from mpistrat.torch.tensors import as_tensor
from mpistrat.variables.regroup import select_local

__all__ = ["TensorBatches", "batches"]


@final
class TensorBatches:
    """Batches of this rank's rows, as tensors; made by `batches`.

    Each ``iter()`` is one epoch. Collective, and so is each ``next()``: all ranks iterate alike,
    and get as many batches; where a batch has fewer rows than there are ranks, some get none.
    """

    def __init__(self, dataset: Dataset, strategy: Strategy):
        """Distribute a dataset."""
        self._batch_count, self._dataset = dataset.cardinality(), dataset
        self._batches = strategy.experimental_distribute_dataset(dataset)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch."""
        yield from map(self.convert, self._batches)

    @property
    def distributed(self) -> Any:
        """The distributed dataset, of which ``CheckpointManager.resume`` takes the position."""
        return self._batches

    @staticmethod
    def convert(element: Any) -> Any:
        """Return an element as tensors; `CheckpointManager.resume` calls this, too."""
        return pytree.map(as_tensor, select_local(element))

    def checkpoint_state(self) -> Any:
        """Return the position in the data, as the dataset describes it."""
        return self._dataset.checkpoint_state()

    def restore_state(self, state: Any) -> None:
        """Continue at a position that `checkpoint_state` returned."""
        self._dataset.restore_state(state)

    def __len__(self) -> int:
        """Return the number of batches of an epoch.

        Raises:
          TypeError: The number is not known, or the dataset has no end.
        """
        if self._batch_count < 0:
            raise TypeError("these batches have no end, or only reading tells how many there are.")
        return int(self._batch_count)


def _check_loader(loader: DataLoader[Any], batch_size: int | None) -> None:
    """Raise DataError if a loader would read rows twice or never, or start processes."""
    advice = "Give its dataset: batches(loader.dataset, batch_size=...)"
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            "this DataLoader reads an IterableDataset, of which each rank would read all. Give "
            "batches that are alike on all ranks, mpistrat.Dataset(batches), or a dataset with "
            "__len__ and __getitem__."
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise DataError(
            "this DataLoader has a DistributedSampler, which divides the rows among ranks as "
            f"batches() does: they would be divided twice. {advice}."
        )
    if not isinstance(loader.sampler, SequentialSampler):
        raise DataError(
            "this DataLoader draws its order from each rank's own generator, so rows would come "
            f"twice or never. {advice[:-1]}, shuffle=True) has one order on all ranks."
        )
    if batch_size is not None and loader.batch_sampler is not None:
        raise DataError(
            f"this DataLoader makes batches of {loader.batch_size} already, and batch_size="
            f"{batch_size} would make batches of those. Leave it out. Or: {advice[0].lower()}"
            f"{advice[1:]}."
        )
    if loader.num_workers:
        raise DataError(
            f"this DataLoader has num_workers={loader.num_workers}, which are processes, and a "
            f"program that has started MPI must not fork. {advice[:-1]}, workers="
            f"{loader.num_workers}) reads in threads."
        )


def batches(
    data: Any,
    strategy: Strategy | None = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    workers: int = 0,
) -> TensorBatches:
    """Divide batches over the ranks, as tensors: in place of ``torch.utils.data.DataLoader``.

    Collective: all ranks call it, with the same data.

    Args:
      data: A map-style dataset of PyTorch, of which each rank reads its own items only; a
        `mpistrat.Dataset`; or a source of one, such as a tuple of arrays.
      strategy: The strategy; None for the current one.
      batch_size: How many rows all ranks together get in a batch. None for a source of batches,
        and only for that: a `mpistrat.Dataset` that was batched, or a ``DataLoader``.
      shuffle: Use another order of rows in each epoch, the same on all ranks.
      seed: The seed of these orders.
      drop_last: Leave out the last batch of an epoch, if it has fewer rows.
      workers: How many threads read the items of a dataset of PyTorch, two batches ahead; 0 reads
        when a batch is asked for. Threads, as a process that has started MPI must not fork:
        ``__getitem__`` is called in several at once. It helps if they read files, decode images or
        otherwise release the GIL.

    Returns:
      An iterable of trees of tensors, one epoch each time: of a batch of L rows, replica i of n has
      ``[i * k, min((i + 1) * k, L))`` with ``k = ceil(L / n)``, perhaps none.

    Raises:
      TypeError: `strategy` is not one.
      ContextError: No strategy is in scope, in a job of several ranks.
      DataError: `data` is not a source of a dataset, or is a ``DataLoader`` with an order or with
        processes of its own; or the batch size is missing, less than 1, or given for a source of
        batches; or `workers` is given for a source that has no items.
      LockstepError: The ranks have other data.

    Cost: one handshake, and one for each batch. `mpistrat.Dataset` has maps, caches and
    prefetching.
    Like: ``torch.utils.data.DataLoader`` with a ``DistributedSampler``, but the last rows are
    neither dropped nor doubled.

    Example:
      >>> import numpy as np, mpistrat as ms
      >>> data = np.arange(5.0), np.arange(5)
      >>> for x, y in batches(data, ms.OneDeviceStrategy("cpu"), batch_size=3):
      ...     print(x, y)
      tensor([0., 1., 2.], dtype=torch.float64) tensor([0, 1, 2])
      tensor([3., 4.], dtype=torch.float64) tensor([3, 4])
    """
    strategy = resolve_strategy(strategy, "batches", "Write batches(data, strategy, ...)")
    if isinstance(data, DataLoader):
        _check_loader(data, batch_size)
    row_source = None
    if not isinstance(data, tuple | Mapping | Dataset) and not hasattr(data, "shape"):
        row_source = rows_of(data, workers)
    if workers and row_source is None:
        raise DataError(
            f"workers={workers} read the items of a map-style dataset of PyTorch, and this is "
            f"{type(data).__name__}. Give its dataset, or ms.Dataset(...).prefetch(2)."
        )
    dataset = data if isinstance(data, Dataset) else Dataset(row_source or data)
    if not dataset.batched and batch_size is None:
        raise DataError(
            "batches: how many rows do all ranks together get in a batch? Give batch_size=..., as "
            "this is a source of single rows."
        )
    if dataset.batched and batch_size is not None:
        raise DataError(
            f"batches: these are batches already, and batch_size={batch_size} would make batches "
            "of them. Leave it out, or give Dataset(...).rebatch(batch_size)."
        )
    if shuffle:
        dataset = dataset.shuffle(seed=seed)
    if batch_size is not None:
        dataset = dataset.batch(batch_size, drop_remainder=drop_last)
    return TensorBatches(dataset.prefetch(2) if workers else dataset, strategy)
