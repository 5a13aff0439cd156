"""Tools for tests of programs that use mpistrat.

- `run_ranks`: N ranks as threads of one process; plain pytest and a debugger work.
- `inject`: make one rank fail in a call of your choice.
- `same`: check that all ranks have the same value; fails on every rank, so that no rank hangs.

The room promises that a failure of a rank ends the test with an error that names the rank, never
with a hang. All of it is in the module `ranks`.
"""

from mpistrat.lockstep.inject import InjectedError
from mpistrat.testing.ranks import RanksFailed, inject, run_ranks, same

__all__ = ["InjectedError", "RanksFailed", "inject", "run_ranks", "same"]
