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
from mpistrat.launch.batch_job import BatchJob, format_arguments, submit_script
from mpistrat.watchdog.status_board import say

_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz")
_MAKE_FRESH = """'rm -rf "$0" && mkdir -m 700 "$0"'"""
# Unpacks $0 in $1. Commands such as `mpistrat` have the path of their Python in their first line.
_UNPACK = """'mkdir "$1" && tar -xf "$0" -C "$1" && rm "$0" || exit
    if [ -e "$1/bin/conda-unpack" ]; then PATH="$1/bin:$PATH" conda-unpack; exit; fi
    cd "$1/bin" && grep -lI "^#!.*/bin/python" * |
        xargs -r sed -i "1s|^#!.*/bin/python|#!$1/bin/python|"'"""


def render_script(job: BatchJob) -> str:
    """Return the text of a job script, for bash; its second line is the command that makes it.

    Args:
      job: The job.

    Example:
      >>> from mpistrat.launch.batch_job import BatchJob
      >>> job = BatchJob(("train.py",), nodes=2, time="00:10:00")
      >>> print(render_script(job).splitlines()[2])
      #SBATCH --job-name=mpistrat
    """
    head_lines = ["#!/bin/bash", f"# {shlex.join(['mpistrat', 'batch', *format_arguments(job)])}"]
    paragraphs = (
        [
            *head_lines,
            *(
                _format_slurm_directives(job)
                if job.scheduler == "slurm"
                else _format_pbs_directives(job)
            ),
        ],
        _format_environment(job),
        _format_staging(job),
        _format_trials(job),
        _format_preparation(job),
        _format_start(job),
        _format_continuation(job),
    )
    return "\n\n".join("\n".join(paragraph) for paragraph in paragraphs if paragraph) + "\n"


def _format_slurm_directives(job: BatchJob) -> list[str]:
    """Return the directives of Slurm."""
    words = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.per_node}",
        f"--cpus-per-task={job.cores}",
        f"--time={job.time}",
        f"--output=slurm-%x-{'%A_%a' if job.task_numbers else '%j'}.out",
    ]
    for name, value in (("account", job.account), ("partition", job.partition)):
        words += [f"--{name}={value}"] if value else []
    words += [f"--array={job.task_numbers}"] if job.task_numbers else []
    words += [f"--dependency=afterok:{':'.join(job.after)}"] if job.after else []
    if job.checkpoint:
        words += ["--open-mode=append"]
        words += [f"--signal=USR1@{job.notice}"] if job.notice else []
    words += ["--requeue" if job.continuation == "yes" else "--no-requeue"]
    return [f"#SBATCH {word}" for word in (*words, *job.directive)]


def _format_pbs_directives(job: BatchJob) -> list[str]:
    """Return the directives of PBS."""
    rank_cores = job.per_node * job.cores
    chunk = f"{job.nodes}:ncpus={rank_cores}:mpiprocs={job.per_node}:ompthreads={job.cores}"
    words = [
        f"-N {job.name}",
        f"-l select={chunk}",
        "-l place=scatter",
        f"-l walltime={_format_hours(job.time)}",
        "-j oe",
    ]
    words += [f"-A {job.account}"] if job.account else []
    words += [f"-q {job.partition}"] if job.partition else []
    words += [f"-J {job.task_numbers}"] if job.task_numbers else []
    words += [f"-W depend=afterok:{':'.join(job.after)}"] if job.after else []
    words += ["-r y" if job.checkpoint or job.task_numbers else "-r n"]  # when a node fails
    return [f"#PBS {word}" for word in (*words, *job.directive)]


def _format_hours(time: str) -> str:
    """Return a time without days.

    Example:
      >>> _format_hours("1-12:00:00")
      '36:00:00'
    """
    days, _, rest = time.rpartition("-")
    hours, _, rest = rest.partition(":")
    return f"{int(days or 0) * 24 + int(hours):02}:{rest}"


def _format_environment(job: BatchJob) -> list[str]:
    """Return the lines that enter the environment of the program."""
    directory_variable = "SLURM_SUBMIT_DIR" if job.scheduler == "slurm" else "PBS_O_WORKDIR"
    lines = ["set -eo pipefail", f'cd "${directory_variable}"']
    lines += [f"module load {shlex.quote(name)}" for name in job.module]
    if job.venv:
        lines += [f"source {shlex.quote(_mark_as_path(f'{PurePath(job.venv)}/bin/activate'))}"]
    if job.conda:
        lines += ['source "$(conda info --base)/etc/profile.d/conda.sh"']
        lines += [f"conda activate {shlex.quote(job.conda)}"]
    lines += ["set -u", "# Threads of BLAS: the cores of a rank. Else each rank takes all cores."]
    lines += [f"export OMP_NUM_THREADS={job.cores}"]
    if job.scheduler == "slurm":
        lines += [f"export SRUN_CPUS_PER_TASK={job.cores}  # srun does not take it from sbatch"]
    return lines


