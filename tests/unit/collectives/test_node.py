"""All-reduces through shared memory: the bits of a fold in rank order, on any layout of nodes."""

from __future__ import annotations

import contextvars
import functools
import gc
import threading
import warnings
import weakref
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from every import every

import mpistrat as ms
from mpistrat.collectives import inter_node
from mpistrat.collectives import plan as plan_module
from mpistrat.collectives.algorithms import pairs
from mpistrat.collectives.layout import make_buckets
from mpistrat.comm.loopback import LoopbackComm
from mpistrat.kernels import rows as rows_module
from mpistrat.kernels.elementwise import Overflow, divide
from mpistrat.kernels.rows import reduce_rows
from mpistrat.testing import run_ranks

_FOLDS = {"SUM": np.add, "MEAN": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
# A mean of integers comes back in another dtype; complex numbers have no order.
KINDS = [
    (dtype, op)
    for ops, dtypes in {
        ("SUM", "PROD", "MIN", "MAX", "MEAN"): ("f4", "f8", "g"),
        ("SUM", "PROD", "MIN", "MAX"): ("i4", "i8", "u4"),
        ("SUM", "PROD"): ("c8", "c16"),
    }.items()
    for dtype in dtypes
    for op in ops
]


def random(rank, shape, dtype, seed=0):
    """Numbers over many orders of magnitude, so that another order of adding has other bits."""
    return _made(rank, shape, dtype, seed).copy()


@functools.cache  # a generator costs more than what is done to its numbers
def _made(rank, shape, dtype, seed):
    rng = np.random.default_rng([rank, seed])
    kind = np.dtype(dtype).kind
    if kind in "iu":
        return rng.integers(0, 2**31 - 1, shape).astype(dtype)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-40, 40, shape)
    if kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def in_order(op, values):
    with np.errstate(all="ignore"):
        total = functools.reduce(_FOLDS[op], values)
        if op == "MEAN":
            total = total / total.dtype.type(len(values)) if total.dtype.kind != "c" else total
        return total


def tree(rank, dtype, seed=0):
    return {
        "big": random(rank, (3, 500), dtype, seed),
        "none": random(rank, (0, 4), dtype, seed),
        "small": [random(rank, (5,), dtype, seed), random(rank, (), dtype, seed)],
        "turned": random(rank, (40, 7), dtype, seed).T,
    }


def program(op, dtype, how):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        given = tree(comm.rank, dtype)
        results = []
        buffers = strategy.buffers(given) if how == "in place" else None

        def fn():
            ctx = ms.get_replica_context()
            for _ in range(3):
                if how == "fresh":
                    results.append(ctx.all_reduce(op, given))
                    continue
                places = buffers or ms.pytree.map(np.zeros_like, given)
                if how == "in place":
                    ms.pytree.map(lambda place, value: place.__setitem__(..., value), places, given)
                value = places if how == "in place" else given
                assert ctx.all_reduce(op, value, out=places) is places
                results.append(ms.pytree.map(np.array, places))

        strategy.run(fn)
        return results

    return rank


@every("how", ["fresh", "out", "in place"])
@every(("dtype", "op"), KINDS)
@every("size", [1, 2, 3, 5])
def test_the_bits_are_those_of_a_fold_in_rank_order(size, dtype, op, how):
    given = [ms.pytree.flatten(tree(rank, dtype))[0] for rank in range(size)]
    want = [in_order(op, values) for values in zip(*given, strict=True)]
    for results in run_ranks(program(op, dtype, how), size):
        for result in results:
            got, structure = ms.pytree.flatten(result)
            assert structure == ms.pytree.flatten(tree(0, dtype))[1]
            for leaf, expected in zip(got, want, strict=True):
                np.testing.assert_array_equal(leaf, expected, strict=True)


