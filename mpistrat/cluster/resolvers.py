"""Resolvers of names from MPI, from ``TF_CONFIG``, and from the program itself.

`MPIClusterResolver` is the default; `TPUClusterResolver` is the same with the arguments of a TPU's
resolver. `TFConfigClusterResolver` reads ``TF_CONFIG``, by which a TensorFlow program knows its
cluster and its task. `SimpleClusterResolver` has one cluster that the program gives, and
`UnionResolver` the union of several. `format_tf_config` writes the text of ``TF_CONFIG``;
`mpistrat.launch.plan` exchanges the names of the hosts for it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, final

from mpistrat.arrays import as_int
from mpistrat.cluster.resolver import (
    ClusterResolver,
    ClusterSpec,
    TaskResolver,
    add_protocol,
    get_task,
)
from mpistrat.comm.callsite import group_by_key
from mpistrat.comm.session import find_default_parent
from mpistrat.config import parse_count
from mpistrat.errors import OptionError

_EXAMPLE = (
    'A right one: {"cluster": {"worker": ["host0:2222", "host1:2222"]}, '
    '"task": {"type": "worker", "index": 0}}.'
)
_NO_TPU = (None, "", "local")  # arguments that name no TPU
LABEL = "rank:"  # before the number of a rank that has no address


def _create_config_error(fault: str) -> OptionError:
    return OptionError(
        f"the environment variable TF_CONFIG {fault}. {_EXAMPLE} Or unset it: names then come from "
        "MPI, as ranks always do."
    )


class MPIClusterResolver(ClusterResolver):
    """Every rank is a worker, numbered by its rank.

    Args:
      rank: This rank; None to ask MPI for rank and size, which starts MPI.
      size: The number of ranks; ignored if `rank` is None.
      job: The name of the job.

    Raises:
      ValueError: `rank` is not in 0..`size` - 1.

    Example:
      >>> MPIClusterResolver(1, 2).cluster_spec()
      ClusterSpec({'worker': ['rank:0', 'rank:1']})
    """

    def __init__(self, rank: int | None = None, size: int = 1, job: str = "worker"):
        """Create the resolver of one rank."""
        if rank is None:
            world = find_default_parent()
            rank, size = world.rank, world.size
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in 0..{size - 1} for {size} ranks, got {rank}.")
        self._size = size
        self._job = self._task_type = job
        self._task_id = rank

    def cluster_spec(self) -> ClusterSpec:
        """Return one job with a task per rank; the addresses are labels such as ``rank:0``."""
        return ClusterSpec({self._job: [f"{LABEL}{rank}" for rank in range(self._size)]})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the label of a task; of rank 0 if none is named."""
        return self.cluster_spec().task_address(task_type or self._job, task_id or 0)


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
        if tpu not in _NO_TPU:
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
        """Return a resolver. It connects to nothing; the first strategy joins the ranks.

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


@final
class TFConfigClusterResolver(TaskResolver):
    """Names from the JSON text in the environment variable ``TF_CONFIG``, read at each call.

    Args:
      task_type: Instead of the one in ``TF_CONFIG``.
      task_id: Instead of the one in ``TF_CONFIG``.
      rpc_layer: Instead of the one in ``TF_CONFIG``.
      environment: Instead of the one in ``TF_CONFIG``.
      env: The environment, or None for that of this process.

    Raises:
      ValueError: When names are asked for, if the text is not JSON, or not a valid ``TF_CONFIG``.

    Like: ``tf.distribute.cluster_resolver.TFConfigClusterResolver``.

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
        """Create a resolver; arguments that are not None override ``TF_CONFIG``."""
        self._task_type = task_type
        self._task_id = None if task_id is None else int(task_id)
        self._rpc_layer = rpc_layer
        self._environment = environment
        self._env = env

    def _read_config(self) -> dict[str, Any]:
        env = os.environ if self._env is None else self._env
        text = env.get("TF_CONFIG") or "{}"
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            fault = f"the environment variable TF_CONFIG holds {text!r:.60}, which is not JSON"
            message = f"{fault}. {_EXAMPLE} The JSON parser says: {error.msg}"
            raise json.JSONDecodeError(message, error.doc, error.pos) from None
        except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
            raise _create_config_error(
                f"holds {text!r:.60}, which is not a cluster: {error}"
            ) from None
        if not isinstance(config, dict):
            raise _create_config_error(f"holds {text!r:.60}, which is JSON but not an object")
        for key in ("cluster", "task"):
            section = config.get(key, {})
            if not isinstance(section, dict):
                raise _create_config_error(f"has a {key!r} that is not an object: {section!r:.60}")
        return config

    def _read_task(self, key: str) -> Any:
        """Return an entry of the task in ``TF_CONFIG``; None if it is missing and not needed."""
        config = self._read_config()
        entry = config.get("task", {}).get(key)
        if entry is None and "session_master" not in config:
            spec = self.cluster_spec()
            tasks = sum(spec.num_tasks(job) for job in spec.jobs)
            if tasks > 1:
                fault = f"names {tasks} tasks, but has no {key!r} in 'task' to say which is this"
                raise _create_config_error(f"{fault} process")
        return entry

    def _check(self) -> None:
        """Check ``TF_CONFIG``.

        Raises:
          ValueError: It is not JSON, not an object, or does not name the task.
        """
        self.cluster_spec()
        _ = self.task_type, self.task_id

    def _find_default(self, name: str) -> Any:
        """Return the value in ``TF_CONFIG``."""
        if name == "rpc_layer":
            return self._read_config().get(name)
        if name == "task_type":
            entry = self._read_task("type")
            if not isinstance(entry, str | None):
                raise _create_config_error(
                    f"has a task whose 'type' is not a string: {entry!r:.60}"
                )
            return entry
        entry = self._read_task("index")
        number = parse_count(entry) if isinstance(entry, str) else as_int(entry)
        if entry is None or (number is not None and number >= 0):
            return number
        raise _create_config_error(
            f"has a task whose 'index' is not an integer of at least 0: {entry!r:.60}"
        )

    @property
    def environment(self) -> str:
        """The kind of environment that ``TF_CONFIG`` names."""
        if self._environment is not None:
            return self._environment
        return str(self._read_config().get("environment", ""))

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs of ``TF_CONFIG``; an empty cluster if it is not set.

        Raises:
          ValueError: ``TF_CONFIG`` is malformed.
        """
        cluster = self._read_config().get("cluster", {})
        try:
            return ClusterSpec(cluster)
        except (TypeError, ValueError) as error:
            raise _create_config_error(f"has a 'cluster' that cannot be used: {error}") from None

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, with the rpc layer before it if there is one.

        If no task is named, that of this process; empty for a cluster of a single task.
        """
        config = self._read_config()
        if "session_master" in config:
            return str(config["session_master"])
        spec = self.cluster_spec()
        is_single_task = len(spec.jobs) == 1 and spec.num_tasks(spec.jobs[0]) == 1
        return "" if is_single_task or not spec else super().master(task_type, task_id, rpc_layer)


