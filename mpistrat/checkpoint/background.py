"""Saves while the program continues: a thread writes the copies that were made for it.

The thread never communicates. The next call of the manager agrees on its outcome on all ranks,
first on all ranks but replica 0, so that replica 0 does not wait for a report that cannot come.
The interpreter waits for the thread at exit.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import final

import numpy as np

from mpistrat.arrays import Array
from mpistrat.checkpoint.files import announcing_operation
from mpistrat.lockstep.handshake import Lockstep
from mpistrat.watchdog.status_board import say


@final
class BackgroundSaver:
    """At most one save that is being written.

    Attributes:
      is_pending: One has been begun, and `finish_pending_save` has not been called since; equal on
        all ranks.
      cancellation: Another rank has failed to write its part, so there is nothing to wait for.
    """

    def __init__(self) -> None:
        """Create one that has nothing to write."""
        self.is_pending, self.cancellation = False, threading.Event()
        self._memory = np.empty(0, np.uint8)
        self._thread: threading.Thread | None = None
        self._saved_paths: list[str] = []
        self._failure: BaseException | None = None

    def reserve_memory(self, nbytes: int) -> Array:
        """Return memory for a copy; the same again for the next save, so that it is at hand."""
        if self._memory.size < nbytes:
            self._memory = np.empty(0, np.uint8)  # given back before more is taken
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]

    def start(self, save_function: Callable[[], list[str]] | None) -> None:
        """Begin a save.

        Args:
          save_function: The work of this rank, for a thread; None for nothing. On replica 0 it
            returns the paths of all checkpoints.
        """
        self.is_pending, self._saved_paths, self._failure = True, [], None
        self.cancellation.clear()
        if save_function is not None:
            # Not a daemon: the interpreter waits for it before it ends.
            self._thread = threading.Thread(
                target=self._run_save, args=(save_function,), name="mpistrat save", daemon=False
            )
            try:
                self._thread.start()
            except RuntimeError:  # no thread can be started: the program waits for the save
                self._thread = None
                self._run_save(save_function)

    def _run_save(self, save_function: Callable[[], list[str]]) -> None:
        try:
            self._saved_paths = save_function()
        except BaseException as error:
            self._failure = error
            # At once, because there may be no further call that could raise it.
            say(f"mpistrat: saving in the background: {error}")

    def finish_pending_save(self, lockstep: Lockstep, call: str) -> list[str]:
        """Wait for the pending save, and agree on its outcome on all ranks. Collective.

        Args:
          lockstep: The lockstep of all ranks.
          call: The call that waits.

        Returns:
          The paths of all checkpoints that are there, the oldest first.

        Raises:
          OSError: It has failed, on some rank; raised on all.
        """
        call_text = f"{call}, the save before it"
        with announcing_operation(lockstep, call_text, self._memory.nbytes):
            if lockstep.comm.rank:
                self._join_thread()
            # Replica 0 waits for the reports that the others leave beside the data.
            outcomes = lockstep.gather_payloads(
                f"{call_text}, parts", b"failed" if self._failure else b""
            )
            if any(outcomes[1:]):
                self.cancellation.set()
            self._join_thread()
        self.is_pending = False
        encoded_paths = json.dumps(self._saved_paths).encode()
        failure, self._failure = self._failure, None
        paths: list[str] = json.loads(
            lockstep.gather_payloads(call_text, encoded_paths, failure)[0]
        )
        return paths

    def _join_thread(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._thread = None
