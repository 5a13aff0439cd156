"""Where a process is in the job, and what to call it.

The rank always comes from MPI; resolvers only add names.

- `spec`: `ClusterSpec`, jobs and the addresses of their tasks.
- `resolver`: `ClusterResolver`, what every resolver answers.
- `resolvers`: from MPI, which is the default, and from ``TF_CONFIG``. `tpu`: MPI again, under the
  words of a TPU.
- `simple`: what the program says, and several resolvers as one. `slurm`, `clouds`: from Slurm's
  environment, written as `hostlist` reads it; from Kubernetes and Compute Engine.
- `roles`: which task is the chief, and who counts as a worker. `tasks`: whether the names that
  resolvers give to ranks fit the ranks.
- `tf_config`: the text of ``TF_CONFIG``; `mpistrat.launch.tf_config` asks the ranks for it.

A resolver more is one file here, one line in `mpistrat.cluster_resolver` and one test class.
"""
