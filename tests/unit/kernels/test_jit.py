"""The import of Numba: when it happens, what runs without it, and the cache on disk."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from mpistrat.kernels import jit

ROOT = Path(__file__).parents[3]
LONGEST = 240  # seconds for a process that compiles, where many others want the cores

MODULE = """
import numpy as np
from mpistrat.kernels import jit

@jit.helper
def square(x):
    return x * x

def sum_twin(values):
    return values.sum()

@jit.kernel(sum_twin)
def sum_all(values):
    total = values.dtype.type(0)
    for value in values:
        total += value
    return total

def squares_twin(values):
    return 1000 + (values * values).sum()   # recognisable, so wrong on purpose

@jit.kernel(squares_twin)
def squares(values):
    total = sum_all(values[:0])
    for value in values:
        total += square(value)
    return total
"""


def twin(values):
    return values.sum() + 0.5


def loop(values):
    total = 0.0
    for value in values:
        total += value
    return total


@pytest.fixture
def program(tmp_path):
    """Run a program beside a module with kernels, in a process and a cache directory of its own."""
    (tmp_path / "kernels_here.py").write_text(MODULE)
    (tmp_path / "cache").mkdir()
    started = []

    def start(code: str, **env: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        env = {"PYTHONPATH": path, "NUMBA_CACHE_DIR": str(tmp_path / "cache")} | env
        kept = {name: value for name, value in os.environ.items() if "MPISTRAT" not in name}
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", "import sys, numpy as np\n" + code],
            env=kept | env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        started.append(process)
        return process

    def run(code: str, **env: str) -> list[str]:
        process = start(code, **env)
        text = process.communicate(timeout=LONGEST)[0]
        assert process.returncode == 0, text
        return text.split()

    run.start = start
    run.cache = tmp_path / "cache"
    yield run
    for process in started:  # except for a test that has failed, all have ended
        process.kill()
        process.communicate()


CALL = "from kernels_here import *\nprint(squares(np.arange(4, dtype={dtype!r})))\n"
HITS = "print(sum(squares.compiled().stats.cache_hits.values()))\n"


class TestKernel:
    def test_both_forms_and_the_call_agree_with_their_oracles(self):
        total = jit.kernel(twin)(loop)
        values = np.array([1.0, 2.0, 4.0])
        assert total.reference(values) == 7.5
        assert total.compiled()(values) == 7.0
        assert total(values) == (7.0 if jit.is_compiling() else 7.5)
        assert total.compiled() is total.compiled()

    def test_it_keeps_the_name_and_the_docstring(self):
        def documented():
            """Say something."""

        made = jit.kernel(documented)(documented)
        assert made.__name__ == "documented"
        assert made.__doc__ == "Say something."

    def test_compiled_code_without_a_place_for_a_cache_works(self):
        # Numba has no file to put a cache beside, as in a read-only installation without a home.
        names: dict = {}
        exec("def triple(x):\n    return 3 * x", names)
        assert jit.kernel(names["triple"])(names["triple"]).compiled()(5) == 15


class TestDoor:
    def test_importing_and_decorating_leave_numba_alone(self, program):
        assert program("import kernels_here\nprint('numba' in sys.modules)") == ["False"]

    def test_the_option_chooses_twins_without_numba(self, program):
        code = CALL.format(dtype="f8") + "print('numba' in sys.modules, jit.is_compiling())"
        assert program(code, MPISTRAT_NUMBA="0") == ["1014.0", "False", "False"]

    def test_without_numba_twins_run_after_one_warning(self, program):
        code = """
import warnings
sys.modules["numba"] = None
from kernels_here import *
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    print(squares(np.arange(4.0)), sum_all(np.arange(4.0)))
print(len(said), "Install" in str(said[0].message))
"""
        assert program(code) == ["1014.0", "6.0", "1", "True"]

    def test_the_choice_is_made_once(self, program):
        code = """
