"""The emulator as a server on loopback: in a thread of a test, or behind the command line."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from aiohttp import web

from batchsql.emulate.anthropic import Anthropic, AnthropicLimits
from batchsql.emulate.bedrock import Bedrock, BedrockLimits
from batchsql.emulate.bill import Bill
from batchsql.emulate.google import Google, GoogleLimits
from batchsql.emulate.openai import OpenAI, OpenAILimits
from batchsql.emulate.provider import (
    ApiError,
    EmulatedBatch,
    Handler,
    Operation,
    Provider,
    World,
    json_reply,
    new_id,
    read_json,
)
from batchsql.emulate.s3 import KEY, REGION, ObjectStore
from batchsql.emulate.script import (
    Behaviour,
    Moment,
    Rule,
    Script,
    check_endpoints,
    parse_rules,
)
from batchsql.emulate.timeline import Clock, Durations, Phase
from batchsql.errors import BatchsqlError

MAX_REQUEST_BYTES = 1 << 30
_START_SECONDS = 30.0
# What a batch's stages are called by the providers.
_STAGES = {
    **{phase.value: phase for phase in Phase},
    "in_progress": Phase.PROCESSING,
    "completed": Phase.DONE,
    "ended": Phase.DONE,
    "end": Phase.DONE,
}


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request that came in. ``status`` is 0 where no whole reply was given."""

    operation: str
    method: str
    path: str
    status: int
    authorization: str | None
    misbehaviour: Behaviour | None


