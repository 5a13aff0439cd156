"""Optimizers beside torch and optax, their hyper-parameters, and groups."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import optim_cases as cases
import pytest

from mpistrat import optim
from mpistrat.optim import words

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
# float32: of the largest element, as one near 0 has the errors of what it came from.
CLOSE = {"float64": (1e-12, 0.0), "float32": (1e-5, 1e-6)}


LOOPS = [
    pytest.param(title, dtype, True, marks=marks, id=f"{title}-{dtype}-loop")
    for title, (name, given) in cases.CASES.items()
    for dtype in CLOSE
    for marks in [cases.late(optim.OPTIMIZERS[name](**given), dtype)]
]
TWINS = [
    pytest.param(title, dtype, False, id=f"{title}-{dtype}-twin")
    for title in cases.CASES
    for dtype in CLOSE
]


@pytest.mark.parametrize(("title", "dtype", "compiled"), LOOPS + TWINS)
def test_a_hundred_steps_are_those_of_torch_and_optax(title, dtype, compiled):
    name, given = cases.CASES[title]
    optimizer = optim.OPTIMIZERS[name](**given)
    trained = [cases.Trained(optimizer, w, compiled) for w in cases.weights(np.dtype(dtype))]
    compared = 0
    for step in range(cases.STEPS):
        for k, (one, shape) in enumerate(zip(trained, cases.SHAPES, strict=True)):
            g = cases.gradient(step, k, one.w.reshape(shape))
            one.step(step, g.reshape(1, -1))
        for one, w in zip(
            trained, RECORDED[f"{title} {dtype}"].get(str(step + 1), ()), strict=False
        ):
            wanted = np.array([float.fromhex(x) for x in w])
            relative, absolute = CLOSE[dtype]
            scale = absolute * np.abs(wanted).max()
            np.testing.assert_allclose(one.w, wanted, relative, scale, err_msg=f"step {step + 1}")
            compared += 1
    assert compared == len(cases.SHOWN) * len(cases.SHAPES)


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
class TestEvery:
    def test_it_is_a_value(self, name):
        kind = optim.OPTIMIZERS[name]
        groups = [optim.Group("*bias*", learning_rate=optim.Constant(0.1))]
        made = kind(optim.WarmUp(0.1, 5), groups=groups, clip=optim.ClipByGlobalNorm(1.0))
        assert pickle.loads(pickle.dumps(made)) == made
        assert hash(made) == hash(dataclasses.replace(made))
        assert made != kind(0.1)
        assert made._text() == repr(made)
        assert made._describe_options().endswith("clip=ClipByGlobalNorm(limit=1.0))")
        assert kind(0.1)._describe_options() == f"{kind.__name__}(learning_rate=0.1)"
        assert "WarmUp(then=0.1, steps=5" in made._text() and "Group('*bias*'" in made._text()
        with pytest.raises(dataclasses.FrozenInstanceError):
            made.learning_rate = 1.0

    def test_numbers_are_python_floats(self, name):
        made = optim.OPTIMIZERS[name](np.float32(0.5), ema=np.float64(0.5))
        assert type(made.learning_rate) is float
        assert all(type(number) is float for number in made.scalars(3, (2.0, 3.0)))
        assert optim.OPTIMIZERS[name](1) == optim.OPTIMIZERS[name](1.0)

    def test_slots_that_are_asked_for_are_named(self, name):
        kind = optim.OPTIMIZERS[name]
        assert kind(0.1).slots() == kind(0.1).rule.slots
        assert kind(0.1, accumulate=2, ema=0.9).slots()[-2:] == ("pending", "ema")

    @pytest.mark.parametrize(
        ("given", "error", "words"),
        [
            ({"learning_rate": -1.0}, ValueError, "learning_rate=-1.0"),
            ({"learning_rate": float("nan")}, ValueError, "learning_rate=nan"),
            ({"learning_rate": "0.1"}, TypeError, "expected a number"),
            ({"ema": 1.0}, ValueError, "below 1"),
            ({"accumulate": 0}, ValueError, "accumulate=0"),
            ({"clip": 1.0}, TypeError, "ClipByGlobalNorm"),
            ({"nonfinite": "stop"}, ValueError, "'raise', 'skip'"),
            ({"loss_scale": optim.LossScale()}, ValueError, "nonfinite='skip'"),
            ({"loss_scale": 8.0, "nonfinite": "skip"}, TypeError, "expected LossScale"),
            ({"groups": ["*bias*"]}, TypeError, "is not a Group"),
            ({"groups": 5}, TypeError, r"groups=5\): expected a list of them"),
            ({"groups": [optim.Group("*", decay=0.0)]}, ValueError, "decay; a group of .* may"),
            ({"groups": [optim.Group("*", ema=0.5)]}, ValueError, "changes ema"),
            ({"groups": [optim.Group("*", learning_rate=-2)]}, ValueError, "learning_rate=-2"),
        ],
    )
    def test_what_cannot_be_is_refused(self, name, given, error, words):
        with pytest.raises(error, match=words):
            optim.OPTIMIZERS[name](**given)


def test_nesterov_needs_a_momentum():
    with pytest.raises(ValueError, match="momentum"):
        optim.SGD(0.1, nesterov=True)


@pytest.mark.parametrize("given", ["False", None, 2, np.array(True)])
def test_switches_are_on_or_off(given):
    for make, name in ((optim.SGD, "nesterov"), (optim.LARS, "nesterov"), (optim.LAMB, "adapt")):
        with pytest.raises(TypeError, match=rf"\({name}\) must be True or False, got"):
            make(0.1, **{name: given})
    assert optim.LAMB(0.1, adapt=np.False_) == optim.LAMB(0.1, adapt=False)


def test_a_schedule_that_fails_is_named():
    with pytest.raises(ValueError, match="at step 7"):
        optim.SGD(lambda step: -1.0).rate(7)


WORDS = {
    "lr": (optim.Adam, "learning_rate"),
    "betas": (optim.AdamW, "beta_1 and beta_2"),
    "b1": (optim.Lion, "beta_1"),
    "beta2": (optim.LAMB, "beta_2"),
    "eps": (optim.Adam, "epsilon"),
    "momentum": (optim.Adam, "beta_1"),
    "alpha": (optim.RMSprop, "beta_2"),
    "rho": (optim.RMSprop, "beta_2"),
    "initial_accumulator": (optim.Adagrad, "initial_accumulator_value"),
    "wd": (optim.SGD, "weight_decay"),
    "decay": (optim.LARS, "weight_decay"),
    "weight_deacy": (optim.SGD, "weight_decay"),
    "trust_coefficient": (optim.LARS, "trust"),
    "clipnorm": (optim.SGD, "clip"),
    "ema_momentum": (optim.SGD, "ema"),
    "gradient_accumulation_steps": (optim.Adam, "accumulate"),
    "init_scale": (optim.LossScale, "start"),
    "growth_interval": (optim.LossScale, "every"),
    "max_norm": (optim.ClipByGlobalNorm, "limit"),
    "T_max": (optim.Cosine, "steps"),
    "milestones": (optim.Steps, "at"),
    "end_value": (optim.Linear, "stop"),
    "warmup_steps": (optim.WarmUp, "steps"),
}


class TestNamesOfArguments:
    @pytest.mark.parametrize("word", WORDS)
    def test_those_of_other_libraries_are_known(self, word):
        kind, meant = WORDS[word]
        text = rf"^{kind.__name__} has no argument {word} \(did you mean {meant}\?\)\. It takes "
        with pytest.raises(TypeError, match=text):
            kind(**{word: 0.1})

    def test_several_at_once(self):
        with pytest.raises(TypeError, match=r"mean learning_rate, beta_1, beta_2 and epsilon\?"):
            optim.Adam(lr=0.1, betas=(0.9, 0.99), eps=1e-8)

    def test_what_nothing_is_like(self):
        with pytest.raises(TypeError, match=r"^Adam has no argument amsgrad\. It takes learning_r"):
            optim.Adam(0.1, amsgrad=True)
        with pytest.raises(TypeError, match=r"^SGD has no argument betas\. It takes"):
            optim.SGD(0.1, betas=(0.9, 0.99))

    def test_in_groups_and_copies(self):
        with pytest.raises(ValueError, match=r"changes lr; .* \(did you mean learning_r"):
            optim.SGD(0.1, groups=[optim.Group("*", lr=0.2)])
        with pytest.raises(TypeError, match=r"did you mean learning_rate"):
            dataclasses.replace(optim.SGD(0.1), lr=0.2)

    def test_every_word_is_another_one_here(self):
        kinds = [*optim.OPTIMIZERS.values(), optim.LossScale, optim.ClipByValue, optim.Steps]
        kinds += [optim.Cosine, optim.Linear, optim.WarmUp, optim.Constant]
        names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
        assert {name for meant in words._EQUIVALENTS.values() for name in meant} <= names


class TestGroups:
    def test_later_groups_win_and_what_they_do_not_name_stays(self):
        made = optim.AdamW(
            0.1,
            weight_decay=0.5,
            groups=[
                optim.Group("*bias*", weight_decay=0.0),
                optim.Group(lambda name, shape: len(shape) == 2, beta_1=0.5, weight_decay=0.25),
            ],
        )
        found = {
            (name, shape): made.of(name, shape)
            for name in ("a/bias", "a/kernel")
            for shape in [(3,), (3, 3)]
        }
        assert {key: (one.weight_decay, one.beta_1) for key, one in found.items()} == {
            ("a/bias", (3,)): (0.0, 0.9),
            ("a/bias", (3, 3)): (0.25, 0.5),
            ("a/kernel", (3,)): (0.5, 0.9),
            ("a/kernel", (3, 3)): (0.25, 0.5),
        }
        assert all(one.groups == () and one.learning_rate == 0.1 for one in found.values())

    def test_a_group_may_change_the_slots(self):
        made = optim.SGD(0.1, 0.9, groups=[optim.Group("embedding", momentum=0.0)])
        slots = [
            one.slots()
            for one in made._resolve_all_settings([("embedding", (9, 2)), ("dense", (2, 2))])
        ]
        assert slots == [(), ("momentum",)]

    def test_a_pattern_of_nothing_is_a_mistake(self):
        made = optim.SGD(0.1, groups=[optim.Group("*biass*", weight_decay=0.0)])
        with pytest.raises(ValueError, match=r"biass.*has no variable; there are dense/bias"):
            made._resolve_all_settings([("dense/bias", (3,))])

    def test_functions_have_a_text_without_an_address(self):
        made = optim.SGD(0.1, groups=[optim.Group(lambda name, shape: True, learning_rate=0.2)])
        assert "<lambda>" in made._text() and " at 0x" not in made._text()

    @pytest.mark.parametrize(("args", "changes"), [((3,), {"learning_rate": 1}), (("*",), {})])
    def test_what_is_no_group_is_refused(self, args, changes):
        with pytest.raises(TypeError):
            optim.Group(*args, **changes)


class TestRatios:
    def test_norms_of_zero_and_switched_off_ratios_are_one(self):
        for kind, at in [(optim.LAMB, -1), (optim.LARS, 1)]:
            plain = kind(0.5).scalars(0)[at] if kind is optim.LAMB else 0.5
            for norms in [(0.0, 2.0), (2.0, 0.0)]:
                assert kind(0.5).scalars(0, norms)[at] == plain
            assert kind(0.5, adapt=False).scalars(0, (3.0, 2.0))[at] == plain
