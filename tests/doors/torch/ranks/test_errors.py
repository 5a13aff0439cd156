"""What goes wrong on some ranks is said on all, and the group continues where that is possible."""

from __future__ import annotations

import functools
import os
import re
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from mpistrat.errors import LeafTypeError, LockstepError, RemoteError
from mpistrat.torch.views import describe_tensor

pytestmark = pytest.mark.mpi(min_size=2)


def works(size):
    """The group is as good as new."""
    value = torch.ones(2)
    dist.all_reduce(value)
    assert value.tolist() == [size, size]


@pytest.mark.parametrize("source", [1, None], ids=["named", "anyone"])
@pytest.mark.parametrize("scale", [1, 10_000], ids=["small", "large"])
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((4, torch.float32), (4, torch.int32)),  # as many bytes: other numbers, not an error of MPI
        ((4, torch.bfloat16), (2, torch.float32)),
        ((2, torch.float32), (4, torch.float32)),
        ((5, torch.float32), (3, torch.float32)),
    ],
    ids=["int32", "bfloat16", "fewer", "more"],
)
def test_a_message_of_another_size_or_dtype_is_an_error(rank, size, given, wanted, scale, source):
    sent = torch.ones(given[0] * scale, dtype=given[1])
    whole = torch.zeros((wanted[0] + 1) * scale, dtype=wanted[1])
    into = whole[: -1 * scale]
    if rank == 0:
        specs = describe_tensor(into), describe_tensor(sent)
        text = rf"^rank 0: recv.* wants {specs[0]}, .* rank 1 has sent {specs[1]}, "
        with pytest.raises(ValueError, match=text.replace("[", r"\[")):
            if source is None:
                dist.recv(into)
            else:
                (work,) = dist.batch_isend_irecv([dist.P2POp(dist.irecv, into, source)])
                work.wait()
        assert not whole[-scale:].any()
        into = torch.empty(2, 3)  # the numbers of another shape are the same ones
        dist.recv(into, src=1)
        assert into.flatten().tolist() == list(range(6))
    elif rank == 1:
        dist.send(sent, dst=0)
        dist.send(torch.arange(6.0), dst=0)


def test_a_dtype_that_cannot_be_reduced_is_told_on_all_ranks(rank, size):
    value = torch.ones(3).to(torch.float8_e4m3fn)
    with pytest.raises((LeafTypeError, RemoteError), match=r"float8_e4m3fn\[3\] cannot be reduced"):
        dist.all_reduce(value)
    works(size)


def test_different_calls_are_named_with_their_places(rank, size):
    with pytest.raises(LockstepError) as caught:
        if rank == 0:
            dist.all_reduce(torch.zeros(3))
        else:
            dist.broadcast(torch.zeros(3), src=0)
    text = str(caught.value)
    assert "all_reduce(SUM) of float32[3]" in text
    assert "broadcast(float32[3], src=0)" in text
    assert text.count("test_errors.py:") == 2
    assert "torch/distributed" not in text
    works(size)


def test_broadcasts_that_differ_are_not_told_of_replica_0(rank, size):
    with pytest.raises(LockstepError, match=r"broadcast\(float32\[3\], src=1\)") as caught:
        dist.broadcast(torch.zeros(3), src=min(rank, 1))
    assert "replica 0" not in str(caught.value)
    works(size)


def test_different_shapes_are_told_by_wait_and_by_the_future(rank, size):
    works_of = [dist.all_reduce(torch.zeros(3 + rank), async_op=True) for _ in range(2)]
    with pytest.raises(LockstepError, match=r"float32\[3\]"):
        works_of[0].wait()
    with pytest.raises(RuntimeError, match="collective calls differ"):
        works_of[1].get_future().wait()
    works(size)


def test_an_error_that_nobody_waits_for_is_raised_by_the_next_call(rank, size):
    dist.all_reduce(torch.zeros(3 + rank), async_op=True)
    with pytest.raises(LockstepError, match=r"float32\[3\]"):
        dist.barrier()
    works(size)
    held = dist.all_reduce(torch.zeros(3 + rank), async_op=True)
    with pytest.raises(LockstepError, match=r"float32\[3\]"):
        dist.barrier()
    assert held.exception() is not None
    works(size)


