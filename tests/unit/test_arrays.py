"""Conversion of inputs: which become views, which copies, and which are refused."""

from __future__ import annotations

import array
import dataclasses
import decimal
import types

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.arrays import as_array, quiet, restore_kind, spec_text
from mpistrat.errors import LeafTypeError

NUMBERS = ["?", "b", "h", "i", "l", "q", "B", "H", "I", "L", "Q", "e", "f", "d", "g", "F", "D", "G"]


@every("code", NUMBERS)
@every("order", ["=", ">", "<"])
def test_every_number_dtype_comes_in_native_with_its_values(code, order):
    native = np.arange(6).reshape(2, 3).astype(code)
    given = native.astype(np.dtype(code).newbyteorder(order))
    seen = as_array(given)
    assert seen.dtype.isnative
    assert seen.dtype == np.dtype(code)
    assert np.array_equal(seen, native)


def test_bfloat16_comes_in():
    seen = as_array(np.array([1.5, -2], ml_dtypes.bfloat16))
    assert seen.dtype == ml_dtypes.bfloat16
    assert seen.tolist() == [1.5, -2]


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a,
        lambda a: a[::-1],
        lambda a: a[:, ::2],
        lambda a: a.T,
        lambda a: np.broadcast_to(a[0], (5, 4)),
        lambda a: a[:0],
        lambda a: a[0, 0, ...],
        lambda a: np.asfortranarray(a),
    ],
)
def test_a_native_array_of_any_layout_is_not_copied(make):
    given = make(np.arange(12.0).reshape(3, 4))
    seen = as_array(given)
    assert seen.shape == given.shape
    assert seen.strides == given.strides
    assert seen.__array_interface__["data"][0] == given.__array_interface__["data"][0]


@pytest.mark.parametrize("code", NUMBERS)
def test_what_is_not_aligned_comes_in_as_a_copy(code):
    raw = np.zeros(6 * np.dtype(code).itemsize + 1, np.uint8)
    given = raw[1:].view(code).reshape(2, 3)
    given[...] = np.arange(6).reshape(2, 3)
    for layout in (given, given.T, given[:, ::2]):
        seen = as_array(layout)
        assert seen.flags.aligned
        assert seen.dtype == np.dtype(code)
        assert np.array_equal(seen, layout)


def test_read_only_arrays_memmaps_and_subclasses_are_seen_as_they_are(tmp_path):
    class Sub(np.ndarray):
        pass

    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    assert np.shares_memory(as_array(fixed), fixed)
    mapped = np.memmap(tmp_path / "a", np.float32, "w+", shape=(4,))
    mapped[:] = [1, 2, 3, 4]
    assert type(as_array(mapped)) is np.ndarray
    assert as_array(mapped).tolist() == [1, 2, 3, 4]
    sub = np.arange(3.0).view(Sub)
    assert type(as_array(sub)) is np.ndarray
    assert np.shares_memory(as_array(sub), sub)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, "?"),
        (3, "int64"),
        (2.5, "f8"),
        (1j, "c16"),
        (np.float32(1), "f4"),
        (np.int8(1), "i1"),
    ],
)
def test_numbers_come_in_as_arrays_without_dimensions(value, dtype):
    seen = as_array(value)
    assert seen.shape == ()
    assert seen.dtype == np.dtype(dtype)
    assert seen[()] == value


def test_buffers_and_dlpack_come_in():
    class Tensor:
        def __init__(self, array):
            self._array = array

        def __dlpack__(self, **kwargs):
            return self._array.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self._array.__dlpack_device__()

    assert as_array(Tensor(np.arange(3.0))).tolist() == [0, 1, 2]
    assert as_array(memoryview(np.arange(3.0))).tolist() == [0, 1, 2]


def test_pandas_comes_in_if_it_holds_numbers():
    pandas = pytest.importorskip("pandas")
    assert as_array(pandas.Series([1.0, 2.0])).tolist() == [1, 2]
    assert as_array(pandas.DataFrame({"a": [1, 2], "b": [3, 4]})).tolist() == [[1, 3], [2, 4]]
    with pytest.raises(LeafTypeError, match="object"):
        as_array(pandas.Series(["a", "b"], dtype=object))


class Broken:
    def __init__(self, error):
        self.error = error

    def __array__(self, dtype=None, copy=None):
        raise self.error


