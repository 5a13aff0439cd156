"""Starts, watches and ends jobs; the command line ``mpistrat`` with its subcommands.

`mpistrat run` finds the launcher that belongs to the MPI library of mpi4py (or ``srun`` in an
allocation of Slurm), prints its call, and runs it to its end. It promises to a user: one job, never
N jobs of one rank; the exit code that the ranks have agreed on; a line that names the cause of an
end that no rank could print, such as a signal; no process or file left behind. A program does not
need it: ``srun python -m mpistrat.launch.rank train.py`` works as well, and so does plain
``mpiexec``. No other room imports from this one, except for two names of
`mpistrat.cluster_resolver`, which are made in `tf_config`.

Begin to read with `run`: it plans the call (`plan`), runs it (`process`) and reports its end
(`roster`). Then read `rank`, the other end of it.

The command line:

- `cli`: the command ``mpistrat``. Each subcommand is a module with a docstring, which is its help
  text, and the functions `add_arguments` and `main`: `run`, `doctor`, `warm`, `drill`, `batch`,
  `scaling`, `profile`, `requeue` (and `mpistrat.checkpoint.inspection`).
- `completion`: its option ``--print-completion``, for shells.
- `arguments`: types of arguments that several subcommands take.

Jobs:

- `mpi_libraries`: finds the MPI library and the launcher of this environment, and checks that they
  fit. `FLAVOURS` has one row for each MPI implementation; a new one is a row.
- `plan`: the call of ``srun`` or ``mpiexec`` for an allocation and the options of a user.
- `process`: runs a launcher to its end: forwards signals, keeps a time limit, leaves no orphans.
- `rank`: the program that `mpistrat run` starts on each rank, which starts MPI and then the user's.
- `streams`: standard input, output and error of ranks and launcher; labels, and one file for each
  rank.
- `roster`: the ranks on this host, and which of them a signal has ended.

For the subcommands:

- `facts`: the report of each rank to `doctor`; `doctor_checks`: the checks of these facts.
- `batch_job`: the description of a batch job, of which `batch` writes a script.
- `tf_config`: ``TF_CONFIG`` for TensorFlow programs under the same launcher.
"""
