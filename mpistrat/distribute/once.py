"""Functions that one rank runs for all, or for all of its node: downloads, unpacking, caches."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from mpistrat.arena.nodes import Nodes, find_nodes
from mpistrat.arrays import as_array, is_scalar
from mpistrat.comm.codec import decode, encode, pack, unpack
from mpistrat.distribute.arguments import check_function, check_long_operation
from mpistrat.distribute.mode import check_cross_replica, current
from mpistrat.distribute.replica_group import ReplicaGroup
from mpistrat.distribute.views import GLOBAL
from mpistrat.errors import LeafTypeError
from mpistrat.lockstep.abort import aborting
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.lockstep.ranks import Caught

_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes)
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
            (encode(k, whole=True), _packed(v, f"{value_label}[{k!r}]")) for k, v in value.items()
        ]
        return b"D", pack([part for row in rows for part in row])
    if type(value) in (list, tuple):
        parts = [_packed(part, f"{value_label}[{i}]") for i, part in enumerate(value)]
        return b"L" if type(value) is list else b"T", pack(parts)
    if isinstance(value, PurePath):
        return b"P", os.fsencode(value)
    if type(value) is bytes:
        return b"y", value
    if type(value) not in _PLAIN_TYPES and not isinstance(value, np.generic):
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
    return encode(value, whole=True)


def _unpacked(kind: bytes, data: bytes) -> Any:
    if kind in (b"D", b"L", b"T"):
        parts = [_unpacked(*part) for part in unpack(data)]
        if kind == b"D":
            return dict(zip(parts[::2], parts[1::2], strict=True))
        return parts if kind == b"L" else tuple(parts)
    if kind == b"P":
        return Path(os.fsdecode(data))
    return data if kind == b"y" else decode(kind, data)
