"""Copies that must not drift, batches that must differ, and warnings for all ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, final
from weakref import ReferenceType, WeakValueDictionary

from mpistrat.arrays import DIGEST_NBYTES, digest
from mpistrat.comm import callsite
from mpistrat.errors import DivergenceError, StructureError
from mpistrat.lockstep.handshake import Lockstep

_SAME_BATCHES = (
    "run: all {count} replicas were given {subject}, of a Dataset that is not distributed: each "
    "does all of the work, and a sum over the replicas counts every row {count} times. Loop over "
    "strategy.experimental_distribute_dataset(dataset), which gives each replica its rows."
)


@final
class VariableRegistry:
    """The variables of one session.

    Attributes:
      created_count: How many were created; equal on all ranks.
      has_warned: There was a warning of unequal initial values; equal on all ranks.
      warned_names: Names of values in checkpoints of which there was a warning that they differ;
        equal on all ranks.
      creations: For lines of replica code that have created variables in runs one after the other:
        the number of the last run, and a weak reference to the first variable.
      variables_by_number: The mirrored variables by number, as long as they live.
      variables_by_array_id: All variables by the identity of their array, as long as they live.
    """

    def __init__(self) -> None:
        """Create an empty registry."""
        self.created_count = 0
        self.has_warned = False
        self.warned_names: set[str] = set()
        self.creations: dict[str, tuple[int, ReferenceType[Any]]] = {}
        self.variables_by_number: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.variables_by_array_id: WeakValueDictionary[int, Any] = WeakValueDictionary()


def compare_copies(lockstep: Lockstep) -> None:
    """Compare the copies of one mirrored variable, another one at each call.

    Collective. Cost: one handshake, and a checksum of the variable.

    Raises:
      DivergenceError: They differ; on every rank, naming the ranks in the minority.
    """
    registry, step_count = (
        lockstep.session.get_instance(VariableRegistry),
        lockstep.state.step_count,
    )
    if not registry.created_count:
        return
    check_index = step_count // max(1, lockstep.options.check_every)
    number = check_index % registry.created_count + 1
    # Garbage is collected at different times on different ranks, so a copy may be missing on some.
    variable = registry.variables_by_number.get(number)
    own_digest = b"" if variable is None else digest([variable._component()])
    digests = lockstep.gather_payloads(f"compare copies of variable no. {number}", own_digest)
    votes = Counter(filter(None, digests))
    if len(votes) < 2:
        return
    (common_digest, count), (_, second_count) = votes.most_common(2)
    ranks = lockstep.ranks
    differing_ranks = [
        rank
        for rank, rank_digest in zip(ranks, digests, strict=True)
        if rank_digest and (rank_digest != common_digest or count == second_count)
    ]
    name = f"variable no. {number}" if variable is None else f"variable {variable._spec()}"
    lockstep.raise_on_all_ranks(
        DivergenceError(
            f"the copies of {name} are no longer equal at step {step_count}: "
            f"{callsite.ranks_text(differing_ranks)} "
            f"differ{('s' if len(differing_ranks) == 1 else '')} "
            f"({lockstep.rank_text}).\n  A copy was written other than by its methods, or the "
            "memory is faulty. Restart from a checkpoint."
        )
    )


def warn(
    lockstep: Lockstep,
    call: str,
    text: str,
    category: type[Warning] = UserWarning,
) -> None:
    """Warn once for all ranks, of a fact that all of them know, in the line of the program.

    Collective. Cost: one handshake.

    Args:
      lockstep: Makes the handshake.
      call: The call that warns; equal on all ranks.
      text: The warning.
      category: Its class. Where warnings are errors, it is one on every rank.
    """
    with lockstep.validating_collectively(call):
        if lockstep.comm.rank == 0:
            warnings.warn(text, category, stacklevel=callsite.get_program_stacklevel())
    lockstep.handshake(f"{call}, which warned")


def warn_on_replica0(lockstep: Lockstep, name: str, text: str) -> None:
    """Warn once, at the line of the program, of a fact that all ranks know.

    Not collective: replica 0 warns. Where warnings are errors, the caller raises on the others.

    Args:
      lockstep: The ranks.
      name: The name of the warning; equal on all ranks.
      text: The warning.
    """
    past_warnings = lockstep.state.past_warnings
    is_new = name not in past_warnings
    past_warnings.add(name)
    if is_new and lockstep.comm.rank == 0:
        warnings.warn(text, stacklevel=callsite.get_program_stacklevel())


def warn_initial_values(
    lockstep: Lockstep, registry: VariableRegistry, spec: str, digests: list[bytes]
) -> None:
    """Warn once that the initial values of a variable differ between ranks.

    Collective. Cost: a gather of one line per rank, and a handshake.

    Args:
      lockstep: The ranks.
      registry: The registry of the variable.
      spec: Number, name and shape of the variable.
      digests: The digests of the initial values of all ranks.
    """
    registry.has_warned = True
    texts = lockstep.gather_texts(callsite.find_call_site().encode())
    ranks_by_position = callsite.group_by_key([text.decode() for text in texts], lockstep.ranks)
    lines = [
        f"{position} on {callsite.ranks_text(ranks)}"
        for position, ranks in ranks_by_position.items()
    ]
    creation_text = ", ".join(callsite.shorten(lines))
    pairs = zip(lockstep.ranks, digests, strict=True)
    other_ranks = callsite.ranks_text(
        [rank for rank, rank_digest in pairs if rank_digest != digests[0]]
    )
    text = (
        f"the initial value of variable {spec}, created in {creation_text}, is another on "
        f"{other_ranks} than on rank {lockstep.ranks[0]}, the first replica, whose "
        "value all ranks take. It has no name, so variables may have been created in another "
        "order there. Create them in one order on all ranks (a loop over a set has another "
        "one in each process: sort it), or give each a name of its own: Variable(..., name=...). "
        "Values that differ on purpose, such as random ones, need names too. This is said once."
    )
    warn(lockstep, "Variable", text)


def warn_repeated_creation(lockstep: Lockstep, variable: Any) -> None:
    """Warn once of a line of replica code that creates a variable in each run, to drop it then.

    Not collective; see `warn_on_replica0`.

    Args:
      lockstep: The ranks.
      variable: The new variable.
    """
    registry = lockstep.session.get_instance(VariableRegistry)
    position, step_count = callsite.find_call_site(), lockstep.state.step_count
    last_step, reference = registry.creations.get(position, (None, None))
    if reference is None or last_step not in (step_count, step_count - 1):
        reference = ReferenceType(variable)
    is_repeated = last_step == step_count - 1 and reference() is None
    registry.creations[position] = step_count, reference
    if is_repeated:
        text = (
            f"{position} creates variable {variable.name!r} anew in each run of replica code, and "
            "the first one is gone. If it is to keep what a step has learned, create it once, "
            "before the loop and in strategy.scope(), and use it in the function of run."
        )
        warn_on_replica0(lockstep, "repeated creation", text)


def compare_batches(lockstep: Lockstep) -> None:
    """Warn if all ranks were given the same batch of a dataset that is not distributed, once.

    Collective. Cost: one handshake, and another one to warn.

    Args:
      lockstep: Its run has the digest of this rank's batch.
    """
    state = lockstep.state
    state.needs_comparison, state.has_compared_batches = False, True
    call = "compare batches of a dataset that is not distributed"
    digests = lockstep.gather_payloads(call, state.run.batch_digest)
    batch_digests = {rank_digest[:DIGEST_NBYTES] for rank_digest in digests}
    source_digests = {rank_digest[DIGEST_NBYTES:] for rank_digest in digests}
    is_same_batch = len(batch_digests) == 1 and b"" not in batch_digests
    if is_same_batch or (len(source_digests) == 1 and b"" not in source_digests):
        subject = "the same batch" if is_same_batch else "batches of the same rows, in other orders"
        text = _SAME_BATCHES.format(count=lockstep.comm.size, subject=subject)
        warn(lockstep, "run", text)


def check_weight(lockstep: Lockstep, call: str, weight: float | None) -> None:
    """Check the weight of a mean over a batch of which replicas have unequal parts.

    Not collective; see `warn_unweighted`.

    Args:
      lockstep: Its run has such a batch.
      call: The call that takes the mean.
      weight: The weight of this replica.

    Raises:
      StructureError: It is above 1, and the part has no rows. A weight of 1 counts each replica
        alike.
    """
    if weight is None:
        warn_unweighted(lockstep, call)
    elif lockstep.state.run.uneven_row_count == 0 and weight > 1:
        raise StructureError(
            f"{call}: weight is {weight} on this replica, whose part of the batch has no rows. "
            "Give the number of its rows, weight=len(x); len(batch) counts the arrays of a batch "
            "(x, y), not its rows."
        )


def warn_unweighted(lockstep: Lockstep, call: str) -> None:
    """Warn once of a mean without a weight, over a batch of which replicas have unequal parts.

    Not collective; see `warn_on_replica0`.

    Args:
      lockstep: Its run has such a batch.
      call: The call that takes the mean.
    """
    text = (
        f"{call}: a mean without a weight, of a batch of which the replicas have different numbers "
        "of rows: each replica counts alike, so rows of a replica that has fewer count more. Give "
        "the number of its rows, weight=len(x); or weight=1 if that is meant."
    )
    warn_on_replica0(lockstep, "unweighted mean", text)
