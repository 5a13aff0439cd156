"""Libraries that multiply matrices get a rank's share of the cores, whenever they are loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mpistrat import config
from mpistrat.config import THREAD_VARIABLES, has_thread_variable
from mpistrat.kernels.threads import limit_threads


class Library:
    """What threadpoolctl knows of a library, and a module with its words for threads."""

    def __init__(self, threads):
        self.num_threads = threads

    def set_num_threads(self, threads):
        self.num_threads = threads

    def get_num_threads(self):
        return self.num_threads


@pytest.fixture
def unset(monkeypatch):
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(config, "_own_variables", {})


@pytest.fixture
def loaded(unset, monkeypatch):
    """Libraries with 8, 2, 1 and an unknown number of threads, and PyTorch and numexpr with 8."""
    libraries = [Library(threads) for threads in (8, 2, 1, None)]
    controller = SimpleNamespace(lib_controllers=libraries)
    monkeypatch.setattr("threadpoolctl.ThreadpoolController", lambda: controller)
    modules = {name: Library(8) for name in ("torch", "numexpr")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return [*libraries, *modules.values()]


def test_what_has_more_threads_gets_fewer(loaded):
    assert limit_threads(2)
    assert [library.num_threads for library in loaded] == [2, 2, 1, None, 2, 2]
    assert not limit_threads(2)
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert limit_threads(1)
    assert os.environ["OMP_NUM_THREADS"] == "1"  # it was not the user who said 2


def test_a_module_that_is_being_imported_is_left_alone(loaded, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    monkeypatch.delitem(sys.modules, "numexpr")
    assert limit_threads(2)


@pytest.mark.parametrize("name", THREAD_VARIABLES)
def test_a_variable_of_the_user_stays(unset, name, monkeypatch):
    assert not has_thread_variable()
    config.set_thread_variable(2)
    assert not has_thread_variable()
    monkeypatch.setenv(name, "7")
    assert has_thread_variable()
    config.set_thread_variable(3)
    assert os.environ[name] == "7"
    assert os.environ["OMP_NUM_THREADS"] == ("7" if name == "OMP_NUM_THREADS" else "2")


LATER = """
import numpy as np
from threadpoolctl import threadpool_info
from mpistrat.kernels.threads import limit_threads

before = [library["filepath"] for library in threadpool_info()]
limit_threads(1)
import scipy.linalg
after = {library["filepath"]: library["num_threads"] for library in threadpool_info()}
assert set(after.values()) == {1}, after
print(len(before), len(after))
"""


def test_libraries_that_are_loaded_later(unset):
    ended = subprocess.run(
        [sys.executable, "-c", LATER], timeout=240, text=True, capture_output=True
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[0] >= "1"
