"""Rules for the code: imports, access to the outside world, lengths, docstrings."""

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

# Imports point down this list; packages of one row may use each other.
ROWS = (
    ("bytecode", "errors", "config", "names", "pytree"),
    ("arrays", "kernels"),
    ("shm", "comm"),
    ("cluster", "watchdog"),
    ("lockstep",),
    ("collectives",),
    ("data",),
    ("variables", "strategy", "advice"),
    ("optim", "metrics", "losses", "checkpoint", "random"),
    ("training",),
    (
        *("launch", "compat", "testing", "examples", "__main__"),
        # Public names, bound here and made elsewhere.
        *("__init__", "cluster_resolver", "coordinator", "experimental"),
        *("vjp", "torch", "jax"),
    ),
)
LAYER = {room: number for number, row in enumerate(ROWS) for room in row}

# Each external library is imported in one place only.
DOORS: dict[str, tuple[str, ...]] = {
    "mpi4py": ("comm/mpi.py",),
    "numba": ("kernels/",),
    "subprocess": ("launch/", "testing/", "cluster/batch_job.py"),  # squeue, qstat
    "torch": ("torch/", "examples/language_model_torch.py"),
    "jax": ("jax/", "examples/digits_jax.py"),
    "tensorflow": (),
}
ENVIRONMENT = ("config.py", "cluster/")
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

# These run code that they read, so nothing that comes from outside may pass through them.
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_ALLOWED = ("comm/",)

LONGEST_MODULE = 500  # lines without docstrings
LONGEST_FUNCTION = 40  # lines without the docstring
LONG_MODULES: dict[str, str] = {}  # path -> why it has to be
LONG_FUNCTIONS: dict[str, str] = {  # path:name -> why it has to be
    "training/fit.py:fit": "its signature has 22 lines, one for each argument of users",
}

# What was here when these rules came; each list may only shrink.
CIRCLES: set[frozenset[str]] = set()  # modules that import each other
TWICE: set[str] = set()  # names of two classes
THIN = {
    # path -> why it is a module of its own
    "compat/tf_distribute.py": "tf has a module of that name; its names are rows of the stub",
    "coordinator.py": "tf.distribute has a module of that name",
}
COMING: set[str] = set()  # packages that are being built
LEAST_MODULE = 25  # lines of code, if only one other module imports it


def modules():
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def here(module):
    """The subpackage of a module, by its path."""
    return module.split("/")[0].removesuffix(".py")


def each(rule):
    """What `rule` finds wrong in every module, each with the module's path."""
    return "\n".join(f"{module}: {wrong}" for module in modules() for wrong in rule(module))


@cache
def tree(module):
    return ast.parse((PACKAGE / module).read_text())


def forget():
    for known in (tree, nodes, run_time, imported):
        known.cache_clear()


@cache
def nodes(module):
    """All nodes of its tree."""
    return tuple(ast.walk(tree(module)))


