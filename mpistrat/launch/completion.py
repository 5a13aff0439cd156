"""The option ``--print-completion``: a script by which a shell completes commands and options.

`shtab` writes it from the parser of ``mpistrat``, so a new option is completed without a change
here. The placeholder of an argument in the help ("FILE", "DIR") decides what completes its value.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, NoReturn, final

SHELLS = ("bash", "zsh", "fish")

_FILES = ("FILE", "INI", "TAR", "IMAGE", "SCRIPT ...", "PROGRAM ...", "PATH", "OTHER", "OUT")
_DIRECTORIES = ("DIR", "DIRECTORY")
# Files of the current directory, and of packages in it, as names of modules. In the scripts this is
# inside double quotes, so it has no dollar and no backslash.
_LIST_MODULES = (
    "find . -maxdepth 3 -name '[a-zA-Z_]*.py' -not -path '*/.*/*' 2>/dev/null"
    " | sed -e 's,^[.]/,,' -e 's,[.]py,,' -e 's,/__init__,,' -e 's,/__main__,,' -e 's,/,.,g'"
)


@final
class PrintCompletion(argparse.Action):
    """Prints the script for one shell, and ends."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        shell: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        """Print the script for the shell `shell`, of the parser that has this option."""
        try:
            import shtab
        except ImportError:
            parser.error(f"{option_string} needs shtab: pip install 'mpistrat[completion]'")
        completers = {
            **dict.fromkeys(_FILES, shtab.FILE),
            **dict.fromkeys(_DIRECTORIES, shtab.DIRECTORY),
            "MODULE ...": shtab.cmd(_LIST_MODULES),
        }
        for action in _list_actions(parser):
            if isinstance(action.metavar, str) and action.metavar in completers:
                vars(action)["complete"] = completers[action.metavar]
        print(shtab.complete(parser, shell=shell))
        parser.exit()


def _list_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _list_actions(subparser)
