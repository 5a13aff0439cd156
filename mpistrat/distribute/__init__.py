"""The programming model: strategies, replica contexts, distributed values and variables.

- `context`: where the running code is (default, cross-replica, replica), and `ReplicaContext`.
- `values`: `PerReplica` and `Mirrored`.
- `views`: how much of the other replicas' values a strategy shows, as rows of a table.
- `regroup`: the values of all replicas as one, and one replica's part of them.
- `variables`: `Variable`, and who may write it.
- `extended`, `strategy`, `strategies`: the calls, the façade and the presets.
"""
