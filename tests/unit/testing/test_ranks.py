"""Ranks as threads: results in order, failures all named, nothing left to wait for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import RanksFailed, run_ranks


def test_results_come_in_rank_order():
    assert run_ranks(lambda comm, x: (comm.rank, comm.size, x), 4, "x") == [
        (r, 4, "x") for r in range(4)
    ]


def test_strategies_without_a_communicator_are_over_these_ranks():
    assert run_ranks(lambda comm: ms.MirroredStrategy().num_replicas_in_sync, 3) == [3] * 3


def test_ranks_do_not_see_each_others_scope():
    barrier = threading.Barrier(2)

    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            barrier.wait(240)
            return ms.get_strategy() is strategy

    assert run_ranks(rank, 2) == [True, True]


def test_failures_name_every_rank():
    def rank(comm):
        if comm.rank != 1:
            raise ValueError("odd" if comm.rank == 3 else "even")

    with pytest.raises(RanksFailed) as caught:
        run_ranks(rank, 4)
    assert set(caught.value.errors) == {0, 2, 3}
    assert "ranks 0, 2 raised ValueError: even" in str(caught.value)
    assert "rank 3 raised ValueError: odd" in str(caught.value)


def test_a_rank_that_does_not_end_is_named_with_its_place():
    gate, ended = threading.Event(), threading.Event()

    def stuck_here(comm):
        if comm.rank == 1:
            gate.wait(240)
            ended.set()

    with pytest.raises(RanksFailed, match=r"rank 1 has not ended(.|\n)*stuck_here"):
        run_ranks(stuck_here, 2, timeout=0.1)
    assert not ended.is_set()  # nobody has waited for it
    gate.set()


def test_a_thread_leaves_nothing_behind():
    before = set(threading.enumerate())
    run_ranks(lambda comm: ms.MirroredStrategy().run(lambda: 1), 3)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("size", ["2", 2.0, None, True])
def test_what_is_no_number_of_ranks_is_told(size):
    with pytest.raises(TypeError, match=r"\*args\): size must be an integer, got "):
        run_ranks(lambda comm: 1, size)


@pytest.mark.parametrize("size", [0, -1])
def test_there_is_at_least_one_rank(size):
    with pytest.raises(ValueError, match=f"of at least 1, got {size}"):
        run_ranks(lambda comm: 1, size)


def test_integers_of_numpy_are_numbers_of_ranks():
    assert run_ranks(lambda comm: comm.size, np.int64(2)) == [2, 2]


def test_the_rank_that_failed_first_is_named_first():
    def program(comm):
        strategy = ms.MirroredStrategy()
        if comm.rank == 2:
            raise KeyError("weights")
        strategy.all_reduce("sum", 1)

    for seed in [None, *range(4)]:
        with pytest.raises(RanksFailed) as caught:
            run_ranks(program, 4, seed=seed)
        text = str(caught.value)
        assert text.startswith("rank 2 raised KeyError: 'weights'\nrank ")
        assert "mpistrat/testing" not in text
        assert text.endswith(f"seed {seed}") is (seed is not None)


FAILS = """
import mpistrat as ms
from mpistrat.testing import run_ranks

def test_program():
    def program(comm):
        def step():
            if comm.rank == 1:
                raise KeyError("weights")
        ms.MirroredStrategy().run(step)
    run_ranks(program, 3)
"""


def test_pytest_shows_no_frame_of_run_ranks(tmp_path):
    (tmp_path / "test_program.py").write_text(FAILS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_program.py"]
    environment = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    assert "def run_ranks(" not in done.stdout
    assert "mpistrat/testing" not in done.stdout
    [summary] = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    assert "RanksFailed: rank 1 raised KeyError: 'weights'" in summary
