"""The pictures in DESIGN.md are up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PICTURE = Path(__file__).parent / "tools" / "house_picture.py"


def test_the_pictures_are_current():
    """Renew it with ``python tests/tools/house_picture.py``."""
    call = [sys.executable, str(PICTURE), "--check"]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "python tests/tools/house_picture.py makes it again"
