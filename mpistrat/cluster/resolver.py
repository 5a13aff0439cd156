"""Clusters, and the base classes of their resolvers.

`ClusterSpec` has the jobs of a cluster, their tasks, and the addresses of these. `ClusterResolver`
is the base class of all resolvers, `TaskResolver` of those that know the address of their own task.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from mpistrat.arrays import check_int
from mpistrat.config import parse_count

MAX_TASKS = 1 << 22  # of a cluster: more than any machine has, and lists of them fit in memory


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
        `ClusterSpec`, or an object with the attributes of the message ``ClusterDef``. Indices may
        be digits, as the keys of JSON are.

    Raises:
      TypeError: `cluster`, a name, an index or an address has another type.
      ValueError: An index is negative, appears twice, or is not below `MAX_TASKS`.

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
        self._jobs = {
            _check_text(job, "a job"): _check_tasks(job, tasks) for job, tasks in jobs.items()
        }

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, sorted."""
        return sorted(self._jobs)

    def _get_tasks(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            known_jobs = ", ".join(self.jobs) or "none"
            raise ValueError(f"No such job in cluster: {job_name!r}. Known: {known_jobs}.")
        return self._jobs[job_name]

    def num_tasks(self, job_name: str) -> int:
        """Return how many tasks `job_name` has; ValueError if there is no such job."""
        return len(self._get_tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the sorted indices of the tasks of `job_name`; ValueError if there is none."""
        return sorted(self._get_tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of task `task_index` of `job_name`.

        Raises:
          ValueError: There is no such job.
        """
        tasks = self._get_tasks(job_name)
        if task_index not in tasks:
            raise ValueError(f"No task with index {task_index} in job {job_name!r}.")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of `job_name` by index, None for an index without a task."""
        tasks = self._get_tasks(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, Any]:
        """Return a dict of the jobs: lists where the indices are dense, dicts elsewhere."""
        tasks_by_job: dict[str, Any] = {}
        for job, tasks in self._jobs.items():
            is_dense = sorted(tasks) == list(range(len(tasks)))
            tasks_by_job[job] = list(tasks.values()) if is_dense else dict(tasks)
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


def _check_tasks(job_name: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, Mapping):
        pairs = [(_check_index(job_name, index), address) for index, address in tasks.items()]
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str | bytes):
        pairs = list(enumerate(tasks))
    else:
        raise TypeError(f"the tasks of job {job_name!r} are a list or dict, got {tasks!r}.")
    addresses = {
        index: _check_text(address, f"an address of job {job_name!r}") for index, address in pairs
    }
    if len(addresses) < len(pairs):
        raise ValueError(f"an index of job {job_name!r} appears twice: {tasks!r}.")
    return dict(sorted(addresses.items()))


def _check_index(job_name: str, index: object) -> int:
    digits = parse_count(index) if isinstance(index, str) else None
    parsed_index = index if digits is None else digits
    number = check_int(f"an index of job {job_name!r}", parsed_index, 0, ValueError)
    if number >= MAX_TASKS:
        raise ValueError(f"indices of job {job_name!r} end at {MAX_TASKS - 1}, got a larger one.")
    return number


def _check_text(text: object, description: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{description} is a string, got {text!r}.")
    return text


class ClusterResolver(abc.ABC):
    """Has the jobs of a cluster, and the task of this process among them. The rank is MPI's.

    A subclass defines `cluster_spec` and `master`, and sets ``task_type`` and
    ``task_id`` if it knows them.

    Like: ``tf.distribute.cluster_resolver.ClusterResolver``.
    """

    _task_type: str | None = None
    _task_id: int | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs of the cluster and their addresses."""

    @abc.abstractmethod
    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, or of the master of the cluster.

        Args:
          task_type: The job of the task; None for the default of the resolver.
          task_id: The number of the task; None for the default of the resolver.
          rpc_layer: A protocol to put before the address, such as ``"grpc"``.
        """

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return how many devices of each kind, other than CPUs, a task has.

        Args:
          task_type: The job of the task; None for that of this process.
          task_id: The number of the task; None for this process.
          config_proto: Ignored.

        Returns:
          A dict from kind to count; empty unless the resolver was given one, because mpistrat
          computes on CPUs and does not look for devices.
        """
        return {}

    @property
    def task_type(self) -> str | None:
        """The job of this process; None if it is not known. Can be set."""
        return self._find_default("task_type") if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The number of this process in that job; None if it is not known. Can be set."""
        return self._find_default("task_id") if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def _find_default(self, name: str) -> Any:
        """Return the resolver's own value of a property that was not set; None if it has none."""
        return None

    @property
    def environment(self) -> str:
        """The kind of environment that the cluster runs in; empty if it is not known."""
        return ""


def get_task(resolver: ClusterResolver, spec: ClusterSpec) -> tuple[str, int]:
    """Return the job of this process and its number there, for a resolver with a cluster.

    Raises:
      ValueError: The resolver does not know them.
    """
    kind, number = resolver.task_type, resolver.task_id
    if kind is None or number is None:
        raise ValueError(
            f"{type(resolver).__name__} has the cluster {spec}, so it must also say which "
            f"task this process is, but task_type is {kind!r} and task_id {number!r}. Set "
            "both, or pass no resolver: then names come from MPI."
        )
    return kind, number


def add_protocol(address: str, rpc_layer: str | None) -> str:
    """Return an address with its protocol before it, if there is one.

    Example:
      >>> add_protocol("a:1", "grpc"), add_protocol("a:1", None)
      ('grpc://a:1', 'a:1')
    """
    return f"{rpc_layer}://{address}" if rpc_layer else address


class TaskResolver(ClusterResolver):
    """A resolver whose `master` is this process's own address unless a task is named."""

    _rpc_layer: str | None = None

    @property
    def rpc_layer(self) -> str | None:
        """The protocol to put before addresses; None for none. Can be set."""
        return self._find_default("rpc_layer") if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, else that of this process; empty if that is not known."""
        kind = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if kind is None or index is None:
            return ""
        return add_protocol(
            self.cluster_spec().task_address(kind, index), rpc_layer or self.rpc_layer
        )