@every("per_node", [1, 2, 3])
@every("op", ["SUM", "MEAN", "MIN", "MAX"])
@every("how", ["fresh", "in place"])
def test_layouts_of_nodes(per_node, op, how, monkeypatch):
    """Five ranks on nodes of 1, of 2 + 2 + 1, and of 3 + 2; whole numbers, so sums are exact."""
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        shapes = {"a": (1000,), "b": (3, 3), "c": (0,)}
        given = {
            name: np.random.default_rng([comm.rank, i]).integers(-99, 99, shape).astype("f8")
            for i, (name, shape) in enumerate(shapes.items())
        }
        if how == "in place":
            places = strategy.buffers(given)
            ms.pytree.map(lambda place, value: place.__setitem__(..., value), places, given)
            strategy.run(
                lambda: ms.get_replica_context().all_reduce(op, places, out=places) and None
            )
            return (
                given,
                ms.pytree.map(np.array, places),
                strategy._replicas.reducer.node.arena.nodes(),
            )
        found = []
        strategy.run(lambda: found.append(ms.get_replica_context().all_reduce(op, given)))
        return given, found[0], strategy._replicas.reducer.node.arena.nodes()

    ranks = run_ranks(rank, 5)
    nodes = -(-5 // per_node)
    assert {row[2].node_count for row in ranks} == {nodes}
    assert {row[2].peer_group_count for row in ranks} == {1 if per_node < 3 else 2}
    for name in "abc":
        want = in_order(op, [given[name] for given, _, _ in ranks])
        for _, got, _ in ranks:
            np.testing.assert_array_equal(got[name], want, strict=True)


@pytest.mark.parametrize("per_node", [0, 2])
@pytest.mark.parametrize("how", ["fresh", "in place"])
def test_weights(per_node, how, monkeypatch):
    """A rank of weight 0 holds NaN, which nobody reads."""
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", str(per_node))
    weights = [3, 0, 2.5, 4]

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        value = random(comm.rank, (700,), "f8")
        given = np.full(700, np.nan) if comm.rank == 1 else value
        places = strategy.buffers([given])
        places[0][:] = given
        found = []

        def fn():
            ctx = ms.get_replica_context()
            out = places if how == "in place" else None
            found.append(ctx.all_reduce("MEAN", places, weight=weights[comm.rank], out=out)[0])
            none = strategy._replicas.view and ctx.all_reduce("MEAN", np.ones(99), weight=0)
            assert np.isnan(none).all()

        strategy.run(fn)
        return value, np.array(found[0])

    ranks = run_ranks(rank, 4)
    values = np.array([value for value, _ in ranks])
    want = (values * np.array(weights)[:, None]).sum(axis=0) / sum(weights)
    for _, got in ranks:
        np.testing.assert_allclose(got, want, rtol=1e-13)
        assert got.tobytes() == ranks[0][1].tobytes()


def test_special_values_have_the_same_bits_on_all_ranks():
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 5e-324, 1.0, -1.0])

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        rng = np.random.default_rng(comm.rank)
        given = rng.choice(odd, 4000)
        found = []
        ops = ("SUM", "PROD", "MIN", "MAX", "MEAN")
        strategy.run(
            lambda: found.extend(ms.get_replica_context().all_reduce(op, given) for op in ops)
        )
        return given, found

    ranks = run_ranks(rank, 3)
    for i, op in enumerate(("SUM", "PROD", "MIN", "MAX", "MEAN")):
        want = in_order(op, [given for given, _ in ranks])
        for _, found in ranks:
            np.testing.assert_array_equal(found[i], want)
            assert found[i].tobytes() == ranks[0][1][i].tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int16])
def test_narrow_dtypes_are_folded_wide(dtype):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        given = (np.arange(600) % 97 - 48 + comm.rank).astype(dtype)
        found = []
        strategy.run(
            lambda: found.extend(
                ms.get_replica_context().all_reduce(op, given) for op in ("SUM", "MEAN")
            )
        )
        return given, found

    ranks = run_ranks(rank, 3)
    wide = np.array([given.astype("f8") for given, _ in ranks])
    for _, (total, mean) in ranks:
        assert total.dtype == dtype
        np.testing.assert_array_equal(total.astype("f8"), wide.sum(axis=0))
        exact = wide.mean(axis=0)
        kind = mean.dtype
        np.testing.assert_array_equal(
            mean.astype("f8"), exact.astype("f4").astype(kind).astype("f8")
        )


