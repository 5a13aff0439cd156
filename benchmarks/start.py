"""How long until a program can begin: imports, the first strategy, the first calls?

    python benchmarks/start.py [--ranks N] [--quick] [--json PATH] [--plot PATH]

It starts jobs of N ranks (2 unless said otherwise) itself, one for each measurement, so that all of
it happens in fresh processes; they take turns. A time is that of the slowest rank of a job, and a
row shows the median over jobs.

``cold``   mpistrat with an empty cache of Numba (``NUMBA_CACHE_DIR`` in a folder of its own)
``warm``   the same again, with the cache that the cold job before it has filled
``numpy``, ``mpi4py`` (``from mpi4py import MPI``, which starts MPI), ``numba``, ``torch``
           an import, for each that can be found: what a program may have to pay anyway

Columns, in the order in which a program comes to them; each is the time of that step alone:
``import``, the first ``strategy`` (which imports NumPy and starts MPI), the first all-reduce of 8
numbers (``small``) and of 1 MiB of float32 (``large``), and that of 1 MiB again (``again``).

Below, ``first step``: the digits example to the end of its first training step, with random data in
the place of scikit-learn's, beside what no program goes without (``raw``: NumPy, mpi4py and one
Allreduce). Milliseconds from the first line of the program on, and calls of the file system for
each rank, the launcher's included, which strace counts where it is installed. ``mpistrat warm``
puts the modules into one file; the line says whether there is one.

The path is looked at, and this fails if it is another one: importing mpistrat starts neither MPI
nor Numba, and the first small all-reduce does not wait for Numba. With several ranks the large one
does, if Numba is wanted and there: a ``cold`` job has to leave compiled code behind, a ``warm`` one
to find all of it.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, first_line, host, print_facts, turns, write_json
from pictures import Panel, bars

import mpistrat
from mpistrat import config
from mpistrat.bytecode import file_of
from mpistrat.config import environment, launched_by
from mpistrat.launch.mpi_libraries import Launcher, find

REPETITIONS = 7
LONGEST = 120  # seconds for one job
STEPS = ("import", "strategy", "small", "large", "again")
PEERS = {"numpy": "numpy", "mpi4py": "mpi4py.MPI", "numba": "numba", "torch": "torch"}
HEADER = f"{'what':8} {'path':22}" + "".join(f"{step + ' ms':>12}" for step in STEPS)

# Each rank leaves a file with its times, for a process that only imports has nobody to talk to.
PEER = """
import json, os, pathlib, sys, time
folder, module = sys.argv[1:]
begin = time.perf_counter()
__import__(module)
seconds = time.perf_counter() - begin
told = {"seconds": [seconds]}
pathlib.Path(folder, f"{os.getpid()}.json").write_text(json.dumps(told))
"""
OURS = """
import json, os, pathlib, sys, time
folder = sys.argv[1]
stamps = [time.perf_counter()]
import mpistrat
stamps.append(time.perf_counter())
imported = sorted({"mpi4py.MPI", "numba"} & set(sys.modules))
strategy = mpistrat.MirroredStrategy()
stamps.append(time.perf_counter())
import numpy as np
seen = []
def program():
    ctx = mpistrat.get_replica_context()
    for count in (8, 2**18, 2**18):
        array = np.ones(count, np.float32)
        total = ctx.all_reduce("sum", array)
        stamps.append(time.perf_counter())
        assert (total == ctx.num_replicas_in_sync).all()
        seen.append("numba" in sys.modules)
strategy.run(program)
told = {"seconds": [b - a for a, b in zip(stamps, stamps[1:])], "imported": imported, "numba": seen}
pathlib.Path(folder, f"{os.getpid()}.json").write_text(json.dumps(told))
"""

FIRST = {
    "raw": """
import json, os, pathlib, sys, time
begin = time.perf_counter()
import numpy as np
from mpi4py import MPI
MPI.COMM_WORLD.Allreduce(np.ones(10), np.empty(10))
""",
    "digits": """
import json, os, pathlib, sys, time
begin = time.perf_counter()
import numpy as np
import mpistrat
from mpistrat.examples import digits, mlp
n = digits.TRAINING_COUNT
x, y = np.random.default_rng(0).random((n, 64)), np.arange(n) % 10
strategy = mpistrat.MirroredStrategy()
images = mpistrat.Dataset((x, y)).shuffle(seed=0).batch(64)
optimizer = mpistrat.optim.SGD(0.15, momentum=digits.MOMENTUM)
with strategy.scope():
    model = mlp.Parameters(*map(mpistrat.Variable, mlp.make_parameters(64, 128, 10, 0)))
    seen = [mpistrat.metrics.Mean(name) for name in ("loss", "accuracy")]
