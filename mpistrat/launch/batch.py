"""Write a job script for Slurm or PBS, and submit it.

The script is printed on stdout, or written to a file with -o; --submit then submits that file. An
INI file may hold the options, one per line in its section [job], such as "nodes = 2"; an option
that may be given several times has one line for each value; "program" is the program and its
arguments, if they are not given on the command line.

The program is started on each rank. With --checkpoint DIR it gets those arguments too, is sent
SIGUSR1 before its time ends, and is started again if it exits with code 42, as `ms.preemption`
does. In the arguments of the program, {task} stands for the number of the array task, and {local}
for the directory on the local disk of the node to which --stage copies files.
"""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import re
import shlex
from pathlib import Path, PurePath
from typing import Any

from mpistrat.errors import OptionError
from mpistrat.launch.batch_job import BatchJob, submit, words
from mpistrat.watchdog.status_board import say

_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz")
_FRESH = """'rm -rf "$0" && mkdir -m 700 "$0"'"""
# Unpacks $0 in $1. Commands such as `mpistrat` hold the place of their Python, in their first line.
_UNPACK = """'mkdir "$1" && tar -xf "$0" -C "$1" && rm "$0" || exit
    if [ -e "$1/bin/conda-unpack" ]; then PATH="$1/bin:$PATH" conda-unpack; exit; fi
    cd "$1/bin" && grep -lI "^#!.*/bin/python" * |
        xargs -r sed -i "1s|^#!.*/bin/python|#!$1/bin/python|"'"""


def render(job: BatchJob) -> str:
    """Return the text of a job script, for bash; its second line is the command that makes it.

    Args:
      job: What to run.

    Example:
      >>> from mpistrat.launch.batch_job import BatchJob
      >>> print(render(BatchJob(("train.py",), nodes=2, time="00:10:00")).splitlines()[2])
      #SBATCH --job-name=mpistrat
    """
    head = ["#!/bin/bash", f"# {shlex.join(['mpistrat', 'batch', *words(job)])}"]
    parts = (
        [*head, *(_slurm(job) if job.scheduler == "slurm" else _pbs(job))],
        _environment(job),
        _staged(job),
        _trials(job),
        _resumable(job),
        _call(job),
        _continuation_lines(job),
    )
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _slurm(job: BatchJob) -> list[str]:
    """Return the directives of Slurm."""
    words = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.per_node}",
        f"--cpus-per-task={job.cores}",
        f"--time={job.time}",
        f"--output=slurm-%x-{'%A_%a' if job.tasks else '%j'}.out",
    ]
    for name, value in (("account", job.account), ("partition", job.partition)):
        words += [f"--{name}={value}"] if value else []
    words += [f"--array={job.tasks}"] if job.tasks else []
    words += [f"--dependency=afterok:{':'.join(job.after)}"] if job.after else []
    if job.checkpoint:
        words += ["--open-mode=append"]
        words += [f"--signal=USR1@{job.notice}"] if job.notice else []
    words += ["--requeue" if job.continuation == "yes" else "--no-requeue"]
    return [f"#SBATCH {word}" for word in (*words, *job.directive)]


def _pbs(job: BatchJob) -> list[str]:
    """Return the directives of PBS."""
    rank_cores = job.per_node * job.cores
    chunk = f"{job.nodes}:ncpus={rank_cores}:mpiprocs={job.per_node}:ompthreads={job.cores}"
    words = [
        f"-N {job.name}",
        f"-l select={chunk}",
        "-l place=scatter",
        f"-l walltime={_hours(job.time)}",
        "-j oe",
    ]
    words += [f"-A {job.account}"] if job.account else []
    words += [f"-q {job.partition}"] if job.partition else []
    words += [f"-J {job.tasks}"] if job.tasks else []
    words += [f"-W depend=afterok:{':'.join(job.after)}"] if job.after else []
    words += ["-r y" if job.checkpoint or job.tasks else "-r n"]  # when a node fails
    return [f"#PBS {word}" for word in (*words, *job.directive)]


