"""Run a Python program on N ranks with the MPI of this environment.

Inside a Slurm allocation it calls srun with the PMI of this MPI library, elsewhere the mpiexec that
belongs to the MPI library of mpi4py. It prints the command first. The default numbers of ranks,
nodes and cores are those of the allocation. Options of Python come after its name: mpistrat run
-n 4 python -u train.py. Arguments after the last -- go to the launcher: mpistrat run train.py
--epochs 3 -- --cpu-bind=cores. A failure on one rank ends the whole job. The exit code is the
launcher's.

With --profile, cProfile records the calls of each rank from the first line of the program to its
end, also if it fails or calls sys.exit. profile/rank-N.prof holds those of rank N. A table of all
ranks is printed to stderr then, and by `mpistrat profile` later. Only the main thread of each rank
is profiled. A program that uses cProfile itself cannot be run with it.
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

from mpistrat.cluster.allocation import Allocation, find_allocation, read_hostfile
from mpistrat.comm.callsite import group_by_key
from mpistrat.config import (
    child_environment,
    has_thread_variable,
    launched_by,
    launcher_variables,
    read_or_default,
)
from mpistrat.errors import LaunchError
from mpistrat.launch.arguments import parse_positive, parse_seconds
from mpistrat.launch.mpi_libraries import (
    Command,
    Launcher,
    Library,
    count_cores,
    find_launcher,
    find_library,
    find_version,
    list_srun_plugins,
)
from mpistrat.launch.plan import (
    LOCAL_HOST,
    JobShape,
    LaunchOptions,
    build_mpiexec_command,
    build_srun_command,
    choose_pmi,
    fit_shape,
    forward_variables,
)
from mpistrat.launch.process import Outcome, run_job
from mpistrat.launch.profile import DEFAULT_DIRECTORY, remove_profiles, report_job
from mpistrat.launch.roster import CAUSE_NAME, CRASH_SIGNALS, RECORD_NAME, EndedRank, Roster
from mpistrat.launch.streams import TERMINAL, Output, leave_input, open_standard_streams
from mpistrat.watchdog.status_board import HUNG, say

UNRECORDED = 70  # the launcher reports success, the ranks do not
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_MAX_NAMED_RANKS = 3  # ranks that a line names, of those that ended together


def check_outside_of_job() -> None:
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


def describe_mismatch(launcher: Launcher, library: Library) -> str:
    """Return a warning about a launcher and a library that may not fit, or an empty string."""
    if launcher.flavour.name != library.flavour.name or launcher.flavour.name == "unknown":
        return f"{launcher} and {library} may belong to different MPIs; `mpistrat doctor` tries it"
    launcher_version = find_version(launcher.version_text)
    library_version = find_version(library.version_text)
    if launcher_version != library_version:
        return (
            f"mpiexec is {launcher_version} but the library is {library_version}; use one if "
            "ranks stay alone"
        )
    return ""


def run(
    launch_options: LaunchOptions,
    program: Sequence[str],
    is_module: bool = False,
    timeout: float | None = None,
    *,
    hostfile: str | None = None,
    output: Output = TERMINAL,
    profile_directory: str = "",
    dry_run: bool = False,
) -> int:
    """Run a Python program on several ranks, here or in the allocation that this process is in.

    The exact call of the launcher is printed to stderr first.

    Args:
      launch_options: The options for the job, such as its number of ranks, if that is not the
        allocation's.
      program: A script or a module, then its arguments; ``python`` before it is left out.
      is_module: Whether the first word is a module, as after ``python -m``.
      timeout: Seconds after which the job is ended, or None for never.
      hostfile: A file of hosts to use instead of those of the allocation.
      output: The terminal or files for the output of the ranks.
      profile_directory: A directory for a profile of each rank, or empty for none; then a table of
        all ranks is printed to stderr when the job has ended.
      dry_run: Print the call, and do nothing.

    Returns:
      The exit code that the ranks agreed on, else the launcher's, which is 128 + n if signal n
      ended it, and that is printed; 70 if the launcher reports success but the ranks have not left
      in order; 124 if the time ran out.

    Raises:
      LaunchError: No launcher fits, the numbers of ranks and nodes do not fit each other or the
        allocation, a file or directory cannot be used, or this process already is a rank.
    """
    check_outside_of_job()
    python_options: list[str] = []
    if not is_module:
        python_options, program, is_module = split_python_call(program)
    if not is_module and program[0] == "-":
        raise LaunchError("-: only one rank gets standard input; write the program to a file.")
    script_paths = (Path(program[0]), Path(program[0], "__main__.py"))
    if not is_module and not any(path.is_file() for path in script_paths):
        raise LaunchError(f"there is no program {program[0]!r}; for a module write -m before it.")
    allocation = choose_hosts(hostfile)
    shape = fit_shape(launch_options, allocation)
    rank_command = build_rank_command(program, is_module, output, python_options)
    rank_variables = _choose_thread_variables(shape, allocation)
    profile_origin = "--profile-dir" if profile_directory else "MPISTRAT_PROFILE"
    profile_directory = profile_directory or read_or_default().profile
    if profile_directory:  # programs may change directory
        rank_variables["MPISTRAT_PROFILE"] = str(Path(profile_directory).absolute())
    command, export_flag = plan_command(allocation, launch_options, rank_command, rank_variables)
    _print_message(str(command))
    if dry_run:
        return 0
    _make_directory(output.directory, "--output-dir")
    _make_directory(profile_directory, profile_origin)
    if profile_directory:
        remove_profiles(Path(profile_directory))
    code = _run_watched_job(command, export_flag, allocation, shape.ranks, timeout)
    if profile_directory:
        report_job(Path(profile_directory), shape.ranks)
    return code


def _make_directory(directory: str, origin: str) -> None:
    try:
        if directory:
            Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"{origin} {directory} cannot be made: {error.strerror}. Give one that this host can "
            "write."
        ) from None


def build_rank_command(
    program: Sequence[str],
    is_module: bool,
    output: Output = TERMINAL,
    python_options: Sequence[str] = (),
) -> list[str]:
    """Return the command that runs a Python program so that a failure on one rank ends the job.

    Args:
      program: A module or a script, then its arguments.
      is_module: Whether the first is a module.
      output: The terminal or files for the output of each rank.
      python_options: The options of Python.

    Example:
      >>> build_rank_command(["train.py", "--fast"], is_module=False)[1:]
      ['-m', 'mpistrat.launch.rank', 'train.py', '--fast']
    """
    words = [sys.executable, *python_options, "-m", "mpistrat.launch.rank"]
    words += ["--label"] if output.has_labels else []
    words += ["--output-dir", str(Path(output.directory).resolve())] if output.directory else []
    return [*words, *(["-m"] if is_module else []), *program]


def split_python_call(program: Sequence[str]) -> tuple[list[str], Sequence[str], bool]:
    """Return the options of a ``python`` before a program, the program, and if it is a module.

    Example:
      >>> split_python_call(["python", "-u", "-m", "train", "--fast"])
      (['-u'], ['train', '--fast'], True)
    """
    if len(program) < 2 or not _is_python(program[0]):
        return [], program, False
    program_index = 1
    last_index = len(program) - 1
    while (
        program_index < last_index
        and program[program_index][:1] == "-"
        and program[program_index] not in ("-m", "-")
    ):
        if program[program_index] == "-c":
            raise LaunchError("python -c: write the code to a file, and give its name.")
        program_index += 2 if program[program_index] in ("-W", "-X") else 1
    is_module = program[program_index] == "-m" and len(program) > program_index + 1
    return list(program[1:program_index]), program[program_index + is_module :], is_module


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


def choose_hosts(hostfile: str | None = None) -> Allocation:
    """Return the hosts for a job: those of a file, of the allocation, or this host.

    Raises:
      LaunchError: They cannot be read.
    """
    try:
        current_allocation = find_allocation()
        if hostfile is not None:
            scheduler = current_allocation.scheduler if current_allocation else ""
            return read_hostfile(hostfile)._replace(scheduler=scheduler)
        return current_allocation or LOCAL_HOST
    except (OSError, ValueError) as error:
        raise LaunchError(f"the list of hosts cannot be used: {error}.") from error


def plan_command(
    allocation: Allocation,
    launch_options: LaunchOptions,
    program: Sequence[str],
    env: Mapping[str, str],
) -> tuple[Command, str]:
    """Return the call of the launcher that fits, and its flag for variables to hand on."""
    in_slurm = allocation.scheduler == "Slurm"
    if in_slurm and launch_options.launcher != "mpiexec":
        plugins_text, library = list_srun_plugins(), find_library()
        pmi = choose_pmi(library.flavour, plugins_text, child_environment({}))
        if "srun: fatal" in plugins_text:
            raise LaunchError(
                f"Slurm does not answer ({plugins_text.strip().splitlines()[-1]}), but the "
                "variables of an allocation are set.\n  If this shell is of a job that has ended, "
                "open a new one; after `unset SLURM_JOB_ID` jobs start on this machine."
            )
        if pmi or launch_options.launcher == "srun":
            return build_srun_command(pmi or "", allocation, launch_options, program, env), ""
        plugins_text = " ".join(plugins_text.split())[:200] or "there is no srun"
        _print_message(f"note: srun has no PMI for {library} ({plugins_text}), so mpiexec is used")
    elif launch_options.launcher == "srun":
        raise LaunchError("--launcher srun: this is not inside an allocation of Slurm.")
    launcher, library = find_launcher()
    if note := describe_mismatch(launcher, library):
        _print_message(f"note: {note}")
    is_srun_missing = in_slurm and shutil.which("srun") is None  # as in a container
    if is_srun_missing and len(allocation.hosts) > 1 and not allocation.hostfile:
        raise LaunchError(
            f"the {len(allocation.hosts)} hosts of this allocation are reached by srun, which is "
            "not here. Start where it is (outside of the container), or give --hostfile FILE."
        )
    command = build_mpiexec_command(
        launcher, allocation, launch_options, program, env, core_count=count_cores()
    )
    if not allocation.scheduler or is_srun_missing:  # a scheduler would not answer mpiexec
        unset_variables = dict.fromkeys(_list_scheduler_variables(child_environment({})))
        command = command._replace(env={**unset_variables, **command.env})
    return command, launcher.flavour.export_flag if allocation is not LOCAL_HOST else ""


def _list_scheduler_variables(environment_names: Iterable[str]) -> tuple[str, ...]:
    """Return the variables that name an allocation; print a note if there is no allocation."""
    variable_names = sorted(n for n in environment_names if re.match("SLURM_(?!CONF$)|PBS_", n))
    if variable_names and find_allocation() is None:
        names_text = ", ".join(variable_names[:3]) + (
            f" and {len(variable_names) - 3} more" if variable_names[3:] else ""
        )
        _print_message(f"note: {names_text} are set, but this is no allocation; they are ignored")
    return tuple(variable_names)


def _run_watched_job(
    command: Command,
    export_flag: str,
    allocation: Allocation,
    rank_count: int,
    timeout: float | None,
) -> int:
    """Run the launcher to its end, and print the cause of an end that is not the program's."""
    is_local = allocation is LOCAL_HOST
    open_standard_streams()
    with contextlib.ExitStack() as stack:
        temporary_directory = stack.enter_context(_make_job_directory())
        # With TMPDIR=. it is not absolute, and programs may change directory.
        local_directory = Path(temporary_directory).absolute()
        # Ranks on other hosts have to see it.
        shared_directory = local_directory if is_local else _make_shared_directory(stack)
        record_path, cause_path = shared_directory / RECORD_NAME, shared_directory / CAUSE_NAME
        cause_path.touch()
        rank_variables = {
            "MPISTRAT_RANKS": str(rank_count),
            "MPISTRAT_RECORD": str(record_path),
            "MPISTRAT_TERMINAL": str(int(os.isatty(2))),
        }
        roster = Roster(local_directory, rank_count if is_local else 0)
        try:
            command = command._replace(env={**command.env, **rank_variables})
            command = forward_variables(command, export_flag, command.build_environment())
            is_input_taken = is_local and leave_input(local_directory)
            stdin = subprocess.DEVNULL if is_input_taken else None
            outcome = run_job(command, timeout, has_started=roster.is_complete, stdin=stdin)
        finally:
            roster.close()
        recorded_code = _read_recorded_code(record_path, outcome)
        launcher_name = Path(command.argv[0]).name
        code = _decide_exit_code(outcome, recorded_code, roster, launcher_name, timeout)
        with contextlib.suppress(OSError):
            if line := cause_path.read_text(encoding="utf-8"):
                say(f"\n{line}")  # Open MPI's launcher ends within a line
    return code


