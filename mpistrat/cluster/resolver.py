"""What every cluster resolver answers."""

from __future__ import annotations

import abc

from mpistrat.cluster.spec import ClusterSpec

__all__ = ["ClusterResolver"]


class ClusterResolver(abc.ABC):
    """Names this process in the job. It never decides which rank this is; MPI does.

    As: ``tf.distribute.cluster_resolver.ClusterResolver``.
    """

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs of the cluster and their addresses."""

    @abc.abstractmethod
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, or of whoever leads the session."""

    @property
    @abc.abstractmethod
    def task_type(self) -> str | None:
        """The job that this process is in."""

    @property
    @abc.abstractmethod
    def task_id(self) -> int | None:
        """Which task of that job this process is."""

    @property
    def environment(self) -> str:
        """What kind of place the cluster runs in; empty where nothing says."""
        return ""
