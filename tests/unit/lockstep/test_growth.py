"""What a call costs a rank does not grow with the number of ranks; see `benchmarks/growth.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from mpistrat.testing import run_ranks

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
# Ranks of a node that cannot share memory are warned of, and data that are the same on all.
pytestmark = pytest.mark.filterwarnings("ignore")


def imported():
    spec = importlib.util.spec_from_file_location("growth", BENCHMARKS / "growth.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(BENCHMARKS))  # for what the benchmarks have in common
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


growth = imported()
FEW, *MANY = growth.HELD_SIZES
ALIKE = [name for name, case in growth.CASES.items() if case.speaker_count == 1]
DIFFERENT = [name for name in growth.CASES if name not in ALIKE]
# Values of all ranks that a program asks for are as many as the ranks.
READ = "numbers, different, read"


def counted(name, size):
    case = growth.CASES[name]
    frames = growth._run_case(case, size, growth.count_frames)
    return *growth._run_case(case, size, growth.count_traffic), *frames


@pytest.mark.parametrize("name", ALIKE)
def test_what_all_ranks_do_alike_costs_the_same_on_any_number_of_ranks(name):
    received, sent, messages, calls, bytecodes = counted(name, FEW)
    rows = [counted(name, size) for size in MANY]
    assert rows[0][:4] == rows[1][:4]
    assert abs(rows[0][4] - rows[1][4]) <= 9  # numbers of ranks have more digits
    for row in rows:
        assert row[0] <= received and row[1] <= sent + 99
        assert row[2] <= messages + 1
        assert row[3] <= 1.25 * calls and row[4] <= 1.25 * bytecodes


@pytest.mark.parametrize("name", ALIKE)
def test_memory_of_what_all_ranks_do_alike_does_not_grow(name):
    few, many = (growth.measure_peak(growth.CASES[name], size) for size in MANY)
    assert many - few < MANY[1] - MANY[0]  # a byte for each rank


@pytest.mark.parametrize("name", [name for name in DIFFERENT if name != READ])
def test_what_differs_takes_no_python_for_each_rank(name):
    messages = counted(name, FEW)[2]
    few, many = (counted(name, size) for size in MANY)
    assert few[2] == many[2]
    more_ranks = MANY[1] - MANY[0]
    # Fewer than one for each rank; how often speakers wake while they wait differs.
    assert max(many[3] - few[3], many[4] - few[4]) < more_ranks
    is_step = "mismatch" not in name
    assert not is_step or few[2] <= messages + 1
    # At most one row of 64 bytes from each; of a mismatch a bit for each text.
    assert many[0] - few[0] <= more_ranks * (64 if is_step else 3 / 8)


def test_values_of_all_ranks_are_read_when_asked_for():
    kept, read = (counted(name, MANY[0]) for name in ("numbers, different", READ))
    assert kept[:3] == read[:3]
    assert read[4] > MANY[0] > kept[3]


@pytest.mark.parametrize("speakers", [1, 2])
def test_the_simulated_ranks_give_what_ranks_would(speakers):
    """All collective calls have the results of as many real ranks."""

    def call(comm, rank):
        # As rank 0, unless it is one of the speakers.
        number = rank if rank < speakers else 0
        outs, send = [], np.array([number + 2, 3], np.int64)
        for op in ("SUM", "PROD", "MIN", "MAX"):
            outs.append(np.empty_like(send))
            comm.allreduce(send, outs[-1], op)
        outs.append(np.empty(2, np.uint64))
        comm.allreduce(send.view(np.uint64), outs[-1], "BOR")
        outs.append(np.empty((comm.size, 2), np.int64))
        comm.allgather(send, outs[-1])
        counts = [r + 1 if r < speakers else 1 for r in range(comm.size)]
        outs.append(np.empty(sum(counts), np.uint8))
        comm.allgatherv(np.full(number + 1, number, np.uint8), outs[-1], counts)
        for root in range(3):
            outs.append(send.copy())
            comm.bcast(outs[-1], root)
        comm.barrier()
        return [out.tolist() for out in outs]

    real = run_ranks(lambda comm: call(comm, comm.rank), 5)[0]
    assert growth.run_speakers(lambda comm: call(comm, comm.rank), 5, speakers) == real