def _read_recorded_code(record_path: Path, outcome: Outcome) -> int | None:
    """Return the exit code that the ranks have agreed on, or None; copy it to an outer record."""
    recorded_code, outer_path = None, child_environment({}).get("MPISTRAT_RECORD")
    with contextlib.suppress(OSError):
        # Empty where there was no room on the disk: the ranks have agreed on that code.
        recorded_code = int(record_path.read_bytes() or outcome.code)
        if outer_path:
            Path(outer_path).write_bytes(b"%d\n" % recorded_code)
    return recorded_code


def _make_job_directory(
    prefix: str = "mpistrat-", parent_directory: Path | None = None
) -> tempfile.TemporaryDirectory[str]:
    """Return a directory for a job; one that cannot be removed (NFS) does not fail the job."""
    return tempfile.TemporaryDirectory(
        prefix=prefix, dir=parent_directory, ignore_cleanup_errors=True
    )


def _make_shared_directory(stack: contextlib.ExitStack) -> Path:
    """Return a directory that all hosts probably see: in the current directory, or at home."""
    for parent_directory in (Path.cwd(), Path.home()):
        with contextlib.suppress(OSError):
            return Path(stack.enter_context(_make_job_directory(".mpistrat-", parent_directory)))
    raise LaunchError(
        f"neither {Path.cwd()} nor {Path.home()} can be written, and the ranks need a directory "
        "that all hosts see. Start from another directory."
    )


