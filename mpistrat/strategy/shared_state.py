"""State that is not a variable, and functions that one rank runs for others.

`broadcast_state` gives replica 0's values to all ranks, `check_same` compares those of all. `once`
and `once_per_node` are for downloads, unpacking and caches.
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
    DIGEST_NBYTES,
    Array,
    as_array,
    as_bytes,
    digest,
    is_scalar,
    label,
    restore_kind,
    spec_text,
)
from mpistrat.collectives.layout import OWN_MESSAGE_NBYTES
from mpistrat.collectives.plan import format_leaf
from mpistrat.comm.base import Comm
from mpistrat.comm.callsite import ranks_text
from mpistrat.comm.serialization import decode, encode, pack, unpack
from mpistrat.errors import DivergenceError, LeafTypeError, StructureError
from mpistrat.lockstep.ending import aborting
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.mismatch import SAME
from mpistrat.lockstep.ranks import FailureCatcher
from mpistrat.shm.nodes import Nodes, find_nodes
from mpistrat.strategy.all_reduce import check_out
from mpistrat.strategy.context_stack import check_cross_replica, current_context
from mpistrat.strategy.replica_group import ReplicaGroup
from mpistrat.variables.arguments import check_function, check_long_operation
from mpistrat.variables.indexed_slices import IndexedSlices
from mpistrat.variables.kinds import GLOBAL_VIEW, DistributedVariable, name_leaves
from mpistrat.variables.regroup import select_local
from mpistrat.variables.values import DistributedValues

# Leaves that are not arrays; they travel as they are.
_PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, np.str_})
_CHUNK_NBYTES = 8 * 1024 * 1024  # bytes in which a difference is looked for
_MAX_LETTERS = 60  # letters of a value in messages

EncodedValue: TypeAlias = "tuple[bytes, bytes]"


class _PreparedTree(NamedTuple):
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
    values: list[Array | EncodedValue]


def _prepare_tree(group: ReplicaGroup, name: str, tree: object) -> _PreparedTree:
    """Return the checked tree. Not collective."""
    leaves, structure = pytree.flatten(tree)
    group.regrouper.check(name, leaves)
    paths = name_leaves(leaves, structure)
    local_values = [
        x._component() if isinstance(x, DistributedVariable) else select_local(x) for x in leaves
    ]
    values = [_convert_leaf(leaf, path) for leaf, path in zip(local_values, paths, strict=True)]
    specs = [
        spec_text(value) if isinstance(value, np.ndarray) else type(leaf).__name__
        for leaf, value in zip(local_values, values, strict=True)
    ]
    call = f"{name}({pytree.describe(structure)} {', '.join(map(format_leaf, paths, specs))})"
    return _PreparedTree(call, leaves, structure, paths, values)


def _convert_leaf(leaf: object, path: str) -> Array | EncodedValue:
    if isinstance(leaf, IndexedSlices):
        raise LeafTypeError(
            f"{label(path)} is IndexedSlices; expected an array or a number. Give its values and "
            "indices."
        )
    return encode(leaf, is_unlimited=True) if type(leaf) in _PLAIN_TYPES else as_array(leaf, path)


def broadcast_state(group: ReplicaGroup, tree: object, out: object) -> Any:
    """Broadcast replica 0's values to all; see `Strategy.broadcast`. Collective."""
    lockstep = group.lockstep
    with lockstep.validating_collectively("broadcast"):
        prepared = _prepare_tree(group, "broadcast", tree)
        outs = None if out is None else _check_outs(out, prepared)
        # A large array travels straight to its final place, if it comes from there.
        buffers = [
            _make_buffer(value, outs[i] if outs else None)
            for i, value in enumerate(prepared.values)
            if isinstance(value, np.ndarray)
        ]
        plain_values = [value for value in prepared.values if not isinstance(value, np.ndarray)]
        packed_values = pack(plain_values) if lockstep.comm.rank == 0 else b""
    message = lockstep.gather_payloads(prepared.call, packed_values)[0]
    with aborting(lockstep, prepared.call):  # there may be no memory for it
        _broadcast_arrays(lockstep.comm, buffers)
    if outs is not None:
        for out_array, buffer in zip(outs, buffers, strict=True):
            if out_array is not buffer:
                out_array[...] = buffer
        return out
    arrays, plain_results = iter(buffers), iter(unpack(message))
    results = [
        restore_kind(next(arrays), leaf)
        if isinstance(value, np.ndarray)
        else decode(*next(plain_results))
        for leaf, value in zip(map(select_local, prepared.leaves), prepared.values, strict=True)
    ]
    return pytree.unflatten(prepared.structure, results)


