"""Slurm's environment: steps without GPUs, hosts in Slurm's order, and what does not fit.

What tf.distribute's own resolver gave is compared in tests/golden.
"""

from __future__ import annotations

import pytest

from mpistrat.cluster_resolver import SlurmClusterResolver, TFConfigClusterResolver, tf_config

# As `srun -N 2 -n 6 env` prints it on a cluster without GPUs.
CPU_ONLY = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "cpu[9-10]",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
}
SIX = [f"cpu{node}:{port}" for node in (9, 10) for port in (8888, 8889, 8890)]


def step(**more):
    return {**CPU_ONLY, **{f"SLURM_{name}": str(value) for name, value in more.items()}}


@pytest.mark.parametrize("auto_set_gpu", [True, False])
@pytest.mark.parametrize("given", [{}, {"gpus_per_node": 0}, {"gpus_per_task": 0}], ids=str)
def test_a_step_without_gpus(given, auto_set_gpu):
    env = step()
    resolver = SlurmClusterResolver(env=env, auto_set_gpu=auto_set_gpu, **given)
    assert resolver.cluster_spec().as_dict() == {"worker": SIX}
    assert resolver.get_task_info() == ("worker", 4)
    assert resolver.num_accelerators() == {"GPU": 0}
    assert resolver.master() == "grpc://cpu10:8889"
    assert env == step()


@pytest.mark.parametrize("rank", range(6))
def test_every_rank_is_on_its_own_host(rank):
    resolver = SlurmClusterResolver({"ps": 2, "worker": 4}, env=step(PROCID=rank))
    spec = resolver.cluster_spec()
    assert spec.as_dict() == {"ps": SIX[:2], "worker": SIX[2:]}
    assert spec.task_address(*resolver.get_task_info()) == SIX[rank]


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_devices_that_are_hidden_are_none(visible):
    env = {**step(), "CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": "8"}
    resolver = SlurmClusterResolver(env=env)
    resolver.cluster_spec()
    assert resolver.num_accelerators() == {"GPU": 0}
    assert env["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize(
    ("rank", "gpus", "visible"), [(0, 6, "0,1"), (1, 6, "2,3"), (5, 6, "4,5"), (4, 8, "2,3")]
)
def test_gpus_are_shared_out(rank, gpus, visible):
    env = step(PROCID=rank, GPUS_ON_NODE=gpus)
    resolver = SlurmClusterResolver(env=env)
    assert "CUDA_VISIBLE_DEVICES" not in env
    resolver.cluster_spec()
    resolver.cluster_spec()
    assert env["CUDA_VISIBLE_DEVICES"] == visible
    assert resolver.num_accelerators() == {"GPU": 2}


def test_tasks_per_node_as_a_dict():
    env = step(PROCID=0)
    resolver = SlurmClusterResolver({"w": 3}, tasks_per_node={"cpu10": 2, "cpu9": 1}, env=env)
    assert resolver.cluster_spec().as_dict() == {"w": ["cpu9:8888", "cpu10:8888", "cpu10:8889"]}
    elsewhere = SlurmClusterResolver({"w": 2}, tasks_per_node={"z": 1, "a": 1}, env=env)
    assert elsewhere.cluster_spec().as_dict() == {"w": ["a:8888", "z:8888"]}


@pytest.mark.parametrize("given", [{"rpc_layer": None}, {"rpc_layer": "http"}])
def test_the_layer(given):
    resolver = SlurmClusterResolver(env=step(), **given)
    resolver.cluster_spec()
    layer = given["rpc_layer"]
    assert resolver.master() == (f"{layer}://" if layer else "") + "cpu10:8889"
    assert resolver.master("worker", 0, "x") == "x://cpu9:8888"


@pytest.mark.parametrize(
    "missing", ["PROCID", "STEP_NUM_TASKS", "STEP_NODELIST", "STEP_TASKS_PER_NODE"]
)
def test_outside_of_a_step(missing):
    env = step()
    del env[f"SLURM_{missing}"]
    with pytest.raises(RuntimeError, match=f"SLURM_{missing} is not set.*srun"):
        SlurmClusterResolver(env=env)


