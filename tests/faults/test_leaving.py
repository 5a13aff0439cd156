"""The code that one rank leaves with through handlers at the bottom of its program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.process import run_job

LONGEST = 240
pytestmark = [
    pytest.mark.timeout(LONGEST + 30),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]

PROGRAM = """
import sys
import mpistrat as ms
from mpi4py import MPI

strategy = ms.MirroredStrategy()
me = MPI.COMM_WORLD.rank

def main():
    if me == 1:
        {leave}
    strategy.run(lambda: 1)

{how}
"""
PASSING = {
    "plain": "main()",
    "finally": "try:\n    main()\nfinally:\n    print('tidy')",
    "unmatched": "try:\n    main()\nexcept ValueError:\n    print('never')",
    "again": "try:\n    main()\nexcept BaseException:\n    raise",
    "another": "try:\n    main()\nexcept SystemExit as left:\n    left.code += 0\n    raise",
}


def ran(text, tmp_path):
    """Return the code of a job of a program, and what it has said."""
    program, said = tmp_path / "train.py", tmp_path / "said"
    program.write_text(text)
    with said.open("wb") as output:
        outcome = run_job(
            find_launcher()[0].build_command(2, [sys.executable, str(program)]), LONGEST, output
        )
    assert not outcome.has_timed_out
    return outcome.code, said.read_text(errors="replace")


def told(leave, how, tmp_path):
    """Return the same of the program above."""
    return ran(PROGRAM.format(leave=leave, how=how), tmp_path)


@pytest.mark.parametrize(
    "how",
    ["again", *(pytest.param(how, marks=pytest.mark.mpi) for how in PASSING if how != "again")],
)
def test_a_code_passes_through_handlers(how, tmp_path):
    code, said = told("sys.exit(3)", PASSING[how], tmp_path)
    assert code == 3, said
    assert "rank 1 has left the program (exit code 3)" in said


def test_a_code_comes_out_of_what_is_read_ahead(tmp_path):
    how = (
        "import numpy as np\n"
        "def rows():\n"
        "    for _ in range(9):\n        yield np.ones(2)\n        me and sys.exit(4)\n"
        "for _ in strategy.experimental_distribute_dataset(ms.Dataset(rows).prefetch(2)):\n    pass"
    )
    code, said = told("pass", how, tmp_path)
    assert code == 4, said
    assert "rank 1 has left the program (exit code 4)" in said


CAUGHT = "try:\n    main()\nexcept SystemExit:\n    print('caught')"


def test_a_code_that_was_caught_is_not_told(tmp_path):
    code, said = told("sys.exit(3)", CAUGHT, tmp_path)
    assert code == 77, said
    assert "rank 1 has left the program (exit code 0" in said


@pytest.mark.parametrize("how", ["plain", "finally"])
@pytest.mark.mpi
def test_a_bare_system_exit_is_found_out_but_its_code_is_not_known(how, tmp_path):
    code, said = told("raise SystemExit(3)", PASSING[how], tmp_path)
    assert code == 77, said
    assert "rank 1 has left the program" in said


@pytest.mark.mpi
def test_a_code_that_was_caught_before_is_not_that_of_the_end(tmp_path):
    how = "try:\n    sys.exit(2)\nexcept SystemExit:\n    pass\nraise SystemExit(0)"
    code, said = told("pass", how, tmp_path)
    assert code == 0, said


@pytest.mark.mpi
def test_one_that_a_function_caught_neither(tmp_path):
    how = (
        "def parse():\n    try:\n        sys.exit(2)\n    except SystemExit:\n        return\n"
        "parse()\nraise SystemExit(0)"
    )
    code, said = told("pass", how, tmp_path)
    assert code == 0, said


def test_an_exception_is_told_where_the_program_has_a_hook(tmp_path):
    how = "sys.excepthook = lambda *told: print('mine', told[1])\nmain()"
    code, said = told("raise ValueError('unusual')", how, tmp_path)
    assert code == 1, said
    assert "mine replica 1 raised ValueError" in said
    assert "and left the program: unusual" in said


@pytest.mark.mpi
@pytest.mark.parametrize(
    "leave",
    [
        "sys.stdout.close(); raise ValueError",
        "sys.stderr.close(); raise ValueError",
        "import os; os.close(2); raise ValueError",
        "sys.stdout = open('/dev/full', 'w'); print('lost'); raise ValueError",
        "sys.stderr = None; raise ValueError",
    ],
)
def test_a_rank_without_its_streams_leaves(leave, tmp_path):
    code, said = told(leave, "main()", tmp_path)
    assert code == 1, said


@pytest.mark.mpi
@pytest.mark.parametrize(("what", "wanted"), [("MemoryError", 1), ("SystemExit(43)", 43)])
def test_a_rank_that_cannot_take_part_in_the_last_proof_ends_the_job(what, wanted, tmp_path):
    """As where memory has ended, or a handler of a signal exits; the others would wait for it."""
    how = "from mpistrat.lockstep.handshake import Lockstep\ntry:\n    main()\nfinally:\n    pass"
    leave = "def none(*_):\n            raise {what}\n        Lockstep.leave_program = none; return"
    code, said = told(leave.format(what=what), how, tmp_path)
    assert code == wanted, said
    assert what.partition("(")[0] in said


@pytest.mark.mpi
def test_a_rank_leaves_where_threads_die_as_they_begin(tmp_path):
    """As where memory has ended: `Thread.start` does not come back then."""
    leave = "import threading; threading.Thread._bootstrap = lambda self: 0; raise MemoryError"
    code, said = told(leave, "main()", tmp_path)
    assert code == 1, said
    assert said.count("\nMemoryError") == 1


STARTING = """
import os, signal
import mpistrat as ms
from mpi4py import MPI
from mpistrat.watchdog.watchdog import WatchedBoard
from mpistrat.comm import session

