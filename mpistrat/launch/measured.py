"""Measurements of a job, in a file: its ranks, nodes, seconds and steps.

``MPISTRAT_MEASURE`` names the file; rank 0 writes it at its end. The format is JSON::

    {"ranks": 4, "nodes": 2, "cores": 4, "seconds": 12.3, "steps": 500, "steps_per_second": 61.0}

"cores" are those that the ranks may run on; "seconds" go from the start of MPI to the end; "steps"
are the functions given to ``run``. Their rate leaves out what is before the second one, as the
first waits for what is loaded or compiled on first use; it is null where there were fewer than 3.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import socket
import time
from pathlib import Path
from typing import final

from mpistrat.environment import mask_of
from mpistrat.lockstep.lockstep import Lockstep


@final
class Measured:
    """Counts the steps of this job. Collective to create, on all ranks.

    Args:
      lockstep: Of all ranks of the job.
      path: The file.

    Cost: an exchange of some bytes of each rank; then 0.1 us a step.
    """

    def __init__(self, lockstep: Lockstep, path: str):
        """Gather where the ranks are, and begin to count."""
        self._path, self._start, self._steps = Path(path), time.perf_counter(), 0
        self._second = self._last = self._start
        local_place = json.dumps([socket.gethostname(), mask_of()]).encode()
        rows = [json.loads(row) for row in lockstep.gather_payloads("measure", local_place)]
        masks: dict[str, int] = {}
        for host, mask in rows:
            masks[host] = masks.get(host, 0) | mask
        cores = sum(bin(mask).count("1") for mask in masks.values())
        self._where = {"ranks": len(rows), "nodes": len(masks), "cores": cores}
        if lockstep.comm.rank:
            return
        atexit.register(self.write)
        if lockstep.hooks.on_fn is None:  # else a fault is injected there
            lockstep.hooks.on_fn = self._step

    def _step(self) -> None:
        self._last = time.perf_counter()
        self._steps += 1
        if self._steps == 2:
            self._second = self._last

    def write(self) -> None:
        """Write the file; nothing happens if it cannot be written."""
        end_time, rate = time.perf_counter(), None
        if self._steps > 2:
            rate = (self._steps - 2) / (self._last - self._second)
        measurements = {
            "seconds": end_time - self._start,
            "steps": self._steps,
            "steps_per_second": rate,
        }
        with contextlib.suppress(OSError):
            self._path.write_text(json.dumps(self._where | measurements) + "\n", encoding="ascii")
