"""What tests of variables have in common."""

from __future__ import annotations

import pytest

from mpistrat.memory import copies


@pytest.fixture(params=["own", "common"])
def kept(request, monkeypatch):
    """Have each rank keep copies of its own, or the ranks of a node one, however small."""
    if request.param == "common":
        monkeypatch.setattr(copies, "LEAST", 0)
    return request.param
