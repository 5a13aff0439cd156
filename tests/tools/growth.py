"""Work of one process that could grow with the number of ranks, done for any number without MPI.

``python tests/tools/growth.py`` prints milliseconds for 64 to 100,000 ranks.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from mpistrat.checkpoint.shares import SaveRequest, _DirectorySave

RANKS_PER_NODE = 64
ARRAY_COUNT, WEIGHT_COUNT = 161, 25_000_000


class Planned(_DirectorySave):
    """A large checkpoint that rank 0 of many has planned; it makes no directory."""

    def __init__(self, leaders):
        """Plan it; `leaders` has the first rank of each rank's node."""
        weights = np.broadcast_to(np.float32(0), WEIGHT_COUNT // ARRAY_COUNT)
        variables = {
            f"w{i}": SimpleNamespace(_storage=SimpleNamespace(array=weights))
            for i in range(ARRAY_COUNT)
        }
        nodes = SimpleNamespace(ranks=[0])
        self._payloads = [b'["staging", {}]', *(str(leader).encode() for leader in leaders[1:])]
        lockstep = SimpleNamespace(
            comm=SimpleNamespace(rank=0, size=len(leaders)),
            options=SimpleNamespace(ranks_per_node=0),
            get_shared=lambda *_: nodes,
            gather_payloads=lambda *_: self._payloads,
        )
        super().__init__(SaveRequest(lockstep, variables, "save", Path("c"), 1, False))

    def _make_directory(self):
        return self._payloads[0]

    def plan(self):
        """Return the pieces of rank 0, as the save finds them."""
        self.plan_shares()
        return [piece for piece, rank in self._assign_pieces() if rank == 0]


def measure_plan(rank_count):
    """Return the milliseconds that rank 0 takes to plan a save of 25 M weights in 161 arrays."""
    leaders = np.arange(rank_count) // RANKS_PER_NODE * RANKS_PER_NODE
    return _measure(Planned(leaders.tolist()).plan)


def _measure(function, repeats=5):
    """Return the milliseconds of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


if __name__ == "__main__":
    for rank_count in (64, 1024, 4096, 20_000, 100_000):
        print(f"{rank_count:8} ranks: plan of a save {measure_plan(rank_count):8.2f} ms")
