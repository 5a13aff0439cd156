"""Python integers are reduced exactly, or are an OverflowError; arrays of integers wrap."""

from __future__ import annotations

import math

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.collectives.dtypes import check_integer
from mpistrat.kernels.ops import ReduceOp
from mpistrat.testing import run_ranks

ctx = ms.get_replica_context
MOST = 2**63 - 1
# What a program calls, with this rank's number.
CALLS = {
    "all_reduce": lambda s, op, x: s.all_reduce(op, x),
    "all_reduce of a tree": lambda s, op, x: s.all_reduce(op, {"a": [np.ones(9), x]})["a"][1],
    "all_reduce_start": lambda s, op, x: s.all_reduce_start(op, x).wait(),
    "in replica code": lambda s, op, x: s.run(lambda: ctx().all_reduce(op, x)).local,
    "reduce": lambda s, op, x: s.reduce(op, s.run(lambda: x), axis=None),
    "reduce_to": lambda s, op, x: (
        s.run(
            lambda: ctx().merge_call(lambda s, y: s.extended.reduce_to(op, y, "cpu"), args=(x,))
        ).local
    ),
    "batch_reduce_to": lambda s, op, x: s.extended.batch_reduce_to(op, [(s.run(lambda: x), "cpu")])[
        0
    ],
}


def reduced(ranks, call, op, numbers):
    """The result of each rank: an int, or the error."""

    def rank(comm):
        strategy = ms.MirroredStrategy()
        try:
            result = int(CALLS[call](strategy, op, numbers[comm.rank]))
        except OverflowError as error:
            result = error
        strategy.all_reduce("sum", 1)  # goes on
        return result

    return run_ranks(rank, ranks)


@every("call", CALLS)
@every("ranks", [1, 2, 3, 4])
@every("sign", [1, -1])
def test_what_fits_is_exact(call, ranks, sign):
    numbers = [sign * (MOST // ranks - i) for i in range(ranks)]
    assert reduced(ranks, call, "SUM", numbers) == [sum(numbers)] * ranks


@every("call", CALLS)
@every("number", [2**62, -(2**62) - 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**400, -(10**4000)])
def test_what_does_not_is_an_error_on_every_rank(call, number):
    for numbers in ([number] * 2, [5, number]):
        for error in reduced(2, call, "SUM", numbers):
            assert isinstance(error, OverflowError)
            assert f"an integer of {number.bit_length()} bits" in str(error)
            assert "int64" in str(error)
            assert "float(value)" in str(error)


@every("op", ["MAX", "MIN", "MEAN"])
def test_other_operations_take_all_of_int64(op):
    numbers = [MOST, -MOST - 1]
    want = {"MAX": MOST, "MIN": -MOST - 1, "MEAN": 0}[op]
    assert reduced(2, "all_reduce", op, numbers) == [want] * 2
    assert all(isinstance(e, OverflowError) for e in reduced(2, "all_reduce", op, [2**63, 5]))


@every("numbers", [[3, -4], [3037000499, -3037000499], [0, 1], [-1, 1], [3037000500, 1]])
def test_products(numbers):
    for got in reduced(2, "all_reduce", "PROD", numbers):
        if numbers[0] == 3037000500:
            assert isinstance(got, OverflowError)
        else:
            assert got == math.prod(numbers)


def test_a_product_of_many_ranks_is_refused_without_being_made():
    with pytest.raises(OverflowError):
        check_integer(ReduceOp.PROD, 10**4000, "", 1_000_000)
    for number in (-1, 0, 1):
        check_integer(ReduceOp.PROD, number, "", 1_000_000)


def test_arrays_and_numbers_of_numpy_wrap():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        mine = np.int64(2**62) if comm.rank else np.array(2**62)
        # Who has nothing to count may give a Python number where others give one of NumPy.
        mixed = strategy.all_reduce("sum", np.int64(7) if comm.rank else 0)
        return int(strategy.all_reduce("sum", mine)), int(mixed)

    assert run_ranks(rank, 2) == [(-(2**63), 7)] * 2


def test_numbers_and_means_that_run_returns():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        each = strategy.run(lambda: 2**63 + comm.rank)
        assert strategy.experimental_local_results(each) == (2**63, 2**63 + 1)
        with strategy.scope():
            mean = ms.metrics.Mean()
        strategy.run(lambda: mean.update_state(2**63 - 1))
        return sum(each.values), mean.result()

    assert run_ranks(rank, 2) == [(2**64 + 1, 2.0**63)] * 2


def test_bools_are_no_integers_here():
    def rank(comm):
        with pytest.raises(TypeError, match="is bool"):
            ms.MirroredStrategy().all_reduce("sum", True)

    run_ranks(rank, 2)
