"""Resolvers of names that the program gives: one cluster, or the union of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from mpistrat.cluster.resolver import ClusterResolver, TaskResolver, url
from mpistrat.cluster.spec import ClusterSpec


@final
class SimpleClusterResolver(TaskResolver):
    """Answers with what it was given.

    Args:
      cluster_spec: The jobs and the addresses of their tasks.
      master: What the method `master` returns when no task is named.
      task_type: The job of this process.
      task_id: The number of this process in that job.
      environment: The kind of environment that the cluster runs in.
      num_accelerators: How many devices of each kind a task has; None for no devices.
      rpc_layer: The protocol to put before every address, such as ``"grpc"``.

    Raises:
      TypeError: `cluster_spec` is not a `ClusterSpec`, `master` is not a string, or
        `num_accelerators` is not a dict.

    Like: ``tf.distribute.cluster_resolver.SimpleClusterResolver``.

    Example:
      >>> resolver = SimpleClusterResolver(ClusterSpec({"worker": ["a:1", "b:1"]}))
      >>> resolver.master("worker", 1, "grpc")
      'grpc://b:1'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ):
        """Create a resolver with these answers."""
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(f"cluster_spec must be a ClusterSpec, got {cluster_spec!r}.")
        if not isinstance(master, str):
            raise TypeError(f"master must be a string, got {master!r}.")
        self._spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        if not isinstance(num_accelerators or {}, Mapping):
            raise TypeError(
                f"num_accelerators must be a dict, such as {{'GPU': 1}}, got {num_accelerators!r}."
            )
        self._accelerators = dict(num_accelerators or {})
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster that was given."""
        return self._spec

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, or the given master unless type and id are both named."""
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        return url(self._master, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return the counts that were given; the task does not matter."""
        return dict(self._accelerators)

    @property
    def environment(self) -> str:
        """The environment that was given."""
        return self._environment


@final
class UnionResolver(TaskResolver):
    """The union of several clusters; the first resolver answers what only one can.

    The lists of a job are put one after the other. If any resolver gives a job as a dict, all its
    tasks are put together by their indices.

    Args:
      args: At least one resolver.
      kwargs: ``rpc_layer``, ``task_type``, ``task_id``, each instead of that of the first
        resolver. A ``task_id`` of 0 counts.

    Raises:
      ValueError: No resolver is given, or an unknown keyword.
      TypeError: An argument is not a resolver.

    Like: ``tf.distribute.cluster_resolver.UnionResolver``.

    Example:
      >>> one = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}))
      >>> two = SimpleClusterResolver(ClusterSpec({"worker": ["b:1"], "ps": ["c:1"]}))
      >>> UnionResolver(one, two).cluster_spec()
      ClusterSpec({'worker': ['a:1', 'b:1'], 'ps': ['c:1']})
    """

    def __init__(self, *args: ClusterResolver, **kwargs: Any):
        """Create the union."""
        self._rpc_layer = kwargs.pop("rpc_layer", None) or None
        self._task_type = kwargs.pop("task_type", None)
        self._task_id = kwargs.pop("task_id", None)
        if kwargs:
            raise ValueError(
                f"UnionResolver takes rpc_layer, task_type and task_id, not {sorted(kwargs)}."
            )
        if not args:
            raise ValueError("UnionResolver needs at least one ClusterResolver, got none.")
        for resolver in args:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"UnionResolver takes ClusterResolvers, got {resolver!r}.")
        self._resolvers = args

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs of all resolvers.

        Raises:
          KeyError: A job is a dict somewhere, and two resolvers have a task with the same index.
        """
        parts: dict[str, list[Any]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                parts.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _merged(job, tasks) for job, tasks in parts.items()})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task; the first resolver's master unless both are named."""
        if task_type is not None and task_id is not None:
            # Without a layer of its own it says none, whatever those of the resolvers are.
            address = self.cluster_spec().task_address(task_type, task_id)
            return url(address, rpc_layer or self._rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return the answer of the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    def _found(self, name: str) -> Any:
        """Return what the first resolver says."""
        return getattr(self._resolvers[0], name, None)

    @property
    def environment(self) -> str:
        """The environment of the first resolver."""
        return self._resolvers[0].environment


def _merged(job: str, parts: list[Any]) -> list[str] | dict[int, str]:
    if all(isinstance(part, list) for part in parts):
        return [address for part in parts for address in part]
    merged_tasks: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        duplicate_indices = sorted(tasks.keys() & merged_tasks.keys())
        if duplicate_indices:
            raise KeyError(
                f"Duplicate keys: two resolvers have tasks {duplicate_indices} of job {job!r}."
            )
        merged_tasks.update(tasks)
    return merged_tasks
