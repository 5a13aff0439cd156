"""The interface of an all-reduce algorithm: stage, handshake, finish."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.plan import ReductionInputs, ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import write_outs
from mpistrat.collectives.weights import Scales
from mpistrat.lockstep.ending import abort
from mpistrat.lockstep.handshake import digest_call


class AllReduceAlgorithm(abc.ABC):
    """One way to move the bytes of a plan.

    Args:
      reducer: The ranks.
      plan: The plan.
      suffix: The end of the text of each call; it names the arrays, if these have to agree.

    Attributes:
      name: The name of the algorithm, for benchmarks and tests.
      is_cacheable: Whether the algorithm serves all inputs of its plan; else those that it
        `matches`.
      text: The text of each call that all ranks have to agree on.
    """

    name = ""
    is_cacheable = True

    def __init__(self, reducer: Reducer, plan: ReductionPlan, suffix: str = ""):
        """Compute everything that follows from the plan."""
        self.reducer, self.plan = reducer, plan
        self.text = plan.text + suffix + reducer.options_text
        self._digest = digest_call(self.text)

    @staticmethod
    @abc.abstractmethod
    def applies_to(reducer: Reducer, plan: ReductionPlan) -> bool:
        """Return whether the algorithm can serve a plan; equal on all ranks."""

    @classmethod
    def try_create(
        cls, reducer: Reducer, plan: ReductionPlan, inputs: ReductionInputs
    ) -> AllReduceAlgorithm | None:
        """Return the algorithm for these inputs, or None if it cannot serve them."""
        return cls(reducer, plan) if cls.applies_to(reducer, plan) else None

    @property
    def is_valid(self) -> bool:
        """Whether the algorithm still serves its plan, after memory was shared, moved or freed."""
        return True

    def matches(self, inputs: ReductionInputs) -> bool:
        """Return whether the algorithm serves these inputs."""
        return self.is_valid

    @abc.abstractmethod
    def run(self, inputs: ReductionInputs) -> list[Any]:
        """Reduce the inputs over all ranks, and return the results. Collective."""

    def handshake(self, inputs: ReductionInputs, payload: bytes) -> Scales:
        """Make the handshake of a call, and return the scales of its values. Collective."""
        text, digest = self.text, self._digest
        if inputs.origin:
            text += inputs.origin
            digest = digest_call(text)
        return self.reducer.handshake(self.plan, text, payload, digest=digest, alarm=inputs.alarm)[
            0
        ]


class StagedAlgorithm(AllReduceAlgorithm):
    """An algorithm in three steps: everything that can fail, the handshake, moving the bytes."""

    def run(self, inputs: ReductionInputs) -> list[Any]:
        """Reduce the inputs; see `AllReduceAlgorithm.run`. Collective."""
        reducer, plan = self.reducer, self.plan
        reducer.pool.turn()
        with np.errstate(all="ignore"):
            try:
                values = inputs.values
                if plan.number_flags:
                    values = [v if type(v) is np.ndarray else np.asarray(v) for v in values]
                staged = self.stage(values, inputs.weights, inputs.outs)
            except Exception as error:
                reducer.lockstep.fail_collectively(plan.text, error)
            scales = self.handshake(inputs, plan.pack_weights(inputs.weights))
            try:
                results = self.finish(staged, scales)
            except BaseException as error:
                abort(reducer.lockstep, plan.text, error)
        on_moved = reducer.lockstep.hooks.on_moved
        if on_moved is not None:
            on_moved(results)
        return write_outs(plan.restore_numbers(results), inputs.outs)

    @abc.abstractmethod
    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> Any:
        """Return the inputs of `finish`, after doing everything that can fail.

        Called before the handshake. Not collective: nothing is written that other ranks read.
        """

    @abc.abstractmethod
    def finish(self, staged: Any, scales: Scales) -> list[Array]:
        """Return the results: move and reduce, by MPI and loops only. Collective."""
