"""What ranks exchange to explain a failure, or to leave, does not grow with their number."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm.loopback import LoopbackComm
from mpistrat.lockstep import shutdown
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.lockstep.ranks import MAX_SPEAKERS
from mpistrat.testing import run_ranks

GRADIENTS = {f"layer{i}": np.zeros(4) for i in range(20)}


def one_differs(rank):
    ms.get_replica_context().all_reduce("max" if rank == 1 else "sum", GRADIENTS)


def all_differ(rank):
    ms.get_replica_context().all_reduce("sum", np.zeros(rank + 1))


def all_raise(rank):
    raise ValueError("singular matrix")


def each_raises_its_own(rank):
    raise ValueError(f"singular matrix {rank:05}")


def one_wrote(rank):
    variable = ms.Variable(0.0, name="v")
    variable.assign(float(rank == 1))
    ms.get_replica_context().all_reduce("sum", 1.0)


def one_leaves(rank):
    if rank == 1:
        raise SystemExit(3)
    ms.get_replica_context().all_reduce("sum", GRADIENTS)


ENDINGS = (one_differs, all_differ, all_raise, each_raises_its_own, one_wrote, one_leaves)


@pytest.fixture
def received(monkeypatch):
    """How many bytes rank 0 has received since the list was emptied."""
    counts = []

    def counted(method, at):
        def call(comm, *args):
            method(comm, *args)
            if comm.rank == 0:
                counts.append(args[at].nbytes)

        return call

    for name, at in {"allgather": 1, "allgatherv": 1, "allreduce": 1, "bcast": 0}.items():
        monkeypatch.setattr(LoopbackComm, name, counted(getattr(LoopbackComm, name), at))
    return counts


# More than gather frames in a handshake.
SIZES = (66, 154)
BITS = (MAX_SPEAKERS + 1) * 11  # bytes: one bit for each of 88 more ranks, in each row


def test_bytes_do_not_grow_with_the_number_of_ranks(received):
    def program(comm):
        strategy, results = ms.MirroredStrategy(), {}
        for ending in ENDINGS:
            strategy.run(lambda: None)
            if comm.rank == 0:
                received.clear()
            if ending is one_leaves and comm.rank == 1:
                strategy._replicas.lockstep.leave_program(3)
                break
            with pytest.raises((ms.LockstepError, ValueError)) as caught:
                strategy.run(ending, (comm.rank,))
            results[ending.__name__] = sum(received), len(str(caught.value))
        return results

    few, many = (run_ranks(program, size)[0] for size in SIZES)
    for name in few:
        for less, more in zip(few[name], many[name], strict=True):
            assert abs(more - less) <= BITS + 99, name  # numbers of ranks have more digits


def test_bytes_of_a_normal_exit_do_not_grow(received):
    def program(comm):
        lockstep = ms.MirroredStrategy()._replicas.lockstep
        if comm.rank == 0:
            received.clear()
        agreement = lockstep.leave_program(0)
        return sum(received), agreement.code, agreement.alike_rank_count

    (few, *first), (many, *second) = (run_ranks(program, size)[0] for size in SIZES)
    assert (first, second) == ([0, SIZES[0]], [0, SIZES[1]])
    assert many - few <= BITS


@pytest.mark.parametrize("size", [3, 70])
def test_the_text_names_all_ranks_and_both_places(size):
    def program(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(ms.LockstepError) as caught:
            strategy.run(one_differs, (comm.rank,))
        return str(caught.value).splitlines()

    for lines in run_ranks(program, size):
        who = "ranks 0, 2" if size == 3 else "ranks 0, 2-69"
        assert re.match(rf"  {who}: test_explanations\.py:\d+ .*all_reduce\(SUM", lines[1])
        assert re.match(r"  rank 1: +test_explanations\.py:\d+ .*all_reduce\(MAX", lines[2])


@pytest.mark.parametrize("size", [3, 70])
def test_who_failed_too_is_named(size):
    def step(rank):
        if rank:
            raise ValueError(f"singular matrix of {rank}")

    def program(comm):
        with pytest.raises(ValueError) as caught:
            ms.MirroredStrategy().run(step, (comm.rank,))
        return str(caught.value)

    first, *others = run_ranks(program, size)
    also = "rank 2 failed too" if size == 3 else "ranks 2-69 failed too"
    assert f"singular matrix of 1 ({also})" in first
    assert others == [f"singular matrix of {rank}" for rank in range(1, size)]


@pytest.mark.parametrize("size", [1, 2, 3, 20, 70])
def test_distinct_texts(size):
    """Each travels once, and all ranks learn who has it; no text is none."""
    patterns = {
        "equal": lambda rank: b"a" * 10**5,
        "none": lambda rank: b"",
        "two": lambda rank: b"ab"[rank % 2 :],
        "some": lambda rank: b"odd" * (rank % 2),
        "each": lambda rank: str(rank).encode(),
    }

    def program(comm):
        lockstep = ms.MirroredStrategy()._replicas.lockstep
        results = [lockstep.gather_distinct_texts(text(comm.rank)) for text in patterns.values()]
        return [
            ({text: [*ranks] for text, ranks in result.ranks_by_text.items()}, result.other_ranks)
            for result in results
        ]

    for results in run_ranks(program, size):
        for text, (ranks_by_text, other_ranks) in zip(patterns.values(), results, strict=True):
            expected = {}
            for rank in range(size):
                expected.setdefault(text(rank), []).append(rank)
            expected.pop(b"", None)
            shown = dict(itertools.islice(expected.items(), MAX_SPEAKERS))
            others = [rank for rank in range(size) if text(rank) and text(rank) not in shown]
            assert list(ranks_by_text.items()) == list(shown.items())
            assert other_ranks == others


def test_ranks_in_calls_of_strategies_of_different_orders_understand_each_other():
    def program(comm):
        session = ms.MirroredStrategy()._replicas.lockstep.session
        lockstep = Lockstep(session, order=None if comm.rank == 0 else (2, 0, 1))
        text = b"odd" if comm.rank == 1 else b"even"
        return lockstep.gather_distinct_texts(text), lockstep.find_ranks_with(comm.rank == 2)

    for texts, ranks in run_ranks(program, 3):
        assert texts.ranks_by_text == {b"even": [0, 2], b"odd": [1]}
        assert ranks == [2]


@pytest.mark.parametrize("failed", [[0], [2], [1, 2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("order", [None, (2, 0, 1)])
def test_the_first_replica_that_failed_is_found(failed, order):
    def program(comm):
        lockstep = Lockstep(ms.MirroredStrategy()._replicas.lockstep.session, order=order)
        return lockstep.find_first_replica(comm.rank in failed)

    first = next(rank for rank in order or range(3) if rank in failed)
    assert run_ranks(program, 3) == [(first, len(failed) == 3)] * 3


def exit_code(rows):
    """The exit code of a job, from what each rank tells."""
    leavers = [row for row in rows if row["leaving"]]
    if len(leavers) == len(rows) and any(row["group"] for row in rows):
        return max(row["code"] for row in rows)
    codes = [row["code"] for row in leavers if row["code"]]
    own = [row["code"] for row in leavers if row["code"] and not row["echo"]]
    if own:
        return own[0]
    if codes and len(codes) == len(leavers):
        return codes[0]
    return shutdown.MISMATCH if codes or len(leavers) < len(rows) else 0


def test_the_exit_code_of_the_least_numbers_is_that_of_all_rows():
    row = {"leaving": True, "code": 0, "group": False, "echo": False, "said": ""}
    kinds = [
        row | {"leaving": False},
        row,
        row | {"code": 3},
        row | {"code": 5, "group": True},
        row | {"code": 1, "kind": "ValueError"},
        row | {"code": 77, "kind": "RemoteError", "echo": True},
    ]
    for rows in itertools.product(kinds, repeat=3):
        tallies = [shutdown._tally(rank, row) for rank, row in enumerate(rows)]
        least = shutdown._Tally(*map(min, zip(*tallies, strict=True)))
        assert least.exit_code() == exit_code(rows), rows
        stays = [rank for rank, row in enumerate(rows) if not row["leaving"]]
        assert (least.staying in stays[:1]) == bool(stays)
        assert bool(least.all_leave) != bool(stays)
