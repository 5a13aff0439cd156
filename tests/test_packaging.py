"""One version; what packages say; when a release is refused; what runs before a commit."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import mpistrat

ROOT = Path(__file__).parent.parent


def test_the_version_is_written_once_and_cited():
    number = re.compile(rf"(?<![\w.]){re.escape(mpistrat.__version__)}(?![\w.])")
    names = ("setup.py", "pyproject.toml", "CMakeLists.txt", "noxfile.py", "docs/conf.py")
    assert not [name for name in names if number.search((ROOT / name).read_text())]
    assert version("mpistrat") == mpistrat.__version__
    assert f"## {mpistrat.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {mpistrat.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_a_test_module_that_cannot_be_imported_is_an_error(tmp_path):
    (tmp_path / "test_moved.py").write_text("import mpistrat.nowhere\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2 and "No module named 'mpistrat.nowhere'" in found.stdout


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


def test_the_description_of_packages_has_no_links_to_files(monkeypatch):
    descriptions = []
    monkeypatch.setattr(
        "setuptools.setup", lambda **keywords: descriptions.append(keywords["long_description"])
    )
    runpy.run_path(str(ROOT / "setup.py"))
    assert not re.findall(r"\]\((?!https?:)[^)]*\)|!\[", descriptions[0])
    for words in (
        "# mpistrat",
        "writes such job scripts",
        "| `docs/start.md`, `docs/install.md`, `docs/notebooks.md` |",
    ):
        assert words in descriptions[0]


def test_the_picture_of_the_readme_is_small():
    pictures = re.findall(r"^!\[.+\]\((.+)\)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert pictures == ["docs/digits.png"]
    assert (ROOT / pictures[0]).read_bytes().startswith(b"\x89PNG")
    assert (ROOT / pictures[0]).stat().st_size <= 40_000


CHECKOUT_FILES = {
    "mpistrat/__init__.py": '__version__ = "0.1.0"  # comment\n',
    "CHANGELOG.md": "## 0.1.0 (not released yet)\n",
    ".gitignore": "/dist/\n",
    "dist/0.1.0/mpistrat-0.1.0.tar.gz": "from another commit",  # ignored
}
BUILDING = 7  # the exit code of the python3 that these tests have


class TestReleaseRefuses:
    """What `.ci/release` looks at before it builds; `.ci/nightly` runs all of it."""

    @pytest.fixture
    def checkout(self, tmp_path, monkeypatch):
        """A repository of one commit, in which building ends at once."""
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        for role in ("AUTHOR", "COMMITTER"):
            monkeypatch.setenv(f"GIT_{role}_NAME", "a contributor")
            monkeypatch.setenv(f"GIT_{role}_EMAIL", "contributor@example.org")
        programs, checkout = tmp_path / "programs", tmp_path / "checkout"
        programs.mkdir()
        (programs / "python3").write_text(f"#!/bin/sh\nexit {BUILDING}\n")
        (programs / "python3").chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        for name, text in CHECKOUT_FILES.items():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            (checkout / name).write_text(text)
        (checkout / ".ci").mkdir()
        shutil.copy(ROOT / ".ci" / "release", checkout / ".ci")
        self.git(checkout, "init", "-q")
        self.commit(checkout)
        return checkout

    def git(self, checkout, *words):
        subprocess.run(["git", *words], cwd=checkout, check=True, capture_output=True)

    def commit(self, checkout):
        self.git(checkout, "add", ".")
        self.git(checkout, "commit", "-q", "-m", "all")

    def release(self, checkout):
        return subprocess.run([checkout / ".ci" / "release"], capture_output=True, text=True)

    def test_nothing_in_a_clean_checkout(self, checkout):
        self.git(checkout, "tag", "v0.1.0")  # at the same commit
        completed = self.release(checkout)
        assert (completed.returncode, completed.stderr) == (BUILDING, "")
        assert not (checkout / "dist" / "0.1.0").exists()

    @pytest.mark.parametrize("name", ["CHANGELOG.md", "new_file.py"])
    def test_changes(self, checkout, name):
        with (checkout / name).open("a") as file:
            file.write("more\n")
        completed = self.release(checkout)
        assert completed.returncode == 1
        assert "commit or remove these changes first" in completed.stderr
        assert name in completed.stderr
        assert (checkout / "dist" / "0.1.0").exists()

    @pytest.mark.parametrize("heading", ["## 0.1.00", "## 0.1.0.1 (2026-01-31)", "## 0x1.0"])
    def test_a_version_without_a_section(self, checkout, heading):
        (checkout / "CHANGELOG.md").write_text(f"{heading}\n")
        self.commit(checkout)
        completed = self.release(checkout)
        assert completed.returncode == 1
        assert 'CHANGELOG.md has no section "## 0.1.0 (YYYY-MM-DD)"' in completed.stderr

    def test_the_version_of_another_commit(self, checkout):
        self.git(checkout, "tag", "v0.1.0")
        (checkout / "new_file.py").touch()
        self.commit(checkout)
        completed = self.release(checkout)
        assert completed.returncode == 1
        assert "the tag v0.1.0 is at another commit" in completed.stderr
