"""The comparison sees what it must see."""

from __future__ import annotations

import numpy as np
import pytest

from mpistrat import LockstepError

from .compare import DIFFERENT, EQUAL, WRAPPED, compare
from .patterns import matches
from .recorder import Copies, Each, written, written_error


def tensor(value, dtype="float32", shape=()):
    return {"kind": "Tensor", "dtype": dtype, "shape": list(shape), "value": value}


def replicas(*values):
    return {"kind": "PerReplica", "values": list(values)}


def python(value):
    return {"kind": "py", "type": type(value).__name__, "value": value}


CASES = {
    "equal": (tensor(3.0), np.float32(3), EQUAL),
    "0-d array": (tensor(3.0), np.array(3, np.float32), EQUAL),
    "close": (tensor(3.0), np.float32(3) * np.float32(1 + 5e-7), EQUAL),
    "another value": (tensor(3.0), np.float32(3.0001), DIFFERENT),
    "another dtype": (tensor(3.0), np.float64(3), DIFFERENT),
    "another integer dtype": (tensor(3, "int32"), np.int64(3), DIFFERENT),
    "unsigned": (tensor(3, "uint8"), np.int8(3), DIFFERENT),
    "Python number": (tensor(3, "int32"), 3, EQUAL),
    "Python number of another kind": (tensor(3.0), 3, DIFFERENT),
    "bool is not a number": (python(1), True, DIFFERENT),
    "another shape": (tensor([3.0], shape=[1]), np.float32(3), DIFFERENT),
    "empty of another shape": (tensor([], shape=[0, 2]), np.zeros((0, 3), "f"), DIFFERENT),
    "nan": (tensor("nan"), np.float32("nan"), EQUAL),
    "nan for a number": (tensor(3.0), np.float32("nan"), DIFFERENT),
    "per replica": (replicas(tensor(1.0), tensor(2.0)), Each(np.float32([1, 2])), EQUAL),
    "replicas swapped": (replicas(tensor(1.0), tensor(2.0)), Each(np.float32([2, 1])), DIFFERENT),
    "too few replicas": (replicas(tensor(1.0), tensor(1.0)), Each(np.float32([1])), DIFFERENT),
    "not wrapped": (replicas(tensor(1.0), tensor(1.0)), np.float32(1), DIFFERENT),
    "mirrored": (replicas(tensor(1.0), tensor(1.0)), Copies(np.float32([1, 1])), DIFFERENT),
    "wrapped": (tensor(1.0), Each(np.float32([1, 1])), WRAPPED),
    "wrapped but different": (tensor(1.0), Each(np.float32([1, 2])), DIFFERENT),
    "list for a tuple": ({"kind": "tuple", "items": [python(1)]}, [1], DIFFERENT),
    "another key": (
        {"kind": "dict", "type": "dict", "items": {"a": python(1)}},
        {"b": 1},
        DIFFERENT,
    ),
    "wrapped None": (python(None), Each((None, None)), DIFFERENT),
    "None for a number": (python(0), None, DIFFERENT),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    recorded, ours, status = CASES[name]
    assert compare({"ok": recorded}, {"ok": written(ours)})[0] == status


def raised(*errors):
    return {"error": [written_error(error) for error in errors]}


def recorded(kind, message=""):
    return {"error": {"type": kind, "message": message}}


def test_errors_are_equal_if_every_rank_raises_one_of_the_right_class():
    want = recorded("ZeroDivisionError", "in merge_fn")
    good = ZeroDivisionError("in merge_fn")
    assert compare(want, raised(good, good))[0] == EQUAL
    assert compare(want, raised(good, ValueError("in merge_fn")))[0] == DIFFERENT
    assert compare(want, raised(good, ZeroDivisionError("elsewhere")))[0] == DIFFERENT
    assert compare(want, {"ok": written(1)})[0] == DIFFERENT
    assert compare(want, {"mixed": ["1", "ValueError()"]})[0] == DIFFERENT


def test_value_is_not_equal_if_ranks_differ_or_raise():
    want = {"ok": tensor(1.0)}
    assert compare(want, {"ranks": [written(1.0), written(2.0)]})[0] == DIFFERENT
    assert compare(want, raised(ValueError(), ValueError()))[0] == DIFFERENT


def test_lockstep_error_stands_for_no_other_error_by_being_a_runtime_error():
    want = recorded("RuntimeError", "Need to be inside")
    assert compare(want, raised(RuntimeError()))[0] == EQUAL
    assert compare(want, raised(LockstepError()))[0] == DIFFERENT


def test_error_that_no_row_names_is_different():
    assert compare(recorded("CancelledError"), raised(StopIteration()))[0] == DIFFERENT


def test_patterns():
    assert matches("a/{b|c_*}/d", "a/b/d")
    assert matches("a/{b|c_*}/d", "a/c_x/d")
    assert not matches("a/{b|c_*}/d", "a/cx/d")
    assert matches("a/axis[0, 1]", "a/axis[0, 1]")
    assert not matches("a/axis[0, 1]", "a/axis0")
    assert not matches("a/b", "a/bc")
