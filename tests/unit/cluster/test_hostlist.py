"""Slurm's short forms, against lists written out by hand."""

from __future__ import annotations

import pytest

from mpistrat.cluster.hostlist import expand_hostlist, expand_tasks_per_node


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("a,b-c,d.e", ["a", "b-c", "d.e"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[3]", ["n3"]),
        ("n[1-2]-ib,m", ["n1-ib", "n2-ib", "m"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("[1-2,4]", ["1", "2", "4"]),
    ],
)
def test_hosts(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text", ["n[1-2", "n1]", "n[]", "n[a]", "n[2-1]", "n[1-]", "n1,,n2", ",n1", "n1,", "n[[1]]"]
)
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(ValueError, match="is no list of hosts"):
        expand_hostlist(text)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2", [2]), ("2(x1)", [2]), ("16(x3)", [16] * 3), ("1,3(x2), 2", [1, 3, 3, 2])],
)
def test_counts(text, counts):
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "a", "2(x)", "2x3", "2,", "-1", "2(x3", "1.5"])
def test_what_counts_no_tasks(text):
    with pytest.raises(ValueError, match="does not count tasks"):
        expand_tasks_per_node(text)
