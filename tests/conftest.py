"""What all tests share: the three speeds, who runs beside whom, and a process's own end.

`README.md` beside this file says which speed holds what.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mpistrat.testing import run_ranks

HERE = Path(__file__).parent
# Tests that every rank of a job runs.
RUNGS = (HERE / "mpi", HERE / "doors" / "torch" / "ranks")
LAUNCH = HERE / "unit" / "launch"
# The longest unit of work: its modules compile the same loops, so one worker has them all, first.
OPTIM = HERE / "unit" / "optim"
# Programs that tests start as jobs; they are not modules to look for examples in.
PROGRAMS = tuple(HERE / path / "programs" for path in ("faults", "cluster", "doors/jax"))
# Of pyproject.toml: what `python -m pytest` runs.
DEFAULT = "not mpi and not nightly and not cluster"
JOBS = "jobs"  # the unit of work of all tests that start ranks
# What starts ranks, by its name and the module that it is from.
LAUNCHERS = {
    "find_launcher": "mpistrat.launch.mpi_libraries",
    "run": "mpistrat.launch.run",
    "command": "crowded",  # of tests/tools
}
# The tests start hundreds of processes, each of which would compile all that it imports.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    sys.dont_write_bytecode = False
# Where thirty processes want two cores, others wait a minute for a rank that compiles.
run_ranks.__kwdefaults__["timeout"] = 240.0
# The terminal, whatever is captured meanwhile.
TERMINAL = pytest.StashKey[int]()


def pytest_ignore_collect(collection_path, config):
    """Leave what ranks run to those who start them, unless this pytest is a rank."""
    if collection_path in RUNGS and not config.getoption("--with-mpi"):
        return True
    if collection_path in PROGRAMS:
        return True
    return None


# Speeds


def pytest_sessionstart(session):
    """Outside of a job the mark `mpi` is a speed, not what pytest-mpi skips."""
    config = session.config
    if config.getoption("--with-mpi") or config.getoption("--only-mpi"):
        return
    for plugin in list(config.pluginmanager.get_plugins()):
        if type(plugin).__name__ == "MPIPlugin":
            config.pluginmanager.unregister(plugin)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Let `slow` be nightly, and a test that starts ranks be a job.

    Jobs come last in one process. Of several workers one begins with them when a quarter of the
    other tests is done, so that many loops are compiled, and the others go on meanwhile: ranks of
    jobs sleep for half of their time. The doors' long modules come next, lest one ends last.
    """
    if config.getoption("--with-mpi"):
        return
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: workers have other addresses; give it ids")
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.nightly)
        # Ranks write into a directory of the test. Others than these have the mark themselves.
        room = "tmp_path" in getattr(item, "fixturenames", ())
        known = _knows_launchers(getattr(item, "module", None))
        if known and (room or item.path.parent == LAUNCH) and not item.get_closest_marker("beside"):
            item.add_marker(pytest.mark.job)
    if hasattr(config, "workerinput"):  # see `pytest_make_collect_report`
        items.sort(key=lambda item: (not str(item.path).startswith(f"{HERE}/"), str(item.path)))
    items.sort(key=lambda item: (_is_job(item), item.path.parent != OPTIM))
    if hasattr(config, "workerinput"):
        jobs = [item for item in items if _is_job(item)]
        doors = [item for item in items if _is_door(item) and not _is_job(item)]
        others = [item for item in items if not (_is_door(item) or _is_job(item))]
        quarter = len(others) // 4
        items[:] = others[:quarter] + jobs + doors + others[quarter:]


def _is_job(item):
    return item.get_closest_marker("job") is not None


def _is_door(item):
    return str(item.path).startswith(f"{HERE / 'doors'}/")


@functools.cache
def _knows_launchers(module):
    """Return whether a module has imported what starts ranks."""
    if module is None:  # an example
        return False
    known = {name: getattr(vars(module).get(name), "__module__", "") for name in LAUNCHERS}
    return any(known[name] == LAUNCHERS[name] for name in LAUNCHERS)


def pytest_make_parametrize_id(val, argname):
    """Name what shows its address only by its argument; pytest adds a number."""
    return argname if " at 0x" in repr(val) else None


