"""ON_READ variables: each replica has a copy of its own, and the aggregation says what is read.

| aggregation | cross-replica code reads | and assigns x | a checkpoint has | restored from x |
|---|---|---|---|---|
| SUM | the sum of the copies | x / n to each | the sum | parts whose sum is x, to the last bit |
| MEAN | their mean | x to each | the mean | x |
| ONLY_FIRST_REPLICA | replica 0's | x to each | replica 0's | x |
| NONE | an error | x to each | an error | |

In replica code each replica reads and writes its own copy. A checkpoint of small sums of metrics
has the copy of each replica too, so that later additions round as they would have. They are used
where there are as many replicas as there were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_bytes
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.strategy.context_stack import copy_context, current_context
from mpistrat.variables import sparse
from mpistrat.variables.kinds import DistributedVariable, VariableAggregation
from mpistrat.variables.writes import REDUCE_OPS, broadcast_replica0

_MAX_PARTIAL_NBYTES = (
    1 << 16
)  # bytes of a variable, of which a file has as many as there are replicas


def is_read_as_sum(variable: Any) -> bool:
    """Tell whether a variable, or what is saved like one, is read as the sum of its copies."""
    return variable._is_on_read and variable.aggregation is VariableAggregation.SUM


def read_aggregated(variable: DistributedVariable) -> Array:
    """Return the value that cross-replica code reads.

    Collective.

    Raises:
      ValueError: The aggregation is NONE.

    Cost: an all-reduce, or a broadcast.
    """
    call, array = f"read({variable._spec()})", variable._storage.array
    if variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"ON_READ variable {variable.name!r} has aggregation NONE, so cross-replica code "
            "cannot read it as one value. Use experimental_local_results, or an aggregation."
        )
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return broadcast_replica0(variable.strategy._replicas.lockstep, call, array)
    return reduce_copies(variable, call, array)


def reduce_copies(variable: DistributedVariable, call: str, array: Array) -> Array:
    """Return the reduction of one array per replica, by the variable's aggregation.

    Collective.

    Args:
      variable: Its aggregation is SUM or MEAN.
      call: The text of the call.
      array: This replica's; of the variable's shape and dtype.

    Cost: as `ReplicaContext.all_reduce`.
    """
    # In its strategy's scope, as a class of the program's own may reduce it.
    with copy_context(current_context(), variable.strategy):
        op = REDUCE_OPS[variable.aggregation]
        return sparse.reduce_array(variable.strategy._replicas, call, op, array)


def check_write(variable: DistributedVariable, kind: str) -> None:
    """Raise ValueError if a write by cross-replica code has no meaning.

    Args:
      variable: A strategy of several replicas has it.
      kind: The method that writes.
    """
    if is_read_as_sum(variable) and kind != "assign":
        raise ValueError(
            f"{kind} of ON_READ variable {variable.name!r} with aggregation SUM has no meaning in "
            "cross-replica code. Do it in replica code, or assign."
        )


def copy_to_write(variable: DistributedVariable, array: Array) -> Array:
    """Return the value for each replica's copy where cross-replica code assigns `array`."""
    replica_count = variable.strategy._replicas.lockstep.comm.size
    return split_sum(array, replica_count) if is_read_as_sum(variable) else array


def check_can_save(call: str, name: str, variable: Any) -> None:
    """Raise ValueError if a variable, or what is saved like one, has no single value."""
    if variable._is_on_read and variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"{call}: {name!r} is ON_READ with aggregation NONE, so it has no single "
            "value. Choose an aggregation, or leave it out of the checkpoint."
        )


def has_partials(variable: Any) -> bool:
    """Tell whether checkpoints have the copy of each replica too."""
    return bool(variable._is_metric_sum and variable._storage.array.nbytes <= _MAX_PARTIAL_NBYTES)


def replica_partials(lockstep: Lockstep, metric_sums: Sequence[DistributedVariable]) -> list[Array]:
    """Return the copies of all replicas, of shape (replicas, ...). Collective; unproved."""
    arrays = [variable._storage.array for variable in metric_sums]
    messages = lockstep.gather_texts(b"".join(array.tobytes() for array in arrays))
    partials, start = [], 0
    for array in arrays:
        copies = b"".join([row[start : start + array.nbytes] for row in messages])
        partials.append(np.frombuffer(copies, array.dtype).reshape(len(messages), *array.shape))
        start += array.nbytes
    return partials


