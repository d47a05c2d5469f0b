"""Rows that are new become requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson
import pyarrow as pa

from batchsql.declare.keys import RequestKeyer, messages_json
from batchsql.declare.prompt import BoundPrompt, RenderError
from batchsql.errors import DataError
from batchsql.validate.structure import safe_text
from batchsql.warehouse.base import ValueForm, column_values


class Renderer:
    """Renders the rows of one spec. ``forms`` are those of the prompt's inputs, in their order."""

    def __init__(
        self, subject: str, prompt: BoundPrompt, keyer: RequestKeyer, forms: Sequence[ValueForm]
    ) -> None:
        self._subject = subject
        self._prompt = prompt
        self._keyer = keyer
        self._forms = forms

    def render(self, rows: pa.RecordBatch) -> tuple[pa.Table, pa.Table]:
        """Return the items and the requests of rows as ``Candidate.stream_new`` yields them.

        Returns:
            Both tables as ``Ledger.write_items`` takes them, each key once.

        Raises:
            DataError: the prompt cannot be rendered for a row, which is named.
        """
        first_key = 1 + len(self._forms)
        item_keys = rows.column(0).to_pylist()
        values = [column_values(rows.column(1 + n), form) for n, form in enumerate(self._forms)]
        unique = [rows.column(n).to_pylist() for n in range(first_key, rows.num_columns)]
        uniques: Iterator[tuple[Any, ...]] = zip(*unique, strict=True) if unique else iter(())
        cells: Iterator[tuple[Any, ...]] = zip(*values, strict=True)
        items: dict[str, tuple[str, str | None]] = {}
        requests: dict[str, str] = {}
        for item_key, row in zip(item_keys, cells, strict=True):
            names = next(uniques, None)
            if item_key in items:
                continue
            shown = _show_unique_key(names)
            try:
                suffix = messages_json(self._prompt.render_suffix(row))
            except RenderError as error:
                where = f" for the row {safe_text(shown, 200)}" if shown else ""
                raise DataError(
                    f"{self._subject}: the prompt cannot be rendered{where}: {error}; mend the "
                    "template or the row, nothing was sent"
                ) from error
            request_key = self._keyer.key(suffix)
            items[item_key] = (request_key, shown)
            requests[request_key] = suffix.decode()
        return (
            pa.table(
                {
                    "item_key": pa.array(list(items), pa.string()),
                    "request_key": pa.array([key for key, _ in items.values()], pa.string()),
                    "unique_key": pa.array([shown for _, shown in items.values()], pa.string()),
                }
            ),
            pa.table(
                {
                    "request_key": pa.array(list(requests), pa.string()),
                    "messages": pa.array(list(requests.values()), pa.string()),
                }
            ),
        )


def _show_unique_key(values: Sequence[Any] | None) -> str | None:
    if values is None:
        return None
    return str(values[0]) if len(values) == 1 else orjson.dumps(list(values)).decode()
