"""Iterators of the older kind, which start over when they are told to."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from mpistrat import nest
from mpistrat.errors import ContextError, DataError, StrategyError, text_of
from mpistrat.feed.distributed import DistributedDataset, DistributedIterator
from mpistrat.feed.iterators import ElementIterator


@final
class InputIterator(ElementIterator):
    """An iterator over a distributed dataset that can start over.

    Made by ``Strategy.make_dataset_iterator`` and ``Strategy.make_input_fn_iterator``.

    Collective: each ``next()`` and `get_next`; the first one after the beginning is two handshakes.
    Like: the ``InputIterator`` of ``tf.compat.v1.distribute``.
    """

    def __init__(self, dataset: DistributedDataset):
        """Iterate over `dataset`; its first epoch begins with the first element."""
        self._dataset = dataset
        self._epoch: DistributedIterator | None = None
        self._failed = ""

    def __next__(self) -> Any:
        """Return the next element, as cross-replica code sees it. Collective.

        Raises:
          StopIteration: The data have ended; `initialize` begins the next epoch.
          DataError: Ranks have differed before, or the data have failed; `initialize` on all ranks
            begins the next epoch.
        """
        if self._failed:
            raise DataError(self._failed)
        if self._epoch is None:
            try:
                self._epoch = iter(self._dataset)
            except (ContextError, StrategyError):
                raise  # called at the wrong place, where nothing has begun
            except Exception as error:
                # The others may be in the middle of their epoch: to start over would be once more
                # to do what they do not.
                self._failed = (
                    f"this iterator could not begin an epoch ({text_of(error):.200}): call "
                    "initialize() on every rank."
                )
                raise
        return next(self._epoch)

    def initialize(self) -> list[Any]:
        """Let the next element be the first of the next epoch, and return an empty list.

        Not collective itself, but all ranks must do it, as the next element will show.
        """
        self._epoch, self._failed = None, ""
        return []

    @property
    def initializer(self) -> list[Any]:
        """What `initialize` does and returns."""
        return self.initialize()

    @property
    def element_spec(self) -> Any:
        """As that of the dataset."""
        return self._dataset.element_spec

    @property
    def output_classes(self) -> Any:
        """The tree of the classes of a replica's leaves; None if only reading could tell."""
        return self._map_spec(
            lambda spec: np.ndarray if spec.specs[0].shape else spec.specs[0].dtype.type
        )

    @property
    def output_shapes(self) -> Any:
        """The tree of the shapes of a replica's leaves; None if only reading could tell."""
        return self._map_spec(lambda spec: spec.specs[0].shape)

    @property
    def output_types(self) -> Any:
        """The tree of the dtypes of the leaves; None if only reading could tell."""
        return self._map_spec(lambda spec: spec.specs[0].dtype)

    def _map_spec(self, fn: Any) -> Any:
        spec = self.element_spec
        return None if spec is None else nest.map(fn, spec)

    def __repr__(self) -> str:
        """Return what it iterates over."""
        return f"InputIterator({self._dataset!r})"
