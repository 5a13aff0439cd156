"""Hands a job script to the scheduler of this machine."""

from __future__ import annotations

import subprocess

from mpistrat.environment import environment
from mpistrat.errors import LaunchError

__all__ = ["submit"]

_COMMANDS = {"slurm": "sbatch", "pbs": "qsub"}
_PATIENCE = 120.0  # seconds; a scheduler under load takes a minute


def submit(scheduler: str, file: str) -> str:
    """Submit a job script.

    Args:
      scheduler: ``slurm`` or ``pbs``.
      file: The script.

    Returns:
      What the scheduler said: the number of the job.

    Raises:
      LaunchError: The scheduler's command is not here, refuses the script, or does not answer.
    """
    command = _COMMANDS[scheduler]
    try:
        got = subprocess.run(
            [command, f"./{file}" if file.startswith("-") else file],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            env=environment({}),
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError(
            f"{file} is written and not submitted: there is no {command} here. Submit it on a "
            "login node of the cluster."
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{command} {file} has not answered for {_PATIENCE:g} s; it may have been submitted "
            "nevertheless: ask the scheduler which jobs there are."
        ) from None
    if got.returncode:
        said = got.stderr.strip() or got.stdout.strip()
        raise LaunchError(f"{command} {file} failed with exit code {got.returncode}: {said}")
    return got.stdout.strip()
