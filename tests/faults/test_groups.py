"""Sweeps: groups of ranks with strategies of their own, in one job. A trial fails alone."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import pytest
from crowded import command

from mpistrat.config import launched_by
from mpistrat.launch.process import run_job
from mpistrat.launch.run import build_rank_command

JOB = Path(__file__).parent / "programs" / "groups_job.py"
SWEEP = Path(__file__).parents[2] / "hpc_jobs" / "sweep.py"
LONGEST = 240
LANES = 3  # jobs at once
# Limits that hold from when all ranks have started: on a busy machine that alone takes longer.
START = """
import os, sys
from mpi4py import MPI
import mpistrat.checkpoint.notice
from mpistrat.launch.rank import main

MPI.COMM_WORLD.Barrier()
limits = {"MPISTRAT_WARN": "0.5", "MPISTRAT_TIMEOUT": "2", "MPISTRAT_GRACE": "2"}
os.environ |= limits | eval(os.environ.pop("LIMITS", "{}"))
main(sys.argv[1:])
"""
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.job,
    pytest.mark.timeout(LONGEST + 30),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]


PLAIN = """
import os, sys, time
from mpi4py import MPI

world = MPI.COMM_WORLD
world.Barrier()
os.environ |= {"MPISTRAT_WARN": "0.5", "MPISTRAT_TIMEOUT": "2"}
import mpistrat as ms

what = sys.argv[1]
strategy = ms.MirroredStrategy(comm=world.Split(world.rank % 2, world.rank))
strategy.all_reduce("sum", 1.0)
if what == "fails" and world.rank % 2 == 0:
    raise ValueError("trial 0 diverges")
if what == "fails":
    world.recv(source=0)
if world.rank % 2:
    time.sleep(5)
    strategy.all_reduce("sum", 1.0)
    print(f"rank {world.rank} has continued\\n", end="", flush=True)
"""


class Case(NamedTuple):
    """A job: how many ranks, their program, variables for them, and whether its ranks compute."""

    ranks: int
    program: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    computes: bool = False


def trials(what, ranks_per_node=0, **limits):
    """Two trials of two ranks each."""
    nodes = ("MPISTRAT_RANKS_PER_NODE", str(ranks_per_node))
    program = (sys.executable, "-c", START, str(JOB), what)
    computes = what in ("python", "compiled")
    return Case(4, program, (nodes, ("LIMITS", repr(limits))), computes)


def run_case(case, directory):
    """Return the code of a job, and what it has said."""
    call = command(case.ranks, list(case.program))
    with (directory / "said").open("wb+") as output:
        env = {**call.env, **dict(case.variables)}
        outcome = run_job(call._replace(env=env), LONGEST, output)
        output.seek(0)
        said = output.read().decode(errors="replace")
    assert not outcome.has_timed_out, said
    return outcome.code, said


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """The jobs of all selected tests of this module whose ranks sleep for most of the time.

    They begin in the order of the tests, and a few run at once.
    """
    selected = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in selected if hasattr(item, "callspec")]
    cases = dict.fromkeys(param["ended"] for param in params if "ended" in param)
    asleep = [case for case in cases if not case.computes]
    pool = ThreadPoolExecutor(LANES)
    try:
        yield {case: pool.submit(run_case, case, tmp_path_factory.mktemp("job")) for case in asleep}
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def ended(request, outcomes, tmp_path):
    """The code of the test's job, and what it has said."""
    if request.param in outcomes:
        return outcomes[request.param].result()
    wait(outcomes.values())
    return run_case(request.param, tmp_path)


def job(*cases, ids=None):
    """Say which job a test is about, or which ones, each in turn."""
    ids = ids or [case.program[-1] for case in cases]
    return pytest.mark.parametrize("ended", cases, ids=ids, indirect=True)


@job(trials("end", ranks_per_node=2))
def test_one_that_ends_well_waits_asleep_and_the_other_goes_on(ended):
    code, said = ended
    assert code == 0, said
    assert "nothing moved" not in said
    assert len(re.findall(r"rank [13] has continued", said)) == 2
    spent = [float(x) for x in re.findall(r"rank [02] used ([0-9.]+) s of a second", said)]
    assert len(spent) == 2
    assert max(spent) < 0.3, said


@job(trials("raise"))
def test_one_that_raises_says_so_and_the_other_goes_on(ended):
    code, said = ended
    assert code == 1, said
    assert said.count("ValueError: trial 0 diverges") == 1
    assert "on 2 ranks of 2 (ranks 0, 2 of the job)" in said
    assert "the other ranks of the job continue" in said
    assert len(re.findall(r"rank [13] has continued", said)) == 2


@job(trials("partner"))
def test_who_heard_of_it_does_not_print_it_again(ended):
    code, said = ended
    assert code == 1, said
    assert said.count("ValueError: trial 0 diverges") == 1
    assert "Traceback" in said
    assert "RemoteError" not in said
    assert len(re.findall(r"rank [13] has continued", said)) == 2