@pytest.mark.parametrize("size", [2, 3])  # two ranks take `Pairs` from the second call on
def test_trees_larger_than_packs(size, monkeypatch):
    """Packs of 4 KiB: leaves are cut, several packs follow one another, and rows are used again."""
    monkeypatch.setattr(
        plan_module, "make_buckets", functools.partial(make_buckets, max_nbytes=4096)
    )
    monkeypatch.setattr(pairs, "_PIECE_NBYTES", 4096)

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        rng = np.random.default_rng(comm.rank)
        given = [rng.standard_normal(n) for n in (1, 3000, 0, 511, 512, 513, 7)]
        given.append(np.asfortranarray(rng.standard_normal((80, 40))))
        found = []
        strategy.run(
            lambda: found.extend(ms.get_replica_context().all_reduce("SUM", given) for _ in "abc")
        )
        return given, found

    ranks = run_ranks(rank, size)
    for _, found in ranks:
        for results in found:
            for i, result in enumerate(results):
                want = in_order("SUM", [given[i] for given, _ in ranks])
                np.testing.assert_array_equal(result, want, strict=True)


@pytest.mark.parametrize("limit", [8, 64, 100, 1 << 20])
def test_packs_hold_every_element_once_and_are_bounded(limit):
    rng = np.random.default_rng(0)
    for _ in range(50):
        kinds = [np.dtype(rng.choice(["f4", "f8", "i8"])) for _ in range(rng.integers(0, 12))]
        specs = tuple((kind, int(rng.integers(0, 60))) for kind in kinds)
        seen = [[] for _ in specs]
        for pack in make_buckets(specs, limit):
            assert 0 < pack.nbytes <= max(limit, 8)
            at = 0
            for piece in pack.pieces:
                assert (piece.column, specs[piece.leaf_index][0]) == (at, pack.dtype)
                assert piece.is_whole == (piece.stop - piece.start == specs[piece.leaf_index][1])
                seen[piece.leaf_index] += range(piece.start, piece.stop)
                at += piece.stop - piece.start
            assert at == pack.columns
        assert seen == [list(range(size)) for _, size in specs]


def test_some_of_the_buffers_and_the_same_twice():
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        specs = [np.empty(n, t) for n, t in [(3, "f4"), (5, "f8"), (2, "f4"), (1, "f4"), (4, "f4")]]
        b = strategy.buffers(specs)
        for array in b:
            array[:] = comm.rank + 1
        total = comm.size * (comm.size + 1) / 2

        def fn():
            ctx = ms.get_replica_context()
            ctx.all_reduce("SUM", [b[0], b[1], b[3]], out=[b[0], b[1], b[3]])
            two = ctx.all_reduce("SUM", (b[4], b[4]), out=(b[4], b[4]))
            view = b[2][:]  # not the array itself: it is copied, and comes out right
            ctx.all_reduce("SUM", np.concatenate([view] * 99))
            return two[0] is b[4]

        assert strategy.run(fn).local
        done = [float(array.max()) for array in b] + [float(array.min()) for array in b]
        mine = comm.rank + 1.0
        return done == [total, total, mine, total, total] * 2

    assert all(run_ranks(rank, 3))


def test_memory_goes_with_the_last_array():
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        arrays = strategy.buffers([np.empty(10), np.empty(10)])
        arena = strategy._replicas.reducer.node.arena
        home = arena.find_address(arrays[0])
        watched = weakref.ref(home.block)
        for _ in range(2):  # what is remembered of a call does not keep it
            strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", arrays, out=arrays))
        del home
        last = arrays.pop()
        del arrays[:]
        gc.collect()
        alive = watched() is not None
        assert last.sum() == 0
        del last
        gc.collect()
        return alive, watched() is None, len(arena._addresses)

    assert run_ranks(rank, 2) == [(True, True, 0)] * 2


