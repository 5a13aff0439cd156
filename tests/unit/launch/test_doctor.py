"""`mpistrat doctor`: what is wrong is found, and the command that fixes it is told."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from mpistrat.errors import LaunchError
from mpistrat.launch import doctor, facts
from mpistrat.launch.cli import main
from mpistrat.launch.doctor_checks import CHECKS, FAILED_CHECK, NOTE, OK, examine
from mpistrat.launch.facts import Job, LinkFacts, RankFacts, collect_facts, parse_facts
from mpistrat.launch.mpi_libraries import find_launcher

GIB = 2**30
RANK = RankFacts(
    host="n1",
    python="/site/bin/python",
    versions={"Python": "3.12.1", "numpy": "2.1", "mpi4py": "4.1", "optree": "1", "numba": "1"},
    library="MPICH 5.0.2 (/site/lib/libmpi.so.12)",
    wheel=False,
    yields=True,
    mask=0b0011,
    cores=4,
    blas=1,
    shm=(GIB, GIB),
    opens=True,
    space="pid:[1]",
    home=True,
    files=4096,
    fabric=(),
    rate=0.0,
    unseen=(),
)
OTHER = RANK._replace(mask=0b1100)
AWAY = RANK._replace(host="n2")
WELL = Job(2, "mpiexec -n 2 python", ranks=(RANK, OTHER), sizes=(2,))
SLURM = "JobRequeue = 1\nKillOnBadExit           = 0\nMaxJobs = 1\n"


def ranks(*changed):
    return WELL._replace(wanted=len(changed), sizes=(len(changed),), ranks=changed)


def both(**changes):
    return ranks(RANK._replace(**changes), OTHER._replace(**changes))


# What is wrong; the check that finds it; what it says; what fixes it.
WRONG = {
    "launcher of another MPI": (
        Job(2, mismatch="mpiexec: Open MPI; library: MPICH"),
        *("launcher", FAILED_CHECK, "Open MPI", "MPI4PY_LIBMPI"),
    ),
    "launcher of an unlike version": (
        WELL._replace(mismatch="mpiexec is 4.0 but the library is 5.0.2"),
        *("launcher", NOTE, "5.0.2", "MPI4PY_LIBMPI"),
    ),
    "wrong --mpi": (
        WELL._replace(sizes=(1, 1)),
        *("ranks", FAILED_CHECK, "2 jobs of 1 instead of one", "--mpi=pmix"),
    ),
    "MPI does not start": (
        WELL._replace(sizes=(), trouble="Exit code 1: PMI2_Init failed"),
        *("ranks", FAILED_CHECK, "PMI2_Init failed", "--mpi=pmi2"),
    ),
    "environment missing on one node": (
        ranks(RANK)._replace(wanted=2, failed=(("n7", "sh: /venv/bin/python: not found"),)),
        *("start", FAILED_CHECK, "on n7: sh: /venv/bin/python", "ls DIR"),
    ),
    "fewer ranks than expected": (
        WELL._replace(wanted=4, trouble="Exit code 9: slots"),
        *("start", FAILED_CHECK, "4 ranks were expected, 2 came. Exit code 9", "by hand"),
    ),
    "versions that differ": (
        ranks(RANK, AWAY._replace(python="/b/python", versions=RANK.versions | {"numpy": "1.26"})),
        *(
            "versions",
            FAILED_CHECK,
            "numpy is 2.1, 1.26 (n1: /site/bin/python; n2: /b/python)",
            "full path, /site",
        ),
    ),
    "a package on one node only": (
        ranks(RANK, AWAY._replace(versions=RANK.versions | {"mpistrat": "0.1"})),
        *("versions", FAILED_CHECK, "mpistrat is missing, 0.1", "one Python"),
    ),
    "a broken package": (
        both(versions=RANK.versions | {"numba": "cannot be imported (OSError: libLLVM)"}),
        *("versions", FAILED_CHECK, "libLLVM", "pip install --force-reinstall numba"),
    ),
    "no Numba": (
        both(versions={k: v for k, v in RANK.versions.items() if k != "numba"}),
        *("versions", NOTE, "no numba", "pip install numba"),
    ),
    "no MPI library": (
        both(library="none: mpi4py has no working MPI library"),
        *("MPI library", FAILED_CHECK, "no working", "MPI4PY_LIBMPI"),
    ),
    "MPI libraries that differ": (
        ranks(RANK, AWAY._replace(library="Open MPI v5.0.11")),
        *(
            "MPI library",
            FAILED_CHECK,
            "MPICH 5.0.2 (/site/lib/libmpi.so.12), Open MPI v5",
            "same MPI module",
        ),
    ),
    "the wheel's MPI beside InfiniBand": (
        both(wheel=True, fabric=("mlx5_0",)),
        *("network", NOTE, "mlx5_0 on n1 is not used", "MPI4PY_LIBMPI=/path"),
    ),
    "all ranks on one core": (
        both(mask=0b1),
        *("cores", NOTE, "all 2 ranks on n1 are on one core of 4", "--cpu-bind=cores"),
    ),
    "more ranks than cores": (
        ranks(*[RANK] * 5),
        *("cores", NOTE, "5 ranks on n1 share 2 cores", "at most 2"),
    ),
    "a quota below the ranks": (both(cores=1), "cores", NOTE, "share 1 cores", "at most"),
    "more BLAS threads than cores": (
        both(blas=4),
        *("cores", NOTE, "2 ranks x 4 BLAS threads on 4 cores", "OMP_NUM_THREADS=2"),
    ),
    "small /dev/shm": (
        ranks(RANK, AWAY._replace(shm=(60 * 2**20, 64 * 2**20))),
        *("/dev/shm", NOTE, "60 MiB free of 64 MiB on n2", "--shm-size"),
    ),
    "full /dev/shm": (both(shm=(0, GIB)), "/dev/shm", FAILED_CHECK, "0 MiB free", "find /dev/shm"),
    "/proc/PID/fd forbidden": (both(opens=False), "memory", NOTE, "/proc/PID/fd", "one container"),
    "a container for each rank": (
        ranks(RANK, OTHER._replace(space="pid:[2]")),
        *("memory", NOTE, "on n1", "one container"),
    ),
    "read-only home": (both(home=False), "home", NOTE, "on n1", "mpistrat warm"),
    "few descriptors": (both(files=256), "open files", NOTE, "only 256", "ulimit -n"),
    "a directory that is not shared": (
        ranks(RANK, AWAY._replace(unseen=("/fast/me",))),
        *(
            "directories",
            FAILED_CHECK,
            "/fast/me is not the same directory on n2",
            "shared file system",
        ),
    ),
    "KillOnBadExit off": (
        WELL._replace(slurm=SLURM, kills=False),
        *("a rank that dies", FAILED_CHECK, "KillOnBadExit is 0", "srun -K1"),
    ),
    "no overlap": (both(yields=False), "overlap", NOTE, "does not overlap", "_idle=1"),
    "a slow network": (
        ranks(RANK._replace(rate=100.0), AWAY._replace(rate=100.0))._replace(
            between=LinkFacts(20.0, 9.0)
        ),
        *("between nodes", NOTE, "20.0 us, 9.00 Gbit/s of 100", "UCX_NET_DEVICES"),
    ),
}

WELL_TOO = {
    "two ranks": WELL,
    "KillOnBadExit off, with -K1": WELL._replace(slurm=SLURM),
    "KillOnBadExit on": WELL._replace(slurm=SLURM.replace("0", "1"), kills=False),
    "InfiniBand, used": both(fabric=("mlx5_0",)),
    "descriptors without limit": both(files=-1),
    "a rank on each node": ranks(RANK, AWAY),
    "a fast network": ranks(RANK, AWAY)._replace(between=LinkFacts(2.0, 9.0)),
}


class TestChecks:
    """Each as data."""

    @pytest.mark.parametrize(("job", "name", "level", "says", "mends"), WRONG.values(), ids=WRONG)
    def test_what_is_wrong_is_found_and_what_mends_it_told(self, job, name, level, says, mends):
        (found,) = [one for one in examine(job) if one.level != OK and one.name == name]
        assert found.level == level
        assert says in found.text
        assert mends in found.mend

    @pytest.mark.parametrize("job", WELL_TOO.values(), ids=WELL_TOO)
    def test_nothing_is_found_where_all_is_well(self, job):
        assert [one for one in examine(job) if one.level != OK] == []
        assert len(list(examine(job))) == len(CHECKS)

    def test_what_is_said_of_many_nodes_can_be_read(self):
        odd = [RANK.versions, RANK.versions | {"numpy": "1.26"}]
        many = [
            OTHER._replace(
                **{"host": f"node{n:04}.site.example.org", "python": f"/{n}/bin/python"},
                **{"versions": odd[n % 2], "opens": False, "unseen": ("/fast",)},
            )
            for n in range(1024)
        ]
        found = {one.name: one.text for one in examine(ranks(*many))}
        assert max(map(len, found.values())) < 500
        assert found["start"].endswith("1 on node0006.site.example.org, ... and 1017 more")

    def test_each_wrong_thing_is_found_by_itself(self):
        for what, (job, name, *_) in WRONG.items():
            others = {one.name for one in examine(job) if one.level == FAILED_CHECK} - {name}
            assert others <= {"start", "ranks"}, what


@pytest.fixture
def launcher(tmp_path):
    """Make a launcher of a line of shell, in which "$@" is ``-n N PROGRAM ...``."""

    def make(text):
        script = tmp_path / "launcher"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        return str(script)

    return make


def report(capsys, *words):
    """Run the command; return its exit code, and the findings that are not good, by name."""
    code = main(["doctor", "--json", *words])
    told = json.loads(capsys.readouterr().out)
    return code, {one["name"]: one for one in told["findings"] if one["level"] != OK}


@pytest.mark.job
class TestInjected:
    """Jobs that are really wrong."""

    def test_this_environment_is_well(self, capsys, tmp_path):
        assert main(["doctor", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert FAILED_CHECK not in out
        for name in ("numpy", "numba", "mpi4py"):
            assert f"{name} {version(name)}" in out
        assert "found each other" in out
        assert " us, " in next(row for row in out.splitlines() if "inside a node:" in row)
        assert list(tmp_path.iterdir()) == []

    def test_ranks_that_do_not_find_each_other(self, capsys, launcher):
        # As a launcher of another MPI does it, and srun with another --mpi.
        alone = launcher('shift 2; "$@" & "$@" & wait')
        code, wrong = report(capsys, "--launcher", alone)
        assert code == 1
        assert "2 jobs of 1" in wrong["ranks"]["text"]

    def test_a_node_without_the_environment(self, capsys, launcher, tmp_path):
        text = 'shift 2; "$@" & shift 4; sh -c "$WORDS" /no/such/python & wait'
        words = f"WORDS={shlex.quote(doctor._FACTS_SCRIPT)}\n"
        code, wrong = report(capsys, "--launcher", launcher(words + text))
        assert code == 1
        assert "/no/such/python" in wrong["start"]["text"]
        assert os.uname().nodename in wrong["start"]["text"]

    def test_what_costs_speed_is_found_together(self, capsys, launcher, tmp_path, monkeypatch):
        if os.cpu_count() == 1 or not shutil.which("taskset"):
            pytest.skip("needs two cores and taskset")
        (tmp_path / "numpy-0.0.1.dist-info").mkdir()
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        monkeypatch.setenv("HOME", "/no/such/home")
        core = min(os.sched_getaffinity(0))
        lines = [
            "ulimit -n 512",
            f'shift 2; PYTHONPATH={shlex.quote(path)} taskset -c {core} "$@" &',
            f'taskset -c {core} "$@"; wait',
        ]
        code, wrong = report(capsys, "--launcher", launcher("\n".join(lines)))
        assert code == 1
        assert "numpy is" in wrong["versions"]["text"]
        assert "0.0.1" in wrong["versions"]["text"]
        assert "all 2 ranks" in wrong["cores"]["text"]
        assert "512" in wrong["open files"]["text"]
        assert "home" in wrong

    @pytest.mark.nightly
    @pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
    def test_a_small_dev_shm_and_a_directory_of_one_node(self, capsys, tmp_path):
        inner = f"mount -t tmpfs -o size=64m none /dev/shm && mount -t tmpfs none {tmp_path}"
        mpiexec, _ = find_launcher()
        words = ["unshare", "-m", "sh", "-c", f'{inner} && exec "$0" "$@"', mpiexec.path]
        code, wrong = report(capsys, str(tmp_path), "--launcher", shlex.join(words))
        assert code == 1
        assert "of 64 MiB" in wrong["/dev/shm"]["text"]
        assert str(tmp_path) in wrong["directories"]["text"]

    @pytest.mark.nightly
    @pytest.mark.skipif(os.geteuid() != 0, reason="namespaces")
    def test_a_container_for_each_rank_and_too_many_threads(self, capsys, launcher, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "999")
        apart = launcher('shift 2; for i in 1 2; do unshare -pf --mount-proc "$@" & done; wait')
        _, wrong = report(capsys, "--launcher", apart)
        assert "/proc/PID/fd cannot be opened" in wrong["memory"]["text"]
        assert "x 999 BLAS threads" in wrong["cores"]["text"] or os.cpu_count() == 1

    @pytest.mark.nightly
    def test_more_ranks_than_cores(self, capsys):
        count = len(os.sched_getaffinity(0)) + 1
        code, wrong = report(capsys, "-n", str(count))
        assert code == 0
        assert f"{count} ranks" in wrong["cores"]["text"]

    def test_a_launcher_that_is_not_there(self, capsys):
        code, wrong = report(capsys, "--launcher", "/no/such/srun -K1")
        assert code == 1
        assert (
            "2 ranks were expected, 0 came. /no/such/srun cannot be start" in wrong["start"]["text"]
        )


class TestGather:
    def test_from_a_rank_nothing_is_started(self, monkeypatch):
        monkeypatch.setattr(doctor, "launched_by", lambda: "srun")
        job = doctor.gather_facts()
        found = {one.name: one.text for one in examine(job)}
        assert "started by srun" in found["launcher"]
        assert "not tried" in found["ranks"]
        assert [one.name for one in examine(job) if one.level == FAILED_CHECK] == []

    def test_without_a_launcher_the_reason_is_told(self, monkeypatch):
        def none():
            raise LaunchError("no launcher at all")

        monkeypatch.setattr(doctor, "find_launcher", none)
        found = {one.name: one for one in examine(doctor.gather_facts())}
        assert found["launcher"].text == "no launcher at all"
        assert found["launcher"].level == FAILED_CHECK

    def test_a_directory_that_cannot_be_written_is_refused(self, tmp_path):
        with pytest.raises(LaunchError, match="/no/such cannot be written"):
            doctor.gather_facts(directories=["/no/such"])
        (tmp_path / "file").touch()
        with pytest.raises(LaunchError, match="file cannot be written: Not a directory"):
            doctor.gather_facts(directories=[str(tmp_path), str(tmp_path / "file")])
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    @pytest.mark.parametrize(
        ("words", "env", "ends"),
        [
            (["mpiexec"], "", True),
            (["/usr/bin/srun", "--mpi=pmi2"], "", False),
            (["srun", "-K1"], "", True),
            (["srun", "--kill-on-bad-exit=1"], "", True),
            (["srun"], "1", True),
        ],
    )
    def test_whether_a_rank_that_dies_ends_the_job(self, words, env, ends, monkeypatch):
        monkeypatch.setenv("SLURM_KILL_BAD_EXIT", env)
        assert doctor._is_failure_fatal(words) == ends


class TestFacts:
    def test_what_a_rank_tells_comes_back_from_among_other_lines(self):
        line = facts.FACTS_MARK + json.dumps(RANK._asdict())
        output = f"[0] warning\n[1] {line}\n{facts.FAILURE_MARK}n2 sh: python: not found\n"
        assert parse_facts(output) == ((RANK,), (("n2", "sh: python: not found"),))

    def test_devices_are_those_that_the_system_lists(self, tmp_path):
        for path, text in {
            "infiniband/mlx5_0/ports/1/rate": "100 Gb/sec (4X EDR)\n",
            "net/eth0/speed": "25000\n",
            "net/lo/speed": "",
            "net/down/speed": "-1\n",
        }.items():
            (tmp_path / path).parent.mkdir(parents=True)
            (tmp_path / path).write_text(text)
        found = collect_facts([str(tmp_path), str(tmp_path / "gone" / "file")], tmp_path)
        assert (found.fabric, found.rate) == (("mlx5_0",), 100.0)
        assert found.unseen == (str(tmp_path / "gone"),)
        assert found.opens

    def test_a_package_that_cannot_be_imported_says_why(self, tmp_path):
        (tmp_path / "numba").mkdir()
        (tmp_path / "numba" / "__init__.py").write_text("raise OSError('libLLVM is gone')")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        call = [sys.executable, "-m", "mpistrat.launch.facts"]
        said = subprocess.run(call, env=env, capture_output=True, text=True).stdout
        ((told,), _) = parse_facts(said)
        assert "libLLVM is gone" in told.versions["numba"]
        assert Path(told.python) == Path(sys.executable)

    def test_a_child_that_waits_for_what_a_thread_held_keeps_nobody_waiting(self, monkeypatch):
        ended = []
        waitpid = os.waitpid
        monkeypatch.setattr(os, "read", lambda *args: time.sleep(30))  # of the child, which hangs
        monkeypatch.setattr(os, "waitpid", lambda *args: ended.append(waitpid(*args)[1]))
        assert facts._can_open_memory()
        assert ended == [signal.SIGKILL]
