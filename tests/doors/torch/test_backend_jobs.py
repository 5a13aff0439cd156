"""Whole programs over the backend of torch.distributed: how they begin, and how they end."""

from __future__ import annotations

import importlib.util
import sys
import textwrap

import pytest

from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.process import run_job

LONGEST = 240

pytestmark = [
    pytest.mark.job,
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

more = pytest.mark.mpi  # one more of a class that has a job

HEAD = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
import mpistrat.torch as mt
"""
BEGIN = "mt.init_process_group()\nrank, size = dist.get_rank(), dist.get_world_size()\n"


def job(tmp_path, body, size=2, begin=BEGIN, **variables):
    """Run a program on some ranks; return its exit code and what it printed."""
    program = tmp_path / "program.py"
    knobs = f"import os; os.environ.update({variables})"
    program.write_text(knobs + HEAD + begin + textwrap.dedent(body))
    launcher, _ = find_launcher()
    printed = tmp_path / "printed"
    with printed.open("wb") as output:
        command = launcher.build_command(size, [sys.executable, str(program)])
        outcome = run_job(command, LONGEST, output)
    assert not outcome.has_timed_out, printed.read_text()
    return outcome.code, printed.read_text()


@pytest.mark.parametrize(
    "begin",
    [
        "dist.init_process_group('mpistrat')",
        pytest.param("dist.init_process_group('mpistrat', init_method='mpistrat://')", marks=more),
        pytest.param(
            "mt.init_process_group(); dist.destroy_process_group(); mt.init_process_group()",
            marks=more,
        ),
    ],
    ids=["bare", "method", "again"],
)
def test_ranks_meet_without_an_address(tmp_path, begin):
    body = """
        value = torch.ones(1)
        dist.all_reduce(value)
        print(f"sum {value.item()} {dist.get_backend()}")
        dist.destroy_process_group()
    """
    code, printed = job(tmp_path, body, begin=f"{begin}\n")
    assert (code, printed.count("sum 2.0 mpistrat")) == (0, 2), printed


@more
def test_a_group_of_gloo_over_the_ranks_of_mpi(tmp_path):
    body = """
        value = torch.ones(1)
        dist.all_reduce(value)
        local = dist.get_node_local_rank(), os.environ["WORLD_SIZE"], os.environ["RANK"]
        print(f"sum {value.item()} {dist.get_backend()} {local == (rank, '2', str(rank))}")
        dist.destroy_process_group()
    """
    code, printed = job(tmp_path, body, begin=BEGIN.replace("()", "(backend='gloo')", 1))
    assert (code, printed.count("sum 2.0 gloo True")) == (0, 2), printed


def test_the_import_touches_nothing_else(tmp_path):
    body = """
        import mpistrat.comm.mpi
        assert not mpistrat.comm.mpi.is_mpi_running()
        assert not dist.is_initialized()
        assert "MPISTRAT" in dist.Backend._plugins
        assert not {"RANK", "MASTER_ADDR"} & set(os.environ)
        for backend in ("gloo", None):
            try:
                dist.init_process_group(backend)
            except ValueError as error:
                assert "RANK expected" in str(error)
            else:
                raise AssertionError(backend)
        print("so")
    """
    code, printed = job(tmp_path, body, size=1, begin="")
    assert (code, printed.count("so")) == (0, 1), printed


@more
def test_other_launchers_are_told_what_to_do(tmp_path):
    begin = """
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
store = dist.HashStore()
dist.init_process_group("mpistrat", store=store, rank=0, world_size=2)
"""
    code, printed = job(tmp_path, "", size=1, begin=begin)
    assert code == 1
    assert "torch.distributed counts 2 ranks, and MPI 1" in printed


def test_a_process_of_torchrun_is_refused(tmp_path):
    begin = "os.environ.update(TORCHELASTIC_RUN_ID='none', RANK='0', WORLD_SIZE='2')\n" + BEGIN
    code, printed = job(tmp_path, "", size=1, begin=begin)
    assert code == 1
    assert "PreflightError: torchrun started 2 processes" in printed
    assert "`mpistrat run -n 2 train.py`" in printed


@pytest.mark.parametrize(
    "call",
    [
        "dist.all_reduce(torch.ones(1))",
        pytest.param("dist.recv(torch.ones(1), 0)", marks=more),
    ],
    ids=["all_reduce", "recv"],
)
def test_an_exception_on_one_rank_ends_all(tmp_path, call):
    body = f"""
        try:
            if rank == 0:
                raise KeyError("this one")
            {call}
        finally:
            dist.destroy_process_group()
    """
    code, printed = job(tmp_path, body, MPISTRAT_GRACE="1")
    assert code == 1, printed
    assert printed.count("KeyError: 'this one'") == 1


def test_ddp_that_meets_another_call_raises_in_backward(tmp_path):
    body = """
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), bucket_cap_mb=1e-5)
        loss = net(torch.ones(2, 4)).sum()
        try:
            if rank == 0:
                loss.backward()
            else:
                dist.barrier()
        except RuntimeError as error:
            assert "collective calls differ" in str(error), error
            assert "barrier()" in str(error), error
            print("told", type(error).__name__)
        dist.barrier()
        print("left")
    """
    code, printed = job(tmp_path, body)
    assert (code, printed.count("told"), printed.count("left")) == (0, 2, 2), printed


def test_a_call_that_others_never_make_ends_by_the_timeout_of_torch(tmp_path):
    begin = BEGIN.replace("()", "(timeout=datetime.timedelta(seconds=3))", 1)
    body = """
        if rank == 0:
            dist.all_reduce(torch.ones(1))
        else:
            time.sleep(600)
    """
    code, printed = job(tmp_path, body, begin=begin)
    assert code == 75, printed
    assert "rank 0 of 2 has waited for a timeout of 3 s in program.py:" in printed
    assert " for rank 1 to call all_reduce(SUM) of float32[1]. Look " in printed


@more
@pytest.mark.parametrize(
    ("seconds", "says"),
    [(0, "to call init_process_group()"), (-1, "rank 1: rank 0 cannot open the store of torch: ")],
)
def test_a_group_that_cannot_begin_on_one_rank_ends_the_job(tmp_path, seconds, says):
    begin = f"mt.init_process_group(timeout=datetime.timedelta(seconds={seconds}))"
    code, printed = job(tmp_path, "", begin=begin)
    assert code and says in printed, printed


@more
@pytest.mark.parametrize(
    ("begin", "body", "told"),
    [
        (
            "from mpi4py import MPI\nos.environ.update(MPISTRAT_WARN='1', MPISTRAT_TIMEOUT='4')\n"
            "if MPI.COMM_WORLD.rank:\n    time.sleep(600)\n"
            "mt.init_process_group()",
            *("", "call init_process_group"),
        ),
        (
            BEGIN,
            """
        os.environ.update(MPISTRAT_WARN="1", MPISTRAT_TIMEOUT="4")
        if rank == 0:
            time.sleep(600)
        dist.new_group([1, 0])
        """,
            "make the group of ranks 0, 1 (new_group)",
        ),
    ],
)
def test_ranks_that_wait_for_others_to_make_a_group_say_so(tmp_path, begin, body, told):
    code, printed = job(tmp_path, body, begin=begin)
    assert code == 75, printed
    assert f"for all of them to {told}. The job ends" in printed, printed


@more
def test_a_call_of_a_group_that_some_never_make_names_them(tmp_path):
    body = """
        group = dist.new_group([2, 1, 0], timeout=datetime.timedelta(seconds=2))
        if rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1), group=group)
    """
    code, printed = job(tmp_path, body, 3, MPISTRAT_WARN="1", MPISTRAT_GRACE="1")
    assert code == 1, printed
    waits = "rank {} of the group of ranks 0-2 has waited {} s in program.py:"
    told = " for rank 1 to call all_reduce(SUM) of float32[1] in the group of ranks 0-2."
    assert any(waits.format(rank, "for a timeout of 2") in printed for rank in (0, 2)), printed
    assert f"mpistrat: {waits.format(0, 1)}" in printed, printed
    assert printed.count(told) >= 2, printed


def test_an_error_that_nobody_heard_of_is_the_end_of_the_program(tmp_path):
    body = """
        dist.all_reduce(torch.ones(1 + rank), async_op=True)
        dist.destroy_process_group()
    """
    code, printed = job(tmp_path, body)
    assert code == 77, printed
    assert "collective calls differ" in printed


@more
def test_without_threads_all_is_done_at_once_and_that_is_said(tmp_path):
    begin = "import mpi4py; mpi4py.rc.thread_level = 'serialized'\n" + BEGIN
    body = """
        value = torch.ones(1)
        work = dist.all_reduce(value, async_op=True)
        assert work.is_completed()
        work.wait()
        if rank == 0:
            work = dist.isend(value, 1)
        else:
            work = dist.irecv(value, 0)
        work.wait()
        print(f"sum {value.item()}")
    """
    code, printed = job(tmp_path, body, begin=begin)
    assert (code, printed.count("sum 2.0")) == (0, 2), printed
    assert printed.count("THREAD_MULTIPLE") == 1


def test_a_monitored_barrier_that_takes_too_long_names_who_has_not_come(tmp_path):
    body = """
        if rank == 0:
            try:
                dist.monitored_barrier(timeout=datetime.timedelta(seconds=0.5))
            except RuntimeError as error:
                print(error, flush=True)
        else:
            time.sleep(600)  # until the job is ended
    """
    code, printed = job(tmp_path, body)
    assert code and "for rank 1 to call barrier()" in printed, printed


def test_a_small_call_of_a_known_kind_that_takes_too_long_is_named(tmp_path):
    body = """
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
        dist.group.WORLD.set_timeout(datetime.timedelta(seconds=0.5))
        if rank == 0:
            try:
                dist.all_reduce(torch.ones(2))
            except dist.DistBackendError as error:
                print(error, flush=True)
        else:
            time.sleep(600)  # until the job is ended
    """
    code, printed = job(tmp_path, body)
    assert code and "for rank 1 to call all_reduce(SUM) of float32[2]" in printed, printed


def test_a_small_call_of_a_known_kind_that_is_interrupted_ends_the_group(tmp_path):
    body = """
        import signal
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
        if rank == 0:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                dist.all_reduce(torch.ones(2))
            except KeyboardInterrupt:
                try:
                    dist.all_reduce(torch.ones(2))
                except dist.DistError as error:
                    print(error, flush=True)
        else:
            time.sleep(600)  # until the job is ended
    """
    code, printed = job(tmp_path, body)
    assert code and "all_reduce(SUM) of float32[2] was interrupted" in printed, printed
