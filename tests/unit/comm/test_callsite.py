"""Places in messages are those of the program, whoever does the work."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from mpistrat.comm import callsite
from mpistrat.comm.callsite import ours, pass_over, standing_for, where


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
