"""The ranks of a group in another order."""

from __future__ import annotations

import numpy as np
import pytest

from mpistrat.comm.base import OrderedComm
from mpistrat.testing import run_ranks

ORDERS = [(0,), (1, 0), (2, 0, 1), (1, 2, 0), (3, 1, 0, 2)]


def bytes_of(rank):
    return np.full(2 * rank + 1, rank, np.uint8)


def program(comm, order):
    group = OrderedComm(comm, order)
    here, size = group.rank, group.size
    counts = [2 * rank + 1 for rank in range(size)]
    found = {"rank": here}
    rows = np.empty((size, 2))
    group.allgather(np.array([here, 0.5]), rows)
    found["allgather"] = rows.tolist()
    ragged = np.empty(sum(counts), np.uint8)
    group.allgatherv(bytes_of(here), ragged, counts)
    found["allgatherv"] = ragged.tolist()
    root = size - 1
    room = np.empty(sum(counts), np.uint8) if here == root else None
    group.gatherv(bytes_of(here), room, counts, root)
    found["gatherv"] = None if room is None else room.tolist()
    everywhere = np.empty(1)
    group.allreduce(np.array([here + 1.0]), everywhere, "PROD")
    found["allreduce"] = everywhere.tolist()
    sent = np.array([here])
    group.bcast(sent, root)
    found["bcast"] = sent.tolist()
    came = np.empty(1, np.int64)
    group.sendrecv(np.array([here]), (here + 1) % size, came, (here - 1) % size)
    found["sendrecv"] = came.tolist()
    half, node = group.split(here % 2), group.by_node()
    found["split"] = (half.rank, half.size)
    found["reversed"] = group.split(0, -here).rank
    found["node"] = (node.rank, node.size)
    group.barrier()
    memory = np.frombuffer(group.shared(8 * size), np.int64)
    memory[here] = here
    group.barrier()
    found["shared"] = memory.tolist()
    group.free()
    return found


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_everything_follows_the_order(order):
    size = len(order)
    found = run_ranks(program, size, order)
    joined = np.concatenate([bytes_of(rank) for rank in range(size)]).tolist()
    for place, rank in enumerate(order):
        last = place == size - 1
        assert found[rank] == {
            "rank": place,
            "allgather": [[i, 0.5] for i in range(size)],
            "allgatherv": joined,
            "gatherv": joined if last else None,
            "allreduce": [float(np.prod(np.arange(1, size + 1)))],
            "bcast": [size - 1],
            "sendrecv": [(place - 1) % size],
            "split": (place // 2, len(range(place % 2, size, 2))),
            "reversed": size - 1 - place,
            "node": (place, size),
            "shared": list(range(size)),
        }
