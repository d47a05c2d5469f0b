"""What tests need that kill many runs, each on a warehouse of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.project import Target, duckdb_target, postgres_target

MakeTarget = Callable[[], Target]


@pytest.fixture(params=["duckdb", "postgres"])
def make_target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeTarget]:
    """Makes empty warehouses of one kind, as many as asked for."""
    made: list[Target] = []
    uri = request.getfixturevalue("postgres_uri") if request.param == "postgres" else ""

    def make() -> Target:
        target = postgres_target(uri) if uri else duckdb_target(tmp_path / f"{len(made)}.duckdb")
        made.append(target)
        return target

    yield make
    for target in made if uri else ():
        target.drop()