import os
from kernels_here import *
print(sum_all(np.arange(4.0)))
os.environ["MPISTRAT_NUMBA"] = "1"
print(squares(np.arange(4.0)))
"""
        assert program(code, MPISTRAT_NUMBA="0") == ["6.0", "1014.0"]

    def test_numba_switched_off_by_its_own_variable_runs_the_loop(self, program):
        assert program(CALL.format(dtype="f8"), NUMBA_DISABLE_JIT="1") == ["14.0"]


class TestCache:
    def test_kernels_call_helpers_and_kernels_and_a_second_process_compiles_nothing(self, program):
        assert program(CALL.format(dtype="f8") + HITS) == ["14.0", "0"]
        assert program(CALL.format(dtype="f8") + HITS) == ["14.0", "1"]

    @pytest.mark.nightly
    @pytest.mark.parametrize("damage", ["torn", "garbage"])
    def test_damaged_files_cost_a_compilation_only(self, program, damage):
        program(CALL.format(dtype="f8"))
        files = [path for path in program.cache.rglob("*") if path.suffix in (".nbi", ".nbc")]
        assert files
        for path in files:
            old = path.read_bytes()
            new = {"torn": old[: len(old) // 2], "garbage": b"\x93" * len(old)}
            path.write_bytes(new[damage])
        assert program(CALL.format(dtype="f8") + HITS) == ["14.0", "0"]
        assert program(CALL.format(dtype="f8") + HITS) == ["14.0", "1"]  # and is whole again

    @pytest.mark.nightly
    def test_processes_that_compile_different_types_at_once_do_not_mix_them_up(self, program):
        both = [program.start(CALL.format(dtype=dtype)) for dtype in ("f8", "i8")]
        assert [process.communicate(timeout=LONGEST)[0] for process in both] == ["14.0\n", "14\n"]
        code = CALL.format(dtype="f8") + "print(squares(np.arange(4)))\n" + HITS
        assert program(code) == ["14.0", "14", "2"]
        # A shared index is what they could have overwritten for each other.
        assert len(list(program.cache.rglob("*squares*.nbi"))) == 2

    def test_each_form_of_a_loop_has_a_name_of_its_own(self):
        def around(x):
            return part(x)  # noqa: F821

        parts = [jit.helper(lambda x: 2 * x), jit.helper(lambda x: 3 * x)]
        forms = [jit.driver(around, part=one).compiled() for one in parts]
        assert len({form.py_func.__qualname__ for form in forms}) == 2
        assert [form(5) for form in forms] == [10, 15]

    @pytest.mark.nightly
    def test_forms_of_a_loop_that_processes_compile_at_once_are_not_mixed_up(self, program):
        # Each process numbers what it compiles: here the loop "both" has one number in two forms.
        other, code = program.cache.with_name("other"), FORMS
        program(code.format(calls="casts()"))
        program(code.format(calls="summed('bfloat16')"))
        program(code.format(calls="summed('float16')"), NUMBA_CACHE_DIR=str(other))
        for path in other.rglob("rows.*"):
            (place,) = {found.parent for found in program.cache.rglob("rows.*")}
            shutil.copy(path, place / path.name)
        for calls in ("summed('float16'); summed('bfloat16')", "summed('bfloat16'); summed('f2')"):
            assert program(code.format(calls=calls)) == ["True", "True"]

    @pytest.mark.nightly
    def test_a_cache_that_cannot_be_written_does_not_matter(self, program):
        code = """
import errno
from kernels_here import *
from numba.core import caching
def full(self, path):
    raise OSError(errno.ENOSPC, "no space left on device")
caching.IndexDataCacheFile._open_for_write = full
"""
        assert program(code + CALL.format(dtype="f8") + HITS) == ["14.0", "0"]
        assert not list(program.cache.rglob("*.nb?"))


FORMS = """
import ml_dtypes
from mpistrat.kernels import rows as row_loops

def casts():
    values, bits = np.ones(8, "f4"), np.zeros(8, "u2")
    row_loops.to_bfloat16(values, np.float32(1), bits)
    row_loops.from_bfloat16(bits, values)

def summed(name):
    rows = np.random.default_rng(0).standard_normal((2, 4096)).astype("f4").astype(name)
    want = (rows[0].astype("f4") + rows[1].astype("f4")).astype(name)
    row_loops.reduce_narrow(np.add, rows, 0, 4096, scales=None, divisor=1.0, uses_loop=True)
    print((rows[0] == want).all())

