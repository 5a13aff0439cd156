"""What cannot travel is refused on every rank, by name, and the next call works."""

from __future__ import annotations

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat import pytree
from mpistrat.testing import run_ranks

BAD = {
    "text": "text",
    "none": None,
    "object": object(),
    "masked": np.ma.array([1.0, 2.0], mask=[1, 0]),
    "strings": np.array(["a", "b"]),
    "dates": np.array(["2020"], "M8[Y]"),
    "records": np.zeros(2, [("x", "f8")]),
    "objects": np.array([1, None]),
    "bool": np.ones(2, bool),
}
CALLS = {
    "all_reduce": lambda s, v: s.run(lambda: ms.get_replica_context().all_reduce("SUM", v)),
    "all_gather": lambda s, v: s.run(lambda: ms.get_replica_context().all_gather(v, 0)),
    "reduce": lambda s, v: s.reduce("SUM", {"a": {"b": ms.PerReplica(v["a"]["b"])}}, None),
    "reduce axis": lambda s, v: s.reduce("SUM", {"a": {"b": ms.PerReplica(v["a"]["b"])}}, axis=0),
    "gather": lambda s, v: s.gather(pytree.map(ms.PerReplica, v), 0),
    "assign": lambda s, v: VARIABLES[s].assign(v["a"]["b"]),
}
VARIABLES = {}


@every("call", CALLS)
@every("kind", BAD)
@every("bad_ranks", [(1,), (0, 1, 2)])
def test_a_bad_leaf_raises_on_every_rank(strategy_on, call, kind, bad_ranks):
    if kind == "bool" and "gather" in call:
        pytest.skip("bool can be gathered")

    def rank(comm):
        strategy = strategy_on(comm)
        with strategy.scope():
            VARIABLES[strategy] = ms.Variable(np.zeros(2, np.int32), name="a/b")
        leaf = BAD[kind] if comm.rank in bad_ranks else np.ones(2, np.int32)
        if kind == "bool" and call == "assign":
            leaf = BAD["text"] if comm.rank in bad_ranks else leaf
        with pytest.raises(TypeError) as caught:
            CALLS[call](strategy, {"a": {"b": leaf}})
        total = strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(2)))
        assert VARIABLES.pop(strategy).numpy().tolist() == [0, 0]
        return caught.value, total.local.tolist()

    for at, (error, total) in enumerate(run_ranks(rank, 3)):
        assert total == [3, 3]
        assert "a/b" in str(error)
        assert isinstance(error, ms.MpistratError)
        if at in bad_ranks:
            assert isinstance(error, ms.LeafTypeError)
        else:
            assert isinstance(error, ms.RemoteError)
            assert error.rank == 1
            assert error.kind == "LeafTypeError"


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_complex_numbers_have_no_order(op):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(TypeError, match="complex"):
            strategy.run(lambda: ms.get_replica_context().all_reduce(op, np.ones(2, "c8")))
        with pytest.raises(TypeError, match="complex"):
            strategy.reduce(op, ms.PerReplica(np.ones(2, "c8")), axis=0)

    run_ranks(rank, 2)


@pytest.mark.parametrize("op", ["MAXX", "", 3, None, b"SUM"])
def test_an_unknown_operation_is_refused_on_every_rank(op):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        one = op if comm.rank else "SUM"
        with pytest.raises((ValueError, TypeError)) as caught:
            strategy.run(lambda: ms.get_replica_context().all_reduce(one, 1.0))
        with pytest.raises((ValueError, TypeError)):
            strategy.reduce(one, ms.PerReplica(1.0), None)
        return isinstance(caught.value, ms.RemoteError)

    assert run_ranks(rank, 2) == [True, False]
