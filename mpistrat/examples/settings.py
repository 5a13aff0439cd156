"""Options of the example programs: a command line for a dataclass of settings."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from mpistrat.launch.arguments import parse_positive

__all__ = ["collect_fixed_settings", "option", "parse_settings"]

AnySettings = TypeVar("AnySettings")


def option(
    default: Any,
    help_text: str,
    *,
    allowed_values: Sequence[str] | None = None,
    can_change: bool = False,
) -> Any:
    """Return a field of a dataclass of settings.

    Args:
      default: Its default, which has the type of all its values. Whole numbers are at least 1,
        unless this is 0.
      help_text: What it is, for ``--help``.
      allowed_values: All values that it may have; None for any.
      can_change: A run may be continued with another value.
    """
    metadata = {"help": help_text, "choices": allowed_values, "can_change": can_change}
    return dataclasses.field(default=default, metadata=metadata)


def collect_fixed_settings(choices: Any) -> dict[str, Any]:
    """Return the settings that a run keeps when it is continued, by name.

    Args:
      choices: A dataclass of settings, whose fields are made by `option`.
    """
    fields = dataclasses.fields(choices)
    return {f.name: getattr(choices, f.name) for f in fields if not f.metadata["can_change"]}


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
            type=parse_positive if is_count else type(field.default),
            default=field.default,
            help=field.metadata["help"],
            choices=field.metadata["choices"],
        )
    return settings_type(**vars(parser.parse_args(argv)))
