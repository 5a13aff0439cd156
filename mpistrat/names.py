"""Public names of a module from its stub: each is bound when it is first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def bind_public_names(
    module: str, file: str, absent: Callable[[str], Any] | None = None
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a module.

    Args:
      module: Its ``__name__``.
      file: Its ``__file__``. The stub is beside it, with a line for each name, such as ``from
        mpistrat.errors import DataError as DataError``; type checkers read it, too.
      absent: Called with a name that the stub does not have; raises the error. None for Python's
        own error.
    """
    loader: Any = sys.modules[module].__loader__  # which reads from an archive, too
    text = loader.get_data(str(Path(file).with_suffix(".pyi"))).decode()
    modules = {}
    for line in text.replace("(\n", "").splitlines():
        if line.startswith("from "):  # from HOME import ORIGINAL as NAME
            words = line.split()
            modules[words[5].rstrip(",")] = words[1], words[3]

    def __getattr__(name: str) -> Any:
        if name not in modules and absent is not None:
            return absent(name)
        if name not in modules:
            text = f"module {module!r} has no attribute {name!r}"
            # With these Python adds the name that may be meant.
            raise AttributeError(text, name=name, obj=sys.modules[module])
        module_name, original_name = modules[name]
        is_submodule = module_name == module  # so it is a module itself
        original_module = importlib.import_module(
            f"{module_name}.{original_name}" if is_submodule else module_name
        )
        setattr(
            sys.modules[module],
            name,
            original_module if is_submodule else getattr(original_module, original_name),
        )
        return getattr(sys.modules[module], name)

    names = sorted(modules)
    return names, __getattr__, lambda: names
