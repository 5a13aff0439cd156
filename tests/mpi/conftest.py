"""The third rung: these tests run under mpiexec only, one pytest per rank.

`tests/test_mpiexec.py` starts them. By hand: ``mpiexec -n 2 python -m pytest tests/mpi --with-mpi``
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from rank_report import Limits, RankReporter


def pytest_addoption(parser):
    group = parser.getgroup("ranks")
    group.addoption("--rank-report", metavar="DIR", help="directory for the files of the ranks")
    group.addoption("--rank-timeout", type=float, default=180.0, help="seconds for one test")
    group.addoption("--rank-patience", type=float, default=10.0, help="seconds after a failure")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if not config.getoption("--with-mpi"):
        return
    from mpi4py import MPI

    # A communicator of its own: a test may leave messages or half a collective on the world's.
    private = MPI.COMM_WORLD.Dup()
    given = config.getoption("--rank-report")
    temporary = None
    if private.rank == 0:
        directory = Path(given or tempfile.mkdtemp(prefix="ranks-"))
        temporary = None if given else directory
        shutil.rmtree(directory, ignore_errors=True)  # files of the run before
        directory.mkdir(parents=True)
    directory = Path(private.bcast(str(directory) if private.rank == 0 else None))
    # pytest numbers its directories by what is there, and ranks that look at once see the same.
    config.option.basetemp = str(directory / f"tmp-{private.rank}")
    reporter = RankReporter(
        private.rank,
        private.size,
        directory,
        private.Ibarrier,
        Limits(
            config.getoption("--rank-timeout"),
            config.getoption("--rank-patience"),
            os.dup(2),  # at this moment pytest does not capture
        ),
    )
    config.pluginmanager.register(reporter, "rank-report")
    config.add_cleanup(lambda: _remove(temporary, private.Ibarrier()))


def _remove(temporary, request):
    """Remove the directory that no option named, once all ranks are done with it."""
    end = time.monotonic() + 5
    while not request.Test() and time.monotonic() < end:
        time.sleep(0.001)
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture
def world():
    """The communicator of all ranks, as the user's program sees it."""
    from mpi4py import MPI

    return MPI.COMM_WORLD
