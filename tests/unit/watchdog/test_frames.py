"""Frames of all threads, and a garbage collection that would come in the middle."""

import gc
import subprocess
import sys
import threading

from mpistrat.watchdog.processes import get_current_frames

# Frees what wants a lock of the interpreter; the threshold is reached while frames are made.
COLLECTING = """
import gc, threading
from mpistrat.watchdog.processes import get_current_frames

class Held:
    pass

def deep(n):
    return deep(n - 1) if n else gate.wait(200)

gc.disable()
gate = threading.Event()
for _ in range(50):
    threading.Thread(target=deep, args=(100,), daemon=True).start()
for _ in range(20):
    for _ in range(50):
        held = Held()
        held.me, held.local = held, threading.local()
        held.local.x = 1
    gc.set_threshold(gc.get_count()[0] + 8, 1000, 1000)
    gc.enable()
    frames = get_current_frames()
    gc.disable()
    gc.collect()
print(len(frames), "threads")
"""

# The thread that is read goes on in the middle of `f_back`, where a collection runs a finalizer.
RETURNING = """
import gc, threading
from mpistrat.watchdog.status_board import NodeBoard, node_board_nbytes
from mpistrat.watchdog.status_board import Reporter

class Finalized:
    def __del__(self):
        gone_on.set()
        arrived.wait(2)

def descend(depth, *functions):
    # What is written to the stack meanwhile, where callers of `wait` had their frames.
    if depth:
        return descend(depth - 1, *functions)
    arrived.set()
    over.wait(100)

def stay(depth):
    if depth:
        stay(depth - 1)
    else:
        begun.set()
        gone_on.wait(100)

# Of Numba, by its name: what is found at the end of the stack.
of_numba = globals() | {"__name__": "numba"}
program = eval("lambda: (stay(10), descend(20, *[descend] * 20))", of_numba)

for allocations in range(40):  # in one of these `f_back` begins the collection
    begun, gone_on, arrived, over = [threading.Event() for _ in range(4)]
    worker = threading.Thread(target=program, daemon=True)
    worker.start()
    begun.wait()
    gc.collect()
    node_board = NodeBoard(memoryview(bytearray(node_board_nbytes(1))), 1)
    reporter = Reporter(node_board.slot(0), 0, worker.ident)
    node_board.slot(0).enter(1, "")
    reporter.report(1, False)
    held = Finalized()
    held.me = held
    del held
    gc.set_threshold(gc.get_count()[0] + allocations, 1000, 1000)
    reporter.report(2 * 10**9, False)  # of a thread that stays all of the stack is read
    gc.set_threshold(100_000)
    assert node_board.read(0).compiling_until_ns, allocations
    gone_on.set()
    over.set()
    worker.join()
print("read")
"""

FORKING = """
import gc, os, signal, threading
from mpistrat.watchdog.processes import get_current_frames

def look():
    while not stop.is_set():
        get_current_frames()

stop = threading.Event()
usual = gc.get_threshold()
threading.Thread(target=look, daemon=True).start()
for _ in range(40):
    child = os.fork()
    if not child:
        signal.alarm(200)
        get_current_frames()
        os._exit(int(gc.get_threshold() != usual))
    assert os.waitpid(child, 0)[1] == 0
stop.set()
print("fine")
"""


def test_a_garbage_collection_does_not_stop_the_process():
    ended = subprocess.run(
        [sys.executable, "-c", COLLECTING], timeout=240, text=True, capture_output=True, check=True
    )
    assert ended.stdout == "51 threads\n"


def test_collections_go_on_as_they_went_on_before():
    before = gc.get_threshold()
    gc.set_threshold(500, 7, 8)
    try:
        assert threading.get_ident() in get_current_frames()
        assert gc.get_threshold() == (500, 7, 8)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)


def test_a_child_may_look_too():
    """Forked while another thread looks all the time."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING],
        timeout=240,
        text=True,
        capture_output=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "fine\n"), ended.stderr


def test_a_thread_that_returns_while_its_stack_is_read():
    ended = subprocess.run(
        [sys.executable, "-c", RETURNING], timeout=240, text=True, capture_output=True
    )
    assert (ended.returncode, ended.stdout) == (0, "read\n"), ended.stderr
