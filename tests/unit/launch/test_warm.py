"""`mpistrat warm`: what it makes, and that programs find it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from mpistrat import bytecode
from mpistrat.launch import warm
from mpistrat.launch.cli import main

# A step of two ranks as threads.
STEP = """
import numpy as np, mpistrat as ms
from mpistrat.testing import run_ranks

def program(comm):
    strategy = ms.MirroredStrategy()
    with strategy.scope():
        w = ms.Variable(np.zeros(2**18, np.float32), name="w")
    g = np.ones(2**18, np.float32)
    strategy.run(ms.optim.Adam(0.1).apply_gradients, args=([(g, w)],))
    strategy.run(lambda: ms.get_replica_context().all_reduce("mean", g))

run_ranks(program, 2, timeout=250)
"""


def run(*call, **env):
    got = subprocess.run(
        [sys.executable, *call],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert got.returncode == 0, got.stderr
    return got.stdout


class TestWarm:
    def test_both_parts_are_made_and_told(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(bytecode, "file_of", lambda package: str(tmp_path / "all.bundle"))
        monkeypatch.setattr(warm, "compiling", lambda: True)
        monkeypatch.setattr(warm, "_take_steps", lambda comm: None)
        assert main(["warm"]) == 0
        modules, kernels = capsys.readouterr().out.splitlines()
        assert re.match(rf"modules: all in {tmp_path}/all.bundle \(\d\.\d MiB\)", modules)
        assert re.match(r"kernels: compiled, or found, in \d+\.\d s", kernels)

    def test_an_installation_that_cannot_be_written_is_told(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(bytecode, "bundle_path", lambda package: "/dev/null/all.bundle")
        monkeypatch.setattr(warm, "is_compiling", lambda: False)
        assert main(["warm"]) == 0
        said = capsys.readouterr().out
        assert "cannot be written" in said
        assert "Numba is disabled" in said

    @pytest.mark.nightly
    @pytest.mark.timeout(900)
    @pytest.mark.skipif(not warm.is_compiling(), reason="without Numba nothing is compiled")
    def test_a_program_compiles_nothing_afterwards(self, tmp_path):
        def made(place, program):
            run("-c", program, NUMBA_CACHE_DIR=str(place))
            return {path.name for path in place.rglob("*.nbc")}

        warmed = made(tmp_path, "from mpistrat.launch import warm; warm.compile_kernels()")
        assert {"adam", "blocks", "loops", "passes"} <= {name.split(".")[0] for name in warmed}
        assert made(tmp_path, STEP) == warmed