def _format_staging(job: BatchJob) -> list[str]:
    """Return the lines that copy files to the disk of each node."""
    if not job.copied_paths:
        return []
    lines = [
        "# A copy for every node, on its own disk, removed at the end.",
        "local_copy=/tmp/job-$SLURM_JOB_ID",
        'each_node=(srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task=1)',
        """trap '"${each_node[@]}" rm -rf "$local_copy"' EXIT""",
        f'"${{each_node[@]}}" sh -c {_MAKE_FRESH} "$local_copy"',
    ]
    for path in job.copied_paths:
        name = shlex.quote(PurePath(path).name)
        lines += [f'sbcast --force {shlex.quote(_mark_as_path(path))} "$local_copy"/{name}']
        if path == job.archive:
            lines += ["environment=$local_copy/environment"]
            lines += [f'"${{each_node[@]}}" sh -c {_UNPACK} "$local_copy"/{name} "$environment"']
            lines += ['export PATH="$environment/bin:$PATH"']
        elif path.endswith(_ARCHIVES):
            lines += [f'"${{each_node[@]}}" tar -xf "$local_copy"/{name} -C "$local_copy"']
    return lines


def _mark_as_path(path: str) -> str:
    """Return a path that no program mistakes for an option.

    Example:
      >>> _mark_as_path("-x"), _mark_as_path("data.npz")
      ('./-x', 'data.npz')
    """
    return f"./{path}" if path.startswith("-") else path


def _choose_index_variable(job: BatchJob) -> str:
    return "$SLURM_ARRAY_TASK_ID" if job.scheduler == "slurm" else "$PBS_ARRAY_INDEX"


def _format_trials(job: BatchJob) -> list[str]:
    """Return the lines that choose the words of each task of an array."""
    if not job.each:
        return []
    lines = ["# What each task of the array is given.", f'case "{_choose_index_variable(job)}" in']
    lines += [
        f"{number}) trial=({shlex.join(shlex.split(words))}) ;;"
        for number, words in enumerate(job.each)
    ]
    return [*lines, "esac"]


def _format_preparation(job: BatchJob) -> list[str]:
    """Return the lines that prepare a job which continues after an early end."""
    if not job.checkpoint:
        return []
    subdirectory = f'/"{_choose_index_variable(job)}"' if job.task_numbers else ""
    lines = [f"checkpoint={shlex.quote(_mark_as_path(job.checkpoint))}{subdirectory}"]
    return [
        *lines,
        "# Where the ranks write the code that they agreed on; launchers change it.",
        'mkdir -p "$checkpoint"/.job',
        'export MPISTRAT_RECORD="$checkpoint"/.job/record',
        'rm -f "$MPISTRAT_RECORD"',
        "# The ranks are told that the time ends; this shell waits for them.",
        "trap : USR1 TERM",
    ]


def _format_program(job: BatchJob) -> str:
    """Return the words of the program, quoted except for variables of the script."""
    replacements = {}
    if job.task_numbers:
        replacements["{task}"] = f'"{_choose_index_variable(job)}"'
    if job.stage:
        replacements["{local}"] = '"$local_copy"'
    words = [_fill_word(word, replacements) for word in job.program]
    words += ['"${trial[@]}"'] if job.each else []
    words += ["--checkpoint", '"$checkpoint"'] if job.checkpoint else []
    return " ".join([*words, *(['"$@"'] if job.scheduler == "slurm" else [])])


def _fill_word(word: str, replacements: dict[str, str]) -> str:
    r"""Return one word for the shell, in which known names in braces are replaced.

    Example:
      >>> _fill_word("a b{task}", {"{task}": '"$I"'})
      '\'a b\'"$I"'
    """
    if not replacements or not word:
        return shlex.quote(word)
    pieces = re.split("(" + "|".join(map(re.escape, replacements)) + ")", word)
    return "".join(replacements.get(piece) or shlex.quote(piece) for piece in pieces if piece)


def _format_start(job: BatchJob) -> list[str]:
    """Return the lines that start the ranks."""
    rank_command = f"{_format_container_prefix(job)}python3 -m mpistrat.launch.rank"
    program_text = _format_program(job)
    if job.rank_launcher == "none":
        start_line = f"{_format_container_prefix(job)}python3 {program_text}"
    elif job.rank_launcher == "srun":
        pmi_option = f' --mpi="${{SLURM_MPI_TYPE:-{job.pmi}}}"' if job.pmi else ""
        start_line = f"srun -K1{pmi_option} --distribution=block {rank_command} {program_text}"
    elif job.container:  # the host's launcher, which starts a container for each rank
        start_line = f"mpiexec -n {job.rank_count} {rank_command} {program_text}"
    else:
        # Words after the last -- go to the launcher.
        ending = " --" if "--" in job.program else ""
        start_line = f"python3 -m mpistrat run -n {job.rank_count} {program_text}{ending}"
    lines = []
    if job.rank_launcher == "srun":
        lines += ["# -K1: when one rank dies the others end too."]
    if job.checkpoint:
        return [*lines, "code=0", f"{start_line} || code=$?"]
    return [*lines, start_line]


