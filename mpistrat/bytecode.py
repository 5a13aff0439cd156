"""The compiled modules of this package in one file, so that a start does not open hundreds.

A first training step imports 186 modules of this package, for which Python asks the file system
835 times: too much where hundreds of ranks start from one parallel file system. With the file it
asks 199 times. `write_bundle`, which ``mpistrat warm`` calls when the package is installed, puts
Python's own compiled files behind one another; `install_finder` reads them with one call. Each
module still costs one question: its source's time and size, by which Python sees whether the
compiled form is up to date. Modules that have changed since, or are missing in the file, are
imported as always.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any, final

_STAMP = slice(4, 16)  # of a compiled file: flags, time and size of the source (PEP 552)


def bundle_path(package: str) -> str:
    """Return where the file of a package is: beside the compiled files of this Python.

    Args:
      package: The directory of the package.
    """
    tag = f"{sys.implementation.cache_tag}.opt-{sys.flags.optimize}"
    return f"{package}/__pycache__/all-modules.{tag}.bundle"


@final
class _Loader(SourceFileLoader):
    """Python's own loader, with the compiled form in hand."""

    def __init__(self, name: str, path: str, compiled: bytes):
        super().__init__(name, path)
        self._compiled = compiled

    def path_stats(self, path: str) -> Any:
        stats: Any = super().path_stats(path)
        words = (0, int(stats["mtime"]), stats["size"])
        stamp = b"".join((word & 0xFFFFFFFF).to_bytes(4, "little") for word in words)
        if self._compiled[_STAMP] != stamp:
            self._compiled = b""
        return stats

    def get_data(self, path: str) -> bytes:
        if self._compiled and path.endswith(".pyc"):
            return self._compiled
        return super().get_data(path)


@final
class _Finder:
    """Finds modules of the package in the bytes of the file."""

    def __init__(self, package: str, bundle: bytes):
        head, _, self._body = bundle.partition(b"\n\n")
        rows = map(str.split, head.decode().splitlines())
        self._rows = {name: (file, int(begin), int(end)) for name, file, begin, end in rows}
        if sum(end - begin for _, begin, end in self._rows.values()) != len(self._body):
            raise ValueError("cut short")
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module, or None for one that is not in the file."""
        row = self._rows.get(name)
        if row is None:
            return None
        file = f"{self._package}/{row[0]}"
        loader = _Loader(name, file, self._body[slice(*row[1:])])
        search_locations = (
            [file.removesuffix("/__init__.py")] if file.endswith("/__init__.py") else None
        )
        return spec_from_file_location(
            name, file, loader=loader, submodule_search_locations=search_locations
        )


def install_finder(package: str) -> bool:
    """Import what is in the file of a package from there from now on; tell whether there is one.

    Args:
      package: The directory of the package, whose name is the last part.
    """
    try:
        with open(bundle_path(package), "rb", buffering=0) as file:  # noqa: PTH123  # one call
            finder = _Finder(package, file.read())
    except (OSError, ValueError):
        return False
    sys.meta_path.insert(0, finder)
    return True


def write_bundle(package: str) -> str:
    """Compile all modules of a package, and write them to one file.

    Another process never finds half a file. Modules that do not compile are left out.

    Args:
      package: The directory of the package.

    Returns:
      The path of the file.

    Raises:
      OSError: The directory cannot be written.

    Cost: A second or two.
    """
    import py_compile
    from pathlib import Path

    root, name = Path(package), Path(package).name
    rows, body = [], b""
    file = Path(bundle_path(package))
    file.parent.mkdir(exist_ok=True)
    temporary_file = file.with_suffix(f".{os.getpid()}")
    try:
        for path in sorted(root.rglob("*.py")):
            inner = path.relative_to(root)
            names = [word for word in inner.with_suffix("").parts if word != "__init__"]
            with contextlib.suppress(py_compile.PyCompileError):
                py_compile.compile(str(path), str(temporary_file), doraise=True, dfile=None)
                bytecode = temporary_file.read_bytes()
                dotted, begin = ".".join([name, *names]), len(body)
                body += bytecode
                rows.append(f"{dotted} {inner} {begin} {len(body)}")
        temporary_file.write_bytes("\n".join(rows).encode() + b"\n\n" + body)
        temporary_file.replace(file)
    finally:
        temporary_file.unlink(missing_ok=True)
    return str(file)
