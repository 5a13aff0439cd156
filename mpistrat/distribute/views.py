"""How much of the other replicas' values a strategy shows.

One rank is one replica always. What differs between strategies is a row here.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Plain(enum.Enum):
    """What a plain value means where a value per replica is wanted."""

    REFUSED = "refused"
    PER_REPLICA = "each replica's own"
    SAME = "the one there is"


class View(NamedTuple):
    """One row: what cross-replica code sees.

    Attributes:
      wraps: All replicas are seen: results of ``run`` and arguments of ``merge_fn`` come as
        `PerReplica`; those of ``reduce_to``, ``update`` and ``broadcast_to``, which really
        broadcasts, as `Mirrored`.
      wraps_inputs: Dataset elements and values from functions come as `PerReplica`.
      plain: What a plain value means in ``reduce`` and ``gather``.
    """

    wraps: bool
    wraps_inputs: bool
    plain: Plain


GLOBAL = View(wraps=True, wraps_inputs=True, plain=Plain.REFUSED)
LOCAL = View(wraps=False, wraps_inputs=True, plain=Plain.PER_REPLICA)
ALONE = View(wraps=False, wraps_inputs=False, plain=Plain.SAME)
