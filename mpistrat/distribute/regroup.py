"""The values of all replicas as one value, and one replica's part of it."""

from __future__ import annotations

from typing import Any, NoReturn, final

import numpy as np

from mpistrat import nest
from mpistrat.collectives.lockstep import Lockstep
from mpistrat.comm.codec import decode, encode, pack, unpack
from mpistrat.distribute.slices import IndexedSlices
from mpistrat.distribute.values import DistributedValues, Mirrored, OnRank, PerReplica
from mpistrat.distribute.variables import Variable
from mpistrat.distribute.views import LOCAL, View
from mpistrat.errors import LockstepError

__all__ = ["Regroup", "select"]

_NONE, _VARIABLE, _MIRRORED, _ELSEWHERE, _SLICES = b"n", b"v", b"m", b"o", b"z"
_UNWRAPPED = frozenset({_NONE, _VARIABLE, _MIRRORED})


def select(tree: Any) -> Any:
    """Return `tree` with this replica's component in the place of every distributed value."""
    return nest.map(lambda leaf: leaf.local if isinstance(leaf, DistributedValues) else leaf, tree)


def _entry(leaf: Any, whole: bool) -> tuple[bytes, bytes]:
    if isinstance(leaf, Variable):
        return _VARIABLE, str(leaf.number).encode()
    if isinstance(leaf, Mirrored):
        return _MIRRORED, b""
    return encode(leaf, whole)


