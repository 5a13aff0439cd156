"""The programs of docs/frameworks.md, and the lines that they print."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "programs"
# Each program, and the package that it needs beside PyTorch.
PROGRAMS = {
    "train_lightning.py": "lightning",
    "train_fabric.py": "lightning",
    "train_accelerate.py": "accelerate",
    "train_transformers.py": "transformers",
}
# Nothing is fetched; Slurm and launchers give each rank a core or two.
VARIABLES = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
_INIT = "mt.init_process_group()\n"
_LINE = re.compile(
    r"^(?:backend|fit|validate|test|predict|resume|loss|weights|gather|evaluate): .*"
)


def find_missing_packages(names=PROGRAMS):
    """Return the packages that programs need and that are not installed."""
    packages = {"torch", *(PROGRAMS[name] for name in names)}
    return sorted(name for name in packages if importlib.util.find_spec(name) is None)


def write_program(folder, name, backend="mpistrat"):
    """Write a program into an empty folder, with another backend perhaps; return its path.

    Rank 0 says which backend its group has.
    """
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text.count(_INIT) == 1
    changed_init = f"mt.init_process_group(backend={backend!r})\nimport torch.distributed as dist\n"
    changed_init += 'if dist.get_rank() == 0: print("backend:", dist.get_backend())\n'
    folder.mkdir(parents=True)
    path = folder / name
    path.write_text(text.replace(_INIT, changed_init))
    return path


def read_results(text):
    """Return the lines with results that rank 0 has printed, in their order."""
    return [line for line in text.splitlines() if _LINE.match(line)]
