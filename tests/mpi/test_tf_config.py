"""TF_CONFIG of every rank, under a launcher: what a TensorFlow program started by it would read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import mpistrat as ms
from mpistrat.cluster_resolver import (
    MPIClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
    tf_config,
    write_tf_config,
)


def test_it_is_read_back_by_this_process_and_its_children(world, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "")  # so that it is put back
    text = write_tf_config(port_base=9100)
    here = [f"{socket.gethostname()}:{9100 + rank}" for rank in range(world.size)]
    read = TFConfigClusterResolver()
    assert read.cluster_spec().as_dict() == {"worker": here}
    assert (read.task_type, read.task_id) == ("worker", world.rank)
    assert os.environ["TF_CONFIG"] == text

    ask = "import json, os; print(json.loads(os.environ['TF_CONFIG'])['task']['index'])"
    child = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert int(child.stdout) == world.rank

    strategy = ms.MultiWorkerMirroredStrategy()
    assert isinstance(strategy.cluster_resolver, TFConfigClusterResolver)
    assert strategy.cluster_resolver.task_id == world.rank


def test_jobs_share_out_the_ranks(world):
    jobs = {"chief": 1, "worker": world.size - 1} if world.size > 1 else {"chief": 1}
    found = json.loads(tf_config(jobs=jobs, host=f"node{world.rank % 2}"))
    addresses = [f"node{rank % 2}:{8888 + rank // 2}" for rank in range(world.size)]
    assert [a for job in jobs for a in found["cluster"][job]] == addresses
    wanted = {"type": "worker", "index": world.rank - 1} if world.rank else None
    assert found["task"] == (wanted or {"type": "chief", "index": 0})


def test_resolvers_that_ask_mpi(world):
    for resolver in (MPIClusterResolver(), TPUClusterResolver(tpu="local")):
        assert resolver.task_id == world.rank
        assert resolver.cluster_spec().num_tasks("worker") == world.size
    assert ms.MultiWorkerMirroredStrategy(TPUClusterResolver()).num_replicas_in_sync == world.size