def _check_outs(out: object, prepared: _PreparedTree) -> list[Array]:
    """Return what is to be written to, or raise what makes it unfit."""
    out_leaves, structure = pytree.flatten(out)
    if structure != prepared.structure:
        raise StructureError(
            f"out must have the structure of the tree, {pytree.describe(prepared.structure)}, not "
            f"{pytree.describe(structure)}."
        )
    return [_check_out(out_leaf, prepared, i) for i, out_leaf in enumerate(out_leaves)]


def _check_out(out_leaf: Any, prepared: _PreparedTree, leaf_index: int) -> Array:
    value, path = prepared.values[leaf_index], prepared.paths[leaf_index]
    if not isinstance(value, np.ndarray):
        local_value = select_local(prepared.leaves[leaf_index])
        raise LeafTypeError(
            f"out: {label(path)} is a {type(local_value).__name__}, which cannot be "
            "written to. Take what broadcast returns without out."
        )
    if isinstance(out_leaf, DistributedVariable | DistributedValues):
        raise LeafTypeError(
            f"out: {label(path)} is {out_leaf!r:.80}; expected an array to write to. A variable "
            "has assign, and starts with replica 0's value."
        )
    buffer: Array = out_leaf
    if not isinstance(out_leaf, np.ndarray):
        buffer, second_view = as_array(out_leaf, path), as_array(out_leaf, path)
        if buffer.size and not np.may_share_memory(buffer, second_view):
            raise LeafTypeError(
                f"out: {label(path)} ({type(out_leaf).__name__}) gives NumPy copies of its memory; "
                "expected an array to write to."
            )
    is_native = buffer.dtype.newbyteorder("=") == value.dtype
    check_out(
        buffer,
        value.shape,
        buffer.dtype if is_native else value.dtype,
        prepared.structure,
        leaf_index,
    )
    return buffer


def _make_buffer(value: Array, out_array: Array | None) -> Array:
    """Return contiguous memory for the value to travel in: `out_array` if the value is there."""
    if out_array is not None and out_array.flags.carray and out_array.dtype.isnative:
        is_own_memory = (
            out_array.ctypes.data == value.ctypes.data and out_array.strides == value.strides
        )
        if is_own_memory and out_array.nbytes:
            return out_array
    return np.array(value, order="C", subok=False)


def _broadcast_arrays(comm: Comm, buffers: Sequence[Array]) -> None:
    """Broadcast replica 0's arrays: large ones without a copy, the others in one message."""
    small_buffers = [
        buffer.reshape(-1).view(np.uint8)
        for buffer in buffers
        if 0 < buffer.nbytes < OWN_MESSAGE_NBYTES
    ]
    for buffer in buffers:
        if buffer.nbytes >= OWN_MESSAGE_NBYTES:
            comm.bcast(buffer, 0)
    if not small_buffers:
        return
    joined_bytes = np.concatenate(small_buffers)
    comm.bcast(joined_bytes, 0)
    at = 0
    for small_buffer in small_buffers:
        small_buffer[...] = joined_bytes[at : at + small_buffer.size]
        at += small_buffer.size


@final
class _PendingCheck:
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


def defer_same(group: ReplicaGroup, tree: object) -> None:
    """Let the next handshake show that all ranks hold the same tree. No communication.

    Args:
      group: The ranks.
      tree: As `Strategy.check_same` takes it.

    Raises:
      LeafTypeError: A leaf is not an array, number or text.
      StrategyError: A leaf is a value or variable of another strategy.
    """
    prepared = _prepare_tree(group, "same", tree)
    if group.lockstep.comm.size == 1:
        return
    content_digest = xxhash.xxh3_128_digest(prepared.call.encode() + _digest_leaves(prepared))
    arrays = [x for x in prepared.values if isinstance(x, np.ndarray) and x.size]
    first_value = f"{arrays[0].reshape(-1)[0]}, ..." if arrays else "..."
    translated_text = first_value.translate({ord("("): None, ord(")"): None})  # of a complex number
    group.lockstep.defer_write(_PendingCheck(content_digest, translated_text))


def _digest_leaves(prepared: _PreparedTree) -> bytes:
    """Return the digests of all leaves, one after the other."""
    return b"".join(
        digest([value])
        if isinstance(value, np.ndarray)
        else xxhash.xxh3_128_digest(b"".join(value))
        for value in prepared.values
    )


