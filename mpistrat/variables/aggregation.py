"""Writes to variables: the values of all replicas become one, and every rank writes that.

Whole arrays and rows go the same way. What may not differ is compared before it is written: of a
large variable in a handshake of its own, in the line of the write; of a small one in the next
handshake, whichever it is, until when the rank can put the old contents back. Large is what the
ranks of a node have once, if they can share memory: 64 KiB and more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from mpistrat.arrays import Array, digest
from mpistrat.strategy.context_stack import Mode, check_writable, current
from mpistrat.variables import on_read, sparse
from mpistrat.variables.indexed_slices import IndexedSlices
from mpistrat.variables.kinds import WRITES, DistributedVariable, VariableAggregation
from mpistrat.variables.values import Mirrored
from mpistrat.variables.writes import OPS, broadcast_replica0, prove_same

# Returns what was given to a write, checked and converted: values, and to which rows; None for all.
# The values are C-ordered, since by which loop NumPy adds them decides the bits of a NaN.
Take = Callable[[DistributedVariable, "Mode | None", str, Any], "tuple[Array, Array | None]"]
Pair = tuple[Array, "Array | None"]

_ADVICE = "Compute the same value on all ranks, or broadcast or reduce it first."
_IN_REPLICA_CODE = (
    "Reduce it first (ctx.all_reduce), or create the variable with an aggregation, which says how "
    "the values of the replicas become one."
)


_WHOLE_WRITES = frozenset({"assign", "assign_add", "assign_sub"})
# Added to the mark of a variable, so that unlike writes have unlike digests. Both are hashes of 63
# bits: XXH3 combines the seed of a few bytes with these by XOR and a sum, so small seeds make equal
# digests of values that differ in a few bits, such as 1.0 and 1.125.
_SEEDS = {kind: xxh3_64_intdigest(kind.encode()) >> 1 for kind in WRITES}


@final
class SmallWrite(NamedTuple):
    """A write that this rank has made, and that the next handshake shows to be alike on all.

    Attributes:
      variable: What was written to.
      kind: Which method has written.
      first: The first of the values, for messages.
      rows: Which rows were written; None for all.
      before: What was there before.
      digest: 16 bytes that are equal on all ranks exactly if they write alike.
    """

    variable: DistributedVariable
    kind: str
    first: Any
    rows: Array | None
    before: Array
    digest: bytes

    def text(self) -> str:
        """Return what was written, for messages."""
        rows = "" if self.rows is None else f"{len(self.rows)} rows, "
        call = f"{self.kind}({self.variable.spec()})"
        value_text = str(self.first).strip("()")  # without the parentheses of a complex number
        return f"{call} of {self.digest[:8].hex()} ({rows}first value {value_text})"

    def undo(self) -> None:
        """Put back what was there before."""
        place: Any = ... if self.rows is None else self.rows
        self.variable.storage.array[place] = self.before


_record = functools.partial(tuple.__new__, SmallWrite)  # takes half the time of SmallWrite(...)


def write(variable: DistributedVariable, kind: str, value: Any, take: Take) -> None:
    """Write to a variable; see `Variable.assign`.

    Args:
      variable: The variable.
      kind: Which method writes.
      value: What was given to it.
      take: Checks and converts it; whatever can fail fails there.
    """
    mode, strategy = current(), variable.strategy
    if mode is None or mode.replica is None or mode.strategy is not strategy or not variable.waits:
        _write_now(variable, mode, kind, value, take)
        return
    # A step writes many small variables, each this rank's own memory, and makes a handshake soon.
    lockstep, array = strategy.replicas.lockstep, variable.storage.array
    content: Any = value
    if (
        type(value) is np.ndarray
        and value.dtype is array.dtype
        and value.shape == array.shape
        and (flags := value.flags).c_contiguous
        and flags.aligned
        and kind in _WHOLE_WRITES
        and variable.simple
    ):  # as most do
        values, rows, previous_values = value, None, array.copy()
    else:
        try:
            values, rows = take(variable, mode, kind, value)
        except Exception as error:
            lockstep.fail_collectively(f"{kind}({variable.spec()})", error)
        content = values
        if not (rows is None and variable.simple):
            content = digest([values] if rows is None else [values, rows])
        previous_values = array.copy() if rows is None else array[rows]
    first = values.item(0) if values.size else "nothing"
    content_digest = xxh3_128_digest(content, _SEEDS[kind] + variable.mark)
    saved_rows = None if rows is None else rows.copy()
    record = _record((variable, kind, first, saved_rows, previous_values, content_digest))
    if unproved := lockstep.state.pending_writes:
        unproved.append(record)
    else:
        lockstep.defer_write(record)
    WRITES[kind](array, values, rows)


def _write_now(
    variable: DistributedVariable, mode: Mode | None, kind: str, value: Any, take: Take
) -> None:
    strategy = variable.strategy
    lockstep = strategy.replicas.lockstep
    replica = updating = False
    if mode is None:
        lockstep.check()
    elif mode.strategy is not strategy:
        check_writable(variable, kind, mode)
        lockstep.check()
    else:
        replica, updating = mode.replica is not None, mode.updating is variable
    is_private = variable.on_read and (replica or updating)
    if is_private or lockstep.comm.size == 1 or (updating and not variable.large):
        values, rows = take(variable, mode, kind, value)
        variable.store(kind, values, rows)
        return
    try:
        values, rows = take(variable, mode, kind, value)
        if variable.large and np.may_share_memory(values, variable.storage.array):
            values = values.copy()  # other ranks write to it while this one reads
    except Exception as error:
        lockstep.fail_collectively(f"{kind}({variable.spec()})", error)
    if not replica:
        # Who has made this write is in the same function of update, and leaves it by its end.
        call_suffix = " in update" if updating else ""
        _agree(variable, f"{kind}({variable.spec()}){call_suffix}", value, values, rows, _ADVICE)
        if variable.on_read:
            values = on_read.copy_to_write(variable, values)
    elif variable.aggregation is VariableAggregation.NONE:
        call = f"{kind}({variable.spec()})"
        _agree(variable, call, None, values, rows, _IN_REPLICA_CODE)
    else:
        become_one = _reduced if variable.aggregation in OPS else _first
        values, rows = become_one(variable, kind, values, rows)
    variable.store(kind, values, rows)


def _agree(
    variable: DistributedVariable,
    call: str,
    value: Any,
    values: Array,
    rows: Array | None,
    advice: str,
) -> None:
    """Show that all ranks write the same, or raise on all of them."""
    lockstep = variable.strategy.replicas.lockstep
    proved = value.proved_by(lockstep.session) if isinstance(value, Mirrored) else ""
    if proved:
        lockstep.handshake(f"{call} of what call {proved} gave")
    elif rows is None:
        prove_same(lockstep, call, values, advice)
    else:
        prove_same(lockstep, f"{call} of rows", {"the values": values, "the indices": rows}, advice)


def _reduced(variable: DistributedVariable, kind: str, values: Array, rows: Array | None) -> Pair:
    group, op = variable.strategy.replicas, OPS[variable.aggregation]
    call = f"{kind}({variable.spec()})"
    if rows is None:
        return sparse.reduced(group, call, op, values), None
    part = sparse.contribution(op, IndexedSlices(values, rows, variable.shape))
    (total,) = sparse.all_reduce(group, call, op, [part])
    return total.values, total.indices


def _first(variable: DistributedVariable, kind: str, values: Array, rows: Array | None) -> Pair:
    group = variable.strategy.replicas
    call = f"{kind}({variable.spec()})"
    if rows is None:
        return broadcast_replica0(group.lockstep, call, values), None
    if group.lockstep.comm.rank:
        values, rows = values[:0], rows[:0]
    call = f"{call} of replica 0"
    got = group.reducer.all_gather(call, (0, 0), (values, rows), ("values", "indices"))
    return got[0], got[1]
