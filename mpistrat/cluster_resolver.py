"""Cluster resolvers under the name that tf.distribute has for them."""

from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.resolvers import MPIClusterResolver, TFConfigClusterResolver
from mpistrat.cluster.spec import ClusterSpec

__all__ = ["ClusterResolver", "ClusterSpec", "MPIClusterResolver", "TFConfigClusterResolver"]