def test_without_shared_memory_results_are_the_same(monkeypatch):
    monkeypatch.setattr(
        LoopbackComm, "shared", lambda self, nbytes: self._exchange("none", None) and None
    )

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        value = random(comm.rank, (3000,), "i8")
        buffers = strategy.buffers([value])
        buffers[0][:] = value
        found = []

        def fn():
            ctx = ms.get_replica_context()
            ctx.all_reduce("SUM", buffers, out=buffers)
            found.append(ctx.all_reduce("SUM", [value])[0])
            found.append(ctx.all_reduce("SUM", [value])[0])

        strategy.run(fn)
        return value, buffers[0], *found

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ranks = run_ranks(rank, 2)
    assert len([w for w in said if "cannot share memory" in str(w.message)]) == 2
    want = ranks[0][0] + ranks[1][0]
    for _, *results in ranks:
        for result in results:
            np.testing.assert_array_equal(result, want, strict=True)


BAD = {
    "structure": (lambda v: [v["a"]], ms.StructureError),
    "shape": (lambda v: {"a": np.zeros(3)}, TypeError),
    "dtype": (lambda v: {"a": np.zeros(100, "f4")}, TypeError),
    "no array": (lambda v: {"a": 3.0}, TypeError),
    "masked": (lambda v: {"a": np.ma.zeros(100)}, TypeError),
    "read-only": (lambda v: {"a": np.broadcast_to(np.zeros(()), (100,))}, ValueError),
}


@pytest.mark.parametrize("how", list(BAD))
def test_an_out_that_cannot_be_is_refused_on_every_rank(how):
    make, error = BAD[how]

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        value = {"a": np.ones(100)}

        def fn(out):
            ms.get_replica_context().all_reduce("SUM", value, out=out)

        for culprit in (0, 1):
            for _ in range(2):  # the second time the call is known
                good = {"a": np.zeros(100)}
                strategy.run(fn, (good,))
                assert (good["a"] == comm.size).all()
            out = make(value) if comm.rank == culprit else {"a": np.zeros(100)}
            with pytest.raises(error) as told:
                strategy.run(fn, (out,))
            assert comm.rank == culprit or isinstance(told.value, ms.RemoteError)
        return True

    assert run_ranks(rank, 2) == [True, True]


def test_in_place_on_one_rank_only_is_a_difference():
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        (buffer,) = strategy.buffers([np.empty(3000)])
        buffer[:] = comm.rank
        own = np.array(buffer)
        out = buffer if comm.rank else own
        with pytest.raises(ms.LockstepError, match="in place"):
            strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", out, out=out))
        assert (buffer == comm.rank).all() and (own == comm.rank).all()
        strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", buffer, out=buffer).sum())
        return float(buffer.sum())

    assert run_ranks(rank, 3) == [9000.0] * 3


def test_a_small_tree_in_a_call_with_out():
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        a = np.full(3, comm.rank + 1.0)
        strided = np.zeros((4, 2))[:, 0]
        strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", a, out=a).sum())
        big = np.ones(4)
        strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", big, out=strided).sum())
        one = ms.OneDeviceStrategy("cpu")
        one.run(lambda: ms.get_replica_context().all_reduce("SUM", big, out=strided[:4]))
        return a.tolist(), strided.tolist()

    assert run_ranks(rank, 2) == [([3.0] * 3, [1.0] * 4)] * 2


def test_a_spec_that_is_none_is_refused():
    strategy = ms.OneDeviceStrategy("cpu")
    for bad in (3, {"x": "text"}, [np.empty(2, "O")], np.empty(2, "M8[s]")):
        with pytest.raises(TypeError, match=r"dtype|shape"):
            strategy.buffers(bad)


def test_what_notes_overflows_is_freed_with_its_last_user():
    overflow = Overflow()
    context = weakref.ref(overflow.quiet.__self__)
    overflow.quiet().run(np.add, np.full(2, 1e308), 1e308)
    assert overflow.reports
    del overflow
    assert context() is None  # at once; a cycle through NumPy's settings would never be collected


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_mean_in_the_memory_of_its_values_does_not_overflow(rows, count, ready):
    """The whole matrix or its first rows: values are written over by what comes of them."""
    top = np.finfo(np.float32).max
    values = np.full((count, 300), top)
    out = values if rows == count else values[:rows]
    reduce_rows(np.add, values, out, 0, 300, divisor=float(count), is_compiled=ready)
    np.testing.assert_allclose(values[:rows], top, rtol=1e-6)


