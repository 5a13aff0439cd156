"""State that is not a variable: replica 0's is given to all ranks, or all are compared.

Functions that one rank runs for all, or for all of its node: downloads, unpacking, caches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import xxhash

from mpistrat import pytree
from mpistrat.arrays import (
    Array,
    as_array,
    as_bytes,
    digest,
    is_scalar,
    label,
    restore_kind,
    spec_text,
)
from mpistrat.collectives.layout import ALONE
from mpistrat.collectives.plan import spec_of
from mpistrat.comm.base import Comm
from mpistrat.comm.callsite import ranks_text
from mpistrat.comm.serialization import decode, encode, pack, unpack
from mpistrat.errors import DivergenceError, LeafTypeError, StructureError
from mpistrat.lockstep.ending import aborting
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.mismatch import SAME
from mpistrat.lockstep.ranks import Caught
from mpistrat.shm.nodes import Nodes, find_nodes
from mpistrat.strategy.all_reduce import fit
from mpistrat.strategy.context_stack import check_cross_replica, current
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.variables.arguments import check_function, check_long_operation
from mpistrat.variables.indexed_slices import IndexedSlices
from mpistrat.variables.kinds import GLOBAL, DistributedVariable, named
from mpistrat.variables.regroup import select
from mpistrat.variables.values import DistributedValues

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
    structure: pytree.Structure
    paths: Sequence[str]
    values: list[Array | Encoded]


def _state(group: ReplicaGroup, name: str, tree: Any) -> _State:
    """Return the checked tree. Not collective."""
    leaves, structure = pytree.flatten(tree)
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
    call = f"{name}({pytree.describe(structure)} {', '.join(map(spec_of, paths, specs))})"
    return _State(call, leaves, structure, paths, values)


def _value(leaf: Any, path: str) -> Array | Encoded:
    if isinstance(leaf, IndexedSlices):
        raise LeafTypeError(
            f"{label(path)} is IndexedSlices; expected an array or a number. Give its values and "
            "indices."
        )
    return encode(leaf, is_unlimited=True) if type(leaf) in _PLAIN_TYPES else as_array(leaf, path)


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
        restore_kind(next(arrays), leaf)
        if isinstance(value, np.ndarray)
        else decode(*next(plain_results))
        for leaf, value in zip(map(select, state.leaves), state.values, strict=True)
    ]
    return pytree.unflatten(state.structure, results)


def _outs(out: Any, state: _State) -> list[Array]:
    """Return what is to be written to, or raise what makes it unfit."""
    places, structure = pytree.flatten(out)
    if structure != state.structure:
        raise StructureError(
            f"out must have the structure of the tree, {pytree.describe(state.structure)}, not "
            f"{pytree.describe(structure)}."
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
        value_text = f"{value[index]}\0{as_bytes(value[index])[0, ::-1].tobytes().hex()}"
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
    rows = as_bytes(array)
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


_SENDABLE_TYPES = (type(None), bool, int, float, complex, str, bytes)
_LENGTH = 8  # bytes


def once(fn: Callable[..., Any], *args: Any, max_seconds: float = 3600.0) -> Any:
    """Call ``fn(*args)`` on the first rank, and return its result on all.

    For work that is done once for the whole job: a download to a shared file system, an entry in a
    database. `fn` itself must not make collective calls.

    Collective, in cross-replica code: all ranks of the strategy in scope call it; outside of
    scopes, all ranks of the job.

    Args:
      fn: The function.
      args: Its arguments; those of the first rank are used.
      max_seconds: How long it may take, in seconds. Then the watchdog ends the job, as it does
        after ``MPISTRAT_TIMEOUT`` for other calls.

    Returns:
      What `fn` has returned, alike on all ranks, the first included. It may be ``None``, numbers,
      texts, bytes, paths, arrays (tensors come as NumPy arrays), and dicts with string keys,
      lists and tuples of such. Everything is sent in one message, so large data belong in a file.

    Raises:
      Exception: What `fn` has raised, on the rank that called it; on the others a `RemoteError`
        that also is of that class, and names rank and text.
      LeafTypeError: The result is of another kind; on all ranks.
      ContextError: Called in replica code.
      TypeError: `fn` is not a function, or `max_seconds` not a number.
      LockstepError: Another rank made another call.

    Cost: `fn`, two handshakes, and one ``MPI_Bcast``.

    Example:
      >>> once(lambda: {"path": "data.npz", "rows": 1797})
      {'path': 'data.npz', 'rows': 1797}
    """
    return _call_on_first_ranks("once", fn, args, max_seconds, _make_single_node)


def once_per_node(fn: Callable[..., Any], *args: Any, max_seconds: float = 3600.0) -> Any:
    """Call ``fn(*args)`` on the first rank of each node, and return its result on that node.

    For work that each node needs once: data unpacked to its local disk, a cache. MPI, or
    ``MPISTRAT_RANKS_PER_NODE``, says which ranks share a node. Arguments, results and errors are as
    in `once`. A failure on one node is raised on all ranks of all nodes.

    Args:
      fn: The function.
      args: What it is called with; those of the first rank of each node.
      max_seconds: How long it may take on each.

    Returns:
      What `fn` has returned on this rank's node.

    Raises:
      Exception: As `once`.

    Cost: `fn`, two handshakes, and one ``MPI_Bcast`` in each node.

    Example:
      >>> import tempfile
      >>> once_per_node(tempfile.gettempdir) == tempfile.gettempdir()
      True
    """
    return _call_on_first_ranks("once_per_node", fn, args, max_seconds, nodes_of)


def _make_single_node(lockstep: Lockstep) -> Nodes:
    comm = lockstep.comm
    return Nodes(comm, comm.size, None, 1, list(range(comm.size)))


def nodes_of(lockstep: Lockstep) -> Nodes:
    """Return which ranks share a node. Collective the first time."""
    ranks_per_node = lockstep.options.ranks_per_node
    return lockstep.shared(
        "nodes", lambda: find_nodes(lockstep.comm, ranks_per_node), ranks_per_node
    )


def _call_on_first_ranks(
    call: str, fn: Any, args: tuple[Any, ...], seconds: float, cut: Callable[[Lockstep], Nodes]
) -> Any:
    mode = current()
    if mode is not None:
        check_cross_replica(mode.strategy, call, "it before run()")
    replica_group: ReplicaGroup = (
        ReplicaGroup.over(GLOBAL) if mode is None else mode.strategy.replicas
    )
    lockstep, name = replica_group.lockstep, getattr(fn, "__name__", type(fn).__name__)
    with lockstep.preparing(call):
        check_function(call, "fn", fn)
        check_long_operation(f"{call}({name})", seconds)
        declared = lockstep.session.board.long_operation(f"{call}({name})", float(seconds))
    lockstep.handshake(f"{call}({name})")
    message, nodes = b"", cut(lockstep)
    with Caught() as caught:  # all ranks are told of Ctrl-C and SystemExit, too
        if nodes.node.rank == 0:
            with declared:
                message = pack([_packed(fn(*args), f"{call}: the result")])
    size = len(message).to_bytes(_LENGTH, "little")
    payloads = lockstep.gather_payloads(f"{call}({name}), done", size, caught.failure)
    length = int.from_bytes(payloads[nodes.ranks[0]], "little")
    with aborting(lockstep, f"{call}({name})"):  # there may be no memory for it
        buffer = np.frombuffer(message.ljust(length), np.uint8).copy()
        nodes.node.bcast(buffer, 0)
    return _unpacked(*unpack(buffer.tobytes())[0])


def _packed(value: Any, value_label: str) -> tuple[bytes, bytes]:
    """Return a tree as `codec.encode` returns a value: a container is the pack of its parts."""
    if type(value) is dict and all(type(key) is str for key in value):
        rows = [
            (encode(k, is_unlimited=True), _packed(v, f"{value_label}[{k!r}]"))
            for k, v in value.items()
        ]
        return b"D", pack([part for row in rows for part in row])
    if type(value) in (list, tuple):
        parts = [_packed(part, f"{value_label}[{i}]") for i, part in enumerate(value)]
        return b"L" if type(value) is list else b"T", pack(parts)
    if isinstance(value, PurePath):
        return b"P", os.fsencode(value)
    if type(value) is bytes:
        return b"y", value
    if type(value) not in _SENDABLE_TYPES and not isinstance(value, np.generic):
        try:
            array = as_array(value, "")
        except LeafTypeError as error:
            dtype = f" and dtype {value.dtype}" if isinstance(value, np.ndarray) else ""
            raise LeafTypeError(
                f"{value_label} has type {type(value).__name__}{dtype}. Return None, numbers, "
                "strings, bytes, paths, arrays of numbers, or dicts with string keys, lists and "
                "tuples of these."
            ) from error
        value = array[()] if is_scalar(value) else array  # an IntEnum is a number
    return encode(value, is_unlimited=True)


def _unpacked(kind: bytes, data: bytes) -> Any:
    if kind in (b"D", b"L", b"T"):
        parts = [_unpacked(*part) for part in unpack(data)]
        if kind == b"D":
            return dict(zip(parts[::2], parts[1::2], strict=True))
        return parts if kind == b"L" else tuple(parts)
    if kind == b"P":
        return Path(os.fsdecode(data))
    return data if kind == b"y" else decode(kind, data)
