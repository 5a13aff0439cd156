"""A batch job: its description, which is checked, and its submission.

Some values become directives of the scheduler; they have to be words of a small alphabet, as
schedulers read quotes differently. The others become words of the shell, which
`mpistrat.launch.batch` quotes.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import PurePath
from typing import Any, final

from mpistrat.cluster.batch_job import read_command_output
from mpistrat.errors import LaunchError

# Patterns of values, each with its words for people. No blank, quote, backslash, $ or # in a word.
_LETTERS = r"[A-Za-z0-9_.,:=%@+/\[\]&|*()-]"
_ALLOWED_TEXT = "letters, digits and . , : = % @ + / [ ] & | * ( ) _ -, without blanks"
_LINE = (r".*", "one line")
_WORD, _WORDS = (f"{_LETTERS}*", _ALLOWED_TEXT), (f"{_LETTERS}+", _ALLOWED_TEXT)
_COUNT = (r"[1-9]\d*", "an integer of at least 1")
_SECONDS = (r"\d{1,5}", "seconds from 0 to 65535")
_TIME = (
    r"(\d+-)?\d{1,3}:[0-5]\d:[0-5]\d",
    "[days-]hours:minutes:seconds, as 02:00:00 or 1-12:00:00",
)
_TASKS = (r"|\d+([-,:]\d+)*(%\d+)?", "numbers of tasks, as 0-7, 1,3,5 or 0-7%2")
_SUBMIT_COMMANDS = {"slurm": "sbatch", "pbs": "qsub"}
_SUBMIT_SECONDS = 120.0  # seconds; a scheduler under load takes a minute
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


def _allow_choices(*choices: str) -> tuple[str, str]:
    return "|".join(choices), " or ".join(filter(None, choices))


def _declare_option(
    default: Any, allowed_values: tuple[str, str] = _LINE, metavar: str = "", text: str = ""
) -> Any:
    """Return a field: its default, the values that are allowed, and its text for ``--help``."""
    metadata = {"allowed_values": allowed_values, "metavar": metavar, "help": text}
    return dataclasses.field(default=default, metadata=metadata)


@final
@dataclasses.dataclass(frozen=True)
class BatchJob:
    """The description of a batch job, from which its script is written.

    Attributes:
      program: A script, or ``-m`` and a module, then its arguments. In them ``{task}`` is the
        number of the array's task, and ``{local}`` the directory of staged files.
      scheduler: ``slurm`` or ``pbs``.
      name: The name of the job, and of its output.
      nodes: Number of nodes.
      per_node: Ranks on each node.
      cores: Cores of each rank.
      time: The limit, ``[days-]hours:minutes:seconds``.
      account: The account that the time is charged to, if the site asks.
      partition: The partition of Slurm, the queue of PBS.
      module: Environment modules to load, in this order.
      venv: A virtual environment, absolute or relative to the directory of submission.
      conda: The name or path of a conda environment.
      container: An image that Apptainer runs the program in.
      archive: A tar of an environment, which each node unpacks on its own disk and runs from.
      launcher: ``srun``, ``run`` (`mpistrat run`) or ``none``: the program is started once, and
        starts ranks itself. Empty for the scheduler's own: ``srun``, with PBS ``run``.
      pmi: The protocol by which ``srun`` makes the ranks known to each other: ``pmi2``, ``pmix``;
        empty for the site's own.
      checkpoint: A directory, given to the program as ``--checkpoint``; each task of an array has
        its own below it.
      notice: Seconds before the end of the time at which the ranks get SIGUSR1; 0 for none.
      requeue: The way to continue after a planned leave: ``yes`` requeues this job, ``chain``
        submits the next one, ``no``. Empty for ``yes``, with PBS ``chain``, without a checkpoint
        ``no``.
      array: Numbers of tasks, such as ``0-7`` or ``0-7%2``, of which at most 2 run at once.
      each: Arguments of one task each, instead of `array`; numbered from 0.
      after: Jobs that have to end well before this one begins.
      stage: Files that each node gets a copy of on its own disk; archives are unpacked.
      directive: Further words for the scheduler, such as ``--constraint=haswell``.
      file: The name of the script; a chain of PBS submits it again.
    """

    program: tuple[str, ...] = _declare_option(())
    scheduler: str = _declare_option("slurm", _allow_choices("slurm", "pbs"))
    name: str = _declare_option("mpistrat", _WORD, "NAME", "the name of the job")
    nodes: int = _declare_option(1, _COUNT, "N", "nodes; 1")
    per_node: int = _declare_option(1, _COUNT, "N", "ranks on each node; 1")
    cores: int = _declare_option(1, _COUNT, "N", "cores of each rank; 1")
    time: str = _declare_option("01:00:00", _TIME, "[D-]H:M:S", "the limit; 01:00:00")
    account: str = _declare_option("", _WORD, "NAME", "whom the time is charged to")
    partition: str = _declare_option("", _WORD, "NAME", "the partition of Slurm, the queue of PBS")
    module: tuple[str, ...] = _declare_option((), _WORDS, "NAME", "an environment module to load")
    venv: str = _declare_option("", _LINE, "DIR", "a virtual environment")
    conda: str = _declare_option("", _LINE, "NAME", "a conda environment")
    container: str = _declare_option(
        "", _LINE, "IMAGE", "run the program in this image, by apptainer"
    )
    archive: str = _declare_option(
        "", _LINE, "TAR", "an environment in one file, which nodes unpack on their disks (Slurm)"
    )
    launcher: str = _declare_option(
        "",
        _allow_choices("", "srun", "run", "none"),
        "HOW",
        "srun; run: mpistrat run; none: the program starts ranks itself",
    )
    pmi: str = _declare_option(
        "",
        _WORD,
        "KIND",
        "how srun tells ranks of each other: pmi2 (MPICH, Intel), pmix (Open MPI)",
    )
    checkpoint: str = _declare_option(
        "", _LINE, "DIR", "save here before the time ends, and continue from here"
    )
    notice: int = _declare_option(
        120, _SECONDS, "S", "SIGUSR1 so long before the end of the time; 120, 0 for none"
    )
    requeue: str = _declare_option(
        "",
        _allow_choices("", "yes", "chain", "no"),
        "HOW",
        "after a planned leave: yes, chain (submit the next job), no",
    )
    array: str = _declare_option("", _TASKS, "TASKS", "tasks of an array, as 0-7 or 0-7%%2")
    each: tuple[str, ...] = _declare_option((), _LINE, "WORDS", "the words of one task of an array")
    after: tuple[str, ...] = _declare_option(
        (), _WORDS, "JOB", "begin when this job has ended well"
    )
    stage: tuple[str, ...] = _declare_option(
        (), _LINE, "FILE", "copy to the disk of each node; archives are unpacked (Slurm)"
    )
    directive: tuple[str, ...] = _declare_option(
        (), _WORDS, "WORD", "a further word for the scheduler: --directive=--constraint=fast"
    )
    file: str = _declare_option("")

    def __post_init__(self) -> None:
        """Refuse values of which no script can be written.

        Raises:
          LaunchError: A value cannot be used; the text names it, and the values to give instead.
        """
        for field in dataclasses.fields(self):
            pattern, expectation = field.metadata["allowed_values"]
            value = getattr(self, field.name)
            for text in map(str, value if isinstance(value, tuple) else (value,)):
                if _CONTROL_CHARACTERS.search(text):
                    _refuse(field.name, text, "text without newlines and control characters")
                if not re.fullmatch(pattern, text):
                    _refuse(field.name, text, expectation)
        for words in self.each:
            try:
                shlex.split(words)
            except ValueError:
                _refuse("each", words, "words with quotes that are closed, as in a shell")
        for path in self.copied_paths:
            if not PurePath(path).name:
                _refuse("stage", path, "a file")
        _check_program(*(self.program or ("",)))
        _check_combinations(self)
        sends_notice = self.scheduler == "slurm" and self.checkpoint
        if sends_notice and 0 < _parse_time(self.time) <= self.notice:  # 0 is no limit
            expectation = f"fewer seconds than --time {self.time}, or ranks would be told at once"
            _refuse("notice", self.notice, f"{expectation}; 0 for no signal")

    @property
    def rank_launcher(self) -> str:
        """The launcher of the ranks: the chosen one, or the scheduler's own."""
        return self.launcher or ("srun" if self.scheduler == "slurm" else "run")

    @property
    def continuation(self) -> str:
        """The way to continue after a planned leave: the chosen one, or the scheduler's."""
        default_continuation = "yes" if self.scheduler == "slurm" else "chain"
        return self.requeue or (default_continuation if self.checkpoint else "no")

    @property
    def copied_paths(self) -> tuple[str, ...]:
        """All files that are copied to each node."""
        return (*self.stage, *filter(None, [self.archive]))

    @property
    def rank_count(self) -> int:
        """The number of ranks."""
        return self.nodes * self.per_node

    @property
    def task_numbers(self) -> str:
        """The numbers of the tasks of the array; empty without one."""
        return f"0-{len(self.each) - 1}" if self.each else self.array


