"""Cluster resolvers, and what the batch system knows of this job.

A resolver gives the processes of a job the names that tf.distribute knows them by: job, task,
address. The rank always comes from MPI; a resolver only adds names. The rooms above are promised
that ranks never exchange messages here: resolvers read the environment, and only those of `clouds`
ask a service. Only functions of `batch_job` run another program.

Begin with `resolver`, which has `ClusterSpec` and `ClusterResolver`.

- `resolver`: clusters, and the base classes of resolvers.
- `resolvers`: names from MPI (the default), from ``TF_CONFIG``, from the program, and the text of
  ``TF_CONFIG``.
- `slurm`: names from the environment of a Slurm step. `clouds`: from Kubernetes and Compute Engine.
- `allocation`: the hosts of this job, from Slurm, PBS, or a file.
- `batch_job`: the id of the batch job, and the end of its time.

To add a resolver: one file here, one line in `mpistrat.cluster_resolver` and one test class.
"""
