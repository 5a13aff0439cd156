"""Schedules and the arithmetic beneath them."""

from __future__ import annotations

import json
import math
import pickle
from fractions import Fraction
from pathlib import Path

import numpy as np
import optim_cases as cases
import pytest

from mpistrat import optim
from mpistrat.optim.schedules import cos_pi, evaluate_schedule, power

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())["schedules"]


@pytest.mark.parametrize("title", cases.SCHEDULES)
class TestSchedules:
    def test_they_are_those_of_optax(self, title):
        schedule = cases.SCHEDULES[title][0]
        found = [schedule(step) for step in cases.SCHEDULE_STEPS]
        assert found == pytest.approx(RECORDED[title], rel=1e-6)  # it computes some in float32

    def test_they_are_values(self, title):
        schedule = cases.SCHEDULES[title][0]
        assert pickle.loads(pickle.dumps(schedule)) == schedule
        assert eval(repr(schedule), vars(optim)) == schedule
        assert len({schedule, pickle.loads(pickle.dumps(schedule))}) == 1

    def test_they_give_python_floats(self, title):
        assert all(type(cases.SCHEDULES[title][0](step)) is float for step in (0, 3, 500))

    def test_any_may_come_after_a_warm_up(self, title):
        schedule = cases.SCHEDULES[title][0]
        warm = optim.WarmUp(schedule, 4, start=0.1)
        assert warm(0) == 0.1
        assert warm(2) == pytest.approx((0.1 + schedule(0)) / 2)
        assert [warm(4 + step) for step in (0, 7, 90)] == [schedule(step) for step in (0, 7, 90)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.Linear(0.1, 0.0, 0),
        lambda: optim.Cosine(0.1, -1),
        lambda: optim.WarmUp(0.1, 2.5),
        lambda: optim.Steps(0.1, 0.5),
        lambda: optim.Steps(0.1, 0.5, at=(3,), every=3),
        lambda: optim.Steps(0.1, 0.5, every=0),
    ],
)
def test_what_cannot_be_is_refused(make):
    with pytest.raises(ValueError):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: optim.Constant("0.1"), r"Constant\(value='0.1'\): expected a number"),
        (lambda: optim.Linear(0.1, None, 3), r"Linear\(stop=None\): expected a number"),
        (lambda: optim.Cosine("0.1", 3), r"Cosine\(start='0.1'\): expected a number"),
        (lambda: optim.WarmUp(None, 3), r"WarmUp\(then=None\): expected a number"),
        (lambda: optim.WarmUp(0.1, 3, start=True), r"WarmUp\(start=True\): expected a number"),
        (lambda: optim.Steps(0.1, None, every=3), r"Steps\(factor=None\): expected a number"),
        (lambda: optim.Steps(0.1, 0.5, at=3), r"Steps\(at=3\): expected the numbers of steps"),
        (lambda: optim.Steps(0.1, 0.5, at=("3",)), r"Steps\(at=\('3',\)\): expected the numbers"),
    ],
)
def test_what_is_no_number_is_refused_when_it_is_made(make, words):
    with pytest.raises(TypeError, match=words):
        make()


def test_steps_may_come_from_any_iterable():
    assert optim.Steps(1.0, 0.5, at=iter([4, 1])) == optim.Steps(1.0, 0.5, at=(1, 4))


@pytest.mark.parametrize("count", [np.int64(3), np.uint8(3), np.array(3)])
def test_integers_of_numpy_are_pythons(count):
    made = [
        optim.Cosine(0.1, count),
        optim.Linear(1.0, 0.0, count),
        optim.Steps(1.0, 0.5, every=count),
    ]
    for one in (*made, optim.WarmUp(0.1, count), optim.SGD(0.1, accumulate=count)):
        assert "=3" in repr(one)
        assert "int" not in repr(one)
        assert "array" not in repr(one)


def test_a_warm_up_may_lead_to_a_number_or_a_function():
    assert optim.WarmUp(2.0, 2)(1) == 1.0
    assert optim.WarmUp(lambda step: 2.0 + step, 2)(5) == 5.0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_values_that_cannot_be_used_name_their_step(value):
    with pytest.raises(ValueError, match="at step 3"):
        evaluate_schedule(lambda step: value, 3)


@pytest.mark.parametrize("value", [None, np.ones(1), 1j, "0.1"])
def test_what_is_no_number_is_named_with_its_step(value):
    with pytest.raises(TypeError, match=r"<lambda> .* is .* at step 3; expected a number"):
        evaluate_schedule(lambda step: value, 3)


class TestFloats:
    def test_powers_are_close_to_exact_ones(self):
        for base in (0.9, 0.999, 0.5, 2.0):
            for exponent in (0, 1, 2, 7, 100, 1000):
                assert power(base, exponent) == pytest.approx(
                    float(Fraction(base) ** exponent), rel=1e-13
                )
        assert power(0.999, 10**9) == 0.0

    def test_cosines_are_as_exact_as_those_of_the_library(self):
        for k in range(1001):
            assert cos_pi(k / 1000) == pytest.approx(math.cos(math.pi * k / 1000), abs=1e-15)
        assert [cos_pi(x) for x in (0.0, 0.5, 1.0)] == [1.0, 0.0, -1.0]
