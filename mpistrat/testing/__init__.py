"""For tests of mpistrat and of programs that use it.

- `run_ranks`: N ranks as threads of one process; plain pytest and a debugger work.
- `same`: fail on every rank if a value differs between ranks, so that nobody waits for ever.
"""

from mpistrat.testing.ranks import RanksFailed, run_ranks
from mpistrat.testing.same import same

__all__ = ["RanksFailed", "run_ranks", "same"]
