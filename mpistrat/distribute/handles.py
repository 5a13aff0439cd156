"""Handles of all-reduces that were started."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn, final

from mpistrat.collectives.allreduce import start_all_reduce
from mpistrat.collectives.plan import ReductionInputs
from mpistrat.comm.callsite import where
from mpistrat.distribute.reduce import in_replica, prepare_reduction, rows_reduced
from mpistrat.distribute.replica_group import ReplicaGroup
from mpistrat.distribute.views import ALONE
from mpistrat.errors import ContextError
from mpistrat.lockstep.lockstep import Lockstep


@final
class Handle:
    """An all-reduce that was begun by ``all_reduce_start``, and that `wait` ends."""

    def __init__(self, lockstep: Lockstep, call: str, results: Callable[[], Any]):
        """Wait for `results`, which returns them when they are there."""
        self._lockstep, self._call, self._results = lockstep, call, results
        self._place, run = where(), lockstep.state.run
        self.depth, self._is_done, self._is_abandoned = run.depth, False, False
        self._result: Any = None
        if run.depth:
            run.handles.append(self)

    def __del__(self) -> None:
        """Warn where nobody can wait for it any more; of a run, that was an error at its end."""
        if not (self._is_done or self._is_abandoned):
            text = f"{self!r}: wait() was not called."
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a copy could not be waited for.

        Raises:
          TypeError: Always, when it is copied as when it is pickled.
        """
        raise TypeError(f"{self!r} cannot be copied or pickled; wait for it where it was made.")

    def __repr__(self) -> str:
        """Return which call it is, and where it was made."""
        return f"<{self._call:.200} of {self._place}>"

    def wait(self) -> Any:
        """Wait until the results are there, and return them.

        Not collective, but all ranks have to do it before the ``run`` ends in which the call was
        made. Ranks may wait for several handles in different orders; again for one gives the same.

        Returns:
          What ``all_reduce`` returns.

        Raises:
          StrategyError: Called in another thread or process than the call was made in.
          ContextError: The run has ended in which it was made, or a call in it has failed.
          RuntimeError: What has failed meanwhile, between ranks that are threads of one process;
            on MPI it ends the job.

        Cost: what is left of the transfer, and of results that are not in ``Strategy.buffers``
        one copy.
        """
        self._lockstep.check()
        self._lockstep.state.interrupted.check()
        if self._is_abandoned:
            raise ContextError(f"{self!r}: the run in which it was made has ended.")
        if not self._is_done:
            self._result = self._wait_for_results()
            self._is_done = True
            self._forget()
        return self._result

    def _wait_for_results(self) -> Any:
        session = self._lockstep.session
        session.board.enter(session.calls, f"{self._call}.wait")
        session.board.resume()  # it is no handshake
        try:
            return self._results()
        finally:
            session.board.leave()

    def _forget(self) -> None:
        self._results = lambda: None
        handles = self._lockstep.state.run.handles
        if self in handles:
            handles.remove(self)

    def abandon(self) -> None:
        """End it without giving the results away, so that the memory is nobody's any more."""
        self._is_abandoned = True
        try:
            self._wait_for_results()
        finally:
            self._forget()


def all_reduce_start(
    group: ReplicaGroup, reduce_op: Any, value: Any, weight: Any, out: Any
) -> Handle:
    """Begin to reduce `value`; as `ReplicaContext.all_reduce_start`. Collective."""
    lockstep = group.lockstep
    if group.view is ALONE:
        result = in_replica(group, reduce_op, value, weight, out)
        return Handle(lockstep, "all_reduce_start", lambda: result)
    name = "all_reduce_start"
    prepared, start, plan, alarm = prepare_reduction(group, name, reduce_op, value, weight, out)
    if not prepared.leaves:
        return Handle(lockstep, start, lambda: value if out is None else out)
    if prepared.has_rows:
        tree = rows_reduced(group, start, prepared)
        return Handle(lockstep, start, lambda: tree)
    outs = prepared.outs
    values = [contribution.value for contribution in prepared.dense]
    inputs = ReductionInputs(values, (prepared.weight,), outs, alarm=alarm)
    if group.delegate is None:
        moved = start_all_reduce(group.reducer, plan, inputs)
    else:
        totals = group.reduction(plan)(inputs)
        moved = lambda: totals  # noqa: E731
    arena = group.reducer.node.arena
    homes = [home for value in outs or () if (home := arena.home(value)) is not None]
    moving_keys = {home.key for home in homes}
    arena.moving.update(moving_keys)

    def results() -> Any:
        totals = moved()
        arena.moving.difference_update(moving_keys)
        return prepared.tree(totals) if out is None else out

    return Handle(lockstep, plan.text, results)


def end_handles(lockstep: Lockstep, failure: BaseException | None) -> BaseException | None:
    """End what was begun in a run that ends, and return what the run has failed with, if it has.

    A handle that nobody has waited for is such a failure.
    """
    run = lockstep.state.run
    left = [handle for handle in run.handles if handle.depth >= run.depth]  # or one inside of it
    for handle in left:
        try:
            handle.abandon()
        except Exception as error:
            failure = error if failure is None else failure
    if not left or failure is not None or run.failed is not None:
        return failure
    calls = "; ".join(map(repr, left))
    return ContextError(
        f"rank {lockstep.comm.rank}: wait() was not called for {calls}. Call wait() of the "
        "handle of all_reduce_start before the function of run returns."
    )