place, name = {place}, {name!r}
code = "def on(*args):\\n    os.kill(os.getpid(), signal.SIGINT)\\n    return made(*args)"
ours = {{"__name__": "mpistrat", "os": os, "signal": signal, "made": getattr(place, name)}}
exec(code, ours)
if MPI.COMM_WORLD.rank == 1:
    setattr(place, name, ours["on"])
ms.MirroredStrategy().all_reduce("sum", 1)
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("place", "name"), [("session", "library"), ("WatchedBoard", "open")])
def test_ctrl_c_while_the_first_strategy_is_made_leaves_nobody_waiting(place, name, tmp_path):
    """Also one that comes while MPI starts, from when on the others wait for this rank."""
    code, said = ran(STARTING.format(place=place, name=name), tmp_path)
    assert code == 130, said


PROMPTED = """
import sys
sys.ps1 = "In: "
import mpistrat as ms
ms.MirroredStrategy().all_reduce("sum", 1)
try:
    1 / 0
except ZeroDivisionError as error:
    sys.last_value = error
"""


@pytest.mark.mpi
def test_what_has_failed_at_a_prompt_is_not_the_end_of_the_program(tmp_path):
    code, said = ran(PROMPTED, tmp_path)
    assert code == 0, said


NEVER_COMES = """
import os, time
os.environ |= {"MPISTRAT_WARN": "0.5", "MPISTRAT_TIMEOUT": "2"}
from mpi4py import MPI
import mpistrat as ms

if MPI.COMM_WORLD.rank == 1:
    time.sleep(1000)
ms.MirroredStrategy()
"""


@pytest.mark.mpi
def test_ranks_that_wait_for_others_to_make_their_first_strategy_say_so(tmp_path):
    code, said = ran(NEVER_COMES, tmp_path)
    assert code == 75, said
    assert "rank 0 of 2 has waited 0.5 s in train.py:9 for all of them to make a strategy" in said
    assert "rank 0 of 2 has waited 2 s in train.py:9" in said
    assert "`mpistrat run -n 2` names it" in said


