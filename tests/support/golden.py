"""Golden files: what must not change unnoticed. ``BATCHSQL_GOLDEN=write`` rewrites them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def assert_golden(path: Path, found: Any) -> None:
    """Compare a JSON value with the one in a file, or write it there when told to."""
    if os.environ.get("BATCHSQL_GOLDEN") == "write":
        path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    assert found == json.loads(path.read_text(encoding="utf-8"))
