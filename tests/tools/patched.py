"""Functions of `os` that a test exchanges, where paths of Python 3.10 hold some themselves."""

from __future__ import annotations

import os
import pathlib


def patch_os(monkeypatch, name, function):
    """Let ``os.NAME``, and what methods of `pathlib.Path` call for it, be another function."""
    monkeypatch.setattr(os, name, function)
    accessor = getattr(pathlib, "_normal_accessor", None)  # until Python 3.10
    if accessor is not None:
        monkeypatch.setattr(accessor, name, function)
