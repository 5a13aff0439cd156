"""The golden programs on real ranks, at the sizes that were recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.harness import expected_warning, on_rank, together
from golden.judge import judge
from golden.programs import PROGRAMS
from golden.record import SIZES, cases

pytestmark = pytest.mark.mpi(min_size=min(SIZES))


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(world, program):
    mine = [case for case in cases() if case.program == program and case.size == world.size]
    if not mine:
        pytest.skip(f"not recorded with {world.size} replicas")
    with expected_warning():
        found = together(world.allgather(on_rank(world, program)))
    problems = [f"{case}: {problem}" for case in mine if (problem := judge(case, found).problem)]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)
