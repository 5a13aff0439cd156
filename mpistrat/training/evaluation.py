"""Datasets that are read once: `evaluate` computes means, `predict` results of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import numpy as np

from mpistrat import pytree
from mpistrat.data.dataset import Dataset
from mpistrat.data.pipeline import Batches
from mpistrat.data.sources import INFINITE
from mpistrat.errors import DataError, StructureError
from mpistrat.strategy.strategies import resolve_strategy
from mpistrat.strategy.strategy import Strategy
from mpistrat.training.results import as_numbers, count_rows, weighted

# What to do where no strategy is in scope.
REMEDY = "Write {}(..., strategy=strategy), or call it in strategy.scope()"


def distribute(strategy: Strategy, data: Any, call: str, is_read_once: bool = True) -> Any:
    """Batches for the replicas of a strategy: distributed here, or by the program.

    Collective for a `Dataset`.

    Args:
      strategy: The strategy.
      is_read_once: Whether a copy of a `Dataset` is distributed, so that reading it does not count
        as an epoch of the program's own.
      data: A batched `Dataset`, or what ``experimental_distribute_dataset`` or
        ``mpistrat.torch.batches`` returned.
      call: Its caller, for messages.

    Raises:
      DataError: It is a dataset of examples, or no dataset.
    """
    if isinstance(data, Dataset):
        if not data.batched:
            raise DataError(
                f"{call}: {data!r} has single examples. Call batch(global_batch_size) first."
            )
        if data.cardinality() == INFINITE and is_read_once:
            raise DataError(f"{call}: {data!r} has no end. Leave out repeat(), or use take(n).")
        if data.cardinality() == 0:
            raise DataError(f"{call}: {data!r} has no batch.")
        dataset = data._replace_pipeline(data._pipeline) if is_read_once else data
        return strategy.experimental_distribute_dataset(dataset)
    if not hasattr(data, "__iter__") or not hasattr(getattr(data, "distributed", data), "_resume"):
        raise DataError(
            f"{call}: expected a batched mpistrat.Dataset, or what "
            f"strategy.experimental_distribute_dataset returns, got {_describe_source(data)}."
        )
    return data


def _describe_source(data: Any) -> str:
    """What a program gave in place of a dataset, and how to make one of it."""
    modules = {cls.__module__ for cls in type(data).__mro__}
    if any(module.startswith("torch.utils.data") for module in modules):
        cure = "Divide its batches over the ranks: mpistrat.torch.batches(...)"
    elif isinstance(data, tuple | list | Mapping) or hasattr(data, "shape"):
        cure = "Make a dataset of arrays: ms.Dataset((x, y)).batch(64)"
    else:
        return f"{data!r:.60}"
    return f"an object of type {type(data).__name__}. {cure}"


def _refuse_shuffled(strategy: Strategy, data: Any) -> None:
    """Raise where results of rows would come in the order of a shuffle.

    Raises:
      DataError: The dataset is shuffled, or was before it was distributed; on all ranks.
    """
    batches = getattr(data, "distributed", data)
    dataset = getattr(batches, "_origin", batches)
    pipeline = getattr(dataset, "_pipeline", None)
    if isinstance(pipeline, Batches) and pipeline.is_shuffled:
        error = DataError(
            f"predict: {dataset!r} is shuffled, so results would not be in the order of the rows. "
            "Leave out shuffle()."
        )
        strategy._replicas.lockstep.fail_collectively("predict", error)


@final
class WeightedSums:
    """Sums of what a replica function returns, by name; the replicas' sums give means.

    Args:
      function: What returns the results, for messages.
    """

    def __init__(self, function: str):
        """Begin with no names."""
        self._function = function
        self._sums: dict[str, Any] = {}

    def add(self, results: Any, row_count: int | None) -> None:
        """Add the results of one batch; never communicates.

        Args:
          results: What the function returned.
          row_count: The number of rows of the part; None if it is not known.

        Raises:
          TypeError: They are no dict, or one of them is a single number.
          StructureError: They have other names than those of the batch before, or do not fit the
            rows.
        """
        if not isinstance(results, Mapping):
            raise TypeError(f"{self._function} must return a dict of results, not {results!r:.60}.")
        if self._sums and results.keys() != self._sums.keys():
            raise StructureError(
                f"{self._function} returned results named {sorted(results)}, but "
                f"{sorted(self._sums)} for the batch before."
            )
        for name, value in results.items():
            numbers, weight = weighted(self._function, name, value, row_count)
            weights = np.broadcast_to(1.0 if weight is None else weight, np.shape(numbers))
            is_counted = weights != 0  # the mean of no examples may be NaN
            products = np.multiply(numbers, weights, dtype=np.float64)[is_counted]
            total = np.array([products.sum(), np.sum(weights, dtype=np.float64)])
            self._sums[name] = self._sums.get(name, 0.0) + total

    def means(self, strategy: Strategy) -> dict[str, float]:
        """The means over all replicas; NaN where no example has come. Collective.

        Cost: one all-reduce of 16 bytes for each name.
        """
        if not self._sums:
            return {}
        totals = strategy.all_reduce("SUM", np.stack([*self._sums.values()]))
        with np.errstate(invalid="ignore"):
            means = (totals[:, 0] / totals[:, 1]).tolist()
        return dict(zip(self._sums, means, strict=True))


def evaluate(
    score: Callable[[Any], Any], data: Any, *, strategy: Strategy | None = None
) -> dict[str, float]:
    """Means over all rows of a dataset.

    Collective: all ranks call it, in cross-replica code.

    Args:
      score: Replica code. It is called with this replica's part of each batch, which may have no
        rows, and returns a dict; each value is an array with a number for each example, or a pair
        ``(mean, weight)``.
      data: A batched `Dataset`, or one that is distributed already. It is iterated over once.
      strategy: The strategy; None for the current one.

    Returns:
      The means by name, float64; NaN where no example has come.

    Raises:
      DataError: `data` has no batches, no batch, or no end.
      TypeError: `score` returns no dict, or a single number.
      StructureError: It returns other names than for the batch before, an array that has not one
        number for each row, or a weight above 0 for a part without rows.

    Cost: one handshake for each batch, and one all-reduce of 16 bytes for each name.

    Example:
      >>> import numpy as np, mpistrat as ms
      >>> data = ms.Dataset(np.arange(5.0)).batch(2)
      >>> evaluate(lambda batch: {"square": batch**2}, data)
      {'square': 6.0}
    """
    strategy = resolve_strategy(strategy, "evaluate", REMEDY.format("evaluate"))
    sums = WeightedSums("score")
    for batch in distribute(strategy, data, "evaluate"):
        strategy.run(lambda part: sums.add(score(part), count_rows(part)), args=(batch,))
    return sums.means(strategy)


def predict(fn: Callable[[Any], Any], data: Any, *, strategy: Strategy | None = None) -> Any:
    """Results of a function for all rows of a dataset, in the order of the rows.

    Collective: all ranks call it, in cross-replica code.

    Args:
      fn: Replica code. It is called with this replica's part of each batch, which may have no rows,
        and returns an array, or a tree of arrays, with a row for each of them.
      data: A batched `Dataset`, or one that is distributed already. It is iterated over once.
      strategy: The strategy; None for the current one.

    Returns:
      On every rank the array, or the tree of arrays, with the rows of all batches.

    Raises:
      DataError: `data` has no batches, or there is none; or it is shuffled.

    Cost: one handshake and one all-gather for each batch.

    Example:
      >>> import numpy as np, mpistrat as ms
      >>> predict(lambda batch: 2 * batch, ms.Dataset(np.arange(5)).batch(2))
      array([0, 2, 4, 6, 8])
    """
    strategy = resolve_strategy(strategy, "predict", REMEDY.format("predict"))
    _refuse_shuffled(strategy, data)
    batches = [*_predicted(strategy, fn, distribute(strategy, data, "predict"))]
    if not batches:
        raise DataError(f"predict: {data!r} has no batch.")
    leaves, structure = pytree.flatten(batches[0])
    columns = [[leaf] for leaf in leaves]
    for batch in batches[1:]:
        for column, leaf in zip(columns, pytree.flatten(batch)[0], strict=True):
            column.append(leaf)
    return pytree.unflatten(structure, [np.concatenate(column) for column in columns])


def _predicted(strategy: Strategy, fn: Callable[[Any], Any], batches: Any) -> Iterator[Any]:
    """The results of each batch: the rows of all replicas."""
    for batch in batches:
        results = strategy.run(lambda part: _predict_rows(fn, part), args=(batch,))
        yield strategy.gather(results, axis=0)


def _predict_rows(fn: Callable[[Any], Any], part: Any) -> Any:
    """The results of a part as arrays, which have a row for each of its rows; replica code."""
    results, row_count = pytree.map(as_numbers, fn(part)), count_rows(part)
    for leaf in pytree.flatten(results)[0]:
        if not leaf.ndim or (row_count is not None and len(leaf) != row_count):
            raise StructureError(
                f"predict: fn returned an array of shape {leaf.shape} for {row_count} rows. Return "
                "a row for each row of the batch, also where there are none."
            )
    return results
