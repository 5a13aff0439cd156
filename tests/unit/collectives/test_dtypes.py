"""Ordered integers: as NumPy orders floats, with NaN in the way of both MIN and MAX."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.collectives.dtypes import (
    choose_wire_type,
    decode_order,
    encode_order,
    needs_ordered_integers,
)
from mpistrat.errors import LeafTypeError
from mpistrat.kernels.ops import ReduceOp

TINY = np.finfo("f4").tiny
SPECIAL = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1, -1, TINY / 2, -TINY / 2, TINY, 3e38]


@pytest.mark.parametrize("code", ["f4", "f8"])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("shape", [(-1,), (1, -1), ()], ids=str)
def test_there_and_back(code, op, shape):
    values = np.array(SPECIAL, code)
    values = values[6].reshape(()) if shape == () else values.reshape(shape)
    back = decode_order(encode_order(values, op), op)
    assert back.dtype == code
    assert back.shape == values.shape
    assert np.array_equal(back, values, equal_nan=True)
    kept = ~np.isnan(values)
    assert np.array_equal(np.signbit(back)[kept], np.signbit(values)[kept])


@pytest.mark.parametrize("code", ["f4", "f8"])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_every_pair_folds_as_in_numpy(code, op):
    fold = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}[op]
    a, b = np.meshgrid(np.array(SPECIAL, code), np.array(SPECIAL, code))
    keys = fold(encode_order(a, op), encode_order(b, op))
    assert np.array_equal(decode_order(keys, op), fold(a, b), equal_nan=True)


def test_random_bits_keep_their_order():
    bits = np.random.default_rng(0).integers(-(2**31), 2**31, 20000).astype("i4")
    floats = bits.view("f4")
    floats = floats[~np.isnan(floats)]
    keys = encode_order(floats, ReduceOp.MAX)
    assert np.array_equal(
        np.argsort(keys, kind="stable"), np.lexsort((~np.signbit(floats), floats))
    )


def test_which_dtypes_travel_so():
    assert "".join(c for c in "fdgiF" if needs_ordered_integers(ReduceOp.MAX, np.dtype(c))) == "fd"
    assert not needs_ordered_integers(ReduceOp.SUM, np.dtype("f8"))


@pytest.mark.parametrize("code", ["b", "H", "i", "Q", "f", "d", "g"])
def test_identities_change_nothing(code):
    values = np.array([0, 1, 3], code)
    folds = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
    for name, fold in folds.items():
        assert np.array_equal(
            fold(values, ReduceOp(name)._reduction.identity(np.dtype(code))), values
        )


def test_refusals_name_operation_leaf_and_advice():
    with pytest.raises(LeafTypeError, match=r"SUM: leaf 'a/b' is bool.*Cast"):
        choose_wire_type(ReduceOp.SUM, np.dtype(bool), "a/b")
    with pytest.raises(LeafTypeError, match=r"MAX: the value is complex64"):
        choose_wire_type(ReduceOp.MAX, np.dtype("c8"))


def test_an_out_in_another_byte_order_is_told_to_be_that():
    out = np.zeros(3, np.dtype(np.float64).newbyteorder())
    strategy = ms.MirroredStrategy()
    with pytest.raises(LeafTypeError, match=r"float64\[3\], in the byte order of this machine"):
        strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(3), out=out))
