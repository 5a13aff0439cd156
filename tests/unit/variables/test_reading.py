"""What a variable has of an array, which attributes can be set, and what replaces missing ones."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

# On copies of each rank, and on copies that a node has in common.
pytestmark = pytest.mark.usefixtures("kept")

ctx = ms.get_replica_context
VALUE = np.array([[3.0, -1.5, 2.0], [0.5, 4.0, -2.0]])
READ = {
    **{name: (name, (), {}) for name in ("T", "mT", "real", "imag", "nbytes", "size", "ndim")},
    **{name: (name, (), {}) for name in ("shape", "dtype")},
}
CALLED = {
    **{name: (name, (), {}) for name in ("all", "any", "argmax", "argmin", "argsort", "max")},
    **{name: (name, (), {}) for name in ("min", "sum", "prod", "mean", "std", "var", "cumsum")},
    **{name: (name, (), {}) for name in ("cumprod", "trace", "diagonal", "nonzero", "round")},
    **{name: (name, (), {}) for name in ("conj", "conjugate", "copy", "tolist", "tobytes")},
    **{name: (name, (), {}) for name in ("ravel", "flatten", "squeeze", "transpose")},
    "sum of rows": ("sum", (), {"axis": 0, "keepdims": True}),
    "dot": ("dot", (np.ones(3),), {}),
    "clip": ("clip", (0, 1), {}),
    "astype": ("astype", ("f4",), {}),
    "item": ("item", (1, 2), {}),
    "reshape": ("reshape", (-1,), {}),
    "reshape to two sizes": ("reshape", (3, 2), {}),
    "swapaxes": ("swapaxes", (0, 1), {}),
    "take": ("take", ([1, 0],), {"axis": 0}),
    "repeat": ("repeat", (2,), {}),
}


def made(*args, **kwargs):
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        return ms.Variable(*args, **kwargs)


def same(got, want):
    assert type(got) is type(want)
    if isinstance(want, tuple):
        assert len(got) == len(want)
        for each, other in zip(got, want, strict=True):
            same(each, other)
    elif isinstance(want, np.ndarray):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert got.tobytes() == want.tobytes()
    else:
        assert got == want


@every("case", [*READ, *CALLED])
def test_it_reads_as_an_array_does(case):
    name, args, kwargs = {**READ, **CALLED}[case]

    def take(array):
        found = getattr(array, name)
        return found(*args, **kwargs) if case in CALLED else found

    def rank(comm):
        v = made(VALUE, name="v")
        return take(v), ms.get_strategy() and take(v)

    for results in run_ranks(rank, 2):
        for result in results:
            same(result, take(VALUE))


@every("name", ["T", "mT", "real", "transpose", "ravel", "reshape", "squeeze", "swapaxes"])
def test_later_writes_do_not_change_what_was_read(name):
    def rank(comm):
        v = made(VALUE)
        before = getattr(v, name)
        if callable(before):
            before = before(*{"reshape": (-1,), "swapaxes": (0, 1)}.get(name, ()))
        kept = before.copy()
        v.assign(VALUE + 1)
        # A write to it would be lost, so it is refused; `copy` gives what can be written to.
        return np.array_equal(before, kept), before.flags.writeable, v.copy().flags.writeable

    assert run_ranks(rank, 2) == [(True, False, True)] * 2


def test_a_copy_on_read_is_summed_as_it_is_by_operators():
    def rank(comm):
        sync, agg = ms.VariableSynchronization.ON_READ, ms.VariableAggregation.SUM
        v = made(np.zeros(2), synchronization=sync, aggregation=agg)
        v.strategy.run(lambda: v.assign_add([1.0, comm.rank]))
        own = v.strategy.run(lambda: v.sum())
        assert hasattr(v, "sum")  # which is no read, or the ranks would part here
        return v.sum(), v.T.tolist(), own.local

    assert run_ranks(rank, 3) == [(6.0, [3.0, 3.0], 1.0 + rank) for rank in range(3)]


@every(
    "name", ["value", "values", "trainble", "foo", "shape", "dtype", "assign", "numpy", "T", "sum"]
)
def test_attributes_that_are_none_of_a_variable_cannot_be_set(name):
    def rank(comm):
        v = made(VALUE, name="v")
        with pytest.raises(AttributeError, match=rf"'v:0'.*{name}.*v\.assign\(array\)"):
            setattr(v, name, VALUE + 1)
        v.trainable = False  # which it has
        return v.numpy().tolist(), v.trainable, v.assign(VALUE).value().tolist()

    assert run_ranks(rank, 2) == [(VALUE.tolist(), False, VALUE.tolist())] * 2


def test_a_variable_that_could_not_be_made_has_no_attributes_either():
    v = object.__new__(ms.Variable)
    with pytest.raises(AttributeError, match="the variable"):
        v.foo = 1
    with pytest.raises(AttributeError, match="'Variable' object has no attribute '_storage'"):
        v._storage  # noqa: B018


@every("name", ["sort", "fill", "put", "data", "resize", "partition", "ctypes", "byteswap"])
def test_what_an_array_has_and_a_variable_does_not_is_said(name):
    v = made(VALUE)
    text = rf"no attribute .{name}.\. .*np\.asarray\(v\).*v\.numpy\(\)"
    with pytest.raises(AttributeError, match=text):
        getattr(v, name)
    assert not hasattr(v, name)
    assert name not in dir(v)
    assert {"sum", "assign", "T", name} - {*dir(v)} == {name}


def test_numpy_reads_a_variable_without_asking_for_names_that_are_not_there():
    v, calls = made(VALUE), []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name))
    try:
        array = np.asarray(v)
    finally:
        sys.setprofile(None)
    assert array.tolist() == VALUE.tolist()
    assert "__array__" in calls
    assert "__getattr__" not in calls


def test_other_names_are_no_names():
    v = made(VALUE)
    with pytest.raises(AttributeError, match=r"object has no attribute 'sume'$"):
        v.sume  # noqa: B018
    assert not hasattr(v, "__array_interface__")


INSTEAD = {
    "world_size": "num_replicas_in_sync",
    "num_replicas": "num_replicas_in_sync",
    "barrier": r"strategy\.group\(None\)",
    "bcast": r"strategy\.broadcast\(tree\)",
    "allreduce": r"\.all_reduce\(",
    "allgather": "gather",
    "get_rank": "rank|replica_id_in_sync_group",
}
IN_REPLICA = {
    "rank": "replica_id_in_sync_group",
    "broadcast": r"strategy\.broadcast",
    "gather": "all_",
}


@every("name", [*INSTEAD])
def test_names_of_other_libraries_are_answered_by_strategies(name):
    for strategy in (ms.MirroredStrategy(), ms.MultiWorkerMirroredStrategy()):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'. Use .*{INSTEAD[name]}"):
            getattr(strategy, name)


@every("name", [*INSTEAD, *IN_REPLICA])
def test_names_of_other_libraries_are_answered_by_contexts(name):
    words = {**INSTEAD, **IN_REPLICA}[name]
    with pytest.raises(AttributeError, match=f"no attribute '{name}'. Use .*({words})"):
        ms.MirroredStrategy().run(lambda: getattr(ctx(), name))


def test_what_nobody_has_is_no_name_of_a_strategy_or_context():
    for each in (ms.MirroredStrategy(), ctx()):
        with pytest.raises(AttributeError, match=r"has no attribute 'foo'$"):
            each.foo  # noqa: B018


def test_what_is_said_to_be_used_is_there():
    strategy = ms.MirroredStrategy()
    strategy.group(None)
    assert strategy.rank == 0
    assert strategy.num_replicas_in_sync == 1
    assert strategy.broadcast({"a": 1}) == {"a": 1}
    assert strategy.run(lambda: ctx().replica_id_in_sync_group == 0).local
