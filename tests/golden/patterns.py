"""Patterns of case names: ``*`` for anything, ``{a|b}`` for one of several."""

from __future__ import annotations

import functools
import re

_SPECIAL = re.compile(r"\*|\{[^{}]*\}")


def _one(token: str) -> str:
    if token == "*":
        return ".*"
    return f"(?:{'|'.join(map(_text, token[1:-1].split('|')))})"


def _text(text: str) -> str:
    return ".*".join(map(re.escape, text.split("*")))


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts, at = [], 0
    for token in _SPECIAL.finditer(pattern):
        parts += [re.escape(pattern[at : token.start()]), _one(token.group())]
        at = token.end()
    return re.compile("".join([*parts, re.escape(pattern[at:])]))


def matches(pattern: str, key: str) -> bool:
    """Tell whether the whole of `key` fits `pattern`."""
    return _compiled(pattern).fullmatch(key) is not None
