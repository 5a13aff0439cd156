"""How much memory do variables take on a node, beside a copy of them on every rank?

    mpiexec -n 4 python benchmarks/variables.py [--quick] [--at-most R] [--json PATH] [--plot PATH]

Memory is the proportional set size (Pss of ``/proc/self/smaps_rollup``), which counts a page that k
processes map as 1/k in each, summed over the ranks of a node. The table shows its growth after all
ranks have read every number.

``copies``    NumPy arrays, the same on every rank: what a program without a library has
``variables`` ``mpistrat.Variable`` of the same shapes, float32, with the same random numbers
``written``   the same variables after each was assigned other numbers once

``ratio`` is that growth over the growth of ``copies``; 1 / (ranks of the node) is one copy for all.
The path is read off the process's own memory map: ``private`` if the pages with the numbers of a
variable are this process's own, ``shared`` if they are a file's that others can map too, and no
copies of them; all ranks and variables have to be the same, and shared ones have to take less than
two copies for each node. ``--at-most R`` fails above the ratio R.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import arguments, print_introduction, write_json
from mpi4py import MPI
from pictures import Panel, bars

import mpistrat

MEGABYTE = 10**6
SIZES = (64 * MEGABYTE, 256 * MEGABYTE)
PIECES = 8  # variables
PSS = Path("/proc/self/smaps_rollup")

HEADER = f"{'MB':>6} {'what':10} {'path':8} {'grows by MB':>12} {'ratio':>6}"


def pss(node: MPI.Intracomm) -> int:
    """Return the bytes that the ranks of this node have, when all are at rest. Collective."""
    gc.collect()
    # The C library may keep freed memory for later; it must not count.
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    node.Barrier()
    line = next(text for text in PSS.read_text().splitlines() if text.startswith("Pss:"))
    total = node.allreduce(int(line.split()[1]) * 1024)
    node.Barrier()
    return int(total)


def numbers(index: int, nbytes: int, add: int = 0) -> np.ndarray:
    """Return the values of one variable; not zeros, which the system would keep only once."""
    return np.random.default_rng(index).random(nbytes // PIECES // 4, np.float32) + np.float32(add)


def mapped(array: np.ndarray) -> str:
    """Return whether this process has the pages of an array to itself."""
    at = array.__array_interface__["data"][0]
    is_inside, kilobytes = False, {"Rss": 0, "Anonymous": 0}
    for text in Path("/proc/self/smaps").read_text().splitlines():
        word, *rest = text.split()
        if not word.endswith(":"):  # the first line of a mapping: from where to where
            low, high = (int(end, 16) for end in word.split("-"))
            is_inside = low <= at < high
        elif is_inside and word[:-1] in kilobytes:
            kilobytes[word[:-1]] = int(rest[0])
    if not kilobytes["Rss"]:
        raise LookupError("the array is nowhere in this process")
    # Pages of a file, which memory for several processes is, are anonymous once they are a copy.
    return "shared" if 10 * kilobytes["Anonymous"] < kilobytes["Rss"] else "private"


def check(comm: MPI.Intracomm, arrays: list[np.ndarray], nbytes: int, add: int = 0) -> None:
    """Read every number, so that every rank has all of its pages; all have to be right."""
    wrong_indices = [i for i, a in enumerate(arrays) if (a != numbers(i, nbytes, add)).any()]
    if any(comm.allgather(wrong_indices)):
        raise ArithmeticError(
            f"variables with wrong numbers, by rank: {comm.allgather(wrong_indices)}"
        )


def one_path(comm: MPI.Intracomm, variables: list[Any]) -> str:
    """Return the path of the numbers of all variables on all ranks. Collective."""
    paths = set().union(*comm.allgather({mapped(np.asarray(v)) for v in variables}))
    if len(paths) != 1:
        raise SystemExit("some variables are shared and some are not: there is no one path")
    return str(paths.pop())


def measure(
    comm: MPI.Intracomm, node: MPI.Intracomm, strategy: mpistrat.Strategy, nbytes: int
) -> list[dict[str, Any]]:
    """Return one row for each way to have so many bytes on every rank. Collective."""
    growth: dict[str, int] = {}
    nbytes_before = pss(node)
    copies = [numbers(index, nbytes) for index in range(PIECES)]
    check(comm, copies, nbytes)
    growth["copies"] = pss(node) - nbytes_before
    del copies

    nbytes_before = pss(node)
    with strategy.scope():
        variables = [mpistrat.Variable(numbers(index, nbytes)) for index in range(PIECES)]
        check(comm, [np.asarray(v) for v in variables], nbytes)
        growth["variables"] = pss(node) - nbytes_before
        for index, variable in enumerate(variables):
            variable.assign(numbers(index, nbytes, 1))
        check(comm, [np.asarray(v) for v in variables], nbytes, 1)
        growth["written"] = pss(node) - nbytes_before
    path = one_path(comm, variables)
    # The node that takes most speaks for all.
    worst = {peer_name: max(comm.allgather(grown)) for peer_name, grown in growth.items()}
    if path == "shared" and max(worst["variables"], worst["written"]) > 2 * nbytes:
        raise SystemExit(f"shared, and yet not one copy for each node: {worst} for {nbytes}")
    return [
        {
            "bytes": nbytes,
            "what": peer_name,
            "path": "private" if peer_name == "copies" else path,
            "ranks_of_node": node.size,
            "grown": grown,
            "ratio": grown / worst["copies"],
        }
        for peer_name, grown in worst.items()
    ]


def line(row: dict[str, Any]) -> str:
    size, grown = row["bytes"] / MEGABYTE, row["grown"] / MEGABYTE
    return f"{size:6.0f} {row['what']:10} {row['path']:8} {grown:12.1f} {row['ratio']:6.3f}"


def warm_up(comm: MPI.Intracomm, strategy: mpistrat.Strategy) -> None:
    """Have everybody make what is made once: buffers of MPI, shared memory, pools."""
    with strategy.scope():
        variable = mpistrat.Variable(numbers(0, SIZES[0]))
        variable.assign(numbers(1, SIZES[0]))
    comm.Bcast(numbers(0, SIZES[0]))


def main() -> int:
    parser = arguments(__doc__, "the smallest size only")
    parser.add_argument("--at-most", type=float, metavar="R", help="fail above this ratio")
    options = parser.parse_args()
    if not PSS.exists():
        raise SystemExit(f"{PSS} is not there: this system does not say who shares what")
    comm = MPI.COMM_WORLD.Dup()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    strategy = mpistrat.MirroredStrategy()
    facts = print_introduction(comm, HEADER)
    warm_up(comm, strategy)
    rows: list[dict[str, Any]] = []
    for nbytes in SIZES[:1] if options.quick else SIZES:
        rows += measure(comm, node, strategy, nbytes)
        if comm.rank == 0:
            print("\n".join(map(line, rows[-3:])), flush=True)
    worst = max(row["ratio"] for row in rows if row["what"] != "copies")
    if comm.rank == 0:
        print(f"\npath: {rows[-1]['path']}, at most {worst:.3f} of a copy per rank")
        write_json(options.json, {**facts, "rows": rows})
        panels = [
            Panel(
                f"{nbytes / MEGABYTE:.0f} MB",
                "MB on the node",
                {r["what"]: r["grown"] / MEGABYTE for r in rows if r["bytes"] == nbytes},
            )
            for nbytes in dict.fromkeys(row["bytes"] for row in rows)
        ]
        bars(options.plot, facts, "Memory of variables", panels, ("variables", "written"))
    return int(options.at_most is not None and worst > options.at_most)


if __name__ == "__main__":
    sys.exit(main())
