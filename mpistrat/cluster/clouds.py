"""Resolvers that ask a cloud: Kubernetes, and Google Compute Engine.

The client is an argument: any object with the few methods that are called here.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from mpistrat.cluster.resolver import ClusterSpec, TaskResolver

_DEFAULT_JOBS = {"worker": ["job-name=tensorflow"]}


@final
class KubernetesExecutableLocation(enum.Enum):
    """Where the program runs: inside of the Kubernetes cluster, or outside.

    Like: ``tf.distribute.cluster_resolver.KubernetesExecutableLocation``.
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


@final
class KubernetesClusterResolver(TaskResolver):
    """One task for each pod with a given label; Kubernetes is asked at each call.

    Args:
      job_to_label_mapping: Labels of the pods of each job; None for one job ``worker`` of the pods
        ``job-name=tensorflow``.
      tf_server_port: The port of every task.
      rpc_layer: The protocol to put before every address.
      override_client: Has ``list_pod_for_all_namespaces(label_selector=...)``, as
        ``kubernetes.client.CoreV1Api`` has; None to make one from the package ``kubernetes``.
      executable_location: Decides which configuration a client made here loads.

    Raises:
      TypeError: `job_to_label_mapping` is not a dict of lists.
      ImportError: No client is given, and the package ``kubernetes`` is not installed.

    Like: ``tf.distribute.cluster_resolver.KubernetesClusterResolver``.

    Example:
      >>> from types import SimpleNamespace as Thing
      >>> status = Thing(phase="Running", host_ip="10.0.0.1")
      >>> pods = Thing(items=[Thing(metadata=Thing(name="a"), status=status)])
      >>> client = Thing(list_pod_for_all_namespaces=lambda label_selector: pods)
      >>> KubernetesClusterResolver(override_client=client).master("worker", 0)
      'grpc://10.0.0.1:8470'
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = (
            KubernetesExecutableLocation.WITHIN_CLUSTER
        ),
    ):
        """Create a resolver, and a client if none is given."""
        self._labels = job_to_label_mapping or _DEFAULT_JOBS
        if not isinstance(self._labels, Mapping) or any(
            isinstance(labels, str) or not isinstance(labels, Sequence)
            for labels in self._labels.values()
        ):
            raise TypeError(
                "job_to_label_mapping must be a dict from each job to a list of labels, such as "
                f"{_DEFAULT_JOBS}, got {job_to_label_mapping!r:.80}."
            )
        self._port = tf_server_port
        self.rpc_layer = rpc_layer
        self._client = override_client or _create_kubernetes_client(executable_location)

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of the pods of each job, in the order of labels and names.

        Raises:
          RuntimeError: A pod is not running.
        """
        return ClusterSpec(
            {
                job: [address for label in labels for address in self._find_pods(label)]
                for job, labels in self._labels.items()
            }
        )

    def _find_pods(self, label: str) -> Iterator[str]:
        pod_list = self._client.list_pod_for_all_namespaces(label_selector=label)
        for pod in sorted(pod_list.items, key=lambda pod: str(pod.metadata.name)):
            if pod.status.phase != "Running":
                raise RuntimeError(
                    f"the pod {pod.metadata.name!r} ({label}) should be running, but its phase is "
                    f"{pod.status.phase!r}; wait until all pods run."
                )
            yield f"{pod.status.host_ip}:{self._port}"


@final
class GCEClusterResolver(TaskResolver):
    """One task for each running instance of a group; Compute Engine is asked at each call.

    Args:
      project: The project of the group.
      zone: The zone of the group.
      instance_group: The name of the group.
      port: The port of every task.
      task_type: The job of all instances. It cannot be set later.
      task_id: Which task this process is.
      rpc_layer: The protocol to put before every address.
      credentials: For a service made here; ``"default"`` for those of the application.
      service: Has ``instanceGroups()`` and ``instances()``, as
        ``googleapiclient.discovery.build("compute", "v1")`` has; None to make one with it.

    Raises:
      ImportError: No service is given, and ``google-api-python-client`` is not installed.

    Like: ``tf.distribute.cluster_resolver.GCEClusterResolver``.
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ):
        """Create a resolver, and a service if none is given."""
        self._location = {"project": project, "zone": zone}
        self._group = instance_group
        self._port = port
        self._job = task_type
        self._task_id = task_id
        self.rpc_layer = rpc_layer
        self._service = service or _create_compute_service(credentials)

    def cluster_spec(self) -> ClusterSpec:
        """Return one job with the addresses of the running instances, sorted."""
        return ClusterSpec({self._job: sorted(self._find_addresses())})

    def _find_addresses(self) -> Iterator[str]:
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            **self._location,
            instanceGroup=self._group,
            body={"instanceState": "RUNNING"},
            orderBy="name",
        )
        while request is not None:
            page = request.execute()
            for instance_entry in page.get("items", ()):
                name = instance_entry["instance"].rsplit("/", 1)[-1]
                instance = self._service.instances().get(**self._location, instance=name).execute()
                yield f"{instance['networkInterfaces'][0]['networkIP']}:{self._port}"
            request = groups.listInstances_next(previous_request=request, previous_response=page)

    @property
    def task_type(self) -> str | None:
        """The job of all instances; setting it raises a RuntimeError."""
        return self._job

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise RuntimeError(
            f"the task_type of this GCEClusterResolver is {self._job!r} and cannot be changed; "
            f"make another one for {task_type!r}."
        )


def _create_kubernetes_client(location: KubernetesExecutableLocation) -> Any:
    kubernetes = _import_package("kubernetes", "kubernetes", "KubernetesClusterResolver", "client")
    if KubernetesExecutableLocation(location) is KubernetesExecutableLocation.OFF_CLUSTER:
        kubernetes.config.load_kube_config()
    else:
        kubernetes.config.load_incluster_config()
    return kubernetes.client.CoreV1Api()


def _create_compute_service(credentials: Any) -> Any:
    name = "google-api-python-client"
    discovery = _import_package("googleapiclient.discovery", name, "GCEClusterResolver", "service")
    explicit_credentials = None if credentials == "default" else credentials
    return discovery.build("compute", "v1", credentials=explicit_credentials)


def _import_package(module: str, package: str, resolver: str, argument: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        argument_name = "override_client" if argument == "client" else argument
        raise ImportError(
            f"{resolver} needs a {argument}: give one as {argument_name}, or pip install {package}"
        ) from error
