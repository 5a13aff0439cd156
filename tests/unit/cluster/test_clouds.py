"""Kubernetes and Compute Engine, with clients that the test brings along."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mpistrat.cluster_resolver import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)


class Pods:
    """A client of Kubernetes."""

    def __init__(self, pods):
        self.pods = pods
        self.asked = []

    def list_pod_for_all_namespaces(self, label_selector=None):
        self.asked.append(label_selector)
        return SimpleNamespace(
            items=[
                SimpleNamespace(
                    metadata=SimpleNamespace(name=name),
                    status=SimpleNamespace(phase=phase, host_ip=ip),
                )
                for name, phase, ip in self.pods.get(label_selector, ())
            ]
        )


def test_pods_are_asked_for_at_each_question():
    client = Pods({"w": [("a", "Running", "1.1.1.1")]})
    resolver = KubernetesClusterResolver({"worker": ["w"]}, 99, None, client)
    assert client.asked == []
    assert resolver.master("worker", 0) == "1.1.1.1:99"
    client.pods["w"].insert(0, ("b", "Running", "2.2.2.2"))
    assert resolver.cluster_spec().as_dict() == {"worker": ["1.1.1.1:99", "2.2.2.2:99"]}
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "2.2.2.2:99"
    client.pods["w"].append(("c", "Pending", None))
    with pytest.raises(RuntimeError, match=r"'c' \(w\) should be running.*'Pending'"):
        resolver.cluster_spec()
    assert set(client.asked) == {"w"}


def test_no_pods():
    resolver = KubernetesClusterResolver(override_client=Pods({}))
    assert resolver.cluster_spec().as_dict() == {"worker": []}
    assert resolver.num_accelerators() == {}


@pytest.mark.parametrize(
    ("location", "loaded"),
    [
        (KubernetesExecutableLocation.WITHIN_CLUSTER, "incluster"),
        (KubernetesExecutableLocation.OFF_CLUSTER, "kube"),
    ],
)
def test_a_client_of_the_package(location, loaded, monkeypatch):
    client, calls = Pods({"job-name=tensorflow": [("a", "Running", "1.1.1.1")]}), []
    package = SimpleNamespace(
        config=SimpleNamespace(
            load_incluster_config=lambda: calls.append("incluster"),
            load_kube_config=lambda: calls.append("kube"),
        ),
        client=SimpleNamespace(CoreV1Api=lambda: client),
    )
    monkeypatch.setitem(sys.modules, "kubernetes", package)
    resolver = KubernetesClusterResolver(executable_location=location)
    assert calls == [loaded]
    assert resolver.cluster_spec().as_dict() == {"worker": ["1.1.1.1:8470"]}
    with pytest.raises(ValueError, match="7"):
        KubernetesClusterResolver(executable_location=7)


def test_without_the_packages(monkeypatch):
    for name in ("kubernetes", "googleapiclient", "googleapiclient.discovery"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"override_client.*pip install kubernetes"):
        KubernetesClusterResolver()
    with pytest.raises(ImportError, match=r"service.*pip install google-api-python-client"):
        GCEClusterResolver("p", "z", "g", 1)


class Answer(SimpleNamespace):
    """A request of Compute Engine."""

    def execute(self):
        return self.answer


class Compute:
    """A service of Compute Engine that gives two instances a page."""

    def __init__(self, addresses):
        self.addresses = addresses
        self.bodies = []

    def instanceGroups(self):  # the service's name for it
        return self

    def instances(self):
        return SimpleNamespace(get=self._get)

    def listInstances(self, *, project, zone, instanceGroup, body, orderBy):
        assert (project, zone, instanceGroup, orderBy) == ("p", "z", "g", "name")
        self.bodies.append(body)
        return self._page(0)

    def listInstances_next(self, *, previous_request, previous_response):
        return self._page(previous_request.start + 2)

    def _page(self, start):
        names = list(self.addresses)[start : start + 2]
        if start and not names:
            return None
        items = [{"instance": f"https://host/p/z/{name}"} for name in names]
        return Answer(start=start, answer={"items": items} if items else {})

    def _get(self, *, project, zone, instance):
        assert (project, zone) == ("p", "z")
        return Answer(answer={"networkInterfaces": [{"networkIP": self.addresses[instance]}]})


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5])
def test_instances_of_all_pages(size):
    service = Compute({f"i{n}": f"10.0.0.{9 - n}" for n in range(size)})
    resolver = GCEClusterResolver("p", "z", "g", 8470, service=service)
    wanted = [f"10.0.0.{n}:8470" for n in range(10 - size, 10)]
    assert resolver.cluster_spec().as_dict() == {"worker": wanted}
    assert service.bodies == [{"instanceState": "RUNNING"}]


def test_the_job_of_instances_is_fixed():
    service = Compute({"a": "10.0.0.1", "b": "10.0.0.2"})
    resolver = GCEClusterResolver("p", "z", "g", 1, "ps", 1, service=service)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 1, "grpc")
    assert resolver.master() == "grpc://10.0.0.2:1"
    resolver.task_id = 0
    resolver.rpc_layer = None
    assert resolver.master() == "10.0.0.1:1"
    assert resolver.master("ps", 1, "http") == "http://10.0.0.2:1"
    with pytest.raises(RuntimeError, match="'ps' and cannot be changed"):
        resolver.task_type = "worker"


@pytest.mark.parametrize(("given", "handed"), [({}, None), ({"credentials": "mine"}, "mine")])
def test_a_service_of_the_package(given, handed, monkeypatch):
    calls = []

    def build(name, version, credentials):
        calls.append((name, version, credentials))
        return Compute({"a": "10.0.0.1"})

    monkeypatch.setitem(sys.modules, "googleapiclient", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", SimpleNamespace(build=build))
    resolver = GCEClusterResolver("p", "z", "g", 1, **given)
    assert calls == [("compute", "v1", handed)]
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:1"]}


@pytest.mark.parametrize("labels", [{"worker": "job=x"}, ["worker"], "worker", {"worker": None}])
def test_labels_come_in_lists(labels):
    with pytest.raises(TypeError, match=r"job_to_label_mapping must be a dict .* list of labels"):
        KubernetesClusterResolver(labels, override_client=object())
