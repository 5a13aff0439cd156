"""Differences of run, merge_call, all_reduce, all_gather and reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..recorder import Each
from .kinds import Differs, Ranks, copies, f32, fails, same, upto


def _sum(dtype: Any) -> Callable[[int], Any]:
    """Return what all_reduce_dtypes' values add up to."""
    count = lambda n: upto(n) + n  # noqa: E731
    return lambda n: Each([np.array([count(n) + n, 2 * count(n) + n]).astype(dtype)] * n)


def _mean(dtype: Any) -> Callable[[int], Any]:
    return lambda n: Each([np.array([(n + 3) / 2, n + 2]).astype(dtype)] * n)


_D8 = "the recorded collective knows few dtypes"
_SUMS = {
    f"all_reduce_dtypes/SUM_{name}": Differs("D8", _D8, _sum(name))
    for name in ("int8", "uint8", "int16", "uint32", "uint64", "complex64", "complex128")
}
_MEANS = {
    f"all_reduce_dtypes/MEAN_{name}": Differs("D8", _D8, _mean(result))
    for name, result in {
        "int8": "float32",
        "uint8": "float32",
        "int16": "float32",
        "uint32": "float64",
        "uint64": "float64",
        "complex64": "complex64",
        "complex128": "complex128",
    }.items()
}


