"""The names that type checkers see are those that programs get."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import mpistrat as ms

STUB = Path(ms.__file__).with_suffix(".pyi")


def test_the_stub_has_every_public_name_from_where_it_is():
    told = {"__version__"}
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name, "type checkers take others for private"
                assert getattr(ms, alias.name) is getattr(
                    importlib.import_module(node.module), alias.name
                )
                told.add(alias.name)
    assert sorted(told) == ms.__all__ == dir(ms)


def test_a_name_that_is_missing_is_missing():
    assert not hasattr(ms, "nonsense")
    assert (STUB.parent / "py.typed").exists()
