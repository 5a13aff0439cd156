"""Variables that the ranks create in different orders, found out by their initial values.

The calls that create two variables of one name and kind are the same whichever comes first; and
since replica 0's values are taken, what one rank calls its first would be another's second. So each
rank shows a digest of its own initial value, which may differ from replica 0's, as random values
do. Variables whose values on a rank are those of replica 0 in another order have been exchanged,
unless so few values are likely that it may be chance.
"""

from __future__ import annotations

import math

import numpy as np

from mpistrat.arrays import Array
from mpistrat.comm.callsite import ranks_text
from mpistrat.errors import LockstepError
from mpistrat.lockstep.guards import VariableRegistry
from mpistrat.lockstep.lockstep import Lockstep

# Of so many variables the initial values are looked at; programs may create more forever.
LOOKED_AT = 10_000
_FIRST = 64  # elements that tell how likely a value is
_BITS = 24  # of a value that two ranks do not have by chance
_AGAIN = b""  # in place of a value: some have appeared twice
_CHANCE, _DOUBT, _CERTAIN = b"chance", b"doubt", b"certain"


def find_exchange(
    lockstep: Lockstep, call: str, name: str, value: Array, digests: list[bytes]
) -> LockstepError | None:
    """Return the error of variables that ranks have exchanged, if any; the same on all ranks.

    Collective.

    Args:
      lockstep: Shows them.
      call: What is equal for variables that may be exchanged: their name and kind.
      name: What messages call the variable, without its number.
      value: This rank's own initial value.
      digests: The digests of the initial values of all ranks.
    """
    ranks, registry = lockstep.ranks, lockstep.session.kept(VariableRegistry)
    number = registry.created + 1

    first = digests[0]
    exchanged: dict[int, tuple[int, bool]] = {}
    for i, own in enumerate(digests):
        if own != first:
            known = registry.differing.setdefault((ranks[i], call), {})
            closed = _closed(known, own, first, number)
            if closed is not None:
                exchanged[i] = closed
    if not exchanged:
        return None
    likelihoods = lockstep.texts(_likely(value))
    for i, (other, alone) in exchanged.items():
        likely = {likelihoods[i], likelihoods[0]}
        if _CERTAIN in likely or (alone and _DOUBT in likely):
            bad = ranks_text([ranks[j] for j, each in exchanged.items() if each[0] == other])
            return _error(f"{name} no. {other} and {name} no. {number}", bad, lockstep)
    return None


def _closed(
    known: dict[bytes, tuple[bytes, int]], own: bytes, first: bytes, number: int
) -> tuple[int, bool] | None:
    """Return what a variable closes on one rank: there own values are replica 0's in another order.

    Args:
      known: Of the variables before, which are not closed: by replica 0's value the rank's own, and
        the number.
      own: The rank's own value of this one.
      first: Replica 0's.
      number: This one's.

    Returns:
      The number of another variable of them, and whether no value has appeared twice but in these;
      None if nothing is closed.
    """
    if first in known:
        known[_AGAIN] = b"", 0
    known[first] = own, number
    numbers: dict[bytes, int] = {}
    key = own
    while key in known and key not in numbers:
        numbers[key] = known[key][1]
        key = known[key][0]
    if key != own or first not in numbers:
        return None
    for one in numbers:
        del known[one]
    values = [*numbers, *known, *(theirs for theirs, _ in known.values())]
    alone = _AGAIN not in known and len(set(values)) == len(values)
    known[_AGAIN] = b"", 0
    return next(iter(numbers.values())), alone


def _likely(value: Array) -> bytes:
    """Tell whether two ranks may have the same value by chance, as far as its first elements say.

    Whole numbers are taken for draws from as many as the largest. One floating point number may be
    a draw from a few too, so it says something only where no other has appeared twice.
    """
    head = value.reshape(-1)[:_FIRST]
    constant = bool(head.size and (head == head[0]).all())
    head = head[:1] if constant else head
    with np.errstate(all="ignore"):
        wide = head.astype(np.complex128 if head.dtype.kind == "c" else np.float64)
        parts = wide.view(np.float64)
        whole = bool((parts == np.floor(parts)).all()) and bool(np.isfinite(parts).all())
        largest = float(np.abs(parts).max(initial=0.0))
    bits = head.size * (math.log2(largest + 1) if whole else 16.0)
    if bits >= _BITS:
        return _CERTAIN
    coin = whole and largest <= 1
    drawn = coin or head.dtype.kind in "biu"
    return _CHANCE if drawn and not (constant and value.size > 1) else _DOUBT


def _error(variables: str, ranks: str, lockstep: Lockstep) -> LockstepError:
    first = lockstep.ranks[0]
    return LockstepError(
        f"{variables} seem to be created in another order on {ranks} ({lockstep.here}): "
        f"their initial values are those of rank {first}, the first "
        "replica, whose values all ranks take, but swapped.\n  Create variables in one order on "
        "all ranks (a loop over a set has another one in each process: sort it), or give each a "
        "name of its own: Variable(..., name=...). If the values are random, name the variables."
    )
