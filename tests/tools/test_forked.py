"""Children that wait for a lock of a thread of their parent end the test, and not the suite."""

from __future__ import annotations

import gc
import os
import threading

import pytest
from forked import code, fork


@pytest.mark.parametrize("exit_code", [0, 3])
def test_how_it_ended(exit_code):
    assert code(fork(lambda: exit_code and os._exit(exit_code))) == exit_code


def test_what_hangs_in_the_collector_is_not_called_there():
    lock = threading.Lock()

    def wait(phase, collection):
        with lock:
            pass

    thresholds = gc.get_threshold()
    with lock:  # forever, as the child sees it
        gc.set_threshold(0)
        gc.callbacks.append(wait)
        child = fork(lambda: [gc.set_threshold(1), [[n] for n in range(99)]])
        gc.callbacks.remove(wait)
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    assert code(child) == 0


def test_one_that_waits_for_ever_is_killed_and_told():
    lock = threading.Lock()
    with lock:
        child = fork(lock.acquire)
    with pytest.raises(TimeoutError, match=f"the forked child {child} had not ended after 0 s"):
        code(child, 0.05)
    with pytest.raises(ChildProcessError):
        os.waitpid(child, 0)
