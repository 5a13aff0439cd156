"""Local sums against NumPy and `math.fsum`: dtypes, layouts, axes, accuracy, memory."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from every import every
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from mpistrat.kernels import local_sums

try:
    from ml_dtypes import bfloat16
except ImportError:
    bfloat16 = None

INTEGERS = ["b", "B", "h", "H", "i", "I", "l", "L", "q", "Q"]
FLOATS = ["e", "f", "d", "g", "F", "D", "G"]
DTYPES = [np.dtype(char) for char in INTEGERS + FLOATS]
SHAPES = [(3, 4, 5), (70, 3, 130), (2, 2500), (600, 2)]


@pytest.fixture(params=["compiled", "twin"])
def path(request, monkeypatch):
    """Run the test on both forms of the kernel."""
    kernel = local_sums._add_loops
    chosen = kernel.compiled() if request.param == "compiled" else kernel.reference
    monkeypatch.setattr(local_sums, "_add_loops", chosen)
    return request.param


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(local_sums, "_add_loops", local_sums._add_loops.compiled())


def subsets(ndim):
    axes = range(ndim)
    return [s for n in range(ndim + 1) for s in itertools.combinations(axes, n)]


def values(shape, dtype, seed=0):
    """Return small whole numbers, whose sums every dtype wide enough holds exactly."""
    rng = np.random.default_rng(seed)
    low = 0 if dtype.kind == "u" else -9
    x = rng.integers(low, 10, shape).astype(dtype)
    if dtype.kind == "c":
        x += (1j * rng.integers(low, 10, shape)).astype(dtype)
    return x


def spread(x, gap=3):
    """Put the elements `gap` apart, along every axis."""
    wide = np.zeros([n * gap for n in x.shape], x.dtype)
    wide[(slice(None, None, gap),) * x.ndim] = x
    return wide[(slice(None, None, gap),) * x.ndim]


def unaligned(x):
    raw = np.zeros(x.nbytes + 1, np.uint8)
    out = raw[1:].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def field(x):
    table = np.zeros(x.shape, np.dtype([("flag", "u1"), ("x", x.dtype)]))
    table["x"] = x
    return table["x"]


def frozen(x):
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS = {
    "c": lambda x: x,
    "fortran": np.asfortranarray,
    "permuted": lambda x: np.ascontiguousarray(np.moveaxis(x, 0, -1)).transpose(
        np.argsort([*range(1, x.ndim), 0])
    ),
    "spread": spread,
    "reversed": lambda x: x[(slice(None, None, -1),) * x.ndim].copy()[
        (slice(None, None, -1),) * x.ndim
    ],
    "half": lambda x: np.concatenate([x, x], -1)[..., : x.shape[-1]][::-1],
    "broadcast": lambda x: np.broadcast_to(x[:, None], (x.shape[0], 3, *x.shape[1:])),
    "scalar": lambda x: np.broadcast_to(x.flat[0], x.shape),
    "unaligned": unaligned,
    "field": field,
    "frozen": frozen,
}


def check(x, axes, dtype, oracle):
    before, writeable = x.copy(), x.flags.writeable
    total, count = local_sums.local_sum(x, axes, dtype)
    assert type(total) is np.ndarray
    assert total.dtype == dtype
    assert total.flags.c_contiguous and total.flags.writeable
    assert not np.shares_memory(total, x)
    assert type(count) is int
    assert count == math.prod(x.shape[axis] for axis in axes)
    np.testing.assert_array_equal(total, oracle)
    np.testing.assert_array_equal(x, before)
    assert x.flags.writeable == writeable


class TestValues:
    @every("dtype", DTYPES)
    @every("layout", LAYOUTS)
    def test_every_dtype_layout_and_combination_of_axes(self, path, dtype, layout):
        for shape in SHAPES[:1] if layout in ("unaligned", "field") else SHAPES:
            x = LAYOUTS[layout](values(shape, dtype))
            exact = x.astype(np.complex128 if dtype.kind == "c" else np.float64)
            for axes in subsets(x.ndim):
                with np.errstate(invalid="ignore", over="ignore"):
                    if dtype.kind in "iu":
                        oracle = x.sum(axes, dtype=dtype)
                    else:
                        oracle = exact.sum(axes).astype(dtype)
                check(x, axes, dtype, oracle)

    # Not all pairs: each is compiled, and the kernel knows no special ones. `Id` and, below, `id`
    # and `hf` are those of other tests, too; `bi` of the jobs of `tests/mpi`, which wait for it.
    @pytest.mark.parametrize(
        "pair",
        [
            *("Bl", "bi", "Id", "lf", "lg", "He", "bD"),
            *(pytest.param(pair, marks=pytest.mark.nightly) for pair in ("bl", "ib", "BL", "QH")),
        ],
    )
    def test_integers_into_other_dtypes(self, path, pair):
        given, wanted = pair
        x = np.asfortranarray(values((5, 12, 7), np.dtype(given)))
        for axes in subsets(3):
            check(x, axes, np.dtype(wanted), x.sum(axes, dtype="q").astype(wanted))

    @every("order", ["<", ">"])
    @every("char", ["h", "Q", "f", "d", "D", "g"])
    def test_byte_orders(self, path, order, char):
        x = values((4, 30), np.dtype(char))
        for axes in subsets(2):
            check(x.astype(x.dtype.newbyteorder(order)), axes, x.dtype, x.sum(axes))

    @pytest.mark.skipif(bfloat16 is None, reason="needs the optional package ml_dtypes")
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_bfloat16(self, path, layout):
        x = LAYOUTS[layout](values((3, 300, 2), np.dtype(np.float32)))
        for axes in subsets(x.ndim):
            check(x.astype(bfloat16), axes, np.dtype(bfloat16), x.sum(axes).astype(bfloat16))

    def test_random_views_of_random_arrays(self, path):
        rng = np.random.default_rng(1)
        for _ in range(400):
            base = rng.integers(-99, 99, rng.integers(1, 6, rng.integers(1, 7)))
            base = base.astype(rng.choice(["i8", "f8", "c16", "i2"]))
            cut = tuple(
                slice(None, None, int(rng.choice([-3, -2, -1, 1, 1, 2]))) for _ in base.shape
            )
            x = base[cut].transpose(rng.permutation(base.ndim))
            axes = tuple(int(k) for k in rng.permutation(x.ndim)[: rng.integers(0, x.ndim + 1)])
            check(x, axes, x.dtype, x.sum(axes, dtype=x.dtype))

    def test_overlapping_windows(self, path):
        x = sliding_window_view(np.arange(200.0).reshape(10, 20), (3, 4))
        for axes in subsets(4):
            check(x, axes, x.dtype, x.sum(axes))

    @pytest.mark.parametrize("size", [4, 100])
    def test_windows_as_long_as_their_number(self, path, size):
        x = sliding_window_view(np.arange(2.0 * size - 1), size)
        assert x.shape == (size, size)
        for axes in subsets(2):
            check(x, axes, x.dtype, x.sum(axes))


class TestShapes:
    @every("dtype", ["f", "d", "l", "D", "e", "g"])
    @every("shape", [(0,), (0, 3), (3, 0), (2, 0, 3), (0, 0)])
    def test_empty(self, path, dtype, shape):
        x = np.zeros(shape, dtype)
        for axes in subsets(x.ndim):
            check(x, axes, x.dtype, x.sum(axes, dtype=dtype))

    @pytest.mark.parametrize("dtype", ["f", "d", "l", "D", "e", "g", "B"])
    def test_0d(self, path, dtype):
        check(np.array(7, dtype), (), np.dtype(dtype), np.array(7, dtype))

    @pytest.mark.parametrize("ndim", [32, 64])
    def test_many_axes(self, path, ndim):
        shape = np.ones(ndim, int)
        shape[3::6] = 2
        x = np.arange(float(shape.prod())).reshape(shape[::-1]).T
        for axes in [(), (0,), tuple(range(3, ndim, 12)), tuple(range(ndim))]:
            check(x, axes, x.dtype, x.sum(axes))

    def test_many_loops_that_do_not_merge(self, path):
        x = spread(values((2,) * 9, np.dtype(float)), 2)
        for axes in [(0, 2, 4, 6, 8), (1, 3, 5, 7), (8,), (0,), (2, 3, 7)]:
            check(x, axes, x.dtype, x.sum(axes))

    def test_a_gap_in_memory_is_never_read(self, compiled):
        # Elements two apart, the last one at the very end of what belongs to the array.
        base = np.full(1001, np.nan)
        base[::2] = 1.0
        x = as_strided(base, (3, 167), (167 * 16, 16))
        check(x, (0,), x.dtype, np.full(167, 3.0))

    @pytest.mark.parametrize("size", [1, 5, 5000])
    @pytest.mark.parametrize("dtype", ["f", "D", "h"])
    def test_one_axis(self, path, size, dtype):
        x = values((size,), np.dtype(dtype))
        for y in (x, x[::-1], x[::3], np.broadcast_to(x[:1], size)):
            check(y, (0,), x.dtype, y.sum(dtype=dtype))

    def test_the_axes_may_come_in_any_order(self, path):
        x = values((3, 4, 5), np.dtype(float))
        check(x, (2, 0), x.dtype, x.sum((0, 2)))

    def test_a_memmap_gives_a_plain_array(self, path, tmp_path):
        np.arange(12.0).tofile(tmp_path / "x")
        x = np.memmap(tmp_path / "x", np.float64, "r", shape=(3, 4))
        check(x, (0,), x.dtype, np.arange(12.0).reshape(3, 4).sum(0))


class TestIntegers:
    @pytest.mark.parametrize("char", INTEGERS)
    def test_they_wrap_as_in_numpy(self, path, char):
        info = np.iinfo(char)
        x = np.array([[info.max, info.max, info.min], [info.max, 3, info.min]], char)
        for axes in subsets(2):
            for given in (x, unaligned(x), x.astype(x.dtype.newbyteorder())):
                check(given, axes, x.dtype, x.sum(axes, dtype=char))

    @pytest.mark.parametrize("pair", ["id", "Id", "hf", "qd", "Qd", "lf", "lg", "Qe"])
    def test_into_a_float_they_do_not(self, path, pair):
        char, wanted = pair
        x = np.full((5, 3), np.iinfo(char).max, char)
        with np.errstate(over="ignore"):  # float16 ends at 65504
            exact = np.full(3, 5 * np.longdouble(x[0, 0])).astype(wanted)
        check(x, (0,), np.dtype(wanted), exact)
        assert exact[0] > 0


SPECIAL = [
    [np.inf, 1.0],
    [-np.inf, 1.0],
    [np.inf, -np.inf],
    [np.nan, 1.0],
    [np.nan, np.inf],
    [np.inf, np.inf],
    [0.0, 0.0],
    [-0.0, -0.0],
    ["max", "max"],
    ["-max", "-max"],
    ["max", "-max"],
    ["max", np.inf],
    ["max", 1.0],
]


@pytest.mark.filterwarnings("error")
class TestSpecialValues:
    """Infinities, NaN and overflow come out as from NumPy, and nobody warns."""

    @every("char", ["e", "f", "d", "F", "D", "g"])
    @every("size", [2, 5, 64, 700])
    @every("axis", [0, 1])
    def test_as_numpy(self, path, char, size, axis):
        dtype = np.dtype(char)
        top = np.finfo(dtype).max
        rng = np.random.default_rng(size)
        x = np.zeros((size, len(SPECIAL)), dtype)
        for column, case in enumerate(SPECIAL):
            known = {"max": top, "-max": -top}
            pair = np.array([known.get(v, v) if isinstance(v, str) else v for v in case], dtype)
            x[rng.choice(size, 2, replace=False), column] = pair
            if case == [-0.0, -0.0]:
                x[:, column] = -0.0
        with np.errstate(all="ignore"):
            oracle = x.sum(0)
        x = np.ascontiguousarray(x.T) if axis else x
        total = local_sums.local_sum(x, (axis,), dtype)[0]
        np.testing.assert_array_equal(total, oracle)
        if dtype.kind != "c":
            number = ~np.isnan(oracle)
            np.testing.assert_array_equal(np.signbit(total)[number], np.signbit(oracle)[number])

    def test_a_float32_sum_may_pass_through_more_than_float32_holds(self, path):
        x = np.array([3e38, 3e38, -3e38], np.float32)
        assert local_sums.local_sum(x, (0,), x.dtype)[0] == np.float32(3e38)


def ill_conditioned(shape, dtype, seed):
    """Return numbers of all magnitudes whose sums nearly cancel along every axis."""
    rng = np.random.default_rng(seed)
    half = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 7, shape)
    for axis in range(half.ndim):
        half = np.concatenate([half, -half], axis)
    x = half.astype(dtype)
    x += rng.standard_normal(x.shape).astype(dtype)
    return x[tuple(rng.permuted(np.arange(n)) for n in x.shape[:1])]


class TestAccuracy:
    @every("dtype", [np.float32, np.float64])
    @every("layout", ["c", "fortran", "spread", "reversed"])
    @every("shape", [(40, 9, 5), (900, 2, 2), (2, 2, 900), (2, 700, 3)])
    def test_no_output_is_worse_than_numpys(self, compiled, dtype, layout, shape):
        x = LAYOUTS[layout](ill_conditioned(shape, dtype, 3))
        for axes in subsets(3)[1:]:
            rest = [k for k in range(3) if k not in axes]
            rows = x.transpose(*rest, *axes).reshape([*(x.shape[k] for k in rest), -1])
            exact = np.apply_along_axis(math.fsum, -1, rows.astype(np.float64))
            total = local_sums.local_sum(x, axes, x.dtype)[0].astype(np.float64)
            theirs = np.abs(x.sum(axes).astype(np.float64) - exact)
            # One unit in the last place is for rounding the exact sum to the dtype.
            rounding = np.spacing(np.abs(exact).astype(dtype)).astype(np.float64)
            assert np.all(np.abs(total - exact) <= theirs + rounding)
            assert np.all(np.abs(total - exact) <= rounding)

    def test_complex_by_component(self, compiled):
        real, imag = (ill_conditioned((300, 4), np.float64, seed) for seed in (1, 2))
        total = local_sums.local_sum(real + 1j * imag, (0,), np.dtype(complex))[0]
        for part, x in [(total.real, real), (total.imag, imag)]:
            exact = [math.fsum(column) for column in x.T]
            np.testing.assert_array_max_ulp(part, np.array(exact), 1)

    @pytest.mark.parametrize("axis", [0, 1])
    def test_small_floats_are_added_in_a_wide_dtype(self, path, axis):
        for dtype in [np.float16, np.float32] + ([bfloat16] if bfloat16 else []):
            x = np.full((3000, 3000), 0.1, dtype)[:, : 3 if axis == 0 else None]
            x = x if axis == 0 else x[:3]
            exact = 3000 * float(dtype(0.1))
            total = local_sums.local_sum(x, (axis,), np.dtype(dtype))[0]
            np.testing.assert_array_equal(total, np.full(3, exact).astype(dtype))

    def test_numpy_itself_is_worse_over_the_outer_axis(self, compiled):
        # The reason for the compensation: this is what a plain loop, NumPy's too, would do.
        x = np.full((100_000, 2), 0.1)
        ours = local_sums.local_sum(x, (0,), x.dtype)[0]
        assert ours[0] == math.fsum(x[:, 0])
        assert x.sum(0)[0] != math.fsum(x[:, 0])

    @pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
    def test_twin_and_kernel_agree(self, monkeypatch, dtype):
        kernel = local_sums._add_loops
        rng = np.random.default_rng(5)
        x = (rng.standard_normal((60, 7, 90)) + 2).astype(dtype).transpose(1, 2, 0)
        x *= np.asarray(1 + 2j if dtype is np.complex128 else 1).astype(dtype)
        for axes in subsets(3):
            monkeypatch.setattr(local_sums, "_add_loops", kernel.compiled())
            ours = local_sums.local_sum(x, axes, x.dtype)[0]
            monkeypatch.setattr(local_sums, "_add_loops", kernel.reference)
            twins = local_sums.local_sum(x, axes, x.dtype)[0]
            np.testing.assert_allclose(ours, twins, rtol=64 * np.finfo(dtype).eps)


class TestMemory:
    SIZE = 1 << 20

    @pytest.mark.parametrize(
        "layouts",
        [
            pytest.param(("fortran", "spread"), id="some"),
            pytest.param(("reversed", "permuted", "field"), id="all", marks=pytest.mark.nightly),
        ],
    )
    def test_the_input_is_not_copied(self, path, layouts):
        for layout in layouts:
            self._is_not_copied(layout=layout)

    @every("char", ["f", "d", "F", "l", "B", "e", "g", ">f8", "bfloat16"])
    def _is_not_copied(self, char, layout):
        if char == "bfloat16" and bfloat16 is None:
            pytest.skip("needs the optional package ml_dtypes")
        dtype = np.dtype(bfloat16 if char == "bfloat16" else char)
        gap = 8 // min(8, dtype.itemsize)  # 8 MiB and more of every dtype
        x = LAYOUTS[layout](np.ones((1024 * gap, 64, 16), dtype))
        wanted = dtype.newbyteorder("=")
        for axes in [(0,), (1,), (2,), (0, 2), (0, 1, 2)]:
            local_sums.local_sum(x[:2, :2], axes, wanted)  # compiles, and fills the caches
            tracemalloc.start()
            try:
                total = local_sums.local_sum(x, axes, wanted)[0]
                beside = tracemalloc.get_traced_memory()[1] - total.nbytes
            finally:
                tracemalloc.stop()
            # A block, its sums, and objects of Python, of which 3.10 has more.
            assert beside < (1 << 20) + (1 << 18) + (1 << 14), axes
            assert beside < x.nbytes // 6, axes

    def test_neither_is_a_wide_temporary_made_of_a_large_result(self, path):
        x = np.ones((2, 1 << 21), np.float32)
        local_sums.local_sum(x[:, :5], (0,), x.dtype)
        tracemalloc.start()
        try:
            total = local_sums.local_sum(x, (0,), x.dtype)[0]
            beside = tracemalloc.get_traced_memory()[1] - total.nbytes
        finally:
            tracemalloc.stop()
        assert beside < (1 << 20)
        assert np.all(total == 2)


class TestTraversal:
    """The innermost loops follow the memory."""

    def loops(self, x, axes):
        steps = tuple(step // x.itemsize for step in x.strides)
        plan = local_sums._make_plan(x.shape, steps, axes, 1)
        return plan.loops[:2, :2].tolist(), len(plan.loops)

    def test_rows_are_read_whole_when_columns_are_summed(self):
        assert self.loops(np.zeros((50, 400)), (0,)) == ([[400, 1], [50, 400]], 2)

    def test_runs_are_read_whole_when_rows_are_summed(self):
        assert self.loops(np.zeros((50, 400)), (1,)) == ([[1, 0], [400, 1]], 3)

    def test_fortran_order_is_the_mirror_image(self):
        assert self.loops(np.zeros((400, 50), order="F"), (1,)) == ([[400, 1], [50, 400]], 2)

    def test_axes_merge_whatever_their_order(self):
        x = np.zeros((4, 5, 6, 7)).transpose(2, 0, 3, 1)
        assert self.loops(x, (0, 1, 2, 3)) == ([[1, 0], [840, 1]], 2)
        assert self.loops(x[::-1, ::-1, ::-1, ::-1], (1, 3)) == ([[42, 1], [20, 42]], 2)

    def test_pairs_are_not_the_innermost_loop(self):
        assert self.loops(np.zeros((5000, 2)), (1,)) == ([[5000, 2], [2, 1]], 2)


class TestImports:
    @pytest.mark.parametrize(
        ("code", "env"),
        [
            ("", {}),
            (
                "local_sums.local_sum(np.ones((2, 3)), (0,), np.dtype(float))",
                {"MPISTRAT_NUMBA": "0"},
            ),
        ],
    )
    def test_numba_is_not_imported(self, code, env):
        program = f"import sys, numpy as np\nfrom mpistrat.kernels import local_sums\n{code}\n"
        done = subprocess.run(
            [sys.executable, "-c", program + "print('numba' in sys.modules)"],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])} | env,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == ["False"]
