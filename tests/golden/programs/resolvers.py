"""Cluster resolvers: environments and clients are arguments here."""

from __future__ import annotations

import json
from types import SimpleNamespace

from mpistrat import cluster_resolver as C
from mpistrat.cluster.allocation import expand_hostlist, expand_tasks_per_node
from mpistrat.cluster.resolver import ClusterSpec

from ..recorder import Recorder

WORKERS = {
    "cluster": {"worker": ["h0:1", "h1:2"], "ps": ["p0:3"]},
    "task": {"type": "worker", "index": 1},
    "rpc_layer": "grpc",
}


def tf_config(r):
    def resolver(text, **given):
        env = {} if text is None else {"TF_CONFIG": text}
        return C.TFConfigClusterResolver(env=env, **given)

    t = resolver(json.dumps(WORKERS))
    r(
        "tfconfig",
        lambda: {
            "spec": t.cluster_spec().as_dict(),
            "type": t.task_type,
            "id": t.task_id,
            "rpc": t.rpc_layer,
            "master": t.master(),
            "master_ps0": t.master("ps", 0),
            "master_rpc": t.master("ps", 0, "http"),
            "env": t.environment,
        },
    )
    r("tfconfig_master_bad_task", lambda: t.master("worker", 9))
    r("tfconfig_master_bad_job", lambda: t.master("zzz", 0))
    t2 = resolver(json.dumps(WORKERS), task_type="ps", task_id="0", rpc_layer="x")
    r("tfconfig_override", lambda: (t2.task_type, t2.task_id, t2.rpc_layer, t2.master()))
    single = {"cluster": {"worker": ["h0:1"]}, "task": {"type": "worker", "index": 0}}
    r("tfconfig_single_job_single_task_master", lambda: resolver(json.dumps(single)).master())
    session = {"session_master": "sm://x", "cluster": {"worker": ["a", "b"]}}
    r("tfconfig_session_master", lambda: resolver(json.dumps(session)).master())
    e = resolver("{}")
    r("tfconfig_empty", lambda: (e.cluster_spec().as_dict(), e.task_type, e.task_id, e.master()))
    u = resolver(None)
    r("tfconfig_unset", lambda: (u.cluster_spec().as_dict(), u.task_id))
    r("tfconfig_bad_json", lambda: resolver("not json").cluster_spec())


def simple(r):
    a = C.SimpleClusterResolver(
        ClusterSpec({"worker": ["w0:1", "w1:2"], "ps": ["p0:1"]}),
        task_type="worker",
        task_id=1,
        num_accelerators={"GPU": 8},
        rpc_layer="grpc",
        environment="e",
    )
    r(
        "simple",
        lambda: {
            "spec": a.cluster_spec().as_dict(),
            "type": a.task_type,
            "id": a.task_id,
            "master": a.master(),
            "master_w0": a.master("worker", 0),
            "rpc_arg": a.master("worker", 0, "x"),
            "acc": a.num_accelerators(),
            "env": a.environment,
        },
    )
    r("simple_bad_spec", lambda: C.SimpleClusterResolver({"worker": ["a"]}))
    r("simple_bad_master", lambda: C.SimpleClusterResolver(ClusterSpec({}), master=3))
    r("simple_default_accelerators", lambda: of({"worker": ["a"]}).num_accelerators())
    return a


def of(cluster):
    return C.SimpleClusterResolver(ClusterSpec(cluster))


def union(r, a):
    def cluster(*resolvers):
        return C.UnionResolver(*resolvers).cluster_spec().as_dict()

    b = of({"worker": ["w2:3"]})
    r("union_lists", lambda: cluster(a, b))
    u = C.UnionResolver(a, b)
    r(
        "union_props",
        lambda: (
            u.task_type,
            u.task_id,
            u.master(),
            u.master("worker", 2),
            u.rpc_layer,
            u.environment,
            u.num_accelerators(),
        ),
    )
    v = C.UnionResolver(a, b, task_type="q", task_id=7, rpc_layer="zz")
    r("union_override", lambda: (v.task_type, v.task_id, v.rpc_layer))
    d1 = of({"worker": {0: "x:1", 3: "y:1"}})
    d2 = of({"worker": {1: "z:1"}})
    d3 = of({"worker": {3: "q:1"}})
    r("union_dicts", lambda: cluster(d1, d2))
    r("union_dup", lambda: cluster(d1, d3))
    r("union_list_and_dict", lambda: cluster(b, d2))
    r("union_none", lambda: C.UnionResolver())
    r("union_bad", lambda: C.UnionResolver(3))
    r("union_kwargs", lambda: C.UnionResolver(a, foo=1))


STEP = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_STEP_NODELIST": "t02n[13,41,43]",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}


