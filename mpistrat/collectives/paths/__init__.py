"""The algorithms of an all-reduce, and when each is used.

A new way is one file with one `Path`, and one row here.
"""

from mpistrat.collectives.paths.alone import Alone
from mpistrat.collectives.paths.frame import Frame
from mpistrat.collectives.paths.in_place import InPlace
from mpistrat.collectives.paths.mpi import Messages
from mpistrat.collectives.paths.pairs import Pairs
from mpistrat.collectives.paths.path import Path
from mpistrat.collectives.paths.shared import Direct, Packs

# The first one that fits is taken; what that asks for is alike on all ranks.
PATHS: tuple[type[Path], ...] = (
    InPlace,  # value and out are the same arrays of the arena, and worth it
    Frame,  # weights and values fit the handshake
    Alone,  # there is one rank
    Messages,  # the ranks of a node cannot share memory
    Direct,  # one dtype, one node, and all ranks' values together are up to 256 KiB
    Pairs,  # two ranks of one node, whose results have the dtype that travels
    Packs,  # everything else
)
