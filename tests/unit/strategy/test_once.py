"""What one rank does for all: who calls it, what others get, what a failure tells them."""

from __future__ import annotations

import enum
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import RanksFailed, run_ranks

TREE = {
    "none": None,
    "numbers": [True, 10**30, 2.5, 1 - 2j, np.float32(0.1), np.int8(-3)],
    "texts": ("", "\udc80é", b"\x00\xff"),
    "path": Path("data") / "train.npz",
    "arrays": [np.arange(6.0).reshape(2, 3).T, np.ones((0, 4)), np.ones(2, ml_dtypes.bfloat16)],
    "empty": [{}, [], ()],
}


def equal(found, wanted):
    if isinstance(wanted, np.ndarray):
        np.testing.assert_array_equal(found, wanted, strict=True)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        equal(list(found.values()), list(wanted.values()))
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted)
        assert len(found) == len(wanted)
        for one, two in zip(found, wanted, strict=True):
            equal(one, two)
    else:
        assert (type(found), found) == (type(wanted), wanted)


@pytest.mark.parametrize("size", [1, 3])
def test_the_first_rank_calls_it_and_all_have_the_result(size):
    def program(comm):
        calls = []

        def work(*args):
            calls.append(args)
            return TREE | {"large": np.arange(100_000)}

        found = ms.once(work, 1, "two")
        equal(found, TREE | {"large": np.arange(100_000)})
        found["large"][0] = 1  # each has an array of its own
        assert calls == ([(1, "two")] if comm.rank == 0 else [])
        assert ms.once(lambda: comm.rank) == 0

    run_ranks(program, size)


@pytest.mark.parametrize(("per_node", "leaders"), [(0, [0]), (2, [0, 2, 4]), (3, [0, 3])])
def test_once_per_node(per_node, leaders, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))

    def program(comm):
        calls = []
        found = [ms.once_per_node(lambda: calls.append(1) or ["x" * comm.rank]) for _ in range(2)]
        assert calls == ([1, 1] if comm.rank in leaders else [])
        assert found[0] == found[1]
        return len(found[0][0])

    mine = [max(leader for leader in leaders if leader <= rank) for rank in range(5)]
    assert run_ranks(program, 5) == mine


@pytest.mark.parametrize("per_node", [0, 1])
def test_what_fails_on_one_is_raised_on_all(per_node, monkeypatch):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    failing = 1 if per_node else 0

    def program(comm):
        def work():
            if comm.rank == failing:
                raise FileNotFoundError("no such mirror")

        with pytest.raises(FileNotFoundError, match="no such mirror") as found:
            (ms.once_per_node if per_node else ms.once)(work)
        if comm.rank != failing:
            assert isinstance(found.value, ms.RemoteError)
            assert found.value.rank == failing
        return ms.once(lambda: "continues")

    assert run_ranks(program, 3) == ["continues"] * 3


def test_refined_numbers_are_numbers():
    class Few(enum.IntEnum):
        THREE = 3

    for found in run_ranks(lambda comm: ms.once(lambda: [Few.THREE, np.float32(0.5)]), 2):
        assert [type(number) for number in found] == [np.int64, np.float32]
        assert found == [3, 0.5]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"a": [1, {2, 3}]}, r"result\['a'\]\[1\] has type set"),
        ({1: 2}, "has type dict. Return None, numbers, strings"),
        (np.array([object()]), "ndarray and dtype object"),
        ([np.array(["2020"], "M8[D]")], r"result\[0\] has .* dtype datetime64\[D\]"),
        (print, "builtin"),
    ],
)
def test_results_that_cannot_travel(result, words):
    def program(comm):
        with pytest.raises(ms.LeafTypeError, match=words):
            ms.once(lambda: result)

    run_ranks(program, 2)


def test_arguments():
    def program(comm):
        with pytest.raises(TypeError, match="once: fn must be a function"):
            ms.once("download")
        with pytest.raises(TypeError, match="max_seconds must be a number"):
            ms.once(print, max_seconds="1 h")
        with pytest.raises(ValueError, match="max_seconds > 0"):
            ms.once(lambda: None, max_seconds=0)

    run_ranks(program, 2)


def test_in_replica_code_it_is_refused():
    def program(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(
            ms.ContextError, match=r"once is cross-replica code.*\n.*before run\(\)"
        ):
            strategy.run(lambda: ms.once(print))
        with strategy.scope():
            return ms.once(lambda: comm.rank)

    assert run_ranks(program, 2) == [0, 0]


def test_in_the_scope_of_a_strategy_it_is_its_ranks():
    def program(comm):
        half = ms.MirroredStrategy(comm=comm.split(comm.rank // 2))
        with half.scope():
            return ms.once(lambda: comm.rank)

    assert run_ranks(program, 4) == [0, 0, 2, 2]


def test_another_call_on_another_rank_is_told():
    def program(comm):
        def download():
            return None

        def unpack():
            return None

        ms.once(download if comm.rank == 0 else unpack)

    with pytest.raises(RanksFailed, match=r"once\(download\)"):
        run_ranks(program, 2)


def test_a_collective_call_in_the_function_is_told():
    def program(comm):
        strategy = ms.MirroredStrategy()
        ms.once(lambda: strategy.all_reduce("sum", 1))

    with pytest.raises(RanksFailed, match="all_reduce"):
        run_ranks(program, 2)
