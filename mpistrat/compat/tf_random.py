"""``tf.random`` as programs that import `mpistrat.compat.tf` see it: draws of NumPy's generators.

The numbers are not TensorFlow's. A draw with a seed is the same each time and on every rank. A draw
without a seed differs between ranks, unless `set_seed` was called: then each thread continues one
sequence from that seed, which is the same on ranks that make the same draws. In replica code a
`Generator` gives each replica numbers of its own, as in TensorFlow.
"""

from __future__ import annotations

import threading
from typing import Any, final

import numpy as np

from mpistrat.arrays import check_int
from mpistrat.compat.absent import Advised as _Advised
from mpistrat.compat.absent import make_getattr as _make_getattr
from mpistrat.compat.tf_arrays import check_given
from mpistrat.compat.tf_tensors import as_dtype, as_tuple
from mpistrat.compat.tf_tensors import takes_name as _takes_name
from mpistrat.strategy.context_stack import current_context
from mpistrat.variables.kinds import SINGLE_REPLICA

__all__ = ["Generator", "normal", "set_seed", "uniform"]

__getattr__ = _make_getattr("tf.random")


class _Sequences(threading.local):
    """The sequence, one in each thread, that draws without a seed continue."""

    seed: int | None = None  # of this process, for threads that have not set one
    generator: Generator | None = None

    def current(self) -> Generator:
        if self.generator is None and _Sequences.seed is not None:
            self.generator = _make_common(_Sequences.seed)
        return Generator() if self.generator is None else self.generator


def set_seed(seed: int | None) -> None:
    """Set the seed of all draws that have no seed of their own.

    Shuffling of datasets has its own seed: `Dataset.shuffle`.

    Args:
      seed: An integer; None for different draws each time.

    Example:
      >>> set_seed(7)
      >>> first = normal([2])
      >>> set_seed(7)
      >>> bool((normal([2]) == first).all())
      True
      >>> set_seed(None)
    """
    seed = None if seed is None else _convert_seed(seed)
    _sequences.generator = None if seed is None else _make_common(seed)
    _Sequences.seed = seed


@final
class Generator(metaclass=_Advised):
    """A generator of random numbers.

    In replica code each replica has a sequence of its own, in other code all ranks the same one.

    Args:
      seed: An integer, or None for a different sequence each time.

    Example:
      >>> Generator.from_seed(1).normal([2]).dtype
      dtype('float32')
    """

    _where = "tf.random.Generator"

    def __init__(self, seed: int | None = None):
        """Create a generator."""
        self._seed = seed = None if seed is None else _convert_seed(seed)
        self._common_generator = np.random.default_rng(seed)
        self._replica_generator: np.random.Generator | None = None

    @property
    def _generator(self) -> np.random.Generator:
        mode = current_context()
        if mode is None or mode.replica is None or mode.strategy._replicas.view is SINGLE_REPLICA:
            return self._common_generator
        if self._replica_generator is None:
            replica_seed = 1 + mode.strategy._replicas.lockstep.comm.rank
            self._replica_generator = np.random.default_rng(
                None if self._seed is None else [self._seed, replica_seed]
            )
        return self._replica_generator

    @staticmethod
    def from_seed(seed: int, alg: Any = None) -> Generator:
        """Return a generator with this `seed`; `alg` has no effect."""
        return Generator(seed)

    @_takes_name
    def normal(
        self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = np.float32
    ) -> Any:
        """Return draws of a normal distribution.

        Args:
          shape: Their shape.
          mean: Mean of the distribution.
          stddev: Its standard deviation.
          dtype: Dtype of the result.
        """
        mean = np.asarray(check_given("mean", mean))
        stddev = np.asarray(check_given("stddev", stddev))
        return (mean + stddev * self._generator.standard_normal(as_tuple("shape", shape))).astype(
            as_dtype(dtype, "normal")
        )

    @_takes_name
    def uniform(
        self, shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = np.float32
    ) -> Any:
        """Return draws of the uniform distribution on ``[minval, maxval)``.

        Args:
          shape: Their shape.
          minval: The lower bound.
          maxval: The upper bound, excluded; 1 if None. Integers need it.
          dtype: Dtype of the result; for an integer one, integers are drawn.

        Raises:
          ValueError: An integer dtype without `maxval`.
        """
        dtype = as_dtype(dtype, "uniform")
        if dtype.kind in "iu":
            if maxval is None:
                raise ValueError("uniform: integers need maxval.")
            return self._generator.integers(minval, maxval, as_tuple("shape", shape), dtype=dtype)
        minval, upper = np.asarray(minval), np.asarray(1 if maxval is None else maxval)
        draws = self._generator.random(as_tuple("shape", shape))
        scaled = (minval + (upper - minval) * draws).astype(dtype)
        bound = upper.astype(dtype)
        largest_draw = np.nextafter(bound, minval.astype(dtype))
        return np.where(scaled == bound, largest_draw, scaled)[
            ()
        ]  # where rounding came to the bound


_sequences = _Sequences()


def _convert_seed(seed: Any) -> int:
    """Return a seed as NumPy takes it: a negative one is a large one, as in TensorFlow."""
    return check_int("seed", seed, -(2**63), ValueError) % 2**64


def _make_common(seed: int) -> Generator:
    """Return a generator whose sequence is the same in replica code, on all replicas."""
    generator = Generator(seed)
    generator._replica_generator = generator._common_generator
    return generator


def _find_sequence(seed: int | None) -> Generator:
    return _sequences.current() if seed is None else _make_common(seed)


def normal(
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = np.float32,
    seed: int | None = None,
    name: Any = None,
) -> Any:
    """Return draws of a normal distribution; the same ones for the same seed.

    Args:
      shape: See `Generator.normal`.
      mean: See there.
      stddev: See there.
      dtype: See there.
      seed: An integer; None to continue the sequence of `set_seed`.
      name: No effect.

    Example:
      >>> bool((normal([3], seed=1) == normal([3], seed=1)).all())
      True
    """
    return _find_sequence(seed).normal(shape, mean, stddev, dtype)


def uniform(
    shape: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = np.float32,
    seed: int | None = None,
    name: Any = None,
) -> Any:
    """Return draws from ``[minval, maxval)``; the same ones for the same seed.

    Args:
      shape: See `Generator.uniform`.
      minval: See there.
      maxval: See there.
      dtype: See there.
      seed: An integer; None to continue the sequence of `set_seed`.
      name: No effect.
    """
    return _find_sequence(seed).uniform(shape, minval, maxval, dtype)
