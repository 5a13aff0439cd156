"""Jobs, their tasks, and the tasks' addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

__all__ = ["ClusterSpec"]


@final
class ClusterSpec:
    """Which addresses the tasks of each job have.

    Args:
      cluster: For each job a list of addresses, or a dict from task index to address; or another
        `ClusterSpec`.

    Raises:
      TypeError: `cluster` is none of these.

    As: ``tf.train.ClusterSpec``.

    Example:
      >>> ClusterSpec({"worker": ["a:1", "b:1"]}).task_address("worker", 1)
      'b:1'
    """

    def __init__(self, cluster: Mapping[str, Sequence[str] | Mapping[int, str]] | ClusterSpec):
        """Describe a cluster."""
        if isinstance(cluster, ClusterSpec):
            self._jobs: dict[str, dict[int, str]] = {k: dict(v) for k, v in cluster._jobs.items()}
            return
        if not isinstance(cluster, Mapping):
            raise TypeError(f"a cluster is a dict of jobs, got {cluster!r}.")
        self._jobs = {}
        for job, tasks in cluster.items():
            if isinstance(tasks, Mapping):
                self._jobs[job] = {int(index): str(address) for index, address in tasks.items()}
            elif isinstance(tasks, Sequence) and not isinstance(tasks, str):
                self._jobs[job] = {index: str(address) for index, address in enumerate(tasks)}
            else:
                raise TypeError(f"the tasks of job {job!r} are a list or dict, got {tasks!r}.")

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, sorted."""
        return sorted(self._jobs)

    def _tasks(self, job: str) -> dict[int, str]:
        if job not in self._jobs:
            known = ", ".join(self.jobs) or "none"
            raise ValueError(f"No such job in cluster: {job!r}. Known: {known}.")
        return self._jobs[job]

    def num_tasks(self, job_name: str) -> int:
        """Return how many tasks a job has; ValueError if there is no such job."""
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of a job's tasks, sorted; ValueError if there is no such job."""
        return sorted(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task; ValueError if there is none."""
        tasks = self._tasks(job_name)
        if task_index not in tasks:
            raise ValueError(f"No task with index {task_index} in job {job_name!r}.")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return a job's addresses by index, None for an index without a task."""
        tasks = self._tasks(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, Any]:
        """Return a dict of the jobs: lists where the indices are dense, dicts elsewhere."""
        found: dict[str, Any] = {}
        for job, tasks in self._jobs.items():
            dense = sorted(tasks) == list(range(len(tasks)))
            found[job] = [tasks[i] for i in sorted(tasks)] if dense else dict(tasks)
        return found

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
