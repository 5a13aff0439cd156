"""The resolver of `TPUStrategy`: the ranks of MPI, with the arguments of a TPU's resolver."""

from __future__ import annotations

import warnings
from typing import Any, final

from mpistrat.cluster.resolvers import MPIClusterResolver
from mpistrat.cluster.spec import ClusterSpec

_NONE = (None, "", "local")


@final
class TPUClusterResolver(MPIClusterResolver):
    """The ranks of the MPI world, for programs that were written for a TPU; no TPU is used.

    Making one starts MPI, and communicates nothing.

    Args:
      tpu: None, ``""`` or ``"local"``. The name of a TPU has no effect, and warns.
      zone: Ignored.
      project: Ignored.
      job_name: The name of the job of all ranks.
      coordinator_name: A further job, if `coordinator_address` is given.
      coordinator_address: The address of its only task.
      credentials: Ignored.
      service: Ignored.
      discovery_url: Ignored.

    Warns:
      RuntimeWarning: `tpu` is the name of a TPU.

    Like: ``tf.distribute.cluster_resolver.TPUClusterResolver``.

    Example:
      >>> TPUClusterResolver(tpu="").cluster_spec()
      ClusterSpec({'worker': ['rank:0']})
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ):
        """Create a resolver of the ranks of MPI, which it starts."""
        if tpu not in _NONE:
            # On every rank: where warnings are errors, it is one on all of them.
            warnings.warn(
                f"there is no TPU {tpu!r} here: TPUClusterResolver names the ranks of the MPI "
                'world. Leave tpu out, or give "" or "local".',
                RuntimeWarning,
                stacklevel=2,
            )
        super().__init__(job=job_name)
        self._coordinator: dict[str, list[str]] = {}
        if coordinator_address is not None:
            self._coordinator = {coordinator_name or "coordinator": [coordinator_address]}
        self.tpu = tpu

    @staticmethod
    def connect(
        tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> TPUClusterResolver:
        """Return a resolver. There is nothing to connect to; the first strategy joins the ranks.

        Args:
          tpu: As for the class.
          zone: As for the class.
          project: As for the class.
        """
        return TPUClusterResolver(tpu, zone, project)

    def cluster_spec(self) -> ClusterSpec:
        """Return the job of all ranks, and the coordinator's if there is one."""
        return ClusterSpec({**super().cluster_spec().as_dict(), **self._coordinator})

    def get_master(self) -> str:
        """Return the label of rank 0."""
        return self.master()

    def get_job_name(self) -> str | None:
        """Return the name of the job of all ranks."""
        return self._job
