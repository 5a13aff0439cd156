"""Resolvers: from MPI, and from ``TF_CONFIG``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, final

from mpistrat.cluster.resolver import ClusterResolver, url
from mpistrat.cluster.spec import ClusterSpec
from mpistrat.comm.world import default_parent

__all__ = ["LABEL", "MPIClusterResolver", "TFConfigClusterResolver", "default_resolver"]

LABEL = "rank:"  # before the number of a rank that has no address


@final
class MPIClusterResolver(ClusterResolver):
    """Every rank is a worker, numbered by its rank.

    Args:
      rank: This rank; None to ask MPI for rank and size, which starts MPI.
      size: The number of ranks; not looked at if `rank` is None.
      job: What to call the job.

    Raises:
      ValueError: `rank` is none of `size` ranks.

    Example:
      >>> MPIClusterResolver(1, 2).cluster_spec()
      ClusterSpec({'worker': ['rank:0', 'rank:1']})
    """

    def __init__(self, rank: int | None = None, size: int = 1, job: str = "worker"):
        """Be rank `rank` of `size`."""
        if rank is None:
            world = default_parent()
            rank, size = world.rank, world.size
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in 0..{size - 1} for {size} ranks, got {rank}.")
        self._size = size
        self._job = self._task_type = job
        self._task_id = rank

    def cluster_spec(self) -> ClusterSpec:
        """Return one job with a task per rank; the addresses are the ranks' labels."""
        return ClusterSpec({self._job: [f"{LABEL}{rank}" for rank in range(self._size)]})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the label of a task; of rank 0 if none is named."""
        return self.cluster_spec().task_address(task_type or self._job, task_id or 0)


@final
class TFConfigClusterResolver(ClusterResolver):
    """Names from the JSON text in the environment variable ``TF_CONFIG``, read at each question.

    Args:
      task_type: Instead of the one in ``TF_CONFIG``.
      task_id: Instead of the one in ``TF_CONFIG``.
      rpc_layer: Instead of the one in ``TF_CONFIG``.
      environment: Instead of the one in ``TF_CONFIG``.
      env: The environment, or None for that of this process.

    Raises:
      ValueError: At the question, if the text is no JSON.

    As: ``tf.distribute.cluster_resolver.TFConfigClusterResolver``.

    Example:
      >>> text = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
      >>> TFConfigClusterResolver(env={"TF_CONFIG": text}).task_type
      'worker'
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | str | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
    ):
        """Remember what overrides ``TF_CONFIG``."""
        self._type = task_type
        self._id = task_id
        self._rpc = rpc_layer
        self._environment = environment
        self._env = env

    def _config(self) -> dict[str, Any]:
        env = os.environ if self._env is None else self._env
        config = json.loads(env.get("TF_CONFIG") or "{}")
        if not isinstance(config, dict):
            raise ValueError(f"TF_CONFIG must hold a JSON object, got {config!r}.")
        return config

    @property
    def task_type(self) -> str | None:
        """The job that ``TF_CONFIG`` puts this process in. Can be set."""
        found = self._config().get("task", {}).get("type") if self._type is None else self._type
        return None if found is None else str(found)

    @task_type.setter
    def task_type(self, value: str | None) -> None:
        self._type = value

    @property
    def task_id(self) -> int | None:
        """The task that ``TF_CONFIG`` makes this process. Can be set."""
        found = self._config().get("task", {}).get("index") if self._id is None else self._id
        return None if found is None else int(found)

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._id = value

    @property
    def rpc_layer(self) -> str | None:
        """How ``TF_CONFIG`` says that tasks talk. Can be set."""
        return self._config().get("rpc_layer") if self._rpc is None else self._rpc

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        self._rpc = value

    @property
    def environment(self) -> str:
        """What kind of place ``TF_CONFIG`` says that the cluster runs in."""
        if self._environment is not None:
            return self._environment
        return str(self._config().get("environment", ""))

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs of ``TF_CONFIG``; none if it is not set."""
        return ClusterSpec(self._config().get("cluster", {}))

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, with the rpc layer before it if there is one.

        With nothing named it is this process' own; empty for a cluster of a single task.
        """
        config = self._config()
        if "session_master" in config:
            return str(config["session_master"])
        spec = self.cluster_spec()
        if not spec or (len(spec.jobs) == 1 and spec.num_tasks(spec.jobs[0]) == 1):
            return ""
        kind = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        address = spec.task_address(str(kind), int(index or 0))
        return url(address, rpc_layer or self.rpc_layer)


def default_resolver(rank: int, size: int, env: Mapping[str, str] | None = None) -> ClusterResolver:
    """Return the resolver of a strategy that was given none.

    Args:
      rank: This rank.
      size: The number of ranks.
      env: The environment, or None for that of this process.

    Returns:
      That of ``TF_CONFIG`` if it is set, else that of MPI.
    """
    found = os.environ if env is None else env
    if found.get("TF_CONFIG"):
        return TFConfigClusterResolver(env=env)
    return MPIClusterResolver(rank, size)
