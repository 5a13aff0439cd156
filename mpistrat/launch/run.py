"""Run a Python program on N ranks with the MPI of this environment.

Inside a Slurm allocation it calls srun with the PMI of this MPI library, elsewhere the mpiexec that
belongs to the MPI library of mpi4py. It prints the command first. The default numbers of ranks,
nodes and cores are those of the allocation. Options of Python come after its name: mpistrat run
-n 4 python -u train.py. Arguments after the last -- go to the launcher: mpistrat run train.py
--epochs 3 -- --cpu-bind=cores. A failure on one rank ends the whole job. The exit code is the
launcher's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mpistrat.cluster.allocation import Allocation, allocation, from_file
from mpistrat.comm.callsite import group_by_key
from mpistrat.config import (
    child_environment,
    has_thread_variable,
    launched_by,
    launcher_variables,
    read_or_default,
)
from mpistrat.errors import LaunchError
from mpistrat.launch.mpi_libraries import (
    Command,
    Launcher,
    Library,
    cores,
    find,
    library,
    plugins,
    version,
)
from mpistrat.launch.plan import (
    LOCAL_HOST,
    JobShape,
    LaunchOptions,
    by_mpiexec,
    by_srun,
    choose_pmi,
    fit_shape,
    handing_on,
    positive,
    seconds,
)
from mpistrat.launch.process import Outcome, run_job
from mpistrat.launch.roster import CAUSE, CRASHES, RECORD, EndedRank, Roster
from mpistrat.launch.streams import TERMINAL, Output, leave_input, open_standard
from mpistrat.watchdog.observer import HUNG
from mpistrat.watchdog.status_board import say

UNRECORDED = 70  # the launcher reports success, the ranks do not
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_NAMED = 3  # ranks that a line names, of those that ended together


def refuse_inside() -> None:
    """Raise a `LaunchError` if this process already is a rank of a job."""
    launcher = launched_by()
    if launcher is not None:
        raise LaunchError(
            f"this process already is one rank of a job ({launcher} started it), and would "
            "start\n  a job in each rank. Use one of the two: either `mpistrat run -n N "
            "train.py` in a plain\n  shell or batch script, or `srun python -m "
            "mpistrat.launch.rank train.py`. If this is not\n  a rank, its environment has "
            f"variables left over from one: unset {' '.join(launcher_variables())}."
        )


def plan_note(launcher: Launcher, loaded: Library) -> str:
    """Return a warning about launcher and library that may not fit, or an empty string."""
    if launcher.flavour.name != loaded.flavour.name or launcher.flavour.name == "unknown":
        return f"{launcher} and {loaded} may belong to different MPIs; `mpistrat doctor` tries it"
    launcher_version, library_version = version(launcher.text), version(loaded.text)
    if launcher_version != library_version:
        return (
            f"mpiexec is {launcher_version} but the library is {library_version}; use one if "
            "ranks stay alone"
        )
    return ""


def run(
    wishes: LaunchOptions,
    program: Sequence[str],
    module: bool = False,
    timeout: float | None = None,
    *,
    hostfile: str | None = None,
    output: Output = TERMINAL,
    dry_run: bool = False,
) -> int:
    """Run a Python program on several ranks, here or in the allocation that this process is in.

    The exact call of the launcher is printed to stderr first.

    Args:
      wishes: What was said of the job: the number of ranks, if not as many as the allocation has.
      program: A script or a module, then its arguments; ``python`` before it is left out.
      module: Whether the first word is a module, as after ``python -m``.
      timeout: Seconds after which the job is ended, or None for never.
      hostfile: A file of hosts to use instead of those of the allocation.
      output: Where the output of the ranks goes; None for the terminal.
      dry_run: Print the call, and do nothing.

    Returns:
      The exit code that the ranks agreed on, else the launcher's, which is 128 + n if signal n
      ended it, and that is printed; 70 if the launcher reports success but the ranks have not left
      in order; 124 if the time ran out.

    Raises:
      LaunchError: No launcher fits, the numbers of ranks and nodes do not fit each other or the
        allocation, a file or directory cannot be used, or this process already is a rank.
    """
    refuse_inside()
    options: list[str] = []
    if not module:
        options, program, module = without_python(program)
    program_path = Path(program[0])
    if not module and program[0] == "-":
        raise LaunchError("-: only one rank gets standard input; write the program to a file.")
    if not module and not program_path.is_file() and not (program_path / "__main__.py").is_file():
        raise LaunchError(f"there is no program {program[0]!r}; for a module write -m before it.")
    place = find_allocation(hostfile)
    job = fit_shape(wishes, place)
    words = python_program(program, module, output, options)
    command, flag = plan_command(place, wishes, words, _threads(job, place))
    _print_message(str(command))
    if dry_run:
        return 0
    if output.directory:
        try:
            Path(output.directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            text = f"--output-dir {output.directory} cannot be made: {error.strerror}."
            raise LaunchError(text) from None
    return _run_watched(command, flag, place, job.ranks, timeout)


def python_program(
    program: Sequence[str], module: bool, output: Output = TERMINAL, options: Sequence[str] = ()
) -> list[str]:
    """Return the command that runs a Python program so that a failure on one rank ends the job.

    Args:
      program: A module or a script, then its arguments.
      module: Whether the first is a module.
      output: Where the output of each rank goes.
      options: Those of Python.

    Example:
      >>> python_program(["train.py", "--fast"], module=False)[1:]
      ['-m', 'mpistrat.launch.rank', 'train.py', '--fast']
    """
    words = [sys.executable, *options, "-m", "mpistrat.launch.rank"]
    words += ["--label"] if output.label else []
    words += ["--output-dir", str(Path(output.directory).resolve())] if output.directory else []
    return [*words, *(["-m"] if module else []), *program]


def without_python(program: Sequence[str]) -> tuple[list[str], Sequence[str], bool]:
    """Return the options of the ``python`` that ``mpiexec`` wants, the rest, and if it is a module.

    Example:
      >>> without_python(["python", "-u", "-m", "train", "--fast"])
      (['-u'], ['train', '--fast'], True)
    """
    if len(program) < 2 or not _is_python(program[0]):
        return [], program, False
    first = 1
    last = len(program) - 1
    while first < last and program[first][:1] == "-" and program[first] not in ("-m", "-"):
        if program[first] == "-c":
            raise LaunchError("python -c: write the code to a file, and give its name.")
        first += 2 if program[first] in ("-W", "-X") else 1
    module = program[first] == "-m" and len(program) > first + 1
    return list(program[1:first]), program[first + module :], module


def _is_python(word: str) -> bool:
    """Tell whether a word is Python's name, or the path of the one that runs here."""
    if not re.fullmatch(r"python[\d.]*", Path(word).name) or Path(word).is_dir():
        return False
    if word in ("python", "python3"):
        return not Path(word).exists()
    if Path(shutil.which(word) or "").parent.resolve() == Path(sys.executable).parent.resolve():
        return True
    raise LaunchError(
        f"the ranks run {sys.executable}, as this command does, and not {word}. Leave it out, or "
        f"write {word} -m mpistrat run ... if mpistrat is installed there."
    )


