"""The names that type checkers see are those that programs get."""

from __future__ import annotations

import ast
import importlib
import zipfile
from pathlib import Path

import pytest

import mpistrat as ms

STUB = Path(ms.__file__).with_suffix(".pyi")
STUBS = sorted(STUB.parent.rglob("*.pyi"))


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: str(stub.relative_to(STUB.parent)))
def test_a_stub_has_every_public_name_from_where_it_is(stub):
    path = stub.relative_to(STUB.parent.parent).with_suffix("")
    module = importlib.import_module(".".join(path.parts).removesuffix(".__init__"))
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    told = {"__version__"} if module is ms else set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                home = importlib.import_module(node.module)
                assert getattr(module, alias.asname) is getattr(home, alias.name)
                told.add(alias.asname)
    lists = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    for node in ast.walk(tree):
        if isinstance(node, ast.alias) and not lists:
            assert node.asname == node.name, "type checkers take others for private"
    assert sorted(told) == module.__all__ == dir(module)
    assert not lists or lists == [module.__all__]


def test_a_name_that_is_missing_is_missing():
    assert not hasattr(ms, "nonsense")
    assert (STUB.parent / "py.typed").exists()


def test_names_of_a_package_in_an_archive(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        call = "__all__, *_ = bind_public_names(__name__, __file__)"
        lines = "from mpistrat.names import bind_public_names\n", call
        archive.writestr("zipped_package/__init__.py", "".join(lines))
        archive.writestr("zipped_package/__init__.pyi", "from math import tau as tau")
    monkeypatch.syspath_prepend(str(tmp_path / "all.zip"))
    assert importlib.import_module("zipped_package").__all__ == ["tau"]


def test_python_can_add_the_name_that_is_meant():
    with pytest.raises(AttributeError, match="MirrorStrategy") as found:
        _ = ms.MirrorStrategy
    assert (found.value.name, found.value.obj) == ("MirrorStrategy", ms)