def default_resolver(rank: int, size: int, env: Mapping[str, str] = os.environ) -> ClusterResolver:
    """Return the resolver of a strategy that was given none.

    Args:
      rank: This rank.
      size: The number of ranks.
      env: The environment; that of this process if not given.

    Returns:
      The resolver of ``TF_CONFIG`` if it is set, else that of MPI.

    Raises:
      ValueError: ``TF_CONFIG`` is malformed.
    """
    if env.get("TF_CONFIG"):
        resolver = TFConfigClusterResolver(env=env)
        resolver._check()
        return resolver
    return MPIClusterResolver(rank, size)


@final
class SimpleClusterResolver(TaskResolver):
    """Answers with the names that it was given.

    Args:
      cluster_spec: The jobs and the addresses of their tasks.
      master: The result of the method `master` when no task is named.
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
        return add_protocol(self._master, rpc_layer or self.rpc_layer)

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
        task_lists: dict[str, list[Any]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                task_lists.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _merge_tasks(job, tasks) for job, tasks in task_lists.items()})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task; the first resolver's master unless both are named."""
        if task_type is not None and task_id is not None:
            # Without a layer of its own it adds none, even if the resolvers have layers.
            address = self.cluster_spec().task_address(task_type, task_id)
            return add_protocol(address, rpc_layer or self._rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return the answer of the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    def _find_default(self, name: str) -> Any:
        """Return the answer of the first resolver."""
        return getattr(self._resolvers[0], name, None)

    @property
    def environment(self) -> str:
        """The environment of the first resolver."""
        return self._resolvers[0].environment


def _merge_tasks(job_name: str, task_lists: list[Any]) -> list[str] | dict[int, str]:
    if all(isinstance(tasks, list) for tasks in task_lists):
        return [address for tasks in task_lists for address in tasks]
    merged_tasks: dict[int, str] = {}
    for task_list in task_lists:
        tasks = dict(enumerate(task_list)) if isinstance(task_list, list) else task_list
        duplicate_indices = sorted(tasks.keys() & merged_tasks.keys())
        if duplicate_indices:
            raise KeyError(
                f"Duplicate keys: two resolvers have tasks {duplicate_indices} of job {job_name!r}."
            )
        merged_tasks.update(tasks)
    return merged_tasks


TF_CONFIG = "TF_CONFIG"
_PORTS = range(1, 65536)


def format_tf_config(resolver: ClusterResolver) -> str:
    """Return the answers of a resolver as the JSON of ``TF_CONFIG``.

    Args:
      resolver: Knows its cluster, and which task this process is.

    Raises:
      ValueError: It does not know the task, or its addresses are labels, not addresses of hosts.

    Example:
      >>> spec = ClusterSpec({"worker": ["a:1", "b:1"]})
      >>> format_tf_config(SimpleClusterResolver(spec, task_type="worker", task_id=1))
      '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    """
    spec = resolver.cluster_spec()  # first: by it, the resolver of Slurm finds its task
    kind, index = get_task(resolver, spec)
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
    rpc_layer = getattr(resolver, "rpc_layer", None)
    config |= {"rpc_layer": rpc_layer} if rpc_layer else {}
    config |= {"environment": resolver.environment} if resolver.environment else {}
    return json.dumps(config)


def create_placed_resolver(
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
      >>> create_placed_resolver(["a", "b", "a"], 2, 9000).cluster_spec()
      ClusterSpec({'worker': ['a:9000', 'b:9000', 'a:9001']})
    """
    jobs = {"worker": len(hosts)} if jobs is None else jobs
    if sum(jobs.values()) != len(hosts) or min(jobs.values()) < 1:
        raise ValueError(
            f"the numbers in jobs must add up to the {len(hosts)} ranks, at least one each, "
            f"got {jobs}."
        )
    ports = [port_base + hosts[:index].count(host) for index, host in enumerate(hosts)]
    if not (min(ports) in _PORTS and max(ports) in _PORTS):
        raise ValueError(f"ports are 1 to 65535; port_base={port_base} leads to {max(ports)}.")
    addresses = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
    owners = [(job, index) for job, count in jobs.items() for index in range(count)]
    cluster = group_by_key([job for job, _ in owners], addresses)
    kind, index = owners[rank]
    return SimpleClusterResolver(ClusterSpec(cluster), task_type=kind, task_id=index)


def export_tf_config(text: str, env: MutableMapping[str, str] | None = None) -> None:
    """Set ``TF_CONFIG``.

    Args:
      text: The text of the variable.
      env: The environment, or None for that of this process and its children.
    """
    (os.environ if env is None else env)[TF_CONFIG] = text
