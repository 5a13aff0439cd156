"""Children of multiprocessing are no ranks, and say so, also while they import the main module."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from mpistrat.comm import session
from mpistrat.launch.plan import LaunchOptions
from mpistrat.launch.run import run

TOLD = "was started by multiprocessing and is not a rank"
HEAD = """
import concurrent.futures, multiprocessing, sys
import mpistrat as ms

def double(x):
    return 2 * x

def inside(x):
    try:
        return ms.MirroredStrategy().num_replicas_in_sync
    except ms.StrategyError as error:
        return str(error)

spawn = multiprocessing.get_context("spawn")
"""
POOL = """
if __name__ == "__main__":
    with spawn.Pool(1) as pool:
        print(pool.map({}, [1, 2]))
"""
EXECUTOR = """
if __name__ == "__main__":
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        print(list(pool.map(double, [1, 2])))
"""
TOP = "strategy = ms.MirroredStrategy()\n"
GUARDED = 'if __name__ == "__main__":\n    strategy = ms.MirroredStrategy()\n'


def alone(program):
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


POOLS = pytest.mark.parametrize(
    "pool",
    [
        pytest.param(POOL.format("double"), id="Pool"),
        pytest.param(EXECUTOR, id="Executor", marks=pytest.mark.nightly),
    ],
)


@POOLS
def test_a_strategy_at_top_level_ends_the_program_with_a_text(pool, tmp_path, capfd):
    program = tmp_path / "top.py"
    program.write_text(HEAD + TOP + pool)
    code, _, err = alone(program)
    assert code
    assert TOLD in err
    assert '`if __name__ == "__main__":`' in err
    assert run(LaunchOptions(2), [str(program)], timeout=240) not in (0, 124)
    err = capfd.readouterr().err
    assert TOLD in err
    assert "PMI" not in err  # no child has tried to join


@pytest.mark.beside
def test_so_does_one_whose_pool_has_its_workers_from_a_fork_server(tmp_path):
    program = tmp_path / "top.py"
    program.write_text(HEAD.replace('"spawn"', '"forkserver"') + TOP + POOL.format("double"))
    code, _, err = alone(program)
    assert code
    # From Python 3.14 on the fork server itself imports the main module.
    names = "ForkServerPoolWorker-1", "the fork server"
    assert sum(err.count(f"mpistrat: this process ({name}) {TOLD}") for name in names) == 1


def test_a_pool_that_ctrl_c_does_not_wake_is_ended(monkeypatch):
    monkeypatch.setattr(session, "_POOL_END_SECONDS", 0.01)
    waiting = "import signal; signal.signal(2, lambda *_: None); print(flush=True)"
    waiting += "\nwhile True: signal.pause()"
    with subprocess.Popen([sys.executable, "-IS", "-c", waiting], stdout=subprocess.PIPE) as pool:
        assert pool.stdout.readline()
        session._interrupt_pool(pool.pid)
        assert pool.wait(60) == -signal.SIGTERM


@POOLS
def test_one_that_children_do_not_make_is_fine(pool, tmp_path, capfd):
    program = tmp_path / "guarded.py"
    program.write_text(HEAD + GUARDED + pool)
    assert alone(program)[:2] == (0, "[2, 4]\n")
    assert run(LaunchOptions(2), [str(program)], timeout=240) == 0
    assert capfd.readouterr().out.count("[2, 4]") == 2


@pytest.mark.beside
def test_a_worker_is_refused_and_the_pool_goes_on(tmp_path):
    program = tmp_path / "inside.py"
    program.write_text(HEAD + GUARDED + POOL.format("inside"))
    code, out, _ = alone(program)
    assert code == 0
    assert out.count(TOLD) == 2


@pytest.mark.parametrize(
    ("before", "text"),
    [
        ("from mpi4py import MPI\nMPI.Finalize()\n", "MPI has been finalized in this process"),
        ("import mpi4py\nmpi4py.rc.initialize = False\n", "MPI has not begun in this process"),
    ],
)
def test_a_strategy_wants_mpi_running(tmp_path, before, text):
    """Else MPI itself would end the process, and say where in its own code."""
    program = tmp_path / "program.py"
    program.write_text(f"{before}import mpistrat as ms\nms.MultiWorkerMirroredStrategy()\n")
    code, _, said = alone(program)
    assert code == 1
    assert f"StrategyError: {text}" in said
