"""Do all ranks run the same thing? Asked once, when a session begins."""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
from importlib import metadata
from typing import NoReturn

from mpistrat.collectives.blame import ranks_text
from mpistrat.collectives.lockstep import Lockstep
from mpistrat.errors import PreflightError
from mpistrat.options import PREFIX, Options

__all__ = ["facts", "preflight"]

_PACKAGES = ("mpistrat", "numpy", "numba", "mpi4py", "optree")
# What may differ between ranks: where rank 0 writes to, and whether anybody looks.
_PERSONAL = frozenset({"record", "terminal"})


@functools.cache
def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def facts(chosen: Options) -> dict[str, str]:
    """Return what has to be equal on all ranks: versions, and options that change results.

    Cost: some milliseconds, the first time.
    """
    return _versions() | {
        f"{PREFIX}{name.upper()}": str(value)
        for name, value in dataclasses.asdict(chosen).items()
        if name not in _PERSONAL
    }


def preflight(lockstep: Lockstep) -> None:
    """Compare the facts of all ranks.

    Collective. Cost: one proof, unless they differ.

    Raises:
      PreflightError: They differ; on every rank, with a table.
    """
    mine = json.dumps(facts(lockstep.options)).encode()
    rows = lockstep.share("preflight", mine)
    if any(row != rows[0] for row in rows):
        _refuse(lockstep, [json.loads(row) for row in rows])


def _refuse(lockstep: Lockstep, rows: list[dict[str, str]]) -> NoReturn:
    lines = ["the ranks of this job do not run the same thing:"]
    for name in rows[0]:
        groups: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            groups.setdefault(row.get(name, "unknown"), []).append(rank)
        if len(groups) > 1:
            told = "; ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in groups.items())
            lines.append(f"  {name}: {told}")
    lines.append("  Start all ranks in one environment, with the same MPISTRAT_* variables.")
    lockstep.fail(PreflightError("\n".join(lines)))