def make_restored_copy(
    lockstep: Lockstep, variable: Any, value: Array, partials: Array | None
) -> Array:
    """Return the value that this replica restores: its part of a sum, else all. Collective.

    Args:
      lockstep: Of the ranks that restore.
      variable: The variable, or an object that is saved like one.
      value: Its value in a checkpoint.
      partials: The copies of the replicas that saved it, if it has them; the copy of this one is
        restored if there are as many replicas, and what is read then is `value`.
    """
    if not is_read_as_sum(variable):
        return value
    rank, replica_count = lockstep.comm.rank, lockstep.comm.size
    reduce_array = functools.partial(
        reduce_copies, variable, f"restore({variable._spec()}), its sum"
    )
    if partials is not None and len(partials) == replica_count > 1:
        saved_copy: Array = partials[rank]
        if np.array_equal(as_bytes(reduce_array(saved_copy)), as_bytes(value)):
            return saved_copy
    return split_exactly(reduce_array, rank, replica_count, value)


def split_sum(array: Array, replica_count: int) -> Array:
    """Return each replica's part of a sum that is to be `array`; integers lose the rest.

    Example:
      >>> split_sum(np.array([7, -7]), 2)
      array([ 3, -3])
    """
    if array.dtype.kind not in "iu":
        quotient_array: Array = (array / replica_count).astype(array.dtype)
        return quotient_array
    quotient: Array = _divide_integers(array, replica_count)[0].astype(array.dtype)
    return quotient


def _divide_integers(array: Array, replica_count: int) -> tuple[Array, Array]:
    """Return quotient and remainder of integers, in 64 bits."""
    # Not by way of floats, which do not hold every integer of 64 bits; towards zero, as a cast is.
    integers = array.astype(np.uint64 if array.dtype.kind == "u" else np.int64)
    quotient, remainder = np.divmod(integers, integers.dtype.type(replica_count))
    quotient = quotient + ((remainder != 0) & (integers < 0))
    return quotient, integers - quotient * integers.dtype.type(replica_count)


def split_exactly(
    reduce_array: Callable[[Array], Array], rank: int, replica_count: int, saved: Array
) -> Array:
    """Return this replica's part of a sum that is `saved`, to the last bit.

    For integers the quotient, and 1 more on so many of the first replicas as remain; of floating
    point ``saved / size`` where the sum of that is `saved`, else replica 0 has all, the others 0.

    Collective, if there are several replicas.

    Args:
      reduce_array: Adds up the arrays of all replicas, as the sum will be read.
      rank: The number of this replica.
      replica_count: The number of replicas.
      saved: The same on all of them.
    """
    if replica_count == 1:
        return saved
    if saved.dtype.kind == "c":
        # Part by part: a quotient of complex numbers would lose the signs of zeros.
        flat = saved.reshape(-1)
        components = flat.view(flat.real.dtype)
        reduce_components = lambda x: reduce_array(x.view(flat.dtype)).view(x.dtype)  # noqa: E731
        split_components = split_exactly(reduce_components, rank, replica_count, components)
        return split_components.view(flat.dtype).reshape(saved.shape)
    if saved.dtype.kind in "iu":
        quotient, remainder = _divide_integers(saved, replica_count)
        split_array: Array = (quotient + np.sign(remainder) * (rank < np.abs(remainder))).astype(
            saved.dtype
        )
        return split_array
    array_of_replica0 = saved if rank == 0 else np.zeros_like(saved)
    if saved.dtype.kind == "b":
        return array_of_replica0
    with np.errstate(all="ignore"):
        quotient_part = split_sum(saved, replica_count)
        is_finite = np.isfinite(quotient_part)
        total = reduce_array(np.where(is_finite, quotient_part, np.zeros_like(quotient_part)))
        split_array = np.where(~is_finite | (total == saved), quotient_part, array_of_replica0)
    return split_array
