"""Random numbers of examples: NumPy's Philox to the bit, whoever asks for them, on any rank."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.kernels import philox
from mpistrat.testing import run_ranks

EXAMPLES = np.array([5, 0, 2**40, 7, -1])
COUNTS = [1, 2, 3, 4, 5, 4097, 2 * 4096 + 3]
DROPOUT = ms.random.stream(3, "dropout")


def of_numpy(step, example):
    """What the page says: NumPy's generator, by the 16 bytes of BLAKE2b of seed and name."""
    key = np.array(
        [0x43D98654A47A5C4B, 0x1D3240DDE938CE43], np.uint64
    )  # printf "3 dropout" | b2sum -l 128
    counter = np.array([0, example % 2**64, step, 0], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def raw(step, count):
    return np.array([of_numpy(step, int(e)).bit_generator.random_raw(count) for e in EXAMPLES])


class TestNumbers:
    @pytest.mark.parametrize(
        ("counter", "key", "wanted"),
        [  # kat_vectors of Random123, philox4x64 with 10 rounds
            (
                [0, 0, 0, 0],
                [0, 0],
                "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b",
            ),
            (
                [2**64 - 1] * 4,
                [2**64 - 1] * 2,
                "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0",
            ),
            (
                [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
                [0x452821E638D01377, 0xBE5466CF34E90C6C],
                "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
            ),
        ],
    )
    def test_blocks_are_those_that_were_published(self, counter, key, wanted):
        out = np.empty((1, 4), np.uint64)
        first = np.uint64((counter[0] - 1) % 2**64)  # a row begins with block 1
        full = np.array([*key, *counter[2:]], np.uint64)
        philox._words.compiled()(out, full, np.array([counter[1]], np.uint64), first)
        assert " ".join(f"{int(word):016x}" for word in out[0]) == wanted

    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_uniform_is_numpys(self, dtype):
        for count in COUNTS:
            found = DROPOUT.uniform(EXAMPLES, count, step=9, dtype=dtype)
            wanted = [of_numpy(9, int(e)).random(count, dtype) for e in EXAMPLES]
            np.testing.assert_array_equal(found, wanted, strict=True)

    def test_normal_is_the_quantile(self):
        inverse = np.vectorize(statistics.NormalDist().inv_cdf)
        for count in COUNTS:
            u = ((raw(9, count) >> np.uint64(12)) + 0.5) * 2.0**-52
            found = DROPOUT.normal(EXAMPLES, count, step=9)
            np.testing.assert_allclose(found, inverse(u), 2e-15)
            single = DROPOUT.normal(EXAMPLES, count, step=9, dtype=np.float32)
            np.testing.assert_array_equal(single, found.astype(np.float32), strict=True)

    def test_normal_far_out(self):
        words = np.array([0, 1 << 12, 1 << 40, 2**64 - 1, 2**64 - (1 << 30)], np.uint64)
        u = ((words >> np.uint64(12)).astype(float) + 0.5) * 2.0**-52
        wanted = [statistics.NormalDist().inv_cdf(min(x, 1 - x)) for x in u]
        out = np.empty((1, 5))
        philox._normals.compiled()(words[None], out, np.int64(0), np.uint64(0))
        np.testing.assert_allclose(-np.abs(out[0]), wanted, 1e-15)
        assert (np.sign(out[0]) == [-1, -1, -1, 1, 1]).all()
        assert np.abs(out).max() < 8.3

    @pytest.mark.parametrize(("low", "high"), [(0, 2), (-5, 10**12), (-(2**63), 2**63 - 1)])
    def test_integers_are_products(self, low, high):
        found = DROPOUT.integers(EXAMPLES, low, high, 99, step=9)
        wanted = [low + (int(word) * (high - low) >> 64) for word in raw(9, 99).ravel()]
        assert found.ravel().tolist() == wanted

    def test_bounds_may_be_numbers_of_numpy(self):
        found = DROPOUT.integers(EXAMPLES, np.int8(-100), np.int8(100), np.int64(99))
        np.testing.assert_array_equal(found, DROPOUT.integers(EXAMPLES, -100, 100, 99))
        with pytest.raises(TypeError, match=r"low and high must be integers, got 0.5, 3"):
            DROPOUT.integers(EXAMPLES, 0.5, 3)

    @pytest.mark.parametrize("chance", [0.0, 0.9, 1.0])
    def test_mask(self, chance):
        found = DROPOUT.mask(EXAMPLES, chance, 33, step=9)
        halves = raw(9, 17).view(np.uint32)[:, :33]
        np.testing.assert_array_equal(found, halves / 2**32 < chance, strict=True)

    def test_a_chance_may_be_a_narrow_number(self):
        chance = np.float16(0.9)
        found = DROPOUT.mask(EXAMPLES, chance, 33)
        np.testing.assert_array_equal(found, DROPOUT.mask(EXAMPLES, float(chance), 33))

    @pytest.mark.parametrize("dtype", ["f4", "f8"])
    def test_dtypes_of_another_byte_order_are_native(self, dtype):
        for draw in (DROPOUT.uniform, DROPOUT.normal):
            swapped = draw([1, 2], 3, dtype=np.dtype(dtype).newbyteorder())
            assert swapped.dtype == dtype
            assert (swapped == draw([1, 2], 3, dtype=dtype)).all()

    def test_twins_have_the_same_bits(self):
        words = np.random.default_rng(0).integers(0, 2**64, (2, 2500), np.uint64)
        for kernel, dtype, span in [
            (philox._doubles, np.float64, 0),
            (philox._singles, np.float32, 0),
            (philox._normals, np.float64, 0),
            (philox._normals, np.float32, 0),
            (philox._bounded, np.int64, 10**15),
            (philox._chances, np.bool_, 2**31),
        ]:
            found, wanted = np.empty((2, 2500), dtype), np.empty((2, 2500), dtype)
            kernel.compiled()(words, found, np.int64(-7), np.uint64(span))
            kernel.reference(words, wanted, np.int64(-7), np.uint64(span))
            np.testing.assert_array_equal(found, wanted)

    def test_without_numba(self):
        found = np.empty((5, 9001))
        arguments = (np.empty(4096, np.uint64), 1, DROPOUT._key(9, 0), EXAMPLES.astype("u8"))
        philox.FILL_KERNELS["float64"].resolve_reference()(
            found, *arguments, np.int64(0), np.uint64(0)
        )
        np.testing.assert_array_equal(found, DROPOUT.uniform(EXAMPLES, 9001, step=9))

    def test_rows_are_alike_however_many_are_made_at_once(self):
        few = np.array([0, 7, 818, 1023, 1024, 2999])
        for count in (1, 2, 3, 5, 4095):
            rows = np.arange(3000) if count < 9 else few
            places = few if count < 9 else np.arange(len(few))
            for draw in (
                lambda e, n: DROPOUT.uniform(e, n, step=9),
                lambda e, n: DROPOUT.uniform(e, n, step=9, dtype="f4"),
                lambda e, n: DROPOUT.mask(e, 0.5, n, step=9),
            ):
                alone = np.concatenate([draw([each], count) for each in few])
                np.testing.assert_array_equal(draw(rows, count)[places], alone)


class TestStream:
    def test_what_it_depends_on(self):
        one = DROPOUT.uniform([4], 8, step=1)
        for other in [
            ms.random.stream(4, "dropout").uniform([4], 8, step=1),
            ms.random.stream(3, "flips").uniform([4], 8, step=1),
            DROPOUT.uniform([5], 8, step=1),
            DROPOUT.uniform([4], 8, step=2),
            DROPOUT.generator(1).random((1, 8)),
            DROPOUT.generator(4).random((1, 8)),
        ]:
            assert not (one == other).any()
        assert (DROPOUT.generator(1, 4).random(8) == one).all()
        assert (DROPOUT.generator(1).permutation(9) == DROPOUT.generator(1).permutation(9)).all()

    def test_shapes(self):
        assert DROPOUT.uniform([1, 2]).shape == (2,)
        assert DROPOUT.normal(np.arange(3, dtype=np.int8), (2, 5)).shape == (3, 2, 5)
        for none in ([], np.empty(0, np.int64)):
            assert DROPOUT.mask(none, 0.5, (4, 4)).shape == (0, 4, 4)
        assert DROPOUT.integers([1], 0, 9, (0, 3)).shape == (1, 0, 3)

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (lambda: DROPOUT.uniform([0.5]), "integers of shape"),
            (lambda: DROPOUT.uniform([[1]]), "integers of shape"),
            (lambda: DROPOUT.uniform([[1], [2, 3]]), "integers of shape"),
            (lambda: DROPOUT.uniform(np.ma.array([1])), r"not masked int64 of shape \(1,\)"),
            (lambda: DROPOUT.uniform([1], -1), r"'dropout': no size in shape may be below 0"),
            (lambda: DROPOUT.normal([1], (3, -2)), r"may be below 0, got \(3, -2\)"),
            (lambda: DROPOUT.uniform([1], dtype="f2"), "float64 or float32, got float16"),
            (lambda: DROPOUT.normal([1], dtype=int), "float64 or float32, got int64"),
            (lambda: DROPOUT.uniform([1], step=-1), "step must be from 0 to .*, got -1"),
            (lambda: DROPOUT.uniform([1], step=2**64), "step must be from 0 to .*, got 184"),
            (lambda: DROPOUT.integers([1], 3, 3), "low < high < low"),
            (lambda: DROPOUT.integers([1], -(2**63), 2**63), r"low < high < low \+ 2\*\*64"),
            (lambda: DROPOUT.mask([1], 1.5), "from 0 to 1, got 1.5"),
        ],
    )
    def test_what_cannot_be_is_refused(self, call, words):
        with pytest.raises(ValueError, match=words):
            call()

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (lambda: DROPOUT.uniform([1], step=1.5), "step must be an integer, got 1.5"),
            (lambda: DROPOUT.normal([1], step=None), "step must be an integer, got None"),
            (lambda: DROPOUT.generator(0.5), "step must be an integer, got 0.5"),
            (lambda: DROPOUT.generator(0, 1.7), "example must be an integer, got 1.7"),
            (lambda: DROPOUT.uniform([1], dtype="float23"), "'float23' is not a dtype"),
            (lambda: DROPOUT.uniform([1], 2.5), "shape must be an integer or .*, got 2.5"),
            (lambda: DROPOUT.uniform([1], None), "shape must be an integer or .*, got None"),
            (lambda: DROPOUT.mask([1], 0.5, (2, 1.5)), r"shape must be .*, got \(2, 1.5\)"),
            (lambda: DROPOUT.mask([1], "0.5"), "chance must be a number .*, got '0.5'"),
            (lambda: DROPOUT.normal([1], dtype="float23"), "normal: 'float23' is not a dtype"),
        ],
    )
    def test_what_is_no_integer_or_dtype_is_refused(self, call, words):
        with pytest.raises(TypeError, match=words):
            call()

    @pytest.mark.parametrize(
        "given", [(0.5, "a"), (True, "a"), (1, b"a"), ("a", 1), ([1], "a"), (np.array([1]), "a")]
    )
    def test_a_stream_has_a_seed_and_a_name(self, given):
        with pytest.raises(TypeError, match="an integer and a string"):
            ms.random.stream(*given)

    def test_they_look_random(self):
        u = DROPOUT.uniform(range(1000), 100)
        assert abs(u.mean() - 0.5) < 0.005  # five standard deviations
        z = DROPOUT.normal(range(1000), 100)
        assert abs(z.mean()) < 0.016
        assert abs(z.var() - 1) < 0.023
        assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.016


