"""Every row of the fault table has a test that exists, or a reason."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
rows = importlib.import_module("rows")


@pytest.mark.parametrize("row", rows.ROWS)
def test_a_row_has_a_test_or_a_reason(row):
    own, *others = rows.shown_by(row)
    if row in rows.REASONS:
        assert not rows.exists(own)
        assert not others
        assert len(rows.REASONS[row]) > 60
        return
    missing = [test for test in others if not rows.exists(test)]
    assert not missing
    if not others:
        assert rows.exists(own), f"{row} wants a test named {own}..., or a reason in rows.py"


def test_b23_no_operation_of_our_own_runs_inside_mpi():
    """An exception inside a reduction of MPI would end the process: all folds are MPI's or ours."""
    package = rows.ROOT / "mpistrat"
    texts = {path.name: path.read_text() for path in package.rglob("*.py")}
    assert "Allreduce" in texts["mpi.py"]
    assert not [name for name, text in texts.items() if "Op.Create(" in text]


def test_the_table_names_rows_only_and_gives_at_most_eight_reasons():
    assert len(rows.ROWS) == 86
    assert {*rows.ELSEWHERE, *rows.REASONS} <= set(rows.ROWS)
    assert not rows.ELSEWHERE.keys() & rows.REASONS.keys()
    assert len(rows.REASONS) <= 8


def test_a_test_that_is_not_there_is_told_from_one_that_is():
    assert rows.exists("tests/faults/test_rows.py::test_a_row_has_a_test_or_a_reason")
    assert rows.exists("tests/faults/test_rows.py::test_a_row_")
    assert not rows.exists("tests/faults/test_rows.py::test_a_row")
    assert not rows.exists("tests/faults/test_rows.py::test_a_row_has_a_test_or_a_reason_")
    assert not rows.exists("tests/faults/test_missing.py::test_a_row_")