def _refuse(name: str, value: object, expectation: str) -> None:
    raise LaunchError(f"--{name.replace('_', '-')} {value!r} cannot be used; give {expectation}.")


def _check_program(program: str, *program_arguments: str) -> None:
    if not program or (program[0] == "-" and (program != "-m" or not program_arguments)):
        raise LaunchError("there is no program: give SCRIPT or -m MODULE after --.")
    if re.fullmatch(r"python[\d.]*", PurePath(program).name):
        raise LaunchError(
            f"{program}: the job runs the python3 of its environment. Give --venv, --conda or "
            "--module, and after -- the program alone."
        )


def _parse_time(time: str) -> int:
    """Return a time limit in seconds.

    Example:
      >>> _parse_time("1-00:02:03")
      86523
    """
    days, _, rest = time.rpartition("-")
    hours, minutes, seconds = map(int, rest.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_combinations(job: BatchJob) -> None:
    is_pbs = job.scheduler == "pbs"
    rules = (
        (
            sum(map(bool, (job.venv, job.conda, job.archive))) > 1,
            "--venv, --conda and --archive: give one of them",
        ),
        (job.notice > 65535, "--notice is at most 65535, the seconds that Slurm takes"),
        (bool(job.each and job.array), "--each makes the array itself; leave --array out"),
        (
            job.launcher == "none" and bool(job.checkpoint),
            "--checkpoint is for ranks that the script starts; with --launcher none write it among "
            "the words of the program",
        ),
        (job.continuation != "no" and not job.checkpoint, "--requeue needs --checkpoint DIR"),
        (
            is_pbs and job.rank_launcher == "srun",
            "srun belongs to Slurm; with PBS give --launcher run",
        ),
        (
            is_pbs and job.continuation == "yes",
            "PBS lets only its operators requeue a running job; give --requeue chain",
        ),
        (
            is_pbs and job.continuation == "chain" and bool(job.task_numbers),
            "PBS cannot submit one task of an array again; give --requeue no, and submit the array "
            "once more: what has finished ends at once",
        ),
        (
            is_pbs and job.continuation == "chain" and not job.file,
            "a chain of PBS submits its own file again; say with -o FILE where it lies",
        ),
        (
            is_pbs and bool(job.copied_paths),
            "PBS copies by itself: --directive=-Wstagein=LOCAL@HOST:REMOTE, not --stage, --archive",
        ),
    )
    for is_broken, text in rules:
        if is_broken:
            raise LaunchError(f"{text}.")


def format_arguments(job: BatchJob) -> list[str]:
    """Return the words after ``mpistrat batch`` that describe a job, without default values.

    Example:
      >>> format_arguments(BatchJob(("train.py", "--fast"), nodes=2, module=("gcc", "mpi")))
      ['--nodes=2', '--module=gcc', '--module=mpi', '--', 'train.py', '--fast']
    """
    option_words = []
    for field in dataclasses.fields(job):
        value = getattr(job, field.name)
        if field.name in ("program", "file") or value == field.default:
            continue
        option = "for" if field.name == "scheduler" else field.name.replace("_", "-")
        option_values = value if isinstance(value, tuple) else (value,)
        option_words += [f"--{option}={text}" for text in option_values]
    return [*option_words, *(["-o", job.file] if job.file else []), "--", *job.program]


def submit_script(scheduler: str, script_path: str) -> str:
    """Submit a job script.

    Args:
      scheduler: ``slurm`` or ``pbs``.
      script_path: The script.

    Returns:
      The scheduler's answer: the number of the job.

    Raises:
      LaunchError: The scheduler's command is not here.
      OSError: It refuses the script, or does not answer.
    """
    command = _SUBMIT_COMMANDS[scheduler]
    try:
        return read_command_output(
            [command, f"./{script_path}" if script_path.startswith("-") else script_path],
            _SUBMIT_SECONDS,
        ).strip()
    except FileNotFoundError:
        raise LaunchError(
            f"{script_path} is written and not submitted: there is no {command} here. Submit it "
            "on a login node of the cluster."
        ) from None
