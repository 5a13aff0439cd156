"""The source text of Python's standard library, as pieces of numbered symbols."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import mpistrat as ms

__all__ = [
    "HELD_OUT_MODULES",
    "SYMBOL_COUNT",
    "TRAINING_MODULES",
    "decode_symbols",
    "encode_text",
    "read_datasets",
    "read_pieces",
    "read_source",
]

TRAINING_MODULES = (
    *("argparse", "ast", "base64", "bdb", "cmd", "collections", "configparser", "contextlib"),
    *("copy", "csv", "dataclasses", "difflib", "dis", "doctest", "enum", "fileinput", "fractions"),
    *("ftplib", "functools", "gettext", "gzip", "hashlib", "heapq", "imaplib", "inspect"),
    *("ipaddress", "mailbox", "mimetypes", "optparse", "pdb", "pickle", "pickletools", "platform"),
    *("plistlib", "poplib", "pprint", "profile", "pstats", "pydoc", "queue", "random", "sched"),
    *("selectors", "shelve", "shutil", "smtplib", "socket", "socketserver", "ssl", "statistics"),
    *("subprocess", "tarfile", "tempfile", "threading", "timeit", "tokenize", "trace"),
    *("traceback", "typing", "uuid", "weakref", "webbrowser", "zipapp"),
)
HELD_OUT_MODULES = ("calendar", "glob", "numbers", "shlex", "textwrap")
INDENT = "\x7f"  # four spaces, as one symbol: the model would lose count of single ones
SYMBOL_COUNT = 97  # the end of a line, printable ASCII, and INDENT


def encode_text(text: str) -> Any:
    r"""Return the numbers of the symbols of a text, uint8.

    Example:
      >>> encode_text("a = 1\n")
      array([66,  1, 30,  1, 18,  0], dtype=uint8)
      >>> decode_symbols(encode_text("    é\n"))
      '    ?\n'
    """
    ascii_bytes = text.expandtabs().replace(" " * 4, INDENT).encode("ascii", "replace")
    return np.clip(np.frombuffer(ascii_bytes, np.uint8), 31, 127) - np.uint8(31)


def decode_symbols(symbols: Iterable[int]) -> str:
    """Return the text that numbers of symbols stand for."""
    text = "".join(chr(symbol + 31) if symbol else "\n" for symbol in symbols)
    return text.replace(INDENT, " " * 4)


def read_source(module: str) -> Any:
    """Return the source text of a module, as numbers of symbols.

    Raises:
      ImportError: There is no such module, or not its source.
    """
    spec = importlib.util.find_spec(module)
    loader: Any = spec.loader if spec else None
    text = loader.get_source(module) if hasattr(loader, "get_source") else None
    if text is None:
        raise ImportError(
            f"This example reads the source text of Python's module {module!r}, which "
            f"{sys.executable} does not have. Use a Python with the source of its whole standard "
            "library."
        )
    return encode_text(text)


def read_pieces(strategy: ms.Strategy, modules: Sequence[str], length: int) -> Any:
    """Return the text of modules, cut into pieces: (pieces, length + 1), uint8.

    Each piece begins with the last symbol of the one before it, because the model is asked for the
    symbol that follows.

    Collective: that all ranks have read the same text is checked; another version of Python on one
    rank is an error on all.
    """
    symbols_by_module: dict[str, Any] = {}
    strategy.run(
        lambda: symbols_by_module.update({module: read_source(module) for module in modules})
    )
    strategy.check_same(symbols_by_module)
    symbols = np.concatenate(list(symbols_by_module.values()))
    piece_starts = np.arange(0, len(symbols) - length, length)
    return symbols[piece_starts[:, None] + np.arange(length + 1)]


def read_datasets(
    strategy: ms.Strategy, length: int, batch: int, seed: int
) -> tuple[ms.Dataset, ms.Dataset]:
    """Return batches to train on, without end, and batches of the held-out text. Collective."""
    training_pieces = read_pieces(strategy, TRAINING_MODULES, length)
    held_out_pieces = read_pieces(strategy, HELD_OUT_MODULES, length)
    endless = ms.Dataset(training_pieces).shuffle(seed=seed).repeat().batch(batch)
    return endless, ms.Dataset(held_out_pieces).batch(batch)
