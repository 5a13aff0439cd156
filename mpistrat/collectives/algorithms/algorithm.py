"""The interface of an all-reduce algorithm: stage, handshake, finish."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.plan import ReductionInputs, ReductionPlan
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import put
from mpistrat.collectives.weights import Scales
from mpistrat.lockstep.ending import abort
from mpistrat.lockstep.handshake import digest_call


class AllReduceAlgorithm(abc.ABC):
    """One way for the bytes of a plan, made ready for it.

    Args:
      reducer: The ranks.
      plan: The plan.
      suffix: The end of the text of each call: which arrays are reduced, if that has to agree.

    Attributes:
      name: The name of the algorithm, for benchmarks and tests.
      is_cacheable: The algorithm serves all inputs of its plan; else those that it `matches`.
      text: The text of each call that all ranks have to agree on.
    """

    name = ""
    is_cacheable = True

    def __init__(self, reducer: Reducer, plan: ReductionPlan, suffix: str = ""):
        """Work out what follows from the plan."""
        self.reducer, self.plan = reducer, plan
        self.text = plan.text + suffix + reducer.said
        self._digest = digest_call(self.text)

    @staticmethod
    @abc.abstractmethod
    def applies_to(reducer: Reducer, plan: ReductionPlan) -> bool:
        """Tell whether the algorithm can serve a plan; alike on all ranks."""

    @classmethod
    def try_create(
        cls, reducer: Reducer, plan: ReductionPlan, inputs: ReductionInputs
    ) -> AllReduceAlgorithm | None:
        """Return the algorithm for these inputs, or None if it cannot serve them."""
        return cls(reducer, plan) if cls.applies_to(reducer, plan) else None

    @property
    def is_valid(self) -> bool:
        """Whether the algorithm still serves its plan, whatever memory has come or gone."""
        return True

    def matches(self, inputs: ReductionInputs) -> bool:
        """Tell whether the algorithm serves these inputs."""
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
    """An algorithm in three steps: all that can fail, the handshake, and what moves after it."""

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
        return put(plan.restore_numbers(results), inputs.outs)

    @abc.abstractmethod
    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> Any:
        """Do what can fail, before the handshake, and return what `finish` takes.

        Not collective: nothing is written that other ranks read.
        """

    @abc.abstractmethod
    def finish(self, staged: Any, scales: Scales) -> list[Array]:
        """Move and reduce: MPI and loops only. Collective."""
