"""In which order an engine is asked: equal beginnings side by side, like lengths together."""

from __future__ import annotations

from itertools import groupby

import pytest

from batchsql.candidate import LONGEST_FIRST
from tests.support.project import Project
from tests.support.workers import run, worker


@pytest.mark.parametrize("runner", ["inline", "detached"])
def test_engine_gets_the_longest_first_and_then_neighbours_with_one_beginning(
    project: Project, runner: str
) -> None:
    kinds, sizes = ("bill", "bug", "idea"), (3, 5, 40, 300)
    texts = [
        (kind, f"{number:04d}" + "x" * size)
        for number, (kind, size) in enumerate(
            (k, s) for s in sizes for k in kinds for _ in range(8)
        )
    ]
    rows = " union all ".join(
        f"select {n} as id, '{kind}' as kind, '{body}' as body"
        for n, (kind, body) in enumerate(texts)
    )
    project.write("prompts/label.md", "user:\n{{ kind }}: {{ body }}\n")
    engine = {"is_engine": True, "shard_requests": 7}
    project.model("labels", rows, llm={"runner": runner, "engine": engine})
    run(project)
    if runner == "detached":
        assert project.sent() == []
        worker(project)

    by_key = dict(
        project.target.query(
            "select replace(request_key::varchar, '-', ''), unique_key::integer from {ledger}.items"
        )
    )
    asked = [texts[by_key[key]] for key in project.sent()]
    assert sorted(asked) == sorted(texts)
    first, rest = asked[:LONGEST_FIRST], asked[LONGEST_FIRST:]
    assert {len(body) for _, body in first} == {304}
    # Each kind is one stretch, and within it each coarse length is one, the shorter before.
    assert [kind for kind, _ in groupby(rest, key=lambda row: row[0])] == list(kinds)
    for kind in kinds:
        buckets = [(len(kind) + len(body)).bit_length() for each, body in rest if each == kind]
        assert buckets == sorted(buckets)
    # Within a length they come shuffled, not in the order of their texts.
    alike = [body for kind, body in rest if kind == "bug" and len(body) < 10]
    assert len(alike) == 16
    assert alike != sorted(alike)
