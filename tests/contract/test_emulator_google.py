"""The rehearsal server as Google's own SDK sees it, over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import jsonschema_rs
import pytest

from batchsql.emulate import Emulator, GoogleLimits, Rule

pytest.importorskip("google.genai")

from google import genai
from google.genai import errors, types

MODEL = "gemini-2.5-flash"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "category": {"type": "string", "enum": ["billing", "bug", "other"]},
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        "summary": {"type": "string", "description": "maxLength: 40"},
    },
    "required": ["category", "urgency", "summary"],
    "additionalProperties": False,
}
JSON = {"response_mime_type": "application/json", "response_json_schema": SCHEMA}
KEY = {"x-goog-api-key": "rehearsal"}


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with Emulator() as started:
        yield started


def sdk(emulator: Emulator) -> genai.Client:
    options = types.HttpOptions(base_url=emulator.google_base_url, timeout=20_000)
    return genai.Client(vertexai=False, api_key="rehearsal", http_options=options)


@pytest.fixture
def client(emulator: Emulator) -> Iterator[genai.Client]:
    with sdk(emulator) as made:
        yield made


def ask(client: genai.Client, text: str = "hello", **config: Any) -> Any:
    return client.models.generate_content(model=MODEL, contents=text, config={**JSON, **config})


def post(emulator: Emulator, body: Any, path: str = f"models/{MODEL}:generateContent") -> Any:
    return httpx2.post(f"{emulator.google_base_url}/v1/{path}", headers=KEY, json=body)


def submit(client: genai.Client, names: Sequence[str], title: str = "night") -> Any:
    requests = [
        {"contents": [{"role": "user", "parts": [{"text": f"row {name}"}]}],
         "metadata": {"key": name}}
        for name in names
    ]  # fmt: skip
    return client.batches.create(model=MODEL, src=requests, config={"display_name": title})


def submit_file(client: genai.Client, folder: Path, content: str) -> Any:
    file = folder / "input.jsonl"
    file.write_text(content, encoding="utf-8")
    uploaded = client.files.upload(file=str(file), config={"mime_type": "jsonl"})
    return client.batches.create(model=MODEL, src=uploaded.name, config={"display_name": "night"})


def lines(names: Sequence[str]) -> str:
    requests = [{"key": n, "request": {"contents": [{"parts": [{"text": n}]}]}} for n in names]
    return "".join(json.dumps(each) + "\n" for each in requests)


def state(client: genai.Client, batch: Any) -> str:
    return str(client.batches.get(name=batch.name).state.name).removeprefix("JOB_STATE_")


def raw(emulator: Emulator, batch: Any) -> Any:
    return httpx2.get(f"{emulator.google_base_url}/v1/{batch.name}", headers=KEY).json()


# --- answers --------------------------------------------------------------------------------------


def test_answer_fits_the_schema_with_the_bounds_that_the_description_tells(
    client: genai.Client,
) -> None:
    for row in range(20):
        reply = ask(client, f"row {row}")
        answer = json.loads(reply.text)
        jsonschema_rs.validate(SCHEMA, answer)
        assert len(answer["summary"]) <= 40
    assert reply.candidates[0].finish_reason.name == "STOP"
    assert reply.model_version == MODEL
    usage = reply.usage_metadata
    assert usage.total_token_count == usage.prompt_token_count + usage.candidates_token_count


def test_keyword_that_gemini_ignores_has_no_effect(client: genai.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 1}},
              "required": ["a"]}  # fmt: skip
    reply = ask(client, response_json_schema=schema)
    assert len(json.loads(reply.text)["a"]) > 1


def test_openapi_schema_is_followed(client: genai.Client) -> None:
    schema = {"type": "OBJECT", "required": ["a"], "properties": {
        "a": {"type": "STRING", "enum": ["x"], "nullable": True}}}  # fmt: skip
    config = {"response_mime_type": "application/json", "response_schema": schema}
    answers = {
        client.models.generate_content(model=MODEL, contents=f"{n}", config=config).text
        for n in range(20)
    }
    assert answers == {'{"a":"x"}', '{"a":null}'}


def test_same_request_gets_the_same_answer_and_is_billed_each_time(
    emulator: Emulator, client: genai.Client
) -> None:
    assert ask(client).text == ask(client).text
    assert list(emulator.bill.by_body.values()) == [2]


def test_repeated_prefix_is_cached(emulator: Emulator, client: genai.Client) -> None:
    rules = "The rules. " * 600
    first, second = (ask(client, row, system_instruction=rules) for row in ("row 1", "row 2"))
    assert first.usage_metadata.cached_content_token_count is None
    assert second.usage_metadata.cached_content_token_count >= 1024
    emulator.advance(301)
    third = ask(client, "row 3", system_instruction=rules)
    assert third.usage_metadata.cached_content_token_count is None


def test_answer_is_cut_at_max_output_tokens(client: genai.Client) -> None:
    reply = ask(client, max_output_tokens=2)
    assert reply.candidates[0].finish_reason.name == "MAX_TOKENS"
    assert reply.usage_metadata.candidates_token_count == 2


def test_models_are_listed(client: genai.Client) -> None:
    assert f"models/{MODEL}" in [model.name for model in client.models.list()]
    assert client.models.get(model=MODEL).input_token_limit > 1_000_000


CONTENTS = [{"role": "user", "parts": [{"text": "hi"}]}]


def config(**fields: Any) -> dict[str, Any]:
    return {"contents": CONTENTS, "generationConfig": fields}


def with_schema(schema: Any) -> dict[str, Any]:
    return config(responseMimeType="application/json", responseJsonSchema=schema)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "contents is not specified"),
        ({"contents": []}, "contents is not specified"),
        ({"contents": CONTENTS, "messages": []}, 'Unknown name "messages": Cannot find field'),
        ({"contents": [{"role": "system", "parts": [{"text": "x"}]}]}, "valid role"),
        ({"contents": [{"role": "user", "parts": []}]}, "must not be empty"),
        ({"contents": [{"role": "user", "parts": [{"text": ""}]}]}, "parts[0].data"),
        ({"contents": [{"role": "user", "parts": [{"words": "x"}]}]}, 'Unknown name "words"'),
        ({"contents": [{"role": "user", "parts": [{"inlineData": {}}]}]}, "text only"),
        ({"contents": CONTENTS, "systemInstruction": {"parts": []}}, "system_instruction"),
        (config(max_tokens=5), "Unknown name \"max_tokens\" at 'generation_config'"),
        (config(maxOutputTokens=0), "max_output_tokens"),
        (config(maxOutputTokens=100_000), "max_output_tokens"),
        (config(maxOutputTokens="5"), "Invalid value at 'generation_config.max_output_tokens'"),
        (config(temperature=2.5), "temperature must be in the range [0, 2]"),
        (config(topK=0), "top_k"),
        (config(candidateCount=2), "candidate_count"),
        (config(stopSequences=["a"] * 6), "at most 5"),
        (config(stopSequences=[""]), "stop_sequences"),
        (config(thinkingConfig={"thinkingBudget": 1, "thinkingLevel": "LOW"}), "only one"),
        (config(thinkingConfig={"thinkingBudget": -2}), "thinking budget"),
        (config(thinkingConfig={"thinkingLevel": "HUGE"}), "thinking_level"),
        (config(thinkingConfig={"effort": 1}), "generation_config.thinking_config"),
        (config(responseMimeType="text/html"), "mime type"),
        (config(responseJsonSchema=SCHEMA), "response_mime_type"),
        (config(responseMimeType="application/json", responseJsonSchema={}, responseSchema={}),
         "only one of"),
        (with_schema([]), "response_json_schema"),
        (with_schema({"type": "text"}), "unknown type 'text'"),
        (with_schema({"type": "object", "required": ["a"]}), "required[0]"),
        (with_schema({"properties": {"a": {"enum": []}}}), "properties[a].enum"),
        (with_schema({"$ref": "#/$defs/a", "type": "string"}), "$ref"),
        (config(responseMimeType="application/json", responseSchema={"additionalProperties": 1}),
         'Unknown name "additionalProperties"'),
    ],
)  # fmt: skip
def test_bad_request_is_refused_as_gemini_would_and_not_billed(
    emulator: Emulator, body: Any, told: str
) -> None:
    reply = post(emulator, body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["status"]) == (400, 400, "INVALID_ARGUMENT")
    assert told in error["message"]
    assert emulator.bill.charges == []


def test_fields_may_be_written_in_either_case(emulator: Emulator) -> None:
    body = {
        "contents": CONTENTS,
        "system_instruction": {"parts": [{"text": "be brief"}]},
        "generation_config": {"max_output_tokens": 2, "response_mime_type": "text/plain"},
    }
    assert post(emulator, body).json()["candidates"][0]["finishReason"] == "MAX_TOKENS"


def test_unknown_model_is_not_found(client: genai.Client) -> None:
    with pytest.raises(errors.ClientError) as raised:
        client.models.generate_content(model="gemini-0", contents="hi")
    assert (raised.value.code, raised.value.status) == (404, "NOT_FOUND")


def test_key_is_demanded(emulator: Emulator) -> None:
    url = f"{emulator.google_base_url}/v1/batches"
    reply = httpx2.get(url)
    assert (reply.status_code, reply.json()["error"]["status"]) == (403, "PERMISSION_DENIED")
    assert httpx2.get(f"{url}?key=any").status_code == 200
    assert httpx2.get(url, headers=KEY).status_code == 200


# --- misbehaviour of single requests --------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "code", "status"),
    [
        ("rate_limit", 429, "RESOURCE_EXHAUSTED"),
        ("no_credit", 429, "RESOURCE_EXHAUSTED"),
        ("server_error", 500, "INTERNAL"),
        ("unavailable", 503, "UNAVAILABLE"),
        ("overloaded", 503, "UNAVAILABLE"),
        ("bad_key", 400, "INVALID_ARGUMENT"),
        ("rejected", 400, "INVALID_ARGUMENT"),
        ("too_long", 400, "INVALID_ARGUMENT"),
    ],
)
def test_error_on_demand_is_not_billed_and_the_next_request_is_answered(
    emulator: Emulator, client: genai.Client, behaviour: str, code: int, status: str
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour, count=1))
    with pytest.raises(errors.APIError) as raised:
        ask(client)
    assert (raised.value.code, raised.value.status) == (code, status)
    assert emulator.bill.charges == []
    assert ask(client).text


def test_error_holds_the_details_that_google_gives(
    emulator: Emulator, client: genai.Client
) -> None:
    emulator.misbehave(
        Rule(behaviour="rate_limit", retry_after=1.5, count=1), Rule(behaviour="bad_key")
    )
    found = []
    for _ in range(2):
        with pytest.raises(errors.ClientError) as raised:
            ask(client)
        found += raised.value.details["error"]["details"]
    assert found[0]["@type"] == "type.googleapis.com/google.rpc.RetryInfo"
    assert found[0]["retryDelay"] == "1.5s"
    assert found[1]["reason"] == "API_KEY_INVALID"


@pytest.mark.parametrize(
    ("behaviour", "reason", "starts"),
    [
        ("content_filter", "SAFETY", None),
        ("length", "MAX_TOKENS", "{"),
        ("empty", "STOP", None),
        ("invalid_json", "STOP", "Sure!"),
        ("wrong_shape", "STOP", '{"unexpected"'),
    ],
)
def test_useless_answer_on_demand_is_billed(
    emulator: Emulator, client: genai.Client, behaviour: str, reason: str, starts: str | None
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour))
    reply = ask(client)
    assert reply.candidates[0].finish_reason.name == reason
    assert reply.text.startswith(starts) if starts else not reply.text
    assert len(emulator.bill.charges) == 1


def test_refusal_on_demand_blocks_the_prompt(emulator: Emulator, client: genai.Client) -> None:
    emulator.misbehave(Rule(behaviour="refusal"))
    reply = ask(client)
    assert reply.candidates is None
    assert reply.prompt_feedback.block_reason.name == "PROHIBITED_CONTENT"
    assert len(emulator.bill.charges) == 1


# --- batches --------------------------------------------------------------------------------------


def test_inline_batch_goes_through_its_states(emulator: Emulator, client: genai.Client) -> None:
    batch = submit(client, ["a", "b", "c", "d"])
    assert state(client, batch) == "PENDING"
    emulator.advance(stage="in_progress", fraction=0.5)
    assert state(client, batch) == "RUNNING"
    document = raw(emulator, batch)
    assert document["metadata"]["batchStats"] == {"requestCount": "4", "pendingRequestCount": "2"}
    assert "done" not in document
    assert emulator.bill.charges == []
    emulator.finish()
    done = client.batches.get(name=batch.name)
    assert done.state.name == "JOB_STATE_SUCCEEDED"
    found = done.dest.inlined_responses
    assert [each.metadata["key"] for each in found] == ["a", "b", "c", "d"]
    assert all(each.response.text for each in found)
    assert raw(emulator, batch)["metadata"]["batchStats"] == {
        "requestCount": "4",
        "successfulRequestCount": "4",
    }
    assert emulator.bill.by_custom_id == dict.fromkeys("abcd", 1)


def test_file_batch_writes_a_file(emulator: Emulator, client: genai.Client, tmp_path: Path) -> None:
    batch = submit_file(client, tmp_path, lines(["a", "b"]))
    emulator.finish()
    done = client.batches.get(name=batch.name)
    content = client.files.download(file=done.dest.file_name)
    results = [json.loads(line) for line in content.split(b"\n") if line]
    assert [each["key"] for each in results] == ["a", "b"]
    assert all(each["response"]["candidates"] for each in results)
    emulator.advance(48 * 3600)
    with pytest.raises(errors.ClientError, match="may not exist"):
        client.files.download(file=done.dest.file_name)


def test_large_upload_comes_in_parts(
    emulator: Emulator, client: genai.Client, tmp_path: Path
) -> None:
    file = tmp_path / "large.jsonl"
    file.write_bytes(b"x" * 9_000_000)  # the SDK sends 8 MiB at a time
    uploaded = client.files.upload(file=str(file), config={"mime_type": "jsonl"})
    assert uploaded.size_bytes == 9_000_000
    assert [call.operation for call in emulator.calls] == ["google.files.upload"] * 3
    assert client.files.get(name=uploaded.name).expiration_time is not None
    with pytest.raises(errors.ClientError, match="cannot be downloaded"):
        client.files.download(file=uploaded.name)
    client.files.delete(name=uploaded.name)
    with pytest.raises(errors.ClientError, match="may not exist"):
        client.files.get(name=uploaded.name)


@pytest.mark.parametrize("content", ["", "{\n", '{"key": "a"}\n', '{"key": "a", "body": {}}\n'])
def test_malformed_file_fails_after_creation(
    emulator: Emulator, client: genai.Client, tmp_path: Path, content: str
) -> None:
    batch = submit_file(client, tmp_path, content)
    assert state(client, batch) == "PENDING"
    emulator.finish()
    assert state(client, batch) == "FAILED"
    assert raw(emulator, batch)["error"]["code"] == 3


@pytest.mark.parametrize(
    ("batch", "status", "told"),
    [
        (None, 400, "batch"),
        ({"inputConfig": {"fileName": "files/x"}}, 400, "display_name"),
        ({"displayName": "d", "inputConfig": {}}, 400, "input_config"),
        ({"displayName": "d", "inputConfig": {"fileName": "files/x"}}, 403, "may not exist"),
        ({"displayName": "d", "inputConfig": {"requests": {"requests": []}}}, 400, "empty"),
        ({"displayName": "d", "inputConfig": {"requests": {"requests": [{"custom_id": "a"}]}}},
         400, "custom_id"),
        ({"displayName": "d", "inputConfig": {"requests": {"requests": [
            {"request": {"contents": CONTENTS, "generationConfig": {"max_tokens": 1}}}]}}},
         400, "max_tokens"),
    ],
)  # fmt: skip
def test_malformed_batch_is_refused_at_creation(
    emulator: Emulator, batch: Any, status: int, told: str
) -> None:
    reply = post(emulator, {"batch": batch}, f"models/{MODEL}:batchGenerateContent")
    assert reply.status_code == status
    assert told in reply.json()["error"]["message"]
    assert httpx2.get(f"{emulator.google_base_url}/v1/batches", headers=KEY).json() == {
        "operations": []
    }


def test_wrong_value_is_told_of_its_line_alone(emulator: Emulator) -> None:
    requests = [
        {"request": {"contents": CONTENTS, "generationConfig": {"temperature": value}}}
        for value in (1, 3)
    ]
    body = {"batch": {"displayName": "d", "inputConfig": {"requests": {"requests": requests}}}}
    made = post(emulator, body, f"models/{MODEL}:batchGenerateContent").json()
    emulator.finish()
    done = httpx2.get(f"{emulator.google_base_url}/v1/{made['name']}", headers=KEY).json()
    first, second = done["response"]["inlinedResponses"]["inlinedResponses"]
    assert "response" in first
    assert second["error"]["code"] == 3
    assert done["metadata"]["batchStats"]["failedRequestCount"] == "1"


@pytest.mark.parametrize(
    ("limits", "quota"),
    [
        (GoogleLimits(concurrent_batches=1), "ConcurrentBatches"),
        (GoogleLimits(enqueued_tokens=20), "BatchEnqueuedTokens"),
    ],
)
def test_queue_that_is_full_refuses_creation_until_a_batch_ends(
    limits: GoogleLimits, quota: str
) -> None:
    with Emulator(google=limits) as emulator, sdk(emulator) as client:
        submit(client, ["a"])
        with pytest.raises(errors.ClientError) as raised:
            submit(client, ["b"])
        assert raised.value.code == 429
        assert quota in str(raised.value.details)
        emulator.finish()
        submit(client, ["b"])


def test_batches_are_listed_newest_first_in_pages(client: genai.Client) -> None:
    names = [submit(client, ["a"], f"night {n}").name for n in range(5)]
    listed = [batch.name for batch in client.batches.list(config={"page_size": 2})]
    assert listed == names[::-1]


def test_expired_batch_gives_nothing_and_is_not_billed(
    emulator: Emulator, client: genai.Client
) -> None:
    emulator.misbehave(Rule(behaviour="expire", fraction=0.5))
    batch = submit(client, ["a", "b"])
    emulator.advance(47 * 3600)
    assert state(client, batch) == "RUNNING"
    emulator.advance(3600)
    assert state(client, batch) == "EXPIRED"
    document = raw(emulator, batch)
    assert "response" not in document and "output" not in document["metadata"]
    assert emulator.bill.charges == []


def test_cancelled_batch_gives_nothing_and_bills_what_it_had_done(
    emulator: Emulator, client: genai.Client
) -> None:
    batch = submit(client, ["a", "b", "c", "d"])
    emulator.advance(stage="in_progress", fraction=0.5)
    client.batches.cancel(name=batch.name)
    assert state(client, batch) == "RUNNING"
    emulator.finish()
    assert state(client, batch) == "CANCELLED"
    document = raw(emulator, batch)
    assert document["error"]["code"] == 1 and "response" not in document
    assert len(emulator.bill.charges) == 2
    with pytest.raises(errors.ClientError) as raised:
        client.batches.cancel(name=batch.name)
    assert raised.value.status == "FAILED_PRECONDITION"


def test_deleted_batch_is_gone(client: genai.Client) -> None:
    batch = submit(client, ["a"])
    client.batches.delete(name=batch.name)
    with pytest.raises(errors.ClientError, match="not found"):
        client.batches.get(name=batch.name)


def test_batch_with_missing_lines_has_succeeded_in_part(
    emulator: Emulator, client: genai.Client
) -> None:
    emulator.misbehave(Rule(behaviour="missing", custom_id="b"))
    batch = submit(client, ["a", "b"])
    emulator.finish()
    assert raw(emulator, batch)["metadata"]["state"] == "BATCH_STATE_PARTIALLY_SUCCEEDED"
    assert len(emulator.bill.charges) == 2


@pytest.mark.parametrize(("behaviour", "billed"), [("drop", 0), ("lost_reply", 1)])
def test_lost_creation_makes_a_batch_only_where_it_was_handled(
    emulator: Emulator, client: genai.Client, behaviour: str, billed: int
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour, endpoint="google.batches.create"))
    # The class depends on the HTTP client that the SDK has found.
    with pytest.raises(Exception, match="disconnected"):
        submit(client, ["a"])
    emulator.finish()
    assert len(emulator.bill.charges) == billed