x, y = next(iter(strategy.experimental_distribute_dataset(images)))
strategy.run(digits.train_step, args=(model, optimizer, seen, x, y))
""",
}
TOLD = """
told = {"seconds": [time.perf_counter() - begin]}
pathlib.Path(sys.argv[1], f"{os.getpid()}.json").write_text(json.dumps(told))
"""


def job(
    launcher: Launcher,
    ranks: int,
    program: str,
    module: str = "",
    cache: Path | None = None,
    before: tuple[str, ...] = (),
) -> list[Any]:
    """Run a program on so many ranks, and return what each told."""
    with tempfile.TemporaryDirectory() as folder:
        command = launcher.command(ranks, [sys.executable, "-c", program, folder, *module.split()])
        env = environment({**command.env, "NUMBA_CACHE_DIR": str(cache or folder)})
        got = subprocess.run(
            [*before, *command.argv],
            env=env,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )
        told = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if got.returncode or len(told) != ranks:
        raise SystemExit(f"a job failed with code {got.returncode}:\n{got.stdout}{got.stderr}")
    return told


def path_of(what: str, ranks: int, told: list[Any], made: int) -> str:
    """Return how a job of mpistrat went, or fail: it is not what this file claims to measure.

    Args:
      what: "cold" or "warm".
      ranks: How many there were.
      told: What its ranks told.
      made: How many files of compiled code it left behind.
    """
    for one in told:
        if one["imported"]:
            raise SystemExit(f"importing mpistrat has imported {one['imported']}")
        if one["numba"][0]:
            raise SystemExit("the first small all-reduce has imported Numba")
    wanted = ranks > 1 and config.read().numba and importlib.util.find_spec("numba") is not None
    if {one["numba"][1] for one in told} != {wanted}:
        raise SystemExit(f"Numba imported by the ranks: {told}; expected {wanted} on all of them")
    if not wanted:
        return "no compiler"
    if bool(made) != (what == "cold"):
        raise SystemExit(f"a {what} job has left {made} files of compiled code behind")
    return "Numba, compiled" if what == "cold" else "Numba, from its cache"


def ours(launcher: Launcher, ranks: int) -> dict[str, tuple[list[float], str]]:
    """Return the slowest rank's times, and the paths, of a cold and a warm job of mpistrat."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        cache, before = Path(folder), 0
        for what in ("cold", "warm"):
            told = job(launcher, ranks, OURS, cache=cache)
            made = len(list(cache.rglob("*.nbc")))
            found[what] = slowest(told), path_of(what, ranks, told, made - before)
            before = made
    return found


def first_step(launcher: Launcher, ranks: int, repetitions: int) -> list[dict[str, Any]]:
    """Return the time to the end of the first step, and what it asks of the file system."""
    times: dict[str, list[float]] = {what: [] for what in FIRST}
    for number in range(repetitions):
        for what in turns(FIRST, number):
            times[what] += slowest(job(launcher, ranks, FIRST[what] + TOLD))
    rows = []
    for what, program in FIRST.items():
        row = {"what": what, "ms": 1e3 * statistics.median(times[what]), "calls": None}
        row["one file"] = Path(file_of(str(Path(mpistrat.__file__).parent))).exists()
        if shutil.which("strace"):
            with tempfile.NamedTemporaryFile("r") as file:
                strace = ("strace", "-f", "-qq", "-e", "trace=%file", "-o", file.name)
                job(launcher, ranks, program + TOLD, before=strace)
                row["calls"] = sum("resumed>" not in call for call in file) / ranks
        rows.append(row)
    return rows


def slowest(told: list[Any]) -> list[float]:
    return [max(times) for times in zip(*(one["seconds"] for one in told), strict=True)]


def measure(launcher: Launcher, ranks: int, repetitions: int) -> list[dict[str, Any]]:
    """Return one row for each thing to start."""
    found = {name: module for name, module in PEERS.items() if importlib.util.find_spec(name)}
    times: dict[str, list[list[float]]] = {what: [] for what in ("cold", "warm", *found)}
    paths = dict.fromkeys(times, "")
    for number in range(repetitions):
        for what in turns({"mpistrat": "", **found}, number):
            if what in found:
                times[what].append(slowest(job(launcher, ranks, PEER, found[what])))
                continue
            for one, (seconds, path) in ours(launcher, ranks).items():
                times[one].append(seconds)
                paths[one] = path
    return [
        {
            "what": what,
            "path": paths[what],
            "repetitions": repetitions,
            "ms": {
                step: 1e3 * statistics.median(column)
                for step, column in zip(STEPS, zip(*runs, strict=True), strict=False)
            },
        }
        for what, runs in times.items()
    ]


def line(row: dict[str, Any]) -> str:
    return f"{row['what']:8} {row['path']:22}" + "".join(f"{ms:12.1f}" for ms in row["ms"].values())


def main() -> int:
    parser = arguments(__doc__, "one job of each kind")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="of each job; 2")
    chosen = parser.parse_args()
    if launched_by():
        raise SystemExit("this starts jobs itself: python benchmarks/start.py --ranks N")
    launcher, library = find()
    known = {"mpi": first_line(library.text), "ranks": chosen.ranks, "hosts": 1, **host()}
    print_facts(known, HEADER)
    rows = measure(launcher, chosen.ranks, 1 if chosen.quick else REPETITIONS)
    print("\n".join(map(line, rows)))
    steps = first_step(launcher, chosen.ranks, 1 if chosen.quick else REPETITIONS)
    for row in steps:
        calls = "not counted: no strace" if row["calls"] is None else f"{row['calls']:.0f} calls"
        told = f", modules {'in one file' if row['one file'] else 'in files of their own'}"
        print(f"first step, {row['what']:7} {row['ms']:8.1f} ms   {calls}{told}")
    write_json(chosen.json, {**known, "rows": rows, "first_step": steps})
    panels = [
        Panel(step, "ms", {r["what"]: r["ms"][step] for r in rows if step in r["ms"]})
        for step in STEPS
    ]
    bars(chosen.plot, known, "Start", panels, ("cold", "warm"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
