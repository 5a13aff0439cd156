"""The page of starting: its job script runs from an unpacked archive, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
from pathlib import Path

import numpy
import pytest

import mpistrat

PAGE = Path(__file__).parents[2] / "docs" / "start-up.md"
PACKAGES = ("numpy", "numpy.libs", "optree", "xxhash", "typing_extensions.py")
PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")  # that there is no MPI in this environment
import mpistrat as ms
step = lambda: ms.get_replica_context().all_reduce("sum", 1)
print("total", int(ms.MirroredStrategy().run(step).local), sys.prefix, ms.__file__)
"""
# As Slurm's, on one node: sbcast copies; srun runs its words, and programs under strace.
STUBS = {
    "sbcast": 'exec cp "$1" "$2"',
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\n'
    'case "$1" in */python) python=$1; shift 3; exec strace -f -qq -e trace=%file -o "$CALLS" '
    '"$python" "$@";; esac\nexec "$@"',
}


def script():
    text = PAGE.read_text()
    return re.search(r"<!-- archive.*?```sh\n(.*?)```", text, re.DOTALL)[1]


def test_the_script_is_one_of_bash():
    subprocess.run(["bash", "-n"], input=script(), text=True, check=True, timeout=30)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("strace") is None, reason="counts calls with strace")
def test_a_job_runs_from_the_archive_and_removes_it(tmp_path):
    shared, local = tmp_path / "shared", tmp_path / "local"
    local.mkdir()
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
    env |= {"PATH": f"{tmp_path}/bin:{env['PATH']}", "TMPDIR": str(local), "SLURM_JOB_ID": "7"}
    env |= {"SLURM_NNODES": "1", "CALLS": str(tmp_path / "calls"), "VIRTUAL_ENV": str(shared)}

    def count(call):
        got = subprocess.run(
            call, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
        )
        assert got.returncode == 0, got.stderr
        return got.stdout.split(), (tmp_path / "calls").read_text().count(f'"{shared}')

    strace = ["strace", "-f", "-qq", "-e", "trace=%file", "-o", str(tmp_path / "calls")]
    said, before = count([*strace, f"{shared}/bin/python", "train.py"])
    assert said[:3] == ["total", "1", str(shared)]
    subprocess.run(
        ["tar", "-C", str(shared), "-cf", str(tmp_path / "env.tar"), "."], check=True, timeout=60
    )
    job = script().replace("srun -K1", f"srun {local}/environment-7/bin/hello\nsrun -K1")
    (tmp_path / "job").write_text(job)
    said, after = count(["bash", "job"])
    unpacked = f"{local}/environment-7"
    assert said == [unpacked, "total", "1", unpacked, *said[4:]]
    assert said[4].startswith(unpacked)
    assert (before > 500, after) == (True, 0)
    assert list(local.iterdir()) == []
