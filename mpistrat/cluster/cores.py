"""How many cores are this rank's: what the scheduler lets it use, shared with its neighbours."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["MASK_BYTES", "MOST", "cores_of", "mask_of", "quota"]

# Room for a mask of 8192 cores; Linux allows no more.
MASK_BYTES = 1024
# Folds and sums are bound by memory, which no more cores than this make faster.
MOST = 16


def mask_of() -> int:
    """Return the cores that this thread may run on, as the bits of a number.

    Launchers and schedulers (``--bind-to``, ``--cpus-per-task``, ``taskset``, cpusets) say it so.
    """
    if hasattr(os, "sched_getaffinity"):
        return sum(1 << core for core in os.sched_getaffinity(0) if core < 8 * MASK_BYTES)
    return (1 << (os.cpu_count() or 1)) - 1


def cores_of(masks: Sequence[int], rank: int, limit: float = math.inf) -> int:
    """Return how many threads a rank may use without taking cores from its neighbours.

    Args:
      masks: The cores of each rank of the node, as `mask_of` returns them.
      rank: The rank in the node.
      limit: How many cores' worth of time it gets; see `quota`.

    Returns:
      Its cores divided by the number of ranks that may use any of them; 1 to `MOST`.

    Example:
      >>> cores_of([0b1111, 0b1111, 0b110000], 0), cores_of([0b1111, 0b1111, 0b110000], 2)
      (2, 2)
    """
    mine = masks[rank]
    sharers = max(1, sum(bool(mine & other) for other in masks))
    cores = min(bin(mine).count("1"), limit)
    return max(1, min(MOST, int(cores // sharers)))


def quota(
    groups: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")
) -> float:
    """Return how many cores' worth of time the control groups of this process allow.

    It is the least of its group and those above it, as containers set it (``cpu.max`` of version 2;
    ``cpu.cfs_quota_us`` of version 1); infinity if there is no limit.

    Args:
      groups: Where control groups are mounted.
      process: What tells the group of this process.
    """
    lines = [line.split(":", 2) for line in _text(process).splitlines()]
    path = next((name for _, kind, name in (x for x in lines if len(x) == 3) if not kind), "/")
    here = groups / path.strip().lstrip("/")
    least = _version_1(groups / "cpu")
    # In a namespace of its own the path may not be there; what is, is above it.
    for group in [here, *here.parents]:
        if group == groups or groups in group.parents:
            least = min(least, _cores(_text(group / "cpu.max").split()))
    return least


def _version_1(group: Path) -> float:
    words = [_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    return _cores(words)


def _cores(words: Sequence[str]) -> float:
    try:
        allowed, period = map(int, words)
        return allowed / period if allowed > 0 else math.inf
    except (ValueError, ZeroDivisionError):  # "max 100000", or no such file
        return math.inf


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