class Emulator:
    """Speaks the providers' wire formats on a port of this machine.

    A context manager: inside it, the server runs in a thread of its own. Every method may be
    called from any thread. Batches move with the clock; ``advance`` moves it, so that nobody waits.

    >>> with Emulator() as emulator:
    ...     emulator.openai_base_url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(
        self, *, port: int = 0, rules: Iterable[Rule] = (), speed: float = 1.0,
        durations: Durations | None = None, latency_seconds: float = 0.0,
        openai: OpenAILimits | None = None, anthropic: AnthropicLimits | None = None,
        bedrock: BedrockLimits | None = None, s3_endpoint_url: str | None = None,
        google: GoogleLimits | None = None,
        models: Sequence[str] = (), on_call: Callable[[Call], None] | None = None,
    ) -> None:  # fmt: skip
        self._port = port
        self._latency_seconds = latency_seconds
        self._on_call = on_call
        self._lock = threading.RLock()
        self._held = threading.Condition(self._lock)
        self._held_count = 0
        self._world = World(Clock(), (durations or Durations()).at_speed(speed), Script())
        self._openai = OpenAI(self._world, openai, models)
        self._anthropic = Anthropic(self._world, anthropic, models)
        self._google = Google(self._world, google, models)
        self._s3_endpoint_url = s3_endpoint_url
        store = None if s3_endpoint_url is None else ObjectStore(s3_endpoint_url)
        self._bedrock = Bedrock(self._world, bedrock, models, store)
        self.misbehave(*rules)
        self._limits: Mapping[str, int | None] = {
            "openai": openai.concurrent_requests if openai else None,
            "anthropic": anthropic.concurrent_requests if anthropic else None,
            "bedrock": bedrock.concurrent_requests if bedrock else None,
            "google": google.concurrent_requests if google else None,
        }
        self._busy: Counter[str] = Counter()
        self._calls: list[Call] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._release: asyncio.Event | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    # --- running --------------------------------------------------------------------------------

    def __enter__(self) -> Emulator:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.stop()

    def start(self) -> None:
        """Serve from now on. Raises OSError where the port is taken."""
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(ready,), name="batchsql-emulator", daemon=True
        )
        self._thread.start()
        if not ready.wait(_START_SECONDS):
            raise BatchsqlError(f"the emulator did not start within {_START_SECONDS:g} seconds")
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def stop(self) -> None:
        """Close every connection and end the thread; what was counted stays readable."""
        thread, loop, stop = self._thread, self._loop, self._stop
        if thread is None or loop is None or stop is None or not thread.is_alive():
            return
        loop.call_soon_threadsafe(stop.set)
        thread.join()

    def _run(self, ready: threading.Event) -> None:
        try:
            asyncio.run(self._serve(ready))
        except BaseException as error:  # noqa: BLE001 - start() raises it
            self._failure = error
        finally:
            ready.set()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._release, self._stop = asyncio.Event(), asyncio.Event()
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        for provider in self._providers:
            for operation in provider.operations:
                app.router.add_route(
                    operation.method, f"/{provider.name}{operation.path}",
                    self._handler(provider, operation),
                )  # fmt: skip
            app.router.add_route("*", f"/{provider.name}/{{rest:.*}}", self._unknown(provider))
        for method, path, handler in (
            ("GET", "/_emulate/bill", self._serve_bill),
            ("GET", "/_emulate/batches", self._serve_batches),
            ("POST", "/_emulate/advance", self._serve_advance),
            ("POST", "/_emulate/release", self._serve_release),
            ("POST", "/_emulate/rules", self._serve_rules),
            ("DELETE", "/_emulate/rules", self._serve_no_rules),
        ):
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", self._port, backlog=1024)
            await site.start()
            self._port = runner.addresses[0][1]
            ready.set()
            await self._stop.wait()
            self._release.set()
        finally:
            await runner.cleanup()

    @property
    def _providers(self) -> Sequence[Provider]:
        return (self._openai, self._anthropic, self._bedrock, self._google)

    @property
    def _operation_names(self) -> set[str]:
        """What rules can meet: the calls, and the lines of batches."""
        calls = {each.name for provider in self._providers for each in provider.operations}
        return calls | {f"{provider.name}.batches.line" for provider in self._providers}

    # --- where it is ----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The server's root, below which each provider has its own."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def openai_base_url(self) -> str:
        """The ``base_url`` for OpenAI's SDK."""
        return f"{self.url}/openai/v1"

    @property
    def anthropic_base_url(self) -> str:
        """The ``base_url`` for Anthropic's SDK."""
        return f"{self.url}/anthropic"

    @property
    def bedrock_base_url(self) -> str:
        """The ``endpoint_url`` for boto3's clients ``bedrock`` and ``bedrock-runtime``."""
        return f"{self.url}/bedrock"

    @property
    def google_base_url(self) -> str:
        """The ``base_url`` for Google's SDK."""
        return f"{self.url}/google"

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that send the official SDKs here, with a key that is none."""
        return {
            "OPENAI_BASE_URL": self.openai_base_url,
            "OPENAI_API_KEY": "rehearsal",
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": "rehearsal",
            "GOOGLE_GEMINI_BASE_URL": self.google_base_url,
            "GEMINI_API_KEY": "rehearsal",
            "GOOGLE_API_KEY": "rehearsal",  # the SDK prefers it
            "AWS_ENDPOINT_URL_BEDROCK": self.bedrock_base_url,
            "AWS_ENDPOINT_URL_BEDROCK_RUNTIME": self.bedrock_base_url,
            **({"AWS_ENDPOINT_URL_S3": self._s3_endpoint_url} if self._s3_endpoint_url else {}),
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": KEY,
            "AWS_DEFAULT_REGION": REGION,
        }

    # --- control --------------------------------------------------------------------------------

    def misbehave(self, *rules: Rule) -> None:
        """Add rules behind those in force.

        Raises SpecError where the endpoint of one fits no operation; none is added then.
        """
        check_endpoints(rules, self._operation_names)
        with self._lock:
            self._world.script.add(*rules)

    def behave(self) -> None:
        """Drop every rule. What is held stays held."""
        with self._lock:
            self._world.script.clear()

    def advance(
        self, seconds: float = 0.0, *, stage: str | None = None, fraction: float = 0.0,
        batch_id: str | None = None,
    ) -> None:  # fmt: skip
        """Put the clock forward, or bring batches to a stage of their life.

        ``stage`` is a provider's status (``in_progress``, ``completed``, ``ended``, ``expired``,
        …) or ``end``, which is whatever a batch is heading for; ``fraction`` is the share of lines
        answered in ``in_progress``. Without ``batch_id`` it holds for all batches.

        Raises ValueError for an unknown stage or batch.
        """
        if stage is not None and stage not in _STAGES:
            raise ValueError(f"got stage {stage!r}; the stages are: {', '.join(_STAGES)}")
        with self._lock:
            self._settle()
            self._world.clock.advance(seconds)
            if stage is not None:
                found = [each for each in self._all_batches() if batch_id in (None, each.id)]
                if batch_id is not None and not found:
                    raise ValueError(f"no batch has the id {batch_id!r}")
                for batch in found:
                    batch.timeline.skip_to(_STAGES[stage], fraction)
            self._settle()

    def finish(self) -> None:
        """Bring every batch to its end."""
        self.advance(stage="end")

    def release(self) -> None:
        """Let go of every reply that is held by ``slow`` now."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._let_go)

    def wait_held(self, count: int = 1, timeout: float = 10.0) -> None:
        """Return once so many replies are held: the requests behind them have had their effect.

        Raises TimeoutError.
        """
        with self._held:
            if not self._held.wait_for(lambda: self._held_count >= count, timeout):
                raise TimeoutError(f"{self._held_count} of {count} replies are held")

    @property
    def bill(self) -> Bill:
        """What has been billed by now."""
        with self._lock:
            self._settle()
            copy = Bill()
            copy.charges = list(self._world.bill.charges)
            return copy

    @property
    def calls(self) -> Sequence[Call]:
        """Every request that came in, in order, except to the emulator's own controls."""
        with self._lock:
            return list(self._calls)

    def now(self) -> float:
        """Return the emulated time, in seconds since the epoch."""
        with self._lock:
            return self._world.clock.now()

    def _all_batches(self) -> list[EmulatedBatch]:
        return [batch for provider in self._providers for batch in provider.batches()]

    def _settle(self) -> None:
        for provider in self._providers:
            provider.settle()

    # --- serving --------------------------------------------------------------------------------

    def _handler(self, provider: Provider, operation: Operation) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                reply, rule = await self._reply(provider, operation, request)
            except ConnectionResetError:
                self._record(operation.name, request, 0, None)
                raise
            reply.headers.setdefault("x-request-id", new_id("req_"))
            reply.headers.setdefault("request-id", reply.headers["x-request-id"])
            behaviour = None if rule is None else rule.behaviour
            if behaviour in (Behaviour.DROP, Behaviour.LOST_REPLY):
                self._record(operation.name, request, 0, behaviour)
                return _hang_up(request)
            if behaviour is Behaviour.TRUNCATE and isinstance(reply, web.Response):
                self._record(operation.name, request, 0, behaviour)
                return await _send_part(request, reply, rule.fraction if rule else 0.5)
            self._record(operation.name, request, reply.status, behaviour)
            return reply

        return handle

    async def _reply(
        self, provider: Provider, operation: Operation, request: web.Request
    ) -> tuple[web.StreamResponse, Rule | None]:
        """Return the reply to a request, and the rule that met it."""
        # Here, so that the handler has no more to wait for while it holds the lock.
        if request.content_type == "multipart/form-data":
            content = _uploaded(await request.post())
        else:
            content = await request.read()
        if self._latency_seconds:
            await asyncio.sleep(self._latency_seconds)
        rule: Rule | None = None
        cap = self._limits[provider.name]
        self._busy[provider.name] += 1
        try:
            provider.authenticate(request)
            if cap is not None and self._busy[provider.name] > cap:
                raise provider.error_for(Rule(behaviour=Behaviour.RATE_LIMIT, retry_after=1))
            with self._lock:
                script = self._world.script
                if script.has_rules(Moment.REQUEST):
                    texts = _texts(provider, request, content)
                    rule = script.meet(Moment.REQUEST, operation.name, texts)
            if rule is not None and rule.behaviour is Behaviour.REDIRECT and _is_away(request):
                rule = None
            if rule is not None and rule.behaviour in _CANNED:
                return _CANNED[rule.behaviour](request), rule
            if rule is not None and rule.behaviour not in (
                Behaviour.LOST_REPLY, Behaviour.SLOW, Behaviour.TRUNCATE,
            ):  # fmt: skip
                raise provider.error_for(rule)
            with self._lock:
                reply = await operation.handler(request)
            if rule is not None and rule.behaviour is Behaviour.SLOW:
                await self._hold(rule)
        except ApiError as error:
            return provider.error_reply(error), rule
        finally:
            self._busy[provider.name] -= 1
        return reply, rule

    async def _hold(self, rule: Rule) -> None:
        release = self._release
        with self._held:
            self._held_count += 1
            self._held.notify_all()
        try:
            if rule.seconds is not None:
                await asyncio.sleep(rule.seconds)
            elif release is not None:
                await release.wait()
        finally:
            with self._held:
                self._held_count -= 1

    def _unknown(self, provider: Provider) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            kind = "not_found_error" if provider.name == "anthropic" else "invalid_request_error"
            self._record(f"{provider.name}.unknown", request, 404, None)
            message = f"Invalid URL ({request.method} {request.path})"
            return provider.error_reply(ApiError(404, kind, message))

        return handle

    def _record(
        self, operation: str, request: web.Request, status: int, behaviour: Behaviour | None
    ) -> None:
        names = ("authorization", "x-api-key", "x-goog-api-key")
        authorization = next(
            (request.headers[name] for name in names if name in request.headers), None
        )
        call = Call(operation, request.method, request.path, status, authorization, behaviour)
        with self._lock:
            self._calls.append(call)
        if self._on_call is not None:
            self._on_call(call)

    # --- the emulator's own controls ------------------------------------------------------------

    async def _serve_bill(self, request: web.Request) -> web.Response:
        with_charges = "charges" in request.query
        document = self.bill.document(with_charges=with_charges)
        document["calls"] = Counter(each.operation for each in self.calls)
        return json_reply(document)

    async def _serve_batches(self, request: web.Request) -> web.Response:
        with self._lock:
            self._settle()
            return json_reply(
                [
                    {
                        "id": each.id,
                        "phase": each.timeline.phase.value,
                        "share": each.timeline.share,
                    }
                    for each in self._all_batches()
                ]
            )

    async def _serve_advance(self, request: web.Request) -> web.Response:
        try:
            wanted = read_json(await request.read() or b"{}")
            known = {"seconds", "stage", "fraction", "batch_id"}
            if not isinstance(wanted, dict) or set(wanted) - known:
                raise ValueError(f"give an object with some of: {', '.join(sorted(known))}")
            self.advance(**wanted)
        except (ValueError, TypeError) as error:
            return json_reply({"error": str(error)}, 400)
        return await self._serve_batches(request)

    async def _serve_release(self, request: web.Request) -> web.Response:
        self._let_go()
        return json_reply({})

    def _let_go(self) -> None:
        if self._release is not None:
            self._release.set()
        self._release = asyncio.Event()

    async def _serve_rules(self, request: web.Request) -> web.Response:
        try:
            rules = parse_rules(read_json(await request.read()), "rules")
        except (ValueError, BatchsqlError) as error:
            return json_reply({"error": str(error)}, 400)
        self.misbehave(*rules)
        return json_reply({"added": len(rules)})

    async def _serve_no_rules(self, request: web.Request) -> web.Response:
        self.behave()
        return json_reply({})


