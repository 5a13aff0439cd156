"""Ways in which replicas could come to differ without anybody saying so."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

# On copies of each rank, and on copies that a node has in common.
pytestmark = pytest.mark.usefixtures("kept")

ctx = ms.get_replica_context


def made(strategy, count, **kwargs):
    with strategy.scope():
        return [ms.Variable(0.0, **kwargs) for _ in range(count)]


def test_unnamed_variables_are_told_apart():
    def rank(comm):
        s = ms.MirroredStrategy()
        pair = made(s, 2)
        mine = pair[comm.rank]
        for call in (
            lambda: mine.assign(1.0),
            lambda: s.extended.update(mine, lambda v: v.assign(1.0)),
            lambda: s.run(lambda: mine.assign(1.0)),
        ):
            with pytest.raises(ms.LockstepError):
                call()
        return [float(v.numpy()) for v in pair]

    assert run_ranks(rank, 2) == [[0, 0], [0, 0]]


ON_READ = ms.VariableSynchronization.ON_READ
INITIAL = {
    "numbers": {"alpha": 1.0, "beta": 2.0},
    "arrays": {"alpha": np.zeros((5, 7)), "beta": np.ones((5, 7))},
    "functions": {"alpha": lambda: 0.0, "beta": lambda: 3.0},
    "coins": {"alpha": True, "beta": False},
    "large": {"alpha": np.zeros(100_000), "beta": np.ones(100_000)},
}
UNEQUAL = "is another on rank {} than on rank 0, the first replica"


@every("size", [2, 3, 4])
@every("kind", INITIAL)
@every("kwargs", [{}, {"synchronization": ON_READ}, {"name": "Variable"}])
def test_variables_without_names_that_are_created_in_another_order_are_a_warning(
    size, kind, kwargs
):
    def rank(comm):
        s = ms.MirroredStrategy()
        order = sorted(INITIAL[kind], reverse=comm.rank == size - 1)
        with s.scope():
            with pytest.raises(UserWarning, match=UNEQUAL.format(size - 1)) as caught:
                for name in order:
                    ms.Variable(INITIAL[kind][name], **kwargs)
            assert "variable 'Variable:0' no. 1 " in str(caught.value)
            found = {
                name: ms.Variable(INITIAL[kind][name], **kwargs) for name in order
            }  # said once
            first = INITIAL[kind][sorted(INITIAL[kind])[0]]
            first = first() if callable(first) else first
            assert np.array_equal(found[order[0]]._component(), first)  # replica 0's
            # What was created is in step still, and so is what comes.
            return float(ms.Variable(7.0, name="next").assign_add(1.0).numpy())

    assert run_ranks(rank, size) == [8.0] * size


def test_the_warning_shows_the_lines_of_all_ranks():
    def rank(comm):
        with ms.MirroredStrategy().scope():
            if comm.rank == 1:
                ms.Variable(2.0)
            else:
                ms.Variable(1.0)

    line = rank.__code__.co_firstlineno + 3
    with pytest.warns(UserWarning, match=r"Variable\(\.\.\., name=\.\.\.\)") as caught:
        run_ranks(rank, 3)
    file = f"{__file__.rpartition('/')[2]}"
    (warning,) = caught
    assert f"{file}:{line + 2} on ranks 0, 2, " in str(warning.message)
    assert f"{file}:{line} on rank 1, " in str(warning.message)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 66])
def test_initial_values_that_differ_are_legal_with_names(size):
    def rank(comm):
        rng = np.random.default_rng(comm.rank)
        with ms.MirroredStrategy().scope():
            made = [ms.Variable(value, name=f"v{i}") for i, value in enumerate(rng.normal(size=9))]
            same = [ms.Variable(0.0) for _ in range(3)]
            made += [ms.Variable(comm.rank + 1.0, name="v0")]  # a name that was given twice
        return [float(v.numpy()) for v in [*made, *same]]

    wanted = [*np.random.default_rng(0).normal(size=9), 1.0, 0.0, 0.0, 0.0]
    assert run_ranks(rank, size) == [wanted] * size


def test_variables_that_replicas_own_are_told_apart_when_read():
    def rank(comm):
        s = ms.MirroredStrategy()
        how = {
            "synchronization": ms.VariableSynchronization.ON_READ,
            "aggregation": ms.VariableAggregation.SUM,
        }
        mine = made(s, 2, **how)[comm.rank]
        with pytest.raises(ms.LockstepError):
            mine.read_value()

    run_ranks(rank, 2)


def test_datasets_are_told_apart():
    def rank(comm):
        s = ms.MirroredStrategy()
        pair = [s.experimental_distribute_dataset(ms.Dataset.range(4).batch(2)) for _ in "ab"]
        with pytest.raises(ms.LockstepError):
            iter(pair[comm.rank])
        iterators = [iter(one) for one in pair]
        with pytest.raises(ms.LockstepError):
            next(iterators[comm.rank])
        return float(s.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [2.0, 2.0]


def test_a_dataset_in_a_file_on_one_rank_is_not_exchanged(tmp_path):
    """Of files nothing is looked at, and nothing is not what another dataset holds."""
    for i in range(2):
        np.save(tmp_path / f"{i}.npy", np.arange(24.0) + i)

    def rank(comm):
        s = ms.MirroredStrategy()
        found = []
        for i in range(2):
            there = np.load(tmp_path / f"{i}.npy", mmap_mode="r" if comm.rank == i else None)
            data = s.experimental_distribute_dataset(ms.Dataset(there).batch(8))
            found += [float(s.reduce("SUM", batch, axis=0)) for batch in data]
        return sum(found)

    assert run_ranks(rank, 2) == [276.0 + 300.0] * 2


def test_what_update_returns_is_mirrored_only_if_it_is():
    def rank(comm):
        s = ms.MirroredStrategy()
        (v,) = made(s, 1)
        try:
            got = s.extended.update(v, lambda var: np.array(float(comm.rank)))
        except ms.LockstepError:
            return "refused"
        return type(got).__name__

    assert set(run_ranks(rank, 2)) <= {"refused", "PerReplica"}


def test_a_mirrored_value_that_is_none_does_not_get_into_a_variable():
    def rank(comm):
        s = ms.MirroredStrategy()
        (v,) = made(s, 1)
        with contextlib.suppress(ms.LockstepError):
            v.assign(ms.Mirrored(float(comm.rank)))
        return float(v.numpy())

    zero, one = run_ranks(rank, 2)
    assert zero == one


def test_scopes_closed_out_of_order_do_not_stay_open():
    one = ms.OneDeviceStrategy("cpu")
    first, second = one.scope(), one.scope()
    first.__enter__()
    second.__enter__()
    with contextlib.suppress(RuntimeError):
        first.__exit__(None, None, None)
    with contextlib.suppress(RuntimeError):
        second.__exit__(None, None, None)
    assert not ms.has_strategy()


def test_the_error_of_a_call_inside_update_is_the_one_raised():
    def rank(comm):
        s = ms.MirroredStrategy()
        (v,) = made(s, 1)

        def fn(var):
            s.reduce("SUM", ms.PerReplica(np.ones(1 + comm.rank)), None)

        with pytest.raises(ms.LockstepError):
            s.extended.update(v, fn)
        with pytest.raises(ms.LockstepError):
            s.run(lambda: ctx().merge_call(lambda d: d.extended.update(v, fn)))
        with pytest.raises(ms.LockstepError):
            s.run(lambda: ms.Variable(lambda: ctx().all_reduce("SUM", np.ones(1 + comm.rank))))
        return float(s.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [2.0, 2.0]


def test_a_variable_written_while_another_is_updated_stays_the_same_everywhere():
    def rank(comm):
        s = ms.MirroredStrategy()
        v, w = made(s, 2)
        with contextlib.suppress(ms.LockstepError, RuntimeError):
            s.extended.update(v, lambda var: w.assign(float(comm.rank)))
        return float(w.numpy())

    zero, one = run_ranks(rank, 2)
    assert zero == one


MASK = np.array([1, 0, 0, 0, 0, 0, 0, 1], bool)


@pytest.mark.parametrize(
    ("start", "here", "there"),
    [
        (0.0, (0, "assign", 1.0), (0, "assign_sub", 1.125)),
        (0.0, (0, "assign", 1.0), (0, "assign_add", 1.0625)),
        (0.0, (0, "assign_add", 1.0), (0, "assign_sub", 1.1875)),
        (np.zeros(8, bool), (0, "assign", ~MASK), (1, "assign", np.ones(8, bool))),
        (np.zeros(8, "i1"), (0, "assign", np.zeros(8, "i1")), (1, "assign", MASK.astype("i1"))),
    ],
)
def test_writes_whose_values_differ_in_a_few_bits_are_told_apart(start, here, there):
    # Of few bytes XXH3 is a XOR of these and of its seed, so that small seeds cancel against them.
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            pair = [ms.Variable(start) for _ in range(3)][1:]
        place, kind, value = (here, there)[comm.rank]
        with pytest.raises(ms.LockstepError):
            s.run(lambda: getattr(pair[place], kind)(value) is None)
        assert all(np.array_equal(v.numpy(), start) for v in pair)

    run_ranks(rank, 2)


@pytest.mark.parametrize("where", ["run", "scope"])
def test_a_nan_is_the_same_whichever_way_the_values_lie(where):
    # Of two NaNs, NumPy keeps the one or the other, depending on how they lie in memory.
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            v = ms.Variable(np.full(9, np.nan))
        value = np.full((9, 2), -np.nan)[:, 0]
        value = value.copy() if comm.rank else value
        write = lambda: v.assign_add(value) is None  # noqa: E731
        if where == "run":
            s.run(write)
        else:
            with s.scope():
                write()
        return v.numpy().tobytes()

    one, other = run_ranks(rank, 2)
    assert one == other


def test_arguments_of_run_by_name_and_in_trees():
    def rank(comm):
        s = ms.MirroredStrategy()
        value = s.run(lambda: comm.rank + 1)
        fn = lambda tree, k: (tree["a"][0], k, type(tree["m"]).__name__)  # noqa: E731
        tree = {"a": [value], "m": ms.Mirrored(2.0, comm.size)}
        got = s.run(fn, args=(tree,), kwargs={"k": value})
        with pytest.raises(ValueError, match="list or tuple"):
            s.run(fn, args=5)
        return [x.local for x in got]

    assert run_ranks(rank, 2) == [[1, 1, "float"], [2, 2, "float"]]


@pytest.mark.parametrize("make", [ms.MirroredStrategy, ms.OneDeviceStrategy])
def test_results_are_fresh_and_checked_in_every_strategy(make):
    def rank(comm):
        s = make("cpu") if make is ms.OneDeviceStrategy else make()
        mine = np.ones(3)
        got = s.run(lambda: ctx().all_reduce("SUM", mine))
        got = got.local if isinstance(got, ms.PerReplica) else got
        assert not np.shares_memory(got, mine)
        for bad in ("text", np.array(["a"]), np.ma.ones(2)):
            with pytest.raises(TypeError):
                s.run(lambda b=bad: ctx().all_reduce("SUM", b))

    run_ranks(rank, 1)


@pytest.mark.parametrize("name", [None, "v"])
def test_looking_at_initial_values_is_no_further_exchange(monkeypatch, name):
    def rank(comm):
        s = ms.MirroredStrategy()
        with s.scope():
            ms.Variable(np.zeros(4))
            calls, inner = [], s._replicas.lockstep.session.comm

            def count(method):
                real = getattr(inner, method)
                monkeypatch.setattr(
                    inner, method, lambda *a, **k: (calls.append(method), real(*a, **k))[1]
                )

            for method in ("allgather", "allgatherv", "allreduce", "bcast"):
                count(method)
            ms.Variable(np.full(4, comm.rank + 0.5 if name else 0.5), name=name)
        # A bcast moves the value; an all-reduce tells whether all ranks have its pages.
        return [call for call in calls if call not in ("bcast", "allreduce")]

    assert run_ranks(rank, 2) == [["allgather"]] * 2
