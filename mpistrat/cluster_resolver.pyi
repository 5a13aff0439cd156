"""The names of this module, for type checkers; it binds them when they are used."""

from mpistrat.cluster.clouds import GCEClusterResolver as GCEClusterResolver
from mpistrat.cluster.clouds import KubernetesClusterResolver as KubernetesClusterResolver
from mpistrat.cluster.clouds import KubernetesExecutableLocation as KubernetesExecutableLocation
from mpistrat.cluster.resolver import ClusterResolver as ClusterResolver
from mpistrat.cluster.resolver import ClusterSpec as ClusterSpec
from mpistrat.cluster.resolvers import MPIClusterResolver as MPIClusterResolver
from mpistrat.cluster.resolvers import SimpleClusterResolver as SimpleClusterResolver
from mpistrat.cluster.resolvers import TFConfigClusterResolver as TFConfigClusterResolver
from mpistrat.cluster.resolvers import TPUClusterResolver as TPUClusterResolver
from mpistrat.cluster.resolvers import UnionResolver as UnionResolver
from mpistrat.cluster.slurm import SlurmClusterResolver as SlurmClusterResolver
from mpistrat.launch.tf_config import tf_config as tf_config
from mpistrat.launch.tf_config import write_tf_config as write_tf_config
