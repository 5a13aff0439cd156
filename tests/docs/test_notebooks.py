"""docs/notebooks.md on two engines of ipyparallel: its cells, and what errors leave behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from crowded import command
from page_programs import read_page

import mpistrat

# Runs cells of the page in IPython, then what its table says. `shell` is the notebook.
PROGRAM = """
import sys, time
from IPython.core.interactiveshell import InteractiveShell

def read_rank():
    from mpi4py import MPI
    return MPI.COMM_WORLD.rank

shell = InteractiveShell.instance()
start, *cells, meet, _, restart = CELLS
for cell in [start, *cells]:
    shell.run_cell(cell).raise_error()
rc = shell.user_ns["rc"]
engines = {rc[i].apply_sync(read_rank): i for i in (0, 1)}

def submit(code, targets=(0, 1)):
    return rc[list(targets)].execute(code, silent=False, block=False)

def finish(result):
    assert result.wait(120), "a cell has not ended"
    time.sleep(1)  # IPython drops cells that come while one ends with an error
    return [metadata["error"] and metadata["error"].ename for metadata in
            sorted(result.metadata, key=lambda metadata: metadata["engine_id"] != engines[0])]

def check_all():
    assert finish(submit("assert strategy.all_reduce('sum', 1) == 2")) == [None, None]

check_all()
zero = "ZeroDivisionError"
assert finish(submit("1 / 0")) == [zero] * 2
assert finish(submit("strategy.run(lambda: 1 // strategy.rank)")) == [zero, "RemoteError"]
check_all()
differing = submit("strategy.all_reduce('sum', np.ones(1 + strategy.rank))")
assert finish(differing) == ["LockstepError"] * 2
check_all()
assert finish(submit("import sys; sys.exit(3)")) == ["SystemExit"] * 2
check_all()

waiting = submit("if strategy.rank == 1: 1 / 0\\nstrategy.all_reduce('sum', 1)")
while rc.queue_status()[engines[1]]["queue"]:
    time.sleep(0.1)
time.sleep(2)  # engine 0 is in its call
rc.send_signal("SIGINT", block=True)
time.sleep(1)
assert not waiting.ready()  # an engine that waits in a call cannot be interrupted
shell.run_cell(meet.replace("--targets 1", f"--targets {engines[1]}"))
errors = finish(waiting)  # the interrupt may come once more while the cell ends
assert errors in (["LockstepError", zero], ["KeyboardInterrupt", zero]), errors
check_all()

# The next cell on the engine that failed makes the call that the other waits in, and is told.
waiting = submit("if strategy.rank == 1: 1 / 0\\nstrategy.all_reduce('sum', 7)")
while rc.queue_status()[engines[1]]["queue"]:
    time.sleep(0.1)
time.sleep(1)
following = submit("strategy.all_reduce('sum', 1)", [engines[1]])
assert following.wait(60) and following.metadata[0]["error"].ename == "LockstepError"
assert finish(waiting) == ["LockstepError", zero]
check_all()

# A call of one engine, which the other makes in a later cell.
first = submit("print(strategy.all_reduce('sum', 7))", [engines[0]])
second = submit("print(strategy.all_reduce('sum', 1))", [engines[1]])
assert first.wait(60) and second.wait(60)
assert first.metadata[0]["stdout"] == second.metadata[0]["stdout"] == "8\\n"
check_all()

shell.run_cell(restart).raise_error()
rc = shell.user_ns["rc"]
for cell in cells:
    shell.run_cell(cell).raise_error()
shell.user_ns["cluster"].stop_cluster_sync()
print("all is as the page says")
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_cells_of_the_page_and_what_errors_leave_behind(tmp_path):
    pytest.importorskip("ipyparallel", reason="pip install ipyparallel")
    cells = re.findall(
        r"^```\{code-block\} python\n(.*?)^```", read_page("notebooks"), re.DOTALL | re.MULTILINE
    )
    program = tmp_path / "notebook.py"
    program.write_text(f"CELLS = {cells!r}\n{PROGRAM}")
    call = command(2, [sys.executable])
    path = os.pathsep.join([str(Path(call.argv[0]).parent), os.environ["PATH"]])
    package = str(Path(mpistrat.__file__).parents[1])
    env = {**os.environ, **call.env, "PATH": path, "PYTHONPATH": package}
    env |= {"IPYTHONDIR": str(tmp_path / "ipython")}
    env = {name: value for name, value in env.items() if value is not None}
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "all is as the page says" in done.stdout
