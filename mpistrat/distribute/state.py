"""State that is not a variable: replica 0's is given to all ranks, or all are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import xxhash

from mpistrat import nest
from mpistrat.arrays import Array, as_array, bits, digest, finish, is_scalar, label, spec_text
from mpistrat.collectives.buckets import ALONE
from mpistrat.collectives.plan import spec_of
from mpistrat.comm.base import Comm
from mpistrat.comm.callsite import ranks_text
from mpistrat.comm.codec import decode, encode, pack, unpack
from mpistrat.distribute.kinds import DistributedVariable, named
from mpistrat.distribute.reduce import fit
from mpistrat.distribute.regroup import select
from mpistrat.distribute.replica_group import ReplicaGroup
from mpistrat.distribute.slices import IndexedSlices
from mpistrat.distribute.values import DistributedValues
from mpistrat.errors import DivergenceError, LeafTypeError, StructureError
from mpistrat.lockstep.abort import aborting
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.lockstep.mismatch import SAME

# Leaves that are not arrays; they travel as they are.
_PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, np.str_})
_DIGEST = 16
_CHUNK = 8 * 1024 * 1024  # bytes in which a difference is looked for
_MAX_LETTERS = 60  # letters of a value in messages

Encoded: TypeAlias = "tuple[bytes, bytes]"


class _State(NamedTuple):
    """A tree of this rank's own values.

    Attributes:
      call: The text of the call.
      leaves: The leaves as they were given.
      structure: Of the tree.
      paths: The names of the leaves.
      values: Arrays; of a leaf that is not an array its kind and bytes.
    """

    call: str
    leaves: list[Any]
    structure: nest.Structure
    paths: Sequence[str]
    values: list[Array | Encoded]


def _state(group: ReplicaGroup, name: str, tree: Any) -> _State:
    """Return the checked tree. Not collective."""
    leaves, structure = nest.flatten(tree)
    group.regroup.check(name, leaves)
    paths = named(leaves, structure)
    local_values = [
        x.component() if isinstance(x, DistributedVariable) else select(x) for x in leaves
    ]
    values = [_value(leaf, path) for leaf, path in zip(local_values, paths, strict=True)]
    specs = [
        spec_text(value) if isinstance(value, np.ndarray) else type(leaf).__name__
        for leaf, value in zip(local_values, values, strict=True)
    ]
    call = f"{name}({nest.describe(structure)} {', '.join(map(spec_of, paths, specs))})"
    return _State(call, leaves, structure, paths, values)


def _value(leaf: Any, path: str) -> Array | Encoded:
    if isinstance(leaf, IndexedSlices):
        raise LeafTypeError(
            f"{label(path)} is IndexedSlices; expected an array or a number. Give its values and "
            "indices."
        )
    return encode(leaf, whole=True) if type(leaf) in _PLAIN_TYPES else as_array(leaf, path)


def broadcast_state(group: ReplicaGroup, tree: Any, out: Any) -> Any:
    """Broadcast replica 0's values to all; see `Strategy.broadcast`. Collective."""
    lockstep = group.lockstep
    with lockstep.preparing("broadcast"):
        state = _state(group, "broadcast", tree)
        outs = None if out is None else _outs(out, state)
        # A large array travels straight to its final place, if it comes from there.
        buffers = [
            _room(value, outs[i] if outs else None)
            for i, value in enumerate(state.values)
            if isinstance(value, np.ndarray)
        ]
        plain_values = [value for value in state.values if not isinstance(value, np.ndarray)]
        packed_values = pack(plain_values) if lockstep.comm.rank == 0 else b""
    message = lockstep.gather_payloads(state.call, packed_values)[0]
    with aborting(lockstep, state.call):  # there may be no memory for it
        _move(lockstep.comm, buffers)
    if outs is not None:
        for place, buffer in zip(outs, buffers, strict=True):
            if place is not buffer:
                place[...] = buffer
        return out
    arrays, plain_results = iter(buffers), iter(unpack(message))
    results = [
        finish(next(arrays), leaf)
        if isinstance(value, np.ndarray)
        else decode(*next(plain_results))
        for leaf, value in zip(map(select, state.leaves), state.values, strict=True)
    ]
    return nest.unflatten(state.structure, results)


