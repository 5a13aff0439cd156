"""How many Python functions something calls: a cost that no busy machine disturbs."""

from __future__ import annotations

import gc
import sys


def calls_of(fn):
    """Return how many Python functions a function calls in this thread."""
    count = 0

    def count_call(frame, event, _):
        nonlocal count
        count += event == "call"

    gc.disable()  # which may call finalizers of other tests
    sys.setprofile(count_call)
    try:
        fn()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
