"""A rank that fails tells the others; what has failed stays closed until it has ended."""

from __future__ import annotations

import builtins
import contextlib
import random

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

ctx = ms.get_replica_context


class Custom(KeyError):
    """A program's own exception."""


class Silent(Exception):
    """One whose text cannot be had."""

    def __str__(self):
        raise RuntimeError("no text")


KINDS = [
    ValueError("v"), Custom("k"), OSError(2, "gone", "file"), StopIteration(3), SystemExit(4),
    KeyboardInterrupt(), Silent(), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
    AssertionError(), RecursionError("deep"), GeneratorExit(), ms.LeafTypeError("leaf"),
]  # fmt: skip


@every("error", KINDS)
@every("place", ["before", "after", "merge_fn"])
def test_an_exception_on_one_rank(strategy_on, error, place):
    def rank(comm):
        strategy = strategy_on(comm)

        def merge(_):
            if comm.rank == 1 and place == "merge_fn":
                raise error

        def fn():
            if comm.rank == 1 and place == "before":
                raise error
            ctx().all_reduce("SUM", np.ones(100))
            ctx().merge_call(merge)
            if comm.rank == 1 and place == "after":
                raise error

        with pytest.raises(BaseException) as caught:
            strategy.run(fn)
        return caught.value, float(strategy.run(lambda: ctx().all_reduce("SUM", 1.0)).local)

    for at, (got, after) in enumerate(run_ranks(rank, 3)):
        assert after == 3.0
        if at == 1:
            assert got is error
        else:
            assert isinstance(got, ms.RemoteError)
            assert got.rank == 1
            assert got.kind == type(error).__name__
            assert "test_failures.py" in got.remote_traceback
            builtin = next(c for c in type(error).__mro__ if c.__module__ == "builtins")
            if issubclass(builtin, Exception):
                assert isinstance(got, builtin)


def test_an_exception_whose_text_makes_a_call():
    def rank(comm):
        strategy = ms.MirroredStrategy()

        class Asking(Exception):
            def __str__(self):
                return str(strategy.all_reduce("SUM", 1.0))

        def fn():
            if comm.rank == 1:
                raise Asking
            return ctx().all_reduce("SUM", 1.0)

        with pytest.raises(BaseException) as caught:
            strategy.run(fn)
        return caught.value, float(strategy.all_reduce("SUM", 1.0))

    found = run_ranks(rank, 2)
    assert [after for _, after in found] == [2.0, 2.0]
    assert type(found[1][0]).__name__ == "Asking"
    assert isinstance(found[0][0], ms.RemoteError)
    assert "no text: its __str__ raised LockstepError" in str(found[0][0])


def test_an_exception_group_on_one_rank():
    group = getattr(builtins, "ExceptionGroup", None)
    if group is None:
        pytest.skip("Python 3.11 or newer")

    def rank(comm):
        def fn():
            if comm.rank == 1:
                raise group("several", [ValueError(1), KeyError(2)])

        with pytest.raises(Exception) as caught:
            ms.MirroredStrategy().run(fn)
        return type(caught.value)

    zero, one = run_ranks(rank, 2)
    assert one is group
    assert issubclass(zero, ms.RemoteError)


def test_several_ranks_fail_each_with_its_own():
    def rank(comm):
        def fn():
            if comm.rank != 1:
                raise [KeyError, None, OSError, ValueError][comm.rank](f"mine {comm.rank}")

        with pytest.raises(Exception) as caught:
            ms.MirroredStrategy().run(fn)
        return caught.value

    zero, one, two, three = run_ranks(rank, 4)
    assert type(zero) is KeyError
    assert type(two) is OSError
    assert type(three) is ValueError
    assert isinstance(one, KeyError)
    assert one.rank == 0
    assert "ranks 2, 3 failed too" in str(one)


def test_the_same_exception_everywhere_is_everyones_own():
    def rank(comm):
        with pytest.raises(ZeroDivisionError) as caught:
            ms.MirroredStrategy().run(lambda: 1 / 0)
        return isinstance(caught.value, ms.RemoteError)

    assert run_ranks(rank, 3) == [False] * 3