def _format_container_prefix(job: BatchJob) -> str:
    """Return the words before a command that runs in the container, if there is one."""
    return f"apptainer exec {shlex.quote(_mark_as_path(job.container))} " if job.container else ""


def _format_continuation(job: BatchJob) -> list[str]:
    """Return the lines by which a job that was ended early continues."""
    if not job.checkpoint:
        return []
    if job.continuation == "no":
        return ['exit "$code"']
    job_number, array_option, job_option = '"$SLURM_JOB_ID"', "", ""
    lines = [
        "# Once more after a planned leave, or twice after a hang; never after scancel or qdel."
    ]
    if job.task_numbers:
        job_number = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
        array_option = ' --array="$SLURM_ARRAY_TASK_ID"'
    running_test = f'[ "$(squeue -h -j {job_number} -o %T)" = RUNNING ]'
    if job.continuation == "yes":
        resubmit_command = f"scontrol requeue {job_number}"
    elif job.scheduler == "slurm":
        resubmit_command = f'sbatch --dependency=afterany:"$SLURM_JOB_ID"{array_option} "$0" "$@"'
    else:
        running_test = "qstat -f \"$PBS_JOBID\" | grep -q 'job_state = R'"
        resubmit_command = 'qsub -W depend=afterany:"$PBS_JOBID" -v FIRST_JOB="$FIRST_JOB" '
        resubmit_command += shlex.quote(_mark_as_path(job.file))
    if job.continuation == "chain":  # all jobs of a chain count as one
        job_id_variable = "SLURM_JOB_ID" if job.scheduler == "slurm" else "PBS_JOBID"
        lines += [f'export FIRST_JOB="${{FIRST_JOB:-${job_id_variable}}}"']
        job_option = ' --job "$FIRST_JOB"'
    return [
        *lines,
        f"if {running_test} &&",
        f"    {_format_container_prefix(job)}python3 -m mpistrat requeue "
        '--record "$MPISTRAT_RECORD" \\',
        f'        --code "$code" --checkpoint "$checkpoint"{job_option}; then',
        *(['    "${each_node[@]}" rm -rf "$local_copy"'] if job.copied_paths else []),
        f"    {resubmit_command}",
        "fi",
        'exit "$code"',
    ]


_FIELDS = {field.name: field for field in dataclasses.fields(BatchJob)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    schedulers, no_default, add = ("slurm", "pbs"), argparse.SUPPRESS, parser.add_argument
    add("--for", dest="scheduler", choices=schedulers, default=no_default, help="slurm")
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
                default=no_default,
                help=text,
                **argument_options,
            )
    output_flags, text = ("-o", "--output"), "the file to write"
    add(*output_flags, dest="file", metavar="FILE", default=no_default, help=text)
    add("--submit", action="store_true", help="submit the script")
    text = "-- and the program: a script, or -m and a module, then its arguments"
    add("program", metavar="PROGRAM ...", nargs=argparse.REMAINDER, help=text)


def main(args: argparse.Namespace) -> int:
    """Write the script."""
    job_fields = _merge_fields(args)
    if args.submit:
        suffix = "pbs" if job_fields.get("scheduler") == "pbs" else "sbatch"
        job_fields.setdefault("file", f"{job_fields.get('name', BatchJob.name)}.{suffix}")
    job = BatchJob(**job_fields)
    text = render_script(job)
    if job.rank_launcher == "srun" and not job.pmi:
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
        print(submit_script(job.scheduler, job.file), flush=True)
    return 0


def _merge_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the job: those of the file, overridden by those of the command line."""
    namespaces = [args] if args.config is None else [_read_ini(args.config), args]
    fields: dict[str, Any] = {
        name: value
        for namespace in namespaces
        for name, value in vars(namespace).items()
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


def _read_ini(path: Path) -> argparse.Namespace:
    """Return the options in a file."""
    ini = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    try:
        ini.read_string(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise OptionError(f"{path} cannot be read: {error}") from None
    if ini.sections() != ["job"]:
        raise OptionError(f"{path} has to have one section, [job]; it has {ini.sections()}.")
    parser = argparse.ArgumentParser(prog=str(path), add_help=False, allow_abbrev=False)
    add_arguments(parser)
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
