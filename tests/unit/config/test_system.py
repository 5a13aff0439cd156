"""Systems that are supported, those that are warned of, and those that are refused."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from mpistrat.config import check_system, describe_unsupported


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_linux_is_supported(machine):
    assert describe_unsupported("linux", machine) is None


@pytest.mark.parametrize(
    ("system", "machine", "says"),
    [
        ("darwin", "arm64", "tested on Linux only, and this is darwin"),
        ("freebsd14", "amd64", "tested on Linux only"),
        ("linux", "ppc64le", "not tested on ppc64le"),
        ("win32", "AMD64", "does not run on Windows. Use Linux"),
    ],
)
def test_what_others_are_told(system, machine, says):
    assert says in describe_unsupported(system, machine)


def test_windows_is_refused_and_others_are_warned():
    with pytest.raises(ImportError, match="Windows"):
        check_system("win32")
    with pytest.warns(RuntimeWarning, match="darwin"):
        check_system("darwin")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_system("linux")


# What Linux has and other systems do not is hidden: calls, advices, and files of the kernel.
ELSEWHERE = """
import builtins, io, mmap, os, sys

sys.platform = "darwin"
for name in ("memfd_create", "sched_getaffinity", "pidfd_open", "posix_fallocate"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_DONTDUMP"):
    delattr(mmap, name)


def without_the_kernel(call, missing):
    def called(path, *args, **kwargs):
        if str(path).startswith(("/proc", "/sys", "/dev/shm")):
            return missing(path)
        return call(path, *args, **kwargs)

    return staticmethod(called)  # Python 3.10 has io.open as an attribute of a class


def absent(path):
    raise FileNotFoundError(2, "No such file or directory", str(path))


io.open = builtins.open = without_the_kernel(io.open, absent)
os.open = without_the_kernel(os.open, absent)
os.access = without_the_kernel(os.access, lambda path: False)

import numpy as np
import mpistrat as ms
from mpistrat.testing import run_ranks


def program(comm):
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        v = ms.Variable(np.zeros(50_000))
    ones = np.ones(100_000)
    total = strategy.run(lambda: ms.get_replica_context().all_reduce("sum", ones))
    v.assign(total.local[:50_000])
    return float(v.numpy().sum())


assert run_ranks(program, 2) == [100_000.0, 100_000.0]
"""


def test_ranks_work_where_linux_is_missing():
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning: mpistrat is tested on Linux only") == 1
