"""TF_CONFIG of every rank of a job, on thread ranks."""

from __future__ import annotations

import json
import socket

import pytest

from mpistrat.cluster_resolver import (
    ClusterSpec,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    tf_config,
    write_tf_config,
)
from mpistrat.errors import LockstepError
from mpistrat.testing import RanksFailed, run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_is_a_worker_of_one_cluster(size):
    def rank(comm):
        env = {}
        text = write_tf_config(port_base=7000, env=env)
        assert env == {"TF_CONFIG": text}
        return TFConfigClusterResolver(env=env)

    here = socket.gethostname()
    everyone = {"worker": [f"{here}:{7000 + r}" for r in range(size)]}
    for r, read in enumerate(run_ranks(rank, size)):
        assert (read.task_type, read.task_id) == ("worker", r)
        assert read.cluster_spec().as_dict() == everyone


def test_hosts_and_jobs():
    def rank(comm):
        host = ["x", "y" * 300][comm.rank // 2]  # longer than what is sent with a handshake
        return json.loads(tf_config(jobs={"chief": 1, "worker": 3}, host=host))

    long = "y" * 300
    workers = ["x:8889", f"{long}:8888", f"{long}:8889"]
    found = run_ranks(rank, 4)
    assert all(one["cluster"] == {"chief": ["x:8888"], "worker": workers} for one in found)
    tasks = [(one["task"]["type"], one["task"]["index"]) for one in found]
    assert tasks == [("chief", 0), ("worker", 0), ("worker", 1), ("worker", 2)]


def test_a_resolver_answers_without_communication():
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})

    def rank(comm):
        if comm.rank:
            return None
        return tf_config(SimpleClusterResolver(spec, task_type="worker", task_id=1))

    text, nothing = run_ranks(rank, 2)
    assert json.loads(text)["task"] == {"type": "worker", "index": 1}
    assert nothing is None


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda rank: tf_config(port_base=7000 + rank), LockstepError),
        (lambda rank: tf_config(jobs={"worker": 2} if rank else None), LockstepError),
        (lambda rank: tf_config(jobs={"worker": 3}), ValueError),
        (lambda rank: tf_config(port_base=65535), ValueError),
        (lambda rank: tf_config(host=5 if rank else None), AttributeError),
    ],
)
def test_every_rank_is_told_what_is_wrong(ask, error):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(lambda comm: ask(comm.rank), 2)
    assert set(failed.value.errors) == {0, 1}
    assert all(isinstance(found, error) for found in failed.value.errors.values())


@pytest.mark.parametrize("given", ["a", 8000.0, None, True])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_port_that_is_none_is_told_on_every_rank(given, everywhere):
    def rank(comm):
        with pytest.raises(TypeError) as caught:
            tf_config(port_base=given if everywhere or comm.rank else 8888)
        return str(caught.value)

    wanted = f"tf_config: port_base must be an integer, got {given!r} ({type(given).__name__})."
    for said in run_ranks(rank, 2):
        assert wanted in said


def test_nothing_is_set_if_it_fails():
    def rank(comm):
        env = {}
        with pytest.raises(ValueError, match="add up to"):
            write_tf_config(jobs={"worker": 1}, env=env)
        return env

    assert run_ranks(rank, 2) == [{}, {}]
