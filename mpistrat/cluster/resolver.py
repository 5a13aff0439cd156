"""The base class of cluster resolvers."""

from __future__ import annotations

import abc
from typing import Any

from mpistrat.cluster.spec import ClusterSpec


class ClusterResolver(abc.ABC):
    """Tells the jobs of a cluster, and which task of them this process is. The rank is MPI's.

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
          task_id: Which task of it; None for the default of the resolver.
          rpc_layer: A protocol to put before the address, such as ``"grpc"``.
        """

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return how many devices of each kind, other than CPUs, a task has.

        Args:
          task_type: The job of the task; None for that of this process.
          task_id: Which task of it; None for this process.
          config_proto: Ignored.

        Returns:
          A dict from kind to count; empty unless the resolver was given one, because mpistrat
          computes on CPUs and does not look for devices.
        """
        return {}

    @property
    def task_type(self) -> str | None:
        """The job of this process; None if it is not known. Can be set."""
        return self._found("task_type") if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, value: str | None) -> None:
        self._task_type = value

    @property
    def task_id(self) -> int | None:
        """The number of this process in that job; None if it is not known. Can be set."""
        return self._found("task_id") if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._task_id = value

    def _found(self, name: str) -> Any:
        """Return what this resolver finds out of a property that was not set; None if nothing."""
        return None

    @property
    def environment(self) -> str:
        """The kind of environment that the cluster runs in; empty if it is not known."""
        return ""


def task_named(resolver: ClusterResolver, spec: ClusterSpec) -> tuple[str, int]:
    """Return the job of this process and its number there, of which a resolver knows the cluster.

    Raises:
      ValueError: It does not say them.
    """
    kind, number = resolver.task_type, resolver.task_id
    if kind is None or number is None:
        raise ValueError(
            f"{type(resolver).__name__} has the cluster {spec}, so it must also say which "
            f"task this process is, but task_type is {kind!r} and task_id {number!r}. Set "
            "both, or pass no resolver: then names come from MPI."
        )
    return kind, number


def url(address: str, rpc_layer: str | None) -> str:
    """Return an address with its protocol before it, if there is one.

    Example:
      >>> url("a:1", "grpc"), url("a:1", None)
      ('grpc://a:1', 'a:1')
    """
    return f"{rpc_layer}://{address}" if rpc_layer else address


class TaskResolver(ClusterResolver):
    """A resolver whose `master` is this process's own address unless a task is named."""

    _rpc_layer: str | None = None

    @property
    def rpc_layer(self) -> str | None:
        """The protocol to put before addresses; None for none. Can be set."""
        return self._found("rpc_layer") if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        self._rpc_layer = value

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, else that of this process; empty if that is not known."""
        kind = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if kind is None or index is None:
            return ""
        return url(self.cluster_spec().task_address(kind, index), rpc_layer or self.rpc_layer)
