"""Arguments that hypothesis draws: the same in every run, however slow the machine is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings


def drawn(examples: int, **strategies: Any) -> Callable[[Any], Any]:
    """Run a test with so many examples, each argument of which is drawn from its strategy.

    All runs draw the same examples, and a slow draw is no failure. To test more examples, raise the
    number.
    """
    run_examples = settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    # With Python 3.14 hypothesis takes a reference of its own for one that nobody has: that counts
    # fewer of them.
    ignore_warning = pytest.mark.filterwarnings("ignore:It looks like `register_random`")
    return lambda test: ignore_warning(run_examples(given(**strategies)(test)))
