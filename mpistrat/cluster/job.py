"""How many ranks this job has, as its launcher says, without starting MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["job_size"]

# Variables in which launchers tell a rank the size of its job: Hydra and PMI-1/2, Open MPI, PMIx
# (none), Slurm's srun. Inside `sbatch` without `srun` the last is not set, which is right.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")


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
        if env.get(name, "").isdigit():
            return int(env[name])
    return None
