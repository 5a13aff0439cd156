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
from common import Peer, arguments, count_repetitions, measure, print_introduction, sums, write_json
from mpi4py import MPI

import mpistrat
import mpistrat.jax as mj

SIZES = {"8 B": 2, "64 KiB": 16_384, "1 MiB": 262_144, "100 MB": 25_000_000}


def peers(size: int, comm: MPI.Intracomm) -> dict[str, Peer]:
    """Return the ways for so many numbers; to be called in replica code."""
    ctx = mpistrat.get_replica_context()
    reads, out = np.zeros(size, np.float32), np.zeros(size, np.float32)
    inputs: list[Any] = [None]
    half = jax.jit(lambda x: x + 0)
    reduce_jitted = jax.jit(lambda x: mj.all_reduce("sum", x))

    def prepare() -> None:
        inputs[0] = half(reads.copy()).block_until_ready()

    def make_peer(call: Any) -> Peer:
        def timed() -> Any:
            return call(inputs[0]).block_until_ready()

        return Peer([reads], timed, sums(comm, lambda found: [found]), prepare)

    right = sums(comm, lambda found: [found])
    return {
        "numpy out=": Peer([reads], lambda: ctx.all_reduce("sum", reads, out=out), right),
        "numpy": Peer([reads], lambda: ctx.all_reduce("sum", reads), right),
        "jax": make_peer(lambda x: ctx.all_reduce("sum", x)),
        "jax tree": make_peer(lambda x: mj.all_reduce("sum", x)),
        "jax in jit": make_peer(reduce_jitted),
    }


def main() -> int:
    parser = arguments(__doc__, "few repetitions, up to 1 MiB")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD.Dup()
    strategy = mpistrat.MirroredStrategy()
    facts = print_introduction(comm, f"{'numbers':9} {'way':12} {'ms':>10} {'it / out=':>10}")
    rows: list[dict[str, Any]] = []
    for name, size in SIZES.items():
        if options.quick and size > 1e6:
            continue
        median_seconds: dict[str, float] = {}

        def replica(size: int = size, median_seconds: dict[str, float] = median_seconds) -> None:
            measured_peers = peers(size, comm)
            count = 5 if options.quick else count_repetitions(comm, measured_peers, 2.0)
            median_seconds.update(measure(comm, measured_peers, count))

        strategy.run(replica)
        for peer_name, seconds in median_seconds.items():
            ratio = seconds / median_seconds["numpy out="]
            rows.append({"bytes": 4 * size, "way": peer_name, "ms": 1e3 * seconds, "ratio": ratio})
            if comm.rank == 0:
                print(f"{name:9} {peer_name:12} {1e3 * seconds:10.3f} {ratio:10.2f}", flush=True)
    if comm.rank == 0:
        write_json(options.json, {**facts, "jax": jax.__version__, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