def _decide_exit_code(
    outcome: Outcome,
    recorded_code: int | None,
    roster: Roster,
    launcher_name: str,
    timeout: float | None,
) -> int:
    """Return the exit code of a job that has ended, and print the causes that ranks cannot."""
    if outcome.has_timed_out:
        _print_message(f"the job was ended: it ran longer than --timeout {timeout:g} s")
        return outcome.code
    if not (outcome.killing_signal or outcome.forwarded_signals) and (
        wait_text := roster.describe_wait(outcome.code, recorded_code)
    ):
        _print_message(
            f"ranks waited {read_or_default().timeout:g} s (MPISTRAT_TIMEOUT) for others "
            f"{wait_text}"
        )
        return HUNG
    _report_causes(outcome, recorded_code, roster, launcher_name)
    if recorded_code is not None or outcome.code:
        # KeptInterrupt, Open MPI's launcher says 1.
        return recorded_code or (
            INTERRUPTED if outcome.is_interrupted and recorded_code is None else outcome.code
        )
    _print_message(
        "the launcher reports success, but not every rank has left the program in order "
        "(perhaps by os._exit); the job counts as failed"
    )
    return UNRECORDED


def _report_causes(
    outcome: Outcome, recorded_code: int | None, roster: Roster, launcher_name: str
) -> None:
    """Print the cause of an end that the ranks have not agreed on."""
    if outcome.killing_signal:
        ending = _describe_kill(outcome.killing_signal, roster, is_launcher=True)
        _print_message(f"{launcher_name} itself {ending}, hence exit code {outcome.code}")
    elif recorded_code is None and outcome.forwarded_signals and not outcome.is_interrupted:
        signals_text = " and ".join(map(_format_signal, sorted(outcome.forwarded_signals)))
        _print_message(
            f"mpistrat run received {signals_text} and passed it on, which ended the ranks. With "
            "ms.preemption(manager) around the training a job saves before it ends"
        )
    elif recorded_code is None and not outcome.is_interrupted:
        first_ended_ranks = roster.find_first_ended(outcome.code)
        _report_ended_ranks(first_ended_ranks, roster)
        if not first_ended_ranks and outcome.code % 128 in CRASH_SIGNALS:
            # A rank has crashed that had not signed in yet.
            _print_message(
                "if MPI has crashed, /dev/shm may be full, or small (a container): df -h /dev/shm"
            )


