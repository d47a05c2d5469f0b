"""Amazon Bedrock's wire format: Converse and batch inference jobs, whose files lie in S3."""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import orjson
from aiohttp import web

from batchsql.emulate.answers import count_tokens
from batchsql.emulate.bedrock_rules import (
    ConverseChecker,
    check_job,
    check_records,
    find_model,
    invalid,
)
from batchsql.emulate.provider import (
    ApiError,
    Operation,
    Question,
    World,
    answer,
    charge,
    find_strings,
    json_reply,
    read_json,
)
from batchsql.emulate.s3 import ObjectStore
from batchsql.emulate.script import Behaviour, Moment, Rule
from batchsql.emulate.timeline import Phase, Timeline

ACCOUNT = "123456789012"
MODELS = frozenset({
    "amazon.nova-micro-v1:0", "amazon.nova-lite-v1:0", "amazon.nova-pro-v1:0",
    "anthropic.claude-haiku-4-5-20251001-v1:0", "anthropic.claude-sonnet-4-5-20250929-v1:0",
    "anthropic.claude-opus-4-5-20251101-v1:0", "meta.llama3-3-70b-instruct-v1:0",
    "openai.gpt-oss-20b-1:0", "openai.gpt-oss-120b-1:0", "qwen.qwen3-32b-v1:0",
})  # fmt: skip
_MESSAGE_TOKENS = 4  # what the format adds to each message
_STORE_SECONDS = 60.0  # the longest that the object store may take
_SIGNED = re.compile(
    r"AWS4-HMAC-SHA256 Credential=[^/,\s]+/\d{8}/(?P<region>[a-z0-9-]+)/bedrock/aws4_request,.*"
    r"Signature=[0-9a-f]{64}"
)
_KINDS = {
    Behaviour.RATE_LIMIT: (429, "ThrottlingException", "Too many requests, please wait."),
    Behaviour.SERVER_ERROR: (500, "InternalServerException", "Internal server error"),
    Behaviour.UNAVAILABLE: (503, "ServiceUnavailableException", "Bedrock is unable to process it."),
    Behaviour.OVERLOADED: (429, "ModelNotReadyException", "The model is not ready for inference."),
    Behaviour.BAD_KEY: (
        403, "UnrecognizedClientException",
        "The security token included in the request is invalid.",
    ),
    Behaviour.NO_CREDIT: (
        403, "AccessDeniedException",
        "Model access is denied due to INVALID_PAYMENT_INSTRUMENT.",
    ),
}  # fmt: skip
_STATUSES = {
    Phase.PROCESSING: "InProgress",
    Phase.FINALIZING: "InProgress",
    Phase.CANCELLING: "Stopping",
    Phase.CANCELLED: "Stopped",
    Phase.DONE: "Completed",
}
_EARLY_STATUSES = ("Submitted", "Validating", "Scheduled")


@dataclass(frozen=True, slots=True)
class BedrockLimits:
    """The provider's limits. Lower them to meet them in a rehearsal."""

    batch_minimum: int = 100
    batch_requests: int = 50_000
    batch_bytes: int = 1024 * 1024 * 1024
    queued_jobs: int = 20
    context_tokens: int = 200_000
    concurrent_requests: int | None = None


@dataclass(slots=True)
class _Job:
    """A job moves with its timeline; what it needs from S3 is fetched ahead in another thread."""

    id: str  # the ARN
    request: Mapping[str, Any]
    model: str
    rule: Rule | None
    timeline: Timeline
    loading: Future[Mapping[str, bytes]]
    problem: str | None = None
    records: list[tuple[str, bytes]] | None = None
    done: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    output: dict[str, list[bytes]] = field(default_factory=dict)
    writing: Future[None] | None = None
    has_ended: bool = False

    @property
    def short_id(self) -> str:
        return self.id.rpartition("/")[2]

    @property
    def status(self) -> str:
        if self.problem is not None:
            return "Failed"
        phase = self.timeline.phase
        if phase is Phase.VALIDATING:
            third = 3 * self.timeline.elapsed / self.timeline.durations.validating
            return _EARLY_STATUSES[min(2, int(third))]
        if phase is Phase.EXPIRED:
            return "PartiallyCompleted" if self.done else "Expired"
        return _STATUSES[phase]

    def is_met_by(self, behaviour: Behaviour) -> bool:
        return self.rule is not None and self.rule.behaviour is behaviour