def test_what_cannot_be_moved_on_one_rank_is_an_error_on_all(rank, size):
    value = torch.zeros(2, device="meta") if rank == 0 else torch.zeros(2)
    with pytest.raises(LeafTypeError if rank == 0 else RemoteError, match="meta"):
        dist.all_reduce(value)
    works(size)
    value = torch.eye(2).to_sparse() if rank else torch.eye(2)
    with pytest.raises(LeafTypeError if rank else RemoteError, match="to_dense"):
        dist.all_reduce(value)
    works(size)
    with pytest.raises((LeafTypeError, RemoteError), match="wants numbers, got torch"):
        dist.all_reduce(torch.zeros(2, dtype=torch.bool), dist.ReduceOp.AVG)
    works(size)


@pytest.mark.parametrize("count", [3, 1_000])
@pytest.mark.parametrize("kind", ["of a subclass", "of zeros", "freed"])
def test_what_has_no_memory_is_an_error_on_all(rank, size, count, kind):
    value = torch.ones(count)
    dist.all_reduce(value.clone())  # so that its kind is known
    if rank == 0 and kind == "of a subclass":  # as DTensor is
        value = FakeTensorMode().from_tensor(value)
    elif rank == 0 and kind == "of zeros":
        value = torch._efficientzerotensor(count)
    elif rank == 0:
        value.untyped_storage().resize_(0)
    into = torch.empty(size * count)
    for call in (
        lambda: dist.all_reduce(value),
        lambda: dist.all_reduce(value, async_op=True).wait(),
        lambda: dist.broadcast(value, src=0),
        lambda: dist.all_gather_into_tensor(into, value),
    ):
        with pytest.raises(LeafTypeError if rank == 0 else RemoteError, match="no memory"):
            call()
    works(size)


def test_splits_that_do_not_meet_are_an_error_on_all(rank, size):
    gives = [1] * size
    gets = [2 if rank == 0 and other == 1 else 1 for other in range(size)]
    with pytest.raises(ValueError, match="rank 1 gives 4 bytes to rank 0, which wants 8"):
        dist.all_to_all_single(torch.empty(sum(gets)), torch.zeros(size), gets, gives)
    works(size)


def test_errors_in_groups_name_the_ranks_of_the_job(rank, size):
    group = dist.new_group([size - 1, 0])
    if rank in (0, size - 1):
        with pytest.raises(LockstepError) as caught:
            dist.all_reduce(torch.zeros(3 + rank), group=group)
        assert f"rank {size - 1}:" in str(caught.value)
        assert f"group of ranks 0, {size - 1}" in str(caught.value)
        with pytest.raises(LockstepError, match=rf"src={size - 1}\)"):
            dist.broadcast(torch.zeros(3 + rank), src=size - 1, group=group)
        work = dist.irecv(torch.zeros(2), src=size - 1 - rank, group=group)
        with pytest.raises(dist.DistBackendError, match=f"for rank {size - 1 - rank} to send"):
            work.wait(timedelta(seconds=0.1))


def test_a_group_that_has_ended_says_so(size):
    group = dist.new_group()
    dist.destroy_process_group(group)
    value = torch.ones(1)
    for call in (
        lambda: group.allreduce([value]).wait(),
        lambda: group.send([value], 0, 0),
        lambda: group.recv_anysource([value], 0),
    ):
        with pytest.raises(dist.DistError, match="destroy_process_group"):
            call()
    works(size)


@pytest.mark.parametrize("root", [-1, 99])
def test_a_root_that_is_not_there_is_an_error_on_all_ranks(rank, size, root):
    """Of one rank's mistake the others are told; -1 is not the last rank."""
    value, gives = torch.ones(1), (dist.broadcast, dist.scatter)
    for call in (dist.broadcast, dist.reduce, dist.gather, dist.scatter):
        with pytest.raises((ValueError, RemoteError, RuntimeError), match=r"src or dst|rank"):
            call(value, **{"group_src" if call in gives else "group_dst": root})
    with pytest.raises((ValueError, RemoteError), match=f"src or dst is rank {root} of the group"):
        dist.broadcast(value, group_src=root if rank == 1 else 0)
    works(size)


