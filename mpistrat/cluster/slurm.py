"""A resolver of names from the environment that Slurm gives to the tasks of a job step."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any, final

from mpistrat.arrays import check_int
from mpistrat.cluster.allocation import expand_hostlist, expand_tasks_per_node
from mpistrat.cluster.resolver import MAX_TASKS, ClusterSpec, TaskResolver
from mpistrat.config import parse_count

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MAX_PORT = 65535
_MAX_GPUS = 1024  # of a node
_NO_DEVICES = {"", "-1", "NoDevFiles"}


@final
class SlurmClusterResolver(TaskResolver):
    """Names from the environment of a process that ``srun`` started; GPUs are not needed.

    Tasks are numbered node by node, in the order of Slurm's list of nodes, which is how ``srun``
    numbers them unless an option distributes them otherwise. The first on a node gets
    `port_base`, the next the port after it. Jobs get their tasks in the order of their names. The
    environment is read when the resolver is made; neither MPI nor another program is started.

    Under ``mpiexec`` in an allocation these variables belong to the launcher's own process on each
    node and are equal on all its ranks; there `MPIClusterResolver` and `tf_config` know better.

    Args:
      jobs: The number of tasks of each job; None for one job ``worker`` with all tasks.
      port_base: The port of the first task of each node.
      gpus_per_node: GPUs of a node; None for as many as ``CUDA_VISIBLE_DEVICES`` or else
        ``SLURM_GPUS_ON_NODE`` say; 0 if neither is set.
      gpus_per_task: GPUs of a task; None for an even share.
      tasks_per_node: Tasks on each node, or a dict from host to tasks; None for Slurm's own.
      auto_set_gpu: Let `cluster_spec` set ``CUDA_VISIBLE_DEVICES`` to the GPUs of this task, if
        tasks have any.
      rpc_layer: The protocol to put before every address.
      env: The environment, or None for that of this process.

    Raises:
      RuntimeError: This process is not a task of a job step, or jobs, tasks and GPUs do not fit.
      TypeError: `jobs` is not a dict, or a number is not an integer.
      ValueError: A number is negative or too large, there are too few ports, or Slurm's variables
        cannot be read.

    Like: ``tf.distribute.cluster_resolver.SlurmClusterResolver``.

    Example:
      >>> step = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}
      >>> step |= {"SLURM_STEP_NODELIST": "n[7-8]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
      >>> resolver = SlurmClusterResolver(env=step)
      >>> resolver.cluster_spec()
      ClusterSpec({'worker': ['n7:8888', 'n7:8889', 'n8:8888']})
      >>> resolver.get_task_info()
      ('worker', 2)
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        env: MutableMapping[str, str] | None = None,
    ):
        """Read the environment, and check that jobs, tasks and GPUs fit together."""
        self._env = os.environ if env is None else env
        self._rank = _read_count(self._env, "PROCID")
        counts = _count_tasks(self._env, tasks_per_node)
        if jobs is None:
            jobs = {"worker": _read_count(self._env, "STEP_NUM_TASKS")}
        if not isinstance(jobs, Mapping):
            raise TypeError(f"jobs must be a dict of numbers of tasks, got {jobs!r:.80}.")
        self._jobs = {
            job: check_int(f"jobs[{job!r}]", n, 0, ValueError) for job, n in sorted(jobs.items())
        }
        max_tasks = max(counts.values(), default=0)
        ports = max(1, max_tasks)
        if not 0 < check_int("port_base", port_base, 0, ValueError) <= _MAX_PORT + 1 - ports:
            raise ValueError(
                f"port_base must leave {ports} ports between 1 and {_MAX_PORT}, got {port_base}."
            )
        gpus = _count_visible_gpus(self._env) if gpus_per_node is None else gpus_per_node
        self._gpus = gpus // ports if gpus_per_task is None else gpus_per_task
        self._auto_set_gpu = auto_set_gpu
        self.rpc_layer = rpc_layer
        self._check(max_tasks, gpus, sum(counts.values()))
        self._tasks = [
            (f"{host}:{port_base + index}", index)
            for host, count in counts.items()
            for index in range(count)
        ]

    def _check(self, max_tasks: int, gpus: int, task_count: int) -> None:
        if check_int("gpus_per_node", gpus, 0, ValueError) > _MAX_GPUS:
            raise ValueError(f"no node has {gpus} GPUs; the limit is {_MAX_GPUS}.")
        check_int("gpus_per_task", self._gpus, 0, ValueError)
        if max_tasks * self._gpus > gpus:
            raise RuntimeError(
                f"{max_tasks} tasks of a node with {self._gpus} GPUs each need more than the "
                f"{gpus} that it has; lower gpus_per_task or tasks_per_node."
            )
        if task_count > MAX_TASKS:
            raise ValueError(
                f"Slurm's variables describe {task_count} tasks, more than the limit of "
                f"{MAX_TASKS}. Look for what has set them, or use another resolver."
            )
        needed_tasks = sum(self._jobs.values())
        if needed_tasks != task_count:
            raise RuntimeError(
                f"the jobs {self._jobs} need {needed_tasks} tasks, but there are {task_count}."
            )
        if self._rank >= task_count:
            raise RuntimeError(
                f"rank {self._rank} of the step has no task: tasks_per_node gives {task_count} in "
                "all."
            )

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs and addresses, and find out which task this process is.

        Sets ``task_type`` and ``task_id``, and ``CUDA_VISIBLE_DEVICES`` if `auto_set_gpu`.
        """
        cluster: dict[str, list[str]] = {}
        first_task = 0
        for job, count in self._jobs.items():
            cluster[job] = [address for address, _ in self._tasks[first_task : first_task + count]]
            if first_task <= self._rank < first_task + count:
                self._task_type, self._task_id = job, self._rank - first_task
            first_task += count
        if self._auto_set_gpu and self._gpus:
            start = self._tasks[self._rank][1] * self._gpus
            self._env[_VISIBLE] = ",".join(map(str, range(start, start + self._gpus)))
        return ClusterSpec(cluster)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return the job of this process and which task of it; None before `cluster_spec`."""
        return self.task_type, self.task_id

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return how many GPUs each task has, under ``"GPU"``."""
        return {"GPU": self._gpus}


def _read_variable(env: Mapping[str, str], name: str) -> str:
    if f"SLURM_{name}" not in env:
        raise RuntimeError(
            f"SLURM_{name} is not set, so this process is not a task of a Slurm step. Start it "
            "with srun, or use another resolver."
        )
    return env[f"SLURM_{name}"]


def _read_count(env: Mapping[str, str], name: str) -> int:
    text = _read_variable(env, name)
    number = parse_count(text)
    if number is None:
        raise ValueError(f"SLURM_{name} must be a number from 0, but is {text!r:.40}.")
    return number


def _count_tasks(
    env: Mapping[str, str], tasks_per_node: int | Mapping[str, int] | None
) -> dict[str, int]:
    """Return how many tasks each host has, in the order of Slurm's list of nodes."""
    hosts = expand_hostlist(_read_variable(env, "STEP_NODELIST"))
    if isinstance(tasks_per_node, Mapping):
        host_indices = {host: index for index, host in enumerate(hosts)}
        sorted_hosts = sorted(
            tasks_per_node, key=lambda host: (host_indices.get(host, len(hosts)), host)
        )
        name = "tasks_per_node"
        return {
            host: check_int(f"{name}[{host!r}]", tasks_per_node[host], 0, ValueError)
            for host in sorted_hosts
        }
    if tasks_per_node is not None:
        return dict.fromkeys(hosts, check_int("tasks_per_node", tasks_per_node, 0, ValueError))
    counts = expand_tasks_per_node(_read_variable(env, "STEP_TASKS_PER_NODE"))
    if len(counts) != len(hosts):
        raise RuntimeError(f"Slurm lists {len(hosts)} nodes, but task counts for {len(counts)}.")
    return dict(zip(hosts, counts, strict=True))


def _count_visible_gpus(env: Mapping[str, str]) -> int:
    if _VISIBLE in env:
        text = env[_VISIBLE].strip()
        return 0 if text in _NO_DEVICES else len(text.split(","))
    return parse_count(env.get("SLURM_GPUS_ON_NODE", "")) or 0
