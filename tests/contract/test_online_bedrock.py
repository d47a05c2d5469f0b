"""Bedrock's Converse through the suite that all online providers share, and in what is its own."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3")

from batchsql.backends import online, registry
from batchsql.backends.aws import is_own_url
from batchsql.backends.bedrock import messages_body
from batchsql.emulate import Emulator, Rule
from batchsql.errors import SpecError, SystemicError
from batchsql.types import Call, FinishReason, Message, ModelRef, Outcome, Request, Role, Usage
from batchsql.validate.structure import AnswerValidator
from tests.contract.base_online import GOOD, KEY, LABEL, BaseOnline, ask, parsed
from tests.support.online_server import OnlineServer, Reply

NESTED = {
    "score": {"type": "integer", "minimum": 1, "maximum": 5},
    "tags": {"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 2},
}


class TestBedrock(BaseOnline):
    provider = "bedrock"
    path = "/model/small-1/converse"
    key_env = None

    @pytest.fixture(autouse=True)
    def aws(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFTHETEST")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
        for name in ("AWS_BEARER_TOKEN_BEDROCK", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)

    def engine(self, server: OnlineServer, **options: Any) -> dict[str, Any]:
        defaults = {
            "base_url": server.url,
            "credentials": "environment",
            "region": "us-east-1",
        }
        return {k: v for k, v in {**defaults, **options}.items() if v is not None}

    def good(self, text: str = GOOD, reason: str | None = None) -> Reply:
        content = [{"reasoningContent": {"reasoningText": {"text": "hm"}}}, {"text": text}]
        usage = {
            "inputTokens": 15,
            "outputTokens": 5,
            "totalTokens": 105,
            "cacheReadInputTokens": 80,
            "cacheWriteInputTokens": 5,
        }
        body = {"output": {"message": {"role": "assistant", "content": content}}, "usage": usage}
        return Reply(200, {**body, "stopReason": reason or "end_turn", "metrics": {}})

    def error(self, status: int, message: str = "no", **fields: Any) -> Reply:
        headers = {"x-amzn-ErrorType": f"{fields['type']}:http://aws/"} if "type" in fields else {}
        return Reply(status, {"message": message}, headers)

    def refusal(self) -> Reply:
        return self.good("I cannot help with that.", "guardrail_intervened")

    def cut_off(self) -> Reply:
        return self.good('{"label":"b', "max_tokens")

    def too_long(self) -> Reply:
        return self.error(400, "Input is too long for requested model.", type="ValidationException")

    # Where AWS differs from what the suite expects of a provider.

    def test_each_request_is_sent_once_and_answered(self, server: OnlineServer) -> None:
        texts = [f"text {number}" for number in range(100)]
        completions = self.complete(server, *texts)
        assert {c.text for c in completions} == {GOOD}
        assert {c.finish_reason for c in completions} == {FinishReason.STOP}
        assert server.sent() == dict.fromkeys(texts, 1)
        assert {seen.path for seen in server.seen} == {self.path}
        for seen in server.seen:
            signature = seen.headers["authorization"]
            assert signature.startswith("AWS4-HMAC-SHA256 Credential=AKIDOFTHETEST/")
            assert "/us-east-1/bedrock/aws4_request" in signature
            assert KEY not in str(seen.headers)

    def test_usage_counts_cached_tokens_as_input(self, server: OnlineServer) -> None:
        (completion,) = self.complete(server, "x")
        assert completion.usage == Usage(
            input_tokens=100, output_tokens=5, cached_tokens=80, cache_write_tokens=5
        )
        assert completion.model_reported is None
        assert completion.started_at is not None and completion.finished_at is not None

    def test_a_refusal_says_so(self, server: OnlineServer) -> None:
        server.script["x"] = [self.refusal()]
        (completion,) = self.complete(server, "x")
        assert completion.finish_reason is FinishReason.CONTENT_FILTER
        assert AnswerValidator(parsed(LABEL)).check(completion).outcome is Outcome.FILTERED

    def test_no_key_and_no_headers_of_the_environment_reach_other_origins(
        self, server: OnlineServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mistakes = registry.check_model(self.model, {}, self.engine(server, credentials=None))
        assert [mistake.where for mistake in mistakes] == ["engine.credentials"]
        with pytest.raises(SpecError):
            registry.open_backend(self.model, self.engine(server, credentials=None), Path())
        assert server.seen == []

    def test_the_default_key_needs_the_provider_s_own_origin(
        self, server: OnlineServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_BEDROCK_RUNTIME", server.url)
        assert registry.check_model(self.model, {}, {}) == []
        assert registry.open_backend(self.model, {}, Path()).identity() == {}

    def test_a_missing_key_is_systemic_and_names_the_variable(
        self, server: OnlineServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(SystemicError, match="profile"):
            self.complete(server, "x", profile="nobody")
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(SystemicError, match="check the AWS credentials"):
            self.complete(server, "x")
        monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
        monkeypatch.delenv("AWS_REGION", raising=False)
        with pytest.raises(SystemicError, match="region"):
            self.complete(server, "x", region=None)
        assert server.seen == []

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("credentials", KEY),
            ("base_url", "ftp://host"),
            ("base_url", f"https://user:{KEY}@host/v1"),
            ("base_url", f"https://host/v1?key={KEY}"),
            ("base_url", "http://host:port/v1"),
        ],
    )
    def test_a_bad_option_is_a_mistake_that_shows_no_key(
        self, server: OnlineServer, option: str, value: str
    ) -> None:
        mistakes = registry.check_model(self.model, {}, self.engine(server, **{option: value}))
        assert [mistake.where for mistake in mistakes] == [f"engine.{option}"]
        assert KEY not in str(mistakes[0])

    # What is Bedrock's own.

    def test_the_body_holds_what_converse_accepts(self, server: OnlineServer) -> None:
        server.default = self.good("{}")
        params = {"temperature": 0, "top_p": 0.5, "stop": "END", "max_tokens": 50}
        self.complete(server, "x", returns=parsed(NESTED), params=params)
        body = dict(server.seen[0].body)
        described = body.pop("outputConfig")["textFormat"]
        assert body == {
            "messages": [{"role": "user", "content": [{"text": "x"}]}],
            "system": [{"text": "Label it."}],
            "inferenceConfig": {
                "maxTokens": 50,
                "temperature": 0,
                "topP": 0.5,
                "stopSequences": ["END"],
            },
        }
        assert described["type"] == "json_schema"
        schema = json.loads(described["structure"]["jsonSchema"]["schema"])
        assert schema["properties"]["score"] == {
            "type": "integer",
            "description": "minimum: 1; maximum: 5",
        }
        assert schema["properties"]["tags"] == {
            "type": "array",
            "items": {"type": "string", "description": "minLength: 2"},
            "description": "minItems: 2",
        }
        assert schema["additionalProperties"] is False

    @pytest.mark.parametrize(
        ("status", "kind"),
        [
            (429, "ThrottlingException"),
            (408, "ModelTimeoutException"),
            (429, "ModelNotReadyException"),
            (424, "ModelErrorException"),
            (503, "ServiceUnavailableException"),
            (500, "InternalServerException"),
        ],
    )
    def test_a_transient_error_is_sent_again(
        self, server: OnlineServer, status: int, kind: str
    ) -> None:
        server.script["x"] = [self.error(status, type=kind), self.good()]
        (completion,) = self.complete(server, "x")
        assert completion.text == GOOD
        assert server.sent() == {"x": 2}

    @pytest.mark.parametrize(
        ("status", "kind", "message", "hint"),
        [
            (403, "AccessDeniedException", "no", "access to the model"),
            (403, "UnrecognizedClientException", "no", "AWS credentials"),
            (403, "ExpiredTokenException", "no", "AWS credentials"),
            (404, "ResourceNotFoundException", "no", "model's id"),
            (400, "ValidationException", "The provided model identifier is invalid.", "model"),
            (400, "ValidationException", "1 validation error detected: Value '2' at "
             "'inferenceConfig.temperature' failed", "inferenceConfig"),
            (400, "ValidationException", "This model doesn't support the outputConfig.textFormat "
             "field", "outputConfig"),
        ],
    )  # fmt: skip
    def test_a_fault_that_all_requests_share_is_systemic(
        self, server: OnlineServer, status: int, kind: str, message: str, hint: str
    ) -> None:
        server.default = self.error(status, message, type=kind)
        with pytest.raises(SystemicError, match=hint):
            self.complete(server, "x")
        assert server.sent() == {"x": 1}

    def test_a_fault_in_one_request_is_its_own(self, server: OnlineServer) -> None:
        message = "The text field at messages.0.content.0 is blank; models do not support that."
        server.script["x"] = [self.error(400, message, type="ValidationException")]
        completions = self.complete(server, "x", "y")
        assert [c.failure for c in completions] == [Outcome.REJECTED, None]

    def test_an_output_that_the_model_garbled_is_for_the_validator(
        self, server: OnlineServer
    ) -> None:
        server.script["x"] = [self.good('{"lab', "malformed_model_output")]
        (completion,) = self.complete(server, "x")
        assert completion.finish_reason is FinishReason.STOP
        assert AnswerValidator(parsed(LABEL)).check(completion).outcome is Outcome.INVALID

    def test_messages_of_one_role_in_a_row_become_one(self) -> None:
        roles = [Role.SYSTEM, Role.USER, Role.USER, Role.ASSISTANT, Role.USER, Role.SYSTEM]
        request = Request("k", tuple(Message(role, str(n)) for n, role in enumerate(roles)))
        assert messages_body(request) == {
            "system": [{"text": "0"}, {"text": "5"}],
            "messages": [
                {"role": "user", "content": [{"text": "1"}, {"text": "2"}]},
                {"role": "assistant", "content": [{"text": "3"}]},
                {"role": "user", "content": [{"text": "4"}]},
            ],
        }


def test_rehearsal_server_answers_every_request_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFTHETEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.delenv("AWS_BEARER_TOKEN_BEDROCK", raising=False)
    monkeypatch.setattr(online, "FIRST_BACKOFF_SECONDS", 0.01)
    model = ModelRef("bedrock", "us.amazon.nova-lite-v1:0")
    call = Call(model, {}, parsed(LABEL).object_schema(), 50)
    with Emulator(rules=[Rule(behaviour="rate_limit", every=5, count=3)]) as emulator:
        engine = {
            "base_url": emulator.bedrock_base_url,
            "credentials": "environment",
            "region": "us-east-1",
        }
        backend = registry.open_backend(model, engine, tmp_path)
        requests = iter([ask(number, f"row {number}") for number in range(40)])
        found = [c for c in backend.complete(requests, call, threading.Event()) if c is not None]
        validator = AnswerValidator(parsed(LABEL))
        assert [validator.check(each).outcome for each in found] == [Outcome.OK] * 40
        assert list(emulator.bill.by_prompt.values()) == [1] * 40


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://bedrock-runtime.us-east-1.amazonaws.com", True),
        ("https://bedrock-runtime-fips.us-gov-west-1.amazonaws.com/", True),
        ("https://bedrock-runtime.cn-north-1.amazonaws.com.cn", True),
        ("https://bedrock-runtime.eu-west-1.api.aws", True),
        ("https://vpce-1-2.bedrock-runtime.us-east-1.vpce.amazonaws.com", True),
        ("https://s3.eu-west-1.amazonaws.com", True),
        ("http://bedrock-runtime.us-east-1.amazonaws.com", False),
        ("https://bedrock-runtime.us-east-1.amazonaws.com.evil.example", False),
        ("https://x.execute-api.us-east-1.amazonaws.com", False),
        ("https://bedrock-runtime.us-east-1.amazonaws.com@evil.example", False),
        ("https://evil.example/bedrock-runtime.us-east-1.amazonaws.com", False),
    ],
)
def test_only_hosts_of_the_services_are_aws_s_own(url: str, expected: bool) -> None:
    assert is_own_url(url) is expected
