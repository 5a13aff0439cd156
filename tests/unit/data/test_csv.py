"""Columns of CSV files: dtypes, the places of errors, and what ranks make of them."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import run_ranks


@pytest.fixture
def write(tmp_path):
    """Write a file, and return its path."""

    def write(text, encoding="utf-8"):
        path = tmp_path / "rows.csv"
        path.write_bytes(text.encode(encoding))
        return path

    return write


def columns_of(dataset):
    rows = [*dataset]
    return {name: [row[name].item() for row in rows] for name in (rows[0] if rows else ())}


def dtypes_of(dataset):
    return {name: spec.dtype for name, spec in dataset.element_spec.items()}


class TestInferred:
    @pytest.mark.parametrize(
        ("cells", "dtype", "values"),
        [
            (["1", "-2", " 3 "], "int64", [1, -2, 3]),
            (["1", "2.5", "1e3"], "float64", [1.0, 2.5, 1000.0]),
            (["1", "inf", "2"], "float64", [1.0, np.inf, 2.0]),
            (["1", "two", ""], "<U3", ["1", "two", ""]),
            (["9223372036854775807", "0"], "int64", [2**63 - 1, 0]),
            (["9223372036854775808", "0"], "<U19", ["9223372036854775808", "0"]),
            (["1_000", "2"], "<U5", ["1_000", "2"]),
            (["", ""], "<U1", ["", ""]),
            (["true", "false"], "<U5", ["true", "false"]),
        ],
    )
    def test_numbers_and_texts(self, cells, dtype, values, write):
        lines = [f"{cell},0" for cell in cells]
        dataset = ms.Dataset.from_csv(write("\n".join(["a,b", *lines])))
        assert dtypes_of(dataset) == {"a": np.dtype(dtype), "b": np.dtype(np.int64)}
        assert columns_of(dataset)["a"] == values

    def test_an_empty_cell_of_numbers_is_nan(self, write):
        column = columns_of(ms.Dataset.from_csv(write("a,b\n1,2\n,3\n")))
        assert column["a"][0] == 1.0 and np.isnan(column["a"][1]) and column["b"] == [2, 3]


@pytest.mark.parametrize(
    ("dtype", "cells", "values"),
    [
        ("float32", ["0.5", ""], [0.5, np.nan]),
        ("int8", ["127", "-128"], [127, -128]),
        ("uint8", ["255", "0"], [255, 0]),
        (bool, ["True", "0"], [True, False]),
        (str, ["007", "1"], ["007", "1"]),
        ("U3", ["007", "1"], ["007", "1"]),
    ],
)
def test_dtypes_by_argument(dtype, cells, values, write):
    path = write("".join(f"{cell},x\n" for cell in ["a", *cells]))
    dataset = ms.Dataset.from_csv(path, dtypes={"a": dtype})
    found = dtypes_of(dataset)["a"]
    assert found == np.dtype(dtype) or (dtype is str and found.kind == "U")
    np.testing.assert_array_equal(columns_of(dataset)["a"], values)


def test_columns_names_delimiter_and_encoding(write):
    path = write("1;2;é\n3;4;ü\n", "latin-1")
    dataset = ms.Dataset.from_csv(
        path, names=["a", "b", "c"], columns=["c", "a"], delimiter=";", encoding="latin-1"
    )
    assert columns_of(dataset) == {"c": ["é", "ü"], "a": [1, 3]}


def test_quotes_marks_and_empty_lines(write):
    text = '\ufeffname, n\r\n"Smith, ""J""",1\r\n\r\n"two\nlines",2\r\n'
    dataset = ms.Dataset.from_csv(write(text))
    assert columns_of(dataset) == {"name": ['Smith, "J"', "two\nlines"], "n": [1, 2]}


def test_a_file_without_rows(write):
    dataset = ms.Dataset.from_csv(write("a,b\n"), dtypes={"a": int, "b": float})
    assert dataset.cardinality() == 0
    assert dtypes_of(dataset) == {"a": np.dtype(int), "b": np.dtype(float)}


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("a,b\n1,2\n3\n", {}, r"rows.csv, line 3: 1 cells; expected 2, .* 'a', 'b'"),
        ("a,b\n1,2,3\n", {}, "line 2: 3 cells; expected 2"),
        ("a,b\n1,2\nx,3\n", {"dtypes": {"a": int}}, "line 3, column 'a': 'x'; .* integer of int64"),
        ("a,b\n1,2\n,3\n", {"dtypes": {"a": int}}, "line 3, column 'a': an empty cell"),
        ("a\n1\n1.5\n", {"dtypes": {"a": "i4"}}, "line 3, column 'a': '1.5'; .* of int32"),
        ("a\n1\n300\n", {"dtypes": {"a": "i1"}}, "line 3, column 'a': '300'; .* of int8"),
        ("a\n-1\n", {"dtypes": {"a": "u1"}}, "line 2, column 'a': '-1'"),
        ("a\n1.0\none\n", {"dtypes": {"a": float}}, "line 3, column 'a': 'one'; .* float64 number"),
        ("a\nyes\n", {"dtypes": {"a": bool}}, "line 2, column 'a': 'yes'; expected true, false"),
        ("a\nabcd\n", {"dtypes": {"a": "U3"}}, "line 2, column 'a': 'abcd'; expected at most 3"),
        ('a,b\n"x\ny",1\nz,w\n', {"dtypes": {"b": int}}, "line 4, column 'b': 'w'"),
        ('a,b\n"x" y,1\n', {}, "line 2: .*expected after"),
        ("a,b\n\n\n1,2\n\n3\n", {}, "line 6: 1 cells"),
        ("a,b\n1,2\n", {"columns": ["c"]}, "has no column 'c'; it has 'a', 'b'"),
        ("a,b\n1,2\n", {"dtypes": {"c": int}}, "has no column 'c'"),
        ("a,b\n1,2\n", {"columns": []}, "names no column"),
        ("a,b\n1,2\n", {"dtypes": {"a": "M8[s]"}}, "datetime64.* for column 'a'"),
        ("a,a\n1,2\n", {}, "the column 'a' appears twice"),
        ("", {}, "is empty"),
    ],
)
def test_errors_name_the_place(text, arguments, words, write):
    with pytest.raises(ms.DataError, match=words):
        ms.Dataset.from_csv(write(text), **arguments)


def test_another_encoding_is_named(write):
    with pytest.raises(ms.DataError, match=r"encoding=, such as 'latin-1'"):
        ms.Dataset.from_csv(write("a\né\n", "latin-1"))


def test_a_file_that_is_not_there_is_an_oserror(tmp_path):
    with pytest.raises(FileNotFoundError):
        ms.Dataset.from_csv(tmp_path / "nothing.csv")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_rows_of_all_ranks_are_those_of_the_file(size, write):
    path = write(
        "x,label\n" + "".join(f"{i / 2},{'good' if i % 3 else 'bad'}\n" for i in range(20))
    )

    def program(comm):
        strategy = ms.MirroredStrategy()
        dataset = ms.Dataset.from_csv(path).filter(lambda row: row["label"] == "good")
        batches = strategy.experimental_distribute_dataset(dataset.shuffle(seed=1).batch(4))
        return [
            x
            for batch in batches
            for part in strategy.experimental_local_results(batch["x"])
            for x in part.tolist()
        ]

    for rows in run_ranks(program, size):
        assert sorted(rows) == [i / 2 for i in range(20) if i % 3]