@every("rows", [1, 2, 3, 5])
@every(
    ("dtype", "scaled"), [("f4", False), ("f8", False), ("i8", False), ("f4", True), ("f8", True)]
)
@every("by", [7.0, 2.0, 1.0, 0.0])
@every("second", [0.0, 1.5])
@every("place", ["inside", "first row", "elsewhere"])
def test_the_kernel_has_the_bits_of_its_twin(rows, dtype, scaled, by, second, place, monkeypatch):
    monkeypatch.setattr(rows_module, "_MIN_COMPILED_COLUMNS", 1)
    values = np.array([random(r, (5000,), dtype) for r in range(rows)])
    scales = np.array([2.0, second, 3.5, 1.0, 0.25][:rows]) if scaled else None
    if scaled and rows > 1 and second == 0:
        values[1] = np.nan
    divisor = by if dtype != "i8" else 1.0
    compiled, twin = values.copy(), values.copy()
    outs = [{"inside": v, "first row": v[:1]}.get(place, v[:2] + 1) for v in (compiled, twin)]
    reduce_rows(np.add, compiled, outs[0], 17, 4321, scales=scales, divisor=divisor)
    with np.errstate(all="ignore"):
        given, into = twin[:, 17:4321], outs[1][:, 17:4321]
        rows_module.reduce_blocks(np.add, given, into, scales, divisor)
    assert compiled.tobytes() == twin.tobytes()
    assert outs[0].tobytes() == outs[1].tobytes()
    terms = [
        row if scales is None else np.where(s == 0, 0, row * s)
        for row, s in zip(values, scales if scaled else [1] * rows, strict=True)
    ]
    with np.errstate(all="ignore"):
        want = functools.reduce(np.add, [np.asarray(t, dtype) for t in terms])
        want = want / want.dtype.type(by) if divisor != 1 else want
    for row in outs[0]:
        np.testing.assert_array_equal(row[17:4321], want[17:4321])
    np.testing.assert_array_equal(compiled[:, :17], values[:, :17])


@every("dtype", ["f2", "f4", "f8", "g", "c8", "c16"])
@every("by", [2.0**k for k in (-15, -14, -1, 0, 1, 2, 9, 14, 15)] + [3.0, 0.0])
def test_to_divide_has_the_bits_of_a_division(dtype, by):
    """Where it multiplies instead, too: of what is tiny, huge or no number."""
    dtype = np.dtype(dtype)
    parts = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    rng = np.random.default_rng(2)
    info = np.finfo(parts)
    odd = [0, -0.0, np.inf, np.nan, -np.nan, info.tiny, info.smallest_subnormal, 3 * info.tiny / 4]
    powers = rng.integers(info.minexp - 12, info.maxexp, 5000, np.int32)
    with np.errstate(all="ignore"):
        scattered = np.ldexp(rng.standard_normal(5000).astype(parts), powers)
        values = np.concatenate([scattered, np.array([*odd, info.max, -info.max], parts)])
        want = values / parts.type(by)
        divide(values.view(dtype), by)
    used = 10 if dtype == "g" else parts.itemsize  # an 80-bit number is padded with what was there
    bits = [x.view(np.uint8).reshape(-1, parts.itemsize)[:, :used] for x in (values, want)]
    np.testing.assert_array_equal(*bits)


@every("dtype", ["f4", "f8"])
@every("by", [7.0, 2.0, 1.0])
@every("scales", [(3.0, 5.0), (0.0, 5.0), (3.0, 0.0), (1.0, 1.0), (0.1, 0.7)])
def test_two_rows_have_the_bits_of_rounding_once_each_step(scales, by, dtype):
    values = np.array([random(r, (5000,), dtype) for r in range(2)])
    with np.errstate(all="ignore"):
        terms = [
            values[r] * values.dtype.type(s) if s else values[r] * 0 for r, s in enumerate(scales)
        ]
        want = np.add(*(np.where(s == 0, 0, t) for s, t in zip(scales, terms, strict=True)))
        want = (want / values.dtype.type(by)).astype(dtype)[17:4321]
    given = {"scales": np.array(scales), "divisor": by}
    for row, scale in zip(values, scales, strict=True):
        if scale == 0:
            row[:] = np.nan  # never read
    found = []
    for ready in (False, True):
        out, into = np.zeros((1, 5000), dtype), np.zeros(4304, dtype)
        reduce_rows(np.add, values, out, 17, 4321, **given, is_compiled=ready)
        reduce_rows(np.add, values, into[None], 17, 4321, **given, is_compiled=ready, shift=17)
        found += [out[0, 17:4321].tobytes(), into.tobytes()]
    assert set(found) == {found[0]}
    np.testing.assert_array_equal(np.frombuffer(found[0], dtype), want)


