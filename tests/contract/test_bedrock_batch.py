"""Bedrock's batch jobs, over a real socket, against the rehearsal server and a real S3 server."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto")

import boto3

from batchsql.backends import bedrock_batch, registry
from batchsql.backends.batch import (
    BatchFault,
    BatchGoneError,
    BatchLine,
    BatchState,
    MaybeCreatedError,
    NotCreatedError,
    ProviderBusyError,
    ShardLabel,
    custom_id,
    read_clock,
)
from batchsql.backends.bedrock_batch import BedrockBatch
from batchsql.backends.bedrock_wire import fault_of, parse_line
from batchsql.declare.returns import parse_returns
from batchsql.emulate import BedrockLimits, Emulator, Rule
from batchsql.emulate.s3 import serve_s3
from batchsql.errors import BackendError, MissingExtraError, SpecError, SystemicError
from batchsql.types import (
    Call,
    FinishReason,
    Message,
    ModelRef,
    Outcome,
    Request,
    Role,
    Usage,
)
from batchsql.validate.structure import AnswerValidator

MODEL = ModelRef("bedrock", "us.anthropic.claude-haiku-4-5-20251001-v1:0")
RETURNS, _ = parse_returns({"label": {"enum": ["bug", "billing"]}})
CALL = Call(MODEL, {"temperature": 0}, RETURNS.object_schema(), 50)
SHARD = "0123abcd-0000-4000-8000-00000000000a"
HEX = SHARD.replace("-", "")
BUCKET = "rows-of-mine"
ROLE = "arn:aws:iam::123456789012:role/batch"


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with serve_s3() as url:
        yield url


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFTHETEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_BEARER_TOKEN_BEDROCK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def bucket(s3_url: str, environment: None) -> Any:
    resource = boto3.resource("s3", endpoint_url=s3_url, region_name="us-east-1")
    found = resource.Bucket(BUCKET)
    found.create()
    found.objects.all().delete()
    return found


@pytest.fixture
def emulator(s3_url: str, bucket: Any) -> Iterator[Emulator]:
    limits = BedrockLimits(batch_minimum=1, batch_requests=10)
    with Emulator(s3_endpoint_url=s3_url, bedrock=limits) as started:
        yield started


def options(emulator: Emulator, **changes: Any) -> dict[str, Any]:
    return {
        "region": "us-east-1",
        "base_url": emulator.bedrock_base_url,
        "s3_endpoint_url": emulator.environment["AWS_ENDPOINT_URL_S3"],
        "credentials": "environment",
        "s3_uri": f"s3://{BUCKET}/some/folder/",
        "role_arn": ROLE,
        **changes,
    }


def opened(engine: dict[str, Any], model: ModelRef = MODEL) -> BedrockBatch:
    assert registry.check_model(model, {}, engine) == []
    backend = registry.open_batch_backend(model, engine, Path())
    assert isinstance(backend, BedrockBatch)
    return backend


@pytest.fixture
def backend(emulator: Emulator) -> Iterator[BedrockBatch]:
    backend = opened(options(emulator))
    yield backend
    backend.close()


def ask(number: int, text: str | None = None) -> Request:
    messages = (Message(Role.SYSTEM, "Label it."), Message(Role.USER, text or f"row {number}"))
    return Request(f"{number:032x}", messages)


def spool(backend: BedrockBatch, folder: Path, count: int, shard_id: str = SHARD) -> Path:
    encode = backend.encoder(CALL)
    file = folder / "spool.jsonl"
    requests = [ask(number) for number in range(count)]
    lines = [encode(custom_id(each.request_key, shard_id), each) + b"\n" for each in requests]
    file.write_bytes(b"".join(lines))
    return file


def submit(
    backend: BedrockBatch, folder: Path, count: int = 3, shard_id: str = SHARD,
    seconds: float = 60,
) -> str:  # fmt: skip
    shard = ShardLabel(shard_id, count)
    lines = spool(backend, folder, count, shard_id)
    uploaded = backend.upload(shard, lines, CALL)
    must_end_by = read_clock() + seconds
    return backend.create(shard, lines, uploaded, CALL, must_end_by).provider_batch_id


def keys(bucket: Any) -> list[str]:
    return [each.key for each in bucket.objects.all()]


# --- the life of a job ----------------------------------------------------------------------------


def test_every_request_is_answered_once(
    emulator: Emulator, backend: BedrockBatch, bucket: Any, tmp_path: Path
) -> None:
    shard = ShardLabel(SHARD, 3)
    lines = spool(backend, tmp_path, 3)
    uploaded = backend.upload(shard, lines, CALL)
    assert keys(bucket) == [f"some/folder/{HEX}/input.jsonl"]
    assert bucket.Object(keys(bucket)[0]).get()["Body"].read() == lines.read_bytes()
    job = backend.create(shard, lines, uploaded, CALL, read_clock() + 60).provider_batch_id
    status = backend.poll(job)
    assert (status.state, status.provider_state) == (BatchState.RUNNING, "Submitted")
    assert (status.is_checked, status.total) == (False, None)
    emulator.advance(stage="in_progress", fraction=0.4)
    status = backend.poll(job)
    assert (status.state, status.is_checked) == (BatchState.RUNNING, True)
    assert (status.total, status.ok, status.failed) == (3, 1, 0)
    emulator.finish()
    status = backend.poll(job)
    assert (status.state, status.total, status.ok) == (BatchState.COMPLETED, 3, 3)
    found = list(backend.fetch(job, tmp_path, CALL))
    assert {each.completion.request_key for each in found} == {f"{n:032x}" for n in range(3)}
    for each in found:
        assert each.custom_id == custom_id(each.completion.request_key, SHARD)
        assert AnswerValidator(RETURNS).check(each.completion).outcome is Outcome.OK
        assert each.completion.usage.input_tokens > each.completion.usage.output_tokens > 0
    assert emulator.bill.by_custom_id == {each.custom_id: 1 for each in found}
    backend.discard(job, uploaded)
    assert uploaded is not None
    assert [key for key in keys(bucket) if key.endswith("input.jsonl")] == []
    assert len(list(backend.fetch(job, tmp_path, CALL))) == 3


def test_line_is_a_converse_request_without_the_model(backend: BedrockBatch) -> None:
    line = json.loads(backend.encoder(CALL)("some-id", ask(1, "Läuft?\u2028")))
    config = line["modelInput"].pop("outputConfig")
    assert line == {
        "recordId": "some-id",
        "modelInput": {
            "inferenceConfig": {"maxTokens": 50, "temperature": 0},
            "messages": [{"role": "user", "content": [{"text": "Läuft?\u2028"}]}],
            "system": [{"text": "Label it."}],
        },
    }
    schema = config["textFormat"]["structure"]["jsonSchema"]["schema"]
    assert json.loads(schema) == RETURNS.object_schema()


@pytest.mark.parametrize(
    ("fraction", "provider_state", "answered"),
    [(0.5, "PartiallyCompleted", 2), (0, "Expired", 0)],
)
def test_expired_job_gives_what_it_had(
    emulator: Emulator, backend: BedrockBatch, tmp_path: Path, fraction: float,
    provider_state: str, answered: int,
) -> None:  # fmt: skip
    emulator.misbehave(Rule(behaviour="expire", fraction=fraction))
    job = submit(backend, tmp_path, 4)
    emulator.advance(24 * 3600)
    status = backend.poll(job)
    assert (status.state, status.provider_state) == (BatchState.EXPIRED, provider_state)
    assert len(list(backend.fetch(job, tmp_path, CALL))) == answered
    assert len(emulator.bill.charges) == answered


def test_cancelled_job_gives_what_it_had(
    emulator: Emulator, backend: BedrockBatch, tmp_path: Path
) -> None:
    job = submit(backend, tmp_path, 4)
    emulator.advance(stage="in_progress", fraction=0.5)
    backend.cancel(job)
    assert backend.poll(job).state is BatchState.CANCELLING
    emulator.finish()
    assert backend.poll(job).state is BatchState.CANCELLED
    assert len(list(backend.fetch(job, tmp_path, CALL))) == 2
    backend.cancel(job)  # it is over, and stays as it is
    assert backend.poll(job).state is BatchState.CANCELLED


def test_unknown_job_is_gone(backend: BedrockBatch, tmp_path: Path) -> None:
    arn = "arn:aws:bedrock:us-east-1:123456789012:model-invocation-job/abcdefghijkl"
    for call in (backend.poll, backend.cancel, lambda arn: backend.fetch(arn, tmp_path, CALL)):
        with pytest.raises(BatchGoneError):
            call(arn)


def test_deleted_results_are_gone(
    emulator: Emulator, backend: BedrockBatch, bucket: Any, tmp_path: Path
) -> None:
    job = submit(backend, tmp_path)
    emulator.finish()
    bucket.objects.all().delete()
    with pytest.raises(BatchGoneError, match=BUCKET):
        backend.fetch(job, tmp_path, CALL)


@pytest.mark.parametrize("behaviour", ["shuffle", "duplicate", "missing"])
def test_lines_are_told_apart_by_their_id(
    emulator: Emulator, backend: BedrockBatch, tmp_path: Path, behaviour: str
) -> None:
    third = custom_id(f"{2:032x}", SHARD)
    at = {} if behaviour == "shuffle" else {"custom_id": third}
    emulator.misbehave(Rule(behaviour=behaviour, **at))
    job = submit(backend, tmp_path, 5)
    emulator.finish()
    found = [each.custom_id for each in backend.fetch(job, tmp_path, CALL)]
    assert found.count(third) == {"shuffle": 1, "duplicate": 2, "missing": 0}[behaviour]
    others = {custom_id(f"{number:032x}", SHARD) for number in (0, 1, 3, 4)}
    assert set(found) - {third} == others


def test_failed_lines_say_why(emulator: Emulator, backend: BedrockBatch, tmp_path: Path) -> None:
    rules = {
        0: Rule(behaviour="rejected", text="row 0"),
        1: Rule(behaviour="too_long", text="row 1"),
        2: Rule(behaviour="error_in_output", text="row 2", status=429),
        3: Rule(behaviour="content_filter", text="row 3"),
        4: Rule(behaviour="length", text="row 4"),
    }
    emulator.misbehave(*rules.values())
    job = submit(backend, tmp_path, 6)
    emulator.finish()
    assert backend.poll(job).failed == 3
    found = {int(e.completion.request_key, 16): e for e in backend.fetch(job, tmp_path, CALL)}
    outcomes = [found[n].completion.failure for n in range(6)]
    assert outcomes[:3] == [Outcome.REJECTED, Outcome.TOO_LONG, Outcome.TRANSIENT]
    assert outcomes[3:] == [None] * 3
    reasons = [found[n].completion.finish_reason for n in range(3, 6)]
    assert reasons == [FinishReason.CONTENT_FILTER, FinishReason.LENGTH, FinishReason.STOP]


# --- creating -------------------------------------------------------------------------------------


def test_second_creation_of_a_shard_makes_no_second_job(
    backend: BedrockBatch, tmp_path: Path
) -> None:
    assert submit(backend, tmp_path) == submit(backend, tmp_path)
    since = datetime.now(timezone.utc) - timedelta(hours=1)
    assert len(list(backend.list_batches(since))) == 1


@pytest.mark.parametrize(
    ("behaviour", "expected", "fault"),
    [
        ("queue_full", NotCreatedError, BatchFault.QUEUE_FULL),
        ("rate_limit", NotCreatedError, BatchFault.TRANSIENT),
        ("overloaded", NotCreatedError, BatchFault.TRANSIENT),
        ("server_error", MaybeCreatedError, None),
        ("unavailable", MaybeCreatedError, None),
        ("bad_gateway", MaybeCreatedError, None),
        ("truncate", MaybeCreatedError, None),
        ("bad_key", SystemicError, None),
        ("no_credit", SystemicError, None),
        ("redirect", SystemicError, None),
    ],
)
def test_refused_creation_is_told_apart_and_sent_once(
    emulator: Emulator, backend: BedrockBatch, tmp_path: Path, behaviour: str,
    expected: type[Exception], fault: BatchFault | None,
) -> None:  # fmt: skip
    emulator.misbehave(Rule(behaviour=behaviour, endpoint="*.batches.create", retry_after=7))
    with pytest.raises(expected) as raised:
        submit(backend, tmp_path)
    if isinstance(raised.value, NotCreatedError):
        assert raised.value.fault is fault
        assert raised.value.retry_after_seconds == (None if behaviour == "queue_full" else 7)
    sent = [call for call in emulator.calls if call.operation == "bedrock.batches.create"]
    assert len(sent) == 1
    assert "AKIDOFTHETEST" not in str(raised.value)


@pytest.mark.parametrize(("behaviour", "is_there"), [("drop", False), ("lost_reply", True)])
def test_job_whose_creation_got_no_reply_is_found_or_surely_absent(
    emulator: Emulator, backend: BedrockBatch, tmp_path: Path, behaviour: str, is_there: bool
) -> None:
    other = SHARD[:-1] + "b"
    submit(backend, tmp_path, shard_id=other)
    emulator.misbehave(Rule(behaviour=behaviour, endpoint="*.batches.create"))
    with pytest.raises(MaybeCreatedError):
        submit(backend, tmp_path)
    found = backend.find(ShardLabel(SHARD, 3))
    assert (found.provider_batch_id is not None, found.is_sure) == (is_there, not is_there)
    since = datetime.now(timezone.utc) - timedelta(hours=1)
    listed = {each.shard_hex: each for each in backend.list_batches(since)}
    assert set(listed) == {HEX, other.replace("-", "")} if is_there else {other.replace("-", "")}
    if is_there:
        assert listed[HEX].provider_batch_id == found.provider_batch_id
        assert listed[HEX].created_at > since
    future = datetime.now(timezone.utc) + timedelta(hours=1)
    assert list(backend.list_batches(future)) == []


def test_list_goes_on_over_its_pages(
    emulator: Emulator, backend: BedrockBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [submit(backend, tmp_path, 1, f"{SHARD[:-1]}{number}") for number in range(5)]
    real = backend._control.list_model_invocation_jobs
    small = lambda **asked: real(**asked, maxResults=2)  # noqa: E731
    monkeypatch.setattr(backend._control, "list_model_invocation_jobs", small)
    since = datetime.now(timezone.utc) - timedelta(hours=1)
    listed = [each.provider_batch_id for each in backend.list_batches(since)]
    assert listed == made[::-1]


def test_creation_without_enough_time_is_not_begun(
    emulator: Emulator, backend: BedrockBatch, tmp_path: Path
) -> None:
    with pytest.raises(NotCreatedError, match="too little time") as raised:
        submit(backend, tmp_path, seconds=bedrock_batch.LIMITS.create_seconds / 2 - 1)
    assert raised.value.fault is BatchFault.TRANSIENT
    assert emulator.calls == []


def test_creation_is_broken_off_at_its_deadline(
    emulator: Emulator, backend: BedrockBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = dataclasses.replace(bedrock_batch.LIMITS, create_seconds=0.2)
    monkeypatch.setattr(bedrock_batch, "LIMITS", limits)
    emulator.misbehave(Rule(behaviour="slow", endpoint="*.batches.create"))
    began = time.monotonic()
    with pytest.raises(MaybeCreatedError, match="no reply in the time"):
        submit(backend, tmp_path, seconds=1.5)
    assert time.monotonic() - began < 5
    assert backend.find(ShardLabel(SHARD, 3)).provider_batch_id is not None


def test_name_that_is_taken_leaves_it_open(
    emulator: Emulator, backend: BedrockBatch, tmp_path: Path
) -> None:
    control = backend._control
    shard = ShardLabel(SHARD, 1)
    uri = backend.upload(shard, spool(backend, tmp_path, 1), CALL)
    control.create_model_invocation_job(
        jobName=f"batchsql-{HEX}", roleArn=ROLE, modelId=MODEL.name,
        modelInvocationType="Converse", inputDataConfig={"s3InputDataConfig": {"s3Uri": uri}},
        outputDataConfig={"s3OutputDataConfig": {"s3Uri": f"s3://{BUCKET}/else/"}},
    )  # fmt: skip
    with pytest.raises(MaybeCreatedError, match="already in use"):
        submit(backend, tmp_path, 1)


def test_server_that_is_not_there_got_nothing(emulator: Emulator, tmp_path: Path) -> None:
    with Emulator() as gone:
        url = gone.bedrock_base_url
    backend = opened(options(emulator, base_url=url))
    with pytest.raises(NotCreatedError) as raised:
        submit(backend, tmp_path)
    assert raised.value.fault is BatchFault.TRANSIENT
    with pytest.raises(ProviderBusyError):
        backend.find(ShardLabel(SHARD, 1))


def test_unknown_model_is_systemic(emulator: Emulator, tmp_path: Path) -> None:
    backend = opened(options(emulator), ModelRef("bedrock", "nobody.no-model-v1:0"))
    with pytest.raises(SystemicError, match="model identifier is invalid"):
        submit(backend, tmp_path)


# --- refused as a whole ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "code", "fault", "told"),
    [
        (11, None, BatchFault.TOO_LARGE, "more records (11)"),
        (1, "The job exceeds the quota of jobs in progress.", BatchFault.QUEUE_FULL, "quota"),
        (1, "The role cannot read the bucket.", BatchFault.SYSTEMIC, "role"),
        (1, "Internal server error, try again.", BatchFault.TRANSIENT, "Internal"),
    ],
)
def test_job_that_is_refused_later_says_why(
    emulator: Emulator, backend: BedrockBatch, tmp_path: Path, count: int, code: str | None,
    fault: BatchFault, told: str,
) -> None:  # fmt: skip
    if code is not None:
        emulator.misbehave(Rule(behaviour="fail_validation", code=code))
    job = submit(backend, tmp_path, count)
    emulator.finish()
    status = backend.poll(job)
    assert (status.state, status.fault) == (BatchState.FAILED, fault)
    assert told in (status.error or "")
    assert list(backend.fetch(job, tmp_path, CALL)) == []
    assert emulator.bill.charges == []


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("The job contains less records (3) than the required minimum of: 100",
         BatchFault.SYSTEMIC),
        ("The size of the input file is 9 bytes, which exceeds the maximum allowed size",
         BatchFault.TOO_LARGE),
        ("The number of records exceeds the quota", BatchFault.TOO_LARGE),
        ("", BatchFault.SYSTEMIC),
    ],
)  # fmt: skip
def test_message_of_a_failed_job_tells_the_fault(message: str, fault: BatchFault) -> None:
    assert fault_of(message) is fault


def test_job_that_failed_on_its_way_keeps_what_it_had(
    backend: BedrockBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"jobArn": "arn", "jobName": "x", "status": "Failed", "message": "oops"}
    found = {**job, "processedRecordCount": 2, "successRecordCount": 2}
    monkeypatch.setattr(backend._control, "get_model_invocation_job", lambda **_: found)
    assert backend.poll("arn").state is BatchState.EXPIRED


def test_unknown_status_is_an_error(backend: BedrockBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"jobArn": "arn", "jobName": "x", "status": "Dreaming"}
    monkeypatch.setattr(backend._control, "get_model_invocation_job", lambda **_: job)
    with pytest.raises(BackendError, match="Dreaming"):
        backend.poll("arn")


# --- lines ----------------------------------------------------------------------------------------

KEY = f"{7:032x}"
ID = custom_id(KEY, SHARD)


def output(**changes: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": [{"text": "{}"}]}
    usage = {"inputTokens": 15, "outputTokens": 5, "totalTokens": 105,
             "cacheReadInputTokens": 80, "cacheWriteInputTokens": 5,
             "cacheDetails": [{"ttl": "1h", "inputTokens": 3}]}  # fmt: skip
    return {"output": {"message": message}, "stopReason": "end_turn", "usage": usage, **changes}


def line(**record: Any) -> BatchLine:
    return parse_line(json.dumps({"recordId": ID, "modelInput": {}, **record}).encode())


def test_usage_counts_what_the_cache_holds_as_input() -> None:
    assert line(modelOutput=output()).completion.usage == Usage(
        input_tokens=100, output_tokens=5, cached_tokens=80, cache_write_tokens=5,
        cache_write_1h_tokens=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("end_turn", FinishReason.STOP),
        ("stop_sequence", FinishReason.STOP),
        ("malformed_model_output", FinishReason.STOP),
        ("max_tokens", FinishReason.LENGTH),
        ("model_context_window_exceeded", FinishReason.LENGTH),
        ("guardrail_intervened", FinishReason.CONTENT_FILTER),
        ("content_filtered", FinishReason.CONTENT_FILTER),
    ],
)
def test_stop_reason_is_translated(reason: str, expected: FinishReason) -> None:
    completion = line(modelOutput=output(stopReason=reason)).completion
    assert (completion.request_key, completion.finish_reason) == (KEY, expected)


@pytest.mark.parametrize(
    ("record", "outcome", "told"),
    [
        ({"modelOutput": output(stopReason="took_a_walk")}, Outcome.REJECTED, "took_a_walk"),
        ({"modelOutput": {"output": {}}}, Outcome.TRANSIENT, "no answer"),
        ({"error": {"errorCode": 400, "errorMessage": "bad"}}, Outcome.REJECTED, "bad"),
        ({"error": {"errorCode": 400, "errorMessage": "Input is too long for requested model."}},
         Outcome.TOO_LONG, "too long"),
        ({"error": {"errorCode": 403, "errorMessage": "no"}}, Outcome.REJECTED, "no"),
        ({"error": {"errorCode": 503, "errorMessage": "no"}}, Outcome.TRANSIENT, "no"),
        ({"error": {"errorCode": "ThrottlingException"}}, Outcome.TRANSIENT, "Throttling"),
        ({"error": None}, Outcome.TRANSIENT, "neither"),
    ],
)  # fmt: skip
def test_line_without_an_answer_says_why(
    record: dict[str, Any], outcome: Outcome, told: str
) -> None:
    found = line(**record)
    assert (found.custom_id, found.completion.request_key) == (ID, KEY)
    assert found.completion.failure is outcome
    assert told in (found.completion.error or "")


def test_line_with_a_lone_surrogate_is_read() -> None:
    text = json.dumps({"recordId": ID, "modelOutput": output()}).replace("{}", "\\ud800")
    assert parse_line(text.encode()).completion.text == "\ud800"


@pytest.mark.parametrize(
    "record",
    ['"modelOutput":{"output":%s}', '"error":{"errorCode":%s}', '"error":{"errorCode":"²"}'],
)
def test_odd_line_spoils_no_other(record: str) -> None:
    deep = "[" * 1_000 + "]" * 1_000  # which orjson reads and Python cannot show
    found = parse_line(f'{{"recordId":"{ID}",{record.replace("%s", deep)}}}'.encode())
    assert found.completion.request_key == KEY
    assert found.completion.failure is not None


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"recordId": 5}', b'{"recordId": "else"}'])
def test_line_of_nobody_is_no_answer(content: bytes) -> None:
    found = parse_line(content)
    assert (found.completion.request_key, found.completion.text) == ("", None)
    assert found.completion.failure is not None


# --- options and credentials ----------------------------------------------------------------------


def test_bucket_that_is_not_there_is_systemic(emulator: Emulator, tmp_path: Path) -> None:
    backend = opened(options(emulator, s3_uri="s3://no-bucket-of-mine/x"))
    with pytest.raises(SystemicError, match=r"check engine\.s3_uri"):
        submit(backend, tmp_path)


def test_store_that_is_not_there_is_busy(emulator: Emulator, tmp_path: Path) -> None:
    with Emulator() as gone:
        url = gone.url
    backend = opened(options(emulator, s3_endpoint_url=url))
    with pytest.raises(ProviderBusyError):
        submit(backend, tmp_path)


def test_account_is_told_by_role_region_and_place_not_by_the_key(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(options(emulator)).account
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ANOTHER")
    assert opened(options(emulator)).account == first
    other_role = "arn:aws:iam::999999999999:role/batch"
    for changes in ({"region": "eu-west-1"}, {"role_arn": other_role}, {"s3_uri": "s3://other"}):
        assert opened(options(emulator, **changes)).account != first


def test_region_is_needed(emulator: Emulator) -> None:
    engine = options(emulator)
    del engine["region"]
    with pytest.raises(SystemicError, match=r"engine\.region"):
        _ = opened(engine).account


def test_missing_credentials_are_systemic(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SystemicError, match="check the AWS credentials"):
        submit(opened(options(emulator)), tmp_path)
    with pytest.raises(SystemicError, match="profile"):
        _ = opened(options(emulator, profile="nobody")).account


def test_addresses_of_the_environment_are_not_used(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BEDROCK", "BEDROCK_RUNTIME", "S3"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{name}", emulator.url)
    engine = {k: v for k, v in options(emulator, region="eu-west-1").items()
              if not k.endswith("_url")}  # fmt: skip
    backend = opened(engine)
    hosts = [client.meta.endpoint_url for client in (backend._control, backend._s3)]
    assert hosts == [
        "https://bedrock.eu-west-1.amazonaws.com", "https://s3.eu-west-1.amazonaws.com",
    ]  # fmt: skip


def test_without_bucket_and_role_there_are_no_batches() -> None:
    assert registry.open_batch_backend(MODEL, {"region": "us-east-1"}, Path()) is None


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"s3_uri": None}, "s3_uri"),
        ({"role_arn": None}, "role_arn"),
        ({"s3_uri": "my-bucket/x"}, "s3_uri"),
        ({"s3_uri": "s3://UPPER/x"}, "s3_uri"),
        ({"role_arn": "batch"}, "role_arn"),
        ({"credentials": None}, "credentials"),
        ({"credentials": "AKIDOFTHETEST"}, "credentials"),
        ({"base_url": "ftp://host"}, "base_url"),
        ({"s3_endpoint_url": "http://user:pass@host"}, "s3_endpoint_url"),
    ],
)
def test_wrong_options_are_mistakes(
    emulator: Emulator, changes: dict[str, Any], where: str
) -> None:
    engine = {k: v for k, v in options(emulator, **changes).items() if v is not None}
    mistakes = registry.check_model(MODEL, {}, engine)
    assert [mistake.where for mistake in mistakes] == [f"engine.{where}"]
    assert "AKIDOFTHETEST" not in str(mistakes[0])
    assert "pass@" not in str(mistakes[0])
    with pytest.raises(SpecError):
        registry.open_batch_backend(MODEL, engine, Path())


@pytest.mark.parametrize(("uri", "is_told"), [("s3://b/x", True), ("s3://UPPER/x", False)])
def test_bucket_with_too_short_a_name_is_told(emulator: Emulator, uri: str, is_told: bool) -> None:
    (mistake,) = registry.check_model(MODEL, {}, options(emulator, s3_uri=uri))
    assert f"got '{uri}'" in mistake.message
    assert ("a name of fewer than 3 characters" in mistake.message) is is_told


def test_missing_sdk_names_the_extra(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"batchsql\[bedrock\]"):
        registry.open_batch_backend(MODEL, options(emulator), Path())
