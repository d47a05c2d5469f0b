"""Run the simulation over many seeds, or one seed with a trace.

``python -m tests.simulation --seeds 10000``; ``python -m tests.simulation --seed 17 --trace``.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from tests.simulation.checks import find_faults
from tests.simulation.world import Troubles, World


def run_seed(seed: int, *, trace: bool = False, troubles: Troubles | None = None) -> list[str]:
    """Live through a seed's world; return the promises that were broken.

    ``troubles`` change what the seed makes of its world.
    """
    world = World(seed, print if trace else None, troubles)
    try:
        world.live()
    except Exception:  # whatever breaks it is a finding, and the other seeds are to go on
        return [traceback.format_exc()]
    return find_faults(world)


def replay_command(seed: int) -> str:
    """Return how to look at a seed."""
    return f"python -m tests.simulation --seed {seed} --trace"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seed", type=int, help="only this seed")
    parser.add_argument("--trace", action="store_true", help="say what happens")
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else range(args.first, args.first + args.seeds)
    failed = []
    began = time.monotonic()
    for seed in seeds:
        faults = run_seed(seed, trace=args.trace)
        if faults:
            failed.append(seed)
            print(
                f"seed {seed} fails; look at it with: {replay_command(seed)}", *faults, sep="\n  "
            )
    print(f"{len(seeds)} seeds, {len(failed)} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