@pytest.mark.parametrize("count", [3000, 100_000])  # every rank folds everything; each a part
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_small_folds_take_the_loop_once_a_large_one_has_had_it_compiled(
    size, weighted, count, monkeypatch
):
    monkeypatch.setattr(rows_module, "_MIN_COMPILED_COLUMNS", 120_000)
    loops = Counter()

    def counted(run, *args):
        loops[threading.get_ident()] += 1
        return run(*args)

    monkeypatch.setattr(rows_module, "sum_rows", functools.partial(counted, rows_module.sum_rows))
    gradients = [random(r, (count,), "f4") for r in range(size)]
    weights = [2.0, 5.0, 9.0][:size] if weighted else [1.0] * size
    with np.errstate(all="ignore"):
        terms = [g * np.float32(w) for g, w in zip(gradients, weights, strict=True)]
        want = functools.reduce(np.add, terms) / np.float32(sum(weights))

    def rank(comm):
        strategy, seen = ms.MirroredStrategy(comm=comm), []

        def step():
            ctx, before = ms.get_replica_context(), loops[threading.get_ident()]
            weight = weights[comm.rank] if weighted else None
            mean = ctx.all_reduce("mean", gradients[comm.rank], weight=weight)
            seen.append(loops[threading.get_ident()] > before)
            np.testing.assert_array_equal(mean, want)
            return mean.tobytes()

        first = [strategy.run(step).local for _ in range(3)]
        large = np.ones(130_000, np.float32)
        strategy.run(lambda: ms.get_replica_context().all_reduce("sum", large).sum())
        return first + [strategy.run(step).local for _ in range(3)], seen

    # What the process has compiled for one group of ranks is nothing that another group knows of.
    for _ in range(2):
        results = run_ranks(rank, size)
        taken = weighted or count == 100_000
        assert [seen for _, seen in results] == [[False] * 3 + [taken] * 3] * size
        bits = {one for found, _ in results for one in found}
        if np.isfinite(want).all():
            assert len(bits) == 1
        assert all(len({found[step] for found, _ in results}) == 1 for step in range(6))


@pytest.mark.parametrize("count", [50, 700, 100_000])
def test_equal_calls_on_other_strategies_meet(count):
    """All strategies of a session share its memory; so which of them a rank calls cannot matter."""

    def rank(comm):
        pair = [ms.MirroredStrategy(comm=comm), ms.MirroredStrategy(comm=comm)]
        rng = np.random.default_rng(comm.rank)
        for number in range(40):
            strategy = pair[rng.integers(2)]
            value = np.full(count, comm.rank + number * 10.0)
            total = strategy.run(
                lambda value=value: ms.get_replica_context().all_reduce("SUM", value)
            )
            assert (total.local == comm.size * (comm.size - 1) / 2 + comm.size * number * 10).all()
        return True

    assert all(run_ranks(rank, 3))


@pytest.mark.parametrize("count", [1000, 1 << 21, 3 << 20])
@pytest.mark.parametrize("case", ["shifted", "twice", "crossed", "two dtypes"])
def test_values_and_outs_may_overlap(case, count):
    """Also where they are cut into several packs, of 8 MiB each, or into pieces of two ranks."""

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        return [overlapping(comm, strategy) for _ in ("Packs", "Pairs")] == [True, True]

    def overlapping(comm, strategy):
        room = np.arange(2.0 * count + 1) + comm.rank
        first, second = room[:count], room[count : 2 * count]
        value, out = {
            "shifted": ([first], [room[1 : count + 1]]),
            "twice": ([first, first], [first, first]),
            "crossed": ([first, second], [second, first]),
            "two dtypes": ([np.full(count, 1, np.int64), second], [second.view(np.int64), first]),
        }[case]
        want = [2 * v.copy() + (v.dtype.kind == "f") * (1 - 2 * comm.rank) for v in value]
        strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", value, out=out) and None)
        return all(np.array_equal(o, w) for o, w in zip(out, want, strict=True))

    assert all(run_ranks(rank, 2))


