"""Random numbers as a function of a key: words of Philox, and distributions made of them.

Philox-4x64-10 (Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), whose
reference is NumPy's. Whatever the distribution, a number comes from one word or half of one, by
additions, products and roots alone, so all processors have the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.kernels import jit

MAX_WORDS = 4096  # words that are made at once, to be turned into numbers while they are in cache
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLY = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_WEYL = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))

# The normal quantile, AS 241 (Wichura, Applied Statistics 37, 1988): numerators and denominators in
# the middle, in the tails, and far out, from the highest power down.
_MIDDLE = (
    (
        *(
            2509.0809287301226727,
            33430.575583588128105,
            67265.770927008700853,
            45921.953931549871457,
        ),
        *(
            13731.693765509461125,
            1971.5909503065514427,
            133.14166789178437745,
            3.387132872796366608,
        ),
    ),
    (
        *(5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867),
        *(5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0),
    ),
)
_TAIL = (
    (
        *(7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177),
        *(1.27045825245236838258, 3.64784832476320460504, 5.7694972214606914055),
        *(4.6303378461565452959, 1.42343711074968357734),
    ),
    (
        *(1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966),
        *(0.14810397642748007459, 0.68976733498510000455, 1.6763848301838038494),
        *(2.05319162663775882187, 1.0),
    ),
)
_FAR_TAIL = (
    (
        *(2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386),
        *(0.026532189526576123093, 0.29656057182850489123, 1.7848265399172913358),
        *(5.4637849111641143699, 6.6579046435011037772),
    ),
    (
        *(2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5),
        *(7.868691311456132591e-4, 0.0148753612908506148525, 0.13692988092273580531),
        *(0.59983220655588793769, 1.0),
    ),
)
_EDGE, _FARTHER = 0.425, 5.0
_LN2, _ROOT = 0.6931471805599453, 0.7071067811865476
# The series of the logarithm, 2 artanh(s) / s in powers of s * s; |s| is below 0.172, so 12 are
# enough.
_ARTANH = tuple(2.0 / (2 * k + 1) for k in range(11, -1, -1))


@jit.helper
def _product_high(a: Any, b: Any) -> Any:
    """Return the upper 64 bits of a product of two words."""
    low = (a & _LOW) * (b & _LOW)
    middle = (a >> _HALF) * (b & _LOW) + (low >> _HALF)
    other = (a & _LOW) * (b >> _HALF) + (middle & _LOW)
    return (a >> _HALF) * (b >> _HALF) + (middle >> _HALF) + (other >> _HALF)


def _words_reference(out: Array, key: Array, examples: Array, first_block: np.uint64) -> None:
    for row, example in zip(out, examples, strict=True):
        counter = np.array([first_block, example, key[2], key[3]], np.uint64)
        row[...] = np.random.Philox(key=key[:2], counter=counter).random_raw(row.size)


@jit.kernel(_words_reference)
def _words(out: Array, key: Array, examples: Array, first_block: np.uint64) -> None:
    """Write a row of words for each example, from `first_block` on; a block has four words."""
    count = out.shape[1]
    for row in range(examples.size):
        for block in range((count + 3) // 4):
            a, b = key[0], key[1]
            w, x, y, z = first_block + np.uint64(block + 1), examples[row], key[2], key[3]
            for _ in range(10):
                w, x, y, z = (
                    _product_high(_MULTIPLY[1], y) ^ x ^ a,
                    _MULTIPLY[1] * y,
                    _product_high(_MULTIPLY[0], w) ^ z ^ b,
                    _MULTIPLY[0] * w,
                )
                a, b = a + _WEYL[0], b + _WEYL[1]
            at = 4 * block
            out[row, at] = w
            if at + 3 < count:
                out[row, at + 1], out[row, at + 2], out[row, at + 3] = x, y, z
            else:
                if at + 1 < count:
                    out[row, at + 1] = x
                if at + 2 < count:
                    out[row, at + 2] = y


def _doubles_reference(words: Array, out: Array, low: np.int64, span: np.uint64) -> None:
    out[...] = (words >> np.uint64(11)) * 2.0**-53


@jit.kernel(_doubles_reference)
def _doubles(words: Array, out: Array, low: np.int64, span: np.uint64) -> None:
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = np.float64(words[i, j] >> np.uint64(11)) * 2.0**-53


def _singles_reference(words: Array, out: Array, low: np.int64, span: np.uint64) -> None:
    halves = words.view(np.uint32)[:, : out.shape[1]]
    out[...] = (halves >> np.uint32(8)) * np.float32(2.0**-24)


@jit.kernel(_singles_reference)
def _singles(words: Array, out: Array, low: np.int64, span: np.uint64) -> None:
    halves = words.view(np.uint32)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = np.float32(halves[i, j] >> np.uint32(8)) * np.float32(2.0**-24)


def _chances_reference(words: Array, out: Array, low: np.int64, span: np.uint64) -> None:
    np.less(words.view(np.uint32)[:, : out.shape[1]], span, out=out)


@jit.kernel(_chances_reference)
def _chances(words: Array, out: Array, low: np.int64, span: np.uint64) -> None:
    halves = words.view(np.uint32)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = np.uint64(halves[i, j]) < span


def _bounded_reference(words: Array, out: Array, low: np.int64, span: np.uint64) -> None:
    out[...] = low + _product_high.reference(words, span).view(np.int64)


@jit.kernel(_bounded_reference)
def _bounded(words: Array, out: Array, low: np.int64, span: np.uint64) -> None:
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = low + np.int64(_product_high(words[i, j], span))


@jit.helper
def _polynomial(coefficients: tuple[float, ...], x: Any) -> Any:
    total = 0.0 * x
    for coefficient in coefficients:
        total = total * x + coefficient
    return total


@jit.helper
def _rational(pair: tuple[tuple[float, ...], tuple[float, ...]], x: Any) -> Any:
    return _polynomial(pair[0], x) / _polynomial(pair[1], x)


@jit.helper
def _minus_log(mantissa: Any, exponent: Any) -> Any:
    """Return minus the logarithm of ``mantissa * 2 ** exponent``; additions and products alone."""
    s = (mantissa - _ROOT) / (mantissa + _ROOT)
    return (0.5 - exponent) * _LN2 - s * _polynomial(_ARTANH, s * s)


def _normals_reference(words: Array, out: Array, low: np.int64, span: np.uint64) -> None:
    q = ((words >> np.uint64(12)) + 0.5) * 2.0**-52 - 0.5
    quantiles = q * _rational.reference(_MIDDLE, 0.180625 - q * q)
    is_tail = np.abs(q) > _EDGE
    tails = q[is_tail]
    r = np.sqrt(_minus_log.reference(*np.frexp(0.5 - np.abs(tails))))
    near_tails = _rational.reference(_TAIL, r - 1.6)
    far_tails = _rational.reference(_FAR_TAIL, r - _FARTHER)
    quantiles[is_tail] = np.copysign(np.where(r <= _FARTHER, near_tails, far_tails), tails)
    out[...] = quantiles


@jit.helper
def _quantile(word: np.uint64) -> Any:
    q = (np.float64(word >> np.uint64(12)) + 0.5) * 2.0**-52 - 0.5
    if abs(q) <= _EDGE:
        return q * _rational(_MIDDLE, 0.180625 - q * q)
    mantissa, exponent = math.frexp(0.5 - abs(q))
    r = math.sqrt(_minus_log(mantissa, exponent))
    distance = _rational(_TAIL, r - 1.6) if r <= _FARTHER else _rational(_FAR_TAIL, r - _FARTHER)
    return distance if q > 0.0 else -distance


@jit.kernel(_normals_reference)
def _normals(words: Array, out: Array, low: np.int64, span: np.uint64) -> None:
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = _quantile(words[i, j])


def _fill_rows(
    out: Array,
    words: Array,
    numbers_per_word: int,
    key: Array,
    examples: Array,
    low: np.int64,
    span: np.uint64,
) -> None:
    """Fill the rows of examples, as many as `words` is enough for, or pieces of one."""
    flat, count = out.reshape(-1), out.shape[1]
    width = min(words.size * numbers_per_word, count)
    rows_at_once = words.size // ((width + numbers_per_word - 1) // numbers_per_word)
    for row in range(0, examples.size, rows_at_once):
        row_examples = examples[row : row + rows_at_once]
        for at in range(0, count, width):
            size = min(width, count - at)
            start = row * count + at
            piece = flat[start : start + row_examples.size * size].reshape(row_examples.size, size)
            row_words = (size + numbers_per_word - 1) // numbers_per_word
            block_words = words[: row_examples.size * row_words].reshape(
                row_examples.size, row_words
            )
            _words(block_words, key, row_examples, np.uint64(at // (4 * numbers_per_word)))
            _convert(block_words, piece, low, span)


_convert: Any = None  # what `_fill_rows` names; each of these has another in its place
# By distribution, ``fill(out, words, per, key, examples, low, span)``: `out` is of shape (rows, n),
# `words` is memory for some words, at most `MAX_WORDS`, each of which makes `per` numbers; `key` is
# two words, step and kind.
FILL_KERNELS = {
    "float64": jit.driver(_fill_rows, _convert=_doubles),
    "float32": jit.driver(_fill_rows, _convert=_singles),
    "mask": jit.driver(_fill_rows, _convert=_chances),
    "integers": jit.driver(_fill_rows, _convert=_bounded),
    "normal": jit.driver(_fill_rows, _convert=_normals),
}
