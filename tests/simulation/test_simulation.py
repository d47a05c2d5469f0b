"""Random lives of provider batches, replayed from their seeds; ``make simulate`` runs many more."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import replay_command, run_seed
from tests.simulation.sabotage import CAUGHT_BY, Sabotage
from tests.simulation.world import World

SEEDS = 120
REGRESSIONS: tuple[int, ...] = ()
"""Seeds that failed once. A change of the simulation gives them another meaning."""

_MOST_SEEDS = 300


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_simulation_keeps_every_promise(first: int) -> None:
    for seed in range(first, first + 20):
        check(seed)


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_simulation_stays_mended(seed: int) -> None:
    check(seed)


def check(seed: int) -> None:
    faults = run_seed(seed)
    assert not faults, "\n".join(
        [f"seed {seed} fails; look at it with: {replay_command(seed)}", *faults]
    )


def test_simulation_replays_a_seed_exactly() -> None:
    for seed in range(3):
        traces: list[list[str]] = [[], []]
        for trace in traces:
            World(seed, trace.append).live()
        assert traces[0] == traces[1]
        assert len(traces[0]) > 5


@pytest.mark.parametrize(
    ("sabotage", "seed"), CAUGHT_BY.items(), ids=[each.__name__ for each in CAUGHT_BY]
)
def test_simulation_sees_a_mistake(sabotage: Sabotage, seed: int) -> None:
    with sabotage():
        # The seed that is known to see it, or any other, should the simulation have changed.
        assert any(run_seed(each) for each in (seed, *range(_MOST_SEEDS))), sabotage.__name__