@pytest.mark.parametrize("call", ["buffers", "all_reduce"])
def test_a_warning_made_an_error_is_one_on_every_rank(call, monkeypatch):
    monkeypatch.setattr(LoopbackComm, "shared", lambda self, nbytes: None)

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)

        def reduce():
            return strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", np.ones(500)))

        with pytest.raises(RuntimeWarning if comm.rank == 0 else ms.RemoteError):
            strategy.buffers([np.empty(3)]) if call == "buffers" else reduce()
        if call == "buffers":
            assert strategy._replicas.reducer.node.arena.block(()) is None
            return True
        return float(reduce().local[0]) == comm.size

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_ranks(rank, 3) == [True] * 3


@pytest.mark.parametrize("how", ["fresh", "in place"])
@pytest.mark.parametrize("count", [300, 40_000, 524_272, 600_000])
def test_all_weights_zero_give_nan(count, how):
    """Also where one rank's slice is worth a compiler and another's is not."""

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        value = strategy.buffers([np.empty(count, np.float32)])
        value[0][:] = 7
        out = value if how == "in place" else None
        found = []
        strategy.run(
            lambda: found.append(
                ms.get_replica_context().all_reduce("MEAN", value, weight=0, out=out)
            )
        )
        return bool(np.isnan(found[0][0]).all())

    assert run_ranks(rank, 2) == [True, True]


def test_an_array_that_got_another_dtype_or_shape_is_no_longer_the_arenas():
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        b = strategy.buffers([np.empty(1000, np.float32)])

        def fn():
            ms.get_replica_context().all_reduce("SUM", b, out=b)

        for _ in range(2):
            b[0][:] = 1
            strategy.run(fn)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy wants to end this
            b[0].dtype = np.int32
        b[0][:] = 2**30 + comm.rank
        strategy.run(fn)
        right = bool((b[0] == np.int32(-(2**31) + 1)).all())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            b[0].shape = (10, 100) if comm.rank else (100, 10)
        with pytest.raises(ms.LockstepError):
            strategy.run(fn)
        return right

    assert run_ranks(rank, 2) == [True, True]


@pytest.mark.parametrize("count", [1000, 100_000])
def test_a_thread_that_may_not_call_writes_nothing(count):
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        errors = []

        def fn():
            ctx = ms.get_replica_context()
            for _ in range(2):
                ctx.all_reduce("SUM", np.ones(count))
            arena = strategy._replicas.reducer.node.arena
            rows = (arena.sides, arena.scratch)[count > 1000](np.dtype("f8"))
            before = rows.tobytes()

            def stray():
                with pytest.raises(ms.StrategyError):
                    ctx.all_reduce("SUM", np.full(count, 9.0))
                errors.append(rows.tobytes() == before)

            thread = threading.Thread(target=contextvars.copy_context().run, args=(stray,))
            thread.start()
            thread.join()
            ctx.all_reduce("SUM", 1.0)

        strategy.run(fn)
        return errors

    # One rank at a time may look at what all share, so the others wait in the call that follows.
    assert run_ranks(rank, 2, seed=0) == [[True], [True]]


def test_lanes_in_pieces_lose_no_nan(monkeypatch):
    monkeypatch.setenv("MPISTRAT_RANKS_PER_NODE", "2")
    monkeypatch.setattr(inter_node, "MAX_EXCHANGE_ELEMENTS", 64)

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        value = np.random.default_rng(comm.rank).integers(-99, 99, 5000).astype("f8")
        value[comm.rank * 7] = np.nan
        found = []
        strategy.run(
            lambda: found.extend(
                ms.get_replica_context().all_reduce(op, value) for op in ("SUM", "MIN", "MAX")
            )
        )
        return value, found

    ranks = run_ranks(rank, 5)
    for i, op in enumerate(("SUM", "MIN", "MAX")):
        want = in_order(op, [value for value, _ in ranks])
        for _, found in ranks:
            np.testing.assert_array_equal(found[i], want)


