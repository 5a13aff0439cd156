"""Iterators of the older kind, which begin anew when they are told to."""

from __future__ import annotations

from typing import Any, final

from mpistrat import nest
from mpistrat.feed.distributed import DistributedDataset, DistributedIterator
from mpistrat.feed.iterators import ElementIterator

__all__ = ["InputIterator"]


@final
class InputIterator(ElementIterator):
    """An iterator over a distributed dataset that can begin anew.

    Made by ``Strategy.make_dataset_iterator`` and ``Strategy.make_input_fn_iterator``.

    Collective: each ``next()`` and `get_next`; the first one after the beginning is two proofs.
    As: the ``InputIterator`` of ``tf.compat.v1.distribute``.
    """

    def __init__(self, dataset: DistributedDataset):
        """Iterate over `dataset`; its first epoch begins with the first element."""
        self._dataset = dataset
        self._epoch: DistributedIterator | None = None

    def __next__(self) -> Any:
        """Return the next element, as cross-replica code sees it. Collective.

        Raises:
          StopIteration: The data have ended; `initialize` begins the next epoch.
        """
        if self._epoch is None:
            self._epoch = iter(self._dataset)
        return next(self._epoch)

    def initialize(self) -> list[Any]:
        """Let the next element be the first of the next epoch, and return an empty list.

        Not collective itself, but all ranks must do it, as the next element will show.
        """
        self._epoch = None
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
        """The tree of the classes of the leaves; None if only reading could tell."""
        return self._each(type)

    @property
    def output_shapes(self) -> Any:
        """The tree of the shapes of a replica's leaves; None if only reading could tell."""
        return self._each(lambda spec: spec.specs[0].shape)

    @property
    def output_types(self) -> Any:
        """The tree of the dtypes of the leaves; None if only reading could tell."""
        return self._each(lambda spec: spec.specs[0].dtype)

    def _each(self, fn: Any) -> Any:
        spec = self.element_spec
        return None if spec is None else nest.map(fn, spec)

    def __repr__(self) -> str:
        """Return what it iterates over."""
        return f"InputIterator({self._dataset!r})"
