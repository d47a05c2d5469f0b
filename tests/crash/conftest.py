"""What tests need that kill many runs, each on a warehouse of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchsql.emulate.s3 import serve_s3
from tests.support.project import Target, duckdb_target, postgres_target
from tests.support.rehearsed import RehearsedProvider, clean_environment, quickened

MakeTarget = Callable[[], Target]

_SDKS = {
    "openai": "openai",
    "anthropic": "anthropic",
    "google": "google.genai",
    "bedrock": "boto3",
}


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


@pytest.fixture(scope="package")
def s3_url() -> Iterator[str]:
    """A server with the buckets of Bedrock's batches."""
    pytest.importorskip("moto")
    with serve_s3() as url:
        yield url


@pytest.fixture
def provider(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RehearsedProvider]:
    """The provider that a test names, with batches that live fast."""
    pytest.importorskip(_SDKS[request.param])
    environment = clean_environment(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    s3_url = request.getfixturevalue("s3_url") if request.param == "bedrock" else None
    with quickened():
        yield RehearsedProvider(request.param, environment, s3_url)
