"""Passes over memory: loops beside twins, cuts, folds, norms, and gradients that are not finite."""

from __future__ import annotations

import dis
import math
import sys

import numpy as np
import optim_cases as cases
import pytest

from mpistrat import optim
from mpistrat.kernels import jit
from mpistrat.kernels import rows as rows_module
from mpistrat.optim import passes
from mpistrat.optim.base import norm_of

B = passes.BLOCK
LENGTHS = (0, 1, 7, 8, 31, 4097, 2 * B + 100)
OPTIMIZERS = {
    **{name: kind(0.05) for name, kind in optim.OPTIMIZERS.items()},
    "heavy": optim.SGD(0.05, 0.9, nesterov=True, weight_decay=0.1),
    "adam l2": optim.Adam(0.05, weight_decay=0.1),
}


def random(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def trained(optimizer, n, dtype, compiled=True, cuts=(), ranks=3, steps=3):
    """Train on rows of several ranks, scaled, divided and clipped; return what there is then."""
    one = cases.Trained(optimizer, random(n, dtype), compiled, cuts)
    factors = np.array([1, 2.5, 0.5], dtype)[:ranks]
    for step in range(steps):
        rows = random((ranks, n), dtype, step + 1)
        one.step(step, rows, factors=factors, divisor=3.7, scale=0.3, limit=0.25)
    assert one.bad == 0
    return {"w": one.w, **one.slots}


def assert_same_bits(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].tobytes() == two[name].tobytes(), name


# In float64 few: rules name no dtype, see below.
LOOPS = [
    pytest.param(name, dtype, marks=cases.late(one, dtype))
    for name, one in OPTIMIZERS.items()
    for dtype in ("f4", "f8")
]


@pytest.mark.parametrize(("name", "dtype"), LOOPS)
class TestBits:
    @pytest.mark.parametrize("n", LENGTHS)
    def test_loops_and_twins_give_the_same(self, name, dtype, n):
        with_ema = type(OPTIMIZERS[name])(0.05, ema=0.9)
        for optimizer in (OPTIMIZERS[name], with_ema):
            assert_same_bits(
                trained(optimizer, n, dtype), trained(optimizer, n, dtype, compiled=False)
            )

    def test_it_does_not_matter_where_slices_are_cut(self, name, dtype):
        n, optimizer = 3 * B + 77, OPTIMIZERS[name]
        step = B if optimizer.rule.measure else 1  # sums are of whole blocks
        whole = trained(optimizer, n, dtype)
        for seed in range(5):
            cuts = sorted(np.random.default_rng(seed).integers(0, n // step, 3) * step)
            assert_same_bits(whole, trained(optimizer, n, dtype, bool(seed % 2), cuts))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_loop_of_a_rule_gives_what_its_twin_does(name):
    """What the passes call for each block, by itself; float32."""
    optimizer, n, low, high = OPTIMIZERS[name], 5000, 7, 4500
    rule, found = optimizer.rule, []
    for compiled in (True, False):
        w, out = random(n, "f4"), np.zeros(high - low, "f4")
        slots = tuple(np.zeros(n, "f4") for _ in rule.slots)
        for step in range(3):
            g, s = random(high - low, "f4", step), optimizer.scalars(step, (2.0, 3.0))
            more = (True,) if rule.can_guard else ()
            for kernel, last in ((rule.measure, (out,)), (rule.update, more)):
                if kernel is not None:
                    call = kernel.compiled() if compiled else kernel.reference
                    call(w, g, slots, np.array(s, "f4"), low, high, *last)
        found.append([w.tobytes(), out.tobytes(), *(slot.tobytes() for slot in slots)])
    assert found[0] == found[1]
    changed = np.frombuffer(found[0][0], "f4") != random(n, "f4")
    assert changed[low:high].any() and not changed[:low].any() and not changed[high:].any()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loops_have_no_functions_whose_bits_depend_on_the_processor(name):
    rule = OPTIMIZERS[name].rule
    for kernel in filter(None, [rule.update, rule.measure]):
        code = kernel._function.__code__
        assert set(code.co_names) <= {"range", "size", "math", "sqrt", "is_not_finite"}
        assert not [line for line in dis.get_instructions(code) if line.argrepr == "**"]


@pytest.mark.parametrize("compiled", [True, False], ids=["loop", "twin"])
class TestGradient:
    """By SGD with a rate of 1 from weights of 0, so weights are the gradient, negated."""

    def of(self, gradient, n, compiled):
        w = np.zeros(n, gradient.rows.dtype)
        rule, s = optim.SGD(1.0).rule, (1.0, 0.0)
        assert passes.update(rule, gradient, w, (), s, is_compiled=compiled) == 0
        return -w

    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_it_is_what_an_all_reduce_makes(self, compiled, ranks):
        n, dtype = B + 33, np.dtype("f4")
        rows, scales = random((ranks, n), dtype), np.array([3.0, 0.0, 1.5][:ranks])
        wanted = np.empty((1, n), dtype)
        rows_module.reduce_rows(np.add, rows, wanted, 0, n, scales=scales, divisor=4.5)
        made = passes.Gradient(rows, factors=scales.astype(dtype), divisor=4.5)
        np.testing.assert_array_equal(self.of(made, n, compiled), wanted[0])

    def test_a_slice_begins_anywhere_in_the_rows(self, compiled):
        rows = random((2, 100), "f8")
        found = self.of(passes.Gradient(rows, 13), 50, compiled)
        np.testing.assert_array_equal(found, rows[:, 13:63].sum(0))

    def test_it_is_scaled_and_then_clipped(self, compiled):
        rows = np.array([[1.0, -8.0, 0.5, 6.0]])
        made = passes.Gradient(rows, divisor=2.0, scale=0.5, limit=0.75)
        np.testing.assert_array_equal(self.of(made, 4, compiled), [0.25, -0.75, 0.125, 0.75])

    @pytest.mark.parametrize("ignore", [False, True])
    def test_infinities_are_clipped_if_nobody_looks_for_them(self, compiled, ignore):
        rows = np.array([[np.inf, -np.inf, np.nan, np.finfo("f8").max, 0.5]])
        made, w = passes.Gradient(rows, limit=0.75, should_clip_infinities=ignore), np.zeros(5)
        passes.update(
            optim.SGD(1.0).rule, made, w, (), (1.0, 0.0), is_guarded=False, is_compiled=compiled
        )
        ends = [0.75, -0.75] if ignore else [np.inf, -np.inf]
        np.testing.assert_array_equal(-w, [*ends, np.nan, 0.75, 0.5])

    def test_accumulated_calls_are_one_weighted_mean(self, compiled):
        n, weights = B + 5, np.array([[1.0, 2.0], [3.0, 0.5], [2.0, 2.0]])
        calls = random((3, 2, n), "f8")
        pending = np.zeros(n)
        for rows, w in zip(calls[:2], weights[:2], strict=True):
            # The divisor of a call that does not update must not matter.
            made = passes.Gradient(rows, factors=w, divisor=7.0, pending=pending)
            passes.accumulate(made, compiled)
        made = passes.Gradient(calls[2], 0, weights[2], weights.sum(), pending=pending)
        wanted = (calls * weights[:, :, None]).sum((0, 1)) / weights.sum()
        np.testing.assert_allclose(self.of(made, n, compiled), wanted, 1e-14, 1e-15)
        assert not pending.any()

    @pytest.mark.parametrize("weights", [[4.0], [1.0, 1.5], [3.0, 0.0, 2.0]])
    def test_a_weighted_sum_that_overflows_is_infinite(self, compiled, weights):
        rows, pending = np.full((len(weights), B + 5), 1.6e38, "f4"), np.zeros(B + 5, "f4")
        factors = np.array(weights, "f4")
        passes.accumulate(passes.Gradient(rows, factors=factors, pending=pending), compiled)
        assert np.isinf(pending).all()

    def test_what_is_kept_is_the_gradient(self, compiled):
        n, dtype = 2 * B + 9, np.dtype("f4")
        rows, pending = random((3, n + 4), dtype), random(n, dtype, 9)
        made = passes.Gradient(rows.copy(), 4, divisor=1.5, scale=0.5, pending=pending.copy())
        plain = self.of(made._replace(pending=pending.copy()), n, compiled)
        sums = np.empty(passes.count_blocks(n))
        passes.measure_norm(made, n, sums, should_keep=True, is_compiled=compiled)
        assert not made.pending.any()
        np.testing.assert_array_equal(made.rows[0, :4], rows[0, :4])
        np.testing.assert_array_equal(self.of(made.kept_gradient(), n, compiled), plain)
        np.testing.assert_array_equal(self.of(made.kept_gradient(0.5), n, compiled), plain / 2)


class TestNorms:
    @pytest.mark.parametrize("n", LENGTHS)
    @pytest.mark.parametrize("dtype", ["f4", "f8"])
    def test_they_are_exact_and_the_same_however_cut(self, n, dtype):
        rows, found = random((2, n), dtype), []
        for compiled in (True, False):
            for cut in (0, B, 2 * B):
                sums = np.empty(passes.count_blocks(n))
                for low, high in [(0, min(cut, n)), (min(cut, n), n)]:
                    made = passes.Gradient(rows, low, divisor=2.0)
                    into = sums[low // B : low // B + passes.count_blocks(high - low)]
                    passes.measure_norm(made, high - low, into, is_compiled=compiled)
                found.append(norm_of(sums))
        assert len(set(found)) == 1
        g = (rows[0] + rows[1]) / np.dtype(dtype).type(2)
        assert found[0] == pytest.approx(math.sqrt(math.fsum(g.astype("f8") ** 2)), rel=1e-14)

    def test_large_float32_do_not_overflow_and_float64_become_infinite(self):
        for dtype, wanted in [("f4", 2e38), ("f8", math.inf)]:
            rows = np.array([[np.finfo(dtype).max / 2 if dtype == "f8" else 2e38]], dtype)
            sums = np.empty(1)
            with np.errstate(over="ignore"):  # where twins run
                passes.measure_norm(passes.Gradient(rows), 1, sums)
            assert norm_of(sums) == pytest.approx(wanted)
        assert norm_of([1e308, 1e308]) == math.inf
        assert math.isnan(norm_of([1.0, math.nan]))

    def test_layers_get_their_norms_from_both_passes(self):
        # LARS by hand, in one line of NumPy.
        w, g = random(B + 50, "f8"), random(B + 50, "f8", 1)
        one = cases.Trained(optim.LARS(0.1, 0.0, weight_decay=0.5), w)
        one.step(0, g[None])
        u = g + 0.5 * w
        wanted = w - 0.1 * 0.001 * np.linalg.norm(w) / np.linalg.norm(u) * u
        np.testing.assert_allclose(one.w, wanted, 1e-13)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        pytest.param(name, compiled, marks=marks, id=f"{name}-{'loop' if compiled else 'twin'}")
        for name, one in OPTIMIZERS.items()
        for compiled, marks in ((True, cases.late(one, "f4")), (False, ()))
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
class TestNonfinite:
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_its_part_is_left_out_and_counted(self, name, value, compiled, ranks):
        n, at = 3 * B, B + passes.PART + 5
        rows = random((ranks, n), "f4")
        rows[-1, at] = value
        optimizer = type(OPTIMIZERS[name])(0.05, ema=0.5)
        one = cases.Trained(optimizer, random(n, "f4"), compiled)
        before, rule = one.w.copy(), optimizer.rule
        w, mine, pending, ema = one.part(0, n)
        made = passes.Gradient(rows, pending=pending)
        s = optimizer.scalars(0)
        if rule.measure is not None:
            sums = np.empty((2, 3))
            assert passes.measure(rule, made, w, mine, s, sums=sums, is_compiled=compiled) == 1
            assert np.isnan(sums).all(0).tolist() == [False, True, False]
            np.testing.assert_array_equal(w, before)
        else:
            assert (
                passes.update(rule, made, w, mine, s, ema=ema, decay=0.5, is_compiled=compiled) == 1
            )
            unit = 1 if rule.can_guard else passes.PART
            for low in range(0, n, unit):
                changed = w[low : low + unit] != before[low : low + unit]
                assert changed.any() != (low <= at < low + unit) and changed.any() == changed.all()
        for slot in one.slots.values():
            assert np.isfinite(slot).all()

    def test_nobody_looks_if_it_is_ignored(self, name, value, compiled):
        optimizer = type(OPTIMIZERS[name])(0.05, nonfinite="ignore")
        one = cases.Trained(optimizer, random(9, "f4"), compiled)
        rows = random((1, 9), "f4")
        rows[0, 4] = value
        one.step(0, rows)
        assert one.bad == 0
        if not (isinstance(optimizer, optim.Lion) and math.isinf(value)):  # it has a sign
            assert not np.isfinite(one.w[4])


def test_the_average_of_the_weights():
    one = cases.Trained(optim.SGD(0.1, ema=0.75), random(10, "f8"))
    wanted = one.w.copy()
    for step in range(5):
        one.step(step, random((1, 10), "f8", step))
        wanted = 0.75 * wanted + 0.25 * one.w
    np.testing.assert_allclose(one.slots["ema"], wanted, 1e-14)


def test_what_is_small_does_not_wait_for_a_compiler():
    assert not passes.is_worth_compiling(10_000) and passes.is_worth_compiling(25_000_000)


def test_twins_reach_no_compiled_loop(monkeypatch):
    def compiled(self):
        raise AssertionError(f"{self.__name__} is compiled")

    monkeypatch.setattr(jit.Kernel, "compiled", compiled)
    for module in [name for name in sys.modules if name.startswith("mpistrat.optim")]:
        for value in vars(sys.modules[module]).values():
            if isinstance(value, jit.Kernel):
                monkeypatch.setattr(value, "_run", value._first_run)
    passes._bind_step.cache_clear()
    for optimizer in OPTIMIZERS.values():
        trained(optimizer, 100, "f4", compiled=False)
    passes._bind_step.cache_clear()