def test_the_number_of_ranks_changes_nothing():
    def program(comm):
        strategy = ms.MirroredStrategy()
        dataset = ms.Dataset(np.arange(23)).shuffle(seed=1).batch(8)
        noise, found = ms.random.stream(5, "noise"), {}

        def replica_code(examples, step):
            rows = noise.normal(examples, 4, step=step)
            found.update(zip(examples.tolist(), rows.tolist(), strict=True))

        for step, batch in enumerate(strategy.experimental_distribute_dataset(dataset)):
            strategy.run(replica_code, args=(batch, step))
        return found

    alone = run_ranks(program, 1)[0]
    assert sorted(alone) == list(range(23))
    for size in (2, 3):
        seen = {}
        for mine in run_ranks(program, size):
            assert not seen.keys() & mine
            seen.update(mine)
        assert seen == alone


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ours", "numpys"),
    [
        (lambda e, n: DROPOUT.uniform(e, n), lambda g, s: g.random(s)),
        (lambda e, n: DROPOUT.uniform(e, n, dtype="f4"), lambda g, s: g.random(s, np.float32)),
        (lambda e, n: DROPOUT.mask(e, 0.9, n), lambda g, s: g.random(s) < 0.9),
        (lambda e, n: DROPOUT.normal(e, n), lambda g, s: g.standard_normal(s)),
        (lambda e, n: DROPOUT.integers(e, 0, 1000, n), lambda g, s: g.integers(0, 1000, s)),
    ],
    ids=["uniform", "float32", "mask", "normal", "integers"],
)
def test_the_cost_is_at_most_three_times_that_of_numpy(ours, numpys):
    generator = np.random.default_rng(0)
    for rows, count in ((256, 1024), (1 << 16, 4)):
        examples, pairs = np.arange(rows), []
        for _ in range(30):
            begin = time.thread_time()
            ours(examples, count)
            middle = time.thread_time()
            numpys(generator, (rows, count))
            pairs.append((middle - begin, time.thread_time() - middle))
        mine, theirs = np.min(pairs, axis=0)
        assert mine <= 3 * theirs, (rows, count)
