"""What CONTRIBUTING.md says is added to the library by one file, one row and one test class, is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# What the added tests and tests/test_house.py need of the tree.
COPIED = ("mpistrat", "pyproject.toml", "README.md", "tests/conftest.py", "tests/test_house.py")
COPIED += ("tests/tools", "tests/unit/conftest.py", "tests/unit/test_names.py", ".ci")
BLOCK = re.compile(
    r"<!-- (?P<kind>file|row): (?P<path>[\w./]+)(?:, below: (?P<below>.+?))? -->\n"
    r"```(?:python|text)\n(?P<text>.*?)^```\n",
    re.DOTALL | re.MULTILINE,
)


class Example(NamedTuple):
    """A section of the page: its files and rows, each a match of `BLOCK`."""

    title: str
    blocks: list[re.Match]

    @property
    def tests(self):
        return [block["path"] for block in self.blocks if block["path"].startswith("tests/")]


def sections():
    for section in PAGE.split("\n### ")[1:]:
        yield Example(section.split("\n")[0], list(BLOCK.finditer(section)))


EXAMPLES = list(sections())


def test_each_is_one_file_one_row_and_one_test_class():
    for example in EXAMPLES:
        files = [
            b["path"]
            for b in example.blocks
            if b["kind"] == "file" and b["path"].startswith("mpistrat/")
        ]
        rows = {block["path"] for block in example.blocks if block["kind"] == "row"}
        assert len(rows) == 1, example.title  # with its import
        assert len(files) <= 1, example.title
        (test,) = (b for b in example.blocks if b["path"] in example.tests)
        assert len(re.findall(r"^class Test", test["text"], re.MULTILINE)) == 1
    assert PAGE.count("-->\n```") == sum(len(example.blocks) for example in EXAMPLES)


def add(block, tree):
    path = tree / block["path"]
    if block["kind"] == "file":
        assert not path.exists(), f"{block['path']} is there already"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block["text"])
        return
    lines = path.read_text().splitlines(keepends=True)
    at = [n for n, line in enumerate(lines) if line.strip().startswith(block["below"])]
    assert at, f"{block['path']} has no line {block['below']}"
    lines.insert(at[-1] + 1, block["text"])
    path.write_text("".join(lines))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree to which everything is added."""
    tree = tmp_path_factory.mktemp("tree")
    for name in COPIED:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, tree / name)
    for example in EXAMPLES:
        for block in example.blocks:
            add(block, tree)
    return tree


def run(tree, *command):
    env = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tree, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def pytests(tree, *paths):
    options = ("-q", "-n0", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:zarr")
    return run(tree, "pytest", *options, *paths)


def files(example):
    return [b["path"] for b in example.blocks if b["kind"] == "file"]


@pytest.fixture(scope="module")
def tried(tree):
    """What a run of all files of all examples said, with the examples in their docstrings."""
    return pytests(tree, "-rA", *(path for example in EXAMPLES for path in files(example)))


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.title for example in EXAMPLES])
def test_it_works(example, tried):
    assert all(f"PASSED {path}::" in tried for path in example.tests)


@pytest.mark.nightly
def test_the_rules_hold(tree):
    pytests(tree, "tests/test_house.py", "tests/unit/test_names.py")
    run(tree, "ruff", "check", ".")
    run(tree, "ruff", "format", "--check", ".")
