"""Types of arguments that several subcommands take, for `argparse`."""

from __future__ import annotations

import argparse
from pathlib import Path


def parse_positive(text: str) -> int:
    """Return an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def parse_seconds(text: str) -> float:
    """Return a number of seconds greater than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds greater than 0, got {text!r}")
    return value


def parse_non_negative(text: str) -> float:
    """Return a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def parse_file_path(text: str) -> Path:
    """Return the path of a file, which has a name."""
    if not Path(text).name:
        raise argparse.ArgumentTypeError(f"must be the name of a file, got {text!r}")
    return Path(text)