LOST_ON_THE_WAY = """
import os, time
os.environ |= {"MPISTRAT_WARN": "0.5", "MPISTRAT_TIMEOUT": "2"}
from mpi4py import MPI
import mpistrat as ms
from mpistrat.watchdog.status_board import Slot

if MPI.COMM_WORLD.rank == 1:
    Slot.open = lambda *args: time.sleep(1000)
ms.MirroredStrategy()
"""


@pytest.mark.mpi
def test_a_rank_that_is_lost_before_it_can_be_watched_ends_the_job(tmp_path):
    """All have come to the first strategy, and there is no watchdog yet."""
    code, said = ran(LOST_ON_THE_WAY, tmp_path)
    assert code == 75, said
    assert "rank 0 of 2 has waited 2 s in train.py:10 for all of them to make a strategy" in said


NEVER_STARTS = """
import os, time
os.environ["MPISTRAT_TIMEOUT"] = "1"
if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    time.sleep(1000)
import mpistrat as ms

ms.MirroredStrategy()
"""


@pytest.mark.mpi
def test_a_rank_that_never_starts_mpi_ends_the_job(tmp_path):
    """The others wait for it inside of MPI_Init, where no thread of Python runs."""
    code, said = ran(NEVER_STARTS, tmp_path)
    assert code
    assert "in _start_with_all_ranks" in said
    assert "train.py" in said


PART_NEVER_COMES = """
import os, time
from mpi4py import MPI
import mpistrat as ms

ms.MirroredStrategy()
part = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)
os.environ |= {"MPISTRAT_WARN": "0.5", "MPISTRAT_TIMEOUT": "2"}
if MPI.COMM_WORLD.rank == 1:
    time.sleep(1000)
ms.MirroredStrategy(comm=part)
"""


@pytest.mark.mpi
def test_they_say_who_they_are_in_the_job_that_has_begun_without_these(tmp_path):
    code, said = ran(PART_NEVER_COMES, tmp_path)
    assert code == 75, said
    assert "rank 1 of 2 (rank 0 of the job) has waited 0.5 s in train.py" in said
    assert "mpistrat run" not in said


GOING_DOWN = """
import os, signal, time
from mpi4py import MPI
import mpistrat as ms

MPI.COMM_WORLD.Barrier()
os.environ["MPISTRAT_TIMEOUT"] = "2"
strategy = ms.MultiWorkerMirroredStrategy()

class Slow:
    def __del__(self):
        {does}

if strategy.rank == 1:
    slow = Slow()
"""


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("does", "printed"),
    [("time.sleep(1000)", "in __del__"), ("os.kill(os.getpid(), signal.SIGSTOP)", "")],
    ids=["hangs", "is stopped"],  # which keeps its threads from printing and ending it
)
def test_a_rank_that_does_not_end_while_python_goes_down_ends_the_job(does, printed, tmp_path):
    """After the last handshake: the others wait in MPI_Finalize, where no thread of Python runs."""
    code, said = ran(GOING_DOWN.format(does=does), tmp_path)
    assert code
    assert printed in said


@pytest.mark.job
def test_the_cause_is_told_where_python_stays_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONINSPECT", "1")
    (tmp_path / "train.py").write_text(PROGRAM.format(leave="raise KeyError('boom')", how="main()"))
    with (tmp_path / "said").open("wb") as output:
        words = [sys.executable, "-m", "mpistrat.launch.rank", str(tmp_path / "train.py")]
        outcome = run_job(find_launcher()[0].build_command(2, words), LONGEST, output)
    assert outcome.code == 1
    assert "KeyError: 'boom'" in (tmp_path / "said").read_text()


@pytest.mark.job
def test_an_aborted_job_leaves_no_shared_memory(tmp_path):
    """Nor does one under a plain mpiexec; MPI itself removes its files at a regular end only."""
    how = (
        "from mpistrat.config import mapped_shm_files\n"
        "print('mapped', *mapped_shm_files(), flush=True)\n"
        "main()"
    )
    code, said = told("raise ValueError", how, tmp_path)
    assert code == 1, said
    mapped = [word for row in said.splitlines() if "mapped" in row for word in row.split()]
    assert [file for file in mapped if Path(file).exists()] == [], said
