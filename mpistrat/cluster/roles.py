"""The role of a task, from the name of its job: which is the chief, which count as workers.

These are tf.distribute's rules, for programs that decide by job and task. In mpistrat itself every
rank is a worker, and rank 0 is the chief.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpistrat.cluster.spec import ClusterSpec

__all__ = ["JOBS", "check_task", "id_in_cluster", "is_chief", "leader", "worker_count"]

JOBS = ("chief", "worker", "evaluator", "ps")
_SINGLE = ("chief", "evaluator")

Cluster = ClusterSpec | Mapping[str, Any]


def _count(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0


def check_task(cluster: Cluster, task_type: str | None, task_id: int | None) -> ClusterSpec:
    """Return the cluster after checking that it can have such a task.

    An evaluator takes part in no collective, so a cluster need not list it.

    Args:
      cluster: A `ClusterSpec`, or what one is made from.
      task_type: The job of the task; None for a process without a job.
      task_id: Which task of it.

    Raises:
      ValueError: The cluster has a job of another name than `JOBS`, or several chiefs or
        evaluators, or no such task.
    """
    spec = ClusterSpec(cluster)
    strange = sorted(set(spec.jobs) - set(JOBS))
    if strange:
        raise ValueError(f"jobs are called {', '.join(JOBS)}, but this cluster has {strange}.")
    if task_type is not None and task_type not in JOBS:
        raise ValueError(f"task_type is one of {', '.join(JOBS)}, got {task_type!r}.")
    for job in _SINGLE:
        if _count(spec, job) > 1:
            raise ValueError(f"a cluster has at most one {job}, this one {_count(spec, job)}.")
    if task_type not in (None, "evaluator", *spec.jobs):
        raise ValueError(f"task_type {task_type!r} is not in the cluster; its jobs: {spec.jobs}.")
    if task_type in spec.jobs and (task_id or 0) >= _count(spec, str(task_type)):
        raise ValueError(
            f"task_id {task_id} is too large: job {task_type!r} has {_count(spec, str(task_type))} "
            "tasks, numbered from 0."
        )
    return spec


def is_chief(cluster: Cluster, task_type: str | None, task_id: int | None) -> bool:
    """Tell whether a task is the one that writes checkpoints and summaries.

    That is the chief, or the first worker of a cluster without a chief; an evaluator always is.

    Example:
      >>> is_chief({"worker": ["a:1", "b:1"]}, "worker", 0)
      True
    """
    spec = check_task(cluster, task_type, task_id)
    if task_type in _SINGLE:
        return True
    return "chief" not in spec.jobs and task_type == "worker" and task_id == 0


def leader(cluster: Cluster, task_type: str | None, task_id: int | None) -> str:
    """Return the name of the task that leads collectives; empty if the task takes part in none.

    Example:
      >>> leader({"worker": ["a:1", "b:1"]}, "worker", 1)
      '/job:worker/replica:0/task:0'
    """
    spec = check_task(cluster, task_type, task_id)
    if task_type == "evaluator" or not {"chief", "worker"} & set(spec.jobs):
        return ""
    return f"/job:{'chief' if 'chief' in spec.jobs else 'worker'}/replica:0/task:0"


def id_in_cluster(cluster: Cluster, task_type: str | None, task_id: int) -> int:
    """Return the number of a task among all chiefs and workers, or among the evaluators.

    Raises:
      ValueError: Tasks of this job are not numbered, or the cluster has no such task.

    Example:
      >>> id_in_cluster({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "worker", 1)
      2
    """
    spec = check_task(cluster, task_type, task_id)
    if task_type == "worker":
        return task_id + _count(spec, "chief")
    if task_type in _SINGLE:
        return task_id
    raise ValueError(f"tasks of job {task_type!r} have no id; only chief, worker and evaluator.")


def worker_count(cluster: Cluster, task_type: str | None) -> int:
    """Return how many tasks work together with those of a job.

    Raises:
      ValueError: The job is not chief, worker or evaluator, or the cluster does not have it.

    Example:
      >>> worker_count({"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}, "worker")
      3
    """
    spec = check_task(cluster, task_type, 0)
    if task_type == "evaluator":
        return max(1, _count(spec, "evaluator"))
    if task_type not in ("chief", "worker"):
        raise ValueError(f"tasks of job {task_type!r} do not count among chiefs and workers.")
    return _count(spec, "chief") + _count(spec, "worker")
