"""How long does a step of JAX wait for its all-reduce, beside NumPy arrays with ``out=``?

    mpiexec -n 2 python benchmarks/jax_step.py [--quick] [--json PATH]

All peers run in one job and take turns; numbers are made again before each repetition; a time is
that of the slowest rank, and a row shows the median. Results are checked.

``numpy out=``   ordinary arrays into ordinary arrays that are there already
``numpy``        ordinary arrays, results in new arrays
``jax``          what a jitted function gave, into one: ``ctx.all_reduce``
``jax tree``     the same by ``mpistrat.jax.all_reduce``, which knows the trees of JAX
``jax in jit``   ``jax.jit(lambda x: mpistrat.jax.all_reduce("sum", x))``
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from common import Peer, arguments, enough, introduced, measure, sums, write_json
from mpi4py import MPI

import mpistrat
import mpistrat.jax as mj

SIZES = {"8 B": 2, "64 KiB": 16_384, "1 MiB": 262_144, "100 MB": 25_000_000}


def peers(size: int, comm: MPI.Intracomm) -> dict[str, Peer]:
    """Return the ways for so many numbers; to be called in replica code."""
    ctx = mpistrat.get_replica_context()
    reads, out = np.zeros(size, np.float32), np.zeros(size, np.float32)
    given: list[Any] = [None]
    half = jax.jit(lambda x: x + 0)
    inside = jax.jit(lambda x: mj.all_reduce("sum", x))

    def ready() -> None:
        given[0] = half(reads.copy()).block_until_ready()

    def way(call: Any) -> Peer:
        def timed() -> Any:
            return call(given[0]).block_until_ready()

        return Peer([reads], timed, sums(comm, lambda found: [found]), ready)

    right = sums(comm, lambda found: [found])
    return {
        "numpy out=": Peer([reads], lambda: ctx.all_reduce("sum", reads, out=out), right),
        "numpy": Peer([reads], lambda: ctx.all_reduce("sum", reads), right),
        "jax": way(lambda x: ctx.all_reduce("sum", x)),
        "jax tree": way(lambda x: mj.all_reduce("sum", x)),
        "jax in jit": way(inside),
    }


def main() -> int:
    parser = arguments(__doc__, "few repetitions, up to 1 MiB")
    chosen = parser.parse_args()
    comm = MPI.COMM_WORLD.Dup()
    strategy = mpistrat.MirroredStrategy()
    known = introduced(comm, f"{'numbers':9} {'way':12} {'ms':>10} {'it / out=':>10}")
    rows: list[dict[str, Any]] = []
    for name, size in SIZES.items():
        if chosen.quick and size > 1e6:
            continue
        found: dict[str, float] = {}

        def replica(size: int = size, found: dict[str, float] = found) -> None:
            ways = peers(size, comm)
            count = 5 if chosen.quick else enough(comm, ways, 2.0)
            found.update(measure(comm, ways, count))

        strategy.run(replica)
        for way, seconds in found.items():
            ratio = seconds / found["numpy out="]
            rows.append({"bytes": 4 * size, "way": way, "ms": 1e3 * seconds, "ratio": ratio})
            if comm.rank == 0:
                print(f"{name:9} {way:12} {1e3 * seconds:10.3f} {ratio:10.2f}", flush=True)
    if comm.rank == 0:
        write_json(chosen.json, {**known, "jax": jax.__version__, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
