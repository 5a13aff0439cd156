"""The presets, each of which is a choice of a replica group; and the current strategy.

Cluster resolvers may give names to ranks. `read_task` follows tf.distribute's rules, and
`describe_misfit` says whether the names fit. In mpistrat itself every rank is a worker, and rank 0
is the chief.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast, final

from mpistrat.cluster.resolver import ClusterResolver, ClusterSpec, get_task
from mpistrat.cluster.resolvers import default_resolver
from mpistrat.collectives.communication import (
    CommunicationImplementation,
    CommunicationOptions,
    as_implementation,
)
from mpistrat.comm.callsite import group_by_key, ranks_text, shorten
from mpistrat.comm.session import known_job_size
from mpistrat.lockstep.guards import warn
from mpistrat.strategy.context_stack import current_context, require_chosen_strategy
from mpistrat.strategy.replica_group import CrossDeviceOpsBase, ReplicaGroup
from mpistrat.strategy.strategy import Strategy
from mpistrat.variables.arguments import check_class
from mpistrat.variables.kinds import GLOBAL_VIEW, LOCAL_VIEW, SINGLE_REPLICA

_JOB_NAMES = ("chief", "worker", "evaluator", "ps")
_WORKING_JOBS = _JOB_NAMES[:3]


class Task(NamedTuple):
    """The name that a resolver gives to a rank.

    Attributes:
      kind: The job of the task; empty if the resolver knows no cluster.
      number: The number of the task in the job.
      worker_count: How many tasks work together, this one included.
      is_chief: Whether it is the task that writes checkpoints.
    """

    kind: str = ""
    number: int = 0
    worker_count: int = 0
    is_chief: bool = False

    def __str__(self) -> str:
        """Return its name, such as ``worker 0``."""
        return f"{self.kind} {self.number}" if self.kind else "without a name"


def read_task(resolver: ClusterResolver) -> Task:
    """Return the name that a resolver gives to this process.

    Args:
      resolver: Asked for its cluster first, for some learn from that which task they are.

    Raises:
      ValueError: The cluster has no chief, worker or evaluator; or the resolver does not say which
        task this is, or names one that is not in the cluster, or that takes part in no collective.

    Example:
      >>> from mpistrat.cluster.resolvers import MPIClusterResolver
      >>> str(read_task(MPIClusterResolver(1, 2)))
      'worker 1'
    """
    spec = ClusterSpec(resolver.cluster_spec())
    if not spec:
        return Task()
    kind, number = get_task(resolver, spec)
    name = type(resolver).__name__
    _check_cluster(spec, kind)
    if kind not in _WORKING_JOBS:
        raise ValueError(
            f"{name} calls this process {kind} {number}, but ranks are replicas: a "
            f"{', '.join(_WORKING_JOBS[:-1])} or {_WORKING_JOBS[-1]}."
        )
    if number < 0 or (kind in spec.jobs and number not in spec.task_indices(kind)):
        raise ValueError(f"{name} calls this process {kind} {number}, which {spec} does not have.")
    # The rules of tf.distribute: a cluster without a chief has the first worker for one, and an
    # evaluator, which takes part in no collective, is its own.
    working_jobs = ("evaluator",) if kind == "evaluator" else ("chief", "worker")
    is_first_worker = "chief" not in spec.jobs and kind == "worker" and number == 0
    worker_count = max(1, sum(_count_tasks(spec, job) for job in working_jobs))
    return Task(kind, number, worker_count, is_first_worker or kind in ("chief", "evaluator"))


def _count_tasks(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0


def _check_cluster(spec: ClusterSpec, kind: str) -> None:
    """Refuse a cluster that tf.distribute does not know, or that has no such job.

    It need not list an evaluator.
    """
    unknown_jobs = sorted(set(spec.jobs) - set(_JOB_NAMES))
    if unknown_jobs:
        raise ValueError(
            f"jobs are called {', '.join(_JOB_NAMES)}, but this cluster has {unknown_jobs}."
        )
    if kind not in _JOB_NAMES:
        raise ValueError(f"task_type is one of {', '.join(_JOB_NAMES)}, got {kind!r}.")
    for job in ("chief", "evaluator"):
        if _count_tasks(spec, job) > 1:
            raise ValueError(
                f"a cluster has at most one {job}, this one {_count_tasks(spec, job)}."
            )
    if kind not in ("evaluator", *spec.jobs):
        raise ValueError(f"task_type {kind!r} is not in the cluster; its jobs: {spec.jobs}.")


def describe_misfit(tasks: Sequence[Task], job_size: int) -> str:
    """Return why the names of the ranks do not fit the ranks, or an empty string if they do.

    Args:
      tasks: The task of each rank.
      job_size: How many ranks the whole job has; a strategy may have fewer.

    Example:
      >>> describe_misfit([Task("worker", 0, 2, True), Task("worker", 1, 2)], 2)
      ''
    """
    ranks = group_by_key([str(task) if task.kind else "" for task in tasks], range(len(tasks)))
    shared_names = [
        (name, named_ranks) for name, named_ranks in ranks.items() if name and named_ranks[1:]
    ]
    faults = shorten(
        [f"{ranks_text(named_ranks)} are all called {name}" for name, named_ranks in shared_names]
    )
    counts = sorted({task.worker_count for task in tasks if task.kind in _WORKING_JOBS[:-1]})
    if any(count not in (len(tasks), job_size) for count in counts):
        counts_text = " and ".join(map(str, counts))
        faults.append(f"the cluster has {counts_text} workers, but there are {len(tasks)} ranks")
    chiefs = [
        rank for rank, task in enumerate(tasks) if task.is_chief and task.kind in _WORKING_JOBS[:-1]
    ]
    if chiefs and 0 not in chiefs:
        faults.append(f"rank {chiefs[0]} is called the chief, but rank 0 writes files")
    if not faults:
        return ""
    return (
        f"{'; '.join(faults)}. Names (TF_CONFIG, or a cluster_resolver) do not choose ranks: MPI "
        "does, and extended.should_checkpoint is true on rank 0. Unset TF_CONFIG and give no "
        "resolver to let MPI name the ranks too, or give each rank the name of a task of its own, "
        "in rank order."
    )


@final
class MirroredStrategy(Strategy):
    """All ranks together are one machine: cross-replica code sees the values of every replica.

    Collective: making the first strategy of a communicator duplicates it.

    Args:
      devices: Labels for the replicas, such as ``["GPU:0", "GPU:1"]``. They have no effect: the
        launcher determines the number of ranks. A list of another length warns.
      cross_device_ops: A `CrossDeviceOps` of the program's own, which reduces then. None,
        `NcclAllReduce`, `HierarchicalCopyAllReduce` and `ReductionToOneDevice`: the library's
        algorithm.
      comm: An mpi4py intracommunicator whose ranks are the replicas; None for all of the job's.

    Raises:
      TypeError: `cross_device_ops` is not a `CrossDeviceOps`, or `devices` not a list of labels.
      ValueError: A label appears twice.

    Like: ``tf.distribute.MirroredStrategy``.

    Example:
      >>> import mpistrat as ms
      >>> strategy = ms.MirroredStrategy()
      >>> strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group)
      PerReplica:{
        0: 0
      }
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOpsBase | None = None,
        *,
        comm: object = None,
    ):
        """Create a strategy over all ranks of `comm`."""
        # The group comes first, so that all ranks get the errors of one rank's arguments.
        group = ReplicaGroup.create(GLOBAL_VIEW, comm)
        with group.lockstep.validating_collectively("MirroredStrategy"):
            check_class(
                "cross_device_ops",
                cross_device_ops,
                CrossDeviceOpsBase,
                class_label="CrossDeviceOps",
            )
            labels = _check_labels("devices", devices)
        super().__init__(group, labels)
        with group.lockstep.validating_collectively("MirroredStrategy"):
            self._replicas = group.replace_options(ops=cross_device_ops)
        self._has_pipeline_per_replica = True  # asked for by InputReplicationMode.PER_REPLICA
        _warn_label_count(self, "devices", labels)


