"""Shared memory of the ranks of a node: segments, buffers, and the storage of variables.

The rooms above get from here memory without a name, so nothing is left behind whatever becomes of
the ranks. It is allocated in full when it is made; if there is too little on some node, all ranks
of the job learn it in the same call and use another way, such as MPI. Each rank touches the pages
of its own slice first, so that they are on the NUMA node of its core: of buffers the columns that
it reduces, of packed rows its own row, of variables and optimizer state the part that it writes.
Begin with `arena` for reductions, with `storage` for variables.

- `nodes`: the ranks of this node, and their peers on the other nodes.
- `segments`: how processes share memory without a name; memory of results, used again.
- `private_mapping`: a mapping in which one process writes for itself alone.
- `arena`: the shared memory of a session: rows for reductions, and blocks of buffers.
- `storage`: memory of arrays that are the same on all ranks.
"""
