"""``tf.random`` as programs that import `mpistrat.compat.tf` see it: draws of NumPy's generators.

The numbers are not those of the other library. A draw with a seed is the same each time and on
every rank; one without is another on each, so what is to be alike on all ranks needs a seed.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np

from mpistrat.compat.tf_absent import absent_from as _absent_from
from mpistrat.compat.tf_absent import refusing as _refusing

__all__ = ["Generator", "normal", "set_seed", "uniform"]

__getattr__ = _absent_from("tf.random")

set_seed = _refusing("tf.random.set_seed")


@final
class Generator:
    """Draws one after the other from one seed.

    Args:
      seed: A number of at least 0, or None for another sequence each time.

    Example:
      >>> Generator.from_seed(1).normal([2]).dtype
      dtype('float32')
    """

    def __init__(self, seed: int | None = None):
        """Begin the sequence."""
        self._generator = np.random.default_rng(seed)

    @staticmethod
    def from_seed(seed: int) -> Generator:
        """Return the generator of a `seed`."""
        return Generator(seed)

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
        return (mean + stddev * self._generator.standard_normal(tuple(shape))).astype(dtype)

    def uniform(
        self, shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = np.float32
    ) -> Any:
        """Return draws from ``[minval, maxval)``, each as likely.

        Args:
          shape: Their shape.
          minval: The least.
          maxval: The end; 1 if None, which integers may not leave out.
          dtype: Dtype of the result; for an integer one, integers are drawn.

        Raises:
          ValueError: An integer dtype without `maxval`.
        """
        if np.issubdtype(dtype, np.integer):
            if maxval is None:
                raise ValueError("uniform: integers need maxval.")
            return self._generator.integers(minval, maxval, tuple(shape), dtype=dtype)
        most = 1 if maxval is None else maxval
        draws = self._generator.random(tuple(shape))
        return (minval + (most - minval) * draws).astype(dtype)


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
      seed: A number of at least 0; None for other draws each time, and on each rank.
      name: No effect.

    Example:
      >>> bool((normal([3], seed=1) == normal([3], seed=1)).all())
      True
    """
    return Generator(seed).normal(shape, mean, stddev, dtype)


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
      seed: A number of at least 0; None for other draws each time, and on each rank.
      name: No effect.
    """
    return Generator(seed).uniform(shape, minval, maxval, dtype)