def test_a_run_that_failed_is_closed_until_it_ends():
    def rank(comm):
        strategy = ms.MirroredStrategy()
        seen = []

        def fn():
            try:
                ctx().all_reduce("SUM", np.ones(2 + comm.rank))
            except ms.LockstepError as error:
                seen.append(error)
            for call in (
                lambda: ctx().all_reduce("SUM", 1.0),
                lambda: ctx().all_gather(np.ones(1), 0),
                lambda: ctx().merge_call(lambda s: 1),
            ):
                with pytest.raises(ms.ContextError, match="has failed"):
                    call()
            return "swallowed"

        with pytest.raises(ms.LockstepError) as caught:
            strategy.run(fn)
        assert caught.value is seen[0]
        return float(strategy.run(lambda: ctx().all_reduce("SUM", 1.0)).local)

    assert run_ranks(rank, 2) == [2.0, 2.0]


def test_one_rank_swallows_the_error_and_still_all_fail():
    def rank(comm):
        def fn():
            try:
                ctx().all_reduce("SUM", "text" if comm.rank == 1 else 1.0)
            except TypeError:
                if comm.rank == 0:
                    raise
            return 1

        with pytest.raises(TypeError):
            ms.MirroredStrategy().run(fn)

    run_ranks(rank, 3)


def test_a_run_inside_merge_fn_fails_with_its_outer_run():
    def rank(comm):
        strategy = ms.MirroredStrategy()

        def inner():
            if comm.rank == 1:
                raise ValueError("inner")
            return 1

        def merge(s):
            with contextlib.suppress(ValueError):
                s.run(inner)
            with pytest.raises(ms.ContextError):
                s.reduce("SUM", ms.PerReplica(1.0), None)

        with pytest.raises(ValueError, match="inner"):
            strategy.run(lambda: ctx().merge_call(merge))
        nested = lambda s: s.run(lambda: ctx().all_reduce("SUM", 1))  # noqa: E731
        values = strategy.run(lambda: ctx().merge_call(nested))
        return int(values.local)

    assert run_ranks(rank, 2) == [2, 2]


def test_value_functions_and_datasets_that_fail_on_one_rank():
    def rank(comm):
        strategy = ms.MirroredStrategy()

        def value_fn(context):
            if comm.rank == 1:
                raise KeyError("value")
            return 1

        with pytest.raises(KeyError):
            strategy.experimental_distribute_values_from_function(value_fn)

        def batches():
            yield np.ones(2)
            if comm.rank == 1:
                raise OSError("disk")
            yield np.ones(2)

        data = strategy.experimental_distribute_dataset(ms.Dataset.from_batches(batches))
        seen = 0
        with pytest.raises(OSError, match="disk"):
            for _ in data:
                seen += 1
        return seen, float(strategy.reduce("SUM", ms.PerReplica(1.0), None))

    assert run_ranks(rank, 2) == [(1, 2.0), (1, 2.0)]


def _fault(choice, comm, odd):
    """One way to go wrong, on the ranks in `odd`."""
    if comm.rank not in odd:
        ctx().all_reduce("SUM", np.ones(3))
        ctx().merge_call(lambda s, x: s.reduce("SUM", x, None), args=(1.0,))
        return 1
    if choice == 0:
        raise ValueError("fault")
    if choice == 1:
        return ctx().all_reduce("SUM", np.ones(4))
    if choice == 2:
        return ctx().all_reduce("SUM", "text")
    if choice == 3:
        return 1
    if choice == 4:
        ctx().all_reduce("SUM", np.ones(3))
        return ctx().merge_call(lambda s, x: 1 / 0, args=(1.0,))
    if choice == 5:
        try:
            ctx().merge_call(lambda s: 1)
        except RuntimeError:
            return [2]
    return ctx().strategy.reduce("SUM", 1.0, None)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_two_hundred_rounds_of_random_faults_never_hang(strategy_on, size):
    """`try` around `run` is symmetric: all ranks raise in the same rounds, and no others."""

    def rank(comm):
        strategy = strategy_on(comm)
        draw = random.Random(size)
        rounds = []
        for _ in range(200):
            choice, count = draw.randrange(7), draw.randrange(size + 1)
            odd = set(draw.sample(range(size), count))
            try:
                strategy.run(_fault, args=(choice, comm, odd))
                rounds.append(True)
            except (ValueError, TypeError, RuntimeError, ArithmeticError):
                rounds.append(False)
            assert strategy._replicas.lockstep.state.run.depth == 0
        return rounds, float(strategy.run(lambda: ctx().all_reduce("SUM", 1.0)).local)

    everyones = run_ranks(rank, size)
    assert all(found == everyones[0] for found in everyones)
    assert everyones[0][1] == size
    assert 10 < sum(everyones[0][0]) < 150
