"""Mappings other than dict are trees, and keys that are different are told apart."""

from __future__ import annotations

import collections
import enum
import os
import types

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat import pytree
from mpistrat.compat import tf
from mpistrat.errors import StructureError
from mpistrat.testing import run_ranks

ctx = ms.get_replica_context


class Logs(dict):
    """One with an attribute, and a constructor of its own."""

    def __init__(self, note, **items):
        super().__init__(**items)
        self.note = note


class Upper(collections.UserDict):
    def __setitem__(self, key, value):
        super().__setitem__(key.upper(), value)


class Ordered(collections.OrderedDict):
    pass


class Grouped(collections.defaultdict):
    pass


class Frozen(dict):
    def __setitem__(self, key, value):
        raise TypeError("it is frozen")


class NeverEmpty(dict):
    def __new__(cls, *args, **items):
        if not items:
            raise TypeError("there is no empty one")
        return super().__new__(cls)


class Mapped(collections.abc.Mapping):
    def __init__(self, **items):
        self.items_ = items

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


REBUILT = {
    "Logs": lambda **items: Logs("noted", **items),
    "Upper": lambda **items: Upper({key.upper(): value for key, value in items.items()}),
    "UserDict": lambda **items: collections.UserDict(items),
    "Counter": lambda **items: collections.Counter(items),
    "OrderedDict": lambda **items: collections.OrderedDict(items),
    "Ordered": lambda **items: Ordered(items),
    "defaultdict": lambda **items: collections.defaultdict(list, items),
    "Grouped": lambda **items: Grouped(list, items),
}
READ = {
    "MappingProxyType": lambda **items: types.MappingProxyType(items),
    "ChainMap": lambda **items: collections.ChainMap(items),
    "Mapped": Mapped,
}
KINDS = {**REBUILT, **READ}


def kinds_of(kind, like):
    """The class that comes back."""
    return type(like) if kind in REBUILT else dict


def key(like, name):
    return name.upper() if isinstance(like, Upper) else name


@every("kind", KINDS)
def test_they_come_apart_and_together(kind):
    tree = [KINDS[kind](b=1, a=KINDS[kind](c=2))]
    leaves, structure = pytree.flatten(tree)
    keeps = isinstance(tree[0], collections.OrderedDict)
    assert leaves == ([1, 2] if keeps else [2, 1])
    again = pytree.unflatten(structure, [each * 10 for each in leaves])[0]
    assert type(again) is kinds_of(kind, tree[0])
    assert dict(again).keys() == dict(tree[0]).keys()
    assert list(again) == list(tree[0])  # in its order
    assert again[key(again, "b")] == 10
    assert again[key(again, "a")][key(again, "c")] == 20
    assert tree[0][key(tree[0], "b")] == 1
    if kind == "Logs":
        assert again.note == "noted"
        again.note = "another"
        assert tree[0].note == pytree.unflatten(structure, leaves)[0].note == "noted"
    if kind in ("defaultdict", "Grouped"):
        assert again.default_factory is list
    assert pytree.map(lambda x: x + 1, tree)[0][key(tree[0], "b")] == 2
    assert len(pytree.leaf_paths(tree)) == 2


@every("kind", KINDS)
def test_structures_are_told_apart_by_class_and_keys(kind):
    make = KINDS[kind]
    texts = {pytree.describe(pytree.flatten(tree)[1]) for tree in (make(a=1), make(b=1), {"a": 1})}
    assert len(texts) == 3
    one, two = (pytree.flatten(make(**items))[1] for items in ({"a": 1, "b": 2}, {"a": 3, "b": 4}))
    assert one == two
    if kind not in ("defaultdict", "Grouped"):
        assert hash(one) == hash(two)
    with pytest.raises(StructureError, match="the structures differ"):
        pytree.map(lambda a, b: a, make(a=1), make(b=1))


