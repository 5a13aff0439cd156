"""What all tests share: which rung a process runs, which files belong to it, and its own end."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
from pathlib import Path

import pytest

MPI_RUNG = Path(__file__).parent / "mpi"
# Programs that tests start as jobs; they are no modules to look for examples in.
PROGRAMS = Path(__file__).parent / "faults" / "programs"
# The terminal, whatever is captured meanwhile.
TERMINAL = pytest.StashKey[int]()


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


def pytest_configure(config):
    """Keep the terminal for the last words."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        config.stash[TERMINAL] = os.dup(2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """End a test whose time is up even where Python itself stands still.

    pytest-timeout needs the interpreter for it, which a C call or a deadlock may hold for ever.
    Ranks of the third rung are watched by their own plugin.
    """
    if item.config.getoption("--with-mpi"):
        return (yield)
    mark = item.get_closest_marker("timeout")
    limit = float(mark.args[0] if mark and mark.args else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit + 30, exit=True, file=item.config.stash[TERMINAL])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
