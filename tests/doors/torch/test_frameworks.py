"""Lightning, Accelerate and transformers over the backend: the numbers are those of gloo."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from frameworks import PROGRAMS, VARIABLES, find_missing_packages, read_results, write_program

import mpistrat
from mpistrat.config import launched_by
from mpistrat.launch.mpi_libraries import find_launcher
from mpistrat.launch.process import run_job

LONGEST = 400
HERE = Path(mpistrat.__file__).parents[1]  # so that the ranks import what is tested

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(3 * LONGEST + 30),
    pytest.mark.skipif(launched_by() is not None, reason="this process is itself a rank of a job"),
]


@pytest.fixture(params=list(PROGRAMS))
def name(request):
    """A program whose packages are installed."""
    missing = find_missing_packages([request.param])
    if missing:
        pytest.skip(f"not installed: {' '.join(missing)}")
    return request.param


def run(program, launcher="mpiexec"):
    """Run a program on 2 ranks in its folder; return what it prints."""
    command = find_launcher()[0].build_command(2, [sys.executable, str(program)])
    if launcher == "mpistrat run":
        words = [sys.executable, "-m", "mpistrat", "run", "-n", "2", str(program)]
        command = command._replace(argv=words)
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    command = command._replace(env={**command.env, **VARIABLES, "PYTHONPATH": path})
    printed = program.parent / "printed"
    with printed.open("wb") as output:
        outcome = run_job(command, LONGEST, output, cwd=program.parent)
    text = printed.read_text(errors="replace")
    assert outcome.code == 0, text
    return text


def test_the_numbers_are_those_of_gloo(name, tmp_path):
    wanted = read_results(run(write_program(tmp_path / "gloo", name, "gloo")))
    assert wanted[0] == "backend: gloo" and len(wanted) > 2
    for launcher in ("mpiexec", "mpistrat run"):
        results = read_results(run(write_program(tmp_path / launcher, name), launcher))
        assert results == ["backend: mpistrat", *wanted[1:]], launcher


@pytest.mark.parametrize("name", ["train_accelerate.py", "train_transformers.py"], indirect=True)
def test_a_second_start_continues_in_mid_run(name, tmp_path):
    program = write_program(tmp_path / "job", name)
    whole = " ".join(read_results(run(program))).split()
    for checkpoint in (tmp_path / "job" / "saved").glob("checkpoint-*"):
        if checkpoint.name != "checkpoint-5":
            shutil.rmtree(checkpoint)
    continued = " ".join(read_results(run(program))).split()
    assert continued[-5:] == whole[-5:]  # the last losses, and a sum of predictions


def test_lightning_makes_the_group_by_itself(tmp_path):
    """Without mt.init_process_group(), at the address and port of Lightning."""
    if find_missing_packages(["train_lightning.py"]):
        pytest.skip("lightning is not installed")
    program = write_program(tmp_path / "first", "train_lightning.py")
    wanted = read_results(run(program))
    text = program.read_text().replace("mt.init_process_group(backend='mpistrat')\n", "")
    text = re.sub(r"^if dist.get_rank.*\n", "", text, flags=re.MULTILINE)
    text = text.replace("dist.get_world_size()", "2")
    text += '    print("backend:", dist.get_backend())\n'
    other = tmp_path / "second" / "program.py"
    other.parent.mkdir()
    other.write_text(text)
    *results, backend = read_results(run(other))
    assert [backend, *results] == wanted
    assert 3 < int(re.search(r"resume: (\d+)", results[-1])[1]) < 20  # it has stopped early


REFUSALS = {
    "train_accelerate.py": (
        "from accelerate import Accelerator, InitProcessGroupKwargs\n"
        "Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend='mpistrat')])\n"
    ),
    "train_transformers.py": (
        "from transformers import TrainingArguments\n"
        "TrainingArguments('saved', use_cpu=True, ddp_backend='mpistrat').device\n"
    ),
}


@pytest.mark.parametrize("name", list(REFUSALS), indirect=True)
def test_the_name_of_the_backend_is_refused_as_the_page_says(name, tmp_path):
    body = REFUSALS[name].split("\n")
    body = [body[0], "try:", f"    {body[1]}", "except ValueError as error:", "    print(error)"]
    program = tmp_path / "program.py"
    init = "import mpistrat.torch as mt\nmt.init_process_group()\n"
    program.write_text(init + "\n".join(body))
    assert "assigned backend mpistrat is not available, please use gloo" in run(program)