{calls}
"""


NO_PLACE = """
import numba.core.caching as caching, tempfile
# As in an installation that cannot be written, of a user without a writable home.
[given] = (one for name, one in vars(caching).items() if name.endswith("UserProvidedCacheLocator"))
caching.CacheImpl._locator_classes = [given]
"""


class TestNode:
    """Code that is kept on the node, and compiled once there."""

    def test_a_read_only_installation_keeps_code_on_the_node(self, program, tmp_path):
        env = {"NUMBA_CACHE_DIR": "", "TMPDIR": str(tmp_path)}
        code = NO_PLACE + CALL.format(dtype="f8") + HITS
        assert program(code, **env) == ["14.0", "0"]
        assert program(code, **env) == ["14.0", "1"]
        (room,) = tmp_path.glob("mpistrat-*")
        assert room.stat().st_mode & 0o777 == 0o700
        assert list(room.rglob("*squares*.nbc"))
        assert not list(room.glob("squares*"))  # the locks of those who compiled

    @pytest.mark.parametrize("mode", [0o777, 0o750])
    def test_a_directory_that_others_can_use_is_not_used(self, mode, tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        room = jit.node_directory()
        assert room.parent == tmp_path
        room.chmod(mode)
        assert jit.node_directory() is None

    def test_a_link_is_not_followed(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (tmp_path / f"mpistrat-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
        assert jit.node_directory() is None

    @pytest.mark.nightly
    def test_code_beside_a_source_that_cannot_be_written_is_found(self, program, tmp_path):
        program(CALL.format(dtype="f8"), NUMBA_CACHE_DIR="")  # as `mpistrat warm` does
        env = {"NUMBA_CACHE_DIR": "", "TMPDIR": str(tmp_path / "cache")}
        assert program(NO_PLACE + CALL.format(dtype="f8") + HITS, **env) == ["14.0", "1"]

    def test_one_process_of_a_node_compiles_and_the_others_load(self, program, tmp_path):
        patient = "from mpistrat.kernels import jit\njit._MAX_WAIT_SECONDS = 200.0\n"
        code = patient + CALL.format(dtype="f8")
        code += "print(squares.compiled().stats.cache_misses.total())"
        ranks = [program.start(code, TMPDIR=str(tmp_path)) for _ in range(3)]
        said = [rank.communicate(timeout=LONGEST)[0].split() for rank in ranks]
        assert sorted(said) == [["14.0", "0"], ["14.0", "0"], ["14.0", "1"]]

    def test_who_waits_too_long_compiles(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(jit, "_MAX_WAIT_SECONDS", 0.05)
        with (jit.node_directory() / "kernel").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            assert not jit._acquire("kernel")
        assert jit._acquire("kernel")
        assert not jit._acquire("kernel")  # of this process itself, which must not wait for it
        jit._release("kernel")
        assert not jit._held_locks


DRIVER = """
import numpy as np
from mpistrat.kernels import jit
from group_here import double, triple

def loop(values):
    total = 0.0
    for low in range(0, values.size, 2):
        total += part(values[low : low + 2])
    return total

doubles = jit.driver(loop, part=double)
triples = jit.driver(loop, part=triple)
"""

PARTS = """
from mpistrat.kernels import jit

@jit.helper
def times(x, y):
    return x * y

def double_twin(values):
    return 2 * values.sum() + 1000   # recognisable, so wrong on purpose

@jit.kernel(double_twin)
def double(values):
    return times(values.sum(), 2.0)

@jit.kernel(lambda values: 3 * values.sum() + 1000)
def triple(values):
    return times(values.sum(), 3.0)
"""


class TestDriver:
    """A loop that runs with different kernels in it."""

    CALL = "from drivers_here import *\nprint(doubles(np.ones(3)), triples(np.ones(3)))\n"
    HITS = "print(sum(sum(k.compiled().stats.cache_hits.values()) for k in (doubles, triples)))\n"

    @pytest.fixture
    def files(self, program):
        (program.cache.parent / "drivers_here.py").write_text(DRIVER)
        (program.cache.parent / "group_here.py").write_text(PARTS)
        return program

    @pytest.mark.nightly
    def test_each_runs_with_its_own_and_is_kept_apart_in_the_cache(self, files):
        assert files(self.CALL + self.HITS) == ["6.0", "9.0", "0"]
        assert files(self.CALL + self.HITS) == ["6.0", "9.0", "2"]

    def test_its_twin_is_itself_around_twins(self, files):
        call = "print(doubles.reference(np.ones(3)), 'numba' in sys.modules)"
        assert files(f"from drivers_here import *\n{call}") == ["2006.0", "False"]
        assert files(self.CALL, MPISTRAT_NUMBA="0") == ["2006.0", "2009.0"]

    @pytest.mark.nightly
    def test_an_edit_of_a_helper_in_another_file_is_seen(self, files):
        assert files(self.CALL + self.HITS) == ["6.0", "9.0", "0"]
        edited = PARTS.replace("return x * y", "return x * y + 0.5")
        (files.cache.parent / "group_here.py").write_text(edited)
        assert files(self.CALL + self.HITS) == ["7.0", "10.0", "0"]


def _ten_times(x):
    return 10 * x


def _one_more(x):
    return _part(x) + 1  # noqa: F821  # what `driver` is given


def test_a_twin_that_two_threads_want_at_once_is_made_once(monkeypatch):
    made = jit.driver(_one_more, _part=jit.helper(_ten_times))
    found, renamed = [], jit._copy_with_globals
    other = threading.Thread(target=lambda: found.append(made.reference(4)))

    def slow(*given):
        other.start()
        other.join(0.05)  # as long as it is not made, the other one waits
        return renamed(*given)

    monkeypatch.setattr(jit, "_copy_with_globals", slow)
    assert made.reference(4) == 41
    other.join()
    assert found == [41]
