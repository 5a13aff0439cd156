"""Numbers that must not spread, copies that must not drift, and warnings of all ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence

import numpy as np

from mpistrat.arrays import digest, label, spec_text
from mpistrat.collectives import blame
from mpistrat.collectives.lockstep import Lockstep
from mpistrat.collectives.part import Part
from mpistrat.errors import DivergenceError

__all__ = ["compare_copies", "first_nonfinite", "warn"]


def first_nonfinite(call: str, step: int, parts: Sequence[Part]) -> str:
    """Return where the first NaN or infinity of this rank is, or an empty text.

    A value of weight 0 is never read.

    Cost: one pass over the values, about that of a sum; only with ``MPISTRAT_NAN``.
    """
    for part in parts:
        if part.weight == 0 or part.value.dtype.kind not in "fcV":
            continue
        good = np.isfinite(part.value)
        if not good.all():
            index = tuple(int(i) for i in np.unravel_index(int(np.argmin(good)), good.shape))
            return (
                f"{label(part.path)}, {spec_text(part.value)}, is {part.value[index]} at index "
                f"{index} (the first of {good.size - int(good.sum())}), in step {step}, "
                f"{blame.where()} {call}"
            )
    return ""


def compare_copies(lockstep: Lockstep) -> None:
    """Compare the copies of one mirrored variable, another one at each call.

    Collective. Cost: one proof, and a checksum of the variable.

    Raises:
      DivergenceError: They differ; on every rank, naming the ranks in the minority.
    """
    session = lockstep.session
    if not session.variables:
        return
    turn = session.steps // max(1, lockstep.options.check_every)
    number = turn % session.variables + 1
    # Garbage is collected at different times on different ranks, so a copy may be missing on some.
    variable = session.copies.get(number)
    mine = b"" if variable is None else digest([variable.component()])
    rows = lockstep.share(f"compare copies of variable no. {number}", mine)
    votes = Counter(row for row in rows if row)
    if len(votes) < 2:
        return
    (most, count), (_, second) = votes.most_common(2)
    ranks = lockstep.ranks
    pairs = zip(ranks, rows, strict=True)
    odd = [rank for rank, row in pairs if row and (row != most or count == second)]
    name = f"variable no. {number}" if variable is None else f"variable {variable.spec()}"
    lockstep.fail(
        DivergenceError(
            f"the copies of {name} are no longer equal at step {session.steps}: "
            f"{blame.ranks_text(odd)} differ{'s' if len(odd) == 1 else ''} "
            f"(this is rank {ranks[lockstep.comm.rank]} of {len(ranks)}).\n  Something wrote to a "
            "copy behind the library's back, or memory is at fault. Restart from a checkpoint."
        )
    )


def warn(
    lockstep: Lockstep,
    call: str,
    text: str,
    category: type[Warning] = UserWarning,
    stacklevel: int = 2,
) -> None:
    """Warn once for all ranks, of what all of them know.

    Collective. Cost: one proof.

    Args:
      lockstep: Proves it.
      call: Which call warns; equal on all ranks.
      text: The warning.
      category: Its class. Where warnings are errors, it is one on every rank.
      stacklevel: As that of ``warnings.warn``, counted from here.
    """
    with lockstep.preparing(call):
        if lockstep.comm.rank == 0:
            warnings.warn(text, category, stacklevel=stacklevel)
    lockstep.prove(f"{call}, which warned")