class Bedrock:
    """The control plane and the runtime, which AWS serves on two hosts, on one."""

    name = "bedrock"

    def __init__(
        self, world: World, limits: BedrockLimits | None = None, models: Sequence[str] = (),
        store: ObjectStore | None = None,
    ) -> None:  # fmt: skip
        self._world = world
        self._limits = limits or BedrockLimits()
        self._models = MODELS | set(models)
        self._store = store
        # One thread, so that the store has one caller at a time.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="batchsql-emulator-s3")
        self._jobs: dict[str, _Job] = {}
        self._check = ConverseChecker()

    @property
    def operations(self) -> Sequence[Operation]:
        """The calls that are served."""
        return [
            Operation(method, path, f"bedrock.{name}", handler)
            for method, path, name, handler in (
                ("POST", "/model/{model}/converse", "converse", self._converse),
                ("POST", "/model-invocation-job", "batches.create", self._create),
                ("GET", "/model-invocation-jobs", "batches.list", self._list),
                ("GET", "/model-invocation-job/{id}", "batches.retrieve", self._retrieve),
                ("POST", "/model-invocation-job/{id}/stop", "batches.cancel", self._stop),
            )
        ]

    def authenticate(self, request: web.Request) -> None:
        """Accept any signature for the service, or any API key of Bedrock."""
        given = request.headers.get("authorization", "")
        scheme, _, key = given.partition(" ")
        if not given:
            message = "Missing Authentication Token"
            raise ApiError(403, "MissingAuthenticationTokenException", message)
        if not _SIGNED.fullmatch(given) and not (scheme.lower() == "bearer" and key.strip()):
            message = "The authorization header is no signature for the service bedrock."
            raise ApiError(403, "IncompleteSignatureException", message)

    def error_for(self, rule: Rule) -> ApiError:
        """Return Bedrock's error for a misbehaviour."""
        status, kind, message = _KINDS[rule.behaviour]
        headers = {} if rule.retry_after is None else {"retry-after": f"{rule.retry_after:g}"}
        return ApiError(status, kind, message, headers=headers)

    def error_reply(self, error: ApiError) -> web.Response:
        """Return an error as AWS words it: its type is in a header."""
        kind = error.kind if error.kind.endswith("Exception") else "UnknownOperationException"
        headers = {**error.headers, "x-amzn-errortype": f"{kind}:http://internal.amazon.com/"}
        return json_reply({"message": error.message}, error.status, **headers)

    def prompt_of(self, body: Any) -> str:
        """Return the text of the system prompt and of all messages."""
        if isinstance(body, dict) and isinstance(body.get("messages"), list):
            return "\n".join(find_strings([body.get("system"), body["messages"]]))
        return "\n".join(find_strings(body))

    def batches(self) -> Sequence[_Job]:
        """Return all jobs, oldest first."""
        return list(self._jobs.values())

    # --- converse -------------------------------------------------------------------------------

    async def _converse(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        model = find_model(self._models, name)
        if model is None:
            if name.startswith("arn:"):
                raise ApiError(404, "ResourceNotFoundException", f"Could not find {name}.")
            raise invalid("The provided model identifier is invalid.")
        return json_reply(self._answer(model, _read_body(await request.read()), "bedrock.converse"))

    def _answer(
        self, model: str, body: Any, endpoint: str, record_id: str | None = None,
        job_id: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return a billed answer, or raise ApiError and bill nothing."""
        checked = self._check.check(body, in_batch=job_id is not None)
        tokens = count_tokens(checked.system) + count_tokens(checked.prompt)
        tokens += _MESSAGE_TOKENS * checked.messages
        if tokens > self._limits.context_tokens:
            raise invalid("Input is too long for requested model.")
        question = Question(
            endpoint=endpoint, model=model, body={**body, "modelId": model},
            system=checked.system, prompt=checked.prompt, max_tokens=checked.max_tokens,
            schema=checked.schema, custom_id=record_id, batch_id=job_id,
        )  # fmt: skip
        try:
            given = answer(self._world, question, self.name)
        except ApiError as error:
            raise _worded(error) from error
        charge(self._world, self.name, question, given, input_tokens=tokens, cached_tokens=0)
        # Converse knows no refusal: it is a text like any other.
        stop = {"length": "max_tokens", "content_filter": "content_filtered"}.get(given.finish)
        return {
            "output": {
                "message": {
                    "role": "assistant",
                    "content": [{"text": given.text}] if given.text else [],
                }
            },
            "stopReason": stop or "end_turn",
            "usage": {
                "inputTokens": tokens,
                "outputTokens": given.output_tokens,
                "totalTokens": tokens + given.output_tokens,
                "cacheReadInputTokens": 0,
                "cacheWriteInputTokens": 0,
            },
            "metrics": {"latencyMs": 1},
        }

    # --- jobs -----------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.Response:
        content = await request.read()
        body = _read_body(content)
        check_job(body)
        model = find_model(self._models, body["modelId"])
        if model is None:
            raise invalid("The provided model identifier is invalid.")
        if self._store is None:
            raise invalid("The rehearsal server was given no S3 to read the input from.")
        token = body.get("clientRequestToken")
        for job in self._jobs.values():
            if token is not None and job.request.get("clientRequestToken") == token:
                if job.request == body:
                    return json_reply({"jobArn": job.id})
                raise _conflict("The client request token was used with other parameters.")
            if job.request["jobName"] == body["jobName"]:
                raise _conflict(f"The job name {body['jobName']} is already in use.")
        self.settle()
        rule = self._world.script.meet(
            Moment.BATCH, "bedrock.batches.create", (content.decode("utf-8", "replace"),)
        )
        waiting = sum(each.model == model for each in self._jobs.values() if not each.has_ended)
        is_full = waiting >= self._limits.queued_jobs
        if is_full or (rule is not None and rule.behaviour is Behaviour.QUEUE_FULL):
            raise ApiError(
                400, "ServiceQuotaExceededException",
                f"The account has reached its quota of {self._limits.queued_jobs} batch inference "
                "jobs that are submitted or in progress for this model.",
            )  # fmt: skip
        signed = _SIGNED.fullmatch(request.headers.get("authorization", ""))
        region = signed["region"] if signed else "us-east-1"
        uri = body["inputDataConfig"]["s3InputDataConfig"]["s3Uri"]
        job = _Job(
            f"arn:aws:bedrock:{region}:{ACCOUNT}:model-invocation-job/{secrets.token_hex(6)}",
            body, model, rule, self._world.timeline(rule),
            self._worker.submit(self._store.read_jsonl, uri),
        )  # fmt: skip
        self._jobs[job.id] = job
        return json_reply({"jobArn": job.id})

    async def _list(self, request: web.Request) -> web.Response:
        query = request.query
        size = query.get("maxResults", "100")
        if not size.isdigit() or not 1 <= int(size) <= 1000:
            raise invalid("Value at 'maxResults' failed to satisfy constraint: from 1 to 1000")
        self.settle()
        found = [each for each in self._jobs.values() if _is_asked_for(each, query)]
        if query.get("sortOrder", "Descending") != "Ascending":
            found.reverse()
        start = 0
        if "nextToken" in query:
            ids = [each.short_id for each in found]
            if query["nextToken"] not in ids:
                raise invalid("The provided nextToken is invalid.")
            start = ids.index(query["nextToken"])
        page, rest = found[start : start + int(size)], found[start + int(size) :]
        reply: dict[str, Any] = {"invocationJobSummaries": [_document(each) for each in page]}
        if rest:
            reply["nextToken"] = rest[0].short_id
        return json_reply(reply)

    def _find(self, request: web.Request) -> _Job:
        wanted = request.match_info["id"]
        if not re.fullmatch(r"(arn:aws[^/]*/)?[a-z0-9]{12}", wanted):
            raise invalid("The provided job identifier is invalid.")
        for job in self._jobs.values():
            if wanted in (job.id, job.short_id):
                self.settle()
                return job
        raise ApiError(404, "ResourceNotFoundException", f"Could not find the job {wanted}.")

    async def _retrieve(self, request: web.Request) -> web.Response:
        return json_reply(_document(self._find(request)))

    async def _stop(self, request: web.Request) -> web.Response:
        job = self._find(request)
        if job.has_ended:
            raise _conflict(f"The job cannot be stopped: its status is {job.status}.")
        job.timeline.cancel()
        self._settle(job)
        return json_reply({})

    # --- a job's life ---------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring every job to the present.

        Waits for the store only where the clock was put ahead of it.
        """
        for job in self._jobs.values():
            self._settle(job)

    def _settle(self, job: _Job) -> None:
        phase = job.timeline.phase
        if job.has_ended or phase is Phase.VALIDATING:
            return
        if job.records is None:
            self._load(job)
        if job.problem is None:
            records = job.records or []
            for number in range(job.done, int(len(records) * job.timeline.share)):
                self._run(job, *records[number])
            if phase is Phase.FINALIZING or phase.is_final:
                self._write(job)
            if phase.is_final and job.writing is not None:
                try:
                    job.writing.result(_STORE_SECONDS)
                except Exception as error:  # noqa: BLE001 - whatever the store does, the job fails
                    job.problem = f"The output could not be written: {error}"
        job.has_ended = job.problem is not None or phase.is_final

    def _load(self, job: _Job) -> None:
        if job.rule is not None and job.is_met_by(Behaviour.FAIL_VALIDATION):
            job.records = []
            job.problem = job.rule.code or "The input did not pass validation."
            return
        limits = self._limits
        try:
            files = job.loading.result(_STORE_SECONDS)
        except Exception as error:  # noqa: BLE001 - whatever the store does, the job fails
            job.records, job.problem = [], f"The input could not be read: {error}"
            return
        job.records, job.problem = check_records(
            files, least=limits.batch_minimum, most=limits.batch_requests,
            max_bytes=limits.batch_bytes,
        )  # fmt: skip

    def _run(self, job: _Job, file: str, line: bytes) -> None:
        record = orjson.loads(line)
        record_id, body = record["recordId"], record["modelInput"]
        rule = None
        if self._world.script.has_rules(Moment.RESULT):
            rule = self._world.script.meet(
                Moment.RESULT, "bedrock.batches.line", (self.prompt_of(body),), record_id
            )
        behaviour = None if rule is None else rule.behaviour
        job.done += 1
        result: dict[str, Any]
        try:
            if job.is_met_by(Behaviour.ERRORS_ONLY):
                raise invalid("The record failed, as the rehearsal asked for.")
            if rule is not None and behaviour is Behaviour.ERROR_IN_OUTPUT:
                raise ApiError(rule.status, "", "The record failed, as the rehearsal asked for.")
            output = self._answer(job.model, body, "bedrock.batches.line", record_id, job.id)
            job.input_tokens += output["usage"]["inputTokens"]
            job.output_tokens += output["usage"]["outputTokens"]
            result = {"modelOutput": output}
        except ApiError as error:
            job.failed += 1
            result = {"error": {"errorCode": error.status, "errorMessage": error.message}}
        copies = {Behaviour.MISSING: 0, Behaviour.DUPLICATE: 2}.get(behaviour or Behaviour.SLOW, 1)
        written = orjson.dumps({"recordId": record_id, "modelInput": body, **result})
        job.output.setdefault(file, []).extend([written] * copies)

    def _write(self, job: _Job) -> None:
        """Begin to write the output, once. A job that expired in the queue has none."""
        if job.writing is not None or self._store is None or job.status == "Expired":
            return
        place = job.request["outputDataConfig"]["s3OutputDataConfig"]["s3Uri"].rstrip("/")
        contents = {}
        for file, lines in job.output.items():
            if job.is_met_by(Behaviour.SHUFFLE):
                random.Random(job.request["jobName"]).shuffle(lines)  # noqa: S311 - an order, no secret
            name = file.rpartition("/")[2]
            contents[f"{name}.out"] = b"".join(line + b"\n" for line in lines)
        contents["manifest.json.out"] = orjson.dumps(
            {**_counts(job), "inputTokenCount": job.input_tokens,
             "outputTokenCount": job.output_tokens}
        )  # fmt: skip
        job.output = {}
        store = self._store

        def write() -> None:
            for name, content in contents.items():
                store.write(f"{place}/{job.short_id}/{name}", content)

        job.writing = self._worker.submit(write)


def _read_body(content: bytes) -> Any:
    try:
        return read_json(content)
    except ValueError as error:
        raise ApiError(400, "SerializationException", "The request body is no JSON.") from error


def _worded(error: ApiError) -> ApiError:
    """Return an error of the model in AWS's words."""
    if error.code == "context_length_exceeded":
        return invalid("Input is too long for requested model.")
    if error.status >= 500:
        return ApiError(error.status, "InternalServerException", error.message)
    kind = "ThrottlingException" if error.status == 429 else "ValidationException"
    return ApiError(error.status, kind, error.message)


def _conflict(message: str) -> ApiError:
    return ApiError(400, "ConflictException", message)


def _is_asked_for(job: _Job, query: Mapping[str, str]) -> bool:
    created = job.timeline.created_at
    after, before = (query.get(name) for name in ("submitTimeAfter", "submitTimeBefore"))
    return (
        query.get("nameContains", "") in job.request["jobName"]
        and query.get("statusEquals", job.status) == job.status
        and (after is None or created > _seconds(after))
        and (before is None or created < _seconds(before))
    )


def _counts(job: _Job) -> dict[str, int]:
    return {
        "totalRecordCount": len(job.records or ()),
        "processedRecordCount": job.done,
        "successRecordCount": job.done - job.failed,
        "errorRecordCount": job.failed,
    }


def _document(job: _Job) -> dict[str, Any]:
    line, request = job.timeline, job.request
    hours = request.get("timeoutDurationInHours", 24)
    document = {
        **{name: value for name, value in request.items() if name != "tags"},
        "jobArn": job.id,
        "status": job.status,
        "submitTime": _stamp(line.created_at),
        "lastModifiedTime": _stamp(line.clock.now()),
        "timeoutDurationInHours": hours,
        "jobExpirationTime": _stamp(line.created_at + hours * 3600),
        **_counts(job),
    }
    if job.has_ended:
        document["endTime"] = _stamp(line.at(line.phase))
    if job.problem is not None:
        document["message"] = job.problem[:2048]
    return document


def _stamp(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _seconds(stamp: str) -> float:
    try:
        moment = datetime.fromisoformat(stamp.replace("Z", "+00:00"))
    except ValueError as error:
        raise invalid("The provided time is invalid.") from error
    return moment.replace(tzinfo=moment.tzinfo or timezone.utc).timestamp()