def check_same(group: ReplicaGroup, tree: object) -> None:
    """Raise on all ranks unless all hold the same; see `Strategy.check_same`. Collective."""
    lockstep = group.lockstep
    with lockstep.validating_collectively("check_same"):
        prepared = _prepare_tree(group, "check_same", tree)
        digests = _digest_leaves(prepared)
        own_digest = xxhash.xxh3_128_digest(digests)
    messages = lockstep.gather_payloads(prepared.call, own_digest)
    if any(message != messages[0] for message in messages):
        lockstep.raise_on_all_ranks(_make_divergence_error(lockstep, prepared, digests))


def _make_divergence_error(
    lockstep: Lockstep, prepared: _PreparedTree, digests: bytes
) -> DivergenceError:
    """Return the error that says where the ranks differ. Collective; alike on all ranks."""
    ranks, messages = lockstep.ranks, lockstep.gather_texts(digests)
    starts = range(0, len(digests), DIGEST_NBYTES)
    columns = [[message[at : at + DIGEST_NBYTES] for message in messages] for at in starts]
    differing_leaves = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    first_leaf, column = differing_leaves[0], columns[differing_leaves[0]]
    differing_replicas = [i for i, leaf_digest in enumerate(column) if leaf_digest != column[0]]
    first_replica = differing_replicas[0]
    index_text, value_text = _describe_value(lockstep, prepared.values[first_leaf], first_replica)
    texts = [text.decode().split("\0") for text in lockstep.gather_texts(value_text.encode())]
    (other_text, other_bits), (text_of_0, bits_of_0) = texts[first_replica], texts[0]
    if other_text == text_of_0:
        other_text += f" (bits {other_bits})"
        text_of_0 += f" (bits {bits_of_0})"
    pairs = zip(prepared.values, map(select_local, prepared.leaves), strict=True)
    is_writable = all(isinstance(v, np.ndarray) and not is_scalar(leaf) for v, leaf in pairs)
    count_text = ""
    if len(differing_leaves) > 1:
        count_text = f" Of {len(prepared.paths)} leaves {len(differing_leaves)} differ."
    return DivergenceError(
        f"check_same: {label(prepared.paths[first_leaf])} differs between ranks{index_text}: "
        f"{other_text} on rank {ranks[first_replica]}, {text_of_0} on rank {ranks[0]}. In it, "
        f"{ranks_text([ranks[i] for i in differing_replicas])} "
        f"{'differs' if len(differing_replicas) == 1 else 'differ'} from rank {ranks[0]} "
        f"({lockstep.rank_text}).{count_text}\n  To begin alike, give all "
        f"replica 0's: {'' if is_writable else 'tree = '}strategy.broadcast(tree"
        f"{', out=tree' if is_writable else ''})."
    )


def _describe_value(
    lockstep: Lockstep, leaf_value: Array | EncodedValue, replica: int
) -> tuple[str, str]:
    """Return the index where `replica` first differs from replica 0, and this rank's value there.

    Collective. The text of the value has its bits after a zero byte.
    """
    if not isinstance(leaf_value, np.ndarray):
        return "", f"{decode(*leaf_value)!r:.{_MAX_LETTERS}}\0"
    own_position = _find_first_difference(lockstep.comm, leaf_value)
    flat_index = int(lockstep.gather_texts(str(own_position).encode())[replica])
    index = tuple(map(int, np.unravel_index(flat_index, leaf_value.shape)))
    index_text = f" at index {index}" if index else ""
    return (
        index_text,
        f"{leaf_value[index]}\0{as_bytes(leaf_value[index])[0, ::-1].tobytes().hex()}",
    )


