"""What tests of checkpoints have in common."""

from __future__ import annotations

import pytest

from mpistrat.shm import storage


@pytest.fixture(params=["own", "common"])
def kept(request, monkeypatch):
    """Have each rank keep copies of its own, or the ranks of a node one, however small."""
    if request.param == "common":
        monkeypatch.setattr(storage, "MIN_SHARED_NBYTES", 0)