def _hours(time: str) -> str:
    """Return a time without days.

    Example:
      >>> _hours("1-12:00:00")
      '36:00:00'
    """
    days, _, rest = time.rpartition("-")
    hours, _, rest = rest.partition(":")
    return f"{int(days or 0) * 24 + int(hours):02}:{rest}"


def _environment(job: BatchJob) -> list[str]:
    """Return how the script comes to where the program lives."""
    directory_variable = "SLURM_SUBMIT_DIR" if job.scheduler == "slurm" else "PBS_O_WORKDIR"
    lines = ["set -eo pipefail", f'cd "${directory_variable}"']
    lines += [f"module load {shlex.quote(name)}" for name in job.module]
    if job.venv:
        lines += [f"source {shlex.quote(_file(f'{PurePath(job.venv)}/bin/activate'))}"]
    if job.conda:
        lines += ['source "$(conda info --base)/etc/profile.d/conda.sh"']
        lines += [f"conda activate {shlex.quote(job.conda)}"]
    lines += ["set -u", "# Threads of BLAS: the cores of a rank. Else each rank takes all cores."]
    lines += [f"export OMP_NUM_THREADS={job.cores}"]
    if job.scheduler == "slurm":
        lines += [f"export SRUN_CPUS_PER_TASK={job.cores}  # srun does not take it from sbatch"]
    return lines


def _staged(job: BatchJob) -> list[str]:
    """Return how files come to the disk of each node."""
    if not job.copied:
        return []
    lines = [
        "# A copy for every node, on its own disk, removed at the end.",
        "local_copy=/tmp/job-$SLURM_JOB_ID",
        'each_node=(srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task=1)',
        """trap '"${each_node[@]}" rm -rf "$local_copy"' EXIT""",
        f'"${{each_node[@]}}" sh -c {_FRESH} "$local_copy"',
    ]
    for path in job.copied:
        name = shlex.quote(PurePath(path).name)
        lines += [f'sbcast --force {shlex.quote(_file(path))} "$local_copy"/{name}']
        if path == job.archive:
            lines += ["environment=$local_copy/environment"]
            lines += [f'"${{each_node[@]}}" sh -c {_UNPACK} "$local_copy"/{name} "$environment"']
            lines += ['export PATH="$environment/bin:$PATH"']
        elif path.endswith(_ARCHIVES):
            lines += [f'"${{each_node[@]}}" tar -xf "$local_copy"/{name} -C "$local_copy"']
    return lines


def _file(path: str) -> str:
    """Return a path that no program takes for an option.

    Example:
      >>> _file("-x"), _file("data.npz")
      ('./-x', 'data.npz')
    """
    return f"./{path}" if path.startswith("-") else path


def _index(job: BatchJob) -> str:
    return "$SLURM_ARRAY_TASK_ID" if job.scheduler == "slurm" else "$PBS_ARRAY_INDEX"


def _trials(job: BatchJob) -> list[str]:
    """Return what each task of an array is given."""
    if not job.each:
        return []
    lines = ["# What each task of the array is given.", f'case "{_index(job)}" in']
    lines += [
        f"{number}) trial=({shlex.join(shlex.split(words))}) ;;"
        for number, words in enumerate(job.each)
    ]
    return [*lines, "esac"]


def _resumable(job: BatchJob) -> list[str]:
    """Return what a job prepares that continues after it was ended."""
    if not job.checkpoint:
        return []
    subdirectory = f'/"{_index(job)}"' if job.tasks else ""
    lines = [f"checkpoint={shlex.quote(_file(job.checkpoint))}{subdirectory}"]
    return [
        *lines,
        "# Where the ranks write the code that they agreed on; launchers change it.",
        'mkdir -p "$checkpoint"/.job',
        'export MPISTRAT_RECORD="$checkpoint"/.job/record',
        'rm -f "$MPISTRAT_RECORD"',
        "# The ranks are told that the time ends; this shell waits for them.",
        "trap : USR1 TERM",
    ]


