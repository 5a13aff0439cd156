"""What is not a function or no arguments is named, on every rank."""

from __future__ import annotations

import enum

import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.testing import run_ranks

VIEWS = [ms.MirroredStrategy, ms.MultiWorkerMirroredStrategy]
DATA = ms.Dataset.range(2).batch(1)


def merged(*args, **kwargs):
    return lambda: ms.get_replica_context().merge_call(*args, **kwargs)


def steps(strategy, *args):
    return strategy.extended.experimental_run_steps_on_iterator(*args)


WRONG = {
    "run: fn": (lambda s: s.run(3), TypeError),
    "run: args": (lambda s: s.run(abs, 3), ValueError),
    "run: args ": (lambda s: s.run(abs, "x"), ValueError),
    "run: kwargs": (lambda s: s.run(abs, (), [1]), TypeError),
    "run: kwargs ": (lambda s: s.run(abs, (), {1: 2}), TypeError),
    "merge_call: merge_fn": (lambda s: s.run(merged(None)), TypeError),
    "merge_call: args": (lambda s: s.run(merged(abs, 3)), ValueError),
    "merge_call: kwargs": (lambda s: s.run(merged(abs, (), [1])), TypeError),
    "experimental_run: input_iterator": (lambda s: s.experimental_run(abs, iter([1])), TypeError),
    "update: fn": (lambda s: s.extended.update(None, 3), TypeError),
    "update: args": (lambda s: s.extended.update(None, abs, np.ones(1)), ValueError),
    "update: kwargs": (lambda s: s.extended.update(None, abs, (), [1]), TypeError),
    "update_non_slot: fn": (lambda s: s.extended.update_non_slot((), 3), TypeError),
    "update_non_slot: args": (lambda s: s.extended.update_non_slot((), abs, 3), ValueError),
    "update_non_slot: kwargs": (
        lambda s: s.extended.update_non_slot((), abs, (), {1: 2}),
        TypeError,
    ),
    "experimental_distribute_values_from_function: value_fn": (
        lambda s: s.experimental_distribute_values_from_function(3),
        TypeError,
    ),
    "distribute_datasets_from_function: dataset_fn": (
        lambda s: s.distribute_datasets_from_function(DATA),
        TypeError,
    ),
    "make_input_fn_iterator: input_fn": (lambda s: s.make_input_fn_iterator(DATA), TypeError),
    "experimental_run_steps_on_iterator: iterator": (lambda s: steps(s, abs, DATA), TypeError),
    "experimental_run_steps_on_iterator: fn": (lambda s: steps(s, 3, iter([1])), TypeError),
}


@every("make", VIEWS)
@every("what", WRONG)
def test_the_argument_is_named_on_every_rank(make, what):
    call, error = WRONG[what]

    def rank(comm):
        strategy = make()
        with pytest.raises(error, match=f"{what.strip()} must be") as found:
            if comm.rank == 1:
                call(strategy)
            else:
                strategy.run(lambda: None)
        alone = ms.OneDeviceStrategy("cpu")
        with pytest.raises(error, match=f"{what.strip()} must be"):
            call(alone)
        return isinstance(found.value, ms.RemoteError), float(strategy.run(lambda: 1.0) is not None)

    assert run_ranks(rank, 2) == [(True, 1), (False, 1)]


@pytest.mark.parametrize("make", VIEWS)
def test_values_are_made_in_replica_code_too(make):
    def rank(comm):
        strategy = make()
        call = strategy.experimental_distribute_values_from_function
        seen = []
        strategy.run(lambda: seen.append(call(lambda c: c.replica_id_in_sync_group).local))
        made = call(lambda c: (c.replica_id_in_sync_group, ms.in_cross_replica_context()))
        return seen[0], made[0].local, made[1].local

    assert run_ranks(rank, 2) == [(0, 0, False), (1, 1, False)]


class Kind(enum.IntEnum):
    GOOD = 1