@every("kind", KINDS)
@every("make", [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy])
@every("ranks", [1, 2, 3])
def test_they_are_trees_in_every_call(kind, make, ranks):
    def rank(comm):
        strategy, mine = make(), KINDS[kind]
        where = lambda tree, name: tree[key(tree, name)]  # noqa: E731
        each = strategy.run(lambda: mine(a=1.0, b=np.ones(2)))
        sums = strategy.reduce("sum", each, axis=None)
        total = strategy.all_reduce("sum", mine(a=1, b=2))
        gathered = strategy.gather(strategy.run(lambda: mine(a=np.full(1, comm.rank))), 0)
        inputs = mine(a=strategy.run(lambda: np.ones(2)), b=3)
        shapes = strategy.run(lambda tree: np.shape(where(tree, "a")), args=(inputs,))
        merged = strategy.run(
            lambda: ctx().merge_call(
                lambda s, t: s.reduce("sum", where(t, "a"), None), (mine(a=1),)
            )
        )
        results = strategy.experimental_local_results(each)
        sent = strategy.broadcast(mine(a=comm.rank, b=np.ones(1)))
        strategy.check_same(mine(a=1, b=np.ones(1)))
        kinds = {type(sums), type(total), type(gathered), type(sent)}
        if kind in REBUILT or make is ms.MirroredStrategy:  # else it is what the function returned
            kinds |= {type(each), type(results[0])}
        return kinds, [
            float(where(sums, "a")),
            int(where(total, "b")),
            where(gathered, "a").tolist(),
            [int(n) for n in strategy.experimental_local_results(shapes)[0]],
            int(strategy.experimental_local_results(merged)[0]),
            [float(where(one, "a")) for one in results],
            where(sent, "a"),
        ]

    shown = ranks if make is ms.MirroredStrategy else 1
    for kinds, values in run_ranks(rank, ranks):
        assert kinds == {kinds_of(kind, KINDS[kind](a=1))}
        assert values == [ranks, 2 * ranks, [*range(ranks)], [2], ranks, [1.0] * shown, 0]


@every("kind", KINDS)
def test_datasets_of_them(kind):
    make = KINDS[kind]
    arrays = make(a=np.arange(4.0), b=np.arange(8).reshape(4, 2))

    def rank(comm):
        strategy = ms.MirroredStrategy()
        lists = make(a=[0.0, 1, 2, 3], b=[[0, 1], [2, 3], [4, 5], [6, 7]])
        for dataset in (
            ms.Dataset(arrays).batch(2),
            ms.Dataset.from_tensor_slices(lists).batch(2),
            ms.Dataset([make(a=np.arange(2.0), b=np.zeros((2, 2)))]),
        ):
            mapped = dataset.map(lambda element: element)
            for batch in strategy.experimental_distribute_dataset(mapped):
                assert type(batch) is kinds_of(kind, arrays)
                got = strategy.gather(batch, 0)
                assert got[key(got, "a")].shape == (2,)
                assert got[key(got, "b")].shape == (2, 2)
        return True

    assert all(run_ranks(rank, 2))


def test_files_of_arrays_and_the_environment_are_inputs(tmp_path):
    np.savez(tmp_path / "rows.npz", x=np.arange(4.0), y=np.arange(4))

    def rank(comm):
        strategy = ms.MirroredStrategy()
        with np.load(tmp_path / "rows.npz") as rows:
            batches = list(strategy.experimental_distribute_dataset(ms.Dataset(rows).batch(4)))
            totals = strategy.all_reduce("sum", rows)
            # What has no value per replica inside comes as it is.
            names = strategy.run(lambda tree: tree.files, args=(rows,))
        path = strategy.run(lambda env: env is os.environ, args=(os.environ,))
        assert type(totals) is type(batches[0]) is dict
        return totals["x"].tolist(), [name.local for name in names], path.local

    assert run_ranks(rank, 2) == [([0.0, 2.0, 4.0, 6.0], ["x", "y"], True)] * 2


@every("kind", [Frozen, NeverEmpty])
def test_what_cannot_be_made_again_is_named_on_every_rank(kind):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        for call in (
            lambda: strategy.all_reduce("sum", kind(a=1)),
            lambda: strategy.run(lambda: kind(a=1)),
            lambda: strategy.run(lambda tree: None, args=({"x": kind(a=1)},)),
        ):
            with pytest.raises(
                StructureError, match=rf"{kind.__qualname__} in a tree cannot be made"
            ):
                call()
        return strategy.all_reduce("sum", 1)

    assert run_ranks(rank, 2) == [2, 2]


