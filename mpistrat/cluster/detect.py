"""Which launcher started this process, as the environment tells, without starting MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["environment", "launched_by"]


class _Mark(NamedTuple):
    """Variables that one launcher sets in every process of a job."""

    needs: tuple[str, ...]
    launcher: str


# First match wins. Slurm's mark needs the step: a batch script has SLURM_PROCID too, yet is no
# rank. Hydra inside an allocation starts its proxies with srun, so its ranks carry both marks.
_MARKS = (
    _Mark(("OMPI_COMM_WORLD_SIZE",), "mpiexec of Open MPI"),
    _Mark(("PALS_RANKID",), "mpiexec of PALS"),
    _Mark(("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), "srun"),
    _Mark(("PMIX_RANK",), "a launcher that speaks PMIx"),
    _Mark(("PMI_RANK",), "mpiexec of MPICH or Intel MPI"),
)

# Set by sbatch and salloc for the shell in which the user's script runs; such a shell is no rank.
_SHELL_STEPS = ("4294967291", "4294967290")


def launched_by(env: Mapping[str, str] | None = None) -> str | None:
    """Return the name of the launcher that started this process as one rank of a job, or None.

    Args:
      env: The environment, or None for that of this process.

    Returns:
      Words for a message, such as ``"srun"``; None in a plain process and in a batch script.

    Example:
      >>> launched_by({"PMI_RANK": "1", "PMI_SIZE": "2"})
      'mpiexec of MPICH or Intel MPI'
      >>> launched_by({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}) is None
      True
    """
    env = os.environ if env is None else env
    for mark in _MARKS:
        if all(name in env for name in mark.needs):
            if mark.launcher == "srun" and env["SLURM_STEP_ID"] in _SHELL_STEPS:
                continue
            return mark.launcher
    return None


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of this process's environment with `extra` on top, for a child process.

    Args:
      extra: Variables to set in the copy. This process's own environment does not change.

    Example:
      >>> environment({"PRTE_EXAMPLE": "1"})["PRTE_EXAMPLE"]
      '1'
    """
    return {**os.environ, **extra}
