"""What the pages say is so: their examples run, their tables agree with the library."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.compat import tf
from mpistrat.config import PREFIX, Options
from mpistrat.launch.process import TIMED_OUT
from mpistrat.launch.run import UNRECORDED
from mpistrat.lockstep.ending import PREFLIGHT, get_exit_code
from mpistrat.lockstep.shutdown import MISMATCH
from mpistrat.testing import RanksFailed, run_ranks
from mpistrat.watchdog.observer import HUNG
from mpistrat.watchdog.watchdog import ORPHANED

DOCS = Path(__file__).parents[2] / "docs"
SIZES = {
    "checkpoints": (1, 2),
    "start": (1,),
    "train": (1, 2),
    "concepts": (1, 2, 3),
    "random": (1, 2),
    "solvers": (1, 2, 3),
    "sharp-edges": (2,),
    "coming-from": (1, 2),
    "from-pytorch": (1, 2),
    "from-jax": (1, 2),
    "profiling": (1,),  # PyTorch has one profiler in a process
}
OPTIONAL = (
    "h5py",
    "jax.numpy",
    "ml_dtypes",
    "pyarrow",
    "scipy",
    "torch",
    "zarr",
)  # a block may need these


def page(name):
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def blocks():
    for name, sizes in SIZES.items():
        text = page(name)
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, found.start()) + 2
            # So that a traceback shows the line of the page.
            code = compile("\n" * (line - 1) + found[1], str(DOCS / f"{name}.md"), "exec")
            for size in sizes:
                yield pytest.param(code, size, id=f"{name}:{line}-{size}")


@pytest.mark.parametrize(("code", "size"), list(blocks()))
def test_examples_run(code, size):
    for name in OPTIONAL:
        if name in code.co_names and importlib.util.find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"{name} is not installed: this example of the page did not run")
    run_ranks(lambda comm: exec(code, {"np": np, "ms": ms}), size)


@pytest.mark.parametrize("name", SIZES)
def test_a_page_says_what_its_examples_leave_out(name):
    text = page(name)
    for found in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for short, module in (("np", "numpy"), ("ms", "mpistrat")):
            line = f"import {module} as {short}"
            if f"{short}." in found[1] and line not in found[1]:
                assert f"`{line}`" in text


def test_examples_that_fail_are_seen():
    code = compile("assert ms.MirroredStrategy().num_replicas_in_sync == 3", "page", "exec")
    with pytest.raises(RanksFailed):
        run_ranks(lambda comm: exec(code, {"np": np, "ms": ms}), 2)


def test_every_page_has_its_sizes():
    with_examples = {path.stem for path in DOCS.glob("*.md") if "```python" in path.read_text()}
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
