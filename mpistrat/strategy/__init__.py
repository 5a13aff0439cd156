"""The programming model: strategies, replica contexts, distributed values and variables.

- `mode`: where the running code is (default, cross-replica, replica). `context`: `ReplicaContext`.
- `values`: `PerReplica` and `Mirrored`; `operators`: their arithmetic.
- `views`: how much of the other replicas' values a strategy shows, as rows of a table.
- `regroup`: the values of all replicas as one, and one replica's part of them.
- `variables`: `Variable`; `aggregations`, `scatter`: how it is written to.
- `extended`, `strategy`, `strategies`: the calls, the façade and the presets.
"""
