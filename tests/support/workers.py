"""``batchsql work`` for tests: in this process, or as a process that gets signals."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from click.testing import CliRunner, Result

from batchsql import cli
from tests.support.lean import wait_for
from tests.support.project import Project

DETACHED = {"runner": "detached"}


def rows(count: int = 10, text: str = "ticket") -> str:
    """Return a SELECT of tickets."""
    return " union all ".join(f"select {n} as id, '{text} {n}' as body" for n in range(count))


def run(project: Project, *args: str) -> None:
    """Run ``dbt run``, which must end well."""
    result = project.run("run", *args)
    assert result.ok, result.output


def place(project: Project) -> list[str]:
    """Return the options that say where a project is."""
    return ["--project-dir", str(project.root), "--profiles-dir", str(project.root)]


def worker(project: Project, *args: str) -> Result:
    """Run ``batchsql work`` in this process until nothing is left to do."""
    return CliRunner().invoke(cli.main, ["work", "--idle-exit", "0s", *place(project), *args])


class WorkerProcess:
    """A worker in a process of its own, and the lines that it has said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self._process = process
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(self._process.stdout)

    def tell_to_end(self) -> None:
        """Send SIGTERM, and wait until the worker has taken note."""
        self._process.send_signal(signal.SIGTERM)
        wait_for(lambda: any(line.startswith("ending: ") for line in self.lines))

    def wait(self, seconds: float) -> int:
        """Return the exit code, once everything that was said is in ``lines``.

        Raises:
            TimeoutExpired: the worker has not ended by then.
        """
        code = self._process.wait(seconds)
        self._reader.join()
        return code


@contextmanager
def worker_process(project: Project, *args: str) -> Iterator[WorkerProcess]:
    """Start ``batchsql work``; it is killed in the end where it has not ended by then."""
    process = project.worker("work", *place(project), *args)
    try:
        yield WorkerProcess(process)
    finally:
        process.kill()
        process.wait()
