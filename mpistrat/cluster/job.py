"""How many ranks this job has, as its launcher says, without starting MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["counted", "job_size"]

# Variables in which launchers tell a rank the size of its job: Hydra and PMI-1/2, Open MPI, PMIx
# (none), Slurm's srun. Inside `sbatch` without `srun` the last is not set, which is right.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
_DIGITS = 18  # what has more counts nothing that there is


def counted(text: str) -> int | None:
    """Return the number that a text writes in digits; None for anything else.

    Example:
      >>> counted("12"), counted("-1"), counted("9" * 5000)
      (12, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def job_size(env: Mapping[str, str] | None = None) -> int | None:
    """Return the number of ranks that the launcher announced, or None.

    Args:
      env: The environment, or None for that of this process.

    Example:
      >>> job_size({"PMI_SIZE": "4"})
      4
    """
    env = os.environ if env is None else env
    for name in _SIZES:
        found = counted(env.get(name, ""))
        if found is not None:
            return found
    return None
