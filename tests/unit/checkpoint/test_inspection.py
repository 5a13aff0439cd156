"""``mpistrat checkpoint``: what it tells, and with what exit code."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint import inspection, sharded
from mpistrat.launch import cli
from mpistrat.testing import run_ranks


@pytest.fixture(params=["files", "directories"])
def there(request, tmp_path, monkeypatch):
    """Two checkpoints, of one kind or the other."""
    monkeypatch.setattr(
        sharded, "MIN_DIRECTORY_NBYTES", 1 << (10 if request.param == "directories" else 26)
    )
    v, twin = (ms.Variable(np.arange(300.0)) for _ in range(2))
    half = ms.Variable(np.arange(5.0).astype(ml_dtypes.bfloat16))
    checkpoint = ms.Checkpoint(v=v, twin=twin, half=half, step=ms.Variable(4))
    checkpoint.save(tmp_path / "ckpt")
    v.assign_add(np.arange(300.0) % 2)
    checkpoint.step.assign(5)
    checkpoint.save(tmp_path / "ckpt")
    return tmp_path


def told(capsys, *words):
    code = cli.main(["checkpoint", *map(str, words)])
    return code, capsys.readouterr()


def newest(there):
    return next(path for path in there.iterdir() if path.name.startswith("ckpt-2"))


def damage(path):
    file = path / "data-0.bin" if path.is_dir() else path
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)


def test_list_and_verify(there, capsys):
    code, said = told(capsys, "list", there)
    assert (code, said.out.count("  ok\n")) == (0, 2)
    assert told(capsys, "verify", there)[0] == 0
    damage(newest(there))
    code, said = told(capsys, "verify", there)
    assert code == 1
    assert "is damaged" in said.out.splitlines()[1]
    assert told(capsys, "verify", there / "ckpt-1")[0] == 0
    newest(there).rename(there / newest(there).name.replace("2", "7"))
    assert told(capsys, "verify", there)[0] == 1


def test_a_number_that_is_not_the_one_inside_is_told(there, capsys):
    path = newest(there)
    path.rename(path.with_name(path.name.replace("2", "7")))
    for act in ("list", "verify"):
        assert "it holds checkpoint number 2, not 7" in told(capsys, act, there)[1].out


def test_a_file_that_has_gone_does_not_hide_the_others(there, capsys):
    (there / "ckpt-9.npz").symlink_to(there / "gone")
    code, said = told(capsys, "list", there)
    assert (code, said.out.count("  ok\n")) == (0, 2)
    assert "No such file" in said.out.splitlines()[2]


def test_show_and_diff(there, capsys):
    code, said = told(capsys, "show", there)
    assert code == 0
    assert said.out.splitlines()[1:] == [
        "  half bfloat16[5]",
        "  step int64[] = 5",
        "  twin float64[300]",
        "  v float64[300]",
    ]
    code, said = told(capsys, "diff", there / "ckpt-1", there)
    assert code == 1
    assert said.out.splitlines() == [
        "! step differs in 1 of 1 numbers",
        "! v differs in 150 of 300 numbers, by up to 0.0033 of the largest",
    ]
    assert told(capsys, "diff", there, there)[0] == 0


def test_numbers_and_texts_are_shown_and_compared(tmp_path, capsys):
    checkpoint = ms.Checkpoint(name="x", rate=(0.5, None), rng=np.random.default_rng(0), step=3)
    checkpoint.save(tmp_path / "ckpt")
    checkpoint.rate, _ = (0.25, None), checkpoint.rng.random()
    checkpoint.save(tmp_path / "ckpt")
    said = told(capsys, "show", tmp_path)[1].out.splitlines()
    assert said[0].endswith("save number 2, 0 arrays")
    said_too = told(capsys, "export", tmp_path, tmp_path / "out.npz")[1].out
    assert said_too.endswith("out.npz: 0 arrays and values.json\n")
    assert said[1:3] == ["  name = 'x'", "  rate = (0.25, None)"]
    assert said[3].startswith("  rng = generator with state ")
    assert said[4:] == ["  step = 3"]
    code, said = told(capsys, "diff", tmp_path / "ckpt-1", tmp_path)
    assert code == 1
    rate, rng = said.out.splitlines()
    assert rate == "! rate is (0.5, None) in the first and (0.25, None) in the second"
    assert rng.startswith("! rng is generator with state ")


def test_what_is_not_finite_is_told(tmp_path, capsys):
    v = ms.Variable(np.array([1.0, np.nan, np.inf]))
    half = ms.Variable(np.array([np.nan, 1.0]).astype(ml_dtypes.bfloat16))
    ms.Checkpoint(v=v, half=half).save(tmp_path / "ckpt")
    said = told(capsys, "show", tmp_path)[1].out
    assert "v float64[3]: 2 of 3 are not finite" in said
    assert "half bfloat16[2]: 1 of 2 are not finite" in said


def test_export(there, capsys, monkeypatch):
    code, _ = told(capsys, "export", there / "ckpt-1", there / "out.npz")
    assert code == 0
    with np.load(there / "out.npz") as found:
        np.testing.assert_array_equal(found["v"], np.arange(300.0))
    assert told(capsys, "export", there / "ckpt-1", there / "out.npz") == (
        2,
        ("", f"mpistrat checkpoint export: error: [Errno 17] File exists: '{there / 'out.npz'}'\n"),
    )
    assert told(capsys, "export", there, there / "out.txt")[0] == 2
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    code, said = told(capsys, "export", there, there / "out.safetensors")
    assert code == 2
    assert "pip install 'mpistrat[export]'" in said.err
    assert not (there / "out.safetensors").exists()


def test_a_full_disk_is_told_with_the_file(there, capsys, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = sorted(there.iterdir())
    code, said = told(capsys, "export", there / "ckpt-1", there / "full.npz")
    assert (code, sorted(there.iterdir())) == (2, before)
    assert f"No space left on device: '{there / 'full.npz'}'" in said.err


def test_export_to_safetensors(there, capsys):
    library = pytest.importorskip("safetensors")
    code, said = told(capsys, "export", there / "ckpt-1", there / "out.safetensors")
    assert code == 0
    assert "out.safetensors: 4 arrays" in said.out
    with library.safe_open(there / "out.safetensors", "np") as found:
        assert sorted(found.keys()) == ["half", "step", "twin", "v"]
        assert found.metadata() == {"save_counter": "1"}
        assert found.get_tensor("half").dtype == ml_dtypes.bfloat16
        for name in ("v", "twin"):  # equal by chance, and both there
            np.testing.assert_array_equal(found.get_tensor(name), np.arange(300.0))


def test_what_is_not_there_is_told(tmp_path, capsys):
    assert told(capsys, "list", tmp_path)[0] == 0
    for act in ("show", "verify"):
        code, said = told(capsys, act, tmp_path / "none")
        assert code == 2
        assert f"there is no checkpoint {tmp_path}/none.npz or {tmp_path}/none.arrays" in said.err
        code, said = told(capsys, act, tmp_path / "none.npz")
        assert code == 2
        assert f"there is no checkpoint {tmp_path}/none.npz or" in said.err
        code, said = told(capsys, act, tmp_path)
        assert code == 2
        assert f"there is no checkpoint in {tmp_path}." in said.err
        code, said = told(capsys, act, __file__)
        assert code == 2
        assert f"{__file__} is not a checkpoint: its name does not end with" in said.err


def test_mpi_is_not_started(tmp_path):
    program = (
        "import sys; from mpistrat.launch import cli; code = cli.main(sys.argv[1:]); "
        "sys.exit(code + 10 * ('mpi4py.MPI' in sys.modules))"
    )
    words = [sys.executable, "-c", program, "checkpoint", "list", str(tmp_path)]
    assert subprocess.run(words).returncode == 0


def test_parts_of_metrics_are_compared_at_equal_numbers_of_replicas(tmp_path, capsys):
    def save(comm, shift):
        strategy = ms.MirroredStrategy()
        with strategy.scope():
            loss = ms.metrics.Mean("loss")
        rows = [4.0, 0.0, 0.0, 0.0]
        mine = rows[comm.rank :: comm.size] if not shift else [2.0, 0.0]
        strategy.run(lambda: loss.update_state(mine))
        return ms.Checkpoint(loss=loss).save(tmp_path / "x")

    one, two, other = (run_ranks(save, n, shift)[0] for n, shift in [(2, 0), (1, 0), (2, 1)])
    assert told(capsys, "diff", one, two)[0] == 0
    assert told(capsys, "diff", two, one)[0] == 0
    code, said = told(capsys, "diff", one, other)
    assert code == 1
    assert "loss/total/parts differs in 2 of 2 numbers" in said.out


def test_names_are_shown_as_the_program_has_them(tmp_path):
    keys = {"größe": ms.Variable(1.0), "a:b": 3, "dense/kernel": 4, "\x1b[2J": 5, "ab%2Fc": 6}
    path = ms.Checkpoint(m=keys).save(tmp_path / "c")
    text = "\n".join(inspection.show_checkpoint(path)[0])
    assert "m/größe float64[]" in text
    assert "m/a:b = 3" in text
    assert "m/dense%2Fkernel = 4" in text  # "/" would be a step to another tree
    assert "m/%1B%5B2J = 5" in text
    assert "m/ab%252Fc = 6" in text
    assert "\x1b" not in text
    other = ms.Checkpoint(m=keys | {"größe": ms.Variable(2.0)}).save(tmp_path / "d")
    assert any("m/größe differs" in line for line in inspection.diff_checkpoints(path, other)[0])