# Workers


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Share the whole suite among workers, one for each core, where nobody says otherwise."""
    option = config.option
    if not hasattr(option, "numprocesses") or hasattr(config, "workerinput"):
        return
    whole = config.args_source is config.ArgsSource.TESTPATHS and option.markexpr == DEFAULT
    if option.numprocesses is None and whole and not (option.usepdb or option.collectonly):
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        option.numprocesses = min(cores, 4) if cores > 1 else None
    if option.numprocesses and option.dist in ("no", "load"):
        option.dist = "loadscope"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Let every other worker begin at the end.

    On a fresh checkout pytest rewrites and compiles 200 modules for 4 s; so each does half of it.
    """
    report = yield
    worker = getattr(collector.config, "workerinput", {"workerid": "gw0"})["workerid"]
    if isinstance(collector, pytest.Session | pytest.Directory) and int(worker[2:]) % 2:
        report.result.reverse()
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Name the file in which the workers say which tests are jobs."""
    node.workerinput["jobs"] = f"{tempfile.gettempdir()}/jobs-{node.workerinput['testrunuid']}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give every worker one module after the other, and one of them all jobs."""
    if config.option.dist != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class OneLaneOfJobs(LoadScopeScheduling):
        """Two jobs at once would have more ranks than there are cores."""

        jobs = frozenset()

        def schedule(self):
            told = Path(self.nodes[0].workerinput["jobs"])
            if self.collection is None and told.exists():
                self.jobs = set(told.read_text().split("\n"))
                told.unlink()
            super().schedule()

        def _split_scope(self, nodeid):
            module = nodeid.split("::")[0]
            if nodeid in self.jobs:
                return JOBS
            return "optim" if module.startswith(str(OPTIM.relative_to(HERE.parent))) else module

        def remove_node(self, node):
            """Never start again what has ended its worker."""
            units = self.assigned_work[node].values()
            left = [(unit, test) for unit in units for test, done in unit.items() if not done]
            for unit, test in left[:1]:
                unit[test] = True
            super().remove_node(node)
            return left[0][1] if left else None

    config.option.loadscopereorder = False  # the order is that of `pytest_collection_modifyitems`
    return OneLaneOfJobs(config, log)


class _Popen(subprocess.Popen):
    """What starts no launcher while another worker may start one."""

    alone = True

    def __init__(self, args, *rest, **options):
        first = args if isinstance(args, (str, bytes, os.PathLike)) else args[0]
        if not self.alone and Path(os.fsdecode(first)).name in ("mpiexec", "mpirun"):
            pytest.fail("a test that starts ranks wants the mark `job`", pytrace=False)
        super().__init__(args, *rest, **options)


# Ends


@pytest.hookimpl(tryfirst=True)  # in its own hook xdist says that this worker is ready
def pytest_collection_finish(session):
    """Say which tests are jobs; let no garbage collection look at the tests themselves.

    There are thousands, so one that a test asks for would take most of a second.
    """
    told = getattr(session.config, "workerinput", {}).get("jobs")
    if told:
        whole = Path(f"{told}-{os.getpid()}")
        whole.write_text("\n".join(item.nodeid for item in session.items if _is_job(item)))
        whole.replace(told)
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    """Keep the terminal for the last words; on a rank of a job, run what is for ranks."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        config.stash[TERMINAL] = os.dup(2)
    if config.getoption("--with-mpi") and config.option.markexpr == DEFAULT:
        config.option.markexpr = "not slow and not nightly"
    if hasattr(config, "workerinput"):
        subprocess.Popen = _Popen
        # Waiting ranks of MPICH sleep, and leave the cores to the other workers.
        os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """End a test whose time is up even where Python itself stands still.

    pytest-timeout needs the interpreter for it, which a C call or a deadlock may hold forever.
    Ranks of the third rung are watched by their own plugin.
    """
    if item.config.getoption("--with-mpi"):
        return (yield)
    _Popen.alone = _is_job(item)
    mark = item.get_closest_marker("timeout")
    limit = float(mark.args[0] if mark and mark.args else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit + 30, exit=True, file=item.config.stash[TERMINAL])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
