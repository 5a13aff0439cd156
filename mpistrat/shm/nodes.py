"""The ranks of this node, and the peers that talk to the other nodes.

Ranks of one node reduce in shared memory. Between nodes a reduction is cut into as many slices as
the smallest node has ranks; for each slice one rank of every node, together called *peers*, talks
about its own slice only, so that all groups of peers work at once (multi-leader; Bayatpour et al.,
"Scalable Reduction Collectives with Data Partitioning-based Multi-Leader Design", SC 2017).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpistrat.comm.base import Comm


class Nodes(NamedTuple):
    """A group of ranks, cut at the borders of shared memory.

    Attributes:
      node: The ranks of this node; the group itself if there is only one node.
      peer_group_count: How many ranks of every node talk to the other nodes: those whose rank in
        `node` is less.
      peers: This rank and the ranks of the other nodes with the same slice; None if this rank has
        no slice, or there is only one node.
      node_count: How many nodes there are.
      ranks: The ranks of this node, as numbers of the group.
    """

    node: Comm
    peer_group_count: int
    peers: Comm | None
    node_count: int
    ranks: list[int]

    def free(self) -> None:
        """Give the groups back. Collective. The group itself is not given back."""
        if self.node_count > 1:
            self.node.free()
            if self.peers is not None:
                self.peers.free()


def find_nodes(comm: Comm, per_node: int = 0) -> Nodes:
    """Cut `comm` at the borders of shared memory.

    Collective. Cost: two splits and two small all-reduces, once.

    Args:
      comm: The group.
      per_node: Take so many consecutive ranks as one node, whatever they share; 0 to ask MPI.
    """
    node = comm.split(comm.rank // per_node) if per_node else comm.by_node()
    if node.size == comm.size:
        return Nodes(comm, comm.size, None, 1, list(range(comm.size)))
    peer_group_count, count = (
        comm.reduce_integer(node.size, "MIN"),
        comm.reduce_integer(int(node.rank == 0), "SUM"),
    )
    leads = node.rank < peer_group_count
    peers = comm.split(node.rank if leads else peer_group_count)
    if not leads:
        peers.free()
    ranks = np.empty(node.size, np.int64)
    node.allgather(np.array([comm.rank]), ranks)
    return Nodes(node, peer_group_count, peers if leads else None, count, ranks.tolist())