def _uploaded(form: Mapping[str, Any]) -> bytes:
    upload = form.get("file")
    if not isinstance(upload, web.FileField):
        return b""
    content = upload.file.read()
    upload.file.seek(0)
    return content


def _texts(provider: Provider, request: web.Request, content: bytes) -> list[str]:
    """Return what a rule's text is looked for in: the body as sent, and the text it holds."""
    texts = [content.decode("utf-8", "replace")]
    if request.content_type == "application/json" and len(content) < 1 << 20:
        try:
            body: Any = read_json(content)
        except ValueError:
            return texts
        texts.append(provider.prompt_of(body))
    return texts


def _hang_up(request: web.Request) -> web.Response:
    """Close the connection without a byte of a reply."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _bad_gateway(request: web.Request) -> web.Response:
    """Reply as a proxy does that stands before the provider: not in the provider's shape."""
    text = "<html><head><title>502 Bad Gateway</title></head><body>502 Bad Gateway</body></html>"
    return web.Response(status=502, text=text, content_type="text/html")


def _is_away(request: web.Request) -> bool:
    """Return whether a request has come to the server by its other name."""
    return request.host.startswith("localhost")


def _redirect(request: web.Request) -> web.Response:
    """Send the client to another origin, which is this server by another name."""
    host = request.host.replace("127.0.0.1", "localhost")
    location = f"{request.scheme}://{host}{request.rel_url}"
    return web.Response(status=307, headers={"location": location})


_CANNED: Mapping[Behaviour, Callable[[web.Request], web.Response]] = {
    Behaviour.DROP: lambda request: web.Response(),
    Behaviour.BAD_GATEWAY: _bad_gateway,
    Behaviour.REDIRECT: _redirect,
}


async def _send_part(
    request: web.Request, reply: web.Response, fraction: float
) -> web.StreamResponse:
    """Promise the whole body, send a part of it, and close the connection."""
    body = reply.body if isinstance(reply.body, bytes) else b""
    part = web.StreamResponse(status=reply.status, headers={"content-type": reply.content_type})
    part.content_length = len(body)
    await part.prepare(request)
    await part.write(body[: int(len(body) * fraction)])
    if request.transport is not None:
        request.transport.close()  # after what was written
    return part