def find_allocation(hostfile: str | None = None) -> Allocation:
    """Return the hosts for a job: those of a file, of the allocation, or this one.

    Raises:
      LaunchError: They cannot be read.
    """
    try:
        current_allocation = allocation()
        if hostfile is not None:
            return from_file(hostfile)._replace(
                scheduler=current_allocation.scheduler if current_allocation else ""
            )
        return current_allocation or LOCAL_HOST
    except (OSError, ValueError) as error:
        raise LaunchError(f"the list of hosts cannot be used: {error}.") from error


def plan_command(
    place: Allocation, wishes: LaunchOptions, program: Sequence[str], env: Mapping[str, str]
) -> tuple[Command, str]:
    """Return the call of the launcher that fits, and its flag for variables to hand on."""
    in_slurm = place.scheduler == "Slurm"
    if in_slurm and wishes.launcher != "mpiexec":
        listed, loaded = plugins(), library()
        pmi = choose_pmi(loaded.flavour, listed, child_environment({}))
        if "srun: fatal" in listed:
            raise LaunchError(
                f"Slurm does not answer ({listed.strip().splitlines()[-1]}), but the variables of "
                "an allocation are set.\n  If this shell is of a job that has ended, open a new "
                "one; after `unset SLURM_JOB_ID` jobs start on this machine."
            )
        if pmi or wishes.launcher == "srun":
            return by_srun(pmi or "", place, wishes, program, env), ""
        listed = " ".join(listed.split())[:200] or "there is no srun"
        _print_message(f"note: srun has no PMI for {loaded} ({listed}), so mpiexec is used")
    elif wishes.launcher == "srun":
        raise LaunchError("--launcher srun: this is not inside an allocation of Slurm.")
    launcher, loaded = find()
    if note := plan_note(launcher, loaded):
        _print_message(f"note: {note}")
    unreached = in_slurm and shutil.which("srun") is None  # as in a container
    if unreached and len(place.hosts) > 1 and not place.hostfile:
        raise LaunchError(
            f"the {len(place.hosts)} hosts of this allocation are reached by srun, which is not "
            "here. Start where it is (outside of the container), or give --hostfile FILE."
        )
    command = by_mpiexec(launcher, place, wishes, program, env, cores())
    if not place.scheduler or unreached:  # mpiexec would ask a scheduler that does not answer
        unset_variables = dict.fromkeys(_scheduler_variables(child_environment({})))
        command = command._replace(env={**unset_variables, **command.env})
    return command, launcher.flavour.export if place is not LOCAL_HOST else ""


