"""The online providers, each through the suite that they share and in what is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchsql.backends import anthropic, openai, registry
from batchsql.errors import SystemicError
from batchsql.types import Call, FinishReason, ModelRef, Outcome
from batchsql.validate.structure import AnswerValidator
from tests.contract.base_online import GOOD, BaseOnline, parsed
from tests.support.online_server import OnlineServer, Reply

pytest.importorskip("openai")
pytest.importorskip("anthropic")

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

    def test_the_address_is_needed(self) -> None:
        mistakes = registry.check_model(self.model, {}, {})
        assert [mistake.where for mistake in mistakes] == ["engine.base_url"]


class TestAnthropic(BaseOnline):
    provider = "anthropic"
    path = "/v1/messages"
    key_env = "ANTHROPIC_API_KEY"
    custom_headers_env = "ANTHROPIC_CUSTOM_HEADERS"

    def good(self, text: str = GOOD, reason: str | None = None) -> Reply:
        usage = {
            "input_tokens": 15,
            "output_tokens": 5,
            "cache_read_input_tokens": 80,
            "cache_creation_input_tokens": 5,
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
