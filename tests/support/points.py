"""Points at which a test kills its own process with SIGKILL, or stops it with SIGSTOP.

``arm("ledger:7")`` kills at the seventh point called ``ledger``; ``arm("any:7")`` at the seventh of
any name. ``watch`` puts the points in place: around each durable write of the ledger, the
candidate and dbt's own statements. The fake backend has one between getting a request and giving
its answer. ``watch_batches`` puts them around what a batch backend changes at its provider, and
before each line of results.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_passed: Counter[str] = Counter()
_trace: list[str] = []
_kill_at: list[tuple[str, int]] = []
_stop_file: list[Path] = []
_signal: list[int] = []


def arm(at: str | None, stop_file: Path | None = None, number: int = signal.SIGKILL) -> None:
    """Start counting anew, and die at the named point; with a file, write it and stop there.

    ``number`` is the signal to die of.
    """
    _signal[:] = [signal.SIGSTOP if stop_file else number]
    _passed.clear()
    _trace.clear()
    _kill_at.clear()
    _stop_file[:] = [stop_file] if stop_file else []
    if at:
        name, _, number = at.partition(":")
        _kill_at.append((name, int(number)))


def passed() -> dict[str, int]:
    """Return how often each point was passed."""
    return dict(_passed)


def trace() -> list[str]:
    """Return the names of the points passed, in order: the first is ``any:1``."""
    return list(_trace)


def reach(name: str) -> None:
    _passed[name] += 1
    _passed["any"] += 1
    _trace.append(name)
    for wanted, number in _kill_at:
        if wanted in (name, "any") and _passed[wanted] == number:
            for file in _stop_file:
                file.touch()
            os.kill(os.getpid(), _signal[0])


def watch() -> None:
    """Put the points around the durable writes of batchsql, once in a process."""
    from batchsql.warehouse.duckdb import DuckDBSource, DuckDBWarehouse
    from batchsql.warehouse.postgres import PostgresSource, PostgresWarehouse

    for warehouse in (DuckDBWarehouse, PostgresWarehouse):
        if not hasattr(warehouse, "is_watched"):
            _watch_transactions(warehouse)
    for source in (DuckDBSource, PostgresSource):
        if not hasattr(source, "is_watched"):
            _watch_candidates(source)


def _watch_transactions(warehouse: Any) -> None:
    transaction = warehouse.transaction

    @contextmanager
    def watched(self: Any) -> Iterator[None]:
        with transaction(self):
            yield
            reach("ledger")  # all is written, nothing is committed
        reach("ledger")  # committed; the next transaction has not begun

    warehouse.transaction = watched
    warehouse.is_watched = True
    if hasattr(warehouse, "_run"):
        # A mere read commits too, but leaves nothing behind to look for.
        run = warehouse._run

        def watched_run(self: Any, sql: str, params: Any, take: Callable[[Any], Any]) -> Any:
            if self._in_transaction:
                return run(self, sql, params, take)
            with transaction(self):
                return run(self, sql, params, take)

        warehouse._run = watched_run


def _watch_candidates(source: Any) -> None:
    create = source.create_candidate

    def watched(self: Any, relation: str, select_sql: str) -> None:
        commit = self._commit

        def watched_commit() -> None:
            reach("candidate")
            commit()
            reach("candidate")

        self._commit = watched_commit
        try:
            create(self, relation, select_sql)
        finally:
            self._commit = commit

    source.create_candidate = watched
    source.is_watched = True


def watch_batches(backend: Any) -> Any:
    """Put the points into an opened batch backend, and return it."""
    _keep_order()
    for name in ("upload", "create"):
        setattr(backend, name, _watched_call(name, getattr(backend, name)))
    fetch = backend.fetch

    def watched_fetch(*args: Any) -> Iterator[Any]:
        for line in fetch(*args):
            reach("line")
            yield line

    backend.fetch = watched_fetch
    return backend


def _keep_order() -> None:
    """Have a line of results reached when the writes before it are done, so that points have one
    order. What runs beside a write reads only, so a kill finds no other state without this.
    """
    from batchsql.behind import Behind

    if not hasattr(Behind, "is_watched"):
        do = Behind.do

        def watched(self: Behind, call: Callable[..., Any], *args: Any) -> None:
            do(self, call, *args)
            self.wait()

        Behind.do = watched  # type: ignore[method-assign]
        Behind.is_watched = True  # type: ignore[attr-defined]


def _watched_call(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any) -> Any:
        reach(name)  # nothing has left
        result = call(*args)
        reach(name)  # the provider has it, the caller does not know yet
        return result

    return watched


def watch_dbt() -> None:
    """Put a point before each statement that dbt itself runs to create, fill or rename a table."""
    from dbt.adapters.sql.connections import SQLConnectionManager

    add_query = SQLConnectionManager.add_query

    def watched(self: Any, sql: str, *args: Any, **kwargs: Any) -> Any:
        body = sql.split("*/", 1)[-1].strip().lower()
        if body.startswith(("create", "alter", "insert", "commit")) and "candidate" not in body:
            reach("build")
        return add_query(self, sql, *args, **kwargs)

    SQLConnectionManager.add_query = watched