def _outs(out: Any, state: _State) -> list[Array]:
    """Return what is to be written to, or raise what makes it unfit."""
    places, structure = nest.flatten(out)
    if structure != state.structure:
        raise StructureError(
            f"out must have the structure of the tree, {nest.describe(state.structure)}, not "
            f"{nest.describe(structure)}."
        )
    return [_out(place, state, i) for i, place in enumerate(places)]


def _out(place: Any, state: _State, leaf: int) -> Array:
    value, path = state.values[leaf], state.paths[leaf]
    if not isinstance(value, np.ndarray):
        raise LeafTypeError(
            f"out: {label(path)} is a {type(select(state.leaves[leaf])).__name__}, which cannot be "
            "written to. Take what broadcast returns without out."
        )
    if isinstance(place, DistributedVariable | DistributedValues):
        raise LeafTypeError(
            f"out: {label(path)} is {place!r:.80}; expected an array to write to. A variable has "
            "assign, and starts with replica 0's value."
        )
    buffer: Array = place
    if not isinstance(place, np.ndarray):
        buffer, second_view = as_array(place, path), as_array(place, path)
        if buffer.size and not np.may_share_memory(buffer, second_view):
            raise LeafTypeError(
                f"out: {label(path)} ({type(place).__name__}) gives NumPy copies of its memory; "
                "expected an array to write to."
            )
    native = buffer.dtype.newbyteorder("=") == value.dtype
    fit(buffer, value.shape, buffer.dtype if native else value.dtype, state.structure, leaf)
    return buffer


def _room(value: Array, place: Array | None) -> Array:
    """Return contiguous memory for the value to travel in: `place` if the value is there."""
    if place is not None and place.flags.carray and place.dtype.isnative:
        is_own_memory = place.ctypes.data == value.ctypes.data and place.strides == value.strides
        if is_own_memory and place.nbytes:
            return place
    return np.array(value, order="C", subok=False)


def _move(comm: Comm, buffers: Sequence[Array]) -> None:
    """Broadcast replica 0's arrays: large ones without a copy, the others in one message."""
    small_buffers = [
        buffer.reshape(-1).view(np.uint8) for buffer in buffers if 0 < buffer.nbytes < ALONE
    ]
    for buffer in buffers:
        if buffer.nbytes >= ALONE:
            comm.bcast(buffer, 0)
    if not small_buffers:
        return
    joined_bytes = np.concatenate(small_buffers)
    comm.bcast(joined_bytes, 0)
    at = 0
    for part in small_buffers:
        part[...] = joined_bytes[at : at + part.size]
        at += part.size


@final
class _SamePoint:
    """A tree of which the next handshake shows that it is the same on all ranks: no write to undo.

    Args:
      digest: Of its structure, shapes, dtypes and contents.
      first_value: The first of its numbers, as text.
    """

    def __init__(self, digest: bytes, first_value: str):
        """Create it of a digest."""
        self.digest, self._first_value = digest, first_value

    def text(self) -> str:
        """Return what the handshake says of it, for messages."""
        return f"{SAME}{self.digest.hex()} ({self._first_value})"

    def undo(self) -> None:
        """Do nothing."""


def defer_same(group: ReplicaGroup, tree: Any) -> None:
    """Let the next handshake show that all ranks hold the same tree. No communication.

    Args:
      group: The ranks.
      tree: As `Strategy.check_same` takes it.

    Raises:
      LeafTypeError: A leaf is not an array, number or text.
      StrategyError: A leaf is a value or variable of another strategy.
    """
    state = _state(group, "same", tree)
    if group.lockstep.comm.size == 1:
        return
    content_digest = xxhash.xxh3_128_digest(state.call.encode() + _digests(state))
    arrays = [x for x in state.values if isinstance(x, np.ndarray) and x.size]
    first_value = f"{arrays[0].reshape(-1)[0]}, ..." if arrays else "..."
    text = first_value.translate({ord("("): None, ord(")"): None})  # of a complex number
    group.lockstep.defer(_SamePoint(content_digest, text))


