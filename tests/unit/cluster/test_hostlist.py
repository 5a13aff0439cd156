"""Slurm's short forms, against lists written out by hand."""

from __future__ import annotations

import pytest

from mpistrat.cluster.allocation import expand_hostlist, expand_tasks_per_node


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
    with pytest.raises(ValueError, match="is not a list of hosts"):
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


NINES = "9" * 10


@pytest.mark.parametrize(
    "text",
    [
        f"n[1-{NINES}]",
        f"n[0-{NINES},1]",
        "n[1-65537]",
        "n[1-65536],m",
        "m,n[1-65536]",
        "a[1-1000]b[1-1000]",
        "a[1-9999]" * 9,
        ",".join(["n[1-40000]"] * 2),
    ],
)
def test_what_no_cluster_has_is_refused_before_it_is_made(text):
    with pytest.raises(ValueError, match="stands for more than 65536 hosts, which is more than"):
        expand_hostlist(text)


@pytest.mark.parametrize(
    "text", ["x" * 300, "x" * 120_000 + "[1-65536]", f"n[{'0' * 17}1]" * 20, "n[1]" * 200]
)
def test_a_name_that_no_host_has(text):
    with pytest.raises(ValueError, match=r"has a name of \d+ letters") as error:
        expand_hostlist(text)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("text", [f"n[{'9' * 5000}]", f"n[1-{'9' * 5000}]", f"n[{'0' * 5000}1]"])
def test_a_number_that_no_host_has(text):
    with pytest.raises(ValueError, match="is not a list of hosts") as error:
        expand_hostlist(text)
    assert len(str(error.value)) < 400


def test_the_largest_cluster_is_read():
    found = expand_hostlist("r[0-255]n[000-255]")
    assert len(found) == len(set(found)) == 1 << 16
    assert (found[0], found[1], found[-1]) == ("r0n000", "r0n001", "r255n255")
    assert expand_tasks_per_node("128(x65536)") == [128] * 65536


@pytest.mark.parametrize("text", [f"2(x{NINES})", "2(x65536),1", "1,2(x65536)", "1," * 65536 + "1"])
def test_tasks_of_nodes_that_no_cluster_has(text):
    with pytest.raises(ValueError, match="stands for more than 65536 nodes, which is more than"):
        expand_tasks_per_node(text)


def test_a_count_of_too_many_digits():
    with pytest.raises(ValueError, match="does not count tasks"):
        expand_tasks_per_node("2(x" + "9" * 5000 + ")")
