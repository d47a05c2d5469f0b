"""The online providers, each through the suite that they share and in what is its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from batchsql.backends import anthropic, google, openai, registry
from batchsql.errors import SystemicError
from batchsql.types import Call, FinishReason, ModelRef, Outcome, Usage
from batchsql.validate.structure import AnswerValidator
from tests.contract.base_online import GOOD, BaseOnline, parsed
from tests.support.online_server import OnlineServer, Reply

pytest.importorskip("openai")
pytest.importorskip("anthropic")
pytest.importorskip("google.genai")

OWN_KEY = "sk-own-key-of-this-machine"
NESTED = {
    "score": {"type": "integer", "minimum": 1, "maximum": 5},
    "name": {"type": "string", "maxLength": 9, "description": "A name"},
    "tags": {"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 2},
    "place": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "zip": {"type": "integer"},
            "note": {"type": "string", "nullable": True},
        },
        "required": ["city"],
    },
}


class ChatWire(BaseOnline):
    """What OpenAI and the compatible servers have in common."""

    path = "/v1/chat/completions"
    base_path = "/v1"
    custom_headers_env = "OPENAI_CUSTOM_HEADERS"

    def good(self, text: str = GOOD, reason: str | None = None, **message: Any) -> Reply:
        usage = {
            "prompt_tokens": 100,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 80},
        }
        choice = {
            "index": 0,
            "finish_reason": reason or "stop",
            "message": {"role": "assistant", "content": text, **message},
        }
        return Reply(200, {"model": "small-1-2026", "choices": [choice], "usage": usage})

    def error(self, status: int, message: str = "no", **fields: Any) -> Reply:
        return Reply(status, {"error": {"message": message, "type": "some_error", **fields}})

    def refusal(self) -> Reply:
        return self.good("", refusal="I cannot help with that.")

    def cut_off(self) -> Reply:
        return self.good('{"label":"b', "length")

    def too_long(self) -> Reply:
        return self.error(400, "too many tokens", code="context_length_exceeded")

    def test_a_filtered_answer_says_so(self, server: OnlineServer) -> None:
        server.script["x"] = [self.good("", "content_filter")]
        server.script["y"] = [self.error(400, code="content_filter")]
        answer, prompt = self.complete(server, "x", "y")
        assert answer.finish_reason is FinishReason.CONTENT_FILTER
        assert prompt.failure is Outcome.FILTERED

    def test_a_spent_quota_is_systemic(self, server: OnlineServer) -> None:
        server.default = self.error(429, "You exceeded your quota", code="insufficient_quota")
        with pytest.raises(SystemicError, match="quota"):
            self.complete(server, "x")
        assert server.sent() == {"x": 1}

    @pytest.mark.parametrize("param", ["temperature", "response_format", "model"])
    def test_a_fault_that_all_requests_share_is_systemic(
        self, server: OnlineServer, param: str
    ) -> None:
        server.default = self.error(400, f"bad {param}", param=param)
        with pytest.raises(SystemicError, match=f"bad {param}"):
            self.complete(server, "x", params={"temperature": 0.5})


class TestOpenAI(ChatWire):
    provider = "openai"
    key_env = "OPENAI_API_KEY"

    def test_the_body_holds_what_openai_accepts(self, server: OnlineServer) -> None:
        answer = (
            '{"score":3,"name":"a","tags":["ab","cd"],"place":{"city":"b","zip":null,"note":null}}'
        )
        server.default = self.good(answer)
        returns = parsed(NESTED)
        params = {"temperature": 0, "reasoning_effort": "low", "max_tokens": 50}
        (completion,) = self.complete(server, "x", returns=returns, params=params)
        body = server.seen[0].body
        schema = body["response_format"]["json_schema"]["schema"]
        assert body["messages"] == [
            {"role": "system", "content": "Label it."},
            {"role": "user", "content": "x"},
        ]
        assert {
            name: body[name] for name in body if name not in ("messages", "response_format")
        } == {
            "model": "small-1",
            "max_completion_tokens": 50,
            "temperature": 0,
            "reasoning_effort": "low",
        }
        assert list(schema["properties"]) == list(NESTED) == schema["required"]
        assert schema["properties"]["score"] == {"type": "integer", "minimum": 1, "maximum": 5}
        assert schema["properties"]["name"] == {
            "type": "string",
            "description": "A name; maxLength: 9",
        }
        place = schema["properties"]["place"]
        assert place["required"] == ["city", "zip", "note"]
        assert place["properties"]["zip"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
        # The null that stands for "left out" does not reach the user's schema.
        verdict = AnswerValidator(returns).check(completion)
        assert verdict.outcome is Outcome.OK
        assert verdict.answer is not None
        assert '"place":{"city":"b","note":null}' in verdict.answer

    def test_a_fine_tuned_model_gets_no_bounds(self) -> None:
        call = Call(ModelRef("openai", "ft:x"), {}, parsed(NESTED).object_schema(), 9)
        body = openai.fixed_body(call, is_compatible=False)
        score = body["response_format"]["json_schema"]["schema"]["properties"]["score"]
        assert score == {"type": "integer", "description": "minimum: 1; maximum: 5"}

    @pytest.mark.parametrize(
        ("name", "params", "limit"),
        [
            ("gpt-4.1-mini", {}, 50),
            ("gpt-5-mini", {}, 50 + 8192),
            ("o4-mini", {}, 50 + 8192),
            ("ft:gpt-5-mini:us", {}, 50 + 8192),
            ("gpt-5-mini", {"max_tokens": 50}, 50),
        ],
    )
    def test_a_model_that_thinks_has_room_for_it(
        self, name: str, params: dict[str, Any], limit: int
    ) -> None:
        call = Call(ModelRef("openai", name), params, parsed(NESTED).object_schema(), 50)
        assert openai.fixed_body(call, is_compatible=False)["max_completion_tokens"] == limit

    def test_the_own_origin_gets_the_default_key(
        self, server: OnlineServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(openai, "OWN_BASE_URL", server.url + "/v1")
        (completion,) = self.complete(server, "x", api_key_env=None, base_url=None)
        assert completion.text == GOOD
        assert server.seen[0].headers["authorization"] == f"Bearer {OWN_KEY}"
        assert registry.open_backend(self.model, {}, Path()).identity() == {}

    def engine(self, server: OnlineServer, **options: Any) -> dict[str, Any]:
        return {k: v for k, v in super().engine(server, **options).items() if v is not None}


class TestOpenAICompatible(ChatWire):
    provider = "openai_compatible"
    key_env = None

    def too_long(self) -> Reply:
        message = "This model's maximum context length is 4096 tokens. However, you requested more"
        return Reply(400, {"object": "error", "message": message, "code": 400})

    def test_the_schema_is_sent_as_it_is(self, server: OnlineServer) -> None:
        returns = parsed(NESTED)
        server.default = self.good("{}")
        self.complete(server, "x", returns=returns, params={"top_k": 5, "min_p": 0.1})
        body = server.seen[0].body
        assert body["response_format"]["json_schema"]["schema"] == returns.object_schema()
        assert (body["max_tokens"], body["top_k"], body["min_p"]) == (50, 5, 0.1)

    @pytest.mark.parametrize(
        ("message", "param"),
        [
            ("Grammar error: Failed to generate regex for integer range", None),
            ("Failed to transform json schema into a grammar: no", None),
            ("The provided JSON schema contains features not supported by xgrammar.", None),
            ("Invalid JSON grammar specification.", None),
            ("1 validation error", "body.reasoning_effort"),
            ("max_tokens=600 cannot be greater than max_model_len=512.", "max_tokens"),
        ],
    )
    def test_what_vllm_refuses_of_every_request_is_systemic(
        self, server: OnlineServer, message: str, param: str | None
    ) -> None:
        error = {"message": message, "type": "BadRequestError", "param": param, "code": 400}
        server.default = Reply(400, {"error": error})
        with pytest.raises(SystemicError, match=message[:20]):
            self.complete(server, "x", "y")
        assert server.sent() == {"x": 1}

    @pytest.mark.parametrize(
        ("message", "param", "failure"),
        [
            (
                "This model's maximum context length is 512 tokens. However, your prompt contains "
                "at least 513 input tokens, which exceeds this limit even without any output "
                "tokens. (parameter=input_tokens, value=513)",
                "input_tokens",
                Outcome.TOO_LONG,
            ),
            ("TextEncodeInput must be Union[TextInputSequence]", None, Outcome.REJECTED),
        ],
    )
    def test_what_vllm_refuses_of_one_request_fails_it_alone(
        self, server: OnlineServer, message: str, param: str | None, failure: Outcome
    ) -> None:
        error = {"message": message, "type": "BadRequestError", "param": param, "code": 400}
        server.script["x"] = [Reply(400, {"error": error})]
        refused, good = self.complete(server, "x", "y")
        assert (refused.failure, good.failure) == (failure, None)

    def test_the_address_is_needed(self) -> None:
        mistakes = registry.check_model(self.model, {}, {})
        assert [mistake.where for mistake in mistakes] == ["engine.base_url"]


class TestAnthropic(BaseOnline):
    provider = "anthropic"
    path = "/v1/messages"
    key_env = "ANTHROPIC_API_KEY"
    custom_headers_env = "ANTHROPIC_CUSTOM_HEADERS"
    usage = Usage(100, 5, cached_tokens=80, cache_write_tokens=5, cache_write_1h_tokens=3)

    def good(self, text: str = GOOD, reason: str | None = None) -> Reply:
        usage = {
            "input_tokens": 15,
            "output_tokens": 5,
            "cache_read_input_tokens": 80,
            "cache_creation_input_tokens": 5,
            "cache_creation": {"ephemeral_5m_input_tokens": 2, "ephemeral_1h_input_tokens": 3},
        }
        content = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": text}]
        body = {"type": "message", "model": "small-1-2026", "content": content, "usage": usage}
        return Reply(200, {**body, "stop_reason": reason or "end_turn"})

    def error(self, status: int, message: str = "no", **fields: Any) -> Reply:
        error = {"type": "some_error", "message": message, **fields}
        return Reply(status, {"type": "error", "error": error})

    def refusal(self) -> Reply:
        return self.good("", "refusal")

    def cut_off(self) -> Reply:
        return self.good('{"label":"b', "max_tokens")

    def too_long(self) -> Reply:
        return self.error(400, "prompt is too long: 208310 tokens > 200000 maximum")

    def test_the_body_holds_what_anthropic_accepts(self, server: OnlineServer) -> None:
        server.default = self.good("{}")
        params = {"temperature": 0, "stop": "END", "effort": "low", "max_tokens": 50}
        self.complete(server, "x", returns=parsed(NESTED), params=params)
        body = server.seen[0].body
        schema = body["output_config"]["format"]["schema"]
        assert {k: v for k, v in body.items() if k != "output_config"} == {
            "model": "small-1",
            "max_tokens": 50,
            "temperature": 0,
            "stop_sequences": ["END"],
            "system": "Label it.",
            "messages": [{"role": "user", "content": "x"}],
        }
        assert body["output_config"]["effort"] == "low"
        assert schema["properties"]["score"] == {
            "type": "integer",
            "description": "minimum: 1; maximum: 5",
        }
        assert schema["properties"]["tags"] == {
            "type": "array",
            "items": {"type": "string", "description": "minLength: 2"},
            "description": "minItems: 2",
        }
        assert schema["properties"]["place"]["required"] == ["city"]

    @pytest.mark.parametrize(
        "message",
        [
            "Your credit balance is too low to access the API.",
            "output_config.format.schema: For 'object' type, too many properties",
            "temperature: may only be set to 1",
        ],
    )
    def test_a_fault_that_all_requests_share_is_systemic(
        self, server: OnlineServer, message: str
    ) -> None:
        server.default = self.error(400, message, type="invalid_request_error")
        with pytest.raises(SystemicError, match=message[:20]):
            self.complete(server, "x", params={"temperature": 0.5})

    def test_a_request_above_the_size_limit_is_too_long(self, server: OnlineServer) -> None:
        server.script["x"] = [self.error(413, type="request_too_large")]
        (completion,) = self.complete(server, "x")
        assert completion.failure is Outcome.TOO_LONG

    def test_the_own_origin_gets_the_default_key(
        self, server: OnlineServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(anthropic, "OWN_BASE_URL", server.url)
        (completion,) = self.complete(server, "x", api_key_env=None, base_url=None)
        assert completion.text == GOOD
        assert server.seen[0].headers["authorization"] == f"Bearer {OWN_KEY}"
        assert registry.open_backend(self.model, {}, Path()).identity() == {}

    def engine(self, server: OnlineServer, **options: Any) -> dict[str, Any]:
        return {k: v for k, v in super().engine(server, **options).items() if v is not None}


class TestGoogle(BaseOnline):
    provider = "google"
    path = "/v1/models/small-1:generateContent"
    key_env = "GEMINI_API_KEY"
    custom_headers_env = "GOOGLE_API_KEY"  # the SDK takes no headers from there, but a key
    key_header = "x-goog-api-key"
    key_prefix = ""
    usage = Usage(input_tokens=100, output_tokens=5, cached_tokens=80, reasoning_tokens=3)

    @pytest.fixture(autouse=True)
    def misleading(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set what would send the SDK elsewhere."""
        monkeypatch.setenv("GOOGLE_GENAI_USE_VERTEXAI", "true")
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "some-project")
        monkeypatch.setenv("GOOGLE_CLOUD_LOCATION", "europe-west1")
        monkeypatch.setenv("GOOGLE_GENAI_API_VERSION", "v0")
        monkeypatch.setenv("GOOGLE_GEMINI_BASE_URL", "http://127.0.0.1:1")
        monkeypatch.setenv("GOOGLE_API_KEY", "sk-another-key")

    def good(self, text: str = GOOD, reason: str | None = None) -> Reply:
        usage = {
            "promptTokenCount": 100,
            "cachedContentTokenCount": 80,
            "candidatesTokenCount": 2,
            "thoughtsTokenCount": 3,
        }
        parts = [{"text": "hm", "thought": True}, {"text": text}, {"thoughtSignature": "x"}]
        candidate = {"content": {"parts": parts, "role": "model"}, "finishReason": reason or "STOP"}
        return Reply(
            200,
            {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "small-1-2026"},
        )

    def error(self, status: int, message: str = "no", **fields: Any) -> Reply:
        body = {"code": status, "message": message, "status": "SOME_STATUS", **fields}
        return Reply(status, {"error": body})

    def cut_off(self) -> Reply:
        return self.good('{"label":"b', "MAX_TOKENS")

    def too_long(self) -> Reply:
        return self.error(
            400, "The input token count (12) exceeds the maximum number of tokens allowed (9)."
        )

    def test_a_refusal_says_so(self, server: OnlineServer) -> None:
        """Gemini has no refusals; a prompt that it does not take is filtered."""
        usage = {"promptTokenCount": 7}
        blocked = {"promptFeedback": {"blockReason": "OTHER"}, "usageMetadata": usage}
        server.script["x"] = [Reply(200, blocked)]
        (completion,) = self.complete(server, "x")
        assert completion.finish_reason is FinishReason.CONTENT_FILTER
        assert completion.usage == Usage(input_tokens=7)
        assert AnswerValidator(parsed(NESTED)).check(completion).outcome is Outcome.FILTERED

    @pytest.mark.parametrize(
        "reason", ["SAFETY", "RECITATION", "PROHIBITED_CONTENT", "BLOCKLIST", "SPII", "LANGUAGE"]
    )
    def test_a_filtered_answer_says_so(self, server: OnlineServer, reason: str) -> None:
        reply = self.good("", reason)
        del reply.body["candidates"][0]["content"]
        server.script["x"] = [reply]
        (completion,) = self.complete(server, "x")
        assert completion.finish_reason is FinishReason.CONTENT_FILTER

    @pytest.mark.parametrize("reason", ["OTHER", "MALFORMED_RESPONSE"])
    def test_an_answer_gone_wrong_counts_against_the_request(
        self, server: OnlineServer, reason: str
    ) -> None:
        server.script["x"] = [self.good("", reason)]
        (completion,) = self.complete(server, "x")
        assert (completion.failure, completion.usage) == (Outcome.INVALID, self.usage)
        assert server.sent() == {"x": 1}

    def test_the_body_holds_what_gemini_accepts(self, server: OnlineServer) -> None:
        server.default = self.good("{}")
        params = {
            "temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 7, "stop": "END", "max_tokens": 50,
            "presence_penalty": 0.1, "frequency_penalty": 0.2, "thinking_budget": 0,
        }  # fmt: skip
        self.complete(server, "x", returns=parsed(NESTED), params=params)
        body = server.seen[0].body
        config = body["generationConfig"]
        schema = config.pop("responseJsonSchema")
        assert body == {
            "systemInstruction": {"parts": [{"text": "Label it."}]},
            "contents": [{"role": "user", "parts": [{"text": "x"}]}],
            "generationConfig": config,
        }
        assert config == {
            "temperature": 0, "topP": 0.5, "topK": 3, "seed": 7, "stopSequences": ["END"],
            "presencePenalty": 0.1, "frequencyPenalty": 0.2, "maxOutputTokens": 50,
            "thinkingConfig": {"thinkingBudget": 0}, "responseMimeType": "application/json",
        }  # fmt: skip
        assert schema["properties"]["score"] == {"type": "integer", "minimum": 1, "maximum": 5}
        assert schema["properties"]["name"] == {
            "type": "string",
            "description": "A name; maxLength: 9",
        }
        assert schema["properties"]["tags"] == {
            "type": "array",
            "items": {"type": "string", "description": "minLength: 2"},
            "minItems": 2,
        }
        assert schema["properties"]["place"]["required"] == ["city"]

    @pytest.mark.parametrize(
        ("name", "params", "limit"),
        [
            ("gemini-2.0-flash", {}, 50),
            ("gemini-2.5-flash", {}, 50 + 8192),
            ("gemini-3.8-flash", {"thinking_level": "low"}, 50 + 8192),
            ("gemini-10-pro", {}, 50 + 8192),
            ("gemini-2.5-flash", {"thinking_budget": -1}, 50 + 8192),
            ("gemini-2.5-flash", {"thinking_budget": 0}, 50),
            ("gemini-2.5-flash", {"thinking_budget": 2000}, 2050),
            ("gemini-2.5-flash", {"max_tokens": 50}, 50),
        ],
    )
    def test_a_model_that_thinks_has_room_for_it(
        self, name: str, params: dict[str, Any], limit: int
    ) -> None:
        call = Call(ModelRef("google", name), params, parsed(NESTED).object_schema(), 50)
        assert google.fixed_body(call)["generationConfig"]["maxOutputTokens"] == limit

    @pytest.mark.parametrize(
        ("status", "message", "details"),
        [
            (400, "API key not valid. Please pass a valid API key.", []),
            (400, "* GenerateContentRequest.generation_config.temperature: out of range", []),
            (400, "bad", [{"fieldViolations": [{"field": "generation_config.top_k"}]}]),
            (400, "The specified schema produces a constraint that has too many states.", []),
            (429, "Your prepayment credits are depleted.", []),
            (429, "quota", [{"violations": [{"quotaId": "GenerateRequestsPerDayPerProject"}]}]),
        ],
    )
    def test_a_fault_that_all_requests_share_is_systemic(
        self, server: OnlineServer, status: int, message: str, details: list[Any]
    ) -> None:
        server.default = self.error(status, message, details=details)
        with pytest.raises(SystemicError, match=message[:20].replace("*", r"\*")):
            self.complete(server, "x")
        assert server.sent() == {"x": 1}

    def test_an_account_that_may_not_use_the_service_is_systemic(
        self, server: OnlineServer
    ) -> None:
        error = {"code": 400, "message": "Enable billing.", "status": "FAILED_PRECONDITION"}
        server.default = Reply(400, {"error": error})
        with pytest.raises(SystemicError, match="Enable billing"):
            self.complete(server, "x")

    def test_a_retry_delay_pauses_the_whole_account(self, server: OnlineServer) -> None:
        late = self.error(429, details=[{"retryDelay": "0.4s"}])
        server.script["x"] = [late, self.good()]
        began = time.monotonic()
        self.complete(server, "x", "y", max_concurrency=1)
        assert time.monotonic() - began >= 0.4

    def test_an_error_page_in_another_encoding_is_transient(self, server: OnlineServer) -> None:
        server.script["x"] = [Reply(502, "<p>Störung</p>".encode("latin-1")), self.good()]
        (completion,) = self.complete(server, "x")
        assert completion.text == GOOD

    def test_the_own_origin_gets_the_default_key(
        self, server: OnlineServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(google, "OWN_BASE_URL", server.url)
        (completion,) = self.complete(server, "x", api_key_env=None, base_url=None)
        assert completion.text == GOOD
        assert server.seen[0].headers["x-goog-api-key"] == OWN_KEY
        assert registry.open_backend(self.model, {}, Path()).identity() == {}

    def engine(self, server: OnlineServer, **options: Any) -> dict[str, Any]:
        return {k: v for k, v in super().engine(server, **options).items() if v is not None}
