"""What every warehouse dialect promises: keys of values alone, and one look for each value.

A subclass gives the dialect, a way to open a source under given session settings, and its cases.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchsql.declare.keys import RequestKeyer, messages_json
from batchsql.declare.normalize import Normalize
from batchsql.declare.prompt import parse_prompt
from batchsql.declare.returns import Returns, ValueKind
from batchsql.warehouse.base import (
    Dialect,
    UnsupportedColumnTypeError,
    Warehouse,
    item_key_sql,
    literal,
    quote,
)
from batchsql.warehouse.ledger import Ledger, SpecRow
from batchsql.warehouse.shards import parse_messages
from tests.support.sessions import MODEL, SPEC, Open, Session, request_keys
from tests.support.type_tables import column_type_rows, type_rows

KINDS: Mapping[str, tuple[type, ...]] = {
    "text": (str,), "integer": (int,), "float": (float,), "decimal": (Decimal,),
    "boolean": (bool,), "date": (date,), "timestamp": (datetime,), "bytes": (bytes,),
    "list": (list,), "object": (dict,), "none": (type(None),),
}  # fmt: skip

ODD_NAMES = (
    "$x", "/x", "a.b", "it's", 'a"b', "back\\slash", "*", "0", "[0]", "~1", "$", "#", "-", "a b",
    "größe", "日本", "x\ty", "'\"\\.$[*]", "%s", "{x}", "?", "e\u0301", "😀", "$.a", "a[*]",
)  # fmt: skip

ODD_TEXTS = (
    "", " ", "a", "A", "a ", "-", "1:a", "\u2028", "\U0001f600", "שלום", "e\u0301", "\u00e9",
    "back\\slash", "it's", '"', "$$", "%s {x} ?", "a\tb", "a\nb", "a\r\nb", "\ufeff", "\u200b",
)  # fmt: skip


class BaseDialectTests:
    """The suite. ``open_session`` and ``ledger_warehouse`` come from the subclass's fixtures."""

    dialect: Dialect
    heading: str
    """The section of docs/types.md that lists the warehouse's types."""

    sessions: Sequence[Mapping[str, str]]
    """Settings under which nothing may change; the first is the plain one."""

    key_cases: Sequence[str]
    """More SQL expressions whose key must not depend on the session."""

    equal: Sequence[tuple[str, str]]
    """Pairs of SQL expressions that are one value."""

    different: Sequence[tuple[str, str]]
    """Pairs of SQL expressions of one type that are two values."""

    refused: Sequence[str]
    """SQL expressions whose type is refused."""

    overrides: Sequence[tuple[Any, str, str]]
    """A JSON value, the user's type for it, and the SQL that the result equals."""

    # --- keys ---------------------------------------------------------------------------------

    def test_item_key_is_the_same_under_every_session(self, open_session: Open) -> None:
        expressions = [row.sql for row in type_rows(self.heading)] + list(self.key_cases)
        expressions += [f"nullif({row.sql}, {row.sql})" for row in type_rows(self.heading)
                        if row.is_comparable]  # fmt: skip
        plain = open_session(self.sessions[0]).keys_of(expressions)
        for settings_ in self.sessions[1:]:
            keys = open_session(settings_).keys_of(expressions)
            assert [(each, settings_) for each in expressions if keys[each] != plain[each]] == []

    def test_item_key_ignores_the_order_of_columns(self, open_session: Open) -> None:
        session = open_session({})
        one = session.keys("select 'x' as a, 2 as \"B b\", null as c")
        assert session.keys("select null as c, 2 as \"B b\", 'x' as a") == one

    @pytest.mark.parametrize(
        "other",
        [
            "select 'a' as a, 'b-c' as b",
            "select 'a-' as a, 'b-c' as b",
            "select '' as a, 'a-bc' as b",
            "select 'a-b' as a, null as b",
            "select 'a-b' as a, '' as b",
            "select 'a-b' as a, 'c' as \"B\"",
            "select 'a-b' as a, 'c' as b, null as c",
            "select 'c' as a, 'a-b' as b",
        ],
    )
    def test_item_key_differs_from_near_misses(self, open_session: Open, other: str) -> None:
        session = open_session({})
        assert session.keys(other) != session.keys("select 'a-b' as a, 'c' as b")

    def test_item_key_changes_with_the_spec_version(self, open_session: Open) -> None:
        session = open_session({})
        inputs = list(session.inputs("select 'a' as x").items())
        first, second = (item_key_sql(self.dialect, spec, inputs) for spec in ("1", "2"))
        assert session.source.fetch(f"select {first} <> {second} from (select 'a' as x) s") == [
            (True,)
        ]

    def test_texts_have_equal_keys_exactly_if_they_are_equal(self, open_session: Open) -> None:
        session = open_session({})
        texts = st.none() | st.sampled_from(ODD_TEXTS) | st.text(
            st.characters(exclude_characters="\x00", exclude_categories=("Cs",)), max_size=6
        ) | st.text("a-;:=0123", max_size=6)  # fmt: skip
        row = st.tuples(texts, texts, texts)

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(row, min_size=2, max_size=40))
        def check(rows: list[tuple[str | None, ...]]) -> None:
            selects = []
            for number, each in enumerate(rows):
                cells = ["null" if value is None else literal(value) for value in each]
                columns = [
                    f"cast({cell} as {session.text}) as {name}"
                    for cell, name in zip(cells, "abc", strict=True)
                ]
                selects.append(f"select {', '.join(columns)}, {number} as position")
            union = " union all ".join(selects)
            inputs = [(k, v) for k, v in session.inputs(union).items() if k != "position"]
            key = item_key_sql(self.dialect, SPEC, inputs)
            found = session.source.fetch(
                f"select ({key})::{session.text} from (\n{union}\n) s order by position"
            )
            keys = [each[0] for each in found]
            assert len(set(keys)) == len(set(rows))
            by_row = dict(zip(rows, keys, strict=True))
            assert [by_row[each] for each in rows] == keys

        check()

    def test_equal_values_have_one_key_and_one_text(self, open_session: Open) -> None:
        session = open_session({})
        keys = session.keys_of([each for pair in self.equal for each in pair])
        printed = session.printed_of(list(keys))
        for one, other in self.equal:
            assert (keys[one], printed[one]) == (keys[other], printed[other])

    def test_different_values_have_different_keys(self, open_session: Open) -> None:
        keys = open_session({}).keys_of([each for pair in self.different for each in pair])
        assert [(one, other) for one, other in self.different if keys[one] == keys[other]] == []

    def test_null_of_every_type_differs_from_its_value(self, open_session: Open) -> None:
        session = open_session({})
        values = [row.sql for row in type_rows(self.heading) if row.is_comparable]
        nulls = [f"nullif({value}, {value})" for value in values]
        assert len(nulls) > 20
        keys = session.keys_of(values + nulls)
        assert len({keys[null] for null in nulls}) == 1
        assert {keys[null] for null in nulls}.isdisjoint(keys[value] for value in values)
        assert set(session.printed_of(nulls).values()) == {""}

    def test_unstable_types_are_refused_by_name(self, open_session: Open) -> None:
        session = open_session({})
        for expression in self.refused:
            with pytest.raises(UnsupportedColumnTypeError, match="select"):
                session.inputs(f"select {expression} as x")

    # --- values -------------------------------------------------------------------------------

    def test_documented_values_print_so_under_every_session(self, open_session: Open) -> None:
        rows = type_rows(self.heading)
        assert len(rows) > 30
        wrong = []
        for settings_ in self.sessions[:3]:
            session = open_session(settings_)
            expressions = [row.sql for row in rows]
            printed = session.printed_of(expressions)
            values = session.values_of(expressions)
            for row in rows:
                text, value = printed[row.sql], values[row.sql]
                if text != row.printed or type(value) not in KINDS[row.kind]:
                    wrong.append((row.sql, row.printed, text, row.kind, value, settings_))
        assert wrong == []

    def test_odd_texts_reach_the_template_unchanged(self, open_session: Open) -> None:
        session = open_session({})
        rows = " union all ".join(
            f"select {literal(text)} as x, {n} as n" for n, text in enumerate(ODD_TEXTS)
        )
        printed = [m.content for (m,) in session.messages(rows, "{{ n }}[{{ x }}]")]
        assert sorted(printed) == sorted(f"{n}[{text}]" for n, text in enumerate(ODD_TEXTS))

    def test_long_text_keeps_its_length(self, open_session: Open) -> None:
        session = open_session({})
        select = "select repeat('ü', 5000000) as x"
        assert len(session.keys(select)[0]) == 36
        ((value,),) = session.values(select)
        assert len(value) == 5_000_000

    def test_column_with_an_odd_name_is_read(self, open_session: Open) -> None:
        session = open_session({})
        for number, name in enumerate(ODD_NAMES):
            quoted = quote(name, self.dialect.name)
            select = f"select {number} as {quoted}"
            assert [c.name for c in session.source.describe(select)] == [name]
            assert session.values(select) == [(number,)]
            assert len(session.keys(select)) == 1

    def test_rows_come_in_batches_and_all_of_them(self, open_session: Open) -> None:
        session = open_session({})
        numbers = "generate_series(1, 5000)"
        sql = f"select x from (select unnest({numbers}) as x) s" if session.text == "varchar" else (
            f"select x from {numbers} x"
        )  # fmt: skip
        sizes = [batch.num_rows for batch in session.source.stream(sql, 1000)]
        assert sum(sizes) == 5000
        nothing = session.source.stream("select 1 as x where 1 = 2", 1000)
        assert sum(batch.num_rows for batch in nothing) == 0

    def test_select_that_ends_in_a_comment_is_described_and_stored(
        self, open_session: Open
    ) -> None:
        session = open_session({})
        select = "select 1 as a, 'x' as \"B c\" -- the end"
        assert [c.name for c in session.source.describe(select)] == ["a", "B c"]
        assert session.values(select) == [(1, "x")]

    # --- answers ------------------------------------------------------------------------------

    def extract(
        self, session: Session, answer: Any, name: str, kind: ValueKind, target: str | None = None
    ) -> Any:
        """Return a field of a stored answer, as text."""
        json_type = "json" if self.dialect.name == "duckdb" else "jsonb"
        stored = json.dumps(answer, ensure_ascii=False)
        value = self.dialect.answer_sql("b.answer", name, kind, target)
        ((text,),) = session.source.fetch(
            f"select cast({value} as {session.text}) "
            f"from (select cast({literal(stored)} as {json_type}) as answer) b"
        )
        return text

    def test_fields_with_odd_names_are_extracted(self, open_session: Open) -> None:
        session = open_session({})
        answer = {name: number for number, name in enumerate(ODD_NAMES)}
        for name, number in answer.items():
            for kind in (ValueKind.INTEGER, ValueKind.TEXT, ValueKind.JSON):
                assert self.extract(session, answer, name, kind) == str(number)

    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            (ValueKind.TEXT, 'it\'s "quoted" \\ \u2028 😀\nline'),
            (ValueKind.TEXT, ""),
            (ValueKind.TEXT, "null"),
            (ValueKind.INTEGER, -(2**63)),
            (ValueKind.INTEGER, 2**63 - 1),
            (ValueKind.NUMBER, 0.1),
            (ValueKind.NUMBER, 1e300),
            (ValueKind.NUMBER, 3),
            (ValueKind.BOOLEAN, True),
            (ValueKind.BOOLEAN, False),
            (ValueKind.DATE, "2024-02-29"),
            (ValueKind.TIMESTAMP, "2024-02-29T12:34:56.5Z"),
            (ValueKind.TIMESTAMP, "2024-02-29T12:34:56.5+05:30"),
            (ValueKind.JSON, {"b": [1, {"a": None}], "ü": "x"}),
            (ValueKind.JSON, []),
            (ValueKind.JSON, [None, "null"]),
        ],
    )
    def test_answers_are_cast_to_their_kind(
        self, open_session: Open, kind: ValueKind, value: Any
    ) -> None:
        session = open_session(self.sessions[0])
        text = self.extract(session, {"f": value}, "f", kind)
        if kind is ValueKind.JSON:
            assert json.loads(text) == value
        elif kind is ValueKind.NUMBER:
            assert math.isclose(float(text), value, rel_tol=0)
        elif kind is ValueKind.TIMESTAMP:
            shown = value.replace("Z", "+00:00").replace(".5+", ".500000+")
            found = text.replace(".5+", ".500000+") + ":00"
            assert datetime.fromisoformat(found) == datetime.fromisoformat(shown)
        else:
            assert text == (str(value).lower() if isinstance(value, bool) else str(value))
        assert self.extract(session, {"f": None}, "f", kind) is None
        assert self.extract(session, {"other": value}, "f", kind) is None

    def test_answer_of_a_row_without_one_is_null(self, open_session: Open) -> None:
        session = open_session({})
        json_type = "json" if self.dialect.name == "duckdb" else "jsonb"
        for kind in ValueKind:
            value = self.dialect.answer_sql("b.a", "f", kind, None)
            sql = f"select {value} from (select cast(null as {json_type}) as a) b"
            assert session.source.fetch(sql) == [(None,)]

    def test_columns_have_the_documented_types(self, open_session: Open) -> None:
        session = open_session({})
        rows = column_type_rows()
        assert {row.kind for row in rows} == set(ValueKind)
        json_type = "json" if self.dialect.name == "duckdb" else "jsonb"
        for row in rows:
            value = self.dialect.answer_sql("b.a", "f", row.kind, None)
            (column,) = session.source.describe(
                f"select {value} as f from (select cast(null as {json_type}) as a) b"
            )
            assert column.type_name == row.types[self.dialect.name] == self.dialect.column_type(
                row.kind
            )  # fmt: skip

    def test_answers_take_the_users_type(self, open_session: Open) -> None:
        session = open_session({})
        for value, target, expected in self.overrides:
            kind = ValueKind.JSON if isinstance(value, (list, dict)) else ValueKind.TEXT
            text = self.extract(session, {"f": value}, "f", kind, target)
            ((wanted,),) = session.source.fetch(f"select cast({expected} as {session.text})")
            assert text == wanted, (value, target)
            assert self.extract(session, {"f": None}, "f", kind, target) is None

    # --- requests -----------------------------------------------------------------------------

    def test_request_key_ignores_what_normalisation_removes(self, open_session: Open) -> None:
        session = open_session({})
        texts = (
            "Caf\u00e9\nau lait",
            "Cafe\u0301\r\nau lait",
            "Caf\u00e9  \nau lait\t",
            "  Caf\u00e9\rau lait\n\n",
        )
        rows = " union all ".join(f"select {literal(text)} as x" for text in texts)
        assert len(set(session.keys(rows))) == len(texts)
        rendered = session.messages(rows, "{{ x }}", Normalize.STANDARD)
        assert len(set(request_keys(rendered))) == 1
        assert len(set(request_keys(session.messages(rows, "{{ x }}", Normalize.NONE)))) == 4

    def test_stored_requests_reproduce_their_keys(
        self, open_session: Open, ledger_warehouse: Callable[[], tuple[Warehouse, str]]
    ) -> None:
        import pyarrow as pa

        session = open_session({})
        texts = [*ODD_TEXTS, *self.more_texts]
        rows = " union all ".join(f"select {self.sql_text(text)} as x" for text in texts)
        bound = parse_prompt("system:\nYou label.\nuser:\n[{{ x }}]").bind(["x"], Normalize.NONE)
        keyer = RequestKeyer(MODEL, {}, Returns(()), {}, bound.prefix)
        wanted = {}
        for row in session.values(rows):
            suffix = messages_json(bound.render_suffix(row))
            wanted[keyer.key(suffix)] = suffix.decode()
        warehouse, schema = ledger_warehouse()
        ledger = Ledger(warehouse, schema)
        ledger.migrate()
        ledger.write_spec(
            SpecRow(SPEC, 1, str(MODEL), "[{{ x }}]", "{}", "[]", "none", "{}",
                    messages_json(bound.prefix).decode())
        )  # fmt: skip
        ledger.write_items(
            SPEC,
            pa.table({
                "item_key": [f"{n:032x}" for n in range(len(wanted))],
                "request_key": list(wanted),
                "unique_key": pa.array([None] * len(wanted), pa.string()),
            }),
            pa.table({"request_key": list(wanted), "messages": list(wanted.values())}),
        )  # fmt: skip
        stored = warehouse.fetch(
            f"select q.request_key::{session.text}, s.prefix, q.messages from "
            f"{ledger.relation('requests')} q join {ledger.relation('specs')} s "
            "on s.spec_version = q.spec_version"
        )
        assert len(stored) == len(wanted) == len(set(texts))
        for key, prefix, messages in stored:
            parsed = parse_messages(prefix) + parse_messages(messages)
            assert request_keys([parsed]) == [key.replace("-", "")]

    more_texts: Sequence[str] = ()
    """Texts that only this warehouse can hold."""

    def sql_text(self, text: str) -> str:
        return literal(text)
