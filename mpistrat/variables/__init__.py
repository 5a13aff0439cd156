"""Values of replicas, and variables: one copy per rank or per node, kept equal on every write."""