def _words(job: BatchJob) -> str:
    """Return the words of the program, quoted except for what the script fills in."""
    replacements = {}
    if job.tasks:
        replacements["{task}"] = f'"{_index(job)}"'
    if job.stage:
        replacements["{local}"] = '"$local_copy"'
    words = [_filled(word, replacements) for word in job.program]
    words += ['"${trial[@]}"'] if job.each else []
    words += ["--checkpoint", '"$checkpoint"'] if job.checkpoint else []
    return " ".join([*words, *(['"$@"'] if job.scheduler == "slurm" else [])])


def _filled(word: str, replacements: dict[str, str]) -> str:
    r"""Return one word for the shell, in which known names in braces are replaced.

    Example:
      >>> _filled("a b{task}", {"{task}": '"$I"'})
      '\'a b\'"$I"'
    """
    if not replacements or not word:
        return shlex.quote(word)
    parts = re.split("(" + "|".join(map(re.escape, replacements)) + ")", word)
    return "".join(replacements.get(part) or shlex.quote(part) for part in parts if part)


def _call(job: BatchJob) -> list[str]:
    """Return the line that starts the ranks."""
    rank = f"{_container_prefix(job)}python3 -m mpistrat.launch.rank"
    program = _words(job)
    if job.starts == "none":
        line = f"{_container_prefix(job)}python3 {program}"
    elif job.starts == "srun":
        pmi = f' --mpi="${{SLURM_MPI_TYPE:-{job.pmi}}}"' if job.pmi else ""
        line = f"srun -K1{pmi} --distribution=block {rank} {program}"
    elif job.container:  # the host's launcher, which starts a container for each rank
        line = f"mpiexec -n {job.ranks} {rank} {program}"
    else:
        # What follows the last -- goes to the launcher.
        line = f"python3 -m mpistrat run -n {job.ranks} {program}{' --' * ('--' in job.program)}"
    start = ["# -K1: when one rank dies the others end too."] if job.starts == "srun" else []
    return [*start, "code=0", f"{line} || code=$?"] if job.checkpoint else [*start, line]


def _container_prefix(job: BatchJob) -> str:
    """Return the words before a command that runs in the container, if there is one."""
    return f"apptainer exec {shlex.quote(_file(job.container))} " if job.container else ""


def _continuation_lines(job: BatchJob) -> list[str]:
    """Return how a job that was ended early continues."""
    if not job.checkpoint:
        return []
    if job.continuation == "no":
        return ['exit "$code"']
    number, array_option, one_job = '"$SLURM_JOB_ID"', "", ""
    lines = [
        "# Once more after a planned leave, or twice after a hang; never after scancel or qdel."
    ]
    if job.tasks:
        number = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
        array_option = ' --array="$SLURM_ARRAY_TASK_ID"'
    runs = f'[ "$(squeue -h -j {number} -o %T)" = RUNNING ]'
    if job.continuation == "yes":
        resubmit_command = f"scontrol requeue {number}"
    elif job.scheduler == "slurm":
        resubmit_command = f'sbatch --dependency=afterany:"$SLURM_JOB_ID"{array_option} "$0" "$@"'
    else:
        runs = "qstat -f \"$PBS_JOBID\" | grep -q 'job_state = R'"
        resubmit_command = 'qsub -W depend=afterany:"$PBS_JOBID" -v FIRST_JOB="$FIRST_JOB" '
        resubmit_command += shlex.quote(_file(job.file))
    if job.continuation == "chain":  # all jobs of a chain count as one
        job_id_variable = "SLURM_JOB_ID" if job.scheduler == "slurm" else "PBS_JOBID"
        lines += [f'export FIRST_JOB="${{FIRST_JOB:-${job_id_variable}}}"']
        one_job = ' --job "$FIRST_JOB"'
    return [
        *lines,
        f"if {runs} &&",
        f'    {_container_prefix(job)}python3 -m mpistrat requeue --record "$MPISTRAT_RECORD" \\',
        f'        --code "$code" --checkpoint "$checkpoint"{one_job}; then',
        *(['    "${each_node[@]}" rm -rf "$local_copy"'] if job.copied else []),
        f"    {resubmit_command}",
        "fi",
        'exit "$code"',
    ]