def _choose_thread_variables(shape: JobShape, allocation: Allocation) -> dict[str, str]:
    """Return the variable for the BLAS threads of each rank: its share of the cores, unless set."""
    if has_thread_variable(child_environment({})):
        return {}
    if allocation.scheduler == "Slurm":  # which gives each task one core by default
        return {"OMP_NUM_THREADS": str(allocation.cpus_per_task or 1)}
    return {"OMP_NUM_THREADS": str(max(1, count_cores() // shape.max_ranks_per_host))}


def _report_ended_ranks(ended_ranks: Sequence[EndedRank], roster: Roster) -> None:
    """Print which ranks ended first, if the ranks have not agreed on an exit code.

    All ranks that ended in the same way share one line.
    """
    endings = [(rank.signal_number, rank.code, rank.is_certain) for rank in ended_ranks]
    ranks_by_ending = group_by_key(endings, ended_ranks)
    # Seen at once: the first of them, and those that the launcher ended for its sake.
    note = "; a launcher ends all others once one has ended" if len(ended_ranks) > 1 else ""
    for (signal_number, code, is_certain), same_ending_ranks in ranks_by_ending.items():
        reservation = "" if is_certain else ", by the exit code,"
        subject = f"{_format_ended_ranks(same_ending_ranks)}{reservation}"
        if signal_number:
            kill_text = _describe_kill(signal_number, roster, len(same_ending_ranks))
            _print_message(f"{subject} {kill_text}{note}")
        elif code or not note:
            _print_message(
                f"{subject} ended with exit code {code} without leaving in order, by os._exit, by "
                f"MPI_Abort, or in compiled code{note}"
            )


def _format_ended_ranks(ended_ranks: Sequence[EndedRank]) -> str:
    """Return the ranks in words; only the first few of many.

    Example:
      >>> _format_ended_ranks([EndedRank(3, 812, 9, 0, True)])
      'rank 3 (process 812)'
      >>> _format_ended_ranks([EndedRank(rank, 800 + rank, 9, 0, True) for rank in range(512)])
      'ranks 0 (process 800), 1 (process 801), 2 (process 802) and 509 others at the same time'
    """
    if len(ended_ranks) == 1:
        return f"rank {ended_ranks[0].rank} (process {ended_ranks[0].pid})"
    rank_texts = [f"{rank.rank} (process {rank.pid})" for rank in sorted(ended_ranks)]
    unnamed_count = len(rank_texts) - _MAX_NAMED_RANKS
    unnamed_text = f"{unnamed_count} other{'s' * (unnamed_count > 1)}"
    last_text = unnamed_text if unnamed_count > 0 else rank_texts.pop()
    return f"ranks {', '.join(rank_texts[:_MAX_NAMED_RANKS])} and {last_text} at the same time"


def _format_signal(signal_number: int) -> str:
    """Return a signal in words.

    Example:
      >>> _format_signal(9)
      'signal 9 (SIGKILL)'
    """
    try:
        return f"signal {signal_number} ({signal.Signals(signal_number).name})"
    except ValueError:  # one without a name, such as a real-time signal
        return f"signal {signal_number}"


# Signals that the system sends to a process because of an act of this process.
_OWN_CAUSES: dict[int, str] = {
    signal.SIGALRM: "a timer of the program (signal.alarm, signal.setitimer) without a handler",
    signal.SIGPIPE: "it wrote to a pipe or socket that nobody reads, and did not ignore the signal",
    signal.SIGXCPU: "its limit of processor time (ulimit -t)",
    signal.SIGXFSZ: "its limit of the size of a file (ulimit -f)",
}


def _describe_kill(
    signal_number: int, roster: Roster, process_count: int = 1, is_launcher: bool = False
) -> str:
    """Return the text about processes that a signal has ended, with places to look for the cause.

    Args:
      signal_number: The signal.
      roster: The roster of the ranks.
      process_count: The number of processes.
      is_launcher: Whether the process is not a rank, but the launcher.
    """
    ending_text = (
        f"{'was' if process_count == 1 else 'were'} ended by {_format_signal(signal_number)}"
    )
    if signal_number in CRASH_SIGNALS and not is_launcher:
        return f"{ending_text}: a crash in compiled code; PYTHONFAULTHANDLER=1 shows where"
    if signal_number == signal.SIGKILL and roster.has_run_out_of_memory:
        return f"{ending_text}: the kernel has killed a process of this host for lack of memory"
    if signal_number in _OWN_CAUSES and not is_launcher:
        return f"{ending_text}: {_OWN_CAUSES[signal_number]}"
    causes_text = "a limit of the batch system (its log of the job), or a kill by hand"
    if signal_number in (signal.SIGKILL, *CRASH_SIGNALS):
        causes_text = f"a lack of memory (dmesg | grep -i 'out of memory'), {causes_text}"
    return f"{ending_text}, from outside of the job; look for {causes_text}"


def _print_message(text: str) -> None:
    say(f"mpistrat: {text}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    remainder, add = argparse.REMAINDER, parser.add_argument
    text = "number of ranks; default in an allocation: its number of tasks"
    add("-n", "-np", dest="ranks", metavar="N", type=parse_positive, help=text)
    text = "use N nodes of the allocation or the hostfile"
    add("--nodes", metavar="N", type=parse_positive, help=text)
    add("--per-node", metavar="N", type=parse_positive, help="start N ranks on each node")
    # As `mpistrat.launch.mpi_libraries.BINDINGS`, which --help is not to wait for.
    bindings = ("none", "core", "socket", "numa")
    add("--bind", choices=bindings, help="bind each rank to this unit")
    add("--hostfile", metavar="FILE", help="a file with one HOST or HOST:RANKS per line")
    add("--launcher", choices=("srun", "mpiexec"), help="take this one")
    add("--label", action="store_true", help="begin each line of output with [rank@host]")
    text = "write each rank's output to DIR/rank-N.txt; only rank 0 is on the terminal too"
    add("--output-dir", metavar="DIR", default="", help=text)
    text = "profile the main thread of each rank, print a table; files: profile/rank-N.prof"
    add("--profile", action="store_const", const=DEFAULT_DIRECTORY, default="", help=text)
    add("--profile-dir", dest="profile", metavar="DIR", help="the same, with files in DIR")
    add("--dry-run", action="store_true", help="print the launcher command and do not run it")
    add("--timeout", metavar="S", type=parse_seconds, help="end the job after S seconds")
    text = "a module and its arguments, as after python -m"
    add("-m", dest="module", metavar="MODULE ...", nargs=remainder, help=text)
    add("-c", dest="code", nargs=remainder, help=argparse.SUPPRESS)  # of python
    add("script", metavar="SCRIPT ...", nargs=remainder, help="a script and its arguments")


def main(args: argparse.Namespace) -> int:
    """Run the program."""
    from mpistrat.launch.plan import LaunchOptions
    from mpistrat.launch.streams import Output

    if args.code is not None:
        raise LaunchError("-c: write the code to a file, and give its name.")
    program, extra = _split_launcher_words([*(args.module or []), *args.script])
    if not program:
        raise LaunchError("give a SCRIPT or -m MODULE to run")
    return run(
        LaunchOptions(
            args.ranks, args.nodes, args.per_node, args.bind, args.launcher, tuple(extra)
        ),
        program,
        is_module=bool(args.module),
        timeout=args.timeout,
        hostfile=args.hostfile,
        output=Output(args.output_dir, args.label),
        profile_directory=args.profile,
        dry_run=args.dry_run,
    )


def _split_launcher_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before the last ``--``, and the words after it.

    Example:
      >>> _split_launcher_words(["train.py", "-v", "--", "--cpu-bind=cores"])
      (['train.py', '-v'], ['--cpu-bind=cores'])
    """
    if words[:1] == ["--"]:
        words = words[1:]
    if "--" not in words:
        return words, []
    separator_index = len(words) - 1 - words[::-1].index("--")
    return words[:separator_index], words[separator_index + 1 :]
