"""Every replica's part of each global batch; one proof a step.

A distributed iterator goes on until the data of all replicas have ended. A replica whose data end
earlier, or for which a short batch has no rows, gets arrays with no rows, so all replicas take the
same number of steps.
"""

from __future__ import annotations

import ast
import secrets
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from mpistrat import nest
from mpistrat.collectives.lockstep import Lockstep
from mpistrat.comm.codec import decode, encode
from mpistrat.errors import LockstepError
from mpistrat.feed.dataset import Dataset
from mpistrat.feed.prefetch import prefetched

__all__ = ["DistributedDataset", "DistributedIterator", "Door"]

_STEP = struct.Struct("<??q")


@final
@dataclass(frozen=True)
class Door:
    """How a strategy lets data in.

    Attributes:
      lockstep: Proves each step.
      wrap: Makes what cross-replica code sees of this replica's element.
      check: Raises where no data may be asked for, as in replica code.
    """

    lockstep: Lockstep
    wrap: Callable[[Any], Any]
    check: Callable[[], None]


@final
class DistributedDataset:
    """A dataset cut over the replicas of a strategy; iterate over it in cross-replica code.

    Made by ``Strategy.experimental_distribute_dataset``, where every global batch of L rows is cut
    in pieces of ``ceil(L / n)``, or by ``distribute_datasets_from_function``, where every replica
    brings its own batches. Each ``iter()`` is the next epoch, in its own order.

    Collective: making it, ``iter()`` and each ``next()``.
    Cost: one proof each.
    """

    def __init__(self, dataset: Dataset, door: Door, cut: bool, origin: Dataset | None = None):
        """Distribute `dataset`; `cut` its batches, or give each replica its own whole.

        The epochs are counted by `origin`, the dataset as the program knows it, so that
        distributing it anew in each epoch gives each its own order too.
        """
        self._dataset = dataset
        self._origin = origin or dataset
        self._door = door
        self._cut = cut
        session = door.lockstep.session
        self._name = f"dataset no. {session.datasets + 1}"
        door.lockstep.prove(f"distribute {self._name}, {'cut' if cut else 'a part on each rank'}")
        session.datasets += 1

    def __iter__(self) -> DistributedIterator:
        """Return an iterator over the next epoch. Unseeded shuffles take rank 0's seed."""
        self._door.check()
        needed = self._dataset.seeds_needed
        mine = [self._origin.epoch, *(secrets.randbits(62) for _ in range(needed))]
        told = self._door.lockstep.share(f"iter({self._name})", np.array(mine, np.int64).tobytes())
        epoch, *seeds = np.frombuffer(told[0], np.int64).tolist()
        if not self._cut:
            return self._given(iter(self._dataset))
        self._origin.begin_after(epoch)
        comm = self._door.lockstep.comm
        elements = (
            (-1 if piece.rows is None else piece.rows, piece.cut(comm.rank, comm.size))
            for piece in self._dataset.pieces(epoch, seeds)
        )
        ahead = prefetched(elements, self._dataset.depth) if self._dataset.depth else elements
        return DistributedIterator(ahead, self._door, True, self._name)

    def _given(self, elements: Iterator[Any]) -> DistributedIterator:
        return DistributedIterator(((-1, e) for e in elements), self._door, False, self._name)

    def __repr__(self) -> str:
        """Return what is distributed."""
        return f"DistributedDataset({self._dataset!r})"


@final
class DistributedIterator:
    """One epoch of a `DistributedDataset`.

    After the end, and after an error on any rank, it gives nothing more on every rank.
    """

    def __init__(self, elements: Iterator[tuple[int, Any]], door: Door, cut: bool, name: str):
        """Give out `elements`, pairs of the rows of the global batch and this replica's part."""
        self._name = name
        self._elements = elements
        self._door = door
        self._cut = cut
        self._ended = False
        self._empty: Any = None
        self._steps = 0

    def __iter__(self) -> DistributedIterator:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next element, as cross-replica code sees it. Collective.

        Raises:
          StopIteration: The data of every replica have ended.
          ContextError: Called in replica code.
          LockstepError: The ranks read batches of different sizes.
          RemoteError: Reading failed on another rank.
        """
        self._door.check()
        if self._ended:
            raise StopIteration
        try:
            found, element = self._step()
        except BaseException:
            self._ended = True
            raise
        if not found:
            self._ended = True
            raise StopIteration
        return self._door.wrap(element)

    def _step(self) -> tuple[bool, Any]:
        failure: Exception | None = None
        item: tuple[int, Any] | None = None
        try:
            item = next(self._elements, None)
            if item is not None:
                self._empty = nest.map(self._none_of, item[1])
        except Exception as error:
            failure = error
        lost = item is None and self._empty is None
        small = _STEP.pack(item is not None, lost, -1 if item is None else item[0])
        call = f"next({self._name}) step {self._steps}"
        self._steps += 1
        told = [_STEP.unpack(s) for s in self._door.lockstep.share(call, small, failure)]
        if not any(has for has, _, _ in told):
            return False, None
        self._check_rows(call, [rows if has else 0 for has, _, rows in told])
        if any(lost for _, lost, _ in told):
            self._learn(item is not None)
        return True, self._empty if item is None else item[1]

    def _none_of(self, leaf: Any) -> Any:
        array = np.asarray(leaf)
        shape = array.shape[1:] if array.ndim else array.shape
        return np.empty((0, *shape), array.dtype)

    def _check_rows(self, call: str, rows: list[int]) -> None:
        if self._cut and len(set(rows)) > 1:
            self._door.lockstep.fail(
                LockstepError(
                    f"{call}: the ranks read global batches of different sizes {rows} (0: the "
                    "end), so they do not hold the same dataset. Give every rank the same one, or "
                    "use distribute_datasets_from_function for a dataset per rank."
                )
            )

    def _learn(self, known: bool) -> None:
        # Only a replica that has never had an element has to ask what one looks like; it is told
        # dtypes and shapes.
        lockstep = self._door.lockstep
        call = f"an element of {self._name}"
        with lockstep.preparing(call):
            looks = nest.map(lambda a: f"{a.dtype.name} {a.shape}", self._empty) if known else None
            kind, data = encode(looks, whole=True)
        texts = lockstep.share(call, kind + data)
        with lockstep.preparing(call):
            if self._empty is None:
                text = next(text for text in texts if text[:1] != b"n")
                self._empty = nest.map(_empty, decode(text[:1], text[1:]))
        lockstep.prove(f"{call}, understood")


def _empty(looks: str) -> Any:
    name, _, shape = looks.partition(" ")
    return np.empty(ast.literal_eval(shape), np.dtype(name))
