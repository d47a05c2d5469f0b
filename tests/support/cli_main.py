"""The command line with the fake backend, as a process that tests can stop and kill."""

from __future__ import annotations

from batchsql import cli
from tests.support import fake

if __name__ == "__main__":
    fake.register()
    cli.main()
