"""How datasets come into a strategy: what its methods about inputs do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpistrat.distribute.arguments import check_function, check_kind
from mpistrat.distribute.base import StrategyBase
from mpistrat.distribute.inputs import InputContext, InputOptions, InputReplicationMode
from mpistrat.distribute.iterators import InputIterator
from mpistrat.distribute.mode import check_cross_replica, current
from mpistrat.distribute.views import ALONE, GLOBAL
from mpistrat.errors import ContextError, DataError
from mpistrat.feed.dataset import Dataset
from mpistrat.feed.distributed import DistributedDataset, InputGate
from mpistrat.feed.sharding import Sharding, ShardSpec, calls, own, policy_deal, turns


def distribute(strategy: StrategyBase, dataset: Any, options: Any) -> Any:
    """Divide a dataset of global batches; see ``Strategy.experimental_distribute_dataset``."""
    name = "experimental_distribute_dataset"
    with strategy.replicas.lockstep.preparing(name):
        _check_dataset(name, dataset)
        if _checked(name, options).per_replica:
            raise NotImplementedError(
                f"{name} divides one dataset over all replicas; PER_REPLICA is for "
                "distribute_datasets_from_function."
            )
        if strategy.replicas.view is ALONE:
            return dataset
        sharding = _cut(strategy, dataset)
    return DistributedDataset(sharding, _gate(strategy), dataset)


def from_function(
    strategy: StrategyBase, dataset_fn: Callable[[InputContext], Any], options: Any
) -> Any:
    """Let each rank bring a dataset; see ``Strategy.distribute_datasets_from_function``."""
    name = "distribute_datasets_from_function"
    view = strategy.replicas.view
    place = _place(strategy)
    with strategy.replicas.lockstep.preparing(name):
        checked = _checked(name, options)
        checked.check()
        if checked.per_replica and not getattr(strategy, "pipeline_per_replica", False):
            raise NotImplementedError(
                f"{name}: PER_REPLICA is for MirroredStrategy. Here leave it out: dataset_fn is "
                "called on every rank, which is one replica, anyway."
            )
        check_function(name, "dataset_fn", dataset_fn)
        dataset = dataset_fn(InputContext(place.size, place.rank, place.size))
        _check_dataset(name, dataset)
    if view is ALONE:
        return dataset
    return DistributedDataset(own(dataset), _gate(strategy))


def dataset_iterator(strategy: StrategyBase, dataset: Any) -> InputIterator:
    """Make an iterator of the older kind; see ``Strategy.make_dataset_iterator``."""
    with strategy.replicas.lockstep.preparing("make_dataset_iterator"):
        _check_dataset("make_dataset_iterator", dataset)
        sharding = own(dataset) if strategy.replicas.view is ALONE else _cut(strategy, dataset)
    return InputIterator(DistributedDataset(sharding, _gate(strategy), dataset))


def input_fn_iterator(
    strategy: StrategyBase, input_fn: Callable[[InputContext], Any], mode: Any
) -> InputIterator:
    """Make an iterator of the older kind; see ``Strategy.make_input_fn_iterator``."""
    name = "make_input_fn_iterator"
    place = _place(strategy)
    shown = strategy.replicas.view is GLOBAL
    with strategy.replicas.lockstep.preparing(name):
        if mode is not InputReplicationMode.PER_WORKER:
            raise DataError(f"{name}: input replication mode not supported: {mode!r}.")
        check_function(name, "input_fn", input_fn)
        pipelines, number = (1, 0) if shown else (place.size, place.rank)
        made = input_fn(InputContext(pipelines, number, place.size))
        if not isinstance(made, Dataset):
            if not callable(made):
                raise DataError(
                    f"{name}: input_fn must return an mpistrat.Dataset or a callable, not "
                    f"{type(made).__name__}."
                )
            sharding = calls(made)
        else:
            sharding = turns(made, place) if shown else own(made)
    return InputIterator(DistributedDataset(sharding, _gate(strategy), together=True))


def _cut(strategy: StrategyBase, dataset: Dataset) -> Sharding:
    whole = dataset if dataset.batched else dataset.batch(strategy.replicas.lockstep.comm.size)
    return policy_deal(whole, _place(strategy))


def _place(strategy: StrategyBase) -> ShardSpec:
    lockstep = strategy.replicas.lockstep
    comm = lockstep.comm
    every = lockstep.options.check_every if comm.size > 1 else 0
    return ShardSpec(comm.rank, comm.size, strategy.replicas.view is not GLOBAL, every)


def _checked(name: str, options: Any) -> InputOptions:
    check_kind(f"{name}: options", options, InputOptions)
    return options or InputOptions()


def _check_dataset(name: str, dataset: Any) -> None:
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{name}: wanted an mpistrat.Dataset, got {type(dataset).__name__}. Make one: "
            "mpistrat.Dataset(arrays).batch(global_batch_size)."
        )


def _gate(strategy: StrategyBase) -> InputGate:
    group = strategy.replicas

    def check() -> None:
        mode = current()
        if mode is not None and mode.replica is not None:
            raise ContextError(
                "next(iterator) was called in replica code. Call it outside, and pass the element: "
                "strategy.run(fn, args=(next(iterator),))."
            )
        check_cross_replica(strategy, "next(iterator)", "")

    return InputGate(group.lockstep, group.regroup.wrap_input, check, group.view is not GLOBAL)
