"""Lines and branches of the package that the tests reach, over all rungs, threads and ranks.

    nice python tests/tools/coverage_all.py         every piece that has not been run, and a report
    python tests/tools/coverage_all.py --list       the pieces, and which have been run
    python tests/tools/coverage_all.py feed jobs    these pieces, again if need be
    python tests/tools/coverage_all.py --report     what is there so far
    python tests/tools/coverage_all.py --anew       forget what is there, and begin again

Other options are pytest's. A piece is a package of ``tests/unit``, or one of those below; each
leaves its part in ``build/coverage``, so a run that was stopped continues with the piece that it
was in. Tests that fail are run once more, as others may have had the machine; if one fails again,
the piece is left for the next run, and the exit code is 1. Tests have an hour each, so that all may
run under ``nice -n 19``.

Every process that a test starts is counted too: ranks of jobs, workers, programs, those that end by
``os._exit``. Counts of processes that a signal or ``MPI_Abort`` ends are lost. Code that Numba
compiles cannot be traced; each loop has a NumPy reference with the same bits, which counts in its
place: pieces that end in ``-twins`` run with ``MPISTRAT_NUMBA=0``. The packages for PyTorch and JAX
count where these are installed. The exit code is 1 if less than ``--at-least`` percent are reached.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DATA = ROOT / "build" / "coverage"
# Optional, so their packages count where they are installed.
MISSING = [name for name in ("torch", "jax") if not find_spec(name)]
OMITTED = [f"*/mpistrat/{x}" for name in MISSING for x in (f"{name}/*", f"examples/*_{name}.py")]
SETTINGS = f"""
[run]
branch = true
parallel = true
source_pkgs = mpistrat
data_file = {DATA / "data"}
patch = subprocess, _exit
disable_warnings = no-data-collected, module-not-measured, no-ctracer

[report]
include = {ROOT / "mpistrat"}/*
omit = {",".join(OMITTED)}
show_missing = true
skip_covered = true
exclude_also =
    # Compiled, or compiled into something; see above.
    @jit\\.(kernel|driver|helper|cast)
    # For type checkers only.
    if TYPE_CHECKING:
    @overload
    \\.\\.\\.$
"""
LONGEST = 3600  # seconds for one test: traced, and behind all else on the machine
TURNS = 2
UNTRACED = (
    # Its children fork while another thread is traced: they wait forever for the tracer's lock.
    "test_a_child_may_look_too",
    # A file in place of `struct` or `json`: the tracer, which imports it too, is the first.
    "test_a_file_that_shadows_a_module_is_named",
)
NO_JOB = "not mpi and not nightly and not cluster and not job"


class Piece(NamedTuple):
    """One run of pytest.

    Attributes:
      paths: What it runs of the tests.
      marks: Which of them.
      numba: Whether kernels are compiled.
      is_parallel: On all cores; what starts ranks never is.
    """

    paths: tuple[str, ...]
    marks: str = NO_JOB
    numba: bool = True
    is_parallel: bool = True


def pieces() -> dict[str, Piece]:
    """Return all there are, those that start ranks last."""
    unit = sorted(path.relative_to(ROOT) for path in (ROOT / "tests/unit").iterdir())
    rooms = [path for path in unit if (ROOT / path).is_dir() and path.name != "__pycache__"]
    files = tuple(str(path) for path in unit if path.name.startswith("test_"))
    return {
        **{path.name: Piece((str(path),)) for path in rooms},
        "unit": Piece(files),
        "other": Piece(("tests", "--ignore=tests/unit", "mpistrat")),
        **{
            f"{room}-twins": Piece((f"tests/unit/{room}",), numba=False)
            for room in ("kernels", "collectives", "optim")
        },
        "unit-twins": Piece((*files, "tests/golden"), numba=False),
        "jobs": Piece(
            ("tests",), "job and not mpi and not nightly and not cluster", is_parallel=False
        ),
        "mpi": Piece(("tests",), "mpi", is_parallel=False),
    }


def settings() -> Path:
    """Write the settings, and return where they are."""
    DATA.mkdir(parents=True, exist_ok=True)
    path = DATA / "settings"
    path.write_text(SETTINGS)
    return path


def coverage(*command: str) -> int:
    """Run ``coverage`` and return its exit code."""
    call = [sys.executable, "-m", "coverage", *command, f"--rcfile={settings()}"]
    return subprocess.run(call, cwd=ROOT, check=False).returncode


def combine() -> None:
    """Add the data files of ended processes to the total."""
    if any(DATA.glob("data.*")):
        coverage("combine", "--append", "--quiet")


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Give tests time, whatever they say: this file is a plugin of the runs that it starts."""
    import pytest

    from mpistrat.testing import run_ranks

    run_ranks.__kwdefaults__["timeout"] = LONGEST
    items[:] = [item for item in items if not item.name.startswith(UNTRACED)]
    for item in items:
        item.add_marker(pytest.mark.timeout(LONGEST), append=False)


def run(name: str, piece: Piece, options: list[str]) -> bool:
    """Run the tests of a piece; those that fail are shown, and what they reach counts.

    Returns:
      Whether all have passed, in the end.
    """
    done = DATA / f"done-{name}"
    done.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "MPISTRAT_NUMBA": str(int(piece.numba)), "PYTHONPATH": path}
    workers = f"-n{min(4, os.cpu_count() or 1)}" if piece.is_parallel else "-n0"
    cache = ["-o", f"cache_dir={DATA / f'cache-{name}'}"]
    tests = ["-q", *cache, "-p", "coverage_all", workers, "-m", piece.marks]
    call = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings()}", "-m", "pytest"]
    for turn in range(TURNS):
        rerun_options = ["--lf", "--lfnf=none"] if turn else []
        finished = subprocess.run(
            [*call, *tests, *rerun_options, *piece.paths, *options], cwd=ROOT, env=env
        )
        combine()
        if finished.returncode in (0, 5):  # 5: none is for this environment
            done.touch()
            return True
    return False


def main() -> int:
    """Run the pieces that were asked for, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the pieces")
    parser.add_argument("--report", action="store_true", help="only print what is there so far")
    parser.add_argument("--anew", action="store_true", help="forget what is there")
    parser.add_argument("--at-least", type=float, default=95.0, metavar="PERCENT")
    args, rest = parser.parse_known_args()
    pieces_by_name = pieces()
    options = [word for word in rest if word not in pieces_by_name]
    if args.anew:
        shutil.rmtree(DATA, ignore_errors=True)
    piece_names = [word for word in rest if word in pieces_by_name]
    piece_names = piece_names or [
        name for name in pieces_by_name if not (DATA / f"done-{name}").exists()
    ]
    failed = []
    for name in () if args.list or args.report else piece_names:
        print(f"=== {name}", flush=True)
        failed += [] if run(name, pieces_by_name[name], options) else [name]
    if args.list:
        for name in pieces_by_name:
            print(f"{'run' if (DATA / f'done-{name}').exists() else '   '} {name}")
        return 0
    combine()
    code = coverage("report", "--sort=-miss", f"--fail-under={args.at_least:g}")
    if failed:
        print(f"failed {TURNS} times, and is left for the next run: {', '.join(failed)}")
    return code or bool(failed)


if __name__ == "__main__":
    sys.exit(main())
