"""All-reduce algorithms, and the table that chooses one for each call.

To add one: a file beside this one with an `AllReduceAlgorithm`, and one row here.
"""

from mpistrat.collectives.algorithms.algorithm import AllReduceAlgorithm
from mpistrat.collectives.algorithms.bucketed_shared import BucketedSharedMemory
from mpistrat.collectives.algorithms.in_handshake import InHandshake
from mpistrat.collectives.algorithms.in_place import InPlaceSharedMemory
from mpistrat.collectives.algorithms.mpi import MpiMessages
from mpistrat.collectives.algorithms.pairs import PairedSharedMemory
from mpistrat.collectives.algorithms.single_rank import SingleRank
from mpistrat.collectives.algorithms.small_shared import SmallSharedMemory

# The first that applies is taken; the facts that decide it are alike on all ranks. Algorithms that
# are not cacheable depend on which arrays are given; they come first.
ALGORITHMS: tuple[type[AllReduceAlgorithm], ...] = (
    InPlaceSharedMemory,  # value and out are the same arrays of the arena, and worth it
    InHandshake,  # weights and values fit the handshake
    SingleRank,  # there is one rank
    MpiMessages,  # the ranks of a node cannot share memory
    SmallSharedMemory,  # one dtype, one node, and all ranks' values together are up to 256 KiB
    PairedSharedMemory,  # two ranks of one node, whose results have the dtype that travels
    BucketedSharedMemory,  # everything else
)
