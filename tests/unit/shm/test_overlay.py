"""A private look at a file shows it as it is, takes writes of its own, and forgets them."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from mpistrat.shm import private_mapping as module
from mpistrat.shm.private_mapping import PrivateMapping

PAGE = mmap.PAGESIZE
SIZE = 4 * PAGE


@pytest.fixture
def pair():
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, SIZE)
        yield np.frombuffer(mmap.mmap(fd, SIZE), np.uint8), PrivateMapping(fd, SIZE, {})
    finally:
        os.close(fd)


def test_it_shows_what_is_written_later(pair):
    shared, overlay = pair
    seen = np.frombuffer(overlay.view_bytes(PAGE, 2 * PAGE), np.uint8)
    assert not seen.any()
    shared[PAGE : PAGE + 5] = 7
    assert seen.tolist() == [7] * 5 + [0] * (PAGE - 5)


def test_what_it_writes_is_its_own_until_it_is_forgotten(pair):
    shared, overlay = pair
    seen = np.frombuffer(overlay.view_bytes(0, SIZE), np.uint8)
    shared[:] = 1
    overlay.map_private(PAGE, 3 * PAGE)[PAGE - 2 : PAGE + 2] = 9
    assert shared.max() == 1
    assert np.flatnonzero(seen == 9).tolist() == [*range(2 * PAGE - 2, 2 * PAGE + 2)]
    shared[:] = 2
    # Pages that it has not written to continue showing what others write.
    assert [int(seen[at]) for at in (0, 2 * PAGE - 3, 2 * PAGE - 2, SIZE - 1)] == [2, 1, 9, 2]
    overlay.close(PAGE, 3 * PAGE)
    assert seen.min() == seen.max() == 2


@pytest.mark.parametrize("after", ["never opened", "closed again"])
def test_memory_refuses_a_writer(after):
    program = textwrap.dedent(f"""
        import ctypes, mmap, os, resource
        import numpy as np
        from mpistrat.shm.private_mapping import PrivateMapping
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        fd = os.memfd_create("test")
        os.ftruncate(fd, {SIZE})
        overlay = PrivateMapping(fd, {SIZE}, {{}})
        seen = np.frombuffer(overlay.view_bytes(0, {SIZE}), np.uint8)
        if {after == "closed again"}:
            overlay.map_private(0, {SIZE})[3] = 4
            overlay.close(0, {SIZE})
        print("so far", flush=True)
        ctypes.memset(seen.ctypes.data, 1, 1)
        print("written")
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "so far\n"
    assert done.returncode == -signal.SIGSEGV


def test_numpy_will_not_make_it_writable(pair):
    seen = np.frombuffer(pair[1].view_bytes(0, SIZE), np.uint8)
    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        seen.flags.writeable = True


def test_a_system_where_changes_do_not_show_is_found_out(pair):
    shared, overlay = pair
    assert overlay.is_coherent(memoryview(shared), 5)
    assert not shared.any()
    elsewhere = memoryview(bytearray(SIZE))
    assert not overlay.is_coherent(elsewhere, 5)
    assert not any(elsewhere)


def test_a_system_without_private_mappings_says_so(pair, monkeypatch):
    monkeypatch.setattr(module, "_NAMES", ("MAP_OF_ANOTHER_KIND",))
    with pytest.raises(OSError, match="no private mappings"):
        PrivateMapping(0, SIZE, {})


def test_a_refusal_of_the_system_is_an_error(pair, monkeypatch):
    monkeypatch.setattr(pair[1], "_address", PAGE)  # where nothing is mapped
    with pytest.raises(OSError, match="Cannot allocate memory"):
        pair[1].map_private(PAGE, 2 * PAGE)
