"""All-reduce algorithms, and the table that orders them.

Each module is one way to move the bytes of a plan; `mpistrat.collectives.allreduce` takes the first
in the table that applies. All give the same bits on all ranks. To add one: a module beside this one
with an `AllReduceAlgorithm`, and one row here.

- `algorithm`: the interface: stage, handshake, finish.
- `single_rank`: one rank.
- `in_handshake`: everything is sent with the handshake.
- `in_place`: arrays of the arena, without a copy.
- `small_shared`: small arrays in shared memory, which each rank reduces for itself.
- `pairs`: two ranks of one node.
- `bucketed_shared`: shared memory, bucket by bucket, and between nodes.
- `mpi`: without shared memory.
"""

from mpistrat.collectives.algorithms.algorithm import AllReduceAlgorithm
from mpistrat.collectives.algorithms.bucketed_shared import BucketedSharedMemory
from mpistrat.collectives.algorithms.in_handshake import InHandshake
from mpistrat.collectives.algorithms.in_place import InPlaceSharedMemory
from mpistrat.collectives.algorithms.mpi import MpiMessages
from mpistrat.collectives.algorithms.pairs import PairedSharedMemory
from mpistrat.collectives.algorithms.single_rank import SingleRank
from mpistrat.collectives.algorithms.small_shared import SmallSharedMemory

# The first that applies is taken; the facts that decide it are equal on all ranks. Algorithms that
# are not cacheable depend on the arrays themselves; they come first.
ALGORITHMS: tuple[type[AllReduceAlgorithm], ...] = (
    InPlaceSharedMemory,  # value and out are the same arrays of the arena, and worth it
    InHandshake,  # weights and values fit the handshake
    SingleRank,  # there is one rank
    MpiMessages,  # the ranks of a node cannot share memory
    SmallSharedMemory,  # one dtype, one node, and the values of all ranks have up to 256 KiB
    PairedSharedMemory,  # two ranks of one node, whose results have the dtype that travels
    BucketedSharedMemory,  # everything else
)
