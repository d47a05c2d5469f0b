"""What Amazon Bedrock demands of a Converse request and of a batch inference job."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from batchsql.emulate.anthropic_rules import schema_mistakes
from batchsql.emulate.provider import ApiError

# Names and patterns are those of botocore's service models.
_CONVERSE = frozenset({
    "messages", "system", "inferenceConfig", "toolConfig", "guardrailConfig", "projectIdentifier",
    "additionalModelRequestFields", "promptVariables", "additionalModelResponseFieldPaths",
    "requestMetadata", "performanceConfig", "serviceTier", "outputConfig",
})  # fmt: skip
_S3_URI = r"s3://[a-z0-9][-.a-z0-9]{1,61}[a-z0-9](/[-!_*'().a-z0-9A-Z]+)*/?"
_JOB_FIELDS = {
    "jobName": r"[a-zA-Z0-9][a-zA-Z0-9+\-.]*",
    "roleArn": r"arn:aws(-[^:]+)?:iam::([0-9]{12})?:role/.+",
    "modelId": r".+",
}
_TOKEN = r"[a-zA-Z0-9](-*[a-zA-Z0-9])*"  # noqa: S105 - a pattern
_JOB_NAMES = frozenset({
    *_JOB_FIELDS, "clientRequestToken", "inputDataConfig", "outputDataConfig", "vpcConfig",
    "timeoutDurationInHours", "tags", "modelInvocationType",
})  # fmt: skip
_LENGTHS = {"jobName": 63, "roleArn": 2048, "modelId": 2048, "clientRequestToken": 256}
_PROFILE = re.compile(r"(?:us|us-gov|eu|apac|jp|au|ca|global)\.")
_MODEL_ARN = re.compile(
    r"arn:aws(?:-[^:]+)?:bedrock:[a-z0-9-]+:(?:[0-9]{12})?:"
    r"(?:foundation-model|inference-profile)/(.+)"
)


def invalid(message: str) -> ApiError:
    """Return the error of a malformed request."""
    return ApiError(400, "ValidationException", message)


@dataclass(frozen=True, slots=True)
class Converse:
    """What matters of a valid request."""

    system: str
    prompt: str
    messages: int
    max_tokens: int | None
    schema: Mapping[str, Any] | None


class ConverseChecker:
    """Checks Converse requests. A schema that was seen before is not checked again."""

    def __init__(self) -> None:
        self._schemas: dict[str, tuple[Mapping[str, Any], str | None]] = {}

    def check(self, body: Any, *, in_batch: bool) -> Converse:
        """Return what matters of a request, or raise ApiError as Bedrock would."""
        if not isinstance(body, dict):
            raise invalid("The request body must be a JSON object.")
        for name in body:
            if name not in _CONVERSE:
                raise invalid(f"The model returned the following errors: {name}: Extra inputs are "
                              "not permitted")  # fmt: skip
        if in_batch and "toolConfig" in body:
            raise invalid("toolConfig is not supported in batch inference with Converse.")
        system = list(_blocks(body.get("system") or [], "system"))
        messages = body.get("messages") or []
        prompts = list(_messages(messages))
        max_tokens = _inference(body.get("inferenceConfig") or {})
        return Converse(
            "\n".join(system), "\n".join(prompts), len(messages), max_tokens,
            self._schema(body.get("outputConfig")),
        )  # fmt: skip

    def _schema(self, config: Any) -> Mapping[str, Any] | None:
        if config is None:
            return None
        wanted = config.get("textFormat") if isinstance(config, dict) else None
        if wanted is None:
            return None
        where = "outputConfig.textFormat"
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise invalid(f"Value at '{where}.type' failed to satisfy constraint: Member must "
                          "satisfy enum value set: [json_schema]")  # fmt: skip
        structure = wanted.get("structure")
        described = structure.get("jsonSchema") if isinstance(structure, dict) else None
        text = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(text, str):
            raise invalid(f"Value at '{where}.structure.jsonSchema.schema' failed to satisfy "
                          "constraint: Member must be a string")  # fmt: skip
        if text not in self._schemas:
            self._schemas[text] = _checked_schema(text, where)
        schema, mistake = self._schemas[text]
        if mistake is not None:
            raise invalid(f"{where}.structure.jsonSchema.schema: {mistake}")
        return schema


def _checked_schema(text: str, where: str) -> tuple[Mapping[str, Any], str | None]:
    try:
        schema = orjson.loads(text)
    except ValueError:
        schema = None
    if not isinstance(schema, dict):
        raise invalid(f"{where}.structure.jsonSchema.schema: The schema is not a JSON object")
    # Bedrock documents the same subset of JSON Schema as Anthropic, without the caps.
    return schema, next((each for each in schema_mistakes(schema) if "too many" not in each), None)


def _messages(messages: Any) -> Iterator[str]:
    if not isinstance(messages, list) or not messages:
        raise invalid("The messages field is required, and must not be empty.")
    last = None
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            where = f"messages.{number + 1}.member.role"
            raise invalid(f"Value at '{where}' failed to satisfy constraint: Member must satisfy "
                          "enum value set: [user, assistant]")  # fmt: skip
        if number == 0 and role != "user":
            raise invalid("A conversation must start with a user message. Try again with a "
                          "conversation that starts with a user message.")  # fmt: skip
        if role == last:
            raise invalid("A conversation must alternate between user and assistant roles. Make "
                          "sure the conversation alternates between user and assistant roles and "
                          "try again.")  # fmt: skip
        last = role
        content = message.get("content")
        if not isinstance(content, list) or not content:
            raise invalid(f"The content field in the Message object at messages.{number} is "
                          "empty. Add a ContentBlock object to it and try again.")  # fmt: skip
        yield from _blocks(content, f"messages.{number}.content")


def _blocks(blocks: Any, where: str) -> Iterator[str]:
    if not isinstance(blocks, list):
        raise invalid(f"Value at '{where}' failed to satisfy constraint: Member must be a list")
    for number, block in enumerate(blocks):
        if not isinstance(block, dict) or len(block) != 1:
            raise invalid(f"The block at {where}.{number} must set exactly one member.")
        if "text" not in block:
            continue
        text = block["text"]
        if not isinstance(text, str) or not text.strip():
            raise invalid(f"The text field in the ContentBlock object at {where}.{number} is "
                          "blank. Add text to the text field, and try again.")  # fmt: skip
        yield text


def _inference(config: Any) -> int | None:
    if not isinstance(config, dict):
        raise invalid("Value at 'inferenceConfig' failed to satisfy constraint: an object")
    for name, value in config.items():
        where = f"inferenceConfig.{name}"
        if name == "maxTokens":
            if type(value) is not int or value < 1:
                raise invalid(f"Value '{value}' at '{where}' failed to satisfy constraint: Member "
                              "must have value greater than or equal to 1")  # fmt: skip
        elif name in ("temperature", "topP"):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= 1:
                raise invalid(f"Value '{value}' at '{where}' failed to satisfy constraint: Member "
                              "must have value less than or equal to 1")  # fmt: skip
        elif name == "stopSequences":
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise invalid(f"Value at '{where}' failed to satisfy constraint: a list of strings")
        else:
            raise invalid(f"Value at '{where}' failed to satisfy constraint: no such member")
    max_tokens: int | None = config.get("maxTokens")
    return max_tokens


def find_model(models: frozenset[str], name: str) -> str | None:
    """Return the model that an id, an inference profile or an ARN of either stands for."""
    found = _MODEL_ARN.fullmatch(name)
    name = found[1] if found else name
    bare = _PROFILE.sub("", name, count=1)
    return name if name in models or bare in models else None


def check_job(body: Any) -> None:
    """Check a CreateModelInvocationJob request, or raise ApiError as Bedrock would."""
    if not isinstance(body, dict):
        raise invalid("The request body must be a JSON object.")
    patterns = dict(_JOB_FIELDS)
    if "clientRequestToken" in body:
        patterns["clientRequestToken"] = _TOKEN
    for name, pattern in patterns.items():
        _check(name, body.get(name), pattern, _LENGTHS[name])
    for name in body:
        if name not in _JOB_NAMES:
            raise invalid(f"Value at '{name}' failed to satisfy constraint: no such member")
    for name, inner in (("input", "s3InputDataConfig"), ("output", "s3OutputDataConfig")):
        config = body.get(f"{name}DataConfig")
        place = config.get(inner) if isinstance(config, dict) else None
        uri = place.get("s3Uri") if isinstance(place, dict) else None
        _check(f"{name}DataConfig.{inner}.s3Uri", uri, _S3_URI, 1024)
    hours = body.get("timeoutDurationInHours", 24)
    if type(hours) is not int or not 24 <= hours <= 168:
        raise invalid(f"1 validation error detected: Value '{hours}' at 'timeoutDurationInHours' "
                      "failed to satisfy constraint: Member must be from 24 to 168")  # fmt: skip
    kind = body.get("modelInvocationType", "InvokeModel")
    if kind not in ("InvokeModel", "Converse"):
        raise invalid(f"1 validation error detected: Value '{kind}' at 'modelInvocationType' "
                      "failed to satisfy constraint: Member must satisfy enum value set: "
                      "[InvokeModel, Converse]")  # fmt: skip
    if kind != "Converse":
        raise invalid("The rehearsal server only runs jobs with modelInvocationType Converse.")


def _check(name: str, value: Any, pattern: str, length: int) -> None:
    if value is None:
        raise invalid(f"1 validation error detected: Value null at '{name}' failed to satisfy "
                      "constraint: Member must not be null")  # fmt: skip
    if not isinstance(value, str) or len(value) > length or not re.fullmatch(pattern, value):
        raise invalid(f"1 validation error detected: Value '{value}' at '{name}' failed to "
                      "satisfy constraint: Member must satisfy regular expression pattern: "
                      f"{pattern}")  # fmt: skip


def check_records(
    files: Mapping[str, bytes], *, least: int, most: int, max_bytes: int
) -> tuple[list[tuple[str, bytes]], str | None]:
    """Return each record with the file it stands in, and why the job fails, or None.

    As Bedrock does it: only the form of a record is checked here, its ``modelInput`` when it is
    its turn.
    """
    if not files:
        return [], "The provided S3 location holds no file that ends in .jsonl."
    records: list[tuple[str, bytes]] = []
    seen: set[str] = set()
    for name, content in files.items():
        if len(content) > max_bytes:
            return [], (f"The size of the input file {name} is {len(content)} bytes, which exceeds "
                        f"the maximum allowed size of {max_bytes} bytes.")  # fmt: skip
        for number, line in enumerate(content.split(b"\n"), start=1):
            if not line.strip():
                continue
            problem = _record_problem(line, seen)
            if problem:
                return [], f"Input file {name}, line {number}: {problem}"
            records.append((name, line))
    if len(records) < least:
        return (
            [],
            f"The job contains less records ({len(records)}) than the required minimum of: {least}",
        )
    if len(records) > most:
        return (
            [],
            f"The job contains more records ({len(records)}) than the allowed maximum of: {most}",
        )
    return records, None


def _record_problem(line: bytes, seen: set[str]) -> str | None:
    try:
        record = orjson.loads(line)
    except ValueError:
        return "The record is not valid JSON."
    if not isinstance(record, dict) or not isinstance(record.get("modelInput"), dict):
        return "The record has no modelInput object."
    record_id = record.get("recordId")
    if not isinstance(record_id, str) or not record_id:
        return "The record has no recordId."
    if record_id in seen:
        return f"The recordId {record_id} is given twice."
    seen.add(record_id)
    return None
