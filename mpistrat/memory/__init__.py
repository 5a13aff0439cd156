"""Memory that the ranks of a node share.

- `shared`: how they come by it without a name that could be left behind.
- `nodes`: which ranks share a node, and how nodes talk.
- `layout`: where the leaves of a tree lie in a block.
- `arena`: the blocks of one session.
- `overlay`: where a rank writes for itself alone.
- `copies`: what variables hold, once per node or once per rank.
"""
