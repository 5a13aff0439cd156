"""Lines and branches of the package that the tests reach, over all rungs, threads and ranks.

    python tests/tools/coverage_all.py                    everything: about an hour on two cores
    python tests/tools/coverage_all.py fast               what needs no MPI
    python tests/tools/coverage_all.py mpi -k test_rung   one part, with options for pytest
    python tests/tools/coverage_all.py --report           what is there so far

Every process that a test starts is counted too: ranks of jobs, workers, programs, those that end by
``os._exit``. What a signal ends, or ``MPI_Abort``, is lost. Code that Numba compiles cannot be
traced; each loop has a twin in NumPy with the same bits, and that counts in its place: some parts
run with ``MPISTRAT_NUMBA=0``. The exit code is 1 if less than ``--at-least`` percent are reached.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DATA = ROOT / "build" / "coverage"
SETTINGS = f"""
[run]
branch = true
parallel = true
source_pkgs = mpistrat
data_file = {DATA / "data"}
patch = subprocess, _exit
disable_warnings = no-data-collected, module-not-measured, no-ctracer

[report]
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


class Part(NamedTuple):
    """One run of pytest.

    Attributes:
      options: What pytest is given.
      numba: Whether kernels are compiled.
      fast: It needs no MPI.
    """

    options: tuple[str, ...]
    numba: bool
    fast: bool


UNIT = (
    "-m",
    "not mpi and not nightly and not cluster and not job",
    "--dist=loadscope",
    "tests",
    "mpistrat",
)
PARTS = {
    "threads": Part(UNIT, numba=True, fast=True),
    "twins": Part((*UNIT[:3], "tests/unit", "tests/golden"), numba=False, fast=True),
    "jobs": Part(("-n0", "-m", "job and not mpi and not nightly", "tests"), True, False),
    "mpi": Part(("-n0", "-m", "mpi", "tests"), numba=True, fast=False),
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


def run(part: Part, options: list[str]) -> None:
    """Run the tests of a part; those that fail are shown, and what they reach counts."""
    env = {**os.environ, "MPISTRAT_NUMBA": str(int(part.numba))}
    tests = ("-q", "-p", "no:cacheprovider", "--timeout=3600", *part.options, *options)
    call = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings()}", "-m", "pytest"]
    subprocess.run([*call, *tests], cwd=ROOT, env=env, check=False)


def report(least: float) -> int:
    """Combine what all processes have left, and print what was not reached."""
    if any(DATA.glob("data.*")):
        coverage("combine", "--append", "--quiet")
    return coverage("report", "--sort=-miss", f"--fail-under={least:g}")


def main() -> int:
    """Run the parts that were asked for, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    choices = ("all", "fast", *PARTS)
    parser.add_argument("part", nargs="?", default="all", choices=choices)
    parser.add_argument("--report", action="store_true", help="only print what is there so far")
    parser.add_argument("--at-least", type=float, default=95.0, metavar="PERCENT")
    args, options = parser.parse_known_args()
    if not args.report:
        if args.part == "all":
            shutil.rmtree(DATA, ignore_errors=True)
        for name, part in PARTS.items():
            if args.part in ("all", name) or (args.part == "fast" and part.fast):
                print(f"=== {name}", flush=True)
                run(part, options)
    return report(args.at_least)


if __name__ == "__main__":
    sys.exit(main())
