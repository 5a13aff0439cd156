"""Powers and cosines of Python floats that have the same bits on every processor.

``**`` and `math.cos` ask the C library, which answers by the instructions that a processor has:
two nodes of different age may differ in the last bit, and then in their weights. Here are additions
and products alone, which IEEE 754 defines to the bit.
"""

from __future__ import annotations

import math

__all__ = ["cos_pi", "power"]

# The coefficients of sine and cosine, from the highest power down; exact to 1e-17 below pi / 4.
_SIN = [(-1) ** k / math.factorial(2 * k + 1) for k in range(9, -1, -1)]
_COS = [(-1) ** k / math.factorial(2 * k) for k in range(9, -1, -1)]


def power(base: float, exponent: int) -> float:
    """Return `base` to the power of an integer that is not below 0, by repeated squaring.

    Example:
      >>> power(0.5, 10) == 2.0**-10
      True
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def cos_pi(turn: float) -> float:
    """Return the cosine of pi times a number from 0 to 1.

    Example:
      >>> cos_pi(0.0), cos_pi(0.5), cos_pi(1.0)
      (1.0, 0.0, -1.0)
    """
    if turn > 0.5:
        return -cos_pi(1.0 - turn)
    if turn > 0.25:
        x = math.pi * (0.5 - turn)
        return x * _series(_SIN, x * x)
    x = math.pi * turn
    return _series(_COS, x * x)


def _series(coefficients: list[float], x: float) -> float:
    total = 0.0
    for coefficient in coefficients:
        total = total * x + coefficient
    return total
