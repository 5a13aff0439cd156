"""The compiled modules of a package in one file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat import bytecode

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys, small, small.part.inner as i\nprint(i.NUMBER, type(i.__loader__).__name__)"
USE = "from mpistrat.bytecode import install_finder\ninstall_finder(__path__[0])\n"


@pytest.fixture
def package(tmp_path):
    """A package that reads its modules from one file, if there is one."""
    inner = tmp_path / "small" / "part"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text(USE)
    (inner / "__init__.py").write_text("")
    (inner / "inner.py").write_text("NUMBER = 1\ndef fail(): raise ValueError\n")
    (inner / "broken.py").write_text("NUMBER =\n")
    return inner.parent


def run(package, program=PROGRAM):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package.parent), str(ROOT)])}
    got = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert got.returncode == 0, got.stderr
    return got.stdout.split()


class TestBytecode:
    def test_modules_come_from_the_file(self, package):
        assert run(package) == ["1", "SourceFileLoader"]
        assert bytecode.write_bundle(str(package)) == bytecode.bundle_path(str(package))
        assert run(package) == ["1", "_Loader"]
        names = [path.name for path in (package / "__pycache__").iterdir()]
        assert sum(name.startswith("all-modules") for name in names) == 1

    def test_an_edited_source_is_seen(self, package):
        bytecode.write_bundle(str(package))
        (package / "part" / "inner.py").write_text("NUMBER = 2222\n")
        assert run(package)[0] == "2222"
        assert run(package)[0] == "2222"

    def test_a_new_module_is_found(self, package):
        bytecode.write_bundle(str(package))
        (package / "later.py").write_text("NUMBER = 3\n")
        assert run(package, "import small.later as l; print(l.NUMBER)") == ["3"]

    @pytest.mark.parametrize("damage", [b"", b"\xff\n\n", b"small.part x\n\n", None])
    def test_a_damaged_file_costs_nothing_but_time(self, package, damage):
        file = Path(bytecode.write_bundle(str(package)))
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2] if damage is None else damage)
        assert run(package)[0] == "1"

    def test_tracebacks_and_sources_are_as_ever(self, package):
        bytecode.write_bundle(str(package))
        told = run(
            package,
            "import inspect, traceback, small.part.inner as i\ntry: i.fail()\nexcept ValueError:"
            "    print(traceback.format_exc())\nprint(inspect.getsource(i.fail), i.__file__)",
        )
        assert told.count(f'"{package}/part/inner.py",') == 1
        assert told.count("ValueError") >= 2
        assert told[-1] == f"{package}/part/inner.py"

    def test_a_directory_that_cannot_be_written(self, package):
        (package / "__pycache__").write_text("a file")
        with pytest.raises(OSError):
            bytecode.write_bundle(str(package))
