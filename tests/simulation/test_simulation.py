"""Random lives of provider batches, replayed from their seeds; ``make simulate`` runs many more."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import replay_command, run_seed
from tests.simulation.sabotage import TROUBLES, Sabotage
from tests.simulation.world import World

SEEDS = 300
REGRESSIONS: tuple[int, ...] = ()
"""Seeds that failed once. A change of the simulation gives them another meaning."""

_MOST_SEEDS = 40


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


@pytest.mark.parametrize("sabotage", TROUBLES, ids=lambda each: each.__name__)
def test_simulation_sees_a_mistake(sabotage: Sabotage) -> None:
    with sabotage():
        assert any(run_seed(seed, troubles=TROUBLES[sabotage]) for seed in range(_MOST_SEEDS))
