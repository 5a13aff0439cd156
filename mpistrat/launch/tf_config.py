"""``TF_CONFIG`` for each rank, so that TensorFlow programs run under the same launcher."""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping
from typing import Any

from mpistrat.arrays import check_int
from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.resolvers import create_placed_resolver, export_tf_config, format_tf_config
from mpistrat.lockstep.startup import begin_lockstep

_PORT = 8888


def tf_config(
    resolver: ClusterResolver | None = None,
    *,
    port_base: int = _PORT,
    jobs: Mapping[str, int] | None = None,
    host: str | None = None,
    comm: Any = None,
) -> str:
    """Return the text of ``TF_CONFIG`` for this rank.

    Collective: if no resolver is given. Cost: one handshake, with the names of the hosts.

    Args:
      resolver: Answers instead of MPI, without communication; the other arguments are for MPI.
      port_base: The port of the first rank of a host; the next gets the port after it. Whether
        these ports are free is not checked, so jobs that share a host need different ones.
      jobs: How many ranks each job takes, in this order, such as ``{"chief": 1, "worker": 3}``;
        None for one job ``worker`` of all ranks.
      host: The name of this host for the other ranks; None for its own.
      comm: An mpi4py intracommunicator; None for all ranks of the job.

    Returns:
      JSON with the cluster and the task of this rank, as TensorFlow's strategies and
      `TFConfigClusterResolver` read it.

    Raises:
      ValueError: The resolver does not know its task; or, on every rank, the jobs do not add
        up to all ranks or the ports are out of range.
      TypeError: `port_base` is not an integer; on every rank.
      LockstepError: Ranks give different ports or jobs.

    Example:
      >>> tf_config(host="n1")
      '{"cluster": {"worker": ["n1:8888"]}, "task": {"type": "worker", "index": 0}}'
    """
    if resolver is not None:
        return format_tf_config(resolver)
    lockstep = begin_lockstep(comm)
    with lockstep.validating_collectively("tf_config"):
        check_int("tf_config: port_base", port_base, 1, ValueError)
        shares = None if jobs is None else list(jobs.items())
        local_host = (socket.gethostname() if host is None else host).encode()
    payloads = lockstep.gather_payloads(
        f"tf_config(port_base={port_base!r}, jobs={shares})", local_host
    )
    # All ranks have the same hosts, ports and jobs now, so an error is raised on all of them.
    hosts = [payload.decode() for payload in payloads]
    return format_tf_config(create_placed_resolver(hosts, lockstep.comm.rank, port_base, jobs))


def write_tf_config(
    resolver: ClusterResolver | None = None,
    *,
    port_base: int = _PORT,
    jobs: Mapping[str, int] | None = None,
    host: str | None = None,
    comm: Any = None,
    env: MutableMapping[str, str] | None = None,
) -> str:
    """Set ``TF_CONFIG`` to the text of `tf_config`, for this process and those that it starts.

    Call it before TensorFlow makes a strategy.

    Collective: if no resolver is given. Cost: as `tf_config`.

    Args:
      resolver: As for `tf_config`.
      port_base: As for `tf_config`.
      jobs: As for `tf_config`.
      host: As for `tf_config`.
      comm: As for `tf_config`.
      env: Where to set it; None for the environment of this process.

    Returns:
      The text.

    Raises:
      ValueError: As `tf_config`; nothing is set then.
      TypeError: As `tf_config`.
      LockstepError: As `tf_config`.

    Example:
      >>> child = {}
      >>> text = write_tf_config(host="n1", env=child)
      >>> child["TF_CONFIG"] == text
      True
    """
    text = tf_config(resolver, port_base=port_base, jobs=jobs, host=host, comm=comm)
    export_tf_config(text, env)
    return text
