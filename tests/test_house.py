"""The rules of the house: who imports whom, who touches the world outside, how long, how told."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mpistrat"

# Imports point down this list; rooms of one row may use each other.
ROWS = (
    ("errors", "options", "nest"),
    ("arrays", "kernels"),
    ("comm", "memory", "cluster"),
    ("board",),
    ("collectives",),
    ("feed",),
    ("distribute",),
    ("optim", "checkpoint", "watch"),
    (
        *("launch", "compat", "integrations", "testing", "examples", "cli", "__main__"),
        # Public names, bound here and made elsewhere; and those that are refused.
        *("__init__", "cluster_resolver", "coordinator", "experimental", "refused"),
        *("vjp", "parity"),
    ),
)
LAYER = {room: number for number, row in enumerate(ROWS) for room in row}

# Each part of the world outside has one door.
DOORS = {
    "mpi4py": ("comm/mpi.py",),
    "numba": ("kernels/",),
    "subprocess": ("launch/", "testing/"),
    "torch": ("integrations/",),
    "jax": ("integrations/",),
    "tensorflow": ("integrations/",),
}
ENVIRONMENT = ("options.py", "cluster/")
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

# These run code that they read, so nothing that comes from outside may pass through them.
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_ALLOWED = ("comm/",)

LONGEST_MODULE = 300  # lines without docstrings
LONGEST_FUNCTION = 40  # lines without the docstring
LONG_MODULES: dict[str, str] = {}  # path -> why it has to be
LONG_FUNCTIONS: dict[str, str] = {}  # path:name -> why it has to be

MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@cache
def tree(module):
    return ast.parse((PACKAGE / module).read_text())


def without_typing(node):
    """Walk a tree but for the bodies of ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            todo = child.orelse
        else:
            yield child
            todo = [child]
        for part in todo:
            yield from without_typing(part)


