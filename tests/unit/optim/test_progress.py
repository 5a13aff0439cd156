"""Counters, loss scales and clipping: pure functions that all ranks call with the same numbers."""

from __future__ import annotations

import math
import pickle

import pytest

from mpistrat import optim
from mpistrat.optim.base import Progress


class TestClipping:
    def test_by_norm_leaves_what_is_small_alone(self):
        clip = optim.ClipByGlobalNorm(2.0)
        assert [clip.factor(norm) for norm in (0.0, 1.0, 2.0, 8.0)] == [1.0, 1.0, 1.0, 0.25]

    @pytest.mark.parametrize("norm", [math.nan, math.inf])
    def test_a_norm_that_is_not_finite_shows(self, norm):
        assert math.isnan(optim.ClipByGlobalNorm(2.0).factor(norm))

    @pytest.mark.parametrize("kind", [optim.ClipByGlobalNorm, optim.ClipByValue])
    def test_limits_are_above_zero(self, kind):
        assert pickle.loads(pickle.dumps(kind(1.0))) == kind(1.0)
        for limit in (0.0, -1.0, math.nan, math.inf):
            with pytest.raises(ValueError, match="above 0"):
                kind(limit)
        for limit in (None, "1", True, [1.0]):
            with pytest.raises(TypeError, match="the limit must be a number"):
                kind(limit)


class TestAccumulation:
    def test_every_fourth_call_updates(self):
        optimizer = optim.SGD(0.1, accumulate=4)
        progress, due, weights = Progress.start(optimizer), [], []
        for call in range(9):
            due.append(progress.is_update_due(optimizer))
            weights.append(progress.weight)
            progress = (
                progress.count_update(optimizer) if due[-1] else progress.count_call(call + 1.0)
            )
        assert due == [False, False, False, True] * 2 + [False]
        assert weights == [0.0, 1.0, 3.0, 6.0, 0.0, 5.0, 11.0, 18.0, 0.0]
        assert (progress.step, progress.calls, progress.weight) == (2, 1, 9.0)

    def test_without_it_every_call_does(self):
        assert Progress().is_update_due(optim.SGD(0.1))

    def test_what_is_left_out_does_not_count_as_a_step(self):
        optimizer = optim.SGD(0.1, accumulate=2, nonfinite="skip")
        left = Progress(step=3).count_call(2.0).count_skipped_update(optimizer)
        assert left == Progress(step=3, skipped=1)


class TestLossScale:
    def optimizer(self, **given):
        return optim.Adam(nonfinite="skip", loss_scale=optim.LossScale(**given))

    def test_it_grows_after_good_updates_and_falls_after_bad_ones(self):
        optimizer = self.optimizer(start=8.0, every=3)
        progress, scales = Progress.start(optimizer), []
        for good in "ggbggggggb":
            progress = (
                progress.count_update(optimizer)
                if good == "g"
                else progress.count_skipped_update(optimizer)
            )
            scales.append(progress.scale)
        assert scales == [8, 8, 4, 4, 4, 8, 8, 8, 16, 8]
        assert (progress.step, progress.skipped, progress.good) == (8, 2, 0)

    def test_it_stays_finite_and_above_the_least(self):
        optimizer = self.optimizer(start=1e308, every=1, least=0.75e308)
        progress = Progress.start(optimizer)
        assert progress.count_update(optimizer).scale == 1e308
        assert (
            progress.count_skipped_update(optimizer).count_skipped_update(optimizer).scale
            == 0.75e308
        )

    def test_without_one_the_scale_is_one(self):
        optimizer = optim.SGD(0.1, nonfinite="skip")
        assert (
            Progress.start(optimizer).count_skipped_update(optimizer).count_update(optimizer).scale
            == 1.0
        )

    @pytest.mark.parametrize(
        "given", [{"growth": 0.5}, {"backoff": 2.0}, {"every": 0}, {"start": 0.5}, {"backoff": 0.0}]
    )
    def test_what_cannot_be_is_refused(self, given):
        with pytest.raises(ValueError, match="growth >= 1 >= backoff"):
            optim.LossScale(**given)

    @pytest.mark.parametrize(
        "given",
        [{"start": "1"}, {"growth": None}, {"least": True}, {"every": 2.5}, {"backoff": ()}],
    )
    def test_what_is_no_number_is_refused(self, given):
        name = next(iter(given))
        with pytest.raises(TypeError, match=rf"LossScale\(.*{name}=.*: expected numbers"):
            optim.LossScale(**given)