def test_one_rank_alone_is_told_to_the_others():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(ms.MpistratError, match="NeverEmpty in a tree"):
            strategy.all_reduce("sum", NeverEmpty(a=1) if comm.rank else {"a": 1})
        with pytest.raises(ms.LockstepError):
            strategy.all_reduce("sum", collections.UserDict(a=1) if comm.rank else {"a": 1})
        return strategy.all_reduce("sum", 1)

    assert run_ranks(rank, 2) == [2, 2]


@every("kind", REBUILT)
def test_orders_that_differ_become_one(kind):
    def rank(comm):
        make, strategy = REBUILT[kind], ms.MirroredStrategy()
        items = {"a": 1, "b": 2} if comm.rank else {"b": 2, "a": 1}
        if isinstance(make(a=1), collections.OrderedDict):
            with pytest.raises(ms.LockstepError):
                strategy.run(lambda: make(**items))
            return ["a", "b"]
        each = strategy.run(lambda: make(**items))
        assert type(each) is type(make(a=1))
        return [name.lower() for name in each]

    assert run_ranks(rank, 2) == [["a", "b"]] * 2


@every("kind", KINDS)
def test_tf_nest(kind):
    tree = KINDS[kind](b=1, a=2)
    assert tf.nest.flatten(tree) == [2, 1]
    assert tf.nest.is_nested(tree)
    tf.nest.assert_same_structure(tree, {key(tree, "a"): 0, key(tree, "b"): 0})
    doubled = tf.nest.map_structure(lambda x: 2 * x, tree)
    assert (doubled[key(tree, "a")], doubled[key(tree, "b")]) == (4, 2)


def test_checkpoints_of_them(tmp_path):
    counts, logs = collections.Counter(a=3), collections.UserDict(w=np.ones(2))
    path = ms.Checkpoint(counts=counts, logs=logs).save(str(tmp_path / "ckpt"))
    counts["a"], logs["w"] = 0, np.zeros(2)
    ms.Checkpoint(counts=counts, logs=logs).restore(path)
    assert counts["a"] == 3
    assert logs["w"].tolist() == [1.0, 1.0]


# Keys ------------------------------------------------------------------------------------------


class Layer:
    def __init__(self, text="Layer()"):
        self.text = text

    def __repr__(self):
        return self.text


class Plain:
    pass


class Color(enum.Enum):
    RED = 1
    BLUE = 2


CALLS = {
    "run": lambda s, tree: s.run(lambda: tree),
    "all_reduce": lambda s, tree: s.all_reduce("sum", tree),
    "in replica code": lambda s, tree: s.run(lambda: ctx().all_reduce("sum", tree)),
    "reduce": lambda s, tree: s.reduce("mean", pytree.map(ms.PerReplica, tree), axis=None),
    "reduce axis": lambda s, tree: s.reduce(
        "sum", pytree.map(lambda x: ms.PerReplica(np.ones(2)), tree), axis=0
    ),
    "gather": lambda s, tree: s.gather(
        [pytree.map(lambda x: ms.PerReplica(np.ones(1)), tree), 1], 0
    ),
    "all_gather": lambda s, tree: s.run(
        lambda: ctx().all_gather(pytree.map(lambda x: np.ones(1), tree), 0)
    ),
    "broadcast": lambda s, tree: s.broadcast(tree),
    "check_same": lambda s, tree: s.check_same(tree),
    "merge_call": lambda s, tree: s.run(lambda: ctx().merge_call(lambda s, t: None, (tree,))),
    "buffers": lambda s, tree: s.buffers(pytree.map(lambda x: np.ones(1), tree)),
    "dataset": lambda s, tree: next(
        iter(
            s.experimental_distribute_dataset(ms.Dataset([pytree.map(lambda x: np.ones(2), tree)]))
        )
    ),
}


