"""The handshake: any difference raises on every rank, before any payload moves."""

from __future__ import annotations

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.comm.session import Session
from mpistrat.lockstep.frame import MAX_PAYLOAD, VERSION, VERSION_BIT
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.testing import RanksFailed, run_ranks

ctx = ms.get_replica_context


def ones(*shape, dtype=np.float64):
    return np.ones(shape, dtype)


DIFFERENT = {
    "op": lambda r: ctx().all_reduce(["SUM", "MAX"][r], ones(3)),
    "shape": lambda r: ctx().all_reduce("SUM", ones(3 + r)),
    "large shape": lambda r: ctx().all_reduce("SUM", ones(3000 + r)),
    "frame or not": lambda r: ctx().all_reduce("SUM", ones([3, 3000][r])),
    "transposed": lambda r: ctx().all_reduce("SUM", ones(2 + r, 3 - r)),
    "ndim": lambda r: ctx().all_reduce("SUM", ones(*[2] * (1 + r))),
    "0-d": lambda r: ctx().all_reduce("SUM", [ones(1), ones()][r]),
    "dtype of one size": lambda r: ctx().all_reduce("SUM", ones(4, dtype=["i8", "f8"][r])),
    "dtype": lambda r: ctx().all_reduce("SUM", ones(4, dtype=["f4", "f8"][r])),
    "signed": lambda r: ctx().all_reduce("SUM", ones(4, dtype=["i4", "u4"][r])),
    "list or tuple": lambda r: ctx().all_reduce("SUM", [[ones(1)], (ones(1),)][r]),
    "key": lambda r: ctx().all_reduce("SUM", {"ab"[r]: ones(1)}),
    "one key more": lambda r: ctx().all_reduce("SUM", dict.fromkeys("abc"[: 2 + r], ones(1))),
    "one leaf of many": lambda r: ctx().all_reduce(
        "SUM", {f"layer{i:03}": ones(2 + (r and i == 777)) for i in range(1000)}
    ),
    "call": lambda r: ctx().all_gather(ones(1), 0) if r else ctx().all_reduce("SUM", 1.0),
    "end or call": lambda r: r and ctx().all_reduce("SUM", 1.0),
    "merge": lambda r: ctx().merge_call(lambda s: 1) if r else ctx().all_reduce("SUM", 1.0),
    "merge structure": lambda r: ctx().merge_call(lambda s, *a: 1, args=(1,) * (1 + r)),
    "number of merge calls": lambda r: [ctx().merge_call(lambda s: 1) for _ in range(1 + r)][:0],
    "order": lambda r: [
        ctx().all_reduce("SUM", x) for x in ([ones(1), ones(2)] if r else [ones(2), ones(1)])
    ],
    "result": lambda r: [(1, 2), [1, 2]][r],
    "result length": lambda r: [0] * r,
}  # fmt: skip


@every("case", DIFFERENT)
@every("odd", [0, 2])
def test_a_difference_raises_on_every_rank(strategy_on, case, odd):
    def rank(comm):
        strategy = strategy_on(comm)
        with pytest.raises(ms.LockstepError) as caught:
            strategy.run(lambda: DIFFERENT[case](1 if comm.rank == odd else 0))
        assert isinstance(caught.value, ValueError)
        after = strategy.reduce("SUM", ms.PerReplica(float(comm.rank)), None)
        return str(caught.value), float(after)

    for at, (text, after) in enumerate(run_ranks(rank, 3)):
        assert after == 3.0
        assert f"rank {at} of 3" in text
        assert f"rank {odd}:" in text
        assert "test_lockstep.py" in text


def test_what_only_looks_different_is_no_difference(strategy_on):
    """Another insertion order, byte order, memory layout, or C name of the same dtype."""

    def rank(comm):
        keys = ["b", "a"] if comm.rank else ["a", "b"]
        tree = {k: np.full((2, 3), ord(k), dtype=">f8" if comm.rank else "<f8") for k in keys}
        tree["n"] = np.ones(100, "q" if comm.rank else "l")
        if comm.rank:
            tree["a"] = np.asfortranarray(tree["a"])
        got = strategy_on(comm).run(lambda: ctx().all_reduce("SUM", tree))
        return {k: v.local.flat[0] for k, v in got.items()}

    assert run_ranks(rank, 2) == [{"a": 2 * 97, "b": 2 * 98, "n": 2}] * 2


def test_no_payload_moves_and_no_buffer_is_touched():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        moved = []
        inner = comm.allreduce
        comm.allreduce = lambda *a: (moved.append(a), inner(*a))
        mine = np.full(5000 + comm.rank, float(comm.rank))
        with pytest.raises(ms.LockstepError):
            strategy.run(lambda: ctx().all_reduce("SUM", mine))
        return len(moved), set(mine)

    assert run_ranks(rank, 2) == [(0, {0.0}), (0, {1.0})]


