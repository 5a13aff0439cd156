"""One test for all combinations names each that fails."""

from __future__ import annotations

import os

import pytest
from every import Failures, every


@every("a", [1, 2, 3])
@every(("b", "c"), [("x", len), ("y", str)])
def multiplied(a, b, c):
    assert a != 2 or b != "y", f"wrong for {a}"


def test_every_combination_that_fails_is_named():
    @every("size", range(6))
    @every("kind", "ab")
    def broken(size, kind):
        assert size < 2 or kind == "a", "is wrong"
        if size == 5:
            raise ValueError("five")

    with pytest.raises(Failures) as caught:
        broken()
    assert list(caught.value.errors) == [
        *("size=2, kind='b'", "size=3, kind='b'", "size=4, kind='b'"),
        *("size=5, kind='a'", "size=5, kind='b'"),
    ]
    text = str(caught.value)
    assert text.startswith("5 combinations failed")
    assert all(name in text for name in caught.value.errors)
    assert "in broken" in text  # where
    assert "ValueError: five" in text
    with pytest.raises(Failures, match="a=2, b='y', c=str"):
        multiplied()


@every("value", ["1", "2"])
@every("other", ["3", "4"])
def test_each_has_patches_and_a_directory_of_its_own(value, other, monkeypatch, tmp_path, request):
    assert "EVERY_TEST" not in os.environ
    monkeypatch.setenv("EVERY_TEST", value)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text(other)
    assert request.node.name == "test_each_has_patches_and_a_directory_of_its_own"


def test_it_is_skipped_if_all_are():
    @every("n", [1, 2])
    def skip_above_limit(n):
        if n > limit:
            pytest.skip("too large")

    limit = 1
    skip_above_limit()
    limit = 0
    with pytest.raises(pytest.skip.Exception):
        skip_above_limit()


def test_a_test_whose_time_is_up_goes_on_with_no_other():
    tried = []

    @every("n", [1, 2])
    def hangs(n):
        tried.append(n)
        pytest.fail("Timeout (>120.0s) from pytest-timeout.")

    with pytest.raises(pytest.fail.Exception, match=r"n=1: Timeout \(>120"):
        hangs()
    assert tried == [1]


def test_what_is_no_argument_is_refused():
    with pytest.raises(AssertionError, match="has not"):
        every("m", [1])(lambda n: None)
