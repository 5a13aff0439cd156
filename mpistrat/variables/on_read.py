"""ON_READ variables: each replica has a copy of its own, and the aggregation says what is read.

| aggregation | cross-replica code reads | and assigns x | a checkpoint has | restored from x |
|---|---|---|---|---|
| SUM | the sum of the copies | x / n to each | the sum | parts whose sum is x, to the last bit |
| MEAN | their mean | x to each | the mean | x |
| ONLY_FIRST_REPLICA | replica 0's | x to each | replica 0's | x |
| NONE | an error | x to each | an error | |

In replica code each replica reads and writes its own copy. Of small sums of metrics a checkpoint
has the copy of each replica too: what is added then rounds as it would have. They are used where
there are as many replicas as there were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_bytes
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.strategy.context_stack import again, current
from mpistrat.variables import sparse
from mpistrat.variables.kinds import DistributedVariable, VariableAggregation
from mpistrat.variables.writes import OPS, broadcast_replica0

_MAX_NBYTES = 1 << 16  # bytes of a variable, of which a file has as many as there are replicas


def is_sum(variable: Any) -> bool:
    """Tell whether a variable, or what is saved like one, is read as the sum of its copies."""
    return variable.on_read and variable.aggregation is VariableAggregation.SUM


def read(variable: DistributedVariable) -> Array:
    """Return what cross-replica code reads.

    Collective.

    Raises:
      ValueError: The aggregation is NONE.

    Cost: an all-reduce, or a broadcast.
    """
    call, array = f"read({variable.spec()})", variable.storage.array
    if variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"ON_READ variable {variable.name!r} has aggregation NONE, so cross-replica code "
            "cannot read it as one value. Use experimental_local_results, or an aggregation."
        )
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return broadcast_replica0(variable.strategy.replicas.lockstep, call, array)
    return reduce_copies(variable, call, array)


def reduce_copies(variable: DistributedVariable, call: str, array: Array) -> Array:
    """Return the reduction of one array per replica, by the variable's aggregation.

    Collective.

    Args:
      variable: Its aggregation is SUM or MEAN.
      call: What it is for.
      array: This replica's; of the variable's shape and dtype.

    Cost: as `ReplicaContext.all_reduce`.
    """
    # In its strategy's scope, for the sake of what a program has chosen to reduce it.
    with again(current(), variable.strategy):
        op = OPS[variable.aggregation]
        return sparse.reduced(variable.strategy.replicas, call, op, array)


def check_write(variable: DistributedVariable, kind: str) -> None:
    """Raise ValueError if a write by cross-replica code has no meaning.

    Args:
      variable: A strategy of several replicas has it.
      kind: Which method writes.
    """
    if is_sum(variable) and kind != "assign":
        raise ValueError(
            f"{kind} of ON_READ variable {variable.name!r} with aggregation SUM has no meaning in "
            "cross-replica code. Do it in replica code, or assign."
        )


def copy_to_write(variable: DistributedVariable, values: Array) -> Array:
    """Return what each replica writes to its copy where cross-replica code assigns `values`."""
    size = variable.strategy.replicas.lockstep.comm.size
    return split_sum(values, size) if is_sum(variable) else values


def check_saved(call: str, name: str, variable: Any) -> None:
    """Raise ValueError if a variable, or what is saved like one, has no single value."""
    if variable.on_read and variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"{call}: {name!r} is ON_READ with aggregation NONE, so it has no single "
            "value. Choose an aggregation, or leave it out of the checkpoint."
        )


def has_partials(variable: Any) -> bool:
    """Tell whether checkpoints have the copy of each replica too."""
    return bool(variable.of_metric and variable.storage.array.nbytes <= _MAX_NBYTES)


def replica_partials(lockstep: Lockstep, variables: Sequence[DistributedVariable]) -> list[Array]:
    """Return the copies of all replicas, of shape (replicas, ...). Collective; unproved."""
    arrays = [variable.storage.array for variable in variables]
    rows = lockstep.texts(b"".join(array.tobytes() for array in arrays))
    partials, start = [], 0
    for array in arrays:
        copies = b"".join([row[start : start + array.nbytes] for row in rows])
        partials.append(np.frombuffer(copies, array.dtype).reshape(len(rows), *array.shape))
        start += array.nbytes
    return partials


def restored_copy(lockstep: Lockstep, variable: Any, value: Array, partials: Array | None) -> Array:
    """Return what this replica restores: of a sum its part, else the value. Collective.

    Args:
      lockstep: Of the ranks that restore.
      variable: What is restored.
      value: What a checkpoint has of it.
      partials: The copies of the replicas that saved it, if it has them; the copy of this one is
        restored if there are as many replicas, and what is read then is `value`.
    """
    if not is_sum(variable):
        return value
    rank, size = lockstep.comm.rank, lockstep.comm.size
    reduce = functools.partial(reduce_copies, variable, f"restore({variable.spec()}), its sum")
    if partials is not None and len(partials) == size > 1:
        saved_copy: Array = partials[rank]
        if np.array_equal(as_bytes(reduce(saved_copy)), as_bytes(value)):
            return saved_copy
    return split_exactly(reduce, rank, size, value)


def split_sum(array: Array, size: int) -> Array:
    """Return the part of each replica of what is to read as `array`; integers lose the rest.

    Example:
      >>> split_sum(np.array([7, -7]), 2)
      array([ 3, -3])
    """
    if array.dtype.kind not in "iu":
        result: Array = (array / size).astype(array.dtype)
        return result
    quotient: Array = _divided(array, size)[0].astype(array.dtype)
    return quotient


def _divided(array: Array, size: int) -> tuple[Array, Array]:
    """Return quotient and remainder of integers, in 64 bits."""
    # Not by way of floats, which do not hold every integer of 64 bits; towards zero, as a cast is.
    integers = array.astype(np.uint64 if array.dtype.kind == "u" else np.int64)
    quotient, remainder = np.divmod(integers, integers.dtype.type(size))
    quotient = quotient + ((remainder != 0) & (integers < 0))
    return quotient, integers - quotient * integers.dtype.type(size)


def split_exactly(reduce: Callable[[Array], Array], rank: int, size: int, saved: Array) -> Array:
    """Return this replica's part of what reads as `saved` in sum, to the last bit.

    For integers the quotient, and 1 more on so many of the first replicas as remain; of floating
    point ``saved / size`` where the sum of that is `saved`, else replica 0 has all, the others 0.

    Collective, if there are several replicas.

    Args:
      reduce: Adds up what all replicas give it, in the way in which the sum will be read.
      rank: Which replica this is.
      size: How many there are.
      saved: The same on all of them.
    """
    if size == 1:
        return saved
    if saved.dtype.kind == "c":
        # Part by part: a quotient of complex numbers would lose the signs of zeros.
        flat = saved.reshape(-1)
        parts = flat.view(flat.real.dtype)
        reduce_parts = lambda x: reduce(x.view(flat.dtype)).view(x.dtype)  # noqa: E731
        halves = split_exactly(reduce_parts, rank, size, parts)
        return halves.view(flat.dtype).reshape(saved.shape)
    if saved.dtype.kind in "iu":
        quotient, remainder = _divided(saved, size)
        result: Array = (quotient + np.sign(remainder) * (rank < np.abs(remainder))).astype(
            saved.dtype
        )
        return result
    first = saved if rank == 0 else np.zeros_like(saved)
    if saved.dtype.kind == "b":
        return first
    with np.errstate(all="ignore"):
        part = split_sum(saved, size)
        finite = np.isfinite(part)
        total = reduce(np.where(finite, part, np.zeros_like(part)))
        result = np.where(~finite | (total == saved), part, first)
    return result