def _scheduler_variables(names: Iterable[str]) -> tuple[str, ...]:
    """Return the variables that name an allocation; say of those that are no allocation."""
    variable_names = sorted(n for n in names if re.match("SLURM_(?!CONF$)|PBS_", n))
    if variable_names and allocation() is None:
        names_text = ", ".join(variable_names[:3]) + (
            f" and {len(variable_names) - 3} more" if variable_names[3:] else ""
        )
        _print_message(f"note: {names_text} are set, but this is no allocation; they are ignored")
    return tuple(variable_names)


def _run_watched(
    command: Command, flag: str, place: Allocation, ranks: int, timeout: float | None
) -> int:
    """Run the launcher to its end, and say what has ended it if that was not the program."""
    open_standard()
    with contextlib.ExitStack() as stack:
        temporary_directory = stack.enter_context(_room())
        # With TMPDIR=. it is not absolute, and programs may change directory.
        local_room = Path(temporary_directory).absolute()
        # Ranks on other hosts have to see it.
        shared_room = _shared_room(stack) if place is not LOCAL_HOST else local_room
        record, cause = shared_room / RECORD, shared_room / CAUSE
        cause.touch()
        rank_variables = {
            "MPISTRAT_RANKS": str(ranks),
            "MPISTRAT_RECORD": str(record),
            "MPISTRAT_TERMINAL": str(int(os.isatty(2))),
        }
        outer_record = child_environment({}).get("MPISTRAT_RECORD")
        roster = Roster(local_room, ranks if place is LOCAL_HOST else 0)
        try:
            command = command._replace(env={**command.env, **rank_variables})
            command = handing_on(command, flag, command.environment())
            is_input_taken = place is LOCAL_HOST and leave_input(local_room)
            stdin = subprocess.DEVNULL if is_input_taken else None
            outcome = run_job(command, timeout, started=roster.complete, stdin=stdin)
        finally:
            roster.close()
        recorded = None
        with contextlib.suppress(OSError):
            # Empty where there was no room on the disk: the ranks have agreed on that code.
            recorded = int(record.read_bytes() or outcome.code)
            if outer_record:
                Path(outer_record).write_bytes(b"%d\n" % recorded)
        code = _judged(outcome, recorded, roster, Path(command.argv[0]).name, timeout)
        with contextlib.suppress(OSError):
            if line := cause.read_text(encoding="utf-8"):
                say(f"\n{line}")  # Open MPI's launcher ends within a line
    return code


def _room(prefix: str = "mpistrat-", place: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """Return a directory for a job; one that cannot be removed (NFS) does not fail the job."""
    return tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True)


def _shared_room(stack: contextlib.ExitStack) -> Path:
    """Return a directory that all hosts see, as far as one can tell: here, else at home."""
    for place in (Path.cwd(), Path.home()):
        with contextlib.suppress(OSError):
            return Path(stack.enter_context(_room(".mpistrat-", place)))
    raise LaunchError(
        f"neither {Path.cwd()} nor {Path.home()} can be written, and the ranks need a directory "
        "that all hosts see. Start from another directory."
    )


