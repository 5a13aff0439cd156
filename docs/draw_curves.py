"""Draws README's picture: ``python docs/draw_curves.py`` runs its main job, and writes digits.png.

The picture is the one that the job draws, with fewer colors, so that the repository stays small.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image  # comes with matplotlib

PICTURE = Path(__file__).with_name("digits.png")
COLORS = 64
JOB = [sys.executable, "-m", "mpistrat", "run", "-n", "2", "-m", "mpistrat.examples.digits"]

with tempfile.TemporaryDirectory() as directory:
    drawn_picture = Path(directory, PICTURE.name)
    subprocess.run([*JOB, "--output", str(drawn_picture)], check=True)
    with Image.open(drawn_picture) as image:
        image.convert("RGB").quantize(COLORS).save(PICTURE, optimize=True)
