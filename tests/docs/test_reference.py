"""The reference has every public name, and the pages build without a warning."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import public_names
import pytest

import mpistrat
from mpistrat.testing import run_ranks

DOCS = Path(__file__).parents[2] / "docs"


def test_every_public_name_has_an_entry():
    text = "\n".join(public_names.pages().values())
    there = re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE)
    data = re.findall(r"^\.\. py:data:: (\S+)\n   :module: (\S+)$", text, re.MULTILINE)
    there += [f"{module}.{name}" for name, module in data]
    wanted = [entry.path for entry in public_names.entries()]
    wanted += [name for name in public_names.namespaces() if name != "mpistrat"]
    assert sorted(there) == sorted([*wanted, "mpistrat.errors"])


def test_every_page_is_in_the_table_of_contents():
    pages = public_names.pages()
    assert re.findall(r"^   ([\w.]+)$", pages["index"], re.MULTILINE) == [
        page for page in pages if page != "index"
    ]


def test_nothing_public_is_left_out():
    found = {entry.path for entry in public_names.entries()}
    assert {f"mpistrat.{name}" for name in mpistrat.__all__} <= found | set(
        public_names.namespaces()
    )
    assert {"mpistrat.compat.tf", "mpistrat.experimental.partitioners"} <= set(
        public_names.namespaces()
    )
    assert f"mpistrat.testing.{run_ranks.__name__}" in found


def test_pages_of_names_that_have_gone_go_too(tmp_path):
    (tmp_path / "gone.rst").write_text("Gone\n====\n")
    public_names.write(tmp_path)
    kept = (tmp_path / "errors.rst").stat().st_mtime_ns
    public_names.write(tmp_path)
    assert not (tmp_path / "gone.rst").exists()
    assert (tmp_path / "errors.rst").stat().st_mtime_ns == kept


def inventory(path):
    """The names in an inventory of Sphinx, and as what they are described.

    It is four lines of text, then lines that are compressed.
    """
    packed = path.read_bytes().split(b"\n", 4)[4]
    rows = [line.split(" ") for line in zlib.decompress(packed).decode().splitlines()]
    return {row[0]: row[1] for row in rows if row[1].startswith("py:")}


@pytest.mark.nightly  # `.ci/run` runs it with every change
@pytest.mark.timeout(600)
def test_the_pages_build_without_a_warning(tmp_path):
    for module in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(module, reason="pip install 'mpistrat[docs]'")
    source, built = tmp_path / "docs", tmp_path / "html"
    made = shutil.ignore_patterns("reference", "__pycache__")
    shutil.copytree(DOCS, source, ignore=made)
    # A fresh process: what this one has imported and patched must not show.
    env = {**os.environ, "PYTHONPATH": str(Path(mpistrat.__file__).parents[1])}
    call = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(source), str(built)]
    done = subprocess.run(call, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    found = inventory(built / "objects.inv")
    wanted = set()
    for entry in public_names.entries():
        wanted.add(entry.path)
        if entry.home == entry.path and inspect.isclass(entry.value):
            wanted |= {f"{entry.path}.{name}" for name in public_names.members(entry.value)}
            if entry.value.__module__.startswith("mpistrat"):  # not as an alias of something
                assert found[entry.path] in ("py:class", "py:exception")
    assert not wanted - set(found)
    shown = (built / "parity.html").read_text(encoding="utf-8").replace("<wbr>", "")
    rows = re.findall(r"^\| `(tf\.\S+)` ", (DOCS / "parity.md").read_text(), re.MULTILINE)
    assert len(rows) > 100
    for name in rows:
        assert f">{name}<" in shown
