"""The text of ``TF_CONFIG``, which tells a TensorFlow program its cluster and its task."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from mpistrat.cluster.resolver import ClusterResolver, task_named
from mpistrat.cluster.resolvers import LABEL
from mpistrat.cluster.simple import SimpleClusterResolver
from mpistrat.cluster.spec import ClusterSpec
from mpistrat.comm.callsite import grouped

TF_CONFIG = "TF_CONFIG"
_PORTS = range(1, 65536)


def config_text(resolver: ClusterResolver) -> str:
    """Return the answers of a resolver as the JSON of ``TF_CONFIG``.

    Args:
      resolver: Knows its cluster, and which task this process is.

    Raises:
      ValueError: It does not know the task, or its addresses are labels, not addresses of hosts.

    Example:
      >>> spec = ClusterSpec({"worker": ["a:1", "b:1"]})
      >>> config_text(SimpleClusterResolver(spec, task_type="worker", task_id=1))
      '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    """
    spec = resolver.cluster_spec()  # first: that of Slurm finds its task in doing so
    kind, index = task_named(resolver, spec)
    if kind != "evaluator":
        spec.task_address(kind, index)  # an evaluator need not be in the cluster
    addresses = [address for job in spec.jobs for address in spec.job_tasks(job)]
    if any(address is not None and address.startswith(LABEL) for address in addresses):
        raise ValueError(
            f"the addresses of {type(resolver).__name__} are labels of ranks, which "
            "TensorFlow cannot connect to. Pass no resolver: then the ranks exchange their "
            "host names."
        )
    config: dict[str, Any] = {"cluster": spec.as_dict(), "task": {"type": kind, "index": index}}
    layer = getattr(resolver, "rpc_layer", None)
    config |= {"rpc_layer": layer} if layer else {}
    config |= {"environment": resolver.environment} if resolver.environment else {}
    return json.dumps(config)


def placed(
    hosts: Sequence[str], rank: int, port_base: int, jobs: Mapping[str, int] | None = None
) -> SimpleClusterResolver:
    """Return the resolver of one rank among ranks on these hosts.

    Args:
      hosts: The host of every rank.
      rank: This rank.
      port_base: The port of the first rank of a host; the next gets the port after it.
      jobs: How many ranks each job takes, in this order; None for one job ``worker`` of all.

    Raises:
      ValueError: The jobs do not add up to all ranks, or a port is out of range.

    Example:
      >>> placed(["a", "b", "a"], 2, 9000).cluster_spec()
      ClusterSpec({'worker': ['a:9000', 'b:9000', 'a:9001']})
    """
    jobs = {"worker": len(hosts)} if jobs is None else jobs
    if sum(jobs.values()) != len(hosts) or min(jobs.values()) < 1:
        raise ValueError(
            f"the numbers in jobs must add up to the {len(hosts)} ranks, at least one each, "
            f"got {jobs}."
        )
    ports = [port_base + hosts[:place].count(host) for place, host in enumerate(hosts)]
    if not (min(ports) in _PORTS and max(ports) in _PORTS):
        raise ValueError(f"ports are 1 to 65535; port_base={port_base} leads to {max(ports)}.")
    addresses = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
    owners = [(job, index) for job, count in jobs.items() for index in range(count)]
    cluster = grouped([job for job, _ in owners], addresses)
    kind, index = owners[rank]
    return SimpleClusterResolver(ClusterSpec(cluster), task_type=kind, task_id=index)


def export(text: str, env: MutableMapping[str, str] | None = None) -> None:
    """Set ``TF_CONFIG``.

    Args:
      text: What to set it to.
      env: The environment, or None for that of this process and its children.
    """
    (os.environ if env is None else env)[TF_CONFIG] = text