@final
class Regroup:
    """Makes one value of what the replicas hold, as far as a view shows it."""

    def __init__(self, lockstep: Lockstep, view: View):
        """Regroup over the ranks of `lockstep`, as `view` shows them."""
        self.lockstep = lockstep
        self.view = view
        self.rank = lockstep.comm.rank
        self.size = lockstep.comm.size

    def gathered(self, call: str, tree: Any, failure: BaseException | None = None) -> Any:
        """Return what cross-replica code sees of the trees that the replicas hold.

        Collective: one proof; small values ride in it.

        Args:
          call: The text of the call; the structure of the tree is added to it.
          tree: What this replica holds.
          failure: What it failed with instead.

        Returns:
          In the global view, `tree` with a `PerReplica` for every leaf, but for ``None``,
          variables and mirrored values; in the others, this replica's `tree`.

        Raises:
          LockstepError: The structures differ.
        """
        if failure is not None or not self.view.wraps:
            self.lockstep.prove(call, failure=failure)
            return select(tree)
        structure, leaves, rows = self._shared(call, tree)
        wrapped = []
        for i, leaf in enumerate(leaves):
            entries = [row[i] for row in rows]
            kinds = {kind for kind, _ in entries}
            same = len(kinds) == 1 and kinds <= _UNWRAPPED
            if same and len(set(entries)) > 1:
                self._refuse(call, entries)
            wrapped.append(leaf if same else self._wrap(leaf, entries, i))
        return nest.unflatten(structure, wrapped)

    def inputs(self, call: str, tree: Any, failure: BaseException | None = None) -> Any:
        """Return `tree`, made by every replica for itself, with every leaf wrapped as inputs are.

        Collective: one proof; small values ride in it.

        Raises:
          LockstepError: The structures differ.
        """
        if failure is not None or not self.view.wraps:
            self.lockstep.prove(call, failure=failure)
            return self.wrap_input(tree)
        structure, leaves, rows = self._shared(call, tree)
        wrapped = [self._wrap(leaf, [r[i] for r in rows], i) for i, leaf in enumerate(leaves)]
        return nest.unflatten(structure, wrapped)

    def _shared(
        self, call: str, tree: Any
    ) -> tuple[nest.Structure, list[Any], list[list[tuple[bytes, bytes]]]]:
        """Return structure and leaves of this tree, and what every rank says of its own."""
        with self.lockstep.preparing(call):
            leaves, structure = nest.flatten(tree)
            leaves = [leaf.local if isinstance(leaf, PerReplica) else leaf for leaf in leaves]
            entries = [_entry(leaf, whole=False) for leaf in leaves]
            small = b"d" + pack(entries)
            if not self.lockstep.fits(len(small)):
                noted = [kind if kind in _UNWRAPPED else _ELSEWHERE for kind, _ in entries]
                small = b"k" + b"".join(noted)
        messages = self.lockstep.share(f"{call} {nest.describe(structure)}", small)
        return structure, leaves, [self._read(message) for message in messages]

    @staticmethod
    def _read(message: bytes) -> list[tuple[bytes, bytes]]:
        if message[:1] == b"k":
            return [(bytes([kind]), b"") for kind in message[1:]]
        return unpack(message[1:])

    def _refuse(self, call: str, entries: list[tuple[bytes, bytes]]) -> NoReturn:
        held = ", ".join(f"no. {data.decode()} on rank {r}" for r, (_, data) in enumerate(entries))
        self.lockstep.fail(
            LockstepError(
                f"{call}: the replicas hold different variables in the same place: {held} (this "
                f"is rank {self.rank} of {self.size})."
            )
        )

    def _wrap(self, leaf: Any, entries: list[tuple[bytes, bytes]], place: int) -> PerReplica:
        elsewhere = {_ELSEWHERE, _VARIABLE, _MIRRORED}
        values = [
            OnRank(rank) if kind in elsewhere else decode(kind, data)
            for rank, (kind, data) in enumerate(entries)
        ]
        # Whether all are known is decided from what rode, so alike on every rank.
        known = not any(kind in elsewhere for kind, _ in entries)
        # Not the live array: what is known of a replica is the same on every rank.
        values[self.rank] = leaf.copy() if isinstance(leaf, np.ndarray) and known else leaf
        birth = f"{self.lockstep.session.calls}/{place}"
        return PerReplica(leaf, self.rank, tuple(values), known, birth)

    def wrap_input(self, tree: Any) -> Any:
        """Return `tree`, this replica's input, with every leaf as `PerReplica` if the view wraps.

        Not collective: nothing is known of the other replicas' leaves.
        """
        if not self.view.wraps_inputs:
            return tree
        if not self.view.wraps:
            return nest.map(lambda leaf: PerReplica(leaf, 0, (leaf,), known=True), tree)
        others = [OnRank(rank) for rank in range(self.size)]
        birth = str(self.lockstep.session.calls)

        def wrap(leaf: Any) -> PerReplica:
            values = (*others[: self.rank], leaf, *others[self.rank + 1 :])
            return PerReplica(leaf, self.rank, values, self.size == 1, birth)

        return nest.map(wrap, tree)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return every replica's `value` that the view shows; see the method of `Strategy`."""
        leaves, structure = nest.flatten(value)
        lone = len(leaves) == 1 and leaves[0] is value
        if self.view is LOCAL:
            # Of a variable that each replica owns this one's copy, not what all together read as.
            value = nest.map(
                lambda leaf: _own(leaf.component()) if _is_on_read(leaf) else leaf, value
            )
        if not self.view.wraps:
            return (select(value),)
        if lone and not isinstance(value, DistributedValues | Variable):
            return (value,)
        unknown = [
            leaf for leaf in leaves if _is_on_read(leaf) or (_is_per(leaf) and not leaf.known)
        ]
        fetched = self._fetch(unknown) if unknown else {}
        columns = [self._column(leaf, fetched) for leaf in leaves]
        return tuple(
            nest.unflatten(structure, [column[rank] for column in columns])
            for rank in range(self.size)
        )

    def _column(self, leaf: Any, fetched: dict[int, tuple[Any, ...]]) -> tuple[Any, ...]:
        if id(leaf) in fetched:
            return fetched[id(leaf)]
        if isinstance(leaf, PerReplica | Mirrored):
            return leaf.values
        return (leaf,) * self.size

    def _fetch(self, unknown: list[Any]) -> dict[int, tuple[Any, ...]]:
        with self.lockstep.preparing("experimental_local_results"):
            mine = [leaf.component() if _is_on_read(leaf) else leaf.local for leaf in unknown]
            message = pack([_whole(value) for value in mine])
        names = [leaf.spec() if _is_on_read(leaf) else leaf.birth or "made" for leaf in unknown]
        self.lockstep.prove(f"experimental_local_results of {', '.join(names)}")
        rows = [unpack(text) for text in self.lockstep.texts(message)]
        with self.lockstep.preparing("experimental_local_results"):
            columns = [
                tuple(
                    _own(mine[i]) if r == self.rank else _decoded(*row[i])
                    for r, row in enumerate(rows)
                )
                for i in range(len(unknown))
            ]
        if any(kind == b"p" for row in rows for kind, _ in row):
            # An object may be packed on its rank and fail to be unpacked on another.
            self.lockstep.prove("experimental_local_results, unpacked")
        for leaf, column in zip(unknown, columns, strict=True):
            if _is_per(leaf):
                leaf.fetched(column)
        return {id(leaf): column for leaf, column in zip(unknown, columns, strict=True)}


def _whole(value: Any) -> tuple[bytes, bytes]:
    if not isinstance(value, IndexedSlices):
        return encode(value, whole=True)
    shape = None if value.dense_shape is None else np.array(value.dense_shape, np.int64)
    parts = (value.values, value.indices, shape)
    return _SLICES, pack([encode(part, whole=True) for part in parts])


def _decoded(kind: bytes, data: bytes) -> Any:
    if kind != _SLICES:
        return decode(kind, data)
    values, indices, shape = (decode(*entry) for entry in unpack(data))
    return IndexedSlices(values, indices, shape)


def _own(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _is_per(leaf: Any) -> bool:
    return isinstance(leaf, PerReplica)


def _is_on_read(leaf: Any) -> bool:
    return isinstance(leaf, Variable) and leaf.on_read