class MultiWorkerMirroredStrategy(Strategy):
    """Each rank is a worker of its own: cross-replica code sees this rank's values only.

    Variables are mirrored and reductions are over all ranks, as with `MirroredStrategy`. The
    difference: `Strategy.run`, ``merge_fn`` and `experimental_local_results` give only the value
    of this rank.

    Collective: making the first strategy of a communicator duplicates it.

    Args:
      cluster_resolver: Names this process in the job; None for ``TF_CONFIG`` if that is set, else
        for MPI. The rank always comes from MPI, and rank 0 writes files, whatever the names are.
      communication_options: `CommunicationOptions`: the dtype between nodes, and the timeout of
        all calls of this strategy that wait for other ranks: reductions and gathers, the end of
        `run`, variables, steps of a dataset.
      comm: An mpi4py intracommunicator whose ranks are the workers; None for all of the job's.

    Raises:
      ValueError: `cluster_resolver` or `communication_options` is of another class; ``TF_CONFIG``
        is malformed; or the resolver names no task of a chief, worker or evaluator of its cluster.

    Warns:
      RuntimeWarning: On rank 0: several ranks have the name of one task, there are more or fewer
        workers than ranks, or another rank than 0 is called the chief.

    Like: ``tf.distribute.MultiWorkerMirroredStrategy``.

    Example:
      >>> MultiWorkerMirroredStrategy().cluster_resolver.task_type
      'worker'
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        comm: object = None,
    ):
        """Create a strategy over all ranks of `comm`."""
        self._initialize(cluster_resolver, lambda: communication_options, comm)

    def _initialize(
        self, resolver: Any, choose_options: Callable[[], CommunicationOptions | None], comm: Any
    ) -> None:
        name = "MultiWorkerMirroredStrategy"
        # The group comes first, so that all ranks get the errors of one rank's arguments.
        group = ReplicaGroup.create(LOCAL_VIEW, comm)
        lockstep = group.lockstep
        rank, size = lockstep.comm.rank, lockstep.comm.size
        with lockstep.validating_collectively(name):
            check_class("cluster_resolver", resolver, ClusterResolver, ValueError)
            chosen_options = choose_options()
            check_class("communication_options", chosen_options, CommunicationOptions, ValueError)
            group = group.replace_options(chosen_options)
            cluster_resolver = resolver or default_resolver(rank, size)
            task = read_task(cluster_resolver)
        lockstep.call_seconds = group.options.timeout_seconds
        super().__init__(group, (), cluster_resolver)
        messages = lockstep.gather_payloads(name, json.dumps(task).encode())
        problem = describe_misfit([Task(*json.loads(text)) for text in messages], known_job_size())
        if problem:
            warn(lockstep, name, problem, RuntimeWarning)


@final
class ExperimentalMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy):
    """`MultiWorkerMirroredStrategy` with the older order of arguments.

    Args:
      communication: A `CommunicationImplementation`, or its name.
      cluster_resolver: As there.
      comm: As there.

    Raises:
      ValueError: `communication` or `cluster_resolver` is of another class, or as there.

    Like: ``tf.distribute.experimental.MultiWorkerMirroredStrategy``.
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
        *,
        comm: object = None,
    ):
        """Create a strategy over all ranks of `comm`."""
        self._initialize(
            cluster_resolver,
            lambda: CommunicationOptions(0, None, as_implementation(communication)),
            comm,
        )