@job(trials("alone"))
def test_a_trial_may_be_one_rank(ended):
    code, said = ended
    assert code == 1, said
    told = "rank 0 of 1 (rank 0 of the job) left with exit code 1: a bad trial"
    assert said.count("a bad trial") == 1
    assert said.index(told) < said.index("has continued")
    assert len(re.findall(r"rank [123] has continued", said)) == 3


@job(trials("codes"))
def test_the_job_has_the_largest_code_of_any_group(ended):
    code, said = ended
    assert code == 3, said
    assert "(ranks 0, 2 of the job) left with exit code 3" in said
    assert "(ranks 1, 3 of the job) left with exit code 2" in said


@job(trials("idle"))
def test_grace_counts_while_nobody_outside_makes_a_call(ended):
    # The limits are equal: a rank that gives up stops its watchdog, which would end it with 75.
    code, said = ended
    assert code == 1, said
    assert "have not come to a call of mpistrat for 2 s (MPISTRAT_GRACE)" in said


# Changes of the stack have no end; without, there is one.
@job(
    *(
        trials(what, ranks_per_node, MPISTRAT_GRACE="1.5", MPISTRAT_TIMEOUT=timeout)
        for what, timeout in (("python", "3"), ("compiled", "60"))
        for ranks_per_node in (0, 2)
    ),
    ids=["python-node", "python-nodes", "compiled-node", "compiled-nodes"],
)
def test_who_computes_in_another_group_is_left_alone(ended):
    code, said = ended
    assert code == 1, said
    assert "ending the job" not in said
    assert len(re.findall(r"rank [13] has continued", said)) == 2


@job(
    *(trials("polls", number, MPISTRAT_GRACE="1", MPISTRAT_TIMEOUT="4") for number in (0, 2)),
    ids=["node", "nodes"],
)
def test_who_may_only_poll_has_the_time_of_a_hang(ended):
    code, said = ended
    # Ranks that have failed wait as long as the watchdog does, and one of them is the first.
    assert code in (1, 75), said
    ends = r"for 4 s \(MPISTRAT_TIMEOUT\); ending the job|exit code 75: nothing moved for 4 s"
    assert re.search(ends, said), said


@job(trials("hang"))
def test_a_hang_in_one_ends_the_job_with_its_code(ended):
    code, said = ended
    assert code == 75, said
    assert "nothing moved for 2 s" in said


@job(trials("declared", ranks_per_node=2))
def test_what_one_has_declared_counts_after_the_other_has_ended(ended):
    code, said = ended
    assert code == 0, said
    assert "nothing moved" not in said
    assert len(re.findall(r"rank [13] has continued", said)) == 2


@job(trials("cross"))
def test_who_waits_in_a_call_of_another_communicator_does_not_compute(ended):
    code, said = ended
    assert code == 75, said
    assert "(waiting in a call on another communicator)" in said
    assert "(computing)" not in said


@job(*(trials("join", number) for number in (0, 2)), ids=["node", "nodes"])
def test_who_calls_those_that_have_left_is_told(ended):
    code, said = ended
    assert code == 1, said
    assert len(re.findall(r"rank [13] was told: replica 0 raised ValueError", said)) == 2
    assert "MPISTRAT_GRACE" not in said


def test_the_sweep_of_the_batch_jobs(tmp_path):
    """One trial of four fails, and its group runs the next; a second start trains nothing."""
    pytest.importorskip("sklearn", reason="the sweep needs scikit-learn: not run")
    words = [str(SWEEP), "--epochs", "1", "--checkpoint", str(tmp_path / "runs")]
    program = build_rank_command([*words, "100", "0.1", "0.2", "0.4"], is_module=False)
    said = []
    for _ in range(2):
        with (tmp_path / "said").open("wb+") as output:
            outcome = run_job(command(4, program), LONGEST, output)
            output.seek(0)
            text = output.read().decode(errors="replace")
        assert outcome.code == 1, text
        said.append(sorted(re.findall("^trial .*", text, re.MULTILINE)))
    failed = "trial 0: rate 100, ranks 2: failed: ValueError: a learning rate of 100.0 diverges"
    assert said[0][0] == failed
    assert sum(", ranks 2: test accuracy 0." in line for line in said[0]) == 3
    assert said[0] == said[1]


@job(*(Case(2, (sys.executable, "-c", PLAIN, what)) for what in ("fails", "ends")))
def test_without_the_runner_nothing_ends_without_a_word(ended, request):
    """A trial that ended well does not end others; one that failed says when it will."""
    code = 1 if request.node.callspec.id == "fails" else 0
    ended_with, said = ended
    assert ended_with == code, said
    assert ("rank 1 has continued" in said) != bool(code)
    told = (
        r"(?m)^mpistrat: rank 0 of the job failed, .* 2 s later \(MPISTRAT_TIMEOUT\), the job ends"
    )
    assert len(re.findall(told, said)) == code, said
    assert ("_wait_for_ranks_of_other_groups" in said) == bool(code)