@pytest.mark.parametrize(
    "value",
    [
        "text",
        b"bytes",
        None,
        object(),
        [1, 2],
        decimal.Decimal(1),
        10**30,
        np.array(["a"]),
        np.array([b"a"]),
        np.array([None]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([1], "m8[s]"),
        np.zeros(2, [("x", "f4")]),
        np.zeros(2, "V4"),
        np.ma.array([1.0, 2.0], mask=[0, 1]),
        np.zeros(2, ml_dtypes.float8_e4m3fn),
        Broken(RuntimeError("not today")),
        Broken(KeyError("weights")),
        Broken(OSError("no file")),
        np.ndarray,
    ],
)
def test_what_cannot_travel_is_refused_by_name(value):
    with pytest.raises(TypeError, match="layers/3/kernel") as caught:
        as_array(value, "layers/3/kernel")
    assert isinstance(caught.value, LeafTypeError)


@pytest.mark.parametrize("value", [2**64, decimal.Decimal(1)])
def test_a_number_without_a_dtype_is_called_one(value):
    with pytest.raises(LeafTypeError, match=rf"a number \({type(value).__name__}\) that fits no"):
        as_array(value)


@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fn", "int4"])  # one is of kind "f"
def test_buffers_are_for_what_can_be_sent(name):
    with pytest.raises(LeafTypeError, match=f"leaf '0' has dtype {name}, which cannot be sent"):
        ms.MirroredStrategy().buffers([np.zeros(2, getattr(ml_dtypes, name))])


class Sparse:
    def toarray(self):
        raise AssertionError("a dense array may be much larger")


def test_a_sparse_matrix_is_told_what_to_give():
    text = (
        r"^leaf 'g' is a sparse matrix \(Sparse\); .* toarray\(\) of it.* mpistrat\.IndexedSlices"
    )
    with pytest.raises(LeafTypeError, match=text):
        as_array(Sparse(), "g")


@dataclasses.dataclass
class Holder:
    x: float


def test_what_is_no_array_and_no_number_is_said_to_be_none():
    wanted = r"^the value is <object .*> \(object\); expected an array or a number\.$"
    with pytest.raises(LeafTypeError, match=wanted):
        as_array(object())
    with pytest.raises(LeafTypeError, match=r"is \{1\} \(set\); expected an array or a number"):
        as_array({1})
    for holder, names in [(Holder(1.0), "vars"), (types.MappingProxyType({"x": 1.0}), "dict")]:
        with pytest.raises(LeafTypeError, match=rf"a number\. Trees are .* give {names}\(\.\.\.\)"):
            as_array(holder)
    gone = memoryview(np.arange(3.0))
    gone.release()
    with pytest.raises(LeafTypeError, match=r"cannot be converted to an array: .*released"):
        as_array(gone)
    assert as_array(array.array("d", [1, 2])).tolist() == [1, 2]
    assert as_array(bytearray(b"\x01\x02")).tolist() == [1, 2]


def test_lists_are_arrays_where_they_are_wanted():
    assert as_array([[1, 2], (3, 4)], accepts_lists=True).tolist() == [[1, 2], [3, 4]]
    ragged = [[1], [1, 2]]
    for make in (ms.Variable, lambda one: ms.Variable([0.0, 0.0]).assign(one)):
        with pytest.raises(LeafTypeError, match=r"'Variable:0' \(list\) cannot .*inhomogen"):
            make(ragged)
    with pytest.raises(LeafTypeError, match="leaf 'indices'"):
        ms.IndexedSlices([1.0, 2.0], ragged)
    with pytest.raises(LeafTypeError, match="leaf 'sample_weight'"):
        ms.metrics.Mean().update_state([1.0, 2.0], ragged)


def test_a_lone_value_is_called_the_value():
    with pytest.raises(LeafTypeError, match="the value is 'text'"):
        as_array("text")


def test_numbers_come_back_as_numbers_and_arrays_as_arrays():
    result = np.array(2.5)
    assert isinstance(restore_kind(result, 1.0), np.float64)
    assert isinstance(restore_kind(result, np.float32(1)), np.float64)
    assert isinstance(restore_kind(result, np.array(1.0)), np.ndarray)
    assert restore_kind(np.ones(3), 1.0).shape == (3,)


def test_a_spec_names_dtype_and_shape():
    assert spec_text(np.zeros((2, 0), ">i2")) == "int16[2,0]"
    assert spec_text(np.zeros((), np.float32)) == "float32[]"


def test_what_is_called_quietly_may_call_quietly():
    with np.errstate(all="raise"):
        found = quiet().run(lambda: quiet().run(np.divide, 1.0, 0.0) + np.float64(1) / 0)
    assert found == np.inf
