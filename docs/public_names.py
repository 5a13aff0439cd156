"""The public names of mpistrat, and the pages that are made from the package.

Nothing is listed by hand: a name in ``__all__`` of the package, or of a namespace that can be
reached from it, gets an entry. Groups only sort the names of the package itself into pages; a name
that fits no group is on the page of other names.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mpistrat
import mpistrat.compat


class Group(NamedTuple):
    """A page for some names of the package itself: its file, title, and where they are defined."""

    page: str
    title: str
    modules: tuple[str, ...]


GROUPS = (
    Group("strategies", "Strategies", ("mpistrat.strategy.strateg", "mpistrat.strategy.ext")),
    Group("contexts", "Contexts", ("mpistrat.strategy.replica_context",)),
    Group(
        "values",
        "Values and variables",
        (
            *("mpistrat.variables.values", "mpistrat.variables.variable"),
            *("mpistrat.variables.indexed_slices", "mpistrat.variables.kinds", "mpistrat.kernels"),
        ),
    ),
    Group("input", "Input", ("mpistrat.data", "mpistrat.strategy.inputs")),
    Group("errors", "Errors", ("mpistrat.errors",)),
    Group("others", "Other names", ("",)),
)


class Entry(NamedTuple):
    """A public name.

    Attributes:
      namespace: The module that has it, as a dotted name.
      name: Its name there.
      value: What it is.
      home: The dotted name under which it is described; another one's if that came first.
    """

    namespace: str
    name: str
    value: Any
    home: str

    @property
    def path(self) -> str:
        """The dotted name."""
        return f"{self.namespace}.{self.name}"


def namespaces() -> dict[str, types.ModuleType]:
    """Return the modules whose ``__all__`` is public, by name; the package itself first."""
    modules: dict[str, types.ModuleType] = {}

    def visit(module: types.ModuleType) -> None:
        if module.__name__ in modules:
            return
        modules[module.__name__] = module
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if isinstance(value, types.ModuleType) and value.__name__.startswith("mpistrat"):
                visit(value)

    visit(mpistrat)
    for module in pkgutil.walk_packages(mpistrat.compat.__path__, "mpistrat.compat."):
        if not module.name.rpartition(".")[2].startswith("_"):
            visit(importlib.import_module(module.name))
    return modules


def entries() -> list[Entry]:
    """Return every public name; modules are namespaces, not names."""
    homes: dict[int, str] = {}
    public_entries = []
    for namespace, module in namespaces().items():
        for name in sorted(getattr(module, "__all__", ())):
            value = getattr(module, name)
            if isinstance(value, types.ModuleType):
                continue
            path = f"{namespace}.{name}"
            ours = str(getattr(value, "__module__", "")).startswith("mpistrat")
            home = homes.setdefault(id(value), path) if ours and callable(value) else path
            public_entries.append(Entry(namespace, name, value, home))
    return public_entries


@functools.cache
def _public_classes() -> frozenset[int]:
    return frozenset(id(entry.value) for entry in entries() if inspect.isclass(entry.value))


def members(cls: type) -> dict[str, Any]:
    """Return the public members of a class, its own and those of bases that are not public.

    A base that is public has an entry of its own, which describes its members.
    """
    public = _public_classes()
    public_members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("mpistrat") or (base is not cls and id(base) in public):
            continue
        for name, value in vars(base).items():
            is_member = isinstance(
                value, property | staticmethod | classmethod | types.FunctionType
            )
            is_member = is_member or (isinstance(value, cls) and issubclass(cls, enum.Enum))
            if is_member and not name.startswith("_"):
                public_members[name] = value
    return public_members


def group(entry: Entry) -> Group:
    """Return the page of a name of the package itself."""
    module = str(getattr(entry.value, "__module__", ""))
    return next(row for row in GROUPS if module.startswith(row.modules))


def _directive(entry: Entry) -> Iterator[str]:
    if entry.home != entry.path:
        yield _data(entry, f"The same as `{entry.home}`.")
    elif inspect.isclass(entry.value) and entry.value.__module__.startswith("mpistrat"):
        yield f".. autoclass:: {entry.path}\n   :show-inheritance:"
        names = ", ".join(members(entry.value))
        yield (f"   :members: {names}\n   :undoc-members:\n" if names else "")
    elif inspect.isroutine(entry.value) and entry.value.__module__.startswith("mpistrat"):
        yield f".. autofunction:: {entry.path}\n"
    else:
        yield _data(entry, _describe(entry.value))


def _data(entry: Entry, description: str) -> str:
    return f".. py:data:: {entry.name}\n   :module: {entry.namespace}\n\n   {description}\n"


def _describe(value: Any) -> str:
    if isinstance(value, types.SimpleNamespace):
        return f"A namespace: {', '.join(f'``{name}``' for name in sorted(vars(value)))}."
    if isinstance(value, type):
        return f"``{value.__module__}.{value.__qualname__}``."
    return f"``{value!r}``."


def _heading(title: str) -> str:
    return f"{title}\n{'=' * len(title)}\n"


def pages() -> dict[str, str]:
    """Return the text of each page of the reference, by file name without its ending."""
    pages_by_name: dict[str, list[str]] = {row.page: [_heading(row.title)] for row in GROUPS}
    pages_by_name["errors"].append(".. automodule:: mpistrat.errors\n   :no-index:\n")
    for namespace in namespaces():
        if namespace != "mpistrat":
            pages_by_name[namespace] = [_heading(namespace), f".. automodule:: {namespace}\n"]
    for entry in entries():
        page = group(entry).page if entry.namespace == "mpistrat" else entry.namespace
        pages_by_name[page].extend(_directive(entry))
    index = [
        _heading("Reference"),
        "Every public name, from its own docstring.\n",
        ".. toctree::\n   :maxdepth: 1\n",
        *(f"   {page}" for page in pages_by_name),
        "",
    ]
    return {page: "\n".join(lines) for page, lines in {"index": index, **pages_by_name}.items()}


def name_classes() -> None:
    """Give each class the name under which it is described, in this process.

    Autodoc takes a class of another ``__name__`` for an alias, of which it shows neither signature
    nor docstring. ``mpistrat.experimental.TPUStrategy`` is the only public name of its class.
    """
    for entry in entries():
        ours = str(getattr(entry.value, "__module__", "")).startswith("mpistrat")
        if ours and inspect.isclass(entry.value) and entry.home == entry.path:
            entry.value.__name__ = entry.name


def write(folder: Path) -> None:
    """Write the pages; leave alone what has not changed, so that a second build is quick."""
    folder.mkdir(exist_ok=True)
    texts = {f"{page}.rst": text for page, text in pages().items()}
    for old in folder.glob("*.rst"):
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        _write(folder / name, text)


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


_SECTION = re.compile(r"^(Collective|Cost|As)[:.](?=\s|$)\s*(.*)$")


def sections(
    app: Any, object_type: str, name: str, documented_object: Any, options: Any, lines: list[str]
) -> None:
    """Give the sections that docstrings have here a paragraph each, with a name in bold."""
    new_lines: list[str] = []
    for line in lines:
        match = _SECTION.match(line)
        if match:
            new_lines += ["", f"**{match[1]}:** {match[2]}".rstrip()]
        else:
            new_lines.append(line)
    lines[:] = new_lines
