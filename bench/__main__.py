"""Run every benchmark, one after the other, and print its ratios.

Each in a process of its own: what one has loaded must not count as another's memory.
"""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("engine", "first_sight", "nothing_new", "batch", "online")


def main() -> int:
    codes = [
        subprocess.run([sys.executable, "-m", f"bench.{name}"], check=False).returncode
        for name in BENCHMARKS
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
