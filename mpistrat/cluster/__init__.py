"""Where a process is in the job, and what to call it.

The rank always comes from MPI; resolvers only add names.

- `detect`, `job`: what the launcher's environment says, without starting MPI.
- `spec`: `ClusterSpec`, jobs and the addresses of their tasks.
- `resolver`: `ClusterResolver`, what every resolver answers.
- `resolvers`: from MPI, and from ``TF_CONFIG``.
"""
