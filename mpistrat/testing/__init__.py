"""For tests of mpistrat and of programs that use it.

- `run_ranks`: N ranks as threads of one process; plain pytest and a debugger work.
- `inject`: let one rank fail in a call of your choice.
- `same`: fail on every rank if a value differs between ranks, so that nobody waits for ever.
"""

from mpistrat.testing.faults import InjectedError, inject
from mpistrat.testing.ranks import RanksFailed, run_ranks
from mpistrat.testing.same import same

__all__ = ["InjectedError", "RanksFailed", "inject", "run_ranks", "same"]
