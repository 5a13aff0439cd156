"""Trees: leaves in the order of sorted keys, None a leaf, names for every leaf."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from mpistrat import pytree
from mpistrat.errors import StructureError

Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("tree", "leaves", "names"),
    [
        (5, [5], [""]),
        (None, [None], [""]),
        ([], [], []),
        ({}, [], []),
        ({"b": 1, "a": 2}, [2, 1], ["a", "b"]),
        ([1, (2, [3])], [1, 2, 3], ["0", "1/0", "1/1/0"]),
        (Point(1, {"k": 2}), [1, 2], ["x", "y/k"]),
        (
            {"layers": [{"kernel": 1, "bias": None}]},
            [None, 1],
            ["layers/0/bias", "layers/0/kernel"],
        ),
        ("text", ["text"], [""]),
    ],
)
def test_a_tree_comes_apart_and_together(tree, leaves, names):
    found, structure = pytree.flatten(tree)
    assert found == leaves
    assert pytree.leaf_paths(tree) == names
    again = pytree.unflatten(structure, found)
    assert again == tree
    assert type(again) is type(tree)


def test_dicts_of_any_insertion_order_are_the_same_structure():
    one = pytree.flatten({"a": 1, "b": 2})
    two = pytree.flatten({"b": 2, "a": 1})
    assert one[0] == two[0]
    assert pytree.describe(one[1]) == pytree.describe(two[1])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ([1, 2], (1, 2)),
        ([1, 2], [1, 2, 3]),
        ({"a": 1}, {"b": 1}),
        ([1], 1),
        (Point(1, 2), (1, 2)),
        (Point(1, 2), collections.namedtuple("Point", "y x")(1, 2)),
        ({"a": [1]}, {"a": (1,)}),
    ],
)
def test_different_structures_have_different_texts(one, two):
    assert pytree.describe(pytree.flatten(one)[1]) != pytree.describe(pytree.flatten(two)[1])


def test_map_over_several_trees_refuses_another_structure():
    assert pytree.map(lambda a, b: a * b, [2, {"x": 3}], [5, {"x": 7}]) == [10, {"x": 21}]
    for tree, other in (([1, 2], [1]), ([1], [(1, 2)]), ([(1, 2)], [1]), ((1,), [1])):
        with pytest.raises(StructureError, match=r"the structures differ: .* and"):
            pytree.map(lambda a, b: a, tree, other)


def test_an_array_is_a_leaf():
    array = np.zeros((2, 3))
    (leaf,), _ = pytree.flatten(array)
    assert leaf is array


def test_an_ordered_dict_comes_back_as_one():
    tree = collections.OrderedDict([("z", 1), ("a", 2)])
    leaves, structure = pytree.flatten(tree)
    again = pytree.unflatten(structure, leaves)
    assert type(again) is collections.OrderedDict
    assert again == tree


def test_alike_sorts_the_keys_of_every_dict_and_keeps_all_else():
    tree = [
        {"b": 1, "a": {"d": 2, "c": 3}},
        (collections.OrderedDict([("z", {"y": 4, "x": 5}), ("a", 6)]),),
        Point({"q": 7, "p": 8}, None),
        collections.defaultdict(list, {"n": 9, "m": 10}),
        {},
        (),
    ]
    leaves, structure = pytree.flatten(tree)
    sorted_ = pytree.unflatten(pytree.with_sorted_keys(structure), leaves)
    assert pytree.with_sorted_keys(structure) == structure
    assert sorted_ == tree
    assert [list(sorted_[0]), list(sorted_[0]["a"])] == [["a", "b"], ["c", "d"]]
    assert [list(sorted_[1][0]), list(sorted_[1][0]["z"])] == [["z", "a"], ["x", "y"]]
    assert type(sorted_[2]) is Point
    assert list(sorted_[2].x) == ["p", "q"]
    assert list(sorted_[3]) == ["m", "n"]
    assert sorted_[3].default_factory is list
    assert [*map(list, (tree[0], tree[3]))] == [["b", "a"], ["n", "m"]]


def test_the_order_of_keys_of_any_kind_is_told():
    assert pytree.key_order_text({2: 0, 1: [{(1, 2): 0, "a": 1}]}) == "2, 1; (1, 2), 'a'; "
    assert pytree.key_order_text({1: 0, 2: 0}) != pytree.key_order_text({2: 0, 1: 0})
    assert pytree.key_order_text([1, (None, "x"), Point(1, 2)]) == ""
