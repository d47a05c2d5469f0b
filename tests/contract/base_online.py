"""What every online backend promises, held against a real socket."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchsql.backends import online, registry
from batchsql.declare.returns import Returns, parse_returns
from batchsql.errors import MissingExtraError, SpecError, SystemicError
from batchsql.types import (
    Call,
    Completion,
    FinishReason,
    Message,
    ModelRef,
    Outcome,
    Request,
    Role,
    Usage,
)
from batchsql.validate.structure import AnswerValidator
from tests.support.online_server import OnlineServer, Reply

KEY = "sk-test-0123456789abcdef"
GOOD = '{"label":"bug"}'
LABEL = {"label": {"enum": ["bug", "billing"]}}


def parsed(declared: dict[str, Any]) -> Returns:
    returns, mistakes = parse_returns(declared)
    assert mistakes == []
    return returns


def ask(number: int, text: str) -> Request:
    return Request(f"{number:032x}", (Message(Role.SYSTEM, "Label it."), Message(Role.USER, text)))


class BaseOnline:
    """Subclasses name the provider and speak its wire."""

    provider: str
    path: str
    key_env: str | None  # the default key's variable, for providers that have one
    custom_headers_env: str
    base_path = ""
    key_header = "authorization"
    key_prefix = "Bearer "
    usage = Usage(input_tokens=100, output_tokens=5, cached_tokens=80)  # what good() tells

    def good(self, text: str = GOOD, reason: str | None = None) -> Reply:
        """Return a reply that holds this answer."""
        raise NotImplementedError

    def error(self, status: int, message: str = "no", **fields: Any) -> Reply:
        """Return the provider's error reply."""
        raise NotImplementedError

    def too_long(self) -> Reply:
        raise NotImplementedError

    def refusal(self) -> Reply:
        raise NotImplementedError

    def cut_off(self) -> Reply:
        """Return a reply that the token limit ended."""
        raise NotImplementedError

    @pytest.fixture
    def server(self) -> Iterator[OnlineServer]:
        server = OnlineServer()
        server.default = self.good()
        server.too_many = self.error(429)
        yield server
        server.close()

    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(online, "FIRST_BACKOFF_SECONDS", 0.01)
        monkeypatch.setattr(online, "MAX_BACKOFF_SECONDS", 0.05)
        monkeypatch.setenv("TEST_API_KEY", KEY)
        for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"):
            monkeypatch.setenv(name, "sk-own-key-of-this-machine")

    @pytest.fixture(autouse=True)
    def shared(self) -> None:
        """Give every test gates of its own: a port may be used again."""
        for gates in online._gates.values():
            gates.clear()

    @property
    def model(self) -> ModelRef:
        return ModelRef(self.provider, "small-1")

    def engine(self, server: OnlineServer, **options: Any) -> dict[str, Any]:
        defaults = {"base_url": server.url + self.base_path, "api_key_env": "TEST_API_KEY"}
        return {**defaults, **options}

    def complete(
        self,
        server: OnlineServer,
        *texts: str,
        returns: Returns | None = None,
        params: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Return the completions of these texts, in their order."""
        engine = self.engine(server, **options)
        assert registry.check_model(self.model, params or {}, engine) == []
        backend = registry.open_backend(self.model, engine, Path())
        returns = returns or parsed(LABEL)
        call = Call(self.model, params or {}, returns.object_schema(), 50)
        requests = iter([ask(number, text) for number, text in enumerate(texts)])
        found = {}
        for completion in backend.complete(requests, call, threading.Event()):
            if completion is not None:
                assert completion.request_key not in found
                found[completion.request_key] = completion
        return [found[f"{number:032x}"] for number in range(len(texts))]

    def test_each_request_is_sent_once_and_answered(self, server: OnlineServer) -> None:
        texts = [f"text {number}" for number in range(100)]
        completions = self.complete(server, *texts)
        assert {c.text for c in completions} == {GOOD}
        assert {c.finish_reason for c in completions} == {FinishReason.STOP}
        assert server.sent() == dict.fromkeys(texts, 1)
        assert {seen.path for seen in server.seen} == {self.path}
        assert {seen.headers[self.key_header] for seen in server.seen} == {self.key_prefix + KEY}

    def test_usage_counts_cached_tokens_as_input(self, server: OnlineServer) -> None:
        (completion,) = self.complete(server, "x")
        assert completion.usage == self.usage
        assert completion.model_reported == "small-1-2026"
        assert completion.started_at is not None and completion.finished_at is not None

    @pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
    def test_transient_failures_are_sent_again(self, server: OnlineServer, status: int) -> None:
        server.script["x"] = [self.error(status), self.error(status), self.good()]
        (completion,) = self.complete(server, "x")
        assert (completion.failure, completion.text) == (None, GOOD)
        assert server.sent() == {"x": 3}

    def test_retry_after_pauses_the_whole_account(self, server: OnlineServer) -> None:
        late = self.error(429)
        server.script["x"] = [Reply(429, late.body, {"Retry-After": "0.4"}), self.good()]
        began = time.monotonic()
        completions = self.complete(server, "x", "y", max_concurrency=1)
        assert [c.text for c in completions] == [GOOD, GOOD]
        assert time.monotonic() - began >= 0.4
        assert server.sent() == {"x": 2, "y": 1}

    def test_endless_failures_end_as_transient(self, server: OnlineServer) -> None:
        server.script["x"] = [self.error(500, "boom")]
        completions = self.complete(server, "x", "y")
        assert [c.failure for c in completions] == [Outcome.TRANSIENT, None]
        assert "boom" in (completions[0].error or "")
        assert server.sent() == {"x": online.MAX_TRIES, "y": 1}

    def test_a_dropped_connection_is_tried_again(self, server: OnlineServer) -> None:
        server.script["x"] = [Reply(is_dropped=True), self.good()]
        (completion,) = self.complete(server, "x")
        assert completion.text == GOOD
        assert server.sent() == {"x": 2}

    def test_endless_drops_of_one_request_are_transient(self, server: OnlineServer) -> None:
        server.script["x"] = [Reply(is_dropped=True)]
        completions = self.complete(server, "y", "x", max_concurrency=1)
        assert [c.failure for c in completions] == [None, Outcome.TRANSIENT]

    def test_a_server_that_is_not_there_is_systemic(self, server: OnlineServer) -> None:
        gone = OnlineServer()
        gone.close()
        with pytest.raises(SystemicError, match="no server answers at"):
            self.complete(gone, "x")

    def test_silence_is_a_transient_failure(
        self, server: OnlineServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(online, "MAX_TRIES", 1)
        server.hold = threading.Event()
        (completion,) = self.complete(server, "x", timeout_seconds=1)
        assert completion.failure is Outcome.TRANSIENT

    @pytest.mark.parametrize("status", [400, 422])
    def test_a_malformed_request_is_rejected_alone(self, server: OnlineServer, status: int) -> None:
        server.script["x"] = [self.error(status, "strange text")]
        completions = self.complete(server, "x", "y")
        assert [c.failure for c in completions] == [Outcome.REJECTED, None]
        assert "strange text" in (completions[0].error or "")
        assert server.sent() == {"x": 1, "y": 1}

    def test_a_prompt_beyond_the_window_is_too_long(self, server: OnlineServer) -> None:
        server.script["x"] = [self.too_long()]
        completions = self.complete(server, "x", "y")
        assert [c.failure for c in completions] == [Outcome.TOO_LONG, None]

    @pytest.mark.parametrize("status", [401, 402, 403, 404])
    def test_a_refused_account_is_systemic_without_the_key(
        self, server: OnlineServer, status: int
    ) -> None:
        server.default = self.error(status, f"Incorrect key {KEY}, or sk-test*****cdef")
        with pytest.raises(SystemicError) as caught:
            self.complete(server, *"abcdefghij" * 10)
        shown = f"{caught.value!r}{caught.value.__context__!r}{caught.value.__cause__!r}"
        assert str(status) in shown
        assert "sk-" not in shown and KEY not in shown
        assert len(server.seen) < 20

    def test_what_every_request_would_meet_is_found_with_the_first(
        self, server: OnlineServer
    ) -> None:
        server.default = self.error(401)
        with pytest.raises(SystemicError):
            self.complete(server, *(f"text {number}" for number in range(50)))
        assert len(server.seen) == 1

    def test_answers_under_way_are_kept_when_the_account_is_refused(
        self, server: OnlineServer
    ) -> None:
        server.script["x"] = [self.error(401)]
        server.script["y"] = [self.error(500), self.error(500), self.good()]
        backend = registry.open_backend(self.model, self.engine(server), Path())
        call = Call(self.model, {}, parsed(LABEL).object_schema(), 50)
        found: list[Completion | None] = []
        with pytest.raises(SystemicError):
            requests = iter([ask(1, "y"), ask(2, "x")])
            found.extend(backend.complete(requests, call, threading.Event()))
        assert [c.text for c in found if c is not None] == [GOOD]

    def test_a_refusal_says_so(self, server: OnlineServer) -> None:
        server.script["x"] = [self.refusal()]
        (completion,) = self.complete(server, "x")
        assert completion.finish_reason is FinishReason.REFUSAL
        assert AnswerValidator(parsed(LABEL)).check(completion).outcome is Outcome.REFUSED

    def test_an_answer_cut_off_says_so(self, server: OnlineServer) -> None:
        server.script["x"] = [self.cut_off()]
        (completion,) = self.complete(server, "x")
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.usage.output_tokens == 5

    def test_an_unknown_finish_reason_is_an_error(self, server: OnlineServer) -> None:
        server.script["x"] = [self.good(reason="took_a_walk")]
        (completion,) = self.complete(server, "x")
        assert completion.failure is Outcome.REJECTED
        assert "took_a_walk" in (completion.error or "")

    @pytest.mark.parametrize("body", [b"<html>", [], {"choices": [], "content": None}])
    def test_a_reply_of_another_kind_is_not_paid_for_twice(
        self, server: OnlineServer, body: Any
    ) -> None:
        server.script["x"] = [Reply(200, body)]
        (completion,) = self.complete(server, "x")
        assert completion.failure is Outcome.TRANSIENT
        assert server.sent() == {"x": 1}

    def test_stop_ends_within_a_second(self, server: OnlineServer) -> None:
        server.hold = threading.Event()
        backend = registry.open_backend(self.model, self.engine(server), Path())
        call = Call(self.model, {}, parsed(LABEL).object_schema(), 50)
        stop = threading.Event()
        stopped_at = []
        taken = []

        def requests() -> Iterator[Request]:
            for number in range(1000):
                taken.append(number)
                yield ask(number, f"text {number}")

        def stop_later() -> None:
            server.arrived.wait()
            stopped_at.append(time.monotonic())
            stop.set()

        thread = threading.Thread(target=stop_later)
        thread.start()
        assert [c for c in backend.complete(requests(), call, stop) if c is not None] == []
        assert time.monotonic() - stopped_at[0] < 1
        thread.join()
        assert len(taken) <= online.START_CONCURRENCY + 2
        [gates] = online._gates.values()
        assert [gate.in_flight for gate in gates.values()] == [0], "nothing is left running"

    def test_nothing_finishing_yields_none(self, server: OnlineServer) -> None:
        server.hold = threading.Event()
        backend = registry.open_backend(self.model, self.engine(server), Path())
        call = Call(self.model, {}, parsed(LABEL).object_schema(), 50)
        stream = iter(backend.complete(iter([ask(1, "x")]), call, threading.Event()))
        assert next(stream) is None
        server.hold.set()
        found = [c for c in stream if c is not None]
        assert [c.text for c in found] == [GOOD]

    @pytest.mark.parametrize("cap", [2, 9])
    def test_concurrency_grows_up_to_the_cap(self, server: OnlineServer, cap: int) -> None:
        server.latency_seconds = 0.01
        self.complete(server, *[f"text {n}" for n in range(100)], max_concurrency=cap)
        assert min(cap, online.START_CONCURRENCY + 1) <= server.peak <= cap

    def test_threads_share_the_cap_of_their_account(self, server: OnlineServer) -> None:
        server.latency_seconds = 0.01
        found: list[Completion] = []

        def run(name: str) -> None:
            texts = [f"{name} {n}" for n in range(60)]
            found.extend(self.complete(server, *texts, max_concurrency=6))

        threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [c.text for c in found] == [GOOD] * 120
        assert server.peak <= 6

    def test_concurrency_settles_at_what_the_account_bears(self, server: OnlineServer) -> None:
        server.latency_seconds = 0.01
        server.crowd = 5
        texts = [f"text {number}" for number in range(200)]
        completions = self.complete(server, *texts)
        assert {c.text for c in completions} == {GOOD}
        assert server.peak < 20
        assert len(server.seen) < 300

    def test_requests_per_minute_are_kept(self, server: OnlineServer) -> None:
        began = time.monotonic()
        self.complete(server, *"abcdef", requests_per_minute=600)
        assert time.monotonic() - began >= 0.45

    def test_a_redirect_is_not_followed(self, server: OnlineServer) -> None:
        other = OnlineServer()
        other.default = self.good()
        server.default = Reply(307, {}, {"Location": other.url + self.path})
        try:
            with pytest.raises(SystemicError, match="redirects"):
                self.complete(server, "x")
            assert other.seen == []
        finally:
            other.close()

    def test_no_key_and_no_headers_of_the_environment_reach_other_origins(
        self, server: OnlineServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(self.custom_headers_env, "X-Secret: s\nAuthorization: Bearer s")
        monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
        monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "s")
        (completion,) = self.complete(server, "x", api_key_env="none")
        assert completion.text == GOOD
        (seen,) = server.seen
        names = {"accept", "accept-encoding", "connection", "content-length", "content-type"}
        names |= {"host", "user-agent", "anthropic-version"}
        assert set(seen.headers) <= names

    def test_the_default_key_needs_the_provider_s_own_origin(
        self, server: OnlineServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = {"base_url": server.url + self.base_path}
        if self.key_env is None:
            self.complete(server, "x", api_key_env="none")
            assert "authorization" not in server.seen[0].headers
            return
        mistakes = registry.check_model(self.model, {}, engine)
        assert [mistake.where for mistake in mistakes] == ["engine.api_key_env"]
        with pytest.raises(SpecError):
            registry.open_backend(self.model, engine, Path())
        assert server.seen == []

    def test_a_missing_key_is_systemic_and_names_the_variable(self, server: OnlineServer) -> None:
        with pytest.raises(SystemicError, match="BATCHSQL_NO_SUCH_KEY"):
            self.complete(server, "x", api_key_env="BATCHSQL_NO_SUCH_KEY")
        assert server.seen == []

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("api_key_env", KEY),
            ("base_url", "ftp://host"),
            ("base_url", f"https://user:{KEY}@host/v1"),
            ("base_url", f"https://host/v1?key={KEY}"),
            ("base_url", "http://host:port/v1"),
        ],
    )
    def test_a_bad_option_is_a_mistake_that_shows_no_key(
        self, server: OnlineServer, option: str, value: str
    ) -> None:
        engine = self.engine(server, **{option: value})
        mistakes = registry.check_model(self.model, {}, engine)
        assert [mistake.where for mistake in mistakes] == [f"engine.{option}"]
        assert KEY not in str(mistakes[0])

    def test_a_missing_sdk_names_the_extra(
        self, server: OnlineServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        extra = self.provider.partition("_")[0]
        with pytest.raises(MissingExtraError, match=rf"batchsql\[{extra}\]"):
            registry.open_backend(self.model, self.engine(server), Path())

    def test_the_endpoint_is_part_of_the_identity(self, server: OnlineServer) -> None:
        backend = registry.open_backend(self.model, self.engine(server), Path())
        assert backend.identity() == {"endpoint": server.url + self.base_path}
