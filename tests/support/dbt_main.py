"""dbt with the fake backend, as a process that tests can kill.

``BATCHSQL_TEST_KILL_AT=n`` kills it with SIGKILL at the n-th point around a ledger transaction:
before it begins, before it commits, after it has committed. ``BATCHSQL_TEST_POINTS`` names a file
into which the number of points passed is written at a normal end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import fake

_passed = 0


def _point() -> None:
    global _passed
    _passed += 1
    if _passed == int(os.environ.get("BATCHSQL_TEST_KILL_AT", "0")):
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(warehouse: type) -> None:
    original = warehouse.transaction  # type: ignore[attr-defined]

    @contextmanager
    def transaction(self: Any) -> Iterator[None]:
        _point()
        with original(self):
            yield
            _point()
        _point()

    warehouse.transaction = transaction  # type: ignore[attr-defined]


def main() -> int:
    from dbt.cli.main import dbtRunner

    from batchsql.warehouse.duckdb import DuckDBWarehouse
    from batchsql.warehouse.postgres import PostgresWarehouse

    fake.register()
    _watch(DuckDBWarehouse)
    _watch(PostgresWarehouse)
    result = dbtRunner().invoke(sys.argv[1:])
    if points := os.environ.get("BATCHSQL_TEST_POINTS"):
        Path(points).write_text(str(_passed))
    if result.exception:
        print(result.exception)
    return 0 if result.success else 1


if __name__ == "__main__":
    sys.exit(main())
