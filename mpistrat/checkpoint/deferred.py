"""Values that an empty checkpoint has restored, and that wait for what is attached later."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from mpistrat.board.reporter import say
from mpistrat.checkpoint.options import SavedOptimizer
from mpistrat.checkpoint.restoring import COUNTERS, Restored
from mpistrat.checkpoint.values import NAME, Values
from mpistrat.comm import mpi
from mpistrat.comm.callsite import few
from mpistrat.environment import number_of
from mpistrat.errors import StructureError
from mpistrat.lockstep.ending import code_of
from mpistrat.lockstep.exits import exits
from mpistrat.lockstep.lockstep import Lockstep


def is_below(name: str, key: str) -> bool:
    """Tell whether a name of a file is that of the tree `key`, or of something in it.

    Example:
      >>> is_below("model/w", "model"), is_below("model", "model"), is_below("models/w", "model")
      (True, True, False)
    """
    return f"{name}/".startswith(f"{key}/")


@final
class Deferred:
    """What is left to restore of a file.

    Attributes:
      path: The file.
      status: What `Checkpoint.restore` has returned; what is attached changes it.
    """

    def __init__(self, status: Restored, lockstep: Lockstep):
        """Wait for what is attached, and name at the end of the program what never was.

        Args:
          status: As the attribute.
          lockstep: The ranks; the first of them names it.
        """
        self.path, self.status = Path(status.path or ""), status
        comm = lockstep.session.comm
        # A strategy of one rank alone, outside of all scopes, is there on every rank of a job.
        is_first = comm.name == mpi.MPIComm.name or number_of() in ("", "0")
        self._speaks, self._is_named = comm.rank == 0 and is_first, False
        atexit.register(self._end)

    def has_values_for(self, key: str) -> bool:
        """Tell whether the file has something for the tree `key` that nothing has taken yet."""
        return any(is_below(name, key) for name in self.status.unused)

    def select_waiting(
        self, key: str, entries: Mapping[str, Any], stateful: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what of the tree `key` was not restored yet.

        Args:
          key: The tree.
          entries: All entries of the checkpoint.
          stateful: Its objects with ``restore_state``.
        """

        def waits(name: str) -> bool:
            return is_below(name, key) and name not in self.status.matched

        waiting_entries = {name: entry for name, entry in entries.items() if waits(name)}
        values = entries[NAME].values.values if NAME in entries else {}
        values = {name: value for name, value in values.items() if waits(name)}
        if values:
            waiting_entries[NAME] = Values(values).cell()
        names = [*waiting_entries, *values]
        waiting_stateful = {
            begin: stateful_pair
            for begin, stateful_pair in stateful.items()
            if any(is_below(name, begin) for name in names)
        }
        return waiting_entries, waiting_stateful

    def check_order(self, key: str, optimizers: Sequence[SavedOptimizer]) -> None:
        """Raise StructureError if an optimizer is attached before its variables.

        The file names its slots by the places of the variables, which have none yet.

        Args:
          key: The tree that is attached.
          optimizers: All optimizers of the checkpoint.
        """
        for optimizer in optimizers:
            waiting = [
                name for name in self.status.unused if name.startswith(f"{optimizer.path}/slots/")
            ]
            known_names = {*self.status.unused, *self.status.matched}
            if (
                is_below(optimizer.path, key)
                and waiting
                and not known_names.issuperset(optimizer.slots)
            ):
                raise StructureError(
                    f"{optimizer.text} was attached as {optimizer.path!r} before its variables, "
                    f"and {self.path} has its slots by their places: {', '.join(few(waiting))}. "
                    "Attach the variables first, by the names that they were saved under."
                )

    def note(self, tree_status: Restored) -> None:
        """Note what a tree has taken, and what of it the file does not have."""
        status = self.status
        status.unused = tuple(name for name in status.unused if name not in tree_status.matched)
        status.matched += tree_status.matched
        status.missing += tuple(name for name in tree_status.missing if name not in status.missing)
        if not set(status.unused) - COUNTERS:
            self.close()

    def note_missing(self, key: str) -> None:
        """Note that the file has nothing for a tree, unless that was restored before."""
        status = self.status
        if not any(is_below(name, key) for name in (*status.matched, *status.missing)):
            status.missing += (key,)

    def warn(self) -> None:
        """Warn once, on the rank that speaks, of what was never attached; then it is saved."""
        if text := self._text():
            self._is_named = True
            if self._speaks:
                text += " What is saved now does not have these values."
                warnings.warn(text, stacklevel=4)

    def close(self) -> None:
        """Name nothing any more: another restore has taken the place of this one."""
        self._is_named = True
        atexit.unregister(self._end)

    def _text(self) -> str:
        names = [repr(name) for name in self.status.unused if name not in COUNTERS]
        if not names or self._is_named or self.status.expects_partial:
            return ""
        return (
            f"{self.path} has {', '.join(few(names))}, and nothing was attached by that name to "
            "the Checkpoint that restored it. Attach it after restore, or call expect_partial() of "
            "what restore has returned."
        )

    def _end(self) -> None:
        failure = exits().failure or getattr(sys, "last_value", None)
        is_well = failure is None or code_of(failure) == 0
        if self._speaks and is_well and (text := self._text()):
            say(f"mpistrat: {text}")