@every("call", CALLS)
@every("make", [Layer, Plain, lambda: (1, Layer()), lambda: frozenset([Layer()])])
def test_keys_of_equal_text_are_refused_on_every_rank(call, make):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        one, two = make(), make()
        tree = {one: 1.0, two: 10.0} if comm.rank == 0 else {two: 10.0, one: 1.0}
        with pytest.raises(StructureError, match=r"told apart.*(Layer\(\)|Plain object)"):
            CALLS[call](strategy, tree)
        with pytest.raises((ms.MpistratError, RuntimeError), match=r"told apart|differ|another"):
            CALLS[call](strategy, tree if comm.rank else {"a": 1.0, "b": 2.0})
        return strategy.all_reduce("sum", 1)

    assert run_ranks(rank, 2) == [2, 2]


@every("pair", [(1, "1"), (1, Layer("1")), ("1", Layer("'1'")), (None, "None"), (1, True), (1, 1.0),
                (1, np.int64(1)), ((1,), (Layer("1"),)), (Color.RED, Color.BLUE), (b"a", "a"),
                (Color.RED, Layer("<Color.RED: 1>"))])  # fmt: skip
def test_keys_are_told_apart_by_class_and_value(pair):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(ms.LockstepError):
            strategy.all_reduce("sum", {pair[comm.rank]: 1.0})
        return strategy.all_reduce("sum", 1)

    assert run_ranks(rank, 2) == [2, 2]
    if pair[0] != pair[1]:  # beside each other, too
        total = ms.MirroredStrategy().all_reduce("sum", {pair[0]: 1.0, pair[1]: 10.0})
        assert [float(total[each]) for each in pair] == [1.0, 10.0]


def test_keys_that_have_texts_of_their_own_are_fine():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v, w = ms.Variable(0.0), ms.Variable(0.0)
        mine = {
            np.sum: 1,
            np.mean: 2,
            Color.RED: 3,
            frozenset("abcdefgh"): 4,
            (1, "a"): 5,
            Plain: 6,
        }
        found = [*strategy.all_reduce("sum", mine).values()]
        # Variables without names of their own are told apart by their numbers.
        return found, [*strategy.all_reduce("sum", {v.ref(): 1, w.ref(): 2}).values()]

    assert run_ranks(rank, 2) == [([2, 4, 6, 8, 10, 12], [2, 4])] * 2


def test_names_in_checkpoints_that_are_equal_are_refused(tmp_path):
    with pytest.raises(StructureError, match=r"'tree/1'.*str\(key\)"):
        ms.Checkpoint(tree={1: np.ones(2), "1": np.zeros(2)}).save(str(tmp_path / "ckpt"))


class WithOrder(dict):
    """A mapping with a companion, which its `clear` empties."""

    def __init__(self, *pairs):
        self.order = []
        super().__init__()
        for key, value in pairs:
            self[key] = value

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.order.append(key)

    def clear(self):
        super().clear()
        self.order.clear()


def test_the_mapping_itself_stays_as_it_is():
    mapping = WithOrder(("b", 1), ("a", 2))
    leaves, structure = pytree.flatten(mapping)
    made = pytree.unflatten(structure, [10 * leaf for leaf in leaves])
    assert (mapping, mapping.order) == ({"b": 1, "a": 2}, ["b", "a"])
    assert (made, made.order, type(made)) == ({"b": 10, "a": 20}, ["b", "a"], WithOrder)


class Unnamed:
    """A key whose text has its address."""


@pytest.mark.parametrize("make", [Unnamed, lambda: frozenset(["alpha", "beta", "gamma"])])
def test_names_of_leaves_have_neither_addresses_nor_orders_of_sets(make):
    names = {pytree.leaf_paths({make(): 1.0, "b": [2]})[0] for _ in range(3)}
    assert len(names) == 1

    def rank(comm):
        total = ms.MirroredStrategy().all_reduce("sum", {make(): 1.0})
        return [*total.values()]

    assert run_ranks(rank, 2) == [[2.0]] * 2