def without_typing(node):
    """Walk a tree except for the bodies of ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            todo = child.orelse
        else:
            yield child
            todo = [child]
        for part in todo:
            yield from without_typing(part)


@cache
def run_time(module):
    """The nodes of its tree except for the bodies of ``if TYPE_CHECKING``."""
    return tuple(without_typing(tree(module)))


def imports(module, typing=False):
    """The absolute names that a module imports, wherever in it, with their lines."""
    package = ["mpistrat", *Path(module).parent.parts]
    for node in nodes(module) if typing else run_time(module):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{name}.{alias.name}", node.lineno) for alias in node.names)


def path_of(dotted, known):
    """The module that a dotted name is, or is in; None if it is not ours."""
    parts = dotted.split(".")[1:]
    for end in (len(parts), len(parts) - 1):
        for path in ("/".join(parts[:end]) + ".py", "/".join([*parts[:end], "__init__.py"])):
            if path in known and dotted.startswith("mpistrat"):
                return path
    return None


@cache
def imported():
    """Which modules each module imports: lazily, and for annotations only, too."""
    known = set(modules())
    return {
        module: {path_of(name, known) for name, _ in imports(module, typing=True)} - {None, module}
        for module in known
    }


def circles(graph):
    """The largest sets of modules of which each imports every other one, by whatever way."""
    reached = {}
    for module in graph:
        todo, reached[module] = [module], set()
        while todo:
            new = graph[todo.pop()] - reached[module]
            reached[module] |= new
            todo += new
    ends = {one: frozenset(two for two in reached[one] if one in reached[two]) for one in graph}
    return {circle for circle in ends.values() if circle}


def room(dotted):
    """The subpackage of a dotted name; ``__init__`` for names of mpistrat itself."""
    first = dotted.split(".")[1] if "." in dotted else "__init__"
    return first if first in LAYER else "__init__"


def test_imports_point_down():
    unknown = {here(module) for module in modules()} - set(LAYER)
    assert not unknown, f"in no row of ROWS: {unknown}; add them"

    def rule(module):
        for name, line in imports(module):
            if name.split(".")[0] == "mpistrat" and LAYER[room(name)] > LAYER[here(module)]:
                yield f"line {line}: {name} is above it"

    assert not (wrong := each(rule)), wrong


def test_no_package_of_the_table_is_missing():
    found = {here(module) for module in modules()}
    missing = set(LAYER) - COMING - found
    assert not missing, f"there is no package {missing}; remove it from ROWS"


def test_no_files_import_each_other():
    found = circles(imported())
    new = "\n".join(", ".join(sorted(circle)) for circle in found - CIRCLES)
    assert not new, f"modules import each other, if only lazily or for annotations:\n{new}"
    assert not CIRCLES - found, f"gone, so no longer to be listed: {CIRCLES - found}"


def test_one_name_of_a_class_is_one_class():
    """Except for compat/, whose classes bear the names that tf.* gives them."""
    homes = {}
    for module in modules():
        for node in nodes(module):
            if isinstance(node, ast.ClassDef) and not module.startswith("compat/"):
                homes.setdefault(node.name, []).append(module)
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    wrong = {name: where for name, where in twice.items() if name not in TWICE}
    assert not wrong, f"two classes of one name: {wrong}"
    assert not TWICE - set(twice), f"gone, so no longer to be listed: {TWICE - set(twice)}"


def test_no_module_is_small_with_one_importer():
    users = {}
    for module, names in imported().items():
        for name in names:
            users.setdefault(name, set()).add(module)
    thin = {
        module
        for module in modules()
        if len(users.get(module, ())) == 1
        and not module.endswith("__init__.py")
        and users[module] != {"cli.py"}  # a table: a row for each
        and lines_of_module(module) < LEAST_MODULE
    }
    wrong = {module: users[module] for module in thin - set(THIN)}
    assert not wrong, f"move what these hold to the module that imports it: {wrong}"
    assert not set(THIN) - thin, f"gone, so no longer to be listed: {set(THIN) - thin}"


def test_the_world_outside_is_entered_by_its_door():
    def rule(module):
        for name, line in imports(module):
            doors = DOORS.get(name.split(".")[0])
            if doors is not None and not module.startswith(doors):
                yield f"line {line}: {name} may only be imported in {doors}"

    assert not (wrong := each(rule)), wrong


def test_the_environment_is_read_in_its_packages_only():
    def rule(module):
        if module.startswith(ENVIRONMENT):
            return
        for node in nodes(module):
            if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES:
                yield f"line {node.lineno} reads the environment"
        for name, line in imports(module):
            if name in {f"os.{word}" for word in ENVIRONMENT_NAMES}:
                yield f"line {line} reads the environment"

    assert not (wrong := each(rule)), f"{wrong}\nonly {ENVIRONMENT} may"


def test_nothing_that_runs_code_is_read():
    def rule(module):
        for name, line in imports(module):
            if name.split(".")[0] in UNSAFE and not module.startswith(UNSAFE_ALLOWED):
                yield f"line {line}: {name}"

    assert not (wrong := each(rule)), wrong


DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(module):
    """The statements of a module that are docstrings."""
    for node in nodes(module):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            yield node.body[0]


def lines_of_module(module):
    """How many lines of code it has, without docstrings, comments and blanks."""
    told = {n for doc in docstrings(module) for n in range(doc.lineno, doc.end_lineno + 1)}
    lines = enumerate((PACKAGE / module).read_text().splitlines(), 1)
    return sum(bool(text.split("#")[0].strip()) and n not in told for n, text in lines)


def test_modules_are_short():
    def rule(module):
        length = len((PACKAGE / module).read_text().splitlines())
        length -= sum(doc.end_lineno - doc.lineno + 1 for doc in docstrings(module))
        if length > LONGEST_MODULE and module not in LONG_MODULES:
            yield f"{length} lines"

    assert not (wrong := each(rule)), wrong


def functions(module):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return (node for node in nodes(module) if isinstance(node, kinds))


def lines_of_code(function):
    first = function.body[0]
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        length -= first.end_lineno - first.lineno + 1
    return length


def test_functions_are_short():
    def rule(module):
        for node in functions(module):
            length = lines_of_code(node)
            if length > LONGEST_FUNCTION and f"{module}:{node.name}" not in LONG_FUNCTIONS:
                yield f"{node.name} ({length} lines)"

    assert not (wrong := each(rule)), wrong


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


def test_everything_public_is_told_in_a_sentence():
    def rule(module):
        for name, node in [("the module", tree(module)), *public(tree(module))]:
            first = (ast.get_docstring(node) or "").split("\n")[0]
            if not first.endswith("."):
                yield f"{name} has no docstring, or its first line is not a sentence: {first!r}"

    assert not (wrong := each(rule)), wrong


def test_importing_starts_neither_mpi_nor_numba():
    """In a fresh process: the package and its command line."""
    ask = "import sys, mpistrat, mpistrat.launch.cli; print(*sorted(sys.modules))"
    got = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    loaded = set(got.stdout.split())
    assert "mpistrat.launch.cli" in loaded
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
        "from ..strategy import strategy\n"
        "if TYPE_CHECKING:\n    import numba\n    import mpistrat.data.bad\n"
        "def long():\n    import mpistrat.data.dataset\n    os.getenv('X')\n" + "    pass\n" * 50
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bad.py").write_text(
        "import pickle\ndef lazy():\n    from mpistrat.comm.bad import long\n"
        "class Twice: pass\nclass Twice: pass\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    forget()
    names = [name for name, _ in imports("comm/bad.py")]
    assert "mpistrat.strategy.strategy" in names
    assert "numba" not in names
    for rule, words in [
        (test_imports_point_down, "mpistrat.data.dataset is above"),
        (test_no_package_of_the_table_is_missing, "strategy"),
        (test_no_files_import_each_other, "comm/bad.py, data/bad.py"),
        (test_one_name_of_a_class_is_one_class, "Twice"),
        (test_no_module_is_small_with_one_importer, "data/bad.py"),
        (test_the_world_outside_is_entered_by_its_door, "mpi4py"),
        (test_the_environment_is_read_in_its_packages_only, "comm/bad.py: line 11"),
        (test_nothing_that_runs_code_is_read, "data/bad.py: line 1: pickle"),
        (test_functions_are_short, r"long \(53 lines\)"),
        (test_everything_public_is_told_in_a_sentence, "long"),
    ]:
        with pytest.raises(AssertionError, match=words):
            rule()
    forget()


@pytest.mark.parametrize("text", [f"see {ROOT}/x", "'/home/me/data'", "=/root/a", sys.prefix])
def test_paths_of_one_machine_are_recognised(text):
    assert names_a_machine(text)


@pytest.mark.parametrize("text", ["a/home/b", "$HOME/x", "/tmp/x", "https://x.org/home/a"])
def test_paths_of_every_machine_are_not(text):
    assert not names_a_machine(text)
