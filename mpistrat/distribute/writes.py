"""What is written to a variable, once the replicas have agreed on it.

One row per kind of write: who gives a value, and how the values of the replicas become one.
Mirrored means mirrored: no row lets the copies of an ON_WRITE variable differ.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array, as_array, spec_text
from mpistrat.collectives.forms import form
from mpistrat.collectives.lockstep import Lockstep
from mpistrat.collectives.part import Part
from mpistrat.collectives.reducing import Reducing
from mpistrat.distribute.slices import IndexedSlices
from mpistrat.distribute.views import ALONE
from mpistrat.errors import LockstepError
from mpistrat.kernels.ops import ReduceOp

if TYPE_CHECKING:
    from mpistrat.distribute.variables import Variable

__all__ = [
    "REPLICA",
    "VariableAggregation",
    "VariableSynchronization",
    "digest",
    "prove_same",
    "reduced",
    "share",
]


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are made equal."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the values that replicas write, or hold, become one."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


OPS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}


def digest(value: Any) -> bytes:
    """Return a 128-bit digest of dtype, shape and contents of an array, or of `IndexedSlices`.

    Raises:
      LeafTypeError: The value is neither.
    """
    if isinstance(value, IndexedSlices):
        parts = digest(value.values) + digest(value.indices) + repr(value.dense_shape).encode()
        return hashlib.blake2b(parts, digest_size=16).digest()
    array = as_array(value)
    found = hashlib.blake2b(spec_text(array).encode(), digest_size=16)
    for part in _canonical(array):
        found.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return found.digest()


def _canonical(array: Array) -> list[Array]:
    # The bytes of a longdouble hold padding, which may differ where the values do not.
    if array.dtype.char == "G":
        return _canonical(array.real) + _canonical(array.imag)
    if array.dtype.char == "g":
        with np.errstate(all="ignore"):
            high = array.astype(np.float64)
            return [high, (array - high).astype(np.float64)]
    return [array]


def prove_same(
    lockstep: Lockstep,
    call: str,
    contents: Array | bytes,
    advice: str,
    failure: BaseException | None = None,
) -> None:
    """Prove that all ranks make this call with the same contents.

    Args:
      lockstep: Proves it.
      call: The text of the call.
      contents: What has to be the same: an array, or digests of several.
      advice: What to do if it is not.
      failure: What this rank failed with before it had contents.

    Raises:
      LockstepError: The contents differ; on every rank.
    """
    if isinstance(contents, bytes):
        mine, shown = hashlib.blake2b(contents, digest_size=16).digest(), b""
    else:
        mine = digest(contents)
        shown = str(contents.reshape(-1)[0]).encode()[:40] if contents.size else b""

    def judge(smalls: list[bytes] | None) -> LockstepError | None:
        if smalls is not None and all(small[:16] == mine for small in smalls):
            return None
        first = ""
        if smalls is not None and shown:
            rows = [
                f"{small[16:].decode()} on rank {rank}" for rank, small in enumerate(smalls[:8])
            ]
            first = f" The first elements are {', '.join(rows)}."
        return LockstepError(
            f"{call}: the value differs between ranks (this is rank {lockstep.comm.rank} of "
            f"{lockstep.comm.size}), so the copies of the variable would drift apart.{first}\n"
            f"  {advice}"
        )

    lockstep.prove(call, mine + shown, failure, judge=judge)


def _same(variable: Variable, call: str, value: Array) -> Array:
    if variable.strategy.parts.view is ALONE:
        return value
    # A step writes many variables; that all wrote alike is shown once, by the proof that comes next
    # anyway. Until then the old value is kept, to be put back if they did not.
    first = value.reshape(-1)[:1].tolist()
    text = f"{call} of {first[0] if first else 'nothing'} {digest(value).hex()[:16]}"
    variable.strategy.parts.lockstep.later(text, variable.copy)
    return value


def share(array: Array, size: int) -> Array:
    """Return each replica's part of what is to read as `array` in sum; integers lose the rest.

    Example:
      >>> share(np.array([7, -7]), 2)
      array([ 3, -3])
    """
    if array.dtype.kind not in "iu":
        result: Array = (array / size).astype(array.dtype)
        return result
    # Not by way of floats, which do not hold every integer of 64 bits; towards zero, as a cast is.
    wide = array.astype(np.uint64 if array.dtype.kind == "u" else np.int64)
    whole, rest = np.divmod(wide, wide.dtype.type(size))
    result = (whole + ((rest != 0) & (wide < 0))).astype(array.dtype)
    return result


def reduced(reducer: Reducing, call: str, op: ReduceOp, value: Array) -> Array:
    """Return `value` folded over all replicas, in its own dtype."""
    (total,) = reducer.all_reduce(call, op, [Part(value, form(op, value.dtype))])
    return total


def _reduced(variable: Variable, call: str, value: Array) -> Array:
    return reduced(variable.strategy.parts.reducer, call, OPS[variable.aggregation], value)


def _first(variable: Variable, call: str, value: Array) -> Array:
    lockstep = variable.strategy.parts.lockstep
    buffer = np.array(value, order="C")
    lockstep.prove(f"{call} {spec_text(buffer)}")
    lockstep.comm.bcast(buffer, 0)
    return buffer


# How the values that replicas write to an ON_WRITE variable become the one that is written.
REPLICA: dict[VariableAggregation, Callable[[Any, str, Array], Array]] = {
    VariableAggregation.NONE: _same,
    VariableAggregation.SUM: _reduced,
    VariableAggregation.MEAN: _reduced,
    VariableAggregation.ONLY_FIRST_REPLICA: _first,
}