def test_a_small_result_keeps_no_large_one():
    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        given = [np.ones(100_000), np.ones(3), np.ones((2, 2)), np.ones(50_000), np.ones(5)]
        found = []
        strategy.run(lambda: found.extend(ms.get_replica_context().all_reduce("SUM", given)))
        assert all((leaf == comm.size).all() for leaf in found)
        small = found[1].base
        return small is found[2].base and small.nbytes == (3 + 4 + 5) * 8

    assert run_ranks(rank, 2) == [True, True]


@pytest.mark.parametrize("size", [2, 3])
def test_buffers_on_one_rank_and_ordinary_arrays_on_another_are_told(size):
    """Many small arrays or a few large ones, whether they were reduced before or not."""
    specs = [[np.empty(64)] * 40, [np.empty(30_000)]]

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        told = []
        fold = lambda b: ms.get_replica_context().all_reduce("SUM", b, out=b)  # noqa: E731
        for some in specs:
            buffers, plain = strategy.buffers(some), [np.zeros_like(one) for one in some]
            for before in (False, True):
                if before:
                    strategy.run(lambda b=buffers: fold(b) and None)
                    strategy.run(lambda b=plain: fold(b) and None)
                mine = buffers if comm.rank == 1 else plain
                with pytest.raises(ms.LockstepError) as caught:
                    strategy.run(lambda b=mine: fold(b))
                told.append(str(caught.value))
        return told

    others = "rank 0" if size == 2 else "ranks 0, 2"
    for told in run_ranks(rank, size):
        for text in told:
            assert f"rank 1 gave arrays of gradient_buffers, {others} ordinary arrays" in text


@every("op", ["SUM", "MEAN", "MIN", "PROD"])
@every("weights", [None, (3.0, 5.0, 0.25), (2, 0, 7)])
@every("forgetful", [False, True])  # the first rank compiles each call again
@every("size", [2, 3])
def test_many_small_buffers_have_the_bits_of_a_fold_in_rank_order(size, forgetful, weights, op):
    """They are copied as one run, and no rank waits after the handshake."""
    if weights is not None and op != "MEAN":
        return

    def rank(comm):
        strategy = ms.MirroredStrategy(comm=comm)
        given = [random(comm.rank, (n,), "f8", n) for n in range(1, 60)]
        buffers, results, barriers = strategy.buffers(given), [], Counter()
        node = strategy._replicas.reducer.node.arena.nodes().node
        wait = node.barrier
        node.barrier = lambda: (barriers.update("b"), wait())

        def fn():
            how = {} if weights is None else {"weight": weights[comm.rank]}
            for place, value in zip(buffers, given, strict=True):
                place[:] = value
            ms.get_replica_context().all_reduce(op, buffers, out=buffers, **how)
            results.append([np.array(one) for one in buffers])
            ms.get_replica_context().all_reduce(op, given, **how)
            results.append(ms.get_replica_context().all_reduce(op, given, **how))

        strategy.run(fn)
        barriers.clear()
        for _ in range(3):
            if forgetful and comm.rank == 0:
                strategy._replicas.plans.clear()
            strategy.run(fn)
        return results, sum(barriers.values())

    ranks = run_ranks(rank, size)
    assert [count for _, count in ranks] == [0] * size
    values = [[random(r, (n,), "f8", n) for n in range(1, 60)] for r in range(size)]
    for results, _ in ranks:
        for result in results:
            for i, leaf in enumerate(result):
                assert leaf.tobytes() == results[0][i].tobytes()
                if weights is None:
                    want = in_order(op, [v[i] for v in values])
                    np.testing.assert_array_equal(leaf, want, strict=True)
                else:
                    shares = np.array(weights[:size]) / sum(weights[:size])
                    want = sum(w * v[i] for w, v in zip(shares, values, strict=True))
                    np.testing.assert_allclose(leaf, want, rtol=1e-12)
