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
from mpistrat.bytecode import bundle_path
from mpistrat.config import child_environment, launched_by
from mpistrat.config import read_options as read_config
from mpistrat.launch.mpi_libraries import Launcher, find_launcher

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
    metrics = [mpistrat.metrics.Mean(name) for name in ("loss", "accuracy")]
def step(batch):
    for metric, values in zip(metrics, digits.train_step(model, optimizer, batch).values()):
        metric.update_state(values)
batch = next(iter(strategy.experimental_distribute_dataset(images)))
strategy.run(step, args=(batch,))
""",
}
REPORT = """
report = {"seconds": [time.perf_counter() - begin]}
pathlib.Path(sys.argv[1], f"{os.getpid()}.json").write_text(json.dumps(report))
"""


def job(
    launcher: Launcher,
    ranks: int,
    program: str,
    *,
    module: str = "",
    cache: Path | None = None,
    command_prefix: tuple[str, ...] = (),
) -> list[Any]:
    """Run a program on so many ranks, and return what each told."""
    with tempfile.TemporaryDirectory() as folder:
        command = launcher.build_command(
            ranks, [sys.executable, "-c", program, folder, *module.split()]
        )
        env = child_environment({**command.env, "NUMBA_CACHE_DIR": str(cache or folder)})
        finished = subprocess.run(
            [*command_prefix, *command.argv],
            env=env,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )
        reports = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if finished.returncode or len(reports) != ranks:
        raise SystemExit(
            f"a job failed with code {finished.returncode}:\n{finished.stdout}{finished.stderr}"
        )
    return reports


def path_of(job_kind: str, ranks: int, reports: list[Any], new_file_count: int) -> str:
    """Return how a job of mpistrat went, or fail: it is not what this file claims to measure.

    Args:
      job_kind: "cold" or "warm".
      ranks: How many there were.
      reports: What its ranks told.
      new_file_count: How many files of compiled code it left behind.
    """
    for report in reports:
        if report["imported"]:
            raise SystemExit(f"importing mpistrat has imported {report['imported']}")
        if report["numba"][0]:
            raise SystemExit("the first small all-reduce has imported Numba")
    needs_numba = (
        ranks > 1 and read_config().numba and importlib.util.find_spec("numba") is not None
    )
    if {report["numba"][1] for report in reports} != {needs_numba}:
        raise SystemExit(
            f"Numba imported by the ranks: {reports}; expected {needs_numba} on all of them"
        )
    if not needs_numba:
        return "no compiler"
    if bool(new_file_count) != (job_kind == "cold"):
        raise SystemExit(
            f"a {job_kind} job has left {new_file_count} files of compiled code behind"
        )
    return "Numba, compiled" if job_kind == "cold" else "Numba, from its cache"


def measure_jobs(launcher: Launcher, ranks: int) -> dict[str, tuple[list[float], str]]:
    """Return the slowest rank's times, and the paths, of a cold and a warm job of mpistrat."""
    times_and_paths = {}
    with tempfile.TemporaryDirectory() as folder:
        cache, old_file_count = Path(folder), 0
        for job_kind in ("cold", "warm"):
            reports = job(launcher, ranks, OURS, cache=cache)
            file_count = len(list(cache.rglob("*.nbc")))
            path = path_of(job_kind, ranks, reports, file_count - old_file_count)
            times_and_paths[job_kind] = slowest(reports), path
            old_file_count = file_count
    return times_and_paths


def first_step(launcher: Launcher, ranks: int, repetitions: int) -> list[dict[str, Any]]:
    """Return the time to the end of the first step, and what it asks of the file system."""
    times: dict[str, list[float]] = {program_name: [] for program_name in FIRST}
    for number in range(repetitions):
        for program_name in turns(FIRST, number):
            times[program_name] += slowest(job(launcher, ranks, FIRST[program_name] + REPORT))
    rows = []
    for program_name, program in FIRST.items():
        row = {
            "what": program_name,
            "ms": 1e3 * statistics.median(times[program_name]),
            "calls": None,
        }
        row["one file"] = Path(bundle_path(str(Path(mpistrat.__file__).parent))).exists()
        if shutil.which("strace"):
            with tempfile.NamedTemporaryFile("r") as file:
                strace = ("strace", "-f", "-qq", "-e", "trace=%file", "-o", file.name)
                job(launcher, ranks, program + REPORT, command_prefix=strace)
                row["calls"] = sum("resumed>" not in call for call in file) / ranks
        rows.append(row)
    return rows


def slowest(reports: list[Any]) -> list[float]:
    return [max(times) for times in zip(*(report["seconds"] for report in reports), strict=True)]


def measure(launcher: Launcher, ranks: int, repetitions: int) -> list[dict[str, Any]]:
    """Return one row for each thing to start."""
    modules = {name: module for name, module in PEERS.items() if importlib.util.find_spec(name)}
    times: dict[str, list[list[float]]] = {
        peer_name: [] for peer_name in ("cold", "warm", *modules)
    }
    paths = dict.fromkeys(times, "")
    for number in range(repetitions):
        for peer_name in turns({"mpistrat": "", **modules}, number):
            if peer_name in modules:
                times[peer_name].append(
                    slowest(job(launcher, ranks, PEER, module=modules[peer_name]))
                )
                continue
            for job_kind, (seconds, path) in measure_jobs(launcher, ranks).items():
                times[job_kind].append(seconds)
                paths[job_kind] = path
    return [
        {
            "what": peer_name,
            "path": paths[peer_name],
            "repetitions": repetitions,
            "ms": {
                step: 1e3 * statistics.median(column)
                for step, column in zip(STEPS, zip(*runs, strict=True), strict=False)
            },
        }
        for peer_name, runs in times.items()
    ]


def line(row: dict[str, Any]) -> str:
    return f"{row['what']:8} {row['path']:22}" + "".join(f"{ms:12.1f}" for ms in row["ms"].values())


def main() -> int:
    parser = arguments(__doc__, "one job of each kind")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="of each job; 2")
    options = parser.parse_args()
    if launched_by():
        raise SystemExit("this starts jobs itself: python benchmarks/start.py --ranks N")
    launcher, library = find_launcher()
    facts = {"mpi": first_line(library.version_text), "ranks": options.ranks, "hosts": 1, **host()}
    print_facts(facts, HEADER)
    rows = measure(launcher, options.ranks, 1 if options.quick else REPETITIONS)
    print("\n".join(map(line, rows)))
    steps = first_step(launcher, options.ranks, 1 if options.quick else REPETITIONS)
    for row in steps:
        calls = "not counted: no strace" if row["calls"] is None else f"{row['calls']:.0f} calls"
        modules_text = f", modules {'in one file' if row['one file'] else 'in files of their own'}"
        print(f"first step, {row['what']:7} {row['ms']:8.1f} ms   {calls}{modules_text}")
    write_json(options.json, {**facts, "rows": rows, "first_step": steps})
    panels = [
        Panel(step, "ms", {r["what"]: r["ms"][step] for r in rows if step in r["ms"]})
        for step in STEPS
    ]
    bars(options.plot, facts, "Start", panels, ("cold", "warm"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