def test_the_calls_of_two_threads_in_another_order_are_named_with_their_threads(rank, size):
    alone = dist.new_group()
    value = torch.ones(2)
    dist.all_reduce(value, group=alone)
    with pytest.raises(LockstepError) as caught:  # of one thread nothing is said
        dist.all_reduce(torch.ones(2 + rank), group=alone)
    assert "thread" not in str(caught.value)
    errors = []

    def call(make):
        try:
            make()
        except LockstepError as error:
            errors.append(str(error))

    save = functools.partial(dist.broadcast_object_list, ["state"], 0, group=alone)
    thread = threading.Thread(target=call, args=(save,), name="saves")
    if rank == 0:
        thread.start()
        thread.join(0.3)
    call(functools.partial(dist.all_reduce, value, group=alone))
    if rank:
        thread.start()
    thread.join()
    assert len(errors) == 2
    words = r"2 threads .*MainThread, saves.*process_group=dist\.new_group\(\)"
    assert re.search(words, errors[-1]), errors
    works(size)


def test_a_forked_process_is_no_rank(rank, size):
    value = torch.ones(1)
    dist.all_reduce(value)  # of a kind that is known by now
    pid = os.fork()
    if not pid:
        told = 0
        for call in (dist.all_reduce, lambda one: dist.isend(one, (rank + 1) % size)):
            try:
                call(value)
            except dist.DistError as error:
                told += "a forked process is no rank" in str(error)
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    works(size)


def test_a_message_that_does_not_come_is_named(rank, size):
    if rank == 0:
        work = dist.irecv(torch.zeros(2), src=1)
        with pytest.raises(dist.DistBackendError, match=r"test_errors.py:.* for rank 1 to send"):
            work.wait(timedelta(seconds=0.2))
        with pytest.raises(RuntimeError, match="for rank 1"):
            work.wait()
    works(size)
    if rank == 0:
        got = torch.zeros(2)
        dist.recv(got, src=1)  # what was given up takes nothing from the next one
        assert got.tolist() == [5, 5]
    elif rank == 1:
        dist.send(torch.full((2,), 5.0), dst=0)


def test_a_wait_that_takes_too_long_gives_up_and_the_call_goes_on(rank, size):
    value = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(value, async_op=True)
        with pytest.raises(dist.DistBackendError, match=r"all_reduce\(SUM\) of float32\[3\]"):
            work.wait(timedelta(seconds=0.1))
        dist.send(torch.zeros(1), dst=1)
        assert work.wait()
    else:
        if rank == 1:
            dist.recv(torch.zeros(1), src=0)
        dist.all_reduce(value)
    assert value.tolist() == [size] * 3


def test_what_is_not_there_says_so(group):
    with pytest.raises(NotImplementedError, match="new_group"):
        group.split_group()
    with pytest.raises(NotImplementedError, match="PREMUL_SUM"):
        dist.all_reduce(torch.zeros(1), dist._make_nccl_premul_sum(2.0))


def test_lists_and_rooms_that_do_not_have_one_for_each_rank_are_an_error_on_all(rank, size):
    """Nothing that is left over, or missing, goes without a word."""
    one, root = torch.ones(2, dtype=torch.uint8), rank == 0
    longer = [one.clone() for _ in range(size + 1)]
    calls = {
        "scatter_list has": lambda: dist.scatter(one, longer if root else None, 0),
        "gather_list has": lambda: dist.gather(one, longer if root else None, 0),
        f"has {2 * size + 1} bytes": lambda: dist.all_gather_into_tensor(
            torch.empty(2 * size + root, dtype=torch.uint8), one
        ),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=words):
            call()
    # As many bytes of another dtype would be other numbers.
    whole, part = torch.ones(2 * size), torch.empty(2, dtype=torch.int32)
    for call in (
        lambda: dist.all_gather_into_tensor(whole, part),
        lambda: dist.reduce_scatter_tensor(part, whole),
    ):
        with pytest.raises(ValueError, match=r"\[.*\] has .* the same size and dtype"):
            call()
    with pytest.raises(ValueError, match="cannot be split evenly"):
        dist.reduce_scatter(torch.ones(2), [torch.ones(2)] * (size + 1))
    # Rank r's part is the r-th of the list, whatever that of another one may hold.
    given = [torch.ones(3), *[torch.ones(1)] * (size - 1)]
    with pytest.raises(ValueError, match=r"rank 0: .* has 8 bytes, .* 12 of float32"):
        dist.reduce_scatter(torch.ones(2 if rank == 0 else 1), given)
    for call in (dist.isend, dist.irecv):
        with pytest.raises(ValueError, match=f"ranks are 0 to {size - 1}"):
            call(one, size)
    dist.barrier()
