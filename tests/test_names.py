"""Names say what they hold, argument names have one meaning, and calls say what they pass.

`python tests/tools/naming.py` prints the counts, and with the name of a package the places.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import naming
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mpistrat"
GROUPS = {
    f"mpistrat/{name}".rstrip("/"): paths
    for name, paths in naming.files_by_package(PACKAGE).items()
} | {name: sorted((ROOT / name).rglob("*.py")) for name in ("benchmarks", "docs", "tests/tools")}
SOURCES = sorted(PACKAGE.rglob("*.py"))

MAX_EMPTY_SHARE = 0.02
FEW_NAMES = 2  # so many may be empty in a small package
MAX_TYPES = 5
MAX_POSITIONAL = 5
MAX_ANY_SHARE = 0.12
DOORS = ("compat", "torch", "jax")  # other libraries' values have no types of ours

# Functions whose parameters follow a formula or another library: file, and names of functions.
FOREIGN_SIGNATURES = {
    r"compat/.*": r".*",  # TensorFlow
    r"cluster/(clouds|resolvers|slurm)\.py": r"__init__",  # TensorFlow
    r"torch/functions\.py": r"forward",  # torch.autograd
    r"kernels/.*": r".*",  # compiled loops, which take no records
    # Compiled loops of optimizers.
    r"optim/(adagrad|adam|lamb|lars|lion|rmsprop|sgd|blocks|passes)\.py": r".*",
}


def is_foreign(signature: naming.Signature) -> bool:
    """Whether the rule of positional arguments leaves out this function."""
    path = signature.path.relative_to(PACKAGE).as_posix()
    return any(
        re.fullmatch(file, path) and re.fullmatch(function, signature.function.name)
        for file, function in FOREIGN_SIGNATURES.items()
    )


@pytest.mark.parametrize("kind", naming.KINDS)
@pytest.mark.parametrize("group", GROUPS)
def test_names_say_what_they_hold(group, kind):
    places, total = naming.count_empty(GROUPS[group])[kind]
    is_too_many = len(places) > FEW_NAMES and len(places) > MAX_EMPTY_SHARE * total
    assert not is_too_many, f"{len(places)} of {total} {kind} say nothing:\n" + "\n".join(places)


def test_an_argument_has_few_types():
    crowded = {
        name: dict(types)
        for name, types in naming.types_by_argument(SOURCES).items()
        if len(types) > MAX_TYPES and name not in ("args", "kwargs", "fn")
    }
    assert not crowded, "\n".join(f"{name}: {types}" for name, types in crowded.items())


def test_no_function_takes_many_arguments_by_position():
    crowded = [
        f"{signature.path.relative_to(ROOT)}:{signature.function.lineno} {signature.function.name}"
        for signature in naming.signatures(SOURCES)
        if len(signature.positional) > MAX_POSITIONAL and not is_foreign(signature)
    ]
    assert not crowded, "make a record, or let them be given by name:\n" + "\n".join(crowded)


def test_no_tuple_is_unpacked_with_two_blanks():
    places = [
        f"{path.relative_to(ROOT)}:{line} {target}"
        for path in SOURCES
        for line, target in naming.blank_unpackings(path)
    ]
    assert not places, "make a record of what is unpacked:\n" + "\n".join(places)


def test_parameters_have_types():
    paths = [path for path in SOURCES if path.relative_to(PACKAGE).parts[0] not in DOORS]
    unknown, total = naming.share_of_any(paths)
    assert unknown <= MAX_ANY_SHARE * total, f"{unknown} of {total} parameters are `Any`"


# The rules themselves: each must be able to fail.


def test_empty_names_are_seen():
    tree = ast.parse("def given(what, rows):\n    found, self.mine, first = rows\n")
    empty = [name for kind, name, _ in naming.bound_names(tree) if naming.is_empty(name)]
    assert sorted(empty) == ["found", "given", "mine", "what"]


def test_types_and_signatures_are_seen(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "def f(a: int | None, b: Any, *c: list[np.ndarray]) -> None: ...\n"
        "def g(self, a: Sequence[Array], b, c, d, e, f, *, h: Any): ...\n"
        "for _, x, _ in y: pass\n"
    )
    types = naming.types_by_argument([path])
    assert {name: list(seen) for name, seen in types.items()} == {
        "a": ["int", "[Array]"],
        "c": ["[ndarray]"],
    }
    assert [len(s.positional) for s in naming.signatures([path])] == [2, 6]
    assert list(naming.blank_unpackings(path)) == [(3, "(_, x, _)")]
    assert naming.share_of_any([path]) == (2, 10)
