"""NaN is named before it spreads; copies that drift are found."""

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks


def reduce_all(value, weight=None, op="mean"):
    return ms.get_replica_context().all_reduce(op, value, weight=weight)


@every("size", [1, 2, 3, 4])
@every("length", [7, 100_000])
@every("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_number_is_named_on_every_rank(size, length, bad, monkeypatch):
    monkeypatch.setenv("MPISTRAT_NAN", "raise")

    def rank(comm):
        strategy = ms.MirroredStrategy()
        gradients = {"w": np.ones((length, 2)), "b": np.ones(3)}
        strategy.run(reduce_all, (gradients,))
        if comm.rank == size - 1:
            gradients["w"][5, 1] = bad
            gradients["w"][6, 0] = np.nan
        with pytest.raises(ms.NonFiniteError) as caught:
            strategy.run(reduce_all, (gradients,))
        assert isinstance(caught.value, FloatingPointError)
        after = strategy.run(reduce_all, ({"b": np.ones(3)},))
        return str(caught.value), after["b"].local.tolist()

    for text, after in run_ranks(rank, size):
        assert after == [1.0] * 3
        assert text.startswith(f"rank {size - 1}: leaf 'w', float64[{length},2], is {bad} at index")
        assert "(5, 1) (the first of 2), in step 1, test_guards.py:" in text
        assert "\n" not in text


def test_several_ranks_are_all_named(monkeypatch):
    monkeypatch.setenv("MPISTRAT_NAN", "raise")

    def rank(comm):
        with pytest.raises(ms.NonFiniteError) as caught:
            ms.MirroredStrategy().run(reduce_all, (np.nan if comm.rank else 0.0,))
        return [line[:6] for line in str(caught.value).splitlines()]

    assert run_ranks(rank, 3) == [["rank 1", "rank 2"]] * 3


def test_what_has_no_weight_is_not_looked_at(monkeypatch):
    monkeypatch.setenv("MPISTRAT_NAN", "raise")

    def rank(comm):
        value = np.full(3, np.nan if comm.rank else 2.0)
        result = ms.MirroredStrategy().run(reduce_all, (value, 1 - comm.rank))
        return result.local.tolist()

    assert run_ranks(rank, 2) == [[2.0] * 3] * 2


def test_a_report_is_printed_once_and_the_program_goes_on(monkeypatch, capfd):
    monkeypatch.setenv("MPISTRAT_NAN", "report")

    def rank(comm):
        value = np.array([1.0, np.nan if comm.rank == 1 else 1.0], np.float32)
        return ms.MirroredStrategy().run(reduce_all, (value,)).local.tolist()

    for first, second in run_ranks(rank, 3):
        assert first == 1.0
        assert np.isnan(second)
    err = capfd.readouterr().err
    assert err.count("mpistrat: rank 1: the value, float32[2], is nan at index (1,)") == 1


@pytest.mark.parametrize("rows", [20, 20_000])  # a copy of each rank, and one for all
@pytest.mark.parametrize("how", ["raise", "report"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_writes_without_aggregation_before_a_bad_number(size, how, rows, monkeypatch):
    monkeypatch.setenv("MPISTRAT_NAN", how)

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        with strategy.scope():
            v, w = ms.Variable(np.ones(rows)), ms.Variable(np.ones((rows, 2)))

        def step(bad):
            v.assign_add(np.full(rows, 2.0))
            w.scatter_add(ms.IndexedSlices(np.ones((2, 2)), [3, rows - 1]))
            v.assign_sub(np.full(rows, 1.0))
            return reduce_all(np.array([np.nan if bad and comm.rank == size - 1 else 1.0]))

        if how == "raise":
            with pytest.raises(ms.NonFiniteError):
                strategy.run(step, (True,))
            assert v.numpy().tolist() == [2.0] * rows  # all ranks have written alike
            assert w.numpy().sum() == 2 * rows + 4
        else:
            assert np.isnan(strategy.run(step, (True,)).local[0])
        strategy.run(step, (False,))
        return v.numpy(), w.numpy().sum()

    for one, two in run_ranks(rank, size):
        assert one.tolist() == [3.0] * rows
        assert two == 2 * rows + 8


def test_nothing_is_looked_for_unless_asked(capfd):
    def rank(comm):
        return ms.MirroredStrategy().run(reduce_all, (np.nan,)).local

    assert all(np.isnan(run_ranks(rank, 2)))
    assert capfd.readouterr().err == ""


def flip(variable, index):
    """Flip one bit of this rank's copy behind the library's back."""
    variable._storage.array.reshape(-1).view(np.uint8)[index] ^= 1


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_flipped_bit_is_found_within_one_round(size, victim, monkeypatch):
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", "2")

    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            copies = [ms.Variable(np.arange(5.0), name=f"v{i}") for i in range(3)]
        for _ in range(7):
            strategy.run(lambda: None)
        if comm.rank == 1:
            flip(copies[victim], 11)
        with pytest.raises(ms.DivergenceError) as caught:
            for _ in range(2 * len(copies)):
                strategy.run(lambda: None)
        return str(caught.value)

    for text in run_ranks(rank, size):
        assert f"'v{victim}:0'" in text
        assert ("rank 1 differs" if size > 2 else "ranks 0, 1 differ") in text


def test_copies_of_replicas_may_differ_and_checks_can_be_off(monkeypatch):
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", "0")

    def off(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v = ms.Variable(1.0)
        if comm.rank:
            flip(v, 0)
        for _ in range(5):
            strategy.run(lambda: None)
        return True

    assert run_ranks(off, 2) == [True, True]
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", "1")

    def own(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            v = ms.Variable(
                0.0,
                synchronization=ms.VariableSynchronization.ON_READ,
                aggregation=ms.VariableAggregation.SUM,
            )
        strategy.run(lambda: v.assign(float(comm.rank)))
        return float(v.numpy())

    assert run_ranks(own, 3) == [3.0] * 3


def test_a_variable_that_is_gone_on_one_rank_is_no_alarm(monkeypatch):
    monkeypatch.setenv("MPISTRAT_CHECK_EVERY", "1")

    def rank(comm):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            kept = [ms.Variable(1.0)]
        if comm.rank:
            kept.clear()
        for _ in range(3):
            strategy.run(lambda: None)
        return True

    assert run_ranks(rank, 3) == [True] * 3


def test_an_option_that_is_set_too_late_is_told(monkeypatch):
    def program(comm):
        ms.MirroredStrategy()
        if comm.rank == 0:
            monkeypatch.setenv("MPISTRAT_NAN", "raise")
        ms.MirroredStrategy().run(lambda: None)

    with pytest.warns(RuntimeWarning, match="MPISTRAT_NAN changed after the options had been read"):
        run_ranks(program, 2)
