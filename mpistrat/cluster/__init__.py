"""Cluster resolvers: they give the processes of a job the names that tf.distribute knows them by.

The rank always comes from MPI; a resolver only adds names (job, task, address).

- `spec`: `ClusterSpec`, jobs and the addresses of their tasks.
- `resolver`: `ClusterResolver`, the questions that every resolver answers.
- `resolvers`: names from MPI, the default, also with the arguments of a TPU's resolver, and from
  ``TF_CONFIG``.
- `simple`: names that the program gives, and the union of several resolvers. `slurm`: names from
  Slurm's environment, whose lists `hostlist` reads. `clouds`: from Kubernetes and Compute Engine.
- `tasks`: which task is the chief, and whether the names that resolvers give fit the ranks.
- `job`: the batch job, as Slurm or PBS tells it: its id, and when its time ends.
- `tf_config`: the text of ``TF_CONFIG``; `mpistrat.launch.tf_config` asks the ranks for it.

To add a resolver: one file here, one line in `mpistrat.cluster_resolver` and one test class.
"""
