"""Places in messages are those of the program, whoever does the work."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpistrat.comm import callsite
from mpistrat.comm.callsite import (
    add_library_directory,
    call_site_of,
    find_call_site,
    is_library_file,
    naming_call_site,
)


def test_a_thread_speaks_for_the_place_that_called():
    def look():
        with naming_call_site("train.py:7"):
            found.append(find_call_site())
        found.append(find_call_site())

    found = []
    thread = threading.Thread(target=look)
    with naming_call_site("other.py:1"):  # of this thread only
        thread.start()
        thread.join()
    assert found[0] == "train.py:7"
    assert found[1].startswith("test_callsite.py:")


def test_files_of_a_library_that_calls_are_passed_over(monkeypatch):
    monkeypatch.setattr(callsite, "_library_directories", [])
    assert not is_library_file("/lib/torch/nn.py")
    add_library_directory("/lib/torch")
    assert is_library_file("/lib/torch/nn.py")
    assert not is_library_file("train.py")


def test_a_rank_that_imports_is_where_the_program_imports(monkeypatch):
    found = []
    finder = type(
        "Finder", (), {"find_spec": lambda *args: found.append(call_site_of(sys._getframe(1)))}
    )
    monkeypatch.setattr(sys, "meta_path", [finder()])
    with pytest.raises(ModuleNotFoundError):
        import not_there  # noqa: F401
    assert found[0].startswith("test_callsite.py:")


def test_a_rank_that_waits_for_a_thread_is_where_the_program_waits():
    """Not in the file of Python in which every wait is."""
    frames, done = sys._current_frames, threading.Event()
    waiting = threading.Thread(target=lambda: done.wait(5))
    waiting.start()
    while not (found := call_site_of(frames()[waiting.ident])).startswith("test_callsite.py:"):
        assert found.startswith("threading.py:")  # it has not come that far
    done.set()
    waiting.join()
    assert not is_library_file(
        threading.__file__
    )  # Ctrl-C there is raised at once, not kept for a call


def test_in_a_thread_of_a_library_its_own_place_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(callsite, "_library_directories", [])
    add_library_directory(str(tmp_path))
    names = {"where": find_call_site}
    exec(compile("def save():\n    return where()\n", str(tmp_path / "saver.py"), "exec"), names)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(names["save"]).result() == "saver.py:2"
    found = []
    thread = threading.Thread(target=lambda: found.append(names["save"]()))
    thread.start()
    thread.join()
    assert found[0].startswith("test_callsite.py:")  # of the program
