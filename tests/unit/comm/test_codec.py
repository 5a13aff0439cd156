"""Values as bytes: what goes in comes out, of the same type and bits."""

from __future__ import annotations

import enum
import math

import ml_dtypes
import numpy as np
import pytest
from every import every

from mpistrat.comm.serialization import decode, encode, pack, unpack
from mpistrat.errors import LeafTypeError


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    pass


CODES = ["?", "b", "B", "h", "H", "i", "I", "l", "L", "e", "f", "d", "g", "F", "D", "G"]
CODES += ["M8[ns]", "m8[s]", "U3", "S2", ">f8", ">i4", ml_dtypes.bfloat16]
CODES += [ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn]  # whose kinds are "f" and "V"


@every("is_unlimited", [True, False])
@every("dtype", CODES)
@every("shape", [(), (3,), (0,), (0, 3), (2, 2)])
def test_arrays_and_their_scalars(dtype, shape, is_unlimited):
    array = np.ones(shape, np.int8).astype(dtype)
    kind, data = encode(array, is_unlimited)
    if kind == b"o":
        assert not is_unlimited
        return
    again = decode(kind, data)
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tobytes() == array.tobytes()
    assert again.flags.writeable
    if array.size:
        scalar = array.reshape(-1)[0]
        back = decode(*encode(scalar, True))
        assert back == scalar
        assert isinstance(back, str) if dtype == "U3" else type(back) is type(scalar)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -(2**70),
        1.5,
        -0.0,
        math.inf,
        "",
        "text|with|bars",
        "ä" * 300,
        2j,
        b"b",
        Colour.RED,
        Name("text"),
        np.str_("text"),
        np.bytes_(b"b"),
        np.float64(1.5),
    ],
    ids=repr,
)
def test_python_values(value):
    again = decode(*encode(value, True))
    assert again == value
    assert type(again) is type(value)
    if isinstance(value, float):
        assert math.copysign(1, again) == math.copysign(1, value)


def test_integers_have_any_number_of_digits():
    for value in (10**5000, -(16**4000)):
        assert decode(*encode(value, True)) == value


def test_a_class_of_arrays_is_the_same_on_all_ranks():
    # `*` of matrices is another operation: what a rank has and what it is sent must not differ.
    matrix = decode(*encode(np.array([[1, 2]]).view(np.matrix), True))
    assert (type(matrix), matrix.tolist()) == (np.matrix, [[1, 2]])
    assert encode(np.ones((1, 1)).view(np.matrix), False) == (b"o", b"")


def test_nan_and_any_object():
    assert math.isnan(decode(*encode(math.nan, True)))
    assert decode(*encode({"a": {1, 2}}, True)) == {"a": {1, 2}}
    assert decode(*encode(np.array([None, "x"], object), True)).tolist() == [None, "x"]
    record = np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])
    assert decode(*encode(record, True)).tolist() == record.tolist()


def test_what_is_large_or_has_to_be_pickled_is_only_noted():
    for value in (np.zeros(100), {"a": 1}, "x" * 100, object()):
        assert encode(value, False) == (b"o", b"")


def test_numbers_are_never_pickled():
    for value in (
        np.zeros(1000),
        np.float32(1),
        1,
        2.5,
        -0.0j,
        True,
        np.zeros(3, ml_dtypes.bfloat16),
    ):
        assert encode(value, True)[0] != b"p"


def test_what_cannot_be_pickled_is_a_type_error():
    with pytest.raises(LeafTypeError, match="function"):
        encode(lambda: 0, True)


def test_the_reason_is_a_sentence_of_its_own():
    class Held:
        def __reduce_ex__(self, protocol):
            raise TypeError("it holds a file.")

    with pytest.raises(LeafTypeError, match=r"other ranks: it holds a file\. Use arrays"):
        encode(Held(), is_unlimited=True)


def test_layouts_travel_as_values():
    array = np.arange(12.0).reshape(3, 4)
    for given in (array.T, array[::-1, ::2], np.broadcast_to(array[0], (2, 4))):
        assert np.array_equal(decode(*encode(given, True)), given)


@pytest.mark.parametrize("sizes", [[], [0], [254, 255, 256, 70000], [1] * 300])
def test_pack_and_unpack(sizes):
    entries = [(b"x", bytes([size % 251]) * size) for size in sizes]
    assert unpack(pack(entries)) == entries