@pytest.mark.parametrize(
    ("more", "given", "error", "text"),
    [
        ({}, {"jobs": {"w": 3}}, RuntimeError, "need 3 tasks, but there are 6"),
        ({}, {"gpus_per_node": 4, "gpus_per_task": 2}, RuntimeError, "more than the 4"),
        ({}, {"gpus_per_task": 1}, RuntimeError, "more than the 0"),
        ({}, {"jobs": {"w": 2}, "tasks_per_node": 1}, RuntimeError, "rank 4 of the step"),
        ({"STEP_TASKS_PER_NODE": "6"}, {}, RuntimeError, "2 nodes, but task counts for 1"),
        (
            {},
            {"jobs": {"a": -1, "w": 7}},
            ValueError,
            r"jobs\['a'\] must be an integer of at least 0, got -1",
        ),
        ({}, {"gpus_per_task": -1}, ValueError, "gpus_per_task must be an integer of at least 0"),
        ({}, {"gpus_per_node": -1}, ValueError, "of at least 0, got -1"),
        ({"STEP_NODELIST": "n[1-"}, {}, ValueError, "not a list of hosts"),
    ],
)
def test_what_does_not_fit(more, given, error, text):
    with pytest.raises(error, match=text):
        SlurmClusterResolver(env=step(**more), **given)


def test_the_environment_of_the_process(monkeypatch):
    for name, text in step().items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec().num_tasks("worker") == 6
    assert resolver.num_accelerators() == {"GPU": 1}


def test_a_tf_config_from_slurm():
    env = {"TF_CONFIG": tf_config(SlurmClusterResolver(env=step()))}
    read = TFConfigClusterResolver(env=env)
    assert (read.task_type, read.task_id, read.rpc_layer) == ("worker", 4, "grpc")
    assert read.cluster_spec().as_dict() == {"worker": SIX}


@pytest.mark.parametrize(
    ("more", "given", "error", "name"),
    [
        ({}, {"jobs": ["worker"]}, TypeError, "jobs"),
        ({}, {"jobs": {"worker": "6"}}, TypeError, "jobs"),
        ({}, {"jobs": {"worker": -6}}, ValueError, "jobs"),
        ({}, {"tasks_per_node": "3"}, TypeError, "tasks_per_node"),
        ({}, {"tasks_per_node": {"cpu9": 2.5}}, TypeError, "tasks_per_node"),
        ({}, {"port_base": 70000}, ValueError, "port_base"),
        ({}, {"port_base": 65534}, ValueError, "port_base"),
        ({}, {"port_base": 0}, ValueError, "port_base"),
        ({}, {"port_base": "8888"}, TypeError, "port_base"),
        ({"PROCID": "x"}, {}, ValueError, "SLURM_PROCID"),
        ({"PROCID": "-1"}, {}, ValueError, "SLURM_PROCID"),
        ({"STEP_NUM_TASKS": "six"}, {}, ValueError, "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_what_is_no_number_is_named(more, given, error, name):
    with pytest.raises(error, match=name):
        SlurmClusterResolver(env=step(**more), **given)
    SlurmClusterResolver(env=step(), port_base=65533)


@pytest.mark.parametrize(
    ("more", "given", "text"),
    [
        ({"STEP_NODELIST": "n[1-9999999999]"}, {}, "more than 65536 hosts"),
        ({"STEP_TASKS_PER_NODE": "1(x9999999999)"}, {}, "more than 65536 nodes"),
        ({"STEP_TASKS_PER_NODE": "9999999999(x2)"}, {}, "must leave 9999999999 ports"),
        (
            {
                "STEP_NODELIST": "n[1-65536]",
                "STEP_TASKS_PER_NODE": "50000(x65536)",
                "STEP_NUM_TASKS": "3276800000",
            },
            {},
            "describe 3276800000 tasks, more than",
        ),
        ({"STEP_NUM_TASKS": "9" * 5000}, {}, "SLURM_STEP_NUM_TASKS must be a number"),
        ({"PROCID": "9" * 5000}, {}, "SLURM_PROCID must be a number"),
        ({"GPUS_ON_NODE": "9999999999"}, {}, "no node has 9999999999 GPUs"),
        ({}, {"gpus_per_node": 10**12}, "no node has 1000000000000 GPUs"),
        ({}, {"tasks_per_node": 10**12}, "ports"),
    ],
)
def test_numbers_beyond_any_machine_are_refused_before_memory_is_taken(more, given, text):
    with pytest.raises(ValueError, match=text):
        SlurmClusterResolver(env=step(**more), **given)


def test_digits_that_are_none_count_no_gpus():
    for text in ("\u00b2", "9" * 5000):
        assert SlurmClusterResolver(env=step(GPUS_ON_NODE=text)).num_accelerators() == {"GPU": 0}