def _int_nest(second: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda n: [Each([np.array(upto(n) + n, np.int32)] * n), Each([second(n)] * n)]


def _matrix(n: int) -> Any:
    return f32(np.arange(6).reshape(2, 3)), [100.0 * i for i in range(n)]


def _joined(axis: int) -> Callable[[int], Any]:
    def joined(n: int) -> Any:
        matrix, offsets = _matrix(n)
        return Each([np.concatenate([matrix + f32(o) for o in offsets], axis)] * n)

    return joined


def _over_axes(op: str, axis: Any) -> Callable[[int], Any]:
    def folded(n: int) -> Any:
        whole = np.stack([np.arange(6.0).reshape(2, 3) + 10 * i for i in range(n)])
        axes = (0, *(a + 1 for a in axis))
        return f32(whole.sum(axes) if op == "SUM" else whole.mean(axes))

    return folded


RUNS = {
    "run_basic/types_inside": Differs(
        "H1", "the names of the types of two numbers", lambda n: (same("int")(n), same("int")(n))
    ),
    "run_nests/type_mismatch_tensor_list": Differs(
        "D11", "a leaf here and a list there", fails("LockstepError")
    ),
    "run_errors/replicas_that_ran_when_0_raised": Differs(
        "H3", "each replica has started", lambda n: Ranks([i] for i in range(n))
    ),
    "merge_call_args/local_results_of_args (PerReplica; plain 3; [PerReplica,7]; [1,2])": Differs(
        "D2",
        "a plain 3 is one value per replica",
        lambda n: [
            tuple(f32(i) for i in range(n)),
            (3,) * n,
            tuple([f32(i), 7] for i in range(n)),
            ([1, 2],) * n,
        ],
    ),
    "merge_call_args/closure_used_is_that_of_replica": Differs(
        "D1", "each replica finds its own number", lambda n: Ranks([i] for i in range(n))
    ),
    "merge_call_errors/caught_types_in_replicas": Differs(
        "D12", "each replica sees the error itself", lambda n: ["ZeroDivisionError"]
    ),
    "merge_call_errors/nested_tf_function": Differs(
        "H4", "there is no graph that merge_call could be caught in", copies(1.0)
    ),
}
ALL_REDUCE = {
    "all_reduce_basic/bad_op_MAX": Differs(
        "D9", "the maximum of 0 to n - 1", lambda n: copies(n - 1)(n)
    ),
    "all_reduce_basic/{bad_op_int|op_VariableAggregation}": Differs(
        "D17", "what is no ReduceOp is silently SUM there", fails("TypeError")
    ),
    "all_reduce_basic/python_float": Differs(
        "H2", "n times 1.5", lambda n: same(np.float64(1.5 * n))(n)
    ),
    "all_reduce_basic/python_int": Differs("H2", "n times 2", lambda n: same(np.int64(2 * n))(n)),
    "all_reduce_basic/python_float_per_replica": Differs(
        "H2", "the sum of 1.5 + i", lambda n: same(np.float64(1.5 * n + upto(n)))(n)
    ),
    "all_reduce_basic/same_tensor_object_on_all_replicas": Differs(
        "D17", "one object on all replicas is counted once there", lambda n: copies(4.0 * n)(n)
    ),
    "{all_reduce_basic|all_gather_axes}/default_strategy*": Differs(
        "D22", "an oversight in a job of several ranks", fails("ContextError")
    ),
    "all_reduce_basic/empty_list": Differs("H2", "nothing to reduce", lambda n: []),
    "all_reduce_basic/return_type_in_replica": Differs("H1", "the name of a type", same("float32")),
    **_SUMS,
    **_MEANS,
    "all_reduce_int_nests/two_int32*": Differs(
        "D17",
        "trees with int32 fail there",
        _int_nest(lambda n: np.array(upto(n) + 2 * n, np.int32)),
    ),
    "all_reduce_int_nests/int32_and_float32*": Differs(
        "D17", "trees with int32 fail there", _int_nest(lambda n: f32(upto(n)))
    ),
    "all_reduce_int_nests/int64_and_float32@function": Differs(
        "D17",
        "two dtypes cannot be packed there",
        lambda n: [Each([np.array(upto(n))] * n), Each([f32(upto(n))] * n)],
    ),
    "all_reduce_int_nests/uint8_overflow_sum*": Differs(
        "D8", "wraps as uint8 does", lambda n: same(np.uint8((200 * n + upto(n)) % 256))(n)
    ),
    "two_strategies_in_one_process/third_f64": Differs(
        "D17",
        "two strategies disturb each other there",
        lambda n: same(np.array(float(upto(n))))(n),
    ),
    "two_strategies_in_one_process/first_again_f32": Differs(
        "D17", "two strategies disturb each other there", lambda n: copies(upto(n))(n)
    ),
}
ALL_GATHER = {
    "all_gather_axes/python_list_is_a_nest_of_scalars": Differs(
        "D13", "numbers have no axis to be joined along", fails("AxisError")
    ),
    "all_gather_axes/dtype_uint8": Differs(
        "D8", "any number", lambda n: same(np.arange(1, n + 1, dtype=np.uint8))(n)
    ),
    "all_gather_axes/dtype_bool": Differs(
        "D8", "bool too", lambda n: same(np.array([True] * n))(n)
    ),
    "all_gather_axes/dtype_complex64": Differs(
        "D8", "any number", lambda n: same(np.arange(1, n + 1, dtype=np.complex64))(n)
    ),
    "all_gather_negative_axis_float/float_axis-1": Differs("D13", "the last axis", _joined(1)),
    "all_gather_negative_axis_float2/float_axis-2": Differs("D13", "the first axis", _joined(0)),
    "all_gather_all_empty_float/__process__": Differs(
        "D13", "the recorded process died of a segmentation fault", same(f32(np.zeros((0, 2))))
    ),
}
REDUCE = {
    "reduce_axis_none/SUM_python_float_per_replica": Differs(
        "H2", "the sum of 0 to n - 1", lambda n: np.float64(upto(n))
    ),
    "reduce_axis_none/plain_np_zero{|s}_SUM": Differs(
        "D3", "zero is a plain value like any other", fails("StructureError")
    ),
    "reduce_axis_none/run_constant_5_SUM": Differs(
        "D2", "n values of 5", lambda n: np.int64(5 * n)
    ),
    "reduce_axis_none/run_literal_float_SUM": Differs(
        "D2", "n values of 2.5", lambda n: np.float64(2.5 * n)
    ),
    "reduce_axis_none/bad_op": Differs("D9", "the maximum of ones", lambda n: f32(1.0)),
    "reduce_axis_none/result_type": Differs("H1", "the name of a type", lambda n: "float32"),
    "reduce_axis/SUM_axis[0, 1]": Differs(
        "D17", "a list of axes cannot be a key of a cache there", _over_axes("SUM", (0, 1))
    ),
    "reduce_axis/MEAN_axis[0, 1]": Differs(
        "D17", "a list of axes cannot be a key of a cache there", _over_axes("MEAN", (0, 1))
    ),
    "reduce_axis/{SUM|MEAN}_axis_float": Differs(
        "D17", "0.0 found what 0 had left in a cache there", fails("TypeError")
    ),
    "reduce_axis/SUM_nest_axis0": Differs(
        "D3", "trees are allowed", lambda n: {"a": _over_axes("SUM", (0,))(n)}
    ),
    "reduce_axis/MEAN_nest_axis0": Differs(
        "D3", "trees are allowed", lambda n: {"a": _over_axes("MEAN", (0,))(n)}
    ),
    "reduce_axis/MEAN_uint8_axis0": Differs("D8", "the sum wraps there", lambda n: np.float32(100)),
    "local_results/mirrored_variable_types": Differs(
        "H1", "the name of a type", lambda n: ["Variable"] * n
    ),
}
