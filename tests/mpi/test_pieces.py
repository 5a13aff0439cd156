"""What is too large for one call of MPI goes in pieces: seven elements stand for 2**30 bytes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm.mpi import MPIComm
from mpistrat.comm.session import Session
from mpistrat.testing import same

pytestmark = pytest.mark.mpi

BF16 = np.dtype(ml_dtypes.bfloat16)
FOLDED = [np.dtype(code) for code in "bhilqBHILQfdgFDG"]
RECORD = np.dtype([("id", "i4"), ("place", "f8", (2,)), ("name", "S3")])
MOVED = [*FOLDED, BF16, *map(np.dtype, ("?", "e", "M8[s]", "U2", RECORD))]
SHAPES = [(), (1,), (7,), (8,), (15, 2), (0, 3), (3, 5, 2)]
OPS = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}


def value(dtype, rank, shape):
    """Bytes of which every pair of ranks and places has others; whole numbers where they fold."""
    count = int(np.prod(shape))
    flat = np.arange(count) * 3 + rank
    if dtype in FOLDED:
        return (flat % 3 + 1).reshape(shape).astype(dtype)
    pattern = (np.arange(count * dtype.itemsize) * 7 + rank) % 100
    if dtype == np.bool_:
        pattern %= 2
    return pattern.astype(np.uint8).view(dtype).reshape(shape)


@pytest.fixture
def comm(world):
    made = MPIComm(world)
    yield made
    made.free()


def pieces_of_seven(comm, dtype):
    comm.limit = 7 * dtype.itemsize
    return comm


def bits(array):
    """Its bytes; a long double has some that mean nothing, and these are whole numbers."""
    return array.astype({"g": "d", "G": "D"}.get(array.dtype.char, array.dtype)).tobytes()


def check(world, got, want):
    same(world, np.int8(got.dtype == want.dtype and bits(got) == bits(want)), np.int8(1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reductions(world, comm, shape):
    for dtype in FOLDED:
        pieces_of_seven(comm, dtype)
        for op, fold in OPS.items():
            if dtype.kind == "c" and op in ("MIN", "MAX"):
                continue
            mine = value(dtype, world.rank, shape)
            want = fold.reduce([value(dtype, r, shape) for r in range(world.size)], axis=0)
            want = np.asarray(want, dtype)
            got = np.zeros(shape, dtype)
            comm.allreduce(mine, got, op)
            check(world, got, want)


@pytest.mark.parametrize("count", [1, 6, 7, 500])
def test_a_sum_that_rounds_has_the_bits_it_has_without_pieces(world, comm, count):
    draw = np.random.default_rng(world.rank)
    for code in "fd":
        mine = (draw.standard_normal(count) * 2.0 ** draw.integers(-40, 40, count)).astype(code)
        whole, cut = np.zeros_like(mine), np.zeros_like(mine)
        comm.limit = 2**30
        comm.allreduce(mine, whole, "SUM")
        pieces_of_seven(comm, mine.dtype).allreduce(mine, cut, "SUM")
        check(world, cut, whole)
        same(world, cut)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_broadcasts(world, comm, shape):
    for dtype in MOVED:
        for root in {0, world.size - 1}:
            got = value(dtype, world.rank, shape).copy()
            pieces_of_seven(comm, dtype).bcast(got, root)
            check(world, got, value(dtype, root, shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_even_gathers(world, comm, shape):
    for dtype in MOVED:
        got = np.zeros((world.size, *shape), dtype)
        pieces_of_seven(comm, dtype).allgather(value(dtype, world.rank, shape), got)
        check(world, got, np.stack([value(dtype, r, shape) for r in range(world.size)]))


@pytest.mark.parametrize("limit", [7, 8, 56])
@pytest.mark.parametrize(
    "lengths", [[30, 0, 7, 1], [0, 61, 0, 0], [0] * 4, [1, 1, 100, 3], [9] * 4], ids=str
)
def test_uneven_gathers(world, comm, lengths, limit):
    comm.limit = limit
    counts = [lengths[rank % 4] for rank in range(world.size)]
    sends = [value(np.dtype("B"), r, (n,)) for r, n in enumerate(counts)]
    want = np.concatenate(sends)
    got = np.zeros(sum(counts), np.uint8)
    comm.allgatherv(sends[world.rank], got, counts)
    check(world, got, want)
    for root in range(world.size):
        there = np.zeros(sum(counts), np.uint8) if world.rank == root else None
        comm.gatherv(sends[world.rank], there, counts, root)
        check(world, want if there is None else there, want)


@pytest.mark.parametrize("sizes", [[8, 7, 7, 7], [0, 20, 1, 7], [22, 22, 0, 0]], ids=str)
def test_exchanges_of_neighbours_that_give_unlike_much(world, comm, sizes):
    comm.limit = 7
    rank, size = world.rank, world.size
    behind = (rank - 1) % size
    sizes = [sizes[r % 4] for r in range(size)]
    sends = [value(np.dtype("B"), r, (n,)) for r, n in enumerate(sizes)]
    for _ in range(2):  # a message too many would come in the second one
        got = np.zeros(sizes[behind], np.uint8)
        comm.sendrecv(sends[rank], (rank + 1) % size, got, behind)
        check(world, got, sends[behind])


def test_parts_of_a_communicator_have_its_limit(comm):
    comm.limit = 7
    part = comm.split(comm.rank % 2)
    node = comm.by_node()
    assert (part.limit, node.limit) == (7, 7)
    part.free()


@pytest.fixture
def parent(world):
    """A communicator whose session gives MPI 7 elements of float64 at once, handshakes too."""
    made = world.Dup()
    Session.of_parent(made).comm.limit = 56
    yield made
    made.Free()


def leaves(rank):
    return [value(np.dtype(code), rank, (45, 2)) for code in "dig"] + [np.float32(rank)]


WAYS = {
    "ordinary": {},
    "function": {"cross_device_ops": lambda: ms.ReductionToOneDevice(accumulation_fn=sum)},
}


def strategy_by(way, parent):
    choice = {key: make() for key, make in WAYS.get(way, {}).items()}
    return ms.MirroredStrategy(comm=parent, **choice)


@pytest.mark.parametrize("way", [*WAYS, "no memory"])
@pytest.mark.parametrize("op", ["SUM", "MAX"])
def test_strategies(world, parent, way, op):
    strategy = strategy_by(way, parent)
    if way == "no memory":
        strategy._replicas.reducer.node.arena.refused = True
    every = [leaves(r) for r in range(world.size)]
    found = strategy.run(lambda: ms.get_replica_context().all_reduce(op, leaves(world.rank)))
    got = [getattr(leaf, "local", leaf) for leaf in found]
    want = [OPS[op].reduce([mine[i] for mine in every], axis=0) for i in range(4)]
    same(world, got, [np.asarray(w, g.dtype) for w, g in zip(want, got, strict=True)])


@pytest.mark.parametrize("way", ["ordinary", "function"])
def test_gathers_and_variables(world, parent, way):
    strategy = strategy_by(way, parent)
    rows = [np.full((r % 3 * 9, 2), r, np.int64) for r in range(world.size)]
    got = strategy.gather(ms.PerReplica(rows[world.rank]), 0)
    same(world, got, np.concatenate(rows))
    with strategy.scope():
        variable = ms.Variable(np.arange(50.0) + world.rank, name="variable")
        scalar = ms.Variable(np.float32(world.rank), name="scalar")
        empty = ms.Variable(np.zeros((0, 4)) + world.rank, name="empty")
    same(world, [variable.numpy(), scalar.numpy()], [np.arange(50.0), np.float32(0)])
    assert empty.shape == (0, 4)
    with strategy.scope():
        mine = np.arange(33) + world.rank
        sent = strategy.extended.broadcast_to(mine, scalar)
    same(world, getattr(sent, "local", sent), np.arange(33))


# And for real.

MANY = 2**31 + 5
SPOTS = [0, 2**30, 2**31 - 1, 2**31, MANY - 1]
OTHERS = 3 * 2**30  # bytes that are left to MPI and to whoever else is on the machine


def free_bytes():
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if "MemAvailable" in line)


@pytest.fixture
def room(world, request):
    """Skip on all ranks alike unless so many arrays of both ranks together fit into memory."""
    wanted = request.param * MANY + OTHERS
    least = min(world.allgather(free_bytes()))
    if world.size != 2:
        pytest.skip("this is shown by two ranks, and needs the memory of two")
    if least < wanted:
        pytest.skip(f"wants {wanted >> 30} GiB of memory, {least >> 30} GiB are available")
    yield
    world.Barrier()  # so that the next test counts what this one has given back


def arrays(count):
    return pytest.mark.parametrize("room", [count], indirect=True, ids=[f"{count} arrays"])


def ends(rank):
    """Almost everywhere the same; other values at both ends and where counts overflow."""
    mine = np.full(MANY, rank + 1, np.int8)
    mine[SPOTS] = [10 + rank, 20, 30 + rank, 40, 50 + rank]
    return mine


def into_itself(op, mine):
    ms.get_replica_context().all_reduce(op, mine, out=mine)


def right(world, got, most, spots):
    """Compare in small parts: a mask of the whole would be as large as the array."""
    step = 2**24
    found = sum(np.count_nonzero(got[low : low + step] == most) for low in range(0, MANY, step))
    same(world, [np.array([got.size, found]), got[SPOTS]],
         [np.array([MANY, MANY - len(SPOTS)]), np.array(spots, np.int8)])  # fmt: skip


@pytest.mark.nightly
@arrays(4)
@pytest.mark.parametrize("op", ["bcast", "sendrecv"])
def test_calls_on_more_elements_than_a_c_int_counts(world, comm, room, op):
    rank = world.rank
    mine = ends(rank)
    if op == "bcast":
        comm.bcast(mine, 1)
        right(world, mine, 2, [11, 20, 31, 40, 51])
        return
    got = np.zeros_like(mine)
    comm.sendrecv(mine, 1 - rank, got, 1 - rank)
    np.add(got, mine, out=got)
    right(world, got, 3, [21, 40, 61, 80, 101])


@pytest.mark.nightly
@arrays(5)
@pytest.mark.parametrize("way", ["ordinary", "no memory"])
def test_all_reduce_of_more_elements_than_a_c_int_counts(world, room, way):
    parent = world.Dup()
    strategy = ms.MirroredStrategy(comm=parent)
    mine = ends(world.rank)
    if way == "ordinary":
        strategy.run(into_itself, ("SUM", mine))
        right(world, mine, 3, [21, 40, 61, 80, 101])
    else:  # a sum of so small integers would travel in four times the memory
        strategy._replicas.reducer.node.arena.refused = True
        strategy.run(into_itself, ("MAX", mine))
        right(world, mine, 2, [11, 20, 31, 40, 51])
    parent.Free()


@pytest.mark.nightly
@arrays(4)
def test_buffers_of_more_elements_than_a_c_int_counts(world, room):
    parent = world.Dup()
    strategy = ms.MirroredStrategy(comm=parent)
    (mine,) = strategy.buffers([np.broadcast_to(np.int8(0), MANY)])
    mine[:] = world.rank + 1
    mine[SPOTS] = [10 + world.rank, 20, 30 + world.rank, 40, 50 + world.rank]
    strategy.run(into_itself, ("MAX", mine))
    right(world, mine, 2, [11, 20, 31, 40, 51])
    parent.Free()


@pytest.mark.nightly
@arrays(4)
def test_a_variable_of_more_elements_than_a_c_int_counts(world, room):
    with ms.MirroredStrategy().scope():
        variable = ms.Variable(lambda: ends(world.rank), name="ends")
    right(world, np.asarray(variable), 1, [10, 20, 30, 40, 50])


@pytest.mark.nightly
@arrays(5)
@pytest.mark.parametrize("first", [2**30 + 3, MANY - 2, 2])
def test_gathers_of_more_elements_than_a_c_int_counts(world, comm, room, first):
    counts = [first, MANY - first]
    mine = np.full(counts[world.rank], 7, np.uint8)
    mine[[0, -1]] = [world.rank + 1, world.rank + 11]
    got = np.zeros(MANY, np.uint8)
    spots = [0, first - 1, first, MANY - 1]
    for root in (None, 0):
        if root is None:
            comm.allgatherv(mine, got, counts)
        else:
            got[:] = 0
            comm.gatherv(mine, got if world.rank == root else None, counts, root)
            comm.bcast(got, root)
        step = 2**24
        sevens = sum(np.count_nonzero(got[low : low + step] == 7) for low in range(0, MANY, step))
        same(world, got[spots], np.array([1, 11, 2, 12], np.uint8))
        same(world, np.array(sevens), np.array(MANY - 4))


@pytest.mark.nightly
@arrays(5)
def test_rows_that_are_gathered_to_more_elements_than_a_c_int_counts(world, room):
    mine = np.full((2**30 + 3 - world.rank, 1), world.rank + 1, np.int8)
    got = ms.MirroredStrategy().gather(ms.PerReplica(mine), 0)
    ones, twos = got[: 2**30 + 3], got[2**30 + 3 :]
    same(world, np.array([ones.min(), ones.max(), twos.min(), twos.max(), len(got) - MANY]),
         np.array([1, 1, 2, 2, 0]))  # fmt: skip