@pytest.mark.parametrize("value", [Kind.GOOD, np.str_("text"), np.float32(2), "text", 1, True, 2.5])
def test_values_have_the_same_types_on_every_rank(value):
    def rank(comm):
        strategy = ms.MirroredStrategy()
        results = strategy.experimental_local_results(strategy.run(lambda: value))
        return [(type(result), result == value) for result in results]

    assert run_ranks(rank, 2) == [[(type(value), True)] * 2] * 2


@pytest.mark.parametrize("make", [*VIEWS, lambda: ms.OneDeviceStrategy("cpu")])
@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (("a", "b"), TypeError, r"^long_operation\('a'\): max_seconds must be a number of seconds"),
        (("a", None), TypeError, r"seconds, got None \(NoneType\)\.$"),
        ((3, 5), TypeError, r"^long_operation: name must be a string, got 3\.$"),
        (("a", 0), ValueError, r"long_operation\('a'\) wants max_seconds > 0, not 0"),
    ],
)
def test_a_long_operation_is_told_by_name_and_seconds(make, given, error, text):
    strategy = make()
    with pytest.raises(error, match=text), strategy.long_operation(*given):
        pass
    with strategy.long_operation("save", np.float32(2.5)):
        pass


def updated(strategy):
    with strategy.scope():
        w = ms.Variable([0, 0], name="w")
    strategy.run(lambda: ms.optim.SGD(0.1).apply_gradients([(np.ones(2), w)]))


# What a beginner writes, and what the error says to write instead.
INSTEAD = {
    "an argument more": (lambda s: s.run(np.add, (1,), (2,)), r"args=\(x, y\)"),
    "an axis of numbers": (
        lambda s: s.reduce("mean", s.run(lambda: 1.0), axis=0),
        "With axis=None values are reduced over the replicas only",
    ),
    "weights that are integers": (updated, "Create it from floating-point values"),
}


@pytest.mark.parametrize("what", INSTEAD)
def test_the_error_says_what_to_write_instead(what):
    call, text = INSTEAD[what]

    def rank(comm):
        with pytest.raises(Exception, match=text):
            call(ms.MirroredStrategy())

    run_ranks(rank, 2)


BATCH = (np.ones(2), np.ones(2))
CALLS = {
    "run": (
        lambda s, args: s.run(lambda x, y: None, args),
        lambda s, args: s.run(lambda x: None, args),
    ),
    "merge_call": (
        lambda s, args: s.run(
            lambda: ms.get_replica_context().merge_call(lambda s, x, y: None, args)
        ),
        lambda s, args: s.run(lambda: ms.get_replica_context().merge_call(lambda s, x: None, args)),
    ),
    "update": (
        lambda s, args: s.extended.update(variable_of(s), lambda v, x, y: None, args),
        lambda s, args: s.extended.update(variable_of(s), lambda v, x: None, args),
    ),
}


def variable_of(strategy):
    with strategy.scope():
        return ms.Variable(0.0)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_tuple_that_is_one_argument_or_several(call, size):
    two, one = CALLS[call]

    def program(comm):
        strategy = ms.MirroredStrategy()
        with pytest.raises(
            TypeError, match=rf"'y'\n  {call}: .* a tuple of 2\. Write args=batch if"
        ):
            two(strategy, (BATCH,))
        with pytest.raises(TypeError, match=rf"{call}: args has 2 .*\. Write args=\(batch,\) if"):
            one(strategy, BATCH)
        two(strategy, BATCH)
        one(strategy, (BATCH,))
        with pytest.raises(TypeError) as told:  # neither helps
            two(strategy, (1,))
        assert "Write args" not in str(told.value)

    run_ranks(program, size)


def test_an_error_of_what_the_function_does_stays_as_it_is():
    with pytest.raises(TypeError) as told:
        ms.MirroredStrategy().run(lambda batch: len(1), (BATCH,))
    assert "Write args" not in str(told.value)
    with pytest.raises(TypeError) as told:  # Python knows no arguments of it
        ms.MirroredStrategy().run(min, (1,))
    assert "Write args" not in str(told.value)
