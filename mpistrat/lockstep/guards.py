"""Numbers that must not spread, copies that must not drift, and warnings of all ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, final
from weakref import WeakValueDictionary

from mpistrat.arrays import digest
from mpistrat.comm import callsite
from mpistrat.errors import DivergenceError
from mpistrat.lockstep.handshake import Lockstep

_SAME_BATCHES = (
    "run: all {count} replicas were given the same batch, of a Dataset that is not distributed: "
    "each does all of the work, and a sum over the replicas counts every row {count} times. Loop "
    "over strategy.experimental_distribute_dataset(dataset), which gives each replica its rows."
)


@final
class VariableRegistry:
    """The variables of one session.

    Attributes:
      created: How many there have been; equal on all ranks.
      warned: Unequal initial values were warned of; equal on all ranks.
      copies: The mirrored ones by number, as long as they live.
      holders: All of them by the identity of their array, as long as they live.
    """

    def __init__(self) -> None:
        """Create an empty registry."""
        self.created = 0
        self.warned = False
        self.copies: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.holders: WeakValueDictionary[int, Any] = WeakValueDictionary()


def compare_copies(lockstep: Lockstep) -> None:
    """Compare the copies of one mirrored variable, another one at each call.

    Collective. Cost: one handshake, and a checksum of the variable.

    Raises:
      DivergenceError: They differ; on every rank, naming the ranks in the minority.
    """
    registry, steps = lockstep.session.get_instance(VariableRegistry), lockstep.state.steps
    if not registry.created:
        return
    turn = steps // max(1, lockstep.options.check_every)
    number = turn % registry.created + 1
    # Garbage is collected at different times on different ranks, so a copy may be missing on some.
    variable = registry.copies.get(number)
    own_digest = b"" if variable is None else digest([variable.component()])
    rows = lockstep.gather_payloads(f"compare copies of variable no. {number}", own_digest)
    votes = Counter(row for row in rows if row)
    if len(votes) < 2:
        return
    (common_digest, count), (_, second) = votes.most_common(2)
    ranks = lockstep.ranks
    pairs = zip(ranks, rows, strict=True)
    differing_ranks = [
        rank for rank, row in pairs if row and (row != common_digest or count == second)
    ]
    name = f"variable no. {number}" if variable is None else f"variable {variable.spec()}"
    lockstep.fail(
        DivergenceError(
            f"the copies of {name} are no longer equal at step {steps}: "
            f"{callsite.ranks_text(differing_ranks)} "
            f"differ{('s' if len(differing_ranks) == 1 else '')} "
            f"({lockstep.here}).\n  A copy was written other than by its methods, or the "
            "memory is faulty. Restart from a checkpoint."
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

    Collective. Cost: one handshake.

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
    lockstep.handshake(f"{call}, which warned")


def warn_initial_values(
    lockstep: Lockstep, registry: VariableRegistry, spec: str, digests: list[bytes]
) -> None:
    """Warn once that the initial values of a variable differ between ranks.

    Collective. Cost: a gather of one line per rank, and a handshake.

    Args:
      lockstep: The ranks.
      registry: Where the variable is.
      spec: Number, name and shape of the variable.
      digests: Of the initial value of each rank.
    """
    registry.warned = True
    texts = lockstep.texts(callsite.find_call_site().encode())
    places = callsite.group_by_key([text.decode() for text in texts], lockstep.ranks)
    lines = [f"{place} on {callsite.ranks_text(ranks)}" for place, ranks in places.items()]
    created = ", ".join(callsite.shorten(lines))
    pairs = zip(lockstep.ranks, digests, strict=True)
    other_ranks = callsite.ranks_text([rank for rank, bits in pairs if bits != digests[0]])
    text = (
        f"the initial value of variable {spec}, created in {created}, is another on "
        f"{other_ranks} than on rank {lockstep.ranks[0]}, the first replica, whose "
        "value all ranks take. It has no name, so variables may have been created in another "
        "order there. Create them in one order on all ranks (a loop over a set has another "
        "one in each process: sort it), or give each a name of its own: Variable(..., name=...). "
        "Values that differ on purpose, such as random ones, need names too. This is said once."
    )
    warn(lockstep, "Variable", text, stacklevel=5)


def compare_batches(lockstep: Lockstep, stacklevel: int) -> None:
    """Warn if all ranks were given the same batch of a dataset that is not distributed, once.

    Collective. Cost: one handshake, and another one to warn.

    Args:
      lockstep: Its run has the digest of this rank's batch.
      stacklevel: As that of ``warnings.warn``, counted from here.
    """
    state = lockstep.state
    state.asked, state.batches_compared = False, True
    call = "compare batches of a dataset that is not distributed"
    digests = set(lockstep.gather_payloads(call, state.run.batch_digest))
    if len(digests) == 1 and b"" not in digests:
        text = _SAME_BATCHES.format(count=lockstep.comm.size)
        warn(lockstep, "run", text, stacklevel=stacklevel)


def warn_unweighted(lockstep: Lockstep, call: str, stacklevel: int) -> None:
    """Warn once of a mean without a weight, of a batch of which replicas have unequal parts.

    Not collective: replica 0 warns. Where warnings are errors, the caller tells the other ranks.

    Args:
      lockstep: Its run has such a batch.
      call: Which call takes the mean.
      stacklevel: As that of ``warnings.warn``, counted from here.
    """
    state = lockstep.state
    was_warned, state.unweighted = state.unweighted, True
    if lockstep.comm.rank == 0 and not was_warned:
        text = (
            f"{call}: a mean without a weight, of a batch of which the replicas have different "
            "numbers of rows: each replica counts alike, so rows of a replica that has fewer count "
            "more. Give the number of its rows, weight=len(x); or weight=1 if that is meant."
        )
        warnings.warn(text, stacklevel=stacklevel)
