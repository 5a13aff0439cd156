"""Messages between two ranks, and exchanges of all, in the pieces that MPI is given."""

from __future__ import annotations

import numpy as np
import pytest

from mpistrat.comm.mpi import MPIComm
from mpistrat.comm.point_to_point import MessageChannel

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def comm(world):
    found = MPIComm(world, limit=16)
    yield found
    found.free()


def wait(*posts):
    while not all([post.test() for post in posts]):
        pass


@pytest.mark.parametrize("count", [0, 10, 16, 45])
@pytest.mark.parametrize("named", [True, False], ids=["named", "anyone"])
def test_messages_come_in_pieces(comm, count, named):
    posts = MessageChannel(comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got = np.zeros(count, np.uint8)
    receive = posts.receive(got, before if named else None, 3)
    send = posts.send(np.arange(count, dtype=np.uint8) + np.uint8(comm.rank), after, 3)
    wait(receive, send)
    assert (receive.peer, receive.nbytes) == (before, count)
    assert (got == np.arange(count) + before).all()


def test_ranks_in_another_order_send_messages_too(world):
    """A communicator made by a split, and duplicated: Open MPI says nothing of tags there."""
    turned = MPIComm(world).split(0, -world.rank)
    posts = MessageChannel(MPIComm(turned.mpi))
    got = np.zeros(1, np.uint8)
    after, before = (turned.rank + 1) % turned.size, (turned.rank - 1) % turned.size
    wait(posts.receive(got, before, 3), posts.send(np.array([turned.rank], np.uint8), after, 3))
    assert got[0] == before
    group = turned.create_group(range(turned.size), 2**32)
    assert group.size == turned.size
    for comm in (group, posts, turned):
        comm.free()


def test_what_is_given_up_takes_nothing_from_the_next(comm):
    posts = MessageChannel(comm)
    got = np.zeros(4, np.uint8)
    if comm.rank == 0:
        posts.receive(np.zeros(4, np.uint8), 1, 0).cancel()
        comm.barrier()
        wait(receive := posts.receive(got, 1, 0))
        assert receive.nbytes == 4
        assert got.all()
    else:
        comm.barrier()
        if comm.rank == 1:
            wait(posts.send(np.ones(4, np.uint8), 0, 0))
    with pytest.raises(ValueError, match="tag must be between 0 and"):
        posts.send(got, 0, -1)


@pytest.mark.parametrize("scale", [1, 9])
def test_each_rank_gives_each_its_own(comm, scale):
    gives = [scale * (comm.rank + other) for other in range(comm.size)]
    send = np.concatenate(
        [np.full(n, 10 * comm.rank + other, np.uint8) for other, n in enumerate(gives)]
    )
    recv = np.empty(sum(gives), np.uint8)  # what a rank gets of another is what it gives to it
    comm.alltoallv(send, recv, gives, gives)
    wanted = [np.full(n, 10 * other + comm.rank, np.uint8) for other, n in enumerate(gives)]
    assert (recv == np.concatenate(wanted)).all()


def test_groups_of_members_only(comm):
    ranks = list(range(0, comm.size, 2))[::-1]
    if comm.rank in ranks:
        group = comm.create_group(ranks, 2**40)
        assert (group.rank, group.size) == (ranks.index(comm.rank), len(ranks))
        group.free()