def test_cross_replica_calls_that_differ():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            a, b = ms.Variable(1.0, name="a"), ms.Variable(1.0, name="b")
        pairs = [
            (lambda: a.assign(2.0), lambda: b.assign(2.0)),
            (lambda: a.assign(2.0), lambda: a.assign_add(2.0)),
            (lambda: strategy.run(lambda: 1), lambda: a.assign(2.0)),
            (lambda: strategy.reduce("SUM", ms.PerReplica(ones(2)), axis=0),
             lambda: strategy.reduce("SUM", ms.PerReplica(ones(2)), axis=None)),
            (lambda: strategy.reduce("SUM", ms.PerReplica(ones(2, 2)), axis=0),
             lambda: strategy.reduce("SUM", ms.PerReplica(ones(2, 2)), axis=1)),
            (lambda: strategy.reduce("SUM", ms.PerReplica(ones(2)), axis=0),
             lambda: strategy.reduce("MEAN", ms.PerReplica(ones(2)), axis=0)),
            (lambda: strategy.extended.update(a, lambda v: None),
             lambda: strategy.extended.update(b, lambda v: None)),
        ]  # fmt: skip
        for pair in pairs:
            with pytest.raises(ms.LockstepError):
                pair[comm.rank]()
        assert a.numpy() == b.numpy() == 1.0
        for _ in range(2):
            for pair in pairs[:1]:
                pair[0]()
        return float(a.numpy())

    assert run_ranks(rank, 2) == [2.0, 2.0]


def test_a_call_under_if_rank_is_reported_by_the_next_call():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(ms.LockstepError, match="reduce"):
            if comm.rank == 0:
                strategy.reduce("SUM", ms.PerReplica(1.0), None)
            strategy.run(lambda: 1)
        # Rank 0 was stopped before run, so both have made one call.
        return float(strategy.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [2.0, 2.0]


def test_a_rank_that_ends_early_does_not_hang_the_others():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        for _ in range(3 + comm.rank):
            strategy.run(lambda: 1)

    with pytest.raises(RanksFailed) as caught:
        run_ranks(rank, 2)
    assert set(caught.value.errors) == {1}


@pytest.mark.parametrize("length", [0, 1, 10, 1000, 1 << 16])  # longer ones are cut
def test_texts_of_usual_lengths_arrive_whole(strategy_on, length):
    def rank(comm):
        def fn():
            if comm.rank == 1:
                raise ValueError("é" * length)

        with pytest.raises(ValueError) as caught:
            strategy_on(comm).run(fn)
        return str(caught.value)

    zero, one = run_ranks(rank, 2)
    assert one == "é" * length
    assert one in zero


def test_the_last_frame_says_nothing_about_the_next():
    """A long payload is followed by a short one."""

    def rank(comm):
        strategy = ms.MirroredStrategy()
        out = []
        for count in (28, 1, 27, 2, 29, 0, 3):
            got = strategy.run(lambda: ctx().all_reduce("SUM", np.arange(float(count))))  # noqa: B023
            out.append(got.local.tolist())
        return out

    want = [(2 * np.arange(float(c))).tolist() for c in (28, 1, 27, 2, 29, 0, 3)]
    assert run_ranks(rank, 2) == [want, want]


@every("size", [0, 5, 300])
@every("n", [1, 3])
def test_payloads_are_compared_alike_however_they_travel(strategy_on, n, size):
    def rank(comm):
        lockstep = strategy_on(comm)._replicas.lockstep
        same = lockstep.compare_payloads("call", b"x" * size)
        other = lockstep.compare_payloads("call", b"%d" % comm.rank + b"x" * size)
        return same, other and [*other], lockstep.gather_payloads("call", b"x" * size)

    every_one = [b"%d" % r + b"x" * size for r in range(n)]
    assert run_ranks(rank, n) == [(None, every_one if n > 1 else None, [b"x" * size] * n)] * n


@pytest.mark.parametrize("frame_ranks", [64, 0])
@pytest.mark.parametrize("old_rank", [0, 2])
def test_ranks_of_two_formats_get_a_sentence(frame_ranks, old_rank, monkeypatch):
    """Both formats are those of this and later versions; none has a bit of the other."""

    def program(comm):
        lockstep = Lockstep(Session.of_parent(comm), frame_ranks)
        if comm.rank == old_rank:
            exchange = lockstep._exchange
            lockstep._exchange = lambda digest, payload, flags: exchange(
                digest, payload, flags & ~VERSION_BIT | VERSION_BIT << 1
            )
        with pytest.raises(ms.PreflightError) as caught:
            lockstep.handshake("call")
        return str(caught.value)

    for rank, text in enumerate(run_ranks(program, 3)):
        assert f"the formats {VERSION} and {VERSION + 1}" in text
        assert f"rank {rank} of 3" in text


class TestPayloads:
    @pytest.mark.parametrize("frame_ranks", [64, 0])
    @pytest.mark.parametrize("nbytes", [0, 8, MAX_PAYLOAD, MAX_PAYLOAD + 8, 10_000])
    def test_rows_of_all_ranks(self, nbytes, frame_ranks):
        def program(comm):
            lockstep = Lockstep(Session.of_parent(comm), frame_ranks)
            row = np.random.default_rng(comm.rank).bytes(nbytes)
            rows = lockstep.gather_rows("call", row).copy()
            same = lockstep.gather_rows("call", b"x" * nbytes)
            return rows, same.tobytes()

        wanted = [np.random.default_rng(rank).bytes(nbytes) for rank in range(3)]
        for rows, same in run_ranks(program, 3):
            assert [row.tobytes() for row in rows] == wanted
            assert same == b"x" * 3 * nbytes

    def test_a_zero_at_the_end_is_a_difference(self):
        """Frames are filled up with zeros, so only the size tells."""

        def program(comm):
            return Lockstep(Session.of_parent(comm)).compare_payloads(
                "call", bytes(3 + comm.rank % 2)
            )

        assert run_ranks(program, 3) == [[bytes(3), bytes(4), bytes(3)]] * 3