def _digests(state: _State) -> bytes:
    """Return the digests of all leaves, one after the other."""
    return b"".join(
        digest([value])
        if isinstance(value, np.ndarray)
        else xxhash.xxh3_128_digest(b"".join(value))
        for value in state.values
    )


def check_same(group: ReplicaGroup, tree: Any) -> None:
    """Raise on all ranks unless all hold the same; see `Strategy.check_same`. Collective."""
    lockstep = group.lockstep
    with lockstep.preparing("check_same"):
        state = _state(group, "check_same", tree)
        digests = _digests(state)
        own_digest = xxhash.xxh3_128_digest(digests)
    rows = lockstep.gather_payloads(state.call, own_digest)
    if any(row != rows[0] for row in rows):
        lockstep.fail(_difference(lockstep, state, digests))


def _difference(lockstep: Lockstep, state: _State, digests: bytes) -> DivergenceError:
    """Return the error that says where the ranks differ. Collective; alike on all ranks."""
    ranks, rows = lockstep.ranks, lockstep.texts(digests)
    starts = range(0, len(digests), _DIGEST)
    columns = [[row[at : at + _DIGEST] for row in rows] for at in starts]
    differing_leaves = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    first, column = differing_leaves[0], columns[differing_leaves[0]]
    differing_replicas = [replica for replica, cell in enumerate(column) if cell != column[0]]
    value = state.values[first]
    index_text, value_text = "", str(value)
    if isinstance(value, np.ndarray):
        own_position = _first_difference(lockstep.comm, value)
        flat = int(lockstep.texts(str(own_position).encode())[differing_replicas[0]])
        index = tuple(map(int, np.unravel_index(flat, value.shape)))
        index_text = f" at index {index}" if index else ""
        value_text = f"{value[index]}\0{bits(value[index])[0, ::-1].tobytes().hex()}"
    else:
        value_text = f"{decode(*value)!r:.{_MAX_LETTERS}}\0"
    texts = [text.decode().split("\0") for text in lockstep.texts(value_text.encode())]
    (theirs, their_bits), (zero, zero_bits) = texts[differing_replicas[0]], texts[0]
    if theirs == zero:
        theirs, zero = f"{theirs} (bits {their_bits})", f"{zero} (bits {zero_bits})"
    pairs = zip(state.values, map(select, state.leaves), strict=True)
    writable = all(isinstance(value, np.ndarray) and not is_scalar(leaf) for value, leaf in pairs)
    names = [label(path) for path in state.paths]
    count_text = (
        f" Of {len(names)} leaves {len(differing_leaves)} differ."
        if len(differing_leaves) > 1
        else ""
    )
    return DivergenceError(
        f"check_same: {names[first]} differs between ranks{index_text}: {theirs} on rank "
        f"{ranks[differing_replicas[0]]}, {zero} on rank {ranks[0]}. In it, "
        f"{ranks_text([ranks[i] for i in differing_replicas])} "
        f"{'differs' if len(differing_replicas) == 1 else 'differ'} from rank {ranks[0]} "
        f"({lockstep.here}).{count_text}\n  To begin alike, give all "
        f"replica 0's: {'' if writable else 'tree = '}strategy.broadcast(tree"
        f"{', out=tree' if writable else ''})."
    )


def _first_difference(comm: Comm, array: Array) -> int:
    """Return the place of the first element whose bits are not replica 0's; 0 if all are."""
    rows = bits(array)
    position = None
    step = max(1, _CHUNK // max(1, rows.shape[1]))
    for at in range(0, len(rows), step):
        own_rows = rows[at : at + step]
        theirs = np.array(own_rows, order="C")
        comm.bcast(theirs, 0)
        differing_rows = (own_rows != theirs).any(axis=1)
        if position is None and differing_rows.any():
            position = at + int(np.argmax(differing_rows))
    return position or 0
