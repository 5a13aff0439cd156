"""The batch job of this process: its id, and when its time ends.

``squeue`` and ``qstat`` are asked only by whoever calls `ends_at`, which is rank 0 of a job, every
five minutes at most; ``scontrol`` by who calls `kill_wait`, once.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from mpistrat.config import parse_count

_LONGEST = 20.0  # seconds until a scheduler that does not answer is given up


def said(words: Sequence[str], longest: float = _LONGEST) -> subprocess.CompletedProcess[str]:
    """Run a command that only prints, and return what became of it.

    Args:
      words: The command.
      longest: Seconds after which it is given up.

    Raises:
      OSError: It is not there, or does not answer.
    """
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",  # a name of a job is in any encoding
            timeout=longest,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{words[0]} did not answer for {longest:g} s") from None


def asked(words: Sequence[str], longest: float = _LONGEST) -> str:
    """Return what a command of the batch system prints; else as `said`.

    Raises:
      OSError: It is not there, fails, or does not answer; with what it said.
    """
    done = said(words, longest)
    if done.returncode:
        raise OSError(f"{words[0]} ended with {done.returncode}: {done.stderr.strip()[:200]}")
    return done.stdout


def job_id(env: Mapping[str, str] = os.environ) -> str:
    """Return the id of the batch job; empty outside of one.

    Args:
      env: The environment; that of this process if not given.

    Example:
      >>> job_id({"SLURM_JOB_ID": "4711"}), job_id({"PBS_JOBID": "12.pbs"}), job_id({})
      ('4711', '12.pbs', '')
    """
    names = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
    return next((env[name] for name in names if env.get(name)), "")


def restarts(env: Mapping[str, str] = os.environ) -> int:
    """Return how many times Slurm has started the job again; 0 where nobody counts."""
    return parse_count(env.get("SLURM_RESTART_COUNT", "")) or 0


def ends_at(
    env: Mapping[str, str] = os.environ, run_command: Callable[[Sequence[str]], str] = asked
) -> float | None:
    """Return when the time of the batch job ends: seconds since 1970; None if it never does.

    Args:
      env: The environment; that of this process if not given. ``SLURM_JOB_END_TIME`` holds it;
        else ``squeue`` is asked in a Slurm job, and ``qstat`` in one of PBS.
      run_command: Runs a command, and returns what it prints.

    Raises:
      OSError: The batch system does not answer, or not so that it can be understood.

    Example:
      >>> ends_at({"SLURM_JOB_END_TIME": "1700000000"})
      1700000000.0
      >>> ends_at({"SLURM_JOB_ID": "7"}, lambda words: "N/A")
    """
    end_time = parse_count(env.get("SLURM_JOB_END_TIME", ""))
    if end_time:
        return float(end_time)
    if job := env.get("SLURM_JOB_ID"):
        answer = run_command(["squeue", "-h", "-j", job, "-O", "EndTime"]).strip()
        if answer in ("N/A", "NONE", "Unknown"):
            return None
        with suppress(ValueError, OverflowError):
            return time.mktime(time.strptime(answer, "%Y-%m-%dT%H:%M:%S"))
        raise OSError(f"squeue answered {answer[:80]!r}, which is not a time")
    if job := env.get("PBS_JOBID"):
        return _of_pbs(run_command(["qstat", "-f", job]))
    return None


def _of_pbs(answer: str) -> float | None:
    attributes = dict(re.findall(r"^\s*([\w.]+) = (.*)$", answer, re.MULTILINE))
    walltime = attributes.get("Resource_List.walltime")
    if walltime is None:
        return None
    with suppress(KeyError, ValueError, OverflowError):
        start_time = time.mktime(time.strptime(attributes["stime"], "%a %b %d %H:%M:%S %Y"))
        hours, minutes, seconds = map(int, walltime.split(":"))
        return start_time + 3600 * hours + 60 * minutes + seconds
    raise OSError("qstat told no stime, or a walltime that is not a time")


def kill_wait(
    env: Mapping[str, str] = os.environ, run_command: Callable[[Sequence[str]], str] = asked
) -> float | None:
    """Return the seconds from Slurm's SIGTERM to its SIGKILL; None if that is unknown.

    Args:
      env: The environment; that of this process if not given.
      run_command: Runs a command, and returns what it prints.

    Example:
      >>> kill_wait({"SLURM_JOB_ID": "7"}, lambda words: "KillWait                = 30 sec")
      30.0
      >>> kill_wait({}) is None
      True
    """
    if not env.get("SLURM_JOB_ID"):
        return None
    with suppress(OSError):  # no scontrol, as in a container
        match = re.search(r"^KillWait *= *(\d+)", run_command(["scontrol", "show", "config"]), re.M)
        return float(match[1]) if match else None
    return None


def state(
    env: Mapping[str, str] = os.environ, run_command: Callable[[Sequence[str]], str] = asked
) -> str:
    """Return the state of this job in Slurm, such as ``RUNNING``; empty elsewhere.

    Also where there is no ``scontrol``, as in a container.

    Args:
      env: The environment; that of this process if not given.
      run_command: Runs a command, and returns what it prints.

    Raises:
      OSError: Slurm does not answer.
    """
    job = env.get("SLURM_JOB_ID")
    if not job:
        return ""
    with suppress(FileNotFoundError):
        match = re.search(r"JobState=(\w+)", run_command(["scontrol", "show", "job", job, "-o"]))
        return match[1] if match else ""
    return ""
