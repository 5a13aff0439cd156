"""How much of the other replicas' values a strategy shows.

One rank is one replica always. What differs between strategies is a row here.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Plain(enum.Enum):
    """What a plain value means where a value per replica is wanted."""

    REFUSED = "refused"
    EACH = "each replica's own"
    SAME = "the one there is"


class View(NamedTuple):
    """One row: what cross-replica code sees.

    Attributes:
      name: How messages call it.
      wraps: Results of ``run`` and arguments of ``merge_fn`` come as `PerReplica` of all replicas.
      wraps_inputs: Dataset elements and values from functions come as `PerReplica`.
      mirrors: Results of ``reduce_to``, ``update`` and ``broadcast_to`` come as `Mirrored`, and
        ``broadcast_to`` really broadcasts.
      plain: What a plain value means in ``reduce`` and ``gather``.
    """

    name: str
    wraps: bool
    wraps_inputs: bool
    mirrors: bool
    plain: Plain


GLOBAL = View("global", wraps=True, wraps_inputs=True, mirrors=True, plain=Plain.REFUSED)
LOCAL = View("local", wraps=False, wraps_inputs=True, mirrors=False, plain=Plain.EACH)
ALONE = View("alone", wraps=False, wraps_inputs=False, mirrors=False, plain=Plain.SAME)
