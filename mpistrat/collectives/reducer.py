"""What all-reduces of a strategy use: its handshake, the memory of its node, its options."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.communication import WIRES
from mpistrat.collectives.gatherer import all_gather
from mpistrat.collectives.node import NodeReducer
from mpistrat.collectives.plan import Contribution, ReductionPlan, first_nonfinite
from mpistrat.collectives.weights import Scales, scales_of
from mpistrat.lockstep.lockstep import Lockstep
from mpistrat.sharedmem.pool import Pool


@final
class Reducer:
    """Makes the values of all ranks one; `mpistrat.collectives.allreduce` does it.

    Args:
      lockstep: Proves each call, and carries what is small.
      wire: What float32 travels as between nodes; see `CommunicationOptions`.
      seconds: How long a call may take, if not as long as any; then the watchdog ends the job.
      caller_text: The class of the program that reduces, in texts of calls; empty without one.

    Attributes:
      node: The shared memory of the ranks.
      said: What texts of calls say of all this.
      pool: The memory of large results.
      weights: What each rank (rows) has given with each leaf to the last MEAN, or with all of them.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        wire: str = WIRES[0],
        seconds: float | None = None,
        caller_text: str = "",
    ):
        """Reduce over the ranks of `lockstep`."""
        self.lockstep, self.comm, self.node = lockstep, lockstep.comm, NodeReducer(lockstep, wire)
        self.seconds = seconds
        time_limit_text = "" if seconds is None else f" within {seconds:g} s"
        wire_text = "" if wire == WIRES[0] else f", {wire} between nodes"
        self._gathers = time_limit_text + caller_text
        self.said = time_limit_text + caller_text + wire_text
        self.weights = np.empty((lockstep.comm.size, 0))
        self.pool = lockstep.session.kept(Pool)

    @property
    def watches(self) -> bool:
        """Whether any rank may have an alarm to tell of its numbers."""
        return self.lockstep.options.nan != "off"

    def timed(self) -> Any:
        """Return a context in which calls may take as long as was chosen."""
        return (
            nullcontext() if self.seconds is None else self.lockstep.limiting_seconds(self.seconds)
        )

    def handshake(
        self,
        plan: ReductionPlan,
        text: str,
        payload: bytes,
        *,
        digest: bytes | None = None,
        alarm: str = "",
    ) -> tuple[Scales, Array]:
        """Make the handshake of a call; return the scales of values, and every rank's payload.

        Collective.

        Args:
          plan: The plan.
          text: The text of the call; equal on all ranks.
          payload: The weights, and what the algorithm adds to them; as long on all ranks.
          digest: `digest_of` the text, if it is known.
          alarm: The description of values that are not finite, if any is.
        """
        rows = self.lockstep.gather_rows(text, payload, digest, alarm)
        if plan.has_equal_weights:
            return (Scales(None, (float(self.comm.size),)) if plan.is_mean else Scales()), rows
        self.weights = rows[:, : 8 * plan.weight_count].copy().view(np.float64)
        return scales_of(self.weights, plan.is_weighting), rows

    def all_gather(
        self, call: str, axis: Sequence[int], leaves: Sequence[Array], paths: Sequence[str]
    ) -> list[Array]:
        """Concatenate every leaf over all ranks; see `gatherer.all_gather`. Collective."""
        with self.timed():
            text = f"{call}{self._gathers}"
            return all_gather(self.lockstep, text, axis, leaves, paths)

    def alarm(self, call: str, contributions: Sequence[Contribution]) -> str:
        """Return the description of this rank's numbers that are not finite, if asked for."""
        return (
            first_nonfinite(call, self.lockstep.state.steps, contributions) if self.watches else ""
        )