def _judged(
    outcome: Outcome, recorded: int | None, roster: Roster, launcher: str, timeout: float | None
) -> int:
    """Return the exit code of a job that has ended, and say what is not in its output."""
    if outcome.timed_out:
        _print_message(f"the job was ended: it ran longer than --timeout {timeout:g} s")
        return outcome.code
    if not (outcome.killed or outcome.forwarded_signals) and (
        waited := roster.describe_wait(outcome.code, recorded)
    ):
        _print_message(
            f"ranks waited {read_or_default().timeout:g} s (MPISTRAT_TIMEOUT) for others {waited}"
        )
        return HUNG
    if outcome.killed:
        ending = _killed(outcome.killed, roster, launcher=True)
        _print_message(f"{launcher} itself {ending}, hence exit code {outcome.code}")
    elif recorded is None and outcome.forwarded_signals and not outcome.interrupted:
        names = " and ".join(map(_named, sorted(outcome.forwarded_signals)))
        _print_message(
            f"mpistrat run received {names} and passed it on, which ended the ranks. With "
            "ms.preemption(manager) around the training a job saves before it ends"
        )
    elif recorded is None and not outcome.interrupted:
        first = roster.first_ended(outcome.code)
        _report_ended_ranks(first, roster)
        if not first and outcome.code % 128 in CRASHES:  # of one that had not come to sign in
            _print_message(
                "if MPI has crashed, /dev/shm may be full, or small (a container): df -h /dev/shm"
            )
    if recorded is not None or outcome.code:
        # Interrupted, Open MPI's launcher says 1.
        return recorded or (
            INTERRUPTED if outcome.interrupted and recorded is None else outcome.code
        )
    _print_message(
        "the launcher reports success, but not every rank has left the program in order "
        "(perhaps by os._exit); the job counts as failed"
    )
    return UNRECORDED


