"""One test for all combinations of some values, whose failure lists every one that fails.

A test that pytest makes of each combination costs milliseconds besides itself, and a worker as much
again; of thousands that is minutes.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest

LONGEST = 600  # seconds for all combinations, on a loaded machine and with nothing compiled yet
SHOWN_COUNT = 3  # failures whose traceback is shown; of others, the last line


class Failures(Exception):
    """The errors of a test, by combination."""

    def __init__(self, errors: dict[str, BaseException]):
        super().__init__(errors)
        self.errors = errors

    def __str__(self) -> str:
        """Return every combination that failed, and why."""
        lines = [f"{len(self.errors)} combinations failed:"]
        for number, (name, error) in enumerate(self.errors.items()):
            if number < SHOWN_COUNT:
                text = "".join(traceback.format_exception(error))
            else:
                text = traceback.format_exception_only(error)[-1]
            lines.append(f"--- {name}\n{text}")
        return "\n".join(lines)


def every(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[..., Any]:
    """As `pytest.mark.parametrize`, but all in one test; several can decorate one test.

    Each combination has a `monkeypatch` and a `tmp_path` of its own; other fixtures are shared. A
    combination that is skipped is left out; if all are, the test is skipped.

    Args:
      names: The argument, or several.
      values: Its values; of several, tuples.
    """
    argument_names = (
        tuple(names.replace(",", " ").split()) if isinstance(names, str) else tuple(names)
    )
    choices = [
        dict(zip(argument_names, value if len(argument_names) > 1 else (value,), strict=True))
        for value in values
    ]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def wrapper(*args: Any, **fixtures: Any) -> None:
            errors: dict[str, BaseException] = {}
            skipped = []
            for number, choice in enumerate(choices):
                name = ", ".join(f"{key}={_label(value)}" for key, value in choice.items())
                try:
                    _play(test, number, args, {**fixtures, **choice})
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except Failures as inner:
                    errors |= {f"{name}, {rest}": error for rest, error in inner.errors.items()}
                except (Exception, pytest.fail.Exception) as error:
                    if str(error).startswith("Timeout"):  # of the whole test: there is no time left
                        pytest.fail(f"{name}: {error}")
                    errors[name] = error
            if errors:
                raise Failures(errors)
            if len(skipped) == len(choices):
                raise skipped[0]

        signature = inspect.signature(test)
        fixture_parameters = [
            parameter
            for name, parameter in signature.parameters.items()
            if name not in argument_names
        ]
        assert len(fixture_parameters) == len(signature.parameters) - len(argument_names), (
            f"{test} has not {argument_names}"
        )
        wrapper.__signature__ = signature.replace(parameters=fixture_parameters)  # type: ignore[attr-defined]
        marks = {mark.name for mark in getattr(test, "pytestmark", ())}
        return wrapper if "timeout" in marks else pytest.mark.timeout(LONGEST)(wrapper)

    return decorate


def _play(test: Callable[..., None], number: int, args: Any, arguments: dict[str, Any]) -> None:
    if "tmp_path" in arguments:
        arguments["tmp_path"] = arguments["tmp_path"] / str(number)
        arguments["tmp_path"].mkdir()
    if "monkeypatch" not in arguments:
        return test(*args, **arguments)
    with pytest.MonkeyPatch.context() as arguments["monkeypatch"]:
        return test(*args, **arguments)


def _label(value: Any) -> str:
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else repr(value)[:80]
