"""What a site installs: a module, job scripts; and recipes that need what setup.py does."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mpistrat

ROOT = Path(__file__).parent.parent
SITE = ROOT / "hpc_jobs" / "site"
LMOD = Path("/usr/share/lmod/lmod/init/bash")


def required():
    """Names and least versions of what setup.py requires."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    [call] = [
        n for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg == "install_requires"
    ]
    words = [re.fullmatch(r"([\w-]+)(?:>=(\S+))?", text) for text in ast.literal_eval(call.value)]
    return {word[1]: word[2] for word in words}


def test_the_recipe_for_spack_needs_what_setup_needs():
    found = re.findall(r'depends_on\("py-([\w-]+)(?:@(\S+):)?", type=\("build', spack())
    assert {name: least or None for name, least in found} == required()
    setup = (ROOT / "setup.py").read_text()
    [python] = re.findall(r'depends_on\("python@(\S+):"', spack())
    assert f'python_requires=">={python}"' in setup


def spack():
    return (SITE / "package.py").read_text()


def test_the_image_installs_what_setup_needs():
    text = (SITE / "mpistrat.def").read_text()
    found = re.findall(r"'([\w-]+)(?:>=([\d.]+))?'", text)
    assert dict(found) == {**{n: v or "" for n, v in required().items()}, "mpich": ""}


def test_both_say_that_they_were_not_built_here():
    for name in ("package.py", "mpistrat.def"):
        assert "Not built here" in (SITE / name).read_text()


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_an_installation_as_a_module(tmp_path):
    """The module of an installation, loaded by Debian's lmod; scripts with the site's defaults."""
    build, prefix = tmp_path / "build", tmp_path / "apps"
    words = ["-DSITE_PARTITION=batch", "-DSITE_ACCOUNT=p1", "-DSITE_LIBMPI=/opt/libmpi.so"]
    for command in (
        ["cmake", "-S", ROOT, "-B", build, f"-DPython3_EXECUTABLE={sys.executable}", *words],
        ["cmake", "--install", build, "--prefix", prefix],
    ):
        subprocess.run(command, check=True, capture_output=True)
    [module] = (prefix / "share" / "modulefiles" / "mpistrat").iterdir()
    assert module.name == f"{mpistrat.__version__}.lua"
    jobs = prefix / "share" / "mpistrat" / "hpc_jobs"
    assert f" {jobs}/sweep.py " in (jobs / "sweep_one_job.sbatch").read_text()
    assert (jobs / "sweep.py").read_text() == (ROOT / "hpc_jobs" / "sweep.py").read_text()
    scripts = sorted(jobs.glob("*.sbatch"))
    assert [s.name for s in scripts] == sorted(s.name for s in ROOT.glob("hpc_jobs/*.sbatch"))
    for script in scripts:
        text = script.read_text()
        assert text.startswith("#!/bin/bash\n#SBATCH --partition=batch\n#SBATCH --account=p1\n")
        assert not re.search("^source .*activate", text, re.MULTILINE)
        subprocess.run(["bash", "-n", script], check=True)
    if not LMOD.exists():
        pytest.skip("installed, but NO lmod to load the module: apt-get install lmod")
    ask = "import mpistrat, os; print(mpistrat.__file__, os.environ['MPI4PY_LIBMPI'])"
    script = (
        f"source {LMOD}; module use {prefix}/share/modulefiles; module load mpistrat; "
        f"module list 2>&1; cd /; '{sys.executable}' -c \"{ask}\"; mpistrat --help; "
        'module unload mpistrat; echo "left ${MPI4PY_LIBMPI-nothing}"; command -v mpistrat'
    )
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert f"mpistrat/{mpistrat.__version__}" in done.stdout, done.stderr
    assert f"{prefix}/lib/python/mpistrat/__init__.py /opt/libmpi.so" in done.stdout
    assert "tf.distribute for NumPy on MPI" in done.stdout
    assert done.stdout.endswith("left nothing\n")
    assert os.access(prefix / "bin" / "mpistrat", os.X_OK)
