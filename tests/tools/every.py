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
SHOWN = 3  # failures whose traceback is shown; of others, the last line


class Failures(Exception):
    """What failed, by its combination."""

    def __init__(self, found: dict[str, BaseException]):
        super().__init__(found)
        self.found = found

    def __str__(self) -> str:
        """Return every combination that failed, and why."""
        lines = [f"{len(self.found)} combinations failed:"]
        for number, (name, error) in enumerate(self.found.items()):
            if number < SHOWN:
                text = "".join(traceback.format_exception(error))
            else:
                text = traceback.format_exception_only(error)[-1]
            lines.append(f"--- {name}\n{text}")
        return "\n".join(lines)


def every(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[..., Any]:
    """As `pytest.mark.parametrize`, but all in one test; may stand on top of others of its kind.

    Each combination has a `monkeypatch` and a `tmp_path` of its own; other fixtures are shared. A
    combination that is skipped is left out; if all are, the test is skipped.

    Args:
      names: The argument, or several.
      values: Its values; of several, tuples.
    """
    several = tuple(names.replace(",", " ").split()) if isinstance(names, str) else tuple(names)
    choices = [
        dict(zip(several, value if len(several) > 1 else (value,), strict=True)) for value in values
    ]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def wrapper(*args: Any, **fixtures: Any) -> None:
            found: dict[str, BaseException] = {}
            skipped = []
            for number, choice in enumerate(choices):
                name = ", ".join(f"{key}={_shown(value)}" for key, value in choice.items())
                try:
                    _play(test, number, args, {**fixtures, **choice})
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except Failures as inner:
                    found |= {f"{name}, {rest}": error for rest, error in inner.found.items()}
                except (Exception, pytest.fail.Exception) as error:
                    if str(error).startswith("Timeout"):  # of the whole test: there is no time left
                        pytest.fail(f"{name}: {error}")
                    found[name] = error
            if found:
                raise Failures(found)
            if len(skipped) == len(choices):
                raise skipped[0]

        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in several]
        assert len(left) == len(signature.parameters) - len(several), f"{test} has not {several}"
        wrapper.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        marks = {mark.name for mark in getattr(test, "pytestmark", ())}
        return wrapper if "timeout" in marks else pytest.mark.timeout(LONGEST)(wrapper)

    return decorate


def _play(test: Callable[..., None], number: int, args: Any, given: dict[str, Any]) -> None:
    if "tmp_path" in given:
        given["tmp_path"] = given["tmp_path"] / str(number)
        given["tmp_path"].mkdir()
    if "monkeypatch" not in given:
        return test(*args, **given)
    with pytest.MonkeyPatch.context() as given["monkeypatch"]:
        return test(*args, **given)


def _shown(value: Any) -> str:
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else repr(value)[:80]
