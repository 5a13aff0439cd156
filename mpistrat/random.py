"""Random numbers that belong to examples and steps, not to ranks.

A number is a function of the seed, the name of the stream, the step, the number of the example and
its place in that example's row, and of nothing else: so dropout and augmentation are the same at
every number of ranks, and after a restart. Nothing is drawn one after the other, so there is no
state to save.

All come from Philox-4x64-10 (Salmon and others, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), as NumPy has it: the row of an example is what ``np.random.Philox(key=key, counter=[0,
example, step, 0])`` gives, whose key are 16 bytes of BLAKE2b of the text ``"{seed} {name}"``.
"""

from __future__ import annotations

import functools
import hashlib
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from mpistrat.arrays import Array, as_dtype, as_int, is_masked
from mpistrat.kernels.philox import FILL_KERNELS, MAX_WORDS

__all__ = ["RandomStream", "stream"]

_EXAMPLE_KEY, _STEP_KEY = 0, 1
_UNUSED_RANGE = np.int64(0), np.uint64(0)


@final
@dataclass(frozen=True)
class RandomStream:
    """Random numbers of one purpose, such as dropout; `stream` makes it.

    Its methods give each example a row of numbers of its own. `examples` says which examples of the
    data these are, counted over all replicas: integers of shape (rows,), as another column of the
    dataset gives them, ``ms.Dataset((x, y, np.arange(n)))``. Rows may be none. `shape` is that of
    one example's numbers, and `step` makes them differ from step to step; without it an example has
    the same in each. Two calls with the same arguments give the same numbers, so what is random for
    two purposes needs two streams.

    Nothing communicates. The bits are the same on every processor, with Numba or without.

    Attributes:
      seed: The seed.
      name: The purpose of the numbers.

    Cost: One to two times that of the same distribution of NumPy's `Generator`, if an example has
      four numbers or more. Those of one example come in blocks of four words of 64 bits, and
      nothing less is made: about 10 ns for an example, however few it wants. Without Numba about 10
      microseconds for each example more.
    """

    seed: int
    name: str

    def uniform(
        self,
        examples: object,
        shape: int | Sequence[int] = (),
        *,
        step: int = 0,
        dtype: npt.DTypeLike = "f8",
    ) -> Array:
        """Return numbers from 0 to 1, 1 excluded, of shape (rows, `*shape`).

        They are those of ``self.generator(step, example).random(shape, dtype)``.

        Args:
          examples: The numbers of the examples.
          shape: Of the numbers of one example.
          step: The number of the step.
          dtype: float64 or float32.

        Raises:
          TypeError: `step` is not an integer, or `shape` not of integers.
          ValueError: `examples` are not integers of one dimension, `step` or a size is negative, or
            `dtype` is another.

        Example:
          >>> dropout = stream(0, "dropout")
          >>> as_int = dropout.uniform(range(4), 3, step=7)
          >>> bool((as_int[2:] == dropout.uniform([2, 3], 3, step=7)).all())
          True
        """
        name = _float_name(dtype, "uniform")
        count = 1 if name == "float64" else 2
        return self._draw(name, examples, shape, step, dtype=name, numbers_per_word=count)

    def normal(
        self,
        examples: object,
        shape: int | Sequence[int] = (),
        *,
        step: int = 0,
        dtype: npt.DTypeLike = "f8",
    ) -> Array:
        """Return normal numbers, of mean 0 and variance 1, of shape (rows, `*shape`).

        Each is the quantile (AS 241) of one number between 0 and 1, so none is beyond 8.3. They are
        not those of NumPy's `Generator`, which takes a varying number of words for one.

        Args:
          examples: Which examples these are.
          shape: Of the numbers of one example.
          step: The number of the step.
          dtype: float64; or float32, which is that rounded.

        Raises:
          TypeError: As of `uniform`.
          ValueError: As of `uniform`.

        Example:
          >>> stream(0, "noise").normal([5, 6], (2, 3)).shape
          (2, 2, 3)
        """
        dtype = _float_name(dtype, "normal")
        return self._draw("normal", examples, shape, step, dtype=dtype, numbers_per_word=1)

    def integers(
        self,
        examples: object,
        low: int,
        high: int,
        shape: int | Sequence[int] = (),
        *,
        step: int = 0,
    ) -> Array:
        """Return integers in ``[low, high)``, int64 of shape (rows, `*shape`).

        Each is the upper half of a product of 128 bits, a word times ``high - low``, so some are
        likelier than others by less than one part in ``2**64 / (high - low)``.

        Args:
          examples: Which examples these are.
          low: The least.
          high: More than the greatest.
          shape: Of the numbers of one example.
          step: The number of the step.

        Raises:
          TypeError: As of `uniform`; or `low` or `high` is not an integer.
          ValueError: As of `uniform`; or `low` is not below `high`, or one of them no int64, or
            the range has all 2**64 integers.

        Example:
          >>> shift = stream(0, "shift").integers(range(100), -2, 3)
          >>> int(shift.min()), int(shift.max())
          (-2, 2)
        """
        lowest, above = as_int(low), as_int(high)  # NumPy's would wrap around
        if lowest is None or above is None:
            raise TypeError(f"integers: low and high must be integers, got {low!r}, {high!r}.")
        low, high = lowest, above
        if not -(2**63) <= low < high <= 2**63 or high - low == 2**64:
            raise ValueError(
                f"integers: expected int64 with low < high < low + 2**64, got {low}, {high}."
            )
        draw = functools.partial(self._draw, "integers", examples, shape, step, dtype=np.int64)
        return draw(numbers_per_word=1, low=np.int64(low), span=np.uint64(high - low))

    def mask(
        self, examples: object, chance: float, shape: int | Sequence[int] = (), *, step: int = 0
    ) -> Array:
        """Return booleans that are true with a probability, of shape (rows, `*shape`).

        Args:
          examples: Which examples these are.
          chance: From 0 (none is true) to 1 (all are); in steps of ``2**-32``.
          shape: Of the booleans of one example.
          step: The number of the step.

        Raises:
          TypeError: As of `uniform`; or `chance` is not a number.
          ValueError: As of `uniform`; or `chance` is not from 0 to 1.

        Example:
          >>> hidden, kept = np.ones((8, 64)), 0.9
          >>> keep = stream(0, "dropout").mask(range(8), kept, 64, step=3)
          >>> dropped = hidden * keep / kept
        """
        probability: Any = chance
        probability = (
            probability[()]
            if isinstance(probability, np.ndarray) and not probability.ndim
            else probability
        )
        if not isinstance(probability, numbers.Real):
            raise TypeError(f"mask: chance must be a number from 0 to 1, got {probability!r:.60}.")
        chance = float(probability)
        if not 0.0 <= chance <= 1.0:
            raise ValueError(f"mask: chance must be from 0 to 1, got {probability!r:.60}.")
        threshold = np.uint64(round(chance * 2**32))
        return self._draw(
            "mask", examples, shape, step, dtype=np.bool_, numbers_per_word=2, span=threshold
        )

    def generator(self, step: int = 0, example: int | None = None) -> np.random.Generator:
        """Return a generator of NumPy for all else: permutations, choices, other distributions.

        Args:
          step: The number of the step.
          example: The example; None for a generator of the step itself, the same on all ranks,
            whose numbers differ from those of every example.

        Raises:
          TypeError: `step` or `example` is not an integer.
          ValueError: `step` is negative.

        Cost: Some 20 microseconds.

        Example:
          >>> chosen = stream(0, "which layer").generator(step=3).choice(12)
        """
        kind, example_index = (_STEP_KEY, 0) if example is None else (_EXAMPLE_KEY, as_int(example))
        if example_index is None:
            raise TypeError(f"{self._label}: example must be an integer, got {example!r:.60}.")
        key = self._key(step, kind)
        counter = np.array([0, example_index % 2**64, key[2], key[3]], np.uint64)
        return np.random.Generator(np.random.Philox(key=key[:2], counter=counter))

    @property
    def _label(self) -> str:
        return f"the stream {self.name!r}"

    def _key(self, step: int, key_kind: int) -> Array:
        number = as_int(step)
        if number is None:
            raise TypeError(f"{self._label}: step must be an integer, got {step!r:.60}.")
        if not 0 <= number < 2**64:
            raise ValueError(f"{self._label}: step must be from 0 to 2**64 - 1, got {step!r:.60}.")
        text = f"{self.seed} {self.name}".encode(errors="surrogatepass")
        words = np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), "<u8")
        return np.array([*words, number, key_kind], np.uint64)

    def _check_shape(self, shape: Any) -> tuple[int, ...]:
        single_size = as_int(shape)
        try:
            sizes = tuple(map(as_int, shape)) if single_size is None else (single_size,)
        except TypeError:
            sizes = (None,)
        valid_sizes = tuple(size for size in sizes if size is not None)
        if valid_sizes != sizes:
            raise TypeError(
                f"{self._label}: shape must be an integer or a sequence of integers, got "
                f"{shape!r:.60}."
            )
        if min(valid_sizes, default=0) < 0:
            raise ValueError(f"{self._label}: no size in shape may be below 0, got {shape!r:.60}.")
        return valid_sizes

    def _draw(
        self,
        kind: str,
        examples: object,
        shape: int | Sequence[int],
        step: int,
        *,
        dtype: npt.DTypeLike,
        numbers_per_word: int,
        low: np.int64 = _UNUSED_RANGE[0],
        span: np.uint64 = _UNUSED_RANGE[1],
    ) -> Array:
        try:
            rows = np.asarray(examples)
        except ValueError:  # lists of different lengths
            rows = np.array(None)
        masked = "masked " * is_masked(examples)
        if masked or rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise ValueError(
                f"{self._label}: examples must be integers of shape (rows,), not {masked}"
                f"{rows.dtype} of shape {rows.shape}; give the dataset a column np.arange(n)."
            )
        out = np.empty((len(rows), *self._check_shape(shape)), dtype)
        if out.size:
            count = out.size // len(rows)
            words = np.empty(min(MAX_WORDS, len(rows) * -(-count // numbers_per_word)), np.uint64)
            key, indices = self._key(step, _EXAMPLE_KEY), np.ascontiguousarray(rows).astype("u8")
            flat_out = out.reshape(len(rows), count)
            FILL_KERNELS[kind](flat_out, words, numbers_per_word, key, indices, low, span)
        return out


def stream(seed: int, name: str) -> RandomStream:
    """Return the random stream of a seed and a name; streams of different names are independent.

    Args:
      seed: An integer, the same on all ranks.
      name: The purpose of the numbers, such as ``"dropout"``; the same on all ranks.

    Raises:
      TypeError: `seed` is not an integer, or `name` is not a string.

    Example:
      >>> stream(0, "dropout").uniform([3]) == stream(0, "flips").uniform([3])
      array([False])
    """
    number = as_int(seed)
    if number is None or not isinstance(name, str):
        raise TypeError(
            f"random.stream: expected an integer and a string, such as stream(7, 'dropout'), got "
            f"{seed!r:.60} and {name!r:.60}."
        )
    return RandomStream(number, name)


def _float_name(dtype: npt.DTypeLike, call: str) -> str:
    """Return the name of a dtype; of another byte order it is that of the machine."""
    name: str = as_dtype(dtype, call).name
    if name not in ("float64", "float32"):
        raise ValueError(f"{call}: dtype must be float64 or float32, got {name}.")
    return name
