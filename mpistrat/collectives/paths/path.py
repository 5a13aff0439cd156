"""The interface of an all-reduce algorithm: stage, handshake, finish."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.call import ONES, Call
from mpistrat.collectives.reducer import Reducer
from mpistrat.collectives.results import put
from mpistrat.collectives.weights import Scales
from mpistrat.lockstep.abort import abort


class Path(abc.ABC):
    """One way for the bytes of a call, made ready for it.

    Args:
      reducer: The ranks.
      call: The call.

    Attributes:
      suffix: What the text of the call says of the way.
      stays: It follows from the call, and not from which arrays are given.
    """

    suffix = ""
    stays = True

    def __init__(self, reducer: Reducer, call: Call):
        """Find out what follows from the call."""
        self.reducer, self.call = reducer, call

    @staticmethod
    @abc.abstractmethod
    def fits(reducer: Reducer, call: Call) -> bool:
        """Tell whether a call may go this way; alike on all ranks."""

    @classmethod
    def offer(
        cls, reducer: Reducer, call: Call, values: Sequence[Any], outs: Sequence[Array] | None
    ) -> Path | None:
        """Return this way for a call with these values and outs, if it may go it."""
        return cls(reducer, call) if cls.fits(reducer, call) else None

    @property
    def holds(self) -> bool:
        """Whether the same call goes this way once more, whatever was made or lost meanwhile."""
        return True

    @abc.abstractmethod
    def run(
        self,
        values: Sequence[Any],
        weights: Sequence[float] = ONES,
        outs: Sequence[Array] | None = None,
    ) -> list[Any]:
        """Reduce these values, and return the results. Collective.

        Args:
          values: The leaves: arrays in native byte order, or numbers.
          weights: How many examples each stands for, or one number for all.
          outs: Where the results go.
        """


class StagedPath(Path):
    """A way in three steps: all that can fail, the handshake, and what moves after it."""

    def run(
        self,
        values: Sequence[Any],
        weights: Sequence[float] = ONES,
        outs: Sequence[Array] | None = None,
    ) -> list[Any]:
        """Reduce these values; see `Path.run`. Collective."""
        reducer, call = self.reducer, self.call
        reducer.pool.turn()
        with np.errstate(all="ignore"):
            try:
                if call.numbers:
                    values = [v if type(v) is np.ndarray else np.asarray(v) for v in values]
                staged = self.stage(values, weights, outs)
            except Exception as error:
                reducer.lockstep.refuse(call.text, error)
            scales, _ = reducer.handshake(call, self.suffix, call.header(weights))
            try:
                results = self.finish(staged, scales)
            except BaseException as error:
                abort(reducer.lockstep, call.text, error)
        moved = reducer.lockstep.hooks.on_moved
        if moved is not None:
            moved(results)
        return put(call.as_given(results), outs)

    @abc.abstractmethod
    def stage(
        self, values: Sequence[Array], weights: Sequence[float], outs: Sequence[Array] | None
    ) -> Any:
        """Do what can fail, before the handshake, and return what `finish` takes.

        Not collective: it writes to nothing that other ranks read.
        """

    @abc.abstractmethod
    def finish(self, staged: Any, scales: Scales) -> list[Array]:
        """Move and reduce: MPI and loops only. Collective."""
