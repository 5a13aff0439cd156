"""What the pages say is so: their examples run, their tables agree with the library."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import venv
from pathlib import Path

import pytest
from page_programs import DOCS, Program, read_programs, read_requirements, run_program
from page_programs import read_page as page

import mpistrat as ms
from mpistrat.compat import tf
from mpistrat.config import PREFIX, Options
from mpistrat.launch.process import TIMED_OUT
from mpistrat.launch.run import UNRECORDED
from mpistrat.lockstep.ending import PREFLIGHT, get_exit_code
from mpistrat.lockstep.shutdown import MISMATCH
from mpistrat.testing import RanksFailed
from mpistrat.watchdog.observer import HUNG
from mpistrat.watchdog.watchdog import ORPHANED

SETUP = (DOCS.parent / "setup.py").read_text(encoding="utf-8")
SIZES = {
    "checkpoints": (1, 2),
    "start": (1,),
    "train": (1, 2),
    "concepts": (1, 2, 3),
    "random": (1, 2),
    "own-kernels": (1, 2),
    "notebooks": (1,),
    "solvers": (1, 2, 3),
    "sharp-edges": (2,),
    "coming-from": (1, 2),
    "from-pytorch": (1, 2),
    "from-jax": (1, 2),
    "profiling": (1,),  # PyTorch has one profiler in a process
}
OPTIONAL = (
    "h5py",
    "jax",
    "ml_dtypes",
    "optax",
    "pyarrow",
    "scipy",
    "sklearn",
    "torch",
    "zarr",
)  # an example may need these


def requirements():
    """The pages with examples, by the command that installs what they need."""
    names_by_command = {}
    for name in SIZES:
        names_by_command.setdefault(tuple(read_requirements(name)), []).append(name)
    return names_by_command


def blocks():
    for name, sizes in SIZES.items():
        for program in read_programs(name):
            for size in (1,) if program.is_file else sizes:
                yield pytest.param(program, size, id=f"{name}:{program.line}-{size}")


@pytest.mark.parametrize(("program", "size"), list(blocks()))
def test_examples_run_and_print_what_the_page_shows(program, size):
    for module in OPTIONAL:
        imports = rf"^ *(import|from) {re.escape(module)}\b"
        if re.search(imports, program.source, re.MULTILINE):
            pytest.importorskip(
                module, reason=f"{module} is not installed: this example did not run"
            )
    run_program(program, size)


@pytest.mark.parametrize("name", SIZES)
def test_a_page_says_what_its_examples_leave_out(name):
    text = page(name)
    for program in read_programs(name):
        for short, module in (("np", "numpy"), ("ms", "mpistrat")):
            line = f"import {module} as {short}"
            if f"{short}." in program.source and line not in program.source:
                assert f"`{line}`" in text


@pytest.mark.parametrize("name", SIZES)
def test_a_page_says_at_its_top_what_its_examples_need(name):
    pip, install, checkout, *packages = read_requirements(name)
    assert (pip, install) == ("pip", "install")
    [extras] = re.findall(r"^\.\[(.+)\]$", checkout)
    assert set(extras.split(",")) <= set(re.findall(r'^        "(\w+)": ', SETUP, re.MULTILINE))
    assert packages == sorted(packages)


def test_output_that_differs_is_seen():
    shown = "w = [1.0], 7 steps/s\n"
    code = compile("ms.MirroredStrategy().print('w = [1.0], 9 steps/s')", "page", "exec")
    program = Program("page", 1, "", code, shown)
    with pytest.raises(AssertionError, match="9 steps/s"):
        run_program(program, 2)
    run_program(program._replace(shown_output=shown.replace("7", "...")), 2)
    with pytest.raises(AssertionError):
        run_program(program._replace(shown_output=""), 1)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("command", "names"), requirements().items(), ids=lambda value: " ".join(value)
)
def test_examples_run_where_only_what_they_need_is_installed(command, names, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    checkout, python = tmp_path / "checkout", tmp_path / "venv" / "bin" / "python"
    shutil.copytree(DOCS.parent, checkout, ignore=shutil.ignore_patterns(".*", "build", "dist"))
    venv.create(tmp_path / "venv", with_pip=True)
    for words in (
        ["-m", *command],
        ["tests/tools/page_programs.py", *names],
    ):
        done = subprocess.run([python, *words], cwd=checkout, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert all(f"docs/{name}.md:" in done.stdout for name in names)


def test_examples_that_fail_are_seen():
    code = compile("assert ms.MirroredStrategy().num_replicas_in_sync == 3", "page", "exec")
    with pytest.raises(RanksFailed):
        run_program(Program("page", 1, "", code, ""), 2)


def test_every_page_has_its_sizes():
    with_examples = {path.stem for path in DOCS.glob("*.md") if any(read_programs(path.stem))}
    assert with_examples == set(SIZES)


def table(text, first):
    """The rows of the table whose first column has this name, without back quotes."""
    lines = iter(text.splitlines())
    assert any(line.startswith(f"| {first} |") for line in lines)
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def test_all_optimizers_schedules_losses_and_metrics_are_listed():
    rows = table(page("train"), "module")
    listed = {name for _, names in rows for name in re.findall(r"\w+", names)}
    bases = {"Optimizer", "OPTIMIZERS", "Schedule", "Loss", "Metric"}
    public = {*ms.optim.__all__, *ms.losses.__all__, *ms.metrics.__all__}
    assert public - listed == bases


def test_all_of_compat_tf_is_listed():
    text = page("coming-from")
    listed = text[text.index("### Names of the tf module") : text.index("## Horovod")]
    assert [name for name in tf.__all__ if not re.search(rf"`{name}\b", listed)] == []


def test_the_error_of_data_that_end_before_the_steps_do():
    rows = {row[0]: row[1] for row in table(page("coming-from"), "TPUStrategy there")}
    named, base = re.findall(
        r"`?(\w+Error|StopIteration)`", rows["data that end before the steps do"]
    )
    strategy = ms.OneDeviceStrategy("cpu")
    with pytest.raises(IndexError) as caught:
        strategy.extended.experimental_run_steps_on_iterator(lambda *_: None, iter([1]), 2)
    assert [type(caught.value).__name__, IndexError.__name__] == [named, base]


def test_environment_variables():
    shown = {row[0]: row[1] for row in table(page("settings"), "variable")}
    defaults = {}
    for field in dataclasses.fields(Options):
        value = int(field.default) if isinstance(field.default, bool) else field.default
        text = f"{value:g}" if isinstance(value, float) else str(value)
        defaults[f"{PREFIX}{field.name.upper()}"] = text
    assert shown == defaults


def test_exit_codes():
    shown = {int(row[0]): row[1] for row in table(page("settings"), "exit code")}
    interrupted = get_exit_code(KeyboardInterrupt())
    known = {0, 1, UNRECORDED, HUNG, ORPHANED, MISMATCH, PREFLIGHT, TIMED_OUT, interrupted}
    assert set(shown) == known
    for code, word in [
        (MISMATCH, "different calls"),
        (PREFLIGHT, "versions"),
        (HUNG, "without success"),
        (ORPHANED, "launcher"),
        (TIMED_OUT, "--timeout"),
        (interrupted, "Ctrl-C"),
    ]:
        assert word in shown[code]


def test_the_faq_quotes_what_is_said():
    """Our own error texts in the titles of the FAQ, except for the numbers and names in them."""
    text = page("faq")
    ours = (
        "launcher and library belong to different MPIs",
        "has no working MPI library",
        "this process already is one rank of a job",
        "how many ranks? Outside of an allocation only -n N can tell",
        "the launcher reports success, but not every rank has left the program in order",
        "ranks were started, but MPI says that this job has",
    )
    source = "".join(
        re.sub(r'"\n\s*f?"', "", path.read_text())
        for room in ("launch", "lockstep")
        for path in (Path(ms.__file__).parent / room).glob("*.py")
    )
    for words in ours:
        assert words in text
        assert words in source, words
