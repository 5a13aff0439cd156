"""A job whose first rank works SECONDS for the others, and may take MOST."""

from __future__ import annotations

import sys
import time

import mpistrat as ms

if __name__ == "__main__":
    seconds, most = map(float, sys.argv[1:])
    ms.once(lambda: time.sleep(seconds), max_seconds=most)
