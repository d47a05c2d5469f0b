"""Where an online provider is reached, and with which key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from batchsql.backends.params import Param
from batchsql.errors import Mistake, SystemicError

MAX_CONCURRENCY = 1000
DEFAULT_CONCURRENCY = 64
DEFAULT_TIMEOUT_SECONDS = 600.0

ONLINE_OPTIONS: Mapping[str, Param] = {
    "base_url": Param("text"),
    "api_key_env": Param("text"),
    "max_concurrency": Param("integer", 1, MAX_CONCURRENCY),
    "requests_per_minute": Param("integer", 1, 1_000_000),
    "timeout_seconds": Param("number", 1, 3600),
}
NO_KEY = "none"

# No key has the form of such a name, so that a key put here by mistake is never repeated.
_ENV_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
# Also one of which a server shows its ends: abcd****wxyz.
_LOOKS_LIKE_KEY = re.compile(r"\bsk-[\w*.…-]{4,}|[\w-]*\*{3,}[\w-]*")
_HIDDEN = "[key]"
_START_CHARS = 8


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A place to send requests to. ``is_own`` says that it is the provider's own."""

    base_url: str
    is_own: bool
    api_key_env: str | None

    def read_api_key(self) -> str | None:
        """Return the key from the environment, or None where none is to be sent.

        Raises:
            SystemicError: the variable is not set, or holds what no header can carry.
        """
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise SystemicError(
                f"the environment variable {self.api_key_env} is not set, so there is no key for "
                f"{self.base_url}; set it, or name another in engine.api_key_env"
            )
        # The HTTP clients would refuse it too, and repeat it in their errors.
        if not all("!" <= character <= "~" for character in key):
            raise SystemicError(
                f"the environment variable {self.api_key_env} holds a space, a line end or another "
                "character that no key has; set it to the key alone"
            )
        return key


def plan_endpoint(
    engine: Mapping[str, Any], own_base_url: str | None, own_key_env: str | None
) -> Endpoint:
    """Return the endpoint that checked options ask for; see ``check_endpoint``."""
    declared = engine.get("base_url")
    base_url = str(declared or own_base_url).rstrip("/")
    is_own = own_base_url is not None and _origin(base_url) == _origin(own_base_url)
    named = engine.get("api_key_env")
    if named is None:
        env = own_key_env if is_own else None
    else:
        env = None if named == NO_KEY else str(named)
    return Endpoint(base_url, is_own, env)


def check_endpoint(engine: Mapping[str, Any], own_base_url: str | None) -> list[Mistake]:
    """Return a mistake for each option that would send a request, or a key, to a wrong place."""
    mistakes = []
    declared, named = engine.get("base_url"), engine.get("api_key_env")
    if declared is None and own_base_url is None:
        mistakes.append(
            Mistake(
                "engine.base_url",
                "is missing; give the server's address, such as http://localhost:8000/v1",
            )
        )
    elif isinstance(declared, str):
        if problem := _url_problem(declared):
            mistakes.append(
                Mistake("engine.base_url", f"{problem}; write it like http://localhost:8000/v1")
            )
        elif own_base_url and named is None and _origin(declared) != _origin(own_base_url):
            mistakes.append(
                Mistake(
                    "engine.api_key_env",
                    f"is missing: engine.base_url is not {_without_path(own_base_url)}, so the "
                    "default key is not sent there; name the environment variable that holds the "
                    f"key for it, or {NO_KEY} to send no key",
                )
            )
    if isinstance(named, str) and named != NO_KEY and not _ENV_NAME.fullmatch(named):
        mistakes.append(
            Mistake(
                "engine.api_key_env",
                "wanted is the name of an environment variable, in capital letters, such as "
                f"MY_API_KEY, or {NO_KEY}; never write a key itself there",
            )
        )
    return mistakes


def scrub(text: str, api_key: str | None) -> str:
    """Return the text without the key, without its beginning, and what looks like part of one.

    Its beginning is what is left of a key in a text that was cut.
    """
    if api_key:
        text = text.replace(api_key, _HIDDEN)
        if len(api_key) > _START_CHARS:
            text = re.sub(re.escape(api_key[:_START_CHARS]) + r"[\w.~+/=-]*", _HIDDEN, text)
    return _LOOKS_LIKE_KEY.sub(_HIDDEN, text)


def is_same_origin(first: str, second: str) -> bool:
    """Return whether two URLs lead to the same scheme, host and port, so that a key may go along.

    Raises:
        ValueError: one is no URL.
    """
    return _origin(first) == _origin(second)


def _origin(url: str) -> str:
    parts = urlsplit(url)
    port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
    return f"{parts.scheme}://{(parts.hostname or '').lower()}:{port}"


def _without_path(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _url_problem(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return "is no URL"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "is no http or https URL"
    if parts.username is not None or parts.password is not None:
        return "holds a user or password, which would be stored; put the key into api_key_env"
    if parts.query or parts.fragment:
        return "holds a query or fragment, which would be stored; remove it"
    return None
