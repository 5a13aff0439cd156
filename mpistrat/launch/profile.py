"""Print where the ranks of a profiled run have spent their time.

The directory holds one file for each rank, rank-N.prof, written by `mpistrat run --profile`, or by
MPISTRAT_PROFILE=DIRECTORY srun python -m mpistrat.launch.rank train.py. The functions of the
program come first, by the time that they took with all that they called; then the functions of
packages and of Python, by their own time. Each time is the mean over the ranks, and that of the
slowest rank with its number. "waiting" is the time in MPI, in calls of mpistrat: for other ranks,
and to move data. Only the main thread of each rank is profiled. pstats and snakeviz read the files.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mpistrat
from mpistrat.comm.callsite import ranks_text
from mpistrat.errors import LaunchError
from mpistrat.launch.arguments import parse_positive
from mpistrat.watchdog.status_board import say

DEFAULT_DIRECTORY = "profile"
DEFAULT_ROWS = 15

# A function, as `pstats` names it: file, line, name.
FunctionKey = tuple[str, int, str]

_LIBRARY = Path(mpistrat.__file__).parent
# Every call of MPI is made in this room. mpi4py is compiled, and not seen by a profiler, so its
# time is the own time of these functions.
_WAITING = _LIBRARY / "comm"
_EXAMPLES = _LIBRARY / "examples"  # programs as those of users
_STANDARD_LIBRARY = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
_PACKAGES = {"site-packages", "dist-packages"}  # names of directories, of pip and of Debian
# Events of `sys.monitoring` to which cProfile may listen, from Python 3.12 on.
_PROFILED_EVENTS = (
    *("PY_START", "PY_RESUME", "PY_THROW", "PY_RETURN", "PY_YIELD", "PY_UNWIND"),
    *("CALL", "C_RETURN", "C_RAISE"),
)
_NAME_WIDTH = 46


class FunctionTimes(NamedTuple):
    """The calls and seconds of one function, or of one kind of them, on one rank.

    Attributes:
      call_count: Number of calls, recursive ones too.
      own_seconds: Seconds in the function itself.
      cumulative_seconds: Seconds from its call to its return.
    """

    call_count: int = 0
    own_seconds: float = 0.0
    cumulative_seconds: float = 0.0


RankProfile = Mapping[FunctionKey, FunctionTimes]
_NO_TIMES = FunctionTimes()
_KIND_TITLES = {
    "program": "the program itself",
    "waiting": "waiting for ranks, moving data",
    "mpistrat": "mpistrat, without that",
    "other": "packages and Python",
}
_HINT = "To profile a program: mpistrat run --profile-dir DIRECTORY PROGRAM."


# On each rank.


@contextlib.contextmanager
def profiling_rank(directory: str, rank: int, rank_count: int) -> Iterator[None]:
    """Profile the body on this rank, and write the file of this rank when the body ends.

    A file that cannot be written at the end is reported on stderr, and changes nothing else.

    Args:
      directory: The directory of the files, made if it is absent.
      rank: The number of this rank.
      rank_count: The number of ranks of the job. Rank 0 removes the files of further ranks, which
        an earlier job has left.

    Raises:
      LaunchError: The directory cannot be used.
    """
    import cProfile

    directory_path, pid = Path(directory).resolve(), os.getpid()
    path = directory_path / f"rank-{rank}.prof"
    try:
        directory_path.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if rank == 0:
            remove_profiles(directory_path, first_rank=rank_count)
    except OSError as error:
        raise LaunchError(
            f"rank {rank}: the directory of profiles {directory_path} cannot be used: "
            f"{error.strerror}. Give one that this host can write."
        ) from None
    profiler = cProfile.Profile()
    profiler.enable()
    _ignore_other_threads()
    try:
        yield
    finally:
        profiler.disable()
        if os.getpid() == pid:  # else it is a child that the program has forked
            _write_profile(profiler, path, rank)


def _ignore_other_threads() -> None:
    """Let the profiler see the calls of this thread only, as it does before Python 3.12.

    From then on it gets the calls of all threads, and takes them for those of one: a function of
    the program would have the time of a watching thread (github.com/python/cpython/issues/116738).
    """
    if sys.version_info >= (3, 12):
        monitoring, tool_id = sys.monitoring, sys.monitoring.PROFILER_ID
        for name in _PROFILED_EVENTS:
            event = getattr(monitoring.events, name)
            callback = monitoring.register_callback(tool_id, event, None)
            if callback is not None:
                monitoring.register_callback(tool_id, event, _keep_to_thread(callback))


def _keep_to_thread(callback: Callable[..., Any]) -> Callable[..., None]:
    """Return a callback that does nothing in other threads than the one of this call."""
    thread_id = threading.get_ident()

    def call_in_thread(*arguments: Any) -> None:
        if threading.get_ident() == thread_id:
            callback(*arguments)

    return call_in_thread


def _write_profile(profiler: Any, path: Path, rank: int) -> None:
    part_path = path.with_suffix(".part")  # so that a file with the final name is whole
    try:
        profiler.dump_stats(part_path)
        part_path.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part_path.unlink()
        say(f"mpistrat: rank {rank}: the profile {path} cannot be written: {error.strerror}")


# In the launcher.


def remove_profiles(directory: Path, first_rank: int = 0) -> None:
    """Remove the files of an earlier run, of ranks from `first_rank` on."""
    for rank, path in _find_profiles(directory).items():
        if rank >= first_rank:
            path.unlink(missing_ok=True)


def _find_profiles(directory: Path) -> dict[int, Path]:
    """Return the files by rank, in the order of the ranks."""
    matches = ((re.fullmatch(r"rank-(\d+)\.prof", path.name), path) for path in directory.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def read_profiles(directory: Path) -> dict[int, RankProfile]:
    """Return the profiles of the ranks, by rank.

    Raises:
      LaunchError: The directory cannot be read, or a file is damaged.
    """
    import pstats

    try:
        paths = _find_profiles(directory)
    except OSError as error:
        raise LaunchError(f"{directory} cannot be read: {error.strerror}. {_HINT}") from None
    profiles: dict[int, RankProfile] = {}
    for rank, path in paths.items():
        try:
            stats: dict[FunctionKey, Any] = pstats.Stats(str(path)).stats  # type: ignore[attr-defined]
        except (EOFError, TypeError, ValueError, OSError) as error:
            raise LaunchError(f"{path} is no profile ({error}); remove it.") from None
        profiles[rank] = {
            function_key: FunctionTimes(*fields[1:4])  # before: calls that are not recursive
            for function_key, fields in stats.items()
        }
    return profiles


def report_job(directory: Path, rank_count: int) -> None:
    """Print the table of an ended job to stderr, and the ranks that have left no profile."""
    try:
        profiles = read_profiles(directory)
    except LaunchError as error:  # the exit code of the job stays
        say(f"mpistrat: {error}")
        return
    missing_ranks = [rank for rank in range(rank_count) if rank not in profiles]
    if profiles:
        say(format_table(profiles, directory))
    if missing_ranks:
        say(
            f"mpistrat: no profile of {ranks_text(missing_ranks)} in {directory}: a rank that a "
            "signal or os._exit ends leaves none. All hosts must see this directory."
        )


# The table.


class _Row(NamedTuple):
    """A function, or all functions of one kind, with its times on each rank."""

    title: str
    times: list[FunctionTimes]

    def find_mean(self, field: str) -> float:
        """Return the mean of a field over the ranks."""
        return statistics.fmean(getattr(times, field) for times in self.times)


def classify_function(function_key: FunctionKey) -> str:
    """Return the kind of a function: ``program``, ``waiting``, ``mpistrat`` or ``other``.

    Example:
      >>> classify_function(("/project/train.py", 3, "main"))
      'program'
      >>> classify_function(("~", 0, "<built-in method time.sleep>"))
      'other'
    """
    file_name = function_key[0]
    if file_name == "~" or file_name.startswith("<"):  # compiled; frozen, or without a file
        return "other"
    path = Path(file_name)
    if _WAITING in path.parents:
        return "waiting"
    if _LIBRARY in path.parents:
        return "program" if _EXAMPLES in path.parents else "mpistrat"
    is_package = not _PACKAGES.isdisjoint(path.parts)
    return "other" if is_package or _STANDARD_LIBRARY & {*path.parents} else "program"


def format_function(function_key: FunctionKey) -> str:
    """Return a function as a short text.

    Example:
      >>> format_function((str(Path.cwd() / "train.py"), 3, "main"))
      'train.py:3 main'
      >>> format_function(("~", 0, "<built-in method time.sleep>"))
      '<built-in method time.sleep>'
    """
    path, line, name = Path(function_key[0]), *function_key[1:]
    if function_key[0] == "~":  # compiled
        return name
    packages = {parent for parent in path.parents if parent.name in _PACKAGES}
    for parent in (*packages, *_STANDARD_LIBRARY, _LIBRARY.parent, Path.cwd()):
        if parent in path.parents:
            path = path.relative_to(parent)
    return f"{path}:{line} {name}"


def format_table(
    profiles: Mapping[int, RankProfile], directory: Path, max_rows: int = DEFAULT_ROWS
) -> str:
    """Return the merged table of all ranks as text.

    Args:
      profiles: The profiles by rank, at least one.
      directory: Their directory, for the heading.
      max_rows: How many functions of the program, and of others, are shown at most.
    """
    keys_by_kind: dict[str, list[FunctionKey]] = {kind: [] for kind in _KIND_TITLES}
    for key in dict.fromkeys(key for profile in profiles.values() for key in profile):
        keys_by_kind[classify_function(key)].append(key)
    program_rows, other_rows = (
        [
            _Row(format_function(key), [p.get(key, _NO_TIMES) for p in profiles.values()])
            for key in keys_by_kind[kind]
        ]
        for kind in ("program", "other")
    )
    program_rows.sort(key=lambda row: -row.find_mean("cumulative_seconds"))
    other_rows.sort(key=lambda row: -row.find_mean("own_seconds"))
    ranks = list(profiles)
    kind_rows = [
        _Row(title, [_add_up(profile, keys_by_kind[kind]) for profile in profiles.values()])
        for kind, title in _KIND_TITLES.items()
    ]
    lines = [
        f"mpistrat: profile of {ranks_text(ranks)}, in seconds; the files: {directory}/rank-N.prof",
        *_format_head(len(ranks) > 1),
        *(_format_row(row, ranks) for row in program_rows[:max_rows]),
        "all functions of",
        *(_format_row(row, ranks, has_cumulative=False) for row in kind_rows),
        "functions of packages and of Python",
        *(_format_row(row, ranks) for row in other_rows[:max_rows]),
    ]
    return "\n".join(lines)


def _add_up(profile: RankProfile, function_keys: Sequence[FunctionKey]) -> FunctionTimes:
    times = [profile[key] for key in function_keys if key in profile]
    return FunctionTimes(sum(t.call_count for t in times), sum(t.own_seconds for t in times))


def _format_head(has_slowest: bool) -> list[str]:
    head, title = " " * _NAME_WIDTH, f"{'functions of the program':{_NAME_WIDTH}}"
    if not has_slowest:
        return [f"{title} {'calls':>9} {'own':>9} {'in all':>9}"]
    columns = f"{'mean':>9} {'slowest rank':<14}"
    return [
        f"{head} {'':>9} {'own time':>9} {'':<14} {'with its calls':>9}",
        f"{title} {'calls':>9} {columns} {columns}".rstrip(),
    ]


def _format_row(row: _Row, ranks: Sequence[int], has_cumulative: bool = True) -> str:
    fields = ("own_seconds", "cumulative_seconds") if has_cumulative else ("own_seconds",)
    columns = [_shorten(f"  {row.title}"), f"{row.find_mean('call_count'):9,.0f}"]
    for field in fields:
        columns.append(f"{row.find_mean(field):9.3f}")
        if len(ranks) > 1:
            seconds, rank = max(
                (getattr(times, field), -rank) for times, rank in zip(row.times, ranks, strict=True)
            )
            columns.append(f"{f'{seconds:.3f} ({-rank})':<14}")
    return " ".join(columns).rstrip()


def _shorten(text: str) -> str:
    """Return a text in the width of the first column; its end says most."""
    if len(text) > _NAME_WIDTH:
        text = f"  ...{text[-(_NAME_WIDTH - 5) :]}"
    return f"{text:{_NAME_WIDTH}}"


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    text = f"the directory of the files; default: {DEFAULT_DIRECTORY}"
    parser.add_argument(
        "directory", metavar="DIRECTORY", nargs="?", type=Path, default=DEFAULT_DIRECTORY, help=text
    )
    text = f"show at most N functions of the program, and of others; default: {DEFAULT_ROWS}"
    parser.add_argument("--rows", metavar="N", type=parse_positive, default=DEFAULT_ROWS, help=text)


def main(args: argparse.Namespace) -> int:
    """Print the table."""
    profiles = read_profiles(args.directory)
    if not profiles:
        raise LaunchError(f"{args.directory} holds no rank-N.prof. {_HINT}")
    print(format_table(profiles, args.directory, args.rows))
    return 0
