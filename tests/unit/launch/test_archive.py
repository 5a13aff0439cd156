"""A batch job whose environment is one archive runs from its copy, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path

import numpy
import pytest

import mpistrat
from mpistrat.launch.batch import render_script
from mpistrat.launch.batch_job import BatchJob

PACKAGES = ("numpy", "numpy.libs", "optree", "xxhash", "typing_extensions.py")
PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")  # that there is no MPI in this environment
import mpistrat as ms
step = lambda: ms.get_replica_context().all_reduce("sum", 1)
print("total", int(ms.MirroredStrategy().run(step).local), sys.prefix, ms.__file__)
"""
# As those of Slurm, on one node: sbcast --force copies; srun runs words, ranks under strace.
STUBS = {
    "sbcast": 'exec cp "$2" "$3"',
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\n'
    'case "$1" in python3) shift 3; exec strace -f -qq -e trace=%file -o "$CALLS" '
    'python3 "$@";; esac\nexec "$@"',
}


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("strace") is None, reason="counts calls with strace")
def test_a_job_runs_from_the_archive_and_removes_it(tmp_path):
    shared, number = tmp_path / "shared", f"test-{os.getpid()}"
    local = Path(f"/tmp/job-{number}")
    venv.create(shared, symlinks=True)
    (site,) = shared.glob("lib/python*/site-packages")
    from_here = Path(numpy.__file__).parents[1]
    for name in PACKAGES:
        if (from_here / name).is_dir():
            shutil.copytree(from_here / name, site / name)
        elif (from_here / name).exists():
            shutil.copy(from_here / name, site / name)
    shutil.copytree(Path(mpistrat.__file__).parent, site / "mpistrat")
    (shared / "bin" / "hello").write_text(f"#!{shared}/bin/python\nimport sys; print(sys.prefix)\n")
    (shared / "bin" / "hello").chmod(0o755)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "bin").mkdir()
    for name, text in STUBS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"PATH": f"{tmp_path}/bin:{env['PATH']}", "SLURM_JOB_ID": number, "SLURM_NNODES": "1"}
    env |= {"SLURM_SUBMIT_DIR": str(tmp_path), "CALLS": str(tmp_path / "calls")}

    def count(call):
        got = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert got.returncode == 0, got.stderr
        return got.stdout.split(), (tmp_path / "calls").read_text().count(f'"{shared}')

    strace = ["strace", "-f", "-qq", "-e", "trace=%file", "-o", str(tmp_path / "calls")]
    said, before = count([*strace, f"{shared}/bin/python", "train.py"])
    assert said[:3] == ["total", "1", str(shared)]
    subprocess.run(["tar", "-C", str(shared), "-cf", str(tmp_path / "env.tar"), "."], check=True)
    job = render_script(BatchJob(("train.py",), archive="env.tar"))
    (tmp_path / "job").write_text(job.replace("srun -K1", "hello\nsrun -K1"))
    said, after = count(["bash", "job"])
    unpacked = f"{local}/environment"
    assert said == [unpacked, "total", "1", unpacked, *said[4:]]
    assert said[4].startswith(unpacked)
    assert (before > 500, after) == (True, 0)
    assert not local.exists()
