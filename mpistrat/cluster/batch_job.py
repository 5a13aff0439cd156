"""The batch job of this process: its id, and when its time ends.

Only `get_end_time` calls ``squeue`` and ``qstat``: rank 0 of a job calls it, every five minutes at
most. Only `get_kill_wait` and `get_job_state` call ``scontrol``.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from mpistrat.config import parse_count

_MAX_SECONDS = 20.0  # seconds to wait for the answer of a scheduler


def run_command(
    words: Sequence[str], max_seconds: float = _MAX_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Return the completed process of a command that only prints.

    Args:
      words: The command.
      max_seconds: Seconds after which it is stopped.

    Raises:
      OSError: It is not there, or does not answer.
    """
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",  # a name of a job is in any encoding
            timeout=max_seconds,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{words[0]} did not answer for {max_seconds:g} s") from None


def read_command_output(words: Sequence[str], max_seconds: float = _MAX_SECONDS) -> str:
    """Return the output of a command of the batch system; arguments as of `run_command`.

    Raises:
      OSError: It is not there, fails, or does not answer; with its error output.
    """
    completed = run_command(words, max_seconds)
    if completed.returncode:
        error_text = completed.stderr.strip()[:200]
        raise OSError(f"{words[0]} ended with {completed.returncode}: {error_text}")
    return completed.stdout


def get_job_id(env: Mapping[str, str] = os.environ) -> str:
    """Return the id of the batch job; empty outside of one.

    Args:
      env: The environment; that of this process if not given.

    Example:
      >>> get_job_id({"SLURM_JOB_ID": "4711"}), get_job_id({"PBS_JOBID": "12.pbs"}), get_job_id({})
      ('4711', '12.pbs', '')
    """
    names = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
    return next((env[name] for name in names if env.get(name)), "")


def get_restart_count(env: Mapping[str, str] = os.environ) -> int:
    """Return how many times Slurm has restarted the job; 0 where nothing counts them."""
    return parse_count(env.get("SLURM_RESTART_COUNT", "")) or 0


def get_end_time(
    env: Mapping[str, str] = os.environ,
    read_output: Callable[[Sequence[str]], str] = read_command_output,
) -> float | None:
    """Return the end of the time of the batch job: seconds since 1970; None if it has no end.

    Args:
      env: The environment; that of this process if not given. ``SLURM_JOB_END_TIME`` holds it;
        else ``squeue`` has it in a Slurm job, and ``qstat`` in a PBS job.
      read_output: Runs a command, and returns its output.

    Raises:
      OSError: The batch system does not answer, or its answer cannot be understood.

    Example:
      >>> get_end_time({"SLURM_JOB_END_TIME": "1700000000"})
      1700000000.0
      >>> get_end_time({"SLURM_JOB_ID": "7"}, lambda words: "N/A")
    """
    end_time = parse_count(env.get("SLURM_JOB_END_TIME", ""))
    if end_time:
        return float(end_time)
    if job := env.get("SLURM_JOB_ID"):
        answer = read_output(["squeue", "-h", "-j", job, "-O", "EndTime"]).strip()
        if answer in ("N/A", "NONE", "Unknown"):
            return None
        with suppress(ValueError, OverflowError):
            return time.mktime(time.strptime(answer, "%Y-%m-%dT%H:%M:%S"))
        raise OSError(f"squeue answered {answer[:80]!r}, which is not a time")
    if job := env.get("PBS_JOBID"):
        return _parse_qstat(read_output(["qstat", "-f", job]))
    return None


def _parse_qstat(answer: str) -> float | None:
    attributes = dict(re.findall(r"^\s*([\w.]+) = (.*)$", answer, re.MULTILINE))
    walltime = attributes.get("Resource_List.walltime")
    if walltime is None:
        return None
    with suppress(KeyError, ValueError, OverflowError):
        start_time = time.mktime(time.strptime(attributes["stime"], "%a %b %d %H:%M:%S %Y"))
        hours, minutes, seconds = map(int, walltime.split(":"))
        return start_time + 3600 * hours + 60 * minutes + seconds
    raise OSError("qstat told no stime, or a walltime that is not a time")


def get_kill_wait(
    env: Mapping[str, str] = os.environ,
    read_output: Callable[[Sequence[str]], str] = read_command_output,
) -> float | None:
    """Return the seconds from Slurm's SIGTERM to its SIGKILL; None if that is unknown.

    Args:
      env: The environment; that of this process if not given.
      read_output: Runs a command, and returns its output.

    Example:
      >>> get_kill_wait({"SLURM_JOB_ID": "7"}, lambda words: "KillWait                = 30 sec")
      30.0
      >>> get_kill_wait({}) is None
      True
    """
    if not env.get("SLURM_JOB_ID"):
        return None
    with suppress(OSError):  # no scontrol, as in a container
        match = re.search(r"^KillWait *= *(\d+)", read_output(["scontrol", "show", "config"]), re.M)
        return float(match[1]) if match else None
    return None


def get_job_state(
    env: Mapping[str, str] = os.environ,
    read_output: Callable[[Sequence[str]], str] = read_command_output,
) -> str:
    """Return the state of this job in Slurm, such as ``RUNNING``; empty elsewhere.

    It is empty, too, where there is no ``scontrol``, as in a container.

    Args:
      env: The environment; that of this process if not given.
      read_output: Runs a command, and returns its output.

    Raises:
      OSError: Slurm does not answer.
    """
    job = env.get("SLURM_JOB_ID")
    if not job:
        return ""
    with suppress(FileNotFoundError):
        match = re.search(r"JobState=(\w+)", read_output(["scontrol", "show", "job", job, "-o"]))
        return match[1] if match else ""
    return ""
