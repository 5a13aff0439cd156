"""`ClusterSpec`: the jobs of a cluster, their tasks, and the addresses of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from mpistrat.arrays import whole_number
from mpistrat.environment import counted

MOST_TASKS = 1 << 22  # of a cluster: above what any machine has, and lists of them fit in memory


class JobDef(NamedTuple):
    """One job of a `ClusterDef`.

    Attributes:
      name: Its name.
      tasks: Addresses by index.
    """

    name: str
    tasks: dict[int, str]


class ClusterDef(NamedTuple):
    """A cluster with the attributes of the protocol buffer of that name.

    Attributes:
      job: The jobs, sorted by name.
    """

    job: tuple[JobDef, ...]


@final
class ClusterSpec:
    """The addresses of the tasks of each job.

    Args:
      cluster: For each job a list of addresses, or a dict from task index to address; or another
        `ClusterSpec`, or what has the attributes of the message ``ClusterDef``. Indices may be
        digits, as the keys of JSON are.

    Raises:
      TypeError: `cluster`, a name, an index or an address has another type.
      ValueError: An index is negative, appears twice, or is not below `MOST_TASKS`.

    Like: ``tf.train.ClusterSpec``.

    Example:
      >>> ClusterSpec({"worker": ["a:1", "b:1"]}).task_address("worker", 1)
      'b:1'
    """

    def __init__(
        self, cluster: Mapping[str, Sequence[str] | Mapping[int, str]] | ClusterDef | ClusterSpec
    ):
        """Create the description of a cluster."""
        if isinstance(cluster, ClusterSpec):
            self._jobs: dict[str, dict[int, str]] = {k: dict(v) for k, v in cluster._jobs.items()}
            return
        jobs: Any = cluster
        if hasattr(jobs, "job"):
            jobs = {job.name: job.tasks for job in jobs.job}
        if not isinstance(jobs, Mapping):
            raise TypeError(f"a cluster is a dict of jobs, got {cluster!r}.")
        self._jobs = {_text(job, "a job"): _tasks(job, tasks) for job, tasks in jobs.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, sorted."""
        return sorted(self._jobs)

    def _tasks(self, job: str) -> dict[int, str]:
        if job not in self._jobs:
            known_jobs = ", ".join(self.jobs) or "none"
            raise ValueError(f"No such job in cluster: {job!r}. Known: {known_jobs}.")
        return self._jobs[job]

    def num_tasks(self, job_name: str) -> int:
        """Return how many tasks `job_name` has; ValueError if there is no such job."""
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the sorted indices of the tasks of `job_name`; ValueError if there is none."""
        return sorted(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of task `task_index` of `job_name`.

        Raises:
          ValueError: There is no such job.
        """
        tasks = self._tasks(job_name)
        if task_index not in tasks:
            raise ValueError(f"No task with index {task_index} in job {job_name!r}.")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of `job_name` by index, None for an index without a task."""
        tasks = self._tasks(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, Any]:
        """Return a dict of the jobs: lists where the indices are dense, dicts elsewhere."""
        tasks_by_job: dict[str, Any] = {}
        for job, tasks in self._jobs.items():
            dense = sorted(tasks) == list(range(len(tasks)))
            tasks_by_job[job] = list(tasks.values()) if dense else dict(tasks)
        return tasks_by_job

    def as_cluster_def(self) -> ClusterDef:
        """Return the same with the attributes of the message ``tf.train.ClusterDef``."""
        return ClusterDef(tuple(JobDef(job, dict(self._jobs[job])) for job in self.jobs))

    def __bool__(self) -> bool:
        """Tell whether there is any job."""
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        """Tell whether both describe the same cluster."""
        return isinstance(other, ClusterSpec) and self._jobs == other._jobs

    __hash__ = None  # type: ignore[assignment]  # equal specs must not hash apart; not needed

    def __repr__(self) -> str:
        """Return the jobs."""
        return f"ClusterSpec({self.as_dict()!r})"


def _tasks(job: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, Mapping):
        pairs = [(_index(job, index), address) for index, address in tasks.items()]
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str | bytes):
        pairs = list(enumerate(tasks))
    else:
        raise TypeError(f"the tasks of job {job!r} are a list or dict, got {tasks!r}.")
    addresses = {index: _text(address, f"an address of job {job!r}") for index, address in pairs}
    if len(addresses) < len(pairs):
        raise ValueError(f"an index of job {job!r} appears twice: {tasks!r}.")
    return dict(sorted(addresses.items()))


def _index(job: str, index: object) -> int:
    digits = counted(index) if isinstance(index, str) else None
    parsed_index = index if digits is None else digits
    number = whole_number(f"an index of job {job!r}", parsed_index, 0, ValueError)
    if number >= MOST_TASKS:
        raise ValueError(f"indices of job {job!r} end at {MOST_TASKS - 1}, got a larger one.")
    return number


def _text(value: object, description: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{description} is a string, got {value!r}.")
    return value