def _threads(job: JobShape, place: Allocation) -> dict[str, str]:
    """Return the number of BLAS threads of each rank: its share of the cores, unless it is set."""
    if has_thread_variable(child_environment({})):
        return {}
    if place.scheduler == "Slurm":  # which gives each task one core, unless it was asked for more
        return {"OMP_NUM_THREADS": str(place.cpus_per_task or 1)}
    return {"OMP_NUM_THREADS": str(max(1, cores() // job.max_ranks_per_host))}


def _report_ended_ranks(ended_ranks: Sequence[EndedRank], roster: Roster) -> None:
    """Print which ranks ended first, if the ranks have not agreed on an exit code.

    All ranks that ended in the same way share one line.
    """
    ranks_by_ending = group_by_key(
        [(ended_rank.number, ended_rank.code, ended_rank.sure) for ended_rank in ended_ranks],
        ended_ranks,
    )
    # Seen at once: the first of them, and those that the launcher ended for its sake.
    note = "; a launcher ends all others once one has ended" if len(ended_ranks) > 1 else ""
    for (number, code, sure), group in ranks_by_ending.items():
        subject = _listed(group) + ("" if sure else ", by the exit code,")
        if number:
            _print_message(f"{subject} {_killed(number, roster, len(group))}{note}")
        elif code or not note:
            _print_message(
                f"{subject} ended with exit code {code} without leaving in order, by os._exit, by "
                f"MPI_Abort, or in compiled code{note}"
            )


def _listed(ended_ranks: Sequence[EndedRank]) -> str:
    """Return which ranks these are, of many the first few.

    Example:
      >>> _listed([Ended(3, 812, 9, 0, True)])
      'rank 3 (process 812)'
      >>> _listed([Ended(rank, 800 + rank, 9, 0, True) for rank in range(512)])
      'ranks 0 (process 800), 1 (process 801), 2 (process 802) and 509 others at the same time'
    """
    if len(ended_ranks) == 1:
        return f"rank {ended_ranks[0].rank} (process {ended_ranks[0].pid})"
    rank_texts = [
        f"{ended_rank.rank} (process {ended_rank.pid})" for ended_rank in sorted(ended_ranks)
    ]
    rest = len(rank_texts) - _NAMED
    last = f"{rest} other{'s' * (rest > 1)}" if rest > 0 else rank_texts.pop()
    return f"ranks {', '.join(rank_texts[:_NAMED])} and {last} at the same time"


def _named(number: int) -> str:
    """Return a signal as texts have it.

    Example:
      >>> _named(9)
      'signal 9 (SIGKILL)'
    """
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # one without a name, such as a real-time signal
        return f"signal {number}"


# Signals that the system sends to a process for what this has done itself.
_OWN_CAUSES: dict[int, str] = {
    signal.SIGALRM: "a timer of the program (signal.alarm, signal.setitimer) without a handler",
    signal.SIGPIPE: "it wrote to a pipe or socket that nobody reads, and did not ignore the signal",
    signal.SIGXCPU: "its limit of processor time (ulimit -t)",
    signal.SIGXFSZ: "its limit of the size of a file (ulimit -f)",
}


def _killed(number: int, roster: Roster, processes: int = 1, launcher: bool = False) -> str:
    """Return the text about processes that a signal has ended, and where to look for the cause.

    Args:
      number: The signal.
      roster: Of the ranks.
      processes: How many there are.
      launcher: It is not a rank, but their launcher.
    """
    ending_text = f"{'was' if processes == 1 else 'were'} ended by {_named(number)}"
    if number in CRASHES and not launcher:
        return f"{ending_text}: a crash in compiled code; PYTHONFAULTHANDLER=1 shows where"
    if number == signal.SIGKILL and roster.out_of_memory:
        return f"{ending_text}: the kernel has killed a process of this host for lack of memory"
    if number in _OWN_CAUSES and not launcher:
        return f"{ending_text}: {_OWN_CAUSES[number]}"
    places = "a limit of the batch system (its log of the job), or a kill by hand"
    if number in (signal.SIGKILL, *CRASHES):
        places = f"a lack of memory (dmesg | grep -i 'out of memory'), {places}"
    return f"{ending_text}, from outside of the job; look for {places}"


def _print_message(text: str) -> None:
    say(f"mpistrat: {text}")


def options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    rest, add = argparse.REMAINDER, parser.add_argument
    text = "number of ranks; default in an allocation: its number of tasks"
    add("-n", "-np", dest="ranks", metavar="N", type=positive, help=text)
    text = "use N nodes of the allocation or the hostfile"
    add("--nodes", metavar="N", type=positive, help=text)
    add("--per-node", metavar="N", type=positive, help="start N ranks on each node")
    # As `mpistrat.launch.mpi_libraries.BINDINGS`, which --help is not to wait for.
    bindings = ("none", "core", "socket", "numa")
    add("--bind", choices=bindings, help="bind each rank to this unit")
    add("--hostfile", metavar="FILE", help="a file with one HOST or HOST:RANKS per line")
    add("--launcher", choices=("srun", "mpiexec"), help="take this one")
    add("--label", action="store_true", help="begin each line of output with [rank@host]")
    text = "write each rank's output to DIR/rank-N.txt; only rank 0 is on the terminal too"
    add("--output-dir", metavar="DIR", default="", help=text)
    add("--dry-run", action="store_true", help="print the launcher command and do not run it")
    add("--timeout", metavar="S", type=seconds, help="end the job after S seconds")
    text = "a module and its arguments, as after python -m"
    add("-m", dest="module", metavar="MODULE ...", nargs=rest, help=text)
    add("-c", dest="code", nargs=rest, help=argparse.SUPPRESS)  # of python
    add("script", metavar="SCRIPT ...", nargs=rest, help="a script and its arguments")


def main(args: argparse.Namespace) -> int:
    """Run the program."""
    from mpistrat.launch.plan import LaunchOptions
    from mpistrat.launch.streams import Output

    if args.code is not None:
        raise LaunchError("-c: write the code to a file, and give its name.")
    program, extra = _split([*(args.module or []), *args.script])
    if not program:
        raise LaunchError("give a SCRIPT or -m MODULE to run")
    return run(
        LaunchOptions(
            args.ranks, args.nodes, args.per_node, args.bind, args.launcher, tuple(extra)
        ),
        program,
        module=bool(args.module),
        timeout=args.timeout,
        hostfile=args.hostfile,
        output=Output(args.output_dir, args.label),
        dry_run=args.dry_run,
    )


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return what stands before the last ``--``, and what stands after it.

    Example:
      >>> _split(["train.py", "-v", "--", "--cpu-bind=cores"])
      (['train.py', '-v'], ['--cpu-bind=cores'])
    """
    if words[:1] == ["--"]:
        words = words[1:]
    if "--" not in words:
        return words, []
    end = len(words) - 1 - words[::-1].index("--")
    return words[:end], words[end + 1 :]
