"""Strategies: scopes, `run`, reductions, inputs; and the contexts of replica code.

A strategy is a façade over a `ReplicaGroup`: the ranks, their handshakes (`lockstep`), plans and
reducer (`collectives`), and the view of the other replicas' values. One rank is one replica.

The room promises to programs, and to `optim`, `metrics`, `checkpoint` and the doors to other
libraries:

- Every call is checked between ranks before it moves anything. An error of one rank is an error on
  all of them, at the same call.
- ``run`` ends in one handshake whatever its function did, so ``try`` around it is symmetric.
- Code knows where it runs: `context_stack` has the only state of contexts. Calls in the wrong place
  are errors that say where to call them.
- A training step costs three handshakes and one barrier of the node: ``next()``, whose handshake
  checks that the ranks have the same batch; ``apply_gradients``, with its barrier; and the end of
  ``run``, whose handshake also compares writes of small variables. On one rank there are two
  handshakes, without communication. ``tests/unit/optim/test_step.py`` counts them.

Begin with `context_stack`, `replica_group` and `run`; then follow one call of `strategy`.
`Strategy.reduce`, variables and metrics reach the all-reduce by
`ReplicaGroup.all_reduce_contributions`; ``apply_gradients`` by `ReplicaGroup.make_reduction`, or by
`Reducer.handshake` where it reduces by itself.

- `context_stack`: the context of the running code. `replica_context`: `ReplicaContext`.
- `replica_group`: the ranks of a strategy, and the objects that move values.
- `strategy`: `Strategy`. `inputs`: its methods about datasets. `extended`: `StrategyExtended`.
- `strategies`: the presets, and the current strategy. `topology`: those that place replicas.
- `run`: the beginning and end of replica code, ``merge_call``, several steps in one call.
- `all_reduce`: the all-reduce of replica code. `reductions`: reductions and gathers of
  cross-replica code. `cross_device`: reductions by a class of the program's own.
- `destinations`: ``update`` and ``broadcast_to``. `shared_state`: state that is not a variable.
"""
