"""dbt with the fake backend, as a process that tests can kill.

``BATCHSQL_TEST_KILL_AT=ledger:7`` kills it with SIGKILL at a point (see ``points``).
``BATCHSQL_TEST_POINTS`` names a file into which the points passed are written at a normal end, as
JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.support import fake, points


def main() -> int:
    from dbt.cli.main import dbtRunner

    fake.register()
    points.watch()
    points.watch_dbt()
    points.arm(os.environ.get("BATCHSQL_TEST_KILL_AT"))
    result = dbtRunner().invoke(sys.argv[1:])
    if file := os.environ.get("BATCHSQL_TEST_POINTS"):
        Path(file).write_text(json.dumps(points.passed()))
    if result.exception:
        print(result.exception)
    return 0 if result.success else 1


if __name__ == "__main__":
    sys.exit(main())
