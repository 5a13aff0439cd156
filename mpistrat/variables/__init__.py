"""Values of replicas, and variables: one copy per rank or per node, kept equal on every write.

`Variable` is the array that a strategy keeps on every replica, `PerReplica` and `Mirrored` are
values of all replicas, and `IndexedSlices` some rows of an array.
The room promises to `strategy`, `optim`, `metrics` and `checkpoint`:

- The copies of an ON_WRITE variable have the same bits on all ranks after every write, or the write
  is an error on all ranks and the old contents are back. Creation takes replica 0's initial value.
  For a variable without a name a digest of each rank's value is sent with the handshake; if these
  differ, there is one warning, with the lines of all ranks.
- An array that was given out (`np.asarray`, `handle`) is a live, read-only view.
- A value per replica is refused by ranks that it does not belong to.

Begin with `kinds`, then `variable` and `aggregation`. `on_read` alone says how a variable is read
and restored where each replica has its own copy.

- `kinds`: the foundation: enums, `DistributedVariable`, `WRITES`, views.
- `variable`: `Variable`. `reading`: its operators and NumPy functions, and what it refuses.
- `assignment`: values for variables, converted; scatter updates. `aggregation`: writes, and when
  they are compared.
- `on_read`: variables of which each replica has a copy of its own.
- `values`: `PerReplica`, `Mirrored`. `regroup`: the values of all replicas as one; `tree_summary`:
  the bytes that ranks exchange for it.
- `indexed_slices`: `IndexedSlices`. `sparse`: their reductions.
- `writes`: checks that ranks hold the same contents. `arguments`: checks of arguments.
"""
