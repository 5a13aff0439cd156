"""Names that resolvers give to ranks: by tf.distribute's rules, and whether they fit the ranks.

In mpistrat itself every rank is a worker, and rank 0 is the chief.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpistrat.cluster.resolver import ClusterResolver, task_named
from mpistrat.cluster.spec import ClusterSpec
from mpistrat.comm.callsite import few, grouped, ranks_text

_JOBS = ("chief", "worker", "evaluator", "ps")
_WORKING = _JOBS[:3]


class Task(NamedTuple):
    """The name that a resolver gives to a rank.

    Attributes:
      kind: The job of the task; empty if the resolver knows no cluster.
      number: The number of the task in the job.
      workers: How many tasks work together, this one included.
      chief: Whether it is the task that writes checkpoints.
    """

    kind: str = ""
    number: int = 0
    workers: int = 0
    chief: bool = False

    def __str__(self) -> str:
        """Return its name, such as ``worker 0``."""
        return f"{self.kind} {self.number}" if self.kind else "without a name"


def task_of(resolver: ClusterResolver) -> Task:
    """Return the name that a resolver gives to this process.

    Args:
      resolver: Asked for its cluster first, for some learn from that which task they are.

    Raises:
      ValueError: The cluster has no chief, worker or evaluator; or the resolver does not say which
        task this is, or names one that is not in the cluster, or that takes part in no collective.

    Example:
      >>> from mpistrat.cluster.resolvers import MPIClusterResolver
      >>> str(task_of(MPIClusterResolver(1, 2)))
      'worker 1'
    """
    spec = ClusterSpec(resolver.cluster_spec())
    if not spec:
        return Task()
    kind, number = task_named(resolver, spec)
    name = type(resolver).__name__
    _check(spec, kind)
    if kind not in _WORKING:
        raise ValueError(
            f"{name} calls this process {kind} {number}, but ranks are replicas: a "
            f"{', '.join(_WORKING[:-1])} or {_WORKING[-1]}."
        )
    if number < 0 or (kind in spec.jobs and number not in spec.task_indices(kind)):
        raise ValueError(f"{name} calls this process {kind} {number}, which {spec} does not have.")
    # The rules of tf.distribute: a cluster without a chief has the first worker for one, and an
    # evaluator, which takes part in no collective, is its own.
    working_jobs = ("evaluator",) if kind == "evaluator" else ("chief", "worker")
    first = "chief" not in spec.jobs and kind == "worker" and number == 0
    workers = max(1, sum(_count(spec, job) for job in working_jobs))
    return Task(kind, number, workers, first or kind in ("chief", "evaluator"))


def _count(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0


def _check(spec: ClusterSpec, kind: str) -> None:
    """Refuse a cluster that tf.distribute does not know, or that has no such job.

    It need not list an evaluator.
    """
    strange = sorted(set(spec.jobs) - set(_JOBS))
    if strange:
        raise ValueError(f"jobs are called {', '.join(_JOBS)}, but this cluster has {strange}.")
    if kind not in _JOBS:
        raise ValueError(f"task_type is one of {', '.join(_JOBS)}, got {kind!r}.")
    for job in ("chief", "evaluator"):
        if _count(spec, job) > 1:
            raise ValueError(f"a cluster has at most one {job}, this one {_count(spec, job)}.")
    if kind not in ("evaluator", *spec.jobs):
        raise ValueError(f"task_type {kind!r} is not in the cluster; its jobs: {spec.jobs}.")


def misfit(tasks: Sequence[Task], job: int) -> str:
    """Return why the names of the ranks do not fit the ranks, or an empty string if they do.

    Args:
      tasks: The task of each rank.
      job: How many ranks the whole job has; a strategy may have fewer.

    Example:
      >>> misfit([Task("worker", 0, 2, True), Task("worker", 1, 2)], 2)
      ''
    """
    ranks = grouped([str(task) if task.kind else "" for task in tasks], range(len(tasks)))
    shared_names = [
        (name, named_ranks) for name, named_ranks in ranks.items() if name and named_ranks[1:]
    ]
    faults = few(
        [f"{ranks_text(named_ranks)} are all called {name}" for name, named_ranks in shared_names]
    )
    counts = sorted({task.workers for task in tasks if task.kind in _WORKING[:-1]})
    if any(count not in (len(tasks), job) for count in counts):
        counts_text = " and ".join(map(str, counts))
        faults.append(f"the cluster has {counts_text} workers, but there are {len(tasks)} ranks")
    chiefs = [rank for rank, task in enumerate(tasks) if task.chief and task.kind in _WORKING[:-1]]
    if chiefs and 0 not in chiefs:
        faults.append(f"rank {chiefs[0]} is called the chief, but rank 0 writes files")
    if not faults:
        return ""
    return (
        f"{'; '.join(faults)}. Names (TF_CONFIG, or a cluster_resolver) do not choose ranks: MPI "
        "does, and extended.should_checkpoint is true on rank 0. Unset TF_CONFIG and give no "
        "resolver to let MPI name the ranks too, or give each rank the name of a task of its own, "
        "in rank order."
    )
