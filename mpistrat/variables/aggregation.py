"""Writes to variables: the values of all replicas become one, and every rank writes that.

Whole arrays and rows go the same way, by the table of `WRITES`. Without an aggregation replicas
write the same, which is compared. The contents of a large variable (64 KiB and more, with several
ranks), which the ranks of a node may have once, are compared in a handshake of the write, before
anything is written. For a small variable the rank writes at once and keeps a `PendingSmallWrite`,
whose digest is part of the next handshake, at the latest of the one that ends the run.
Where that fails, for whatever reason, the ranks compare their digests, and undo from the first
write on that they have not made alike. So a write stays exactly if all ranks made it alike, as with
one rank, where a write is NumPy's own operation.

In cross-replica code a digest of plain values is compared, so copies cannot drift apart through a
number that depends on the rank. For a `Mirrored` that a collective gave, the number of its
handshake is compared instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from mpistrat.arrays import Array, digest
from mpistrat.strategy.context_stack import CodeContext, check_writable, current_context
from mpistrat.variables import on_read, sparse
from mpistrat.variables.indexed_slices import IndexedSlices
from mpistrat.variables.kinds import WRITES, DistributedVariable, VariableAggregation
from mpistrat.variables.values import Mirrored
from mpistrat.variables.writes import REDUCE_OPS, broadcast_replica0, check_same_contents

# Returns the argument of a write, checked and converted: values, and the numbers of their rows;
# None for all rows. The values are C-ordered, since the loop by which NumPy adds them decides the
# bits of a NaN.
ValueConverter = Callable[
    [DistributedVariable, "CodeContext | None", str, Any], "tuple[Array, Array | None]"
]
ValuesAndRows = tuple[Array, "Array | None"]

_DIFFERENT_VALUES_ADVICE = "Compute the same value on all ranks, or broadcast or reduce it first."
_REPLICA_CODE_ADVICE = (
    "Reduce it first (ctx.all_reduce), or create the variable with an aggregation, which says how "
    "the values of the replicas become one."
)


_WHOLE_WRITES = frozenset({"assign", "assign_add", "assign_sub"})
# Added to the hash of a variable's number, so that unlike writes have unlike digests. Both are
# hashes of 63 bits: XXH3 combines the seed of a few bytes with these by XOR and a sum, so small
# seeds make equal digests of values that differ in a few bits, such as 1.0 and 1.125.
_SEEDS = {kind: xxh3_64_intdigest(kind.encode()) >> 1 for kind in WRITES}


@final
class PendingSmallWrite(NamedTuple):
    """A write that this rank has made, and that the next handshake shows to be alike on all.

    Attributes:
      variable: The variable.
      kind: The method that has written.
      first_value: The first of the values, for messages.
      rows: The numbers of the written rows; None for all.
      previous_values: The contents before the write.
      digest: 16 bytes that are equal on all ranks exactly if they write alike.
    """

    variable: DistributedVariable
    kind: str
    first_value: Any
    rows: Array | None
    previous_values: Array
    digest: bytes

    def text(self) -> str:
        """Return a text of the write, for messages."""
        rows_text = "" if self.rows is None else f"{len(self.rows)} rows, "
        call = f"{self.kind}({self.variable._spec()})"
        value_text = str(self.first_value).strip("()")  # those of a complex number
        return f"{call} of {self.digest[:8].hex()} ({rows_text}first value {value_text})"

    def undo(self) -> None:
        """Put the contents back that were there before."""
        index: Any = ... if self.rows is None else self.rows
        self.variable._storage.array[index] = self.previous_values


# Takes half the time of PendingSmallWrite(...).
_make_pending_write = functools.partial(tuple.__new__, PendingSmallWrite)


def write(variable: DistributedVariable, kind: str, value: object, convert: ValueConverter) -> None:
    """Write to a variable; see `Variable.assign`.

    A step writes many small variables in replica code. Each is in this rank's own memory, so it is
    written at once, and the handshake that the step makes soon compares what the ranks wrote.

    Args:
      variable: The variable.
      kind: The method that writes.
      value: The argument of that method.
      convert: Checks and converts it, and raises all errors of arguments.
    """
    context, strategy = current_context(), variable.strategy
    if (
        context is None
        or context.replica is None
        or context.strategy is not strategy
        or not variable._has_deferred_checks
    ):
        _write_after_checks(variable, context, kind, value, convert)
        return
    lockstep, array = strategy._replicas.lockstep, variable._storage.array
    content: Any = value
    if (
        type(value) is np.ndarray
        and value.dtype is array.dtype
        and value.shape == array.shape
        and (flags := value.flags).c_contiguous
        and flags.aligned
        and kind in _WHOLE_WRITES
        and variable._has_plain_bytes
    ):  # as most do
        new_values, rows, previous_values = value, None, array.copy()
    else:
        try:
            new_values, rows = convert(variable, context, kind, value)
        except Exception as error:
            lockstep.fail_collectively(f"{kind}({variable._spec()})", error)
        content = new_values
        if not (rows is None and variable._has_plain_bytes):
            content = digest([new_values] if rows is None else [new_values, rows])
        previous_values = array.copy() if rows is None else array[rows]
    first_value = new_values.item(0) if new_values.size else "nothing"
    hashed = xxh3_128_digest(content, _SEEDS[kind] + variable._number_hash)
    saved_rows = None if rows is None else rows.copy()
    fields = (variable, kind, first_value, saved_rows, previous_values, hashed)
    if unproved := lockstep.state.pending_writes:
        unproved.append(_make_pending_write(fields))
    else:
        lockstep.defer_write(_make_pending_write(fields))
    WRITES[kind](array, new_values, rows)


def _write_after_checks(
    variable: DistributedVariable,
    context: CodeContext | None,
    kind: str,
    value: object,
    convert: ValueConverter,
) -> None:
    """Write in cross-replica code, or a variable whose writes are compared at once."""
    strategy = variable.strategy
    lockstep = strategy._replicas.lockstep
    is_replica_code = is_updating = False
    if context is None:
        lockstep.check()
    elif context.strategy is not strategy:
        check_writable(variable, kind, context)
        lockstep.check()
    else:
        is_replica_code = context.replica is not None
        is_updating = context.updated_variable is variable
    is_private = variable._is_on_read and (is_replica_code or is_updating)
    if is_private or lockstep.comm.size == 1 or (is_updating and not variable._is_large):
        new_values, rows = convert(variable, context, kind, value)
        variable._store(kind, new_values, rows)
        return
    try:
        new_values, rows = convert(variable, context, kind, value)
        if variable._is_large and np.may_share_memory(new_values, variable._storage.array):
            new_values = new_values.copy()  # other ranks write to it while this one reads
    except Exception as error:
        lockstep.fail_collectively(f"{kind}({variable._spec()})", error)
    if is_replica_code:
        new_values, rows = _aggregate(variable, kind, new_values, rows)
    else:
        # Ranks that have made this write are in the same function of update until its end.
        call = f"{kind}({variable._spec()}){' in update' if is_updating else ''}"
        handshake_name = value._find_handshake(lockstep.session) if type(value) is Mirrored else ""
        _check_agreement(variable, call, (new_values, rows), handshake_name=handshake_name)
        if variable._is_on_read:
            new_values = on_read.copy_to_write(variable, new_values)
    variable._store(kind, new_values, rows)


def _check_agreement(
    variable: DistributedVariable,
    call: str,
    written: ValuesAndRows,
    *,
    advice: str = _DIFFERENT_VALUES_ADVICE,
    handshake_name: str = "",
) -> None:
    """Show that all ranks write the same, or raise on all of them.

    Values with a `handshake_name` are known to be the same: it is enough that it is the same.
    """
    lockstep = variable.strategy._replicas.lockstep
    new_values, rows = written
    if handshake_name:
        lockstep.handshake(f"{call} of what call {handshake_name} gave")
    elif rows is None:
        check_same_contents(lockstep, call, new_values, advice)
    else:
        contents = {"the values": new_values, "the indices": rows}
        check_same_contents(lockstep, f"{call} of rows", contents, advice)


def _aggregate(
    variable: DistributedVariable, kind: str, new_values: Array, rows: Array | None
) -> ValuesAndRows:
    """Return what all replicas together write, where each has given values of its own."""
    call = f"{kind}({variable._spec()})"
    if variable.aggregation is VariableAggregation.NONE:
        _check_agreement(variable, call, (new_values, rows), advice=_REPLICA_CODE_ADVICE)
        return new_values, rows
    if variable.aggregation in REDUCE_OPS:
        return _reduce_over_replicas(variable, call, new_values, rows)
    return _take_replica0(variable, call, new_values, rows)


def _reduce_over_replicas(
    variable: DistributedVariable, call: str, new_values: Array, rows: Array | None
) -> ValuesAndRows:
    group, op = variable.strategy._replicas, REDUCE_OPS[variable.aggregation]
    if rows is None:
        return sparse.reduce_array(group, call, op, new_values), None
    contribution = sparse.make_contribution(op, IndexedSlices(new_values, rows, variable.shape))
    (total,) = sparse.all_reduce_leaves(group, call, op, [contribution])
    return total.values, total.indices


def _take_replica0(
    variable: DistributedVariable, call: str, new_values: Array, rows: Array | None
) -> ValuesAndRows:
    group = variable.strategy._replicas
    if rows is None:
        return broadcast_replica0(group.lockstep, call, new_values), None
    if group.lockstep.comm.rank:
        new_values, rows = new_values[:0], rows[:0]
    call = f"{call} of replica 0"
    gathered_arrays = group.reducer.all_gather(
        call, (0, 0), (new_values, rows), ("values", "indices")
    )
    return gathered_arrays[0], gathered_arrays[1]
