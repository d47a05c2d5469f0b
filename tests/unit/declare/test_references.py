import jinja2
import jinja2.meta
import pytest

from batchsql.declare.prompt import parse_prompt
from batchsql.declare.references import PrefixInterruption

# --- Columns ---

COLUMN_CASES: list[tuple[str, tuple[str, ...], bool]] = [
    ("{{ b }} {{ a }} {{ b }}", ("b", "a"), False),
    ("static", (), False),
    ("{{ row['User Name'] }} {{ row[\"b\"] }} {{ a }}", ("User Name", "b", "a"), False),
    ("{{ row.x }} {{ row.items }}", ("x", "items"), False),
    ("{{ row['row'] }}", ("row",), False),
    ("{{ row['from'] }} {{ row['not'] }} {{ row['loop'] }}", ("from", "not", "loop"), False),
    ("{{ row }}", (), True),
    ("{{ row | tojson }} {{ a }}", ("a",), True),
    ("{{ row[a] }}", ("a",), True),
    ("{% for k, v in row.items() %}{{ k }}{{ v }}{% endfor %}", (), True),
    ("{{ row.get('a') }}", (), True),
    ("{{ row[0] }}", (), True),
    ("{{ row.a.strip() }}", ("a",), False),
    ("{% for t in tags %}{{ t }} {{ loop.index }}{% endfor %}", ("tags",), False),
    ("{% for t in tags %}{{ t }}{% endfor %}{{ t }}", ("tags", "t"), False),
    ("{% for row in rows %}{{ row.a }}{% endfor %}", ("rows",), False),
    ("{% set x = a %}{{ x }}", ("a",), False),
    ("{% set a = a | trim %}{{ a }}", ("a",), False),
    ("{% set x = 1 %}{{ x }}", (), False),
    ("{% if c %}{% set x = 1 %}{% endif %}{{ x }}", ("c", "x"), False),
    ("{% with y = a %}{{ y }}{% endwith %}{{ y }}", ("a", "y"), False),
    (
        "{% macro m(p, q=d) %}{{ p }}{{ e }}{{ varargs }}{% endmacro %}{{ m(f) }}",
        ("d", "e", "f"),
        False,
    ),
    ("{% call(z) m2(1) %}{{ z }}{{ g }}{% endcall %}", ("m2", "g"), False),
    ("{{ b if a else c }}", ("b", "a", "c"), False),
    (
        "{% for t in ts if t == w %}{{ u }}{% else %}{{ n }}{% endfor %}",
        ("ts", "w", "u", "n"),
        False,
    ),
    ("{% filter replace(a, 'x') %}{{ b }}{% endfilter %}", ("a", "b"), False),
    ("{{ range(n) }} {{ dict(a=v) }}", ("n", "v"), False),
    ("{{ range }}", ("range",), False),
    ("{{ größe }} {{ 名前 }} {{ class }}", ("größe", "名前", "class"), False),
    ("{{ a[b:c] }} {{ d is divisibleby(e) }}", ("a", "b", "c", "d", "e"), False),
    ("{# {{ no }} #}{% raw %}{{ no }}{% endraw %}{{ a }}", ("a",), False),
    ("{% if a is defined %}x{% endif %}{{ b | default('y') }}", ("a", "b"), False),
]


@pytest.mark.parametrize(("source", "columns", "uses_all"), COLUMN_CASES)
def test_columns_are_what_the_template_refers_to(
    source: str, columns: tuple[str, ...], uses_all: bool
) -> None:
    prompt = parse_prompt(source)
    assert (prompt.columns, prompt.uses_all_columns) == (columns, uses_all)
    assert prompt.refers_to_columns == bool(columns or uses_all)


@pytest.mark.parametrize("source", [case[0] for case in COLUMN_CASES])
def test_columns_agree_with_jinja(source: str) -> None:
    environment = jinja2.Environment()
    undeclared = jinja2.meta.find_undeclared_variables(environment.parse(source))
    prompt = parse_prompt(source)
    assert set(prompt._variables) == undeclared - {"row", "range", "dict"} | (
        {"range"} if source == "{{ range }}" else set()
    )


# --- The warning about interrupted prefixes ---

LONG = "Always answer in English. " * 10

INTERRUPTION_CASES: list[tuple[str, list[tuple[str, int]]]] = [
    (f"system:\n{LONG}\nuser:\n{{{{ a }}}}", []),
    ("{{ a }}\nshort", []),
    (f"user:\n\n{{{{ a }}}}\n{LONG}", [("a", 3)]),
    (f"{{{{ row['B c'] }}}}{{{{ a }}}}{LONG}", [("B c", 1)]),
    (f"\n{{{{ row | tojson }}}}\n{LONG}", [("row", 2)]),
    (f"{{% set t = a %}}\n{LONG}\n{{{{ t }}}}", []),
    (f"{{% set t = a %}}\nx\n{{{{ t }}}}\n{LONG}", [("a", 3)]),
    (f"{{% if a %}}{LONG}{{% else %}}other {LONG}{{% endif %}}", []),
    (f"{{% for t in a %}}{LONG}{{% endfor %}}", []),
    (f"{{{{ a }}}}{{% if true %}}{LONG}{{% endif %}}", [("a", 1)]),
    (f"{LONG}{{{{ 'static' }}}}{LONG}", []),
    (f"{{{{ a }}}}\n{{# {LONG} #}}", []),
]


@pytest.mark.parametrize(("source", "expected"), INTERRUPTION_CASES)
def test_interruption_names_the_first_column_before_long_static_text(
    source: str, expected: list[tuple[str, int]]
) -> None:
    found = parse_prompt(source).interrupts()
    assert [(item.name, item.line) for item in found] == expected


def test_interruption_counts_the_static_text() -> None:
    found = parse_prompt("{{ a }}" + "x" * 150 + "{{ b }}\nassistant:\n" + "y" * 150).interrupts()
    assert found == [PrefixInterruption("a", 1, 301)]