_FIELDS = {field.name: field for field in dataclasses.fields(BatchJob)}


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    kinds, absent, add = ("slurm", "pbs"), argparse.SUPPRESS, parser.add_argument
    add("--for", dest="scheduler", choices=kinds, default=absent, help="slurm")
    add("--file", dest="config", metavar="INI", type=Path, help="read options")
    for name, field in _FIELDS.items():
        metavar, text = field.metadata["metavar"], field.metadata["help"]
        argument_options: dict[str, Any] = {"type": type(field.default)}
        if field.default == ():
            argument_options, text = {"action": "append"}, f"{text}; may be given several times"
        if metavar:
            add(
                f"--{name.replace('_', '-')}",
                metavar=metavar,
                default=absent,
                help=text,
                **argument_options,
            )
    names, text = ("-o", "--output"), "the file to write"
    add(*names, dest="file", metavar="FILE", default=absent, help=text)
    add("--submit", action="store_true", help="submit the script")
    text = "-- and the program: a script, or -m and a module, then its arguments"
    add("program", metavar="PROGRAM ...", nargs=argparse.REMAINDER, help=text)


def main(args: argparse.Namespace) -> int:
    """Write the script."""
    job_fields = _job_fields(args)
    if args.submit:
        ending = "pbs" if job_fields.get("scheduler") == "pbs" else "sbatch"
        job_fields.setdefault("file", f"{job_fields.get('name', BatchJob.name)}.{ending}")
    job = BatchJob(**job_fields)
    text = render(job)
    if job.starts == "srun" and not job.pmi:
        say(
            "mpistrat: note: without --pmi srun takes the site's default, and where that is none, "
            "each rank is a job of its own. Give --pmi pmi2 for MPICH and Intel MPI, --pmi pmix "
            "for Open MPI; srun --mpi=list shows what there is."
        )
    if not job.file:
        print(text, end="")
        return 0
    Path(job.file).write_text(text, encoding="utf-8")
    Path(job.file).chmod(0o755)
    if args.submit:
        print(submit(job.scheduler, job.file), flush=True)
    return 0


def _job_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the job: those of the file, overridden by those of the command."""
    sources = [args] if args.config is None else [_read(args.config), args]
    fields: dict[str, Any] = {
        name: value
        for source in sources
        for name, value in vars(source).items()
        if name in _FIELDS and value != []
    }
    program = list(fields.pop("program", ()))
    program = program[1:] if program[:1] == ["--"] else program
    if program[:1] in (["python"], ["python3"]):
        program = program[1:]
    fields["program"] = program
    for name in ("venv", "checkpoint", "container", "archive"):
        if fields.get(name, "").startswith("~"):
            fields[name] = str(Path(fields[name]).expanduser())
    return {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}


def _read(path: Path) -> argparse.Namespace:
    """Return the fields that a file gives."""
    ini = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    try:
        ini.read_string(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise OptionError(f"{path} cannot be read: {error}") from None
    if ini.sections() != ["job"]:
        raise OptionError(f"{path} has to have one section, [job]; it has {ini.sections()}.")
    parser = argparse.ArgumentParser(prog=str(path), add_help=False, allow_abbrev=False)
    options(parser)
    words: list[str] = []
    program: list[str] = []
    for name, text in ini["job"].items():
        if name == "program":
            try:
                program = shlex.split(text)
            except ValueError as error:
                raise OptionError(f"{path}: program = {text}: {error}.") from None
            continue
        values = [line for line in text.splitlines() if line.strip()]
        words += [f"--{name}={value}" for value in values]
    return parser.parse_args([*words, "--", *program])
