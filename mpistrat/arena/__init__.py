"""Memory that a group of ranks shares.

- `nodes`: which ranks share a node, and how nodes talk.
- `layout`: where the leaves of a tree are in a block.
- `arena`: the blocks of one session.
- `storage`: what variables hold, once per node or once per rank.
"""
