"""Variables that the ranks create in different orders, found out by their initial values.

The calls that create two variables of one name and kind are the same whichever comes first; and
since replica 0's values are taken, what one rank calls its first would be another's second. So each
rank shows a digest of its own initial value, which may differ from replica 0's, as random values
do. Where it does, and is replica 0's of another variable for which that rank had another value too,
the two are exchanged.
"""

from __future__ import annotations

import hashlib

from mpistrat.arrays import Array
from mpistrat.collectives.blame import ranks_text
from mpistrat.collectives.lockstep import Judge, Lockstep
from mpistrat.distribute.writes import digest
from mpistrat.errors import LockstepError

__all__ = ["judge_of", "told"]

# What is remembered is forgotten beyond this; a program may create random variables for ever.
_MOST = 100_000


def told(kind: str, value: Array) -> bytes:
    """Return what a rank shows of its own initial value: equal for what could be exchanged."""
    return hashlib.blake2b(kind.encode() + digest(value), digest_size=16).digest()


def judge_of(lockstep: Lockstep, name: str, number: int, mine: bytes) -> Judge:
    """Return what looks at the initial values of all ranks, alike on all of them.

    Args:
      lockstep: Shows them.
      name: What messages call the variable.
      number: Its number.
      mine: What this rank shows.
    """
    # Of each rank that had another value than replica 0: its value, and replica 0's, by variable.
    known, ranks = lockstep.session.strays, lockstep.ranks

    def judge(smalls: list[bytes] | None) -> LockstepError | None:
        smalls = lockstep.texts(mine) if smalls is None else smalls
        first = smalls[0]
        strays = {rank: own for rank, own in zip(ranks, smalls, strict=True) if own != first}
        others = {
            rank: known.get((rank, "replica 0", own)) or known.get((rank, "own", first))
            for rank, own in strays.items()
        }
        found = next(filter(None, others.values()), None)
        if found is not None:
            bad = ranks_text([rank for rank, other in others.items() if other == found])
            return _error(f"{name} no. {found}", f"{name} no. {number}", bad, lockstep)
        if len(known) > _MOST:
            known.clear()
        for rank, own in strays.items():
            known[rank, "own", own] = known[rank, "replica 0", first] = number
        return None

    return judge


def _error(one: str, other: str, ranks: str, lockstep: Lockstep) -> LockstepError:
    me, first = lockstep.ranks[lockstep.comm.rank], lockstep.ranks[0]
    return LockstepError(
        f"variables {one} and {other} are exchanged on {ranks} (this is rank {me} of "
        f"{lockstep.comm.size}): the initial value of one is that of the other on rank {first}, "
        "the first replica, whose values are taken.\n  Create variables in one order on all ranks "
        "(a loop over a set has another one in each process: sort it), or give each a name of its "
        "own: Variable(..., name=...)."
    )
