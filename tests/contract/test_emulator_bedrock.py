"""The rehearsal server as boto3 sees it, over a real socket, with a real S3 server beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import jsonschema_rs
import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto")

import boto3
import httpx2
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from batchsql.emulate import BedrockLimits, Emulator, Rule
from batchsql.emulate.s3 import serve_s3

MODEL = "amazon.nova-lite-v1:0"
ROLE = "arn:aws:iam::123456789012:role/batch"
BUCKET = "rehearsal-bucket"
INPUT, OUTPUT = f"s3://{BUCKET}/in/rows.jsonl", f"s3://{BUCKET}/out/"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "category": {"enum": ["billing", "bug", "other"]},
        "urgency": {"type": "integer", "description": "minimum: 1; maximum: 5"},
    },
    "required": ["category", "urgency"],
    "additionalProperties": False,
}
LIMITS = BedrockLimits(batch_minimum=2, batch_requests=6, queued_jobs=3)


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with serve_s3() as url:
        yield url


def client(service: str, url: str, **options: Any) -> Any:
    return boto3.client(
        service, endpoint_url=url, region_name="eu-central-1", aws_access_key_id="AKIDOFTHETEST",
        aws_secret_access_key="secret",
        config=Config(retries={"total_max_attempts": 1}, read_timeout=20, **options),
    )  # fmt: skip


@pytest.fixture
def bucket(s3_url: str) -> Any:
    resource = boto3.resource(
        "s3", endpoint_url=s3_url, region_name="us-east-1", aws_access_key_id="x",
        aws_secret_access_key="x",
    )  # fmt: skip
    found = resource.Bucket(BUCKET)
    found.create()
    found.objects.all().delete()
    return found


@pytest.fixture
def emulator(s3_url: str, bucket: Any) -> Iterator[Emulator]:
    with Emulator(s3_endpoint_url=s3_url, bedrock=LIMITS) as started:
        yield started


@pytest.fixture
def runtime(emulator: Emulator) -> Any:
    return client("bedrock-runtime", emulator.bedrock_base_url)


@pytest.fixture
def control(emulator: Emulator) -> Any:
    return client("bedrock", emulator.bedrock_base_url)


def with_schema(schema: Any) -> dict[str, Any]:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    structure = {"jsonSchema": {"schema": text}}
    return {"outputConfig": {"textFormat": {"type": "json_schema", "structure": structure}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"text": text}]}


def body(text: str = "hello", **more: Any) -> dict[str, Any]:
    config = {"maxTokens": 200}
    return {"messages": [user(text)], "inferenceConfig": config, **with_schema(SCHEMA), **more}


def ask(runtime: Any, text: str = "hello", **more: Any) -> Any:
    return runtime.converse(**{"modelId": MODEL, **body(text), **more})


def records(count: int) -> bytes:
    lines = [{"recordId": f"r{n}", "modelInput": body(f"row {n}")} for n in range(count)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def submit(control: Any, bucket: Any, content: bytes | int = 4, **more: Any) -> str:
    content = records(content) if isinstance(content, int) else content
    bucket.put_object(Key="in/rows.jsonl", Body=content)
    arn: str = control.create_model_invocation_job(**{**job(), **more})["jobArn"]
    return arn


def job(name: str = "job-1") -> dict[str, Any]:
    return {
        "jobName": name,
        "roleArn": ROLE,
        "modelId": MODEL,
        "modelInvocationType": "Converse",
        "inputDataConfig": {"s3InputDataConfig": {"s3Uri": INPUT}},
        "outputDataConfig": {"s3OutputDataConfig": {"s3Uri": OUTPUT}},
    }


def get(control: Any, arn: str) -> dict[str, Any]:
    found: dict[str, Any] = control.get_model_invocation_job(jobIdentifier=arn)
    return found


def written(bucket: Any, arn: str) -> dict[str, bytes]:
    folder = f"out/{arn.rpartition('/')[2]}/"
    return {
        each.key.removeprefix(folder): each.get()["Body"].read()
        for each in bucket.objects.filter(Prefix=folder)
    }


def results(bucket: Any, arn: str) -> list[dict[str, Any]]:
    content = written(bucket, arn).get("rows.jsonl.out", b"")
    return [json.loads(line) for line in content.split(b"\n") if line]


def refused(code: str, told: str, work: Any) -> None:
    with pytest.raises(ClientError) as raised:
        work()
    assert raised.value.response["Error"]["Code"] == code
    assert told in raised.value.response["Error"]["Message"]


# --- converse -------------------------------------------------------------------------------------


def test_answer_fits_the_schema_with_the_bounds_that_the_description_tells(runtime: Any) -> None:
    for row in range(20):
        reply = ask(runtime, f"row {row}")
        answer = json.loads(reply["output"]["message"]["content"][0]["text"])
        jsonschema_rs.validate(SCHEMA, answer)
        assert 1 <= answer["urgency"] <= 5
    assert reply["stopReason"] == "end_turn"
    usage = reply["usage"]
    assert usage["inputTokens"] + usage["outputTokens"] == usage["totalTokens"] > 0


def test_same_request_gets_the_same_answer_and_is_billed_each_time(
    emulator: Emulator, runtime: Any
) -> None:
    first, second = ask(runtime)["output"], ask(runtime)["output"]
    assert first == second
    assert list(emulator.bill.by_body.values()) == [2]


def test_access_key_is_recorded_and_the_service_is_checked(
    emulator: Emulator, runtime: Any
) -> None:
    ask(runtime)
    assert "Credential=AKIDOFTHETEST/" in (emulator.calls[-1].authorization or "")
    url = f"{emulator.bedrock_base_url}/model-invocation-jobs"
    for authorization, status in (
        (None, 403),
        ("AWS4-HMAC-SHA256 Credential=AK/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
         f"Signature={'0' * 64}", 403),
        ("AWS4-HMAC-SHA256 Credential=AK/20260101/us-east-1/bedrock/aws4_request, "
         f"SignedHeaders=host, Signature={'0' * 64}", 200),
        ("Bearer bedrock-api-key-1", 200),
    ):  # fmt: skip
        headers = {} if authorization is None else {"authorization": authorization}
        assert httpx2.get(url, headers=headers).status_code == status


@pytest.mark.parametrize(
    "name",
    [
        MODEL,
        f"eu.{MODEL}",
        f"arn:aws:bedrock:eu-central-1::foundation-model/{MODEL}",
        f"arn:aws:bedrock:eu-central-1:123456789012:inference-profile/eu.{MODEL}",
    ],
)
def test_model_is_known_by_id_profile_and_arn(runtime: Any, name: str) -> None:
    assert ask(runtime, modelId=name)["stopReason"] == "end_turn"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"modelId": "nobody.none-v1:0"}, "model identifier is invalid"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"text": "x"}]}]}, "start with a user"),
        ({"messages": [user("x"), user("y")]}, "alternate"),
        ({"messages": [{"role": "user", "content": []}]}, "content field"),
        ({"messages": [user(" ")]}, "blank"),
        ({"system": [{"text": " "}]}, "blank"),
        ({"inferenceConfig": {"temperature": 1.5}}, "inferenceConfig.temperature"),
        (with_schema("nonsense"), "not a JSON object"),
        (with_schema({"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}},
                      "additionalProperties": False}), "maxLength"),
        (with_schema({"type": "object", "properties": {}}), "additionalProperties"),
        ({"messages": [user("long " * 200_000)]}, "Input is too long"),
    ],
)  # fmt: skip
def test_bad_request_is_refused_as_bedrock_would_and_not_billed(
    emulator: Emulator, changes: dict[str, Any], told: str
) -> None:
    # boto3 checks some of it itself.
    runtime = client("bedrock-runtime", emulator.bedrock_base_url, parameter_validation=False)
    refused("ValidationException", told, lambda: ask(runtime, **changes))
    assert emulator.bill.charges == []


def test_answer_is_cut_at_max_tokens(runtime: Any) -> None:
    reply = ask(runtime, inferenceConfig={"maxTokens": 2})
    assert (reply["stopReason"], reply["usage"]["outputTokens"]) == ("max_tokens", 2)


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        ("rate_limit", "ThrottlingException"),
        ("overloaded", "ModelNotReadyException"),
        ("server_error", "InternalServerException"),
        ("unavailable", "ServiceUnavailableException"),
        ("bad_key", "UnrecognizedClientException"),
        ("no_credit", "AccessDeniedException"),
        ("rejected", "ValidationException"),
        ("too_long", "ValidationException"),
    ],
)
def test_error_on_demand_is_not_billed_and_the_next_request_is_answered(
    emulator: Emulator, runtime: Any, behaviour: str, code: str
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour, count=1, retry_after=2))
    with pytest.raises(ClientError) as raised:
        ask(runtime)
    assert raised.value.response["Error"]["Code"] == code
    headers = raised.value.response["ResponseMetadata"]["HTTPHeaders"]
    is_late = behaviour in ("rejected", "too_long")
    assert headers.get("retry-after") == (None if is_late else "2")
    assert emulator.bill.charges == []
    assert ask(runtime)["stopReason"] == "end_turn"


@pytest.mark.parametrize(("behaviour", "billed"), [("drop", 0), ("lost_reply", 1)])
def test_dropped_connection_is_billed_only_where_the_request_was_answered(
    emulator: Emulator, runtime: Any, behaviour: str, billed: int
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour))
    with pytest.raises(BotoCoreError):
        ask(runtime)
    assert len(emulator.bill.charges) == billed


@pytest.mark.parametrize(
    ("behaviour", "stop_reason", "starts"),
    [
        ("refusal", "end_turn", "I'm sorry"),
        ("content_filter", "content_filtered", None),
        ("length", "max_tokens", "{"),
        ("empty", "end_turn", None),
        ("invalid_json", "end_turn", "Sure!"),
        ("wrong_shape", "end_turn", '{"unexpected"'),
    ],
)
def test_useless_answer_on_demand_is_billed(
    emulator: Emulator, runtime: Any, behaviour: str, stop_reason: str, starts: str | None
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour))
    reply = ask(runtime)
    content = reply["output"]["message"]["content"]
    assert reply["stopReason"] == stop_reason
    assert content[0]["text"].startswith(starts) if starts else content == []
    assert len(emulator.bill.charges) == 1


# --- jobs -----------------------------------------------------------------------------------------


def test_job_goes_through_its_statuses_and_writes_its_output(
    emulator: Emulator, control: Any, bucket: Any
) -> None:
    arn = submit(control, bucket)
    assert arn.startswith("arn:aws:bedrock:eu-central-1:123456789012:model-invocation-job/")
    seen = [get(control, arn)["status"]]
    for _ in range(2):
        emulator.advance(7)  # a third of the twenty seconds that validation takes
        seen.append(get(control, arn)["status"])
    emulator.advance(stage="in_progress", fraction=0.5)
    found = get(control, arn)
    assert [*seen, found["status"]] == ["Submitted", "Validating", "Scheduled", "InProgress"]
    assert (found["totalRecordCount"], found["processedRecordCount"]) == (4, 2)
    assert written(bucket, arn) == {}
    emulator.finish()
    found = get(control, arn)
    assert (found["status"], found["successRecordCount"]) == ("Completed", 4)
    assert found["jobExpirationTime"] - found["submitTime"] == timedelta(hours=24)
    assert found["submitTime"] <= found["endTime"]
    for number, line in enumerate(results(bucket, arn)):
        assert line["recordId"] == f"r{number}"
        assert line["modelInput"] == body(f"row {number}")
        text = line["modelOutput"]["output"]["message"]["content"][0]["text"]
        jsonschema_rs.validate(SCHEMA, json.loads(text))
    manifest = json.loads(written(bucket, arn)["manifest.json.out"])
    assert (manifest["totalRecordCount"], manifest["errorRecordCount"]) == (4, 0)
    assert manifest["outputTokenCount"] == sum(c.output_tokens for c in emulator.bill.charges)
    assert emulator.bill.by_custom_id == {f"r{n}": 1 for n in range(4)}


def test_files_below_a_folder_are_one_job(emulator: Emulator, control: Any, bucket: Any) -> None:
    first, second = records(1), records(2).split(b"\n")[1]
    bucket.put_object(Key="many/a.jsonl", Body=first)
    bucket.put_object(Key="many/b.jsonl", Body=second)
    bucket.put_object(Key="many/readme.txt", Body=b"no line")
    place = {"inputDataConfig": {"s3InputDataConfig": {"s3Uri": f"s3://{BUCKET}/many/"}}}
    arn = submit(control, bucket, **place)
    emulator.finish()
    assert set(written(bucket, arn)) == {"a.jsonl.out", "b.jsonl.out", "manifest.json.out"}


def test_same_token_makes_one_job(control: Any, bucket: Any) -> None:
    first = submit(control, bucket, clientRequestToken="token-1")
    assert submit(control, bucket, clientRequestToken="token-1") == first
    other = {**job("job-2"), "clientRequestToken": "token-1"}
    refused("ConflictException", "token", lambda: submit(control, bucket, **other))
    refused("ConflictException", "name", lambda: submit(control, bucket))
    assert len(control.list_model_invocation_jobs()["invocationJobSummaries"]) == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"jobName": "a b"}, "jobName"),
        ({"jobName": "x" * 64}, "jobName"),
        ({"roleArn": "role"}, "roleArn"),
        ({"modelId": "nobody.none-v1:0"}, "model identifier"),
        ({"modelInvocationType": "InvokeModel"}, "Converse"),
        ({"timeoutDurationInHours": 23}, "timeoutDurationInHours"),
        ({"clientRequestToken": "a_b"}, "clientRequestToken"),
        ({"inputDataConfig": {"s3InputDataConfig": {"s3Uri": "rows"}}}, "s3Uri"),
        ({"outputDataConfig": {"s3OutputDataConfig": {"s3Uri": "s3://A/b"}}}, "s3Uri"),
    ],
)
def test_bad_creation_makes_no_job(
    emulator: Emulator, bucket: Any, changes: dict[str, Any], told: str
) -> None:
    control = client("bedrock", emulator.bedrock_base_url, parameter_validation=False)
    refused("ValidationException", told, lambda: submit(control, bucket, **changes))
    assert control.list_model_invocation_jobs()["invocationJobSummaries"] == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (1, "less records (1) than the required minimum of: 2"),
        (7, "more records (7)"),
        (b"{\n", "line 1: The record is not valid JSON"),
        (records(2) + b"[]\n", "line 3: The record has no modelInput"),
        (b'{"modelInput":{}}\n', "no recordId"),
        (records(2) * 2, "r0 is given twice"),
    ],
)
def test_input_that_is_refused_fails_the_job_later(
    emulator: Emulator, control: Any, bucket: Any, content: bytes | int, told: str
) -> None:
    arn = submit(control, bucket, content)
    assert get(control, arn)["status"] == "Submitted"
    emulator.advance(stage="in_progress")
    found = get(control, arn)
    assert (found["status"], told in found["message"]) == ("Failed", True)
    emulator.finish()
    assert (written(bucket, arn), emulator.bill.charges) == ({}, [])


def test_input_or_bucket_that_is_not_there_fails_the_job(
    emulator: Emulator, control: Any, bucket: Any
) -> None:
    for number, (side, uri, told) in enumerate(
        (("input", f"s3://{BUCKET}/none/", "no file"), ("input", "s3://not-there/x", "not exist"),
         ("output", "s3://not-there/x", "could not be written"))
    ):  # fmt: skip
        inner = {f"s3{side.capitalize()}DataConfig": {"s3Uri": uri}}
        arn = submit(control, bucket, **job(f"j{number}") | {f"{side}DataConfig": inner})
        emulator.finish()
        found = get(control, arn)
        assert (found["status"], told in found["message"]) == ("Failed", True)


def test_record_is_checked_when_it_is_its_turn(
    emulator: Emulator, control: Any, bucket: Any
) -> None:
    bad = [
        {"recordId": "tools", "modelInput": body(toolConfig={"tools": []})},
        {"recordId": "model", "modelInput": body(modelId=MODEL)},
        {"recordId": "good", "modelInput": body()},
    ]
    arn = submit(control, bucket, "\n".join(map(json.dumps, bad)).encode())
    emulator.finish()
    assert get(control, arn)["errorRecordCount"] == 2
    errors = {line["recordId"]: line.get("error", {}) for line in results(bucket, arn)}
    assert [errors[name].get("errorCode") for name in ("tools", "model", "good")] == [
        400, 400, None,
    ]  # fmt: skip
    assert "toolConfig" in errors["tools"]["errorMessage"]
    assert len(emulator.bill.charges) == 1


def test_stopped_job_writes_what_it_had(emulator: Emulator, control: Any, bucket: Any) -> None:
    arn = submit(control, bucket)
    emulator.advance(stage="in_progress", fraction=0.5)
    control.stop_model_invocation_job(jobIdentifier=arn)
    assert get(control, arn)["status"] == "Stopping"
    emulator.finish()
    assert get(control, arn)["status"] == "Stopped"
    assert len(results(bucket, arn)) == len(emulator.bill.charges) == 2
    refused("ConflictException", "Stopped",
            lambda: control.stop_model_invocation_job(jobIdentifier=arn))  # fmt: skip


@pytest.mark.parametrize(
    ("fraction", "status", "answered"), [(0.5, "PartiallyCompleted", 2), (0, "Expired", 0)]
)
def test_job_that_expires_writes_what_it_had(
    emulator: Emulator, control: Any, bucket: Any, fraction: float, status: str, answered: int
) -> None:
    emulator.misbehave(Rule(behaviour="expire", fraction=fraction))
    arn = submit(control, bucket)
    emulator.advance(24 * 3600 - 60)
    assert get(control, arn)["status"] == "InProgress"
    emulator.advance(60)
    assert get(control, arn)["status"] == status
    assert len(results(bucket, arn)) == len(emulator.bill.charges) == answered


def test_batch_misbehaviour(emulator: Emulator, control: Any, bucket: Any) -> None:
    emulator.misbehave(
        Rule(behaviour="fail_validation", code="Not today.", count=1),
        Rule(behaviour="errors_only", count=1),
        Rule(behaviour="shuffle", count=1),
    )

    def create(name: str) -> Any:
        return control.create_model_invocation_job(**job(name))

    failed, errors, shuffled = (submit(control, bucket, 6, jobName=f"j{n}") for n in range(3))
    refused("ServiceQuotaExceededException", "quota", lambda: create("j3"))
    emulator.finish()
    assert get(control, failed)["message"] == "Not today."
    assert {"error" in line for line in results(bucket, errors)} == {True}
    names = [line["recordId"] for line in results(bucket, shuffled)]
    assert (sorted(names), names == sorted(names)) == ([f"r{n}" for n in range(6)], False)
    emulator.misbehave(Rule(behaviour="queue_full", count=1), Rule(behaviour="cancel_hangs"))
    refused("ServiceQuotaExceededException", "quota", lambda: create("j4"))
    hanging = submit(control, bucket, jobName="j5")
    control.stop_model_invocation_job(jobIdentifier=hanging)
    emulator.advance(3600)
    assert get(control, hanging)["status"] == "Stopping"


@pytest.mark.parametrize(
    ("behaviour", "lines", "billed"),
    [("missing", 0, 1), ("duplicate", 2, 1), ("error_in_output", 1, 0)],
)
def test_result_misbehaviour(
    emulator: Emulator, control: Any, bucket: Any, behaviour: str, lines: int, billed: int
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour, custom_id="r1", status=503))
    arn = submit(control, bucket)
    emulator.finish()
    found = [line for line in results(bucket, arn) if line["recordId"] == "r1"]
    assert len(found) == lines
    assert emulator.bill.by_custom_id.get("r1", 0) == billed
    if behaviour == "error_in_output":
        assert found[0]["error"]["errorCode"] == 503


def test_list_filters_sorts_and_goes_on(emulator: Emulator, control: Any, bucket: Any) -> None:
    arns = []
    for name in ("alpha-1", "beta-1", "alpha-2"):
        arns.append(submit(control, bucket, jobName=name))
        emulator.advance(10)

    def listed(**asked: Any) -> list[str]:
        found = control.list_model_invocation_jobs(**asked)["invocationJobSummaries"]
        return [each["jobName"] for each in found]

    assert listed(sortOrder="Ascending") == ["alpha-1", "beta-1", "alpha-2"]
    assert listed(nameContains="alpha") == ["alpha-2", "alpha-1"]
    assert listed(submitTimeAfter=get(control, arns[1])["submitTime"]) == ["alpha-2", "beta-1"]
    assert listed(submitTimeBefore=get(control, arns[1])["submitTime"]) == ["alpha-1"]
    emulator.advance(stage="end", batch_id=arns[1])
    assert listed(statusEquals="Completed") == ["beta-1"]
    page = control.list_model_invocation_jobs(maxResults=2)
    rest = control.list_model_invocation_jobs(maxResults=2, nextToken=page["nextToken"])
    assert [each["jobArn"] for each in rest["invocationJobSummaries"]] == arns[:1]
    assert "nextToken" not in rest
    refused("ValidationException", "nextToken",
            lambda: control.list_model_invocation_jobs(nextToken="nonsense"))  # fmt: skip


def test_unknown_job_is_not_found(control: Any) -> None:
    refused("ResourceNotFoundException", "abcdefghijkl", lambda: get(control, "abcdefghijkl"))
    refused("ValidationException", "identifier", lambda: get(control, "x"))


def test_server_without_s3_has_no_jobs(s3_url: str, bucket: Any) -> None:
    with Emulator() as emulator:
        control = client("bedrock", emulator.bedrock_base_url)
        refused("ValidationException", "S3", lambda: submit(control, bucket))
        assert "AWS_ENDPOINT_URL_S3" not in emulator.environment


def test_environment_sends_boto3_here(
    emulator: Emulator, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in emulator.environment.items():
        monkeypatch.setenv(name, value)
    assert ask(boto3.client("bedrock-runtime"))["stopReason"] == "end_turn"
    assert boto3.client("bedrock").list_model_invocation_jobs()["invocationJobSummaries"] == []
    boto3.client("s3").put_object(Bucket=BUCKET, Key="k", Body=b"")
    assert [each.key for each in bucket.objects.all()] == ["k"]


def test_many_requests_at_once_are_throttled() -> None:
    with Emulator(bedrock=BedrockLimits(concurrent_requests=0)) as emulator:
        runtime = client("bedrock-runtime", emulator.bedrock_base_url)
        refused("ThrottlingException", "Too many", lambda: ask(runtime))
