"""`mpistrat --print-completion`: what a shell completes with the script."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from mpistrat.launch import cli
from mpistrat.launch.completion import SHELLS

# Calls the function that bash calls when Tab is pressed behind these words.
PRESS_TAB = """
source mpistrat.bash
[[ $(complete -p mpistrat) =~ -F\\ ([^ ]+) ]]
COMP_LINE="$1"; COMP_POINT=${#1}; read -ra COMP_WORDS <<< "$1"
[[ "$1" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
${BASH_REMATCH[1]}
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def press_tab(tmp_path, capsys):
    """Return a function: the words by which bash completes a line, in a directory with files."""
    pytest.importorskip("shtab", reason="wants shtab")
    bash = shutil.which("bash") or pytest.skip("wants bash")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--print-completion", "bash"])
    (tmp_path / "mpistrat.bash").write_text(capsys.readouterr().out)
    for name in ("train.py", "other.py", "tuned/__init__.py", "tuned/model.py", "runs/job.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def complete(line):
        words = [bash, "--norc", "-c", PRESS_TAB, "bash", line]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert not done.stderr
        return set(done.stdout.split())

    return complete


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mpistrat r", {"run", "requeue"}),
        ("mpistrat run --prof", {"--profile", "--profile-dir"}),
        ("mpistrat run --bind ", {"none", "core", "socket", "numa"}),
        ("mpistrat run -n 2 t", {"train.py", "tuned"}),
        ("mpistrat run --profile t", {"train.py", "tuned"}),
        ("mpistrat run train.py r", {"runs"}),
        ("mpistrat run -n 2 -m t", {"train", "tuned", "tuned.model"}),
        ("mpistrat run --output-dir r", {"runs"}),
        ("mpistrat run --profile-dir t", {"tuned"}),
        ("mpistrat batch --nodes 2 -- o", {"other.py"}),
        ("mpistrat checkpoint v", {"verify"}),
        ("mpistrat checkpoint list r", {"runs"}),
        ("mpistrat profile r", {"runs"}),
        ("mpistrat --print-completion ", set(SHELLS)),
    ],
)
def test_bash_completes(line, words, press_tab):
    assert press_tab(line) == words


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script(shell, tmp_path, capsys):
    pytest.importorskip("shtab", reason="wants shtab")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--print-completion", shell])
    script = capsys.readouterr().out
    assert all(name in script for name in cli.COMMANDS)
    (tmp_path / "script").write_text(script)
    if shutil.which(shell) is None:
        pytest.skip(f"wants {shell} to check the syntax")
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


def test_without_shtab_the_error_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--print-completion", "bash"])
    error = capsys.readouterr().err
    assert "--print-completion needs shtab: pip install 'mpistrat[completion]'" in error
