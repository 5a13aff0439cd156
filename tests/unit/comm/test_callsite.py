"""Places in messages are those of the program, whoever does the work."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpistrat.comm import callsite
from mpistrat.comm.callsite import ours, pass_over, place_of, standing_for, where


def test_a_thread_speaks_for_the_place_that_called():
    def look():
        with standing_for("train.py:7"):
            found.append(where())
        found.append(where())

    found = []
    thread = threading.Thread(target=look)
    with standing_for("other.py:1"):  # of this thread only
        thread.start()
        thread.join()
    assert found[0] == "train.py:7"
    assert found[1].startswith("test_callsite.py:")


def test_files_of_a_library_that_calls_are_passed_over(monkeypatch):
    monkeypatch.setattr(callsite, "_passed", [])
    assert not ours("/lib/torch/nn.py")
    pass_over("/lib/torch")
    assert ours("/lib/torch/nn.py")
    assert not ours("train.py")


def test_a_rank_that_imports_is_where_the_program_imports(monkeypatch):
    found = []
    finder = type(
        "Finder", (), {"find_spec": lambda *args: found.append(place_of(sys._getframe(1)))}
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
    while not (found := place_of(frames()[waiting.ident])).startswith("test_callsite.py:"):
        assert found.startswith("threading.py:")  # it has not come that far
    done.set()
    waiting.join()
    assert not ours(threading.__file__)  # Ctrl-C there is raised at once, not kept for a call


def test_in_a_thread_of_a_library_its_own_place_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(callsite, "_passed", [])
    pass_over(str(tmp_path))
    names = {"where": where}
    exec(compile("def save():\n    return where()\n", str(tmp_path / "saver.py"), "exec"), names)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(names["save"]).result() == "saver.py:2"
    found = []
    thread = threading.Thread(target=lambda: found.append(names["save"]()))
    thread.start()
    thread.join()
    assert found[0].startswith("test_callsite.py:")  # of the program