@final
class CentralStorageStrategy(Strategy):
    """Each variable is one value that all replicas share; cross-replica code sees all replicas.

    Every rank holds a copy of each variable; the copies are kept equal, so a program sees one
    value. To write it in replica code, give it an aggregation, or write the same value on all
    replicas. This does not hold for ON_READ variables: each replica has its own, as under
    `MirroredStrategy`.

    Collective: making the first strategy of a communicator duplicates it.

    Args:
      compute_devices: Labels for the replicas, as the devices of `MirroredStrategy`; a list of
        another length than there are ranks warns.
      parameter_device: The label of the device of the variables; None for the first replica's.
      comm: An mpi4py intracommunicator whose ranks are the replicas; None for all of the job's.

    Raises:
      TypeError: `compute_devices` is not a list of labels.
      ValueError: A label appears twice.

    Like: ``tf.distribute.experimental.CentralStorageStrategy``.

    Example:
      >>> import mpistrat as ms
      >>> strategy = CentralStorageStrategy()
      >>> with strategy.scope():
      ...     v = ms.Variable(1.0, aggregation=ms.VariableAggregation.SUM)
      >>> _ = strategy.run(lambda: v.assign_add(2.0))
      >>> float(v.numpy())
      3.0
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        comm: object = None,
    ):
        """Create a strategy over all ranks of `comm`."""
        group = ReplicaGroup.create(GLOBAL_VIEW, comm)
        with group.lockstep.validating_collectively("CentralStorageStrategy"):
            labels = _check_labels("compute_devices", compute_devices)
        super().__init__(group, labels)
        self._parameter_device = parameter_device or self._device_labels[0]
        _warn_label_count(self, "compute_devices", labels)


@final
class OneDeviceStrategy(Strategy):
    """A strategy with one replica: each process has its own. It never communicates.

    Args:
      device: The label of its device.

    Like: ``tf.distribute.OneDeviceStrategy``.

    Example:
      >>> OneDeviceStrategy("cpu").num_replicas_in_sync
      1
    """

    def __init__(self, device: str):
        """Create a strategy of one replica."""
        super().__init__(ReplicaGroup.create(SINGLE_REPLICA), (device,))


@final
class DefaultStrategy(Strategy):
    """The strategy where no other is in scope: one replica, no communication."""

    _is_default = True

    def __init__(self) -> None:
        """Create the strategy; programs get it from `get_strategy`."""
        super().__init__(ReplicaGroup.create(SINGLE_REPLICA))


def _check_labels(name: str, labels: Any) -> tuple[str, ...]:
    """Return the labels of the replicas that a program gave, if they can be labels."""
    if labels is None:
        return ()
    is_list = isinstance(labels, Sequence) and not isinstance(labels, str)
    if not is_list or not all(isinstance(label, str) for label in labels):
        raise TypeError(f"{name} must be a list of labels, not {labels!r:.80}.")
    if len(set(labels)) != len(labels):
        raise ValueError(f"{name} must be different labels, got {list(labels)}.")
    return tuple(labels)


def _warn_label_count(strategy: Strategy, label_noun: str, labels: tuple[str, ...]) -> None:
    """Warn if there are not as many labels as ranks."""
    lockstep, name = strategy._replicas.lockstep, type(strategy).__name__
    if not labels or len(labels) == lockstep.comm.size:
        return
    text = (
        f"{name} was given {len(labels)} {label_noun}, {list(labels)}, but this job has "
        f"{lockstep.comm.size} ranks, and one rank is one replica. Start that many: "
        f"mpistrat run -n {len(labels)} program.py"
    )
    warn(lockstep, f"{name}({list(labels)})", text)


class _ThreadDefault(threading.local):
    strategy: Strategy | None = None


# One per thread: it never communicates, but it remembers whether a run has failed.
_thread_default = _ThreadDefault()


def default_strategy() -> Strategy:
    """Return the default strategy of this thread: one replica, no communication."""
    if _thread_default.strategy is None:
        _thread_default.strategy = DefaultStrategy()
    return _thread_default.strategy


def current_strategy() -> Strategy:
    """Return the current strategy: that of the innermost scope or run, or the default one."""
    context = current_context()
    return default_strategy() if context is None else cast("Strategy", context.strategy)


def resolve_strategy(strategy: object, call: str, *remedy: str) -> Any:
    """Return the strategy that a call was given, or else the current one.

    Args:
      strategy: The argument of the call; None for the current one.
      call: The call.
      *remedy: The advice where none is in scope; see `require_chosen_strategy`.

    Raises:
      TypeError: It was given something else than a strategy, such as the class of one.
      ContextError: No strategy is in scope, in a job of several ranks.
    """
    ruling_strategy = current_strategy() if strategy is None else strategy
    if not isinstance(ruling_strategy, Strategy):
        raise TypeError(
            f"{call}: expected a strategy, such as MirroredStrategy(), got {ruling_strategy!r:.60}."
        )
    if ruling_strategy is default_strategy():
        require_chosen_strategy(call, *remedy)
    return ruling_strategy
