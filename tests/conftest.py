"""What all tests share: which rung a process runs, and which files belong to it."""

from __future__ import annotations

import gc
from pathlib import Path

MPI_RUNG = Path(__file__).parent / "mpi"
# Programs that tests start as jobs; they are no modules to look for examples in.
PROGRAMS = Path(__file__).parent / "faults" / "programs"


def pytest_ignore_collect(collection_path, config):
    """Leave the third rung to `test_mpiexec.py`, unless this pytest is one of its ranks."""
    if collection_path == MPI_RUNG and not config.getoption("--with-mpi"):
        return True
    if collection_path == PROGRAMS:
        return True
    return None


def pytest_collection_finish(session):
    """Let no garbage collection look at the tests themselves.

    There are thousands, so one that a test asks for would take most of a second.
    """
    gc.collect()
    gc.freeze()
