"""Options of the example programs: a command line for a dataclass of settings."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

__all__ = ["option", "parse_settings"]

AnySettings = TypeVar("AnySettings")


def option(default: Any, help_text: str, allowed_values: Sequence[str] | None = None) -> Any:
    """Return a field of a dataclass of settings.

    Args:
      default: Its default, which has the type of all its values. Whole numbers are at least 1,
        unless this is 0.
      help_text: What it is, for ``--help``.
      allowed_values: All values that it may have; None for any.
    """
    argparse_words = {"help": help_text, "choices": allowed_values}
    return dataclasses.field(default=default, metadata=argparse_words)


def parse_count(text: str) -> int:
    """Return a number of at least 1, as an option of a command."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return int(text)


def parse_settings(
    settings_type: type[AnySettings], module: str, description: str, argv: Sequence[str] | None
) -> AnySettings:
    """Return the settings that a command line gives; others have their defaults.

    Args:
      settings_type: A dataclass, whose fields are made by `option`.
      module: The name of the program, as ``python -m`` takes it.
      description: What the program does; the first line of it is shown.
      argv: The words of the command line; None for those of this process.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field in dataclasses.fields(settings_type):  # type: ignore[arg-type]
        is_count = type(field.default) is int and field.default > 0
        parser.add_argument(
            f"--{field.name}",
            type=parse_count if is_count else type(field.default),
            default=field.default,
            **field.metadata,
        )
    return settings_type(**vars(parser.parse_args(argv)))
