"""The dtypes in which values are sent and returned.

==============================  =========  =======================  =====================
dtype                           travels    SUM, PROD, MIN, MAX      MEAN comes back
==============================  =========  =======================  =====================
float16, bfloat16               float32    as it came               as it came
float32, float64, longdouble    itself     as it came               as it came
complex                         itself     as it came; no MIN, MAX  as it came
integers of 32 and 64 bits      itself     as it came, may wrap     float64, never wraps
integers of 8 and 16 bits       32 bits    as it came, may wrap     float32, never wraps
bool                            uint8      MIN and ALL: all; MAX    refused
                                           and ANY: any; as it came
==============================  =========  =======================  =====================

For MEAN every integer is sent as float64. Floats of 16 bits that are reduced in place are not
converted before: the loop widens them as it reads them, and the results have the same bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, is_bfloat16, label
from mpistrat.errors import LeafTypeError
from mpistrat.kernels.ops import ReduceOp

DType = np.dtype[Any]
_INT64 = np.dtype(np.int64)


class WireType(NamedTuple):
    """How one leaf travels.

    Attributes:
      wire: The dtype in which it is reduced.
      result: The dtype in which it comes back.
    """

    wire: DType
    result: DType


@functools.lru_cache(maxsize=256)
def _find_wire_type(op: ReduceOp, dtype: DType) -> WireType | str:
    if dtype.kind == "b" and "b" in op._reduction.kinds:
        return WireType(np.dtype(np.uint8), dtype)
    if dtype.kind == "b":
        return (
            f"is bool, of which {op.value} is ambiguous. Cast it to count, for example to int32; "
            "MAX of bool tells whether any is true, and MIN whether all are."
        )
    if dtype.kind not in op._reduction.kinds and op._reduction.kinds == "b":
        return f"is {dtype.name}; {op.value} is for bool. Give a condition, such as value > 0."
    if dtype.kind not in op._reduction.kinds:
        subject = "complex numbers have" if dtype.kind == "c" else "numbers of this kind have"
        return f"is {dtype.name}; {subject} no {op.value}."
    if is_bfloat16(dtype) or dtype == np.float16:
        return WireType(np.dtype(np.float32), dtype)
    if dtype.kind in "iu" and op is ReduceOp.MEAN:
        return WireType(
            np.dtype(np.float64), np.dtype(np.float64 if dtype.itemsize >= 4 else np.float32)
        )
    if dtype.kind in "iu" and dtype.itemsize < 4 and not op._reduction.is_idempotent:
        # Open MPI's vector units saturate small integers (open-mpi/ompi#8045) where others wrap.
        return WireType(np.dtype(f"{dtype.kind}4"), dtype)
    return WireType(dtype, dtype)


def choose_wire_type(op: ReduceOp, dtype: DType, path: str = "") -> WireType:
    """Return how a leaf of `dtype` travels under `op`.

    Raises:
      LeafTypeError: It cannot be reduced with `op`; names the leaf at `path`.

    Example:
      >>> choose_wire_type(ReduceOp.MEAN, np.dtype(np.int32)).result
      dtype('float64')
    """
    wire_or_reason = _find_wire_type(op, dtype)
    if isinstance(wire_or_reason, str):
        raise LeafTypeError(f"{op.value}: {label(path)} {wire_or_reason}")
    return wire_or_reason


def check_integer(
    op: ReduceOp, number: int, path: str, rank_count: int, dtype: DType = _INT64
) -> None:
    """Raise unless `number`, given by each of so many ranks, has a result that does not wrap.

    Not collective: each rank checks its own number against its share of the dtype's range. If no
    rank raises, the result is exact. Arrays and NumPy's numbers wrap, as in NumPy.

    Args:
      op: The operation.
      number: A Python integer.
      path: The name of the leaf, for the error.
      rank_count: How many ranks there are.
      dtype: The integers that it is reduced as.

    Raises:
      OverflowError: It does not fit, or the result might not.

    Example:
      >>> check_integer(ReduceOp.SUM, 2**62 - 1, "", rank_count=2)
    """
    limits, worst = np.iinfo(dtype), number
    if op is ReduceOp.SUM:
        worst *= rank_count
    elif op is ReduceOp.PROD and (number.bit_length() - 1) * rank_count < limits.bits:
        worst **= rank_count
    elif op is ReduceOp.PROD:
        worst = limits.max + 1  # without a power of thousands of digits
    if limits.min <= worst <= limits.max:
        return
    raise OverflowError(
        f"{op.value}: {label(path)} is an integer of {number.bit_length()} bits. Python integers "
        f"are reduced as {dtype.name}, in which the {op.value} of {rank_count} such numbers, one "
        "of each rank, does not fit. Give float(value), or an array of another dtype, which wraps."
    )


def needs_ordered_integers(op: ReduceOp, dtype: DType) -> bool:
    """Return whether a leaf must travel as ordered integers, because MPI's reduction loses NaN."""
    return op in (ReduceOp.MIN, ReduceOp.MAX) and dtype in (np.float32, np.float64)


def encode_order(array: Array, op: ReduceOp) -> Array:
    """Return integers in the order of the floats; a NaN is beyond every number, in `op`'s sense.

    Flipping the magnitude bits of negative floats makes their bit patterns ascend
    (Herf, "Radix Tricks", 2001). MPI_MAX and MPI_MIN may drop a NaN; on these they cannot.
    """
    ints = np.dtype(f"i{array.dtype.itemsize}")
    info = np.iinfo(ints)
    bits = array.reshape(-1).view(ints)
    keys = np.where(bits < 0, bits ^ info.max, bits)
    keys[np.isnan(array.reshape(-1))] = info.max if op is ReduceOp.MAX else info.min
    return keys.reshape(array.shape)


def decode_order(keys: Array, op: ReduceOp) -> Array:
    """Return the floats that `encode_order` made integers of."""
    info = np.iinfo(keys.dtype)
    missing = keys == (info.max if op is ReduceOp.MAX else info.min)
    bits = np.where(keys < 0, keys ^ info.max, keys).reshape(-1)
    floats = bits.view(np.dtype(f"f{keys.dtype.itemsize}")).reshape(keys.shape)
    floats[missing] = np.nan
    return floats