def _find_first_difference(comm: Comm, array: Array) -> int:
    """Return the place of the first element whose bits are not replica 0's; 0 if all are."""
    rows = as_bytes(array)
    position = None
    step = max(1, _CHUNK_NBYTES // max(1, rows.shape[1]))
    for at in range(0, len(rows), step):
        own_rows = rows[at : at + step]
        replica0_rows = np.array(own_rows, order="C")
        comm.bcast(replica0_rows, 0)
        differing_rows = (own_rows != replica0_rows).any(axis=1)
        if position is None and differing_rows.any():
            position = at + int(np.argmax(differing_rows))
    return position or 0


_SENDABLE_TYPES = (type(None), bool, int, float, complex, str, bytes)
_LENGTH_NBYTES = 8  # bytes


def once(fn: Callable[..., Any], *args: object, max_seconds: float = 3600.0) -> Any:
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
      The result of `fn`, alike on all ranks, the first included. It may be ``None``, numbers,
      texts, bytes, paths, arrays (tensors come as NumPy arrays), and dicts with string keys, lists
      and tuples of such. Everything is sent in one message, so large data belong in a file.

    Raises:
      Exception: The error of `fn`, on the rank that called it; on the others a `RemoteError` that
        also is of that class, and names rank and text.
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


def once_per_node(fn: Callable[..., Any], *args: object, max_seconds: float = 3600.0) -> Any:
    """Call ``fn(*args)`` on the first rank of each node, and return its result on that node.

    For work that each node needs once: data unpacked to its local disk, a cache. MPI, or
    ``MPISTRAT_RANKS_PER_NODE``, says which ranks share a node. Arguments, results and errors are as
    in `once`. A failure on one node is raised on all ranks of all nodes.

    Args:
      fn: The function.
      args: Its arguments; those of the first rank of each node are used.
      max_seconds: How long it may take on each.

    Returns:
      The result of `fn` on this rank's node.

    Raises:
      Exception: As `once`.

    Cost: `fn`, two handshakes, and one ``MPI_Bcast`` in each node.

    Example:
      >>> import tempfile
      >>> once_per_node(tempfile.gettempdir) == tempfile.gettempdir()
      True
    """
    return _call_on_first_ranks("once_per_node", fn, args, max_seconds, find_node_groups)


def _make_single_node(lockstep: Lockstep) -> Nodes:
    comm = lockstep.comm
    return Nodes(comm, comm.size, None, 1, list(range(comm.size)))


def find_node_groups(lockstep: Lockstep) -> Nodes:
    """Return which ranks share a node. Collective the first time."""
    ranks_per_node = lockstep.options.ranks_per_node
    return lockstep.get_shared(
        "nodes", lambda: find_nodes(lockstep.comm, ranks_per_node), ranks_per_node
    )


def _call_on_first_ranks(
    call: str,
    fn: Any,
    args: tuple[Any, ...],
    max_seconds: float,
    find_nodes_of: Callable[[Lockstep], Nodes],
) -> Any:
    context = current_context()
    if context is not None:
        check_cross_replica(context.strategy, call, "it before run()")
    replica_group: ReplicaGroup = (
        ReplicaGroup.create(GLOBAL_VIEW) if context is None else context.strategy._replicas
    )
    lockstep, name = replica_group.lockstep, getattr(fn, "__name__", type(fn).__name__)
    with lockstep.validating_collectively(call):
        check_function(call, "fn", fn)
        check_long_operation(f"{call}({name})", max_seconds)
        long_operation = lockstep.session.board.long_operation(
            f"{call}({name})", float(max_seconds)
        )
    lockstep.handshake(f"{call}({name})")
    message, nodes = b"", find_nodes_of(lockstep)
    with FailureCatcher() as caught:  # all ranks learn of Ctrl-C and SystemExit, too
        if nodes.node.rank == 0:
            with long_operation:
                message = pack([_pack_tree(fn(*args), f"{call}: the result")])
    size = len(message).to_bytes(_LENGTH_NBYTES, "little")
    payloads = lockstep.gather_payloads(f"{call}({name}), done", size, caught.failure)
    length = int.from_bytes(payloads[nodes.ranks[0]], "little")
    with aborting(lockstep, f"{call}({name})"):  # there may be no memory for it
        buffer = np.frombuffer(message.ljust(length), np.uint8).copy()
        nodes.node.bcast(buffer, 0)
    return _unpack_tree(*unpack(buffer.tobytes())[0])


def _pack_tree(value: Any, value_label: str) -> tuple[bytes, bytes]:
    """Return a tree as `codec.encode` returns a value: a container is the pack of its parts."""
    if type(value) is dict and all(type(key) is str for key in value):
        entries = [
            (encode(k, is_unlimited=True), _pack_tree(v, f"{value_label}[{k!r}]"))
            for k, v in value.items()
        ]
        return b"D", pack([packed for entry in entries for packed in entry])
    if type(value) in (list, tuple):
        packed_parts = [_pack_tree(packed, f"{value_label}[{i}]") for i, packed in enumerate(value)]
        return b"L" if type(value) is list else b"T", pack(packed_parts)
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


def _unpack_tree(tag: bytes, content: bytes) -> Any:
    if tag in (b"D", b"L", b"T"):
        parts = [_unpack_tree(*packed) for packed in unpack(content)]
        if tag == b"D":
            return dict(zip(parts[::2], parts[1::2], strict=True))
        return parts if tag == b"L" else tuple(parts)
    if tag == b"P":
        return Path(os.fsdecode(content))
    return content if tag == b"y" else decode(tag, content)