def imports(module):
    """The absolute names that a module imports, wherever in it, with their lines."""
    package = ["mpistrat", *Path(module).parent.parts]
    for node in without_typing(tree(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{name}.{alias.name}", node.lineno) for alias in node.names)


def room(dotted):
    """The room of a dotted name below mpistrat; a name of the package itself is its front."""
    first = dotted.split(".")[1] if "." in dotted else "__init__"
    return first if first in LAYER else "__init__"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    here = module.split("/")[0].removesuffix(".py")
    assert here in LAYER, f"{module} is in no row of the house; give its room a place in ROWS"
    up = [
        f"line {line}: {name}"
        for name, line in imports(module)
        if name.split(".")[0] == "mpistrat" and LAYER[room(name)] > LAYER[here]
    ]
    assert not up, f"{module} imports from above it: {up}"


@pytest.mark.parametrize("module", MODULES)
def test_the_world_outside_is_entered_by_its_door(module):
    wrong = [
        f"line {line}: {name}"
        for name, line in imports(module)
        for door in [DOORS.get(name.split(".")[0])]
        if door and not module.startswith(door)
    ]
    assert not wrong, f"{module} goes outside by itself: {wrong}; doors: {DOORS}"


@pytest.mark.parametrize("module", MODULES)
def test_the_environment_is_read_in_its_rooms_only(module):
    if module.startswith(ENVIRONMENT):
        return
    wrong = [
        f"line {node.lineno}"
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES
    ]
    wrong += [
        f"line {line}"
        for name, line in imports(module)
        if name in {f"os.{word}" for word in ENVIRONMENT_NAMES}
    ]
    assert not wrong, f"{module} reads the environment: {wrong}; only {ENVIRONMENT} may"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_that_runs_code_is_read(module):
    if module.startswith(UNSAFE_ALLOWED):
        return
    wrong = [
        f"line {line}: {name}" for name, line in imports(module) if name.split(".")[0] in UNSAFE
    ]
    assert not wrong, f"{module}: {wrong}"


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_short(module):
    length = len((PACKAGE / module).read_text().splitlines())
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree(module)):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            length -= node.body[0].end_lineno - node.body[0].lineno + 1
    assert length <= LONGEST_MODULE or module in LONG_MODULES, f"{module} has {length} lines"


def functions(module):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return (node for node in ast.walk(tree(module)) if isinstance(node, kinds))


def lines_of_code(function):
    first = function.body[0]
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        length -= first.end_lineno - first.lineno + 1
    return length


@pytest.mark.parametrize("module", MODULES)
def test_functions_are_short(module):
    long = [
        f"{node.name} ({lines_of_code(node)} lines)"
        for node in functions(module)
        if lines_of_code(node) > LONGEST_FUNCTION and f"{module}:{node.name}" not in LONG_FUNCTIONS
    ]
    assert not long, f"{module}: {long}"


def public(node, inside=""):
    """Yield the public classes, functions and methods of a module with their full names."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for child in node.body:
        if isinstance(child, kinds) and not child.name.startswith("_"):
            if any("overload" in ast.unparse(mark) for mark in child.decorator_list):
                continue
            if any(
                ast.unparse(mark).endswith((".setter", ".deleter")) for mark in child.decorator_list
            ):
                continue
            yield inside + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{inside}{child.name}.")


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_is_told_in_a_sentence(module):
    wrong = []
    for name, node in [("the module", tree(module)), *public(tree(module))]:
        first = (ast.get_docstring(node) or "").split("\n")[0]
        if not first.endswith("."):
            wrong.append(f"{name}: {first!r}")
    assert not wrong, f"{module}: no docstring, or its first line is no sentence: {wrong}"


def test_importing_starts_neither_mpi_nor_numba():
    """In a fresh process: the package and its command line."""
    ask = "import sys, mpistrat, mpistrat.cli; print(*sorted(sys.modules))"
    got = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    loaded = set(got.stdout.split())
    assert "mpistrat.cli" in loaded
    assert not loaded & {"mpi4py.MPI", "numba", "llvmlite", "torch", "jax", "sklearn", "matplotlib"}


# Paths of one machine: homes of whoever wrote the file, this checkout, this environment.
HOMES = re.compile(r"(?<![\w./~$})>-])/(?:home|root|Users|mnt|scratch)/[\w.-]+")
HERE = tuple(place for place in {str(ROOT), sys.prefix, str(Path.home())} if place.count("/") > 1)
TEXT = {".py", ".toml", ".md", ".txt", ".cfg", ".sbatch", ".sh", ".json", ".yml", ".yaml", ""}
HIDDEN_BUT_OURS = {".ci", ".github"}


def names_a_machine(line):
    return bool(HOMES.search(line)) or any(place in line for place in HERE)


def own_files():
    """The files of the checkout, without environments, builds and caches."""
    todo = [ROOT]
    while todo:
        for path in todo.pop().iterdir():
            if path.is_dir():
                made = (path / "pyvenv.cfg").exists() or (path / "CMakeCache.txt").exists()
                hidden = path.name.startswith(".") and path.name not in HIDDEN_BUT_OURS
                if not (made or hidden or path.name in {"build", "dist", "__pycache__"}):
                    todo.append(path)
            elif path.suffix in TEXT:
                yield path


def test_no_path_of_one_machine_is_written_down():
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in own_files()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if names_a_machine(line)
    ]
    assert not wrong, "\n".join(wrong)


# The rules themselves: each must be able to fail.


def test_the_rules_see_what_they_forbid(tmp_path, monkeypatch):
    (tmp_path / "comm").mkdir()
    (tmp_path / "comm" / "bad.py").write_text(
        "from typing import TYPE_CHECKING\nimport os\nimport mpi4py\nimport pickle\n"
        "from ..distribute import strategy\n"
        "if TYPE_CHECKING:\n    import numba\n"
        "def long():\n    import mpistrat.feed.dataset\n    os.getenv('X')\n" + "    pass\n" * 50
    )
    (tmp_path / "feed").mkdir()
    (tmp_path / "feed" / "bad.py").write_text("import pickle\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    tree.cache_clear()
    names = [name for name, _ in imports("comm/bad.py")]
    assert "mpistrat.distribute.strategy" in names
    assert "numba" not in names
    for rule, module, words in [
        (test_imports_point_down, "comm/bad.py", "mpistrat.feed.dataset"),
        (test_the_world_outside_is_entered_by_its_door, "comm/bad.py", "mpi4py"),
        (test_the_environment_is_read_in_its_rooms_only, "comm/bad.py", "line 10"),
        (test_nothing_that_runs_code_is_read, "feed/bad.py", "pickle"),
        (test_functions_are_short, "comm/bad.py", r"long \(53 lines\)"),
        (test_everything_public_is_told_in_a_sentence, "comm/bad.py", "long"),
    ]:
        with pytest.raises(AssertionError, match=words):
            rule(module)
    tree.cache_clear()


@pytest.mark.parametrize("text", [f"see {ROOT}/x", "'/home/me/data'", "=/root/a", sys.prefix])
def test_paths_of_one_machine_are_recognised(text):
    assert names_a_machine(text)


@pytest.mark.parametrize("text", ["a/home/b", "$HOME/x", "/tmp/x", "https://x.org/home/a"])
def test_paths_of_every_machine_are_not(text):
    assert not names_a_machine(text)