def slurm(r):
    def answers(env=STEP, **given):
        env = dict(env)
        q = C.SlurmClusterResolver(env=env, **given)
        return {
            "spec": q.cluster_spec().as_dict(),
            "info": q.get_task_info(),
            "master": q.master(),
            "master_w0": q.master("worker", 0),
            "acc": q.num_accelerators(),
            "cuda": env.get("CUDA_VISIBLE_DEVICES"),
        }

    four = {"gpus_per_node": 4, "gpus_per_task": 1}
    by_hand = {**four, "auto_set_gpu": False}
    none = {"gpus_per_node": 0, "gpus_per_task": 0}
    small = {"jobs": {"worker": 6}, "tasks_per_node": 2, "gpus_per_node": 2, "gpus_per_task": 1}
    r("slurm_default", lambda: answers(auto_set_gpu=False))
    r("slurm_jobs", lambda: answers(jobs={"ps": 1, "worker": 9}, port_base=7000, **four))
    r("slurm_tasks_per_node_int", lambda: answers(**small, auto_set_gpu=False))
    r("slurm_too_many_gpus", lambda: answers(gpus_per_node=2, gpus_per_task=4, auto_set_gpu=False))
    r("slurm_task_count_mismatch", lambda: answers(jobs={"worker": 3}, **by_hand))
    r("slurm_no_gpu", lambda: answers(**none, auto_set_gpu=False))
    r(
        "slurm_master_before_spec",
        lambda: C.SlurmClusterResolver(env=dict(STEP), **by_hand).master(),
    )
    nowhere = {name: text for name, text in STEP.items() if name != "SLURM_PROCID"}
    r("slurm_no_env", lambda: answers(nowhere, auto_set_gpu=False))
    lists = ("n1", "n[1-2],m5,o[3-4,6,7-9]", "t02n13,t02n41", "a[001-003]", "")
    r("expand_hostlist", lambda: [expand_hostlist(text) for text in lists])
    r("expand_hostlist_bad", lambda: expand_hostlist("n[1-2"))
    counts = ("2", "3(x2),2,1", "2(x3)")
    r("expand_tasks_per_node", lambda: [expand_tasks_per_node(text) for text in counts])
    r("expand_tasks_per_node_bad", lambda: expand_tasks_per_node("a"))


def pod(name, phase, ip):
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name), status=SimpleNamespace(phase=phase, host_ip=ip)
    )


class Pods:
    """A client of Kubernetes that knows these pods by their labels."""

    def __init__(self, pods):
        self.pods = pods

    def list_pod_for_all_namespaces(self, label_selector=None):
        return SimpleNamespace(items=self.pods.get(label_selector, []))


def clouds(r):
    k = C.KubernetesClusterResolver
    label = "job-name=tensorflow"
    two = [pod("b", "Running", "10.0.0.2"), pod("a", "Running", "10.0.0.1")]
    running = Pods({label: two})

    def answers():
        q = k(override_client=running)
        return (
            q.cluster_spec().as_dict(),
            q.master(),
            q.master("worker", 0),
            q.master("worker", 1, "http"),
            q.task_type,
        )

    r("k8s", answers)
    labels = {"worker": ["w"], "ps": ["p1", "p2"]}
    each = Pods(
        {
            "w": [pod("x", "Running", "1.1.1.1")],
            "p1": [pod("y", "Running", "2.2.2.2")],
            "p2": [pod("z", "Running", "3.3.3.3")],
        }
    )
    r("k8s_jobs", lambda: k(labels, 99, override_client=each).cluster_spec().as_dict())
    failed = Pods({label: [pod("a", "Failed", "1")]})
    r("k8s_not_running", lambda: k(override_client=failed).cluster_spec())
    r("k8s_no_client", lambda: k())
    r(
        "k8s_locations",
        lambda: [(place.name, place.value) for place in C.KubernetesExecutableLocation],
    )
    r("gce_no_client", lambda: C.GCEClusterResolver("p", "z", "g", 8470))


def specs(r):
    r("clusterspec_bad", lambda: ClusterSpec(3))
    r(
        "clusterspec_sparse",
        lambda: (
            ClusterSpec({"worker": {1: "w1:1"}}).as_dict(),
            ClusterSpec({"worker": ["a", "b"]}).num_tasks("worker"),
            ClusterSpec({"worker": {1: "w"}}).job_tasks("worker"),
            ClusterSpec({"w": ["a"]}).jobs,
            bool(ClusterSpec({})),
            ClusterSpec({"w": {0: "a", 1: "b"}}).as_dict(),
        ),
    )
    r("clusterspec_num_tasks_bad", lambda: ClusterSpec({}).num_tasks("x"))
    r("clusterspec_address_bad", lambda: ClusterSpec({"w": ["a"]}).task_address("w", 3))
    r("base_is_abstract", lambda: C.ClusterResolver())


def cluster_resolvers(s, n, comm):
    r = Recorder(s, comm)
    tf_config(r)
    union(r, simple(r))
    slurm(r)
    clouds(r)
    specs(r)
    return r


PROGRAMS = (cluster_resolvers,)
