"""Numbers that `run` returns are there at every number of ranks, and are read when asked for."""

from __future__ import annotations

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.lockstep.frame import FRAME_RANKS, MAX_PAYLOAD
from mpistrat.testing import run_ranks

ctx = ms.get_replica_context
# What replicas return, by their rank: alike, different, of several kinds, too large to be sent.
RESULTS = {
    "numbers": lambda rank: (0.5 * rank, rank, np.float32(rank), 1j * rank, rank > 0),
    "equal numbers": lambda rank: [2.5, np.int8(3)],
    "one number": float,
    "integers of several sizes": lambda rank: 7 ** (10 * rank),
    "text": lambda rank: "λ" * rank,
    "small arrays": lambda rank: np.arange(rank + 1.0),
    "large arrays": lambda rank: (np.ones(100), float(rank)),
    "kinds": lambda rank: [None, 1.5, "text", np.ones(60), {"set"}][rank % 5],
    "none": lambda rank: (None, rank),
    "many": lambda rank: [float(rank + i) for i in range(16)],
    "too many": lambda rank: [float(rank + i) for i in range(60)],
    "orders": lambda rank: {"a": 1, "b": rank} if rank % 2 else {"b": rank, "a": 1},
}


def seen(strategy, comm, name):
    """Whether all values are known at once, the text, and all values."""
    each = strategy.run(lambda: RESULTS[name](comm.rank))
    known = ms.PerReplica(None) if each is None else each
    texts = repr(known).replace(f"rank {comm.rank}", "")
    leaves = each if isinstance(each, list | tuple) else [each]
    state = [leaf._is_known for leaf in leaves if isinstance(leaf, ms.PerReplica)]
    values = [str(leaf.values) for leaf in leaves if getattr(leaf, "_is_known", False)]
    return texts, state, values, str(strategy.experimental_local_results(each))


@every("name", RESULTS)
@every("ranks", [1, 2, 3, 4])
def test_frames_and_words_show_the_same(words_on, name, ranks):
    by_words = run_ranks(lambda comm: seen(words_on(comm), comm, name), ranks)
    by_frames = run_ranks(lambda comm: seen(ms.MirroredStrategy(), comm, name), ranks)
    assert by_words == by_frames


@pytest.mark.parametrize("ranks", [FRAME_RANKS + 2])
def test_above_the_limit_of_frames(ranks):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        losses = strategy.run(lambda: float(comm.rank))

        def last(strategy, loss, name):
            return loss.values[-1], name

        pair = strategy.run(lambda: ctx().merge_call(last, args=(float(comm.rank), "sgd")))
        assert "<on rank" not in repr(losses)
        return losses.values, [one.local for one in pair]

    want = (tuple(map(float, range(ranks))), [ranks - 1.0, "sgd"])
    assert all(got == want for got in run_ranks(rank, ranks, timeout=120))


@every("case", [("equal", [], lambda rank: 2.5), ("different", [12], lambda rank: 0.5 * rank),
                ("text", [68], lambda rank: "a" * (20 + 40 * rank)),
                ("nothing", [], lambda rank: None)])  # fmt: skip
def test_what_moves_above_the_limit(words_on, case):
    """One gather more where numbers differ, of the longest message rounded up to all bits set."""
    name, want, make = case

    def rank(comm):
        strategy = words_on(comm)
        inner, sizes = strategy._replicas.lockstep.comm, []
        gather = inner.allgather

        def counted(send, recv):
            sizes.append(send.nbytes)
            gather(send, recv)

        inner.allgather = counted
        inner.allgatherv = None  # or it would be more
        strategy.run(lambda: make(comm.rank))
        return sizes

    for sizes in run_ranks(rank, 2):
        assert len(sizes) == len(want), name
        assert all(size <= 2 * least for size, least in zip(sizes, want, strict=True))


def test_a_payload_that_is_too_long_comes_as_text(words_on):
    def rank(comm):
        lockstep = words_on(comm)._replicas.lockstep
        short, long = b"a" * comm.rank, b"b" * (MAX_PAYLOAD + comm.rank)
        return lockstep.gather_payloads("short", short), lockstep.gather_payloads(
            "long", long if comm.rank else b""
        )

    want = ([b"", b"a", b"aa"], [b"", b"b" * (MAX_PAYLOAD + 1), b"b" * (MAX_PAYLOAD + 2)])
    assert run_ranks(rank, 3) == [want] * 3


def test_values_are_decoded_when_somebody_asks(monkeypatch):
    decoded = []
    from mpistrat.variables import regroup

    real = regroup.decode
    monkeypatch.setattr(regroup, "decode", lambda *entry: decoded.append(1) or real(*entry))

    def rank(comm):
        each = ms.MirroredStrategy().run(lambda: 0.5 * comm.rank)
        assert each._is_known
        comm.barrier()
        assert not decoded
        comm.barrier()
        return each.values, each.values is each.values

    assert run_ranks(rank, 3) == [((0.0, 0.5, 1.0), True)] * 3
    assert len(decoded) == 6


def test_known_arrays_are_copies_of_what_they_were():
    def rank(comm):
        array = np.full(2, float(comm.rank))
        each = ms.MirroredStrategy().run(lambda: array)
        array += 10
        return [one.tolist() for one in each.values], each.local.tolist()

    assert run_ranks(rank, 2) == [([[0, 0], [1, 1]], [10 + r, 10 + r]) for r in range(2)]
