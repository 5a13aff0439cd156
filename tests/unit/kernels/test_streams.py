"""Copies past the caches: the bytes of NumPy's, wherever they begin and end, and none beside."""

from __future__ import annotations

import numpy as np
import pytest

from mpistrat.kernels import elementwise


@pytest.fixture(params=["compiled", "twin"])
def form(request, monkeypatch):
    kernel = elementwise._copy
    monkeypatch.setattr(
        kernel, "_run", kernel.compiled() if request.param == "compiled" else kernel.reference
    )


@pytest.fixture
def short(monkeypatch):
    """Let arrays of any size go past the caches."""
    monkeypatch.setattr(elementwise, "_MIN_STREAMED_NBYTES", 64)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 1000, 4096])
def test_exactly_these_bytes_are_copied(size, short, form):
    value = np.random.default_rng(size).integers(0, 256, size + 64, np.uint8)
    for offset in range(64):
        room = np.full(size + 256, 7, np.uint8)
        first = 64 + offset
        elementwise.copy_to(room[first : first + size], value[offset : offset + size])
        want = np.full(size + 256, 7, np.uint8)
        want[first : first + size] = value[offset : offset + size]
        np.testing.assert_array_equal(room, want)


@pytest.mark.parametrize("dtype", ["?", "i1", "f2", ">f4", "f8", "c16", "g"])
def test_dtypes_and_layouts(dtype, short, form):
    value = np.random.default_rng(0).integers(0, 2, (30, 40)).astype(dtype)
    for given in (value, value.T, value[::-1], value[:, ::2], np.asfortranarray(value)):
        for to in (np.zeros(given.shape, dtype), np.zeros(given.shape[::-1], dtype).T):
            elementwise.copy_to(to, given)
            np.testing.assert_array_equal(to, given)


def test_other_dtypes_are_converted_and_overlap_is_seen(short, form):
    to = np.zeros(100, np.float32)
    elementwise.copy_to(to, np.arange(100))
    np.testing.assert_array_equal(to, np.arange(100))
    both = np.arange(200.0)
    elementwise.copy_to(both[10:110], both[:100])
    np.testing.assert_array_equal(both[10:110], np.arange(100.0))


def test_a_value_may_be_read_only(short, form):
    value = np.arange(1000.0)
    value.flags.writeable = False
    to = np.zeros(1000)
    elementwise.copy_to(to, value)
    np.testing.assert_array_equal(to, value)
