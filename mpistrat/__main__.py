"""``python -m mpistrat`` is the command ``mpistrat``."""

from mpistrat.launch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
