"""The client of the Gemini Developer API, made of Google's SDK."""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from batchsql.backends.endpoint import Endpoint
from batchsql.backends.online import (
    BASIC_HEADERS,
    ErrorReply,
    Failure,
    lost_connection,
    only_headers,
    read_error_reply,
)

if TYPE_CHECKING:
    from google import genai

_API_VERSION = "v1"
_KEY_HEADER = "x-goog-api-key"
_UPLOAD_HEADERS = frozenset(
    {
        "x-goog-upload-command",
        "x-goog-upload-file-name",
        "x-goog-upload-header-content-length",
        "x-goog-upload-header-content-type",
        "x-goog-upload-offset",
        "x-goog-upload-protocol",
    }
)


def sdk_version() -> str:
    """Return the name and version of the SDK, for the ledger."""
    return f"google-genai {importlib.metadata.version('google-genai')}"


class ErrorReplyError(Exception):
    """The API replied with an error."""

    def __init__(self, reply: ErrorReply) -> None:
        self.reply = reply
        super().__init__(f"status {reply.status}")


class GoogleClient:
    """The SDK's client, of which only the way to send and the endpoint are used.

    Everything that the SDK would take from the environment is given: the kind of service, the
    address, its version, the key, and the HTTP client. It repeats nothing and follows no redirect.
    Before each request ``hooks`` are called. Used on the event loop only.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        api_key: str | None,
        timeout_seconds: float,
        hooks: Sequence[Any] = (),
    ) -> None:
        import httpx2
        from google import genai
        from google.genai import types

        # It warns where two keys are in the environment, of which it would take the other one.
        logging.getLogger("google_genai._api_client").setLevel(logging.ERROR)
        names = BASIC_HEADERS if api_key is None else BASIC_HEADERS | {_KEY_HEADER}
        clean = [] if endpoint.is_own else [only_headers(names | _UPLOAD_HEADERS, None)]

        async def shorten_connecting(request: Any) -> None:
            # The SDK has one limit for all that may be waited for.
            request.extensions["timeout"]["connect"] = min(10.0, timeout_seconds)

        self._http = httpx2.AsyncClient(
            follow_redirects=False,
            event_hooks={
                "request": [*clean, shorten_connecting, *hooks],
                "response": [_raise_error],
            },
        )
        options = types.HttpOptions(
            base_url=endpoint.base_url,
            api_version=_API_VERSION,
            timeout=int(timeout_seconds * 1000),
            httpx_async_client=self._http,
        )
        # Without a key the SDK takes it from the environment; the hook drops this one.
        self.sdk: genai.Client = genai.Client(
            vertexai=False, api_key=api_key or "none", http_options=options
        )

    async def close(self) -> None:
        await self._http.aclose()
        self.sdk.close()

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> str:
        """Return the body of a good reply.

        The typed methods drop what they do not know, of errors and counts above all, so the one
        below them is used.

        Raises:
            ErrorReplyError: the API replied with an error.
            httpx2.HTTPError: there was no whole reply.
        """
        reply = await self.sdk._api_client.async_request(method, path, dict(body or {}))
        return reply.body or ""


async def _raise_error(response: Any) -> None:
    """Raise for an error reply before the SDK reads it, which fails for some that are no JSON."""
    if response.status_code != 200:
        content = await response.aread()
        raise ErrorReplyError(read_google_error(response.status_code, response.headers, content))


def read_google_error(status: int, headers: Mapping[str, str], content: bytes) -> ErrorReply:
    """Return what an error of Google's says.

    Its ``kind`` is the status by name, ``code`` the reason or the quota, ``param`` the field.
    """
    plain = read_error_reply(status, headers, content)
    kind = code = param = None
    retry_after_seconds = plain.retry_after_seconds
    # The form is documented, but a proxy between may reply with anything.
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        error = json.loads(content)["error"]
        kind = str(error["status"])
        for detail in error.get("details", ()):
            if "reason" in detail:
                code = str(detail["reason"])
            if "violations" in detail:
                code = str(detail["violations"][0].get("quotaId"))
            if "fieldViolations" in detail:
                param = str(detail["fieldViolations"][0].get("field", ""))
            if "retryDelay" in detail:
                retry_after_seconds = float(detail["retryDelay"].removesuffix("s"))
    return ErrorReply(status, plain.message, kind, code, param, retry_after_seconds)


async def read_reply(sending: Coroutine[Any, Any, str]) -> str | ErrorReply | Failure:
    """Return a good reply, what an error reply says, or how the connection failed."""
    import httpx2

    try:
        return await sending
    except ErrorReplyError as error:
        return error.reply
    except httpx2.HTTPError as error:
        return lost_connection(error)
