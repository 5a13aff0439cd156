"""Every collective of torch.distributed against what NumPy and torch say of all ranks' values."""

from __future__ import annotations

import math
import operator
import os
import threading
import time
from datetime import timedelta
from fractions import Fraction
from functools import reduce as fold

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.profiler import ProfilerActivity, profile

from mpistrat.torch.views import convert_dtype

NUMBERS = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
]
# Within a check, through shared memory in one step, and in several.
SHAPES = [(), (3,), (0,), (2, 5), (300, 7), (70_001,)]
FOLDS = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}


def mine(rank, shape=(3,), dtype=torch.float32):
    """Small whole numbers, which every dtype holds, and whose folds are exact."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + rank * 3) % 5 + 1).reshape(shape).to(dtype)


def all_of(size, shape=(3,), dtype=torch.float32):
    return [mine(rank, shape, dtype) for rank in range(size)]


def same(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("beside", [False, True], ids=["here", "async"])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_all_reduce_adds_every_dtype_and_shape(rank, size, dtype, beside):
    for shape in SHAPES:
        value = mine(rank, shape, dtype)
        work = dist.all_reduce(value, async_op=beside)
        assert (work is None) is not beside
        if beside:
            assert work.wait()
            assert work.is_completed()
        same(value, fold(operator.add, all_of(size, shape, dtype)))


@pytest.mark.parametrize("op", FOLDS)
def test_all_reduce_folds_by_every_operation(rank, size, op):
    for dtype in (torch.int32, torch.uint8, torch.float32):
        if op.startswith("B") and dtype.is_floating_point:
            continue
        for shape in ((3,), (40_000,)):
            value = mine(rank, shape, dtype)
            dist.all_reduce(value, getattr(dist.ReduceOp, op))
            same(value, fold(FOLDS[op], all_of(size, shape, dtype)))


def test_means_and_bools(rank, size):
    value = mine(rank, (40_000,))
    dist.all_reduce(value, dist.ReduceOp.AVG)
    torch.testing.assert_close(value, sum(all_of(size, (40_000,))) / size)
    value = torch.tensor([True, rank == 0, False])
    for op, wanted in (("SUM", True), ("BOR", True), ("PRODUCT", size == 1), ("BAND", size == 1)):
        got = value.clone()
        dist.all_reduce(got, getattr(dist.ReduceOp, op))
        assert got.tolist() == [True, wanted, False], op


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16]


@pytest.mark.parametrize("count", [0, 5, 40_000])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_means_of_integers_are_sums_divided_and_rounded_towards_0(rank, size, dtype, count):
    lowest = 0 if not dtype.is_signed else -9
    every = [torch.arange(count * size) % 19 + lowest + 5 * r for r in range(size)]
    wanted = torch.div(sum(every), size, rounding_mode="trunc").to(dtype)
    everyone = [value.to(dtype) for value in every]
    value = everyone[rank].clone()
    dist.all_reduce(value, dist.ReduceOp.AVG)
    same(value, wanted)
    value = everyone[rank].clone()
    dist.reduce(value, size - 1, dist.ReduceOp.AVG)
    same(value, wanted if rank == size - 1 else everyone[rank])
    part = torch.empty(count, dtype=dtype)
    dist.reduce_scatter_single(part, everyone[rank].clone(), dist.ReduceOp.AVG)
    same(part, wanted[rank * count : (rank + 1) * count])
    part.zero_()
    dist.reduce_scatter(part, list(everyone[rank].view(size, -1)), dist.ReduceOp.AVG)
    same(part, wanted[rank * count : (rank + 1) * count])


def test_integers_are_divided_by_more_ranks_than_their_dtype_counts():
    from mpistrat.torch.process_group.calls import _divide_integers

    for dtype, count in ((np.int8, 200), (np.int8, 127), (np.uint8, 300), (np.int16, 2)):
        limits = np.iinfo(dtype)
        sums = np.array([limits.min, -7 % limits.max, 0, limits.max], dtype)
        wanted = [math.trunc(Fraction(int(x), count)) for x in sums]
        _divide_integers(sums, count)
        assert sums.tolist() == wanted


def test_a_profile_has_an_event_of_each_call(rank, size):
    def calls(beside):
        one, rows = torch.ones(4), torch.zeros(4 * size)
        works = [
            dist.all_reduce(one.clone(), async_op=beside),
            dist.all_reduce(torch.ones(40_000), async_op=beside),
            dist.broadcast(one, 0, async_op=beside),
            dist.all_gather_single(rows, one, async_op=beside),
            dist.reduce_scatter_single(one, rows, async_op=beside),
            dist.barrier(async_op=beside),
        ]
        for work in filter(None, works):
            work.wait()

    names = ["all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor"]
    for beside in (False, True):
        calls(beside)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            calls(beside)
            dist.barrier()
        events = {e.key: e.count for e in profiler.key_averages() if e.key.startswith("mpistrat:")}
        wanted = {f"mpistrat:{name}": 1 for name in names}
        assert events == wanted | {"mpistrat:all_reduce": 2, "mpistrat:barrier": 2}, beside


def test_an_event_lasts_as_long_as_the_call(rank, size):
    for beside in (False, True):
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            dist.barrier()
            if rank == size - 1:
                time.sleep(0.3)
            start = time.monotonic()
            work = dist.all_reduce(torch.ones(70_001), async_op=beside)
            if beside:
                work.wait()
            seconds = time.monotonic() - start
        (event,) = [e for e in profiler.key_averages() if e.key == "mpistrat:all_reduce"]
        recorded = event.cpu_time_total / 1e6
        assert recorded <= seconds
        if seconds > 0.05:  # as where the last rank was waited for
            assert recorded > seconds / 4


def test_tensors_that_are_not_in_order_are_filled_where_they_lie(rank, size):
    whole = torch.zeros(6, 8)
    part = whole.t()[1:4]
    part.copy_(mine(rank, (3, 6)))
    dist.all_reduce(part)
    same(part.contiguous(), sum(all_of(size, (3, 6))))
    assert not whole[:, [0, 4, 5, 6, 7]].any()
    weight = torch.nn.Parameter(mine(rank, (5,)))
    dist.all_reduce(weight)  # outside of autograd, as with every backend
    same(weight.detach(), sum(all_of(size, (5,))))


@pytest.mark.parametrize("count", [0, 1])
def test_one_element_and_none_may_have_any_strides(rank, size, count):
    """As a column of a matrix of one row has them: torch calls it contiguous."""

    def column(value=0):
        return torch.full((count, 3), float(value))[:, 1]

    assert column().is_contiguous() and column().stride() == (3,)
    into = [column() for _ in range(size)]
    dist.all_gather(into, column(rank))
    same(torch.stack(into), torch.arange(float(size))[:, None].expand(size, count))
    got = column()
    sent = dist.isend(column(rank), (rank + 1) % size)
    dist.recv(got, (rank - 1) % size)
    sent.wait()
    same(got, column((rank - 1) % size))
    dist.all_to_all(into, [column(rank * size + r) for r in range(size)])
    same(torch.stack(into), torch.stack([column(r * size + rank) for r in range(size)]))


@pytest.mark.parametrize("count", [3, 1_000])
def test_roots_give_and_get(rank, size, count):
    everyone = all_of(size, (count,), torch.bfloat16)
    for root in {0, size - 1}:
        value = everyone[rank].clone()
        dist.broadcast(value, src=root)
        same(value, everyone[root])
        value = everyone[rank].clone()
        dist.reduce(value, dst=root)
        if rank == root:
            same(value, fold(operator.add, everyone))
        into = [torch.empty_like(value) for _ in range(size)] if rank == root else None
        dist.gather(everyone[rank], into, dst=root)
        if rank == root:
            same(torch.stack(into), torch.stack(everyone))
        got = torch.empty_like(value)
        dist.scatter(got, everyone if rank == root else None, src=root)
        same(got, everyone[rank])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [3, 1_000])
def test_tensors_may_be_resized_afterwards(rank, size, count, dtype):
    # FullyShardedDataParallel frees the memory of gathered weights so.
    given, into = mine(rank, (count,), dtype), torch.empty(size * count, dtype=dtype)
    for call in (
        lambda: dist.all_reduce(given),
        lambda: dist.broadcast(given, src=0),
        lambda: dist.all_gather_into_tensor(into, given),
        lambda: dist.reduce_scatter_tensor(given, into),
        lambda: dist.all_to_all_single(into, into.clone()),
    ):
        call()
        assert given.untyped_storage().resizable() and into.untyped_storage().resizable()


@pytest.mark.parametrize("count", [3, 10_000])
def test_gathers_of_every_form(rank, size, count):
    everyone = all_of(size, (2, count), torch.int64)
    into = [torch.empty_like(everyone[0]) for _ in range(size)]
    dist.all_gather(into, everyone[rank])
    same(torch.stack(into), torch.stack(everyone))
    whole = torch.empty(size * 2, count, dtype=torch.int64)
    dist.all_gather_into_tensor(whole, everyone[rank])
    same(whole, torch.cat(everyone))
    # The input is a part of the output, as FSDP has it.
    whole.zero_()[2 * rank : 2 * rank + 2] = everyone[rank]
    dist.all_gather_into_tensor(whole, whole[2 * rank : 2 * rank + 2])
    same(whole, torch.cat(everyone))
    uneven = [torch.empty(r + 1) for r in range(size)]
    dist.all_gather(uneven, mine(rank, (rank + 1,)))
    assert all(torch.equal(got, mine(r, (r + 1,))) for r, got in enumerate(uneven))


@pytest.mark.parametrize("count", [2, 5_000])
def test_reduce_scatter_of_every_form(rank, size, count):
    everyone = [mine(r, (size * count, 2)) for r in range(size)]
    wanted = sum(everyone).chunk(size)[rank]
    got = torch.empty(count, 2)
    dist.reduce_scatter_tensor(got, everyone[rank])
    same(got, wanted)
    got.zero_()
    dist.reduce_scatter(got, list(everyone[rank].chunk(size)))
    same(got, wanted)
    dist.reduce_scatter_tensor(got, everyone[rank], op=dist.ReduceOp.AVG)
    torch.testing.assert_close(got, wanted / size)
    counts = [count + r for r in range(size)]  # tensors of other sizes
    everyone = [mine(r, (sum(counts), 2)) for r in range(size)]
    got = torch.empty(counts[rank], 2)
    dist.reduce_scatter(got, list(everyone[rank].split(counts)))
    same(got, sum(everyone).split(counts)[rank])


def test_all_to_all_of_every_form(rank, size):
    """Rank r gives rank s so many rows: r + s."""
    rows = [[torch.full((r + s, 3), 10.0 * r + s) for s in range(size)] for r in range(size)]
    gives, gets = rows[rank], [row[rank] for row in rows]
    into = [torch.empty_like(one) for one in gets]
    dist.all_to_all(into, gives)
    assert all(torch.equal(a, b) for a, b in zip(into, gets, strict=True))
    whole = torch.empty(sum(len(one) for one in gets), 3)
    splits = [len(one) for one in gets], [len(one) for one in gives]
    dist.all_to_all_single(whole, torch.cat(gives), *splits)
    same(whole, torch.cat(gets))
    even = torch.empty(size)
    dist.all_to_all_single(even, torch.arange(size) + 10.0 * rank)
    same(even, torch.arange(size) * 10.0 + rank)


def test_coalesced_calls_are_one(rank, size, group):
    values = [mine(rank, shape) for shape in SHAPES]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for value in values:
            dist.all_reduce(value)
    manager.wait()
    for value, shape in zip(values, SHAPES, strict=True):
        same(value, sum(all_of(size, shape)))
    ins = [mine(rank, (4,)), mine(rank, (2, 3))]
    outs = [torch.empty(size * 4), torch.empty(size * 2, 3)]
    with dist._coalescing_manager(group):
        for out, value in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, value)
    same(outs[1], torch.cat(all_of(size, (2, 3))))
    back = [torch.empty(4), torch.empty(2, 3)]
    with dist._coalescing_manager(group):
        for out, value in zip(back, outs, strict=True):
            dist.reduce_scatter_tensor(out, value)
    same(back[0], ins[0] * size)


def test_objects(rank, size):
    things = [None] * size
    dist.all_gather_object(things, {"rank": rank, "long": "x" * 1000 * rank})
    assert [len(one["long"]) for one in things] == [1000 * r for r in range(size)]
    said = [f"from {rank}", rank]
    dist.broadcast_object_list(said, src=size - 1)
    assert said == [f"from {size - 1}", size - 1]
    got = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert got == [f"for {rank}"]
    into = [None] * size if rank == 0 else None
    dist.gather_object(rank, into, dst=0)
    assert into == (list(range(size)) if rank == 0 else None)


def test_functional_collectives(rank, size, group):
    value = mine(rank, (4,))
    same(functional.all_reduce(value, "sum", group) + 0, sum(all_of(size, (4,))))
    same(value, mine(rank, (4,)))
    same(functional.all_gather_tensor(value, 0, group) + 0, torch.cat(all_of(size, (4,))))
    whole = mine(rank, (size * 2,))
    got = functional.reduce_scatter_tensor(whole, "sum", 0, group) + 0
    same(got, sum(all_of(size, (size * 2,))).chunk(size)[rank])
    splits = [2] * size
    got = functional.all_to_all_single(whole, splits, splits, group) + 0
    same(got, torch.cat([mine(r, (size * 2,)).chunk(size)[rank] for r in range(size)]))


@pytest.mark.parametrize("waits", [False, True], ids=["after", "inside"])
def test_on_one_core_calls_of_a_backward_pass_are_made_at_its_end(size, waits, monkeypatch):
    monkeypatch.setattr(dist.group.WORLD.channel.worker, "has_one_core", True)
    values, works = [torch.ones(50_000), torch.full((3,), 2.0)], []

    def came(_):
        works.extend(dist.all_reduce(value, async_op=True) for value in values)
        if waits:
            works[1].get_future().wait()

    x = torch.ones(2, requires_grad=True)
    x.register_hook(came)
    x.sum().backward()
    assert all(work.is_completed() for work in works)
    assert [value.unique().item() for value in values] == [size, 2 * size]


def test_on_one_core_the_thread_lies_still_though_futures_are_asked_for(size, monkeypatch):
    """As DistributedDataParallel does of each bucket."""
    monkeypatch.setattr(dist.group.WORLD.channel.worker, "has_one_core", True)
    values, makers = [torch.ones(50_000), torch.ones(40_000)], []

    def came(_):
        for value in values:
            future = dist.all_reduce(value, async_op=True).get_future()
            future.then(lambda _: makers.append(threading.current_thread()))

    x = torch.ones(2, requires_grad=True)
    x.register_hook(came)
    x.sum().backward()
    assert makers == [threading.main_thread()] * 2  # at the end of the pass
    assert all(value.unique().item() == size for value in values)


@pytest.mark.parametrize("count", [3, 1_000])
def test_a_callback_may_wait_for_a_call_that_is_queued_behind_its_own(size, count):
    first, second = torch.ones(1_000_000), torch.ones(count)
    before, behind = (dist.all_reduce(value, async_op=True) for value in (first, second))
    sums = before.get_future().then(lambda _: behind.wait() and second.clone())
    before.wait()
    same(sums.wait(), torch.full((count,), float(size)))


@pytest.mark.parametrize("count", [3, 1_000])
def test_a_tensor_that_is_given_other_memory_leaves_a_call_to_that_which_it_had(size, count):
    dist.all_reduce(torch.ones(count))  # so that its kind is known
    for _ in range(20):
        value = torch.ones(count)
        had, other = value.detach(), torch.ones(1)
        work = dist.all_reduce(value, async_op=True)
        value.data = other  # shorter, too
        work.wait()
        same(had, torch.full((count,), float(size)))
        assert other.item() == 1


@pytest.mark.parametrize("count", [3, 100_000])
@pytest.mark.parametrize(
    "asks",
    [
        lambda work, value, size: value[0] == size,
        lambda work, value, size: work.is_completed(),
        lambda work, value, size: work.get_future().wait() is not None,
        lambda work, value, size: work.wait(timedelta(seconds=60)),
    ],
    ids=["nobody", "asks", "future", "timeout"],
)
def test_the_thread_makes_a_call_that_no_wait_makes(size, count, asks):
    value = torch.ones(count)
    work = dist.all_reduce(value, async_op=True)
    until = time.monotonic() + 150
    while not asks(work, value, size):
        assert time.monotonic() < until
        time.sleep(1e-3)
    work.wait()
    assert value[0] == size


@pytest.mark.parametrize(
    "waits",
    [
        lambda work: work.wait(timedelta(seconds=60)),
        lambda work: work.is_completed(),
        lambda work: work.get_future().wait() is not None,
    ],
    ids=["timeout", "asks", "future"],
)
def test_a_callback_may_wait_for_a_call_behind_its_own(size, waits):
    with dist.group.WORLD.channel.worker._lock:  # the thread begins when all is queued
        first, second = torch.ones(1_000_000), torch.ones(3)
        before, behind = (dist.all_reduce(value, async_op=True) for value in (first, second))
        sums = before.get_future().then(lambda _: waits(behind) and second.clone())
    before.wait()
    same(sums.wait(), torch.full((3,), float(size)))


def test_a_callback_may_destroy_its_group(size):
    group = dist.new_group()
    with group.channel.worker._lock:  # the thread begins when all is queued
        value, behind = torch.ones(1_000_000), torch.ones(3)
        before = dist.all_reduce(value, group=group, async_op=True)
        ended = before.get_future().then(lambda _: dist.destroy_process_group(group))
        after = dist.all_reduce(behind, group=group, async_op=True)
    before.wait()
    ended.wait()
    after.wait()
    same(behind, torch.full((3,), float(size)))


def test_inference_tensors_are_filled_by_the_thread(rank, size):
    with torch.inference_mode():
        value, across = torch.ones(900, dtype=torch.bfloat16), torch.ones(30, 40).T
        calls = [dist.all_reduce(one, async_op=True) for one in (value, across)]
        calls.append(dist.broadcast(across[:, ::2], src=0, async_op=True))
        while not all(work.is_completed() for work in calls):  # does not make them itself
            time.sleep(1e-3)
        for work in calls:
            work.wait()
    assert value.unique().tolist() == across.unique().tolist() == [size]


def test_where_tensors_are_made_on_another_device(rank, size):
    convert_dtype.cache_clear()
    with torch.device("meta"):
        value = torch.ones(3, device="cpu")
        dist.all_reduce(value)
        across = torch.full((30, 40), 1.0 + rank, device="cpu").T
        dist.all_reduce(across)
        if rank == 0:
            if size > 1:
                dist.send(across, dst=1)
        elif rank == 1:
            dist.recv(across.zero_(), src=0)
    assert value.unique().tolist() == [size]
    assert across.unique().tolist() == [size * (size + 1) / 2]


# PointToPoint.


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [0, 3, 1_000_000])
def test_messages_to_the_neighbour(rank, size, count):
    after, before = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(count, dtype=torch.bfloat16)
    ops = [
        dist.P2POp(dist.isend, mine(rank, (count,), torch.bfloat16), after),
        dist.P2POp(dist.irecv, got, before),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(got, mine(before, (count,), torch.bfloat16))


@pytest.mark.mpi(min_size=2)
def test_large_messages_find_their_room_in_whatever_order_they_are_waited_for(rank, size):
    if rank == 0:
        rooms = [torch.empty(40_000) for _ in range(3)]
        works = [dist.irecv(room, src) for room, src in zip(rooms, [None, 1, None], strict=True)]
        for work in works[::-1]:
            work.wait()
        assert [room.unique().tolist() for room in rooms] == [[0.0], [1.0], [2.0]]
    elif rank == 1:
        for work in [dist.isend(torch.full((40_000,), float(i)), 0) for i in range(3)]:
            work.wait()


@pytest.mark.mpi(min_size=2)
def test_messages_by_tag_and_from_anyone(rank, size):
    if rank == 0:
        later, sooner = torch.empty(2), torch.empty(2, 2).t()
        for source in range(1, size):
            dist.recv(sooner, src=source, tag=2)
            dist.recv(later, src=source, tag=1)
            same(sooner.contiguous(), torch.tensor([[1.0, 2], [3, 4]]) * source)
            same(later, torch.tensor([1.0, 1]))
        heard = set()
        for _ in range(1, size):
            value = torch.empty(1)
            source = dist.recv(value, tag=3)
            assert value.item() == source
            heard.add(source)
        assert heard == set(range(1, size))
    else:
        dist.send(torch.ones(2), dst=0, tag=1)
        dist.send(torch.tensor([[1.0, 2], [3, 4]]) * rank, dst=0, tag=2)
        dist.send(torch.tensor([float(rank)]), dst=0, tag=3)


@pytest.mark.mpi(min_size=2)
def test_messages_and_collectives_pass_one_another(rank):
    """Legal, and a deadlock where a check waits on the thread of the caller."""
    value, message = torch.ones(4), torch.zeros(2)
    if rank == 0:
        work = dist.all_reduce(value, async_op=True)
        dist.send(message + 7, dst=1)
        work.wait()
    else:
        if rank == 1:
            dist.recv(message, src=0)
            assert message.tolist() == [7, 7]
        dist.all_reduce(value)


@pytest.mark.mpi(min_size=2)
def test_a_message_that_nobody_waits_for_arrives(rank, group):
    """Its sender is in no call of MPI, and has no other name for the tensor."""
    if rank == 0:
        dist.isend(torch.ones(3_000_000), dst=1)
        dist.distributed_c10d._get_default_store().wait(["arrived"])
    elif rank == 1:
        got = torch.zeros(3_000_000)
        dist.recv(got, src=0)
        dist.distributed_c10d._get_default_store().set("arrived", "1")
        assert got.all()
    dist.barrier()


# Groups.


def test_groups_of_some_ranks(rank, size):
    last = dist.new_group([size - 1])
    some = dist.new_group(list(range(0, size, 2)))
    back = dist.new_group(list(range(size))[::-1])
    value = torch.ones(1)
    if rank == size - 1:
        dist.all_reduce(value, group=last)
        assert value.item() == 1
    if rank % 2 == 0:
        dist.all_reduce(value, group=some)
        assert value.item() == (size + 1) // 2
    into = [torch.empty(1) for _ in range(size)]
    dist.all_gather(into, torch.tensor([float(rank)]), group=back)
    assert [int(one) for one in into] == list(dist.get_process_group_ranks(back))
    dist.barrier(back)
    dist.destroy_process_group(back)


def test_groups_that_only_members_make(rank, size):
    ranks = [rank - rank % 2, min(rank - rank % 2 + 1, size - 1)]
    pair = dist.new_group(sorted(set(ranks)), use_local_synchronization=True)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=pair)
    assert value.item() == sum(set(ranks))


def test_two_groups_at_once(rank, size):
    """What is begun on one does not wait for the other, whatever the order on each rank."""
    one, two = dist.new_group(), dist.new_group()
    values = {one: torch.ones(50_000), two: torch.ones(9)}
    order = [one, two] if rank % 2 else [two, one]
    works = {group: dist.all_reduce(values[group], group=group, async_op=True) for group in order}
    for group in order[::-1]:
        works[group].wait()
        assert (values[group] == size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_large_tensors_fold_by_every_operation_beside_the_program(rank, size, dtype):
    group = dist.new_group()
    for count in (40_000, 2_300_001):  # within 8 MiB, and more
        everyone = all_of(size, (count,), dtype)
        for op in ("SUM", "PRODUCT", "MAX"):
            value = everyone[rank].clone()
            work = dist.all_reduce(value, getattr(dist.ReduceOp, op), group=group, async_op=True)
            work.wait()
            same(value, fold(FOLDS[op], everyone))
    if dtype.is_floating_point:
        value = everyone[rank].clone()
        dist.all_reduce(value, dist.ReduceOp.AVG, group=group)
        wanted = sum(one.double() for one in everyone) / size
        torch.testing.assert_close(value.double(), wanted, rtol=4e-3, atol=0)


def test_a_monitored_barrier_is_a_barrier(rank, size):
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=200), wait_all_ranks=True)
    dist.distributed_c10d.monitored_barrier(dist.group.WORLD)
    group = dist.new_group([0])
    if rank == 0:
        dist.monitored_barrier(group)
        dist.destroy_process_group(group)
    other = dist.new_group(backend="gloo")
    dist.monitored_barrier(other, timedelta(seconds=200))  # torch's own
    dist.destroy_process_group(other)


def test_variables_of_torchrun_are_set(rank, size):
    local = int(os.environ["LOCAL_RANK"])
    assert dist.get_node_local_rank() == local
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(size))
    assert os.environ["MASTER_ADDR"]
    every = [None] * size
    dist.all_gather_object(every, (local, int(os.environ["LOCAL_WORLD_SIZE"])))
    per_node = int(os.environ.get("MPISTRAT_RANKS_PER_NODE", 0)) or size
    wanted = [(r % per_node, min(per_node, size - r // per_node * per_node)) for r in range(size)]
    assert every == wanted
