"""Our loader beside its peers, one table at a time.

    python examples/bench --list
    python examples/bench TABLE [--rounds N] [--seconds S] [--data DIR] [--only NAME] [--goals]
        [--json FILE] [--smoke]

Shows: what our loader and its peers do a second, for how much CPU and memory, on one kind of data.
Prints: medians over interleaved rounds with their spread, ratios, and whether the goals that this
project has set itself are reached.
"""

import os
import sys
from pathlib import Path

# What is measured has its bytecode, as what pip installs has: without, each program that starts
# compiles our package, but not torch.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Python puts this folder there; its files are a package, whose place is the folder above.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.command import main

if __name__ == "__main__":
    sys.exit(main())
