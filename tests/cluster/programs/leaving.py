"""Counts to a number, a step each half second; saves and leaves with 42 when told that time ends.

leaving.py NUMBER --checkpoint DIR
"""

import signal
import sys
import time
from pathlib import Path

import mpistrat as ms


def main():
    told = []
    signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
    last, saved = int(sys.argv[1]), Path(sys.argv[sys.argv.index("--checkpoint") + 1], "saved")
    strategy = ms.MirroredStrategy()
    first = strategy.all_reduce("max", int(saved.read_text()) if saved.exists() else 0)

    def say(*words):
        if strategy.rank == 0:
            print(*words, flush=True)

    say("begins at", first, "on", strategy.num_replicas_in_sync)
    for number in range(first, last):
        time.sleep(0.5)
        say("step", number)
        if strategy.all_reduce("max", len(told)):
            if strategy.rank == 0:
                saved.write_text(str(number + 1))
            sys.exit(42)
    say("ends at", last)


if __name__ == "__main__":
    main()
