"""Amazon Bedrock's batch inference jobs, whose input and output lie in the user's bucket.

A job bears the shard's id in its name and as its idempotency token, so a job whose creation got no
reply is found by its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from batchsql.backends.aws import Aws, account_of_role, read_error, sdk_version
from batchsql.backends.batch import (
    BatchFault,
    BatchGoneError,
    BatchLimits,
    BatchLine,
    BatchStatus,
    CreatedBatch,
    Finding,
    ListedBatch,
    MaybeCreatedError,
    NotCreatedError,
    ProviderBusyError,
    ShardLabel,
    account_of,
    iter_lines,
    read_clock,
)
from batchsql.backends.bedrock import (
    classify_error,
    fixed_body,
    identity_of,
    messages_body,
    plan_bedrock,
)
from batchsql.backends.bedrock_wire import (
    LIMITS,
    MAX_MESSAGE_CHARS,
    fault_of,
    parse_line,
    status_of,
)
from batchsql.backends.loop import in_thread, submit
from batchsql.backends.online import ErrorReply, Failure
from batchsql.errors import BackendError, SystemicError
from batchsql.types import Call, ModelRef, Outcome, Request

_CALL_SECONDS = 60.0
_CREATE_READ_SECONDS = 20.0
_WINDOW_HOURS = 24
_GONE_KINDS = frozenset({"ResourceNotFoundException", "NoSuchKey", "404"})
_NAME_PREFIX = "batchsql-"
_NAME = re.compile(rf"{_NAME_PREFIX}([0-9a-f]{{32}})")


class _TooLateError(Exception):
    """Too little time is left to begin the creation."""


def open_bedrock_batch(
    model: ModelRef, engine: Mapping[str, Any], project_root: Path
) -> BedrockBatch | None:
    """Return what brings requests for ``bedrock/<model>`` to batch inference.

    None where the options name no bucket and no role, without which there are no batches.

    Raises:
        SpecError: an engine option is wrong, or one of the two is missing.
        MissingExtraError: boto3 is not installed.
    """
    aws = plan_bedrock(model, engine)
    if "s3_uri" not in engine:
        return None
    return BedrockBatch(model, aws, str(engine["s3_uri"]).rstrip("/"), str(engine["role_arn"]))


class BedrockBatch:
    """Satisfies ``BatchBackend``, which says what each method promises."""

    def __init__(self, model: ModelRef, aws: Aws, s3_uri: str, role_arn: str) -> None:
        self._model = model
        self._aws = aws
        self._s3_uri = s3_uri
        self._role_arn = role_arn

    @property
    def limits(self) -> BatchLimits:
        return LIMITS

    @property
    def version(self) -> str:
        return sdk_version()

    @property
    def account(self) -> str:
        """A fingerprint of endpoint, region, the role's account and the place in S3.

        Not of the access key: those of a role change within the hour.
        """
        with self._calls():
            region = self._aws.session.region_name
        if region is None:
            raise SystemicError(
                f"model {self._model}: no AWS region is configured; set engine.region"
            )
        return account_of(self._aws.base_url, region, account_of_role(self._role_arn), self._s3_uri)

    def identity(self) -> Mapping[str, Any]:
        return identity_of(self._aws)

    # --- creating -------------------------------------------------------------------------------

    def encoder(self, call: Call) -> Callable[[str, Request], bytes]:
        fixed = orjson.dumps(fixed_body(call))[:-1]  # without the brace that closes it

        def encode(custom_id: str, request: Request) -> bytes:
            own = orjson.dumps(messages_body(request))
            return b'{"recordId":"%b","modelInput":%b,%b}' % (custom_id.encode(), fixed, own[1:])

        return encode

    def upload(self, shard: ShardLabel, lines: Path, call: Call) -> str | None:
        uri = f"{self._folder(shard)}/input.jsonl"
        bucket, key = _split(uri)
        with self._calls():
            self._s3.upload_file(str(lines), bucket, key)
        return uri

    def create(
        self, shard: ShardLabel, lines: Path, uploaded: str | None, call: Call, must_end_by: float
    ) -> CreatedBatch:
        try:
            creating = asyncio.wait_for(
                in_thread(partial(self._create, shard, uploaded, must_end_by)),
                must_end_by - read_clock(),
            )
            reply = submit(creating).result()
        except asyncio.TimeoutError:
            message = "it is open whether there is a job: no reply in the time that was left for it"
            raise MaybeCreatedError(message) from None
        except Exception as error:  # noqa: BLE001  raised again where it is not boto3's
            # Unchained: boto3's own holds what AWS wrote, which may be credentials.
            raise self._creation_error(error) from None
        if not reply.get("jobArn"):
            raise MaybeCreatedError("it is open whether there is a job: the reply names none")
        return CreatedBatch(reply["jobArn"])

    def _create(self, shard: ShardLabel, uploaded: str | None, must_end_by: float) -> Any:
        def check_time(**_: object) -> None:
            if must_end_by - read_clock() < LIMITS.create_seconds / 2:
                raise _TooLateError("it was not begun, since too little time is left for it")

        client = self._aws.client("bedrock", _CREATE_READ_SECONDS, tries=1)
        try:
            # The last thing before the request is sent, and after it was signed.
            client.meta.events.register("before-send.bedrock.CreateModelInvocationJob", check_time)
            return client.create_model_invocation_job(
                jobName=_job_name(shard),
                clientRequestToken=shard.hex,
                roleArn=self._role_arn,
                modelId=self._model.name,
                modelInvocationType="Converse",
                inputDataConfig={
                    "s3InputDataConfig": {"s3InputFormat": "JSONL", "s3Uri": uploaded}
                },
                outputDataConfig={
                    "s3OutputDataConfig": {"s3Uri": f"{self._folder(shard)}/output/"}
                },
                timeoutDurationInHours=_WINDOW_HOURS,
            )
        finally:
            client.close()

    def _creation_error(self, error: Exception) -> BackendError:
        from botocore import exceptions

        never_sent = (
            _TooLateError,
            exceptions.EndpointConnectionError,
            exceptions.ConnectTimeoutError,
            exceptions.ProxyConnectionError,
        )
        if isinstance(error, never_sent):
            return NotCreatedError(BatchFault.TRANSIENT, f"the job was not sent: {error}")
        found = read_error(error)
        failure = classify_error(found) if isinstance(found, ErrorReply) else found
        message = failure.message[:MAX_MESSAGE_CHARS]
        systemic = SystemicError(f"model {self._model}: {message}")
        if isinstance(found, ErrorReply) and found.kind != "ConflictException":
            if found.kind == "ServiceQuotaExceededException":
                return NotCreatedError(BatchFault.QUEUE_FULL, message)
            if 300 <= found.status < 500 and found.status != 408:
                if failure.outcome is Outcome.TRANSIENT:
                    return NotCreatedError(BatchFault.TRANSIENT, message, found.retry_after_seconds)
                fault = fault_of(found.message)
                is_large = fault is BatchFault.TOO_LARGE
                return NotCreatedError(fault, message) if is_large else systemic
        elif failure.outcome is not Outcome.TRANSIENT and isinstance(found, Failure):
            return systemic  # boto3 sent nothing
        # A conflict too: the name is the shard's own, so whatever has it is its job.
        return MaybeCreatedError(f"it is open whether there is a job: {message}")

    def find(self, shard: ShardLabel) -> Finding:
        name = _job_name(shard)
        for job in self._jobs(nameContains=name):
            if job["jobName"] == name:
                return Finding(job["jobArn"])
        return Finding(is_sure=True)

    # --- following ------------------------------------------------------------------------------

    def poll(self, provider_batch_id: str) -> BatchStatus:
        return status_of(self._job(provider_batch_id))

    def cancel(self, provider_batch_id: str) -> None:
        try:
            with self._calls(provider_batch_id):
                self._control.stop_model_invocation_job(jobIdentifier=provider_batch_id)
        except BackendError:
            # What AWS says of a job that has ended is not documented.
            if not self.poll(provider_batch_id).state.is_final:
                raise

    def discard(self, provider_batch_id: str, uploaded: str | None) -> None:
        if uploaded is None:
            return
        bucket, key = _split(uploaded)
        with contextlib.suppress(BackendError), self._calls():
            self._s3.delete_object(Bucket=bucket, Key=key)

    def list_batches(self, since: datetime) -> Iterator[ListedBatch]:
        for job in self._jobs(submitTimeAfter=since):
            named = _NAME.fullmatch(job["jobName"])
            yield ListedBatch(
                job["jobArn"], status_of(job), job["submitTime"], named[1] if named else None
            )

    def _job(self, provider_batch_id: str) -> Mapping[str, Any]:
        with self._calls(provider_batch_id):
            job: Mapping[str, Any] = self._control.get_model_invocation_job(
                jobIdentifier=provider_batch_id
            )
            return job

    def _jobs(self, **conditions: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the account's jobs, newest first."""
        asked = {**conditions, "sortBy": "CreationTime", "sortOrder": "Descending"}
        while True:
            with self._calls():
                page = self._control.list_model_invocation_jobs(**asked)
            yield from page.get("invocationJobSummaries", ())
            if not page.get("nextToken"):
                return
            asked["nextToken"] = page["nextToken"]

    # --- results --------------------------------------------------------------------------------

    def fetch(self, provider_batch_id: str, folder: Path, call: Call) -> Iterator[BatchLine]:
        job = self._job(provider_batch_id)
        place = job["outputDataConfig"]["s3OutputDataConfig"]["s3Uri"].rstrip("/")
        job_id = job["jobArn"].rpartition("/")[2]
        bucket, prefix = _split(f"{place}/{job_id}/")
        with self._calls():
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
            keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
        keys = [key for key in keys if key.endswith(".jsonl.out")]
        if not keys and (job["status"] == "Completed" or job.get("successRecordCount")):
            raise BatchGoneError(f"the results of job {job_id} are not in {place} any more")
        files = []
        for number, key in enumerate(keys):
            file = folder / f"{job_id}-{number}.jsonl"
            with self._calls(provider_batch_id):
                self._s3.download_file(bucket, key, str(file))
            files.append(file)
        return (parse_line(line) for file in files for line in iter_lines(file))

    # --- the wire -------------------------------------------------------------------------------

    @cached_property
    def _control(self) -> Any:
        return self._aws.client("bedrock", _CALL_SECONDS)

    @cached_property
    def _s3(self) -> Any:
        return self._aws.client("s3", _CALL_SECONDS)

    def _folder(self, shard: ShardLabel) -> str:
        return f"{self._s3_uri}/{shard.hex}"

    @contextlib.contextmanager
    def _calls(self, provider_batch_id: str | None = None) -> Iterator[None]:
        """Raise boto3's errors as ours. With an id, what is not found is that job."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  raised again where it is not boto3's
            raise self._error(error, provider_batch_id) from None  # unchained, as in ``create``

    def _error(self, error: Exception, provider_batch_id: str | None) -> BackendError:
        found = read_error(error)
        failure = classify_error(found) if isinstance(found, ErrorReply) else found
        message = failure.message[:MAX_MESSAGE_CHARS]
        is_gone = isinstance(found, ErrorReply) and found.kind in _GONE_KINDS
        if provider_batch_id is not None and is_gone:
            return BatchGoneError(f"job {provider_batch_id}, or its output, is gone: {message}")
        if failure.outcome is None:
            return SystemicError(f"model {self._model}: {message}")
        if failure.outcome is Outcome.TRANSIENT:
            return ProviderBusyError(message, failure.retry_after_seconds)
        return BackendError(f"Bedrock refuses a call with {message}")

    def close(self) -> None:
        for name in ("_control", "_s3"):
            if name in self.__dict__:
                self.__dict__.pop(name).close()


def _job_name(shard: ShardLabel) -> str:
    return f"{_NAME_PREFIX}{shard.hex}"


def _split(uri: str) -> tuple[str, str]:
    parts = urlsplit(uri)
    return parts.netloc, parts.path.lstrip("/")
