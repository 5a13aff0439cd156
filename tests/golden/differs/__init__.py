"""Cases that differ from the record on purpose, by decision."""

from __future__ import annotations

from .collectives import ALL_GATHER, ALL_REDUCE, REDUCE, RUNS
from .kinds import Differs, Fails, Ranks
from .values import EXTENDED, VALUES
from .variables import VARIABLES

__all__ = ["DIFFERS", "Differs", "Fails", "Ranks"]

DIFFERS: dict[str, Differs] = {
    **RUNS,
    **ALL_REDUCE,
    **ALL_GATHER,
    **REDUCE,
    **EXTENDED,
    **VALUES,
    **VARIABLES,
}
