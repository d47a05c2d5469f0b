"""How Amazon Web Services are reached: addresses, credentials, clients, and what their errors say.

Credentials come from AWS's own chain: environment, shared files, single sign-on, the machine's
role. Nothing of them is read, kept or shown here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from batchsql.backends.endpoint import ONLINE_OPTIONS, check_endpoint
from batchsql.backends.online import (
    ErrorReply,
    Failure,
    lost_connection,
    read_retry_after,
    unreadable_reply,
)
from batchsql.backends.params import Param
from batchsql.errors import MissingExtraError, Mistake
from batchsql.types import ModelRef, Outcome

OPTIONS: Mapping[str, Param] = {
    **{name: param for name, param in ONLINE_OPTIONS.items() if name != "api_key_env"},
    "region": Param("text"),
    "profile": Param("text"),
    "credentials": Param("text"),
    "s3_uri": Param("text"),
    "s3_endpoint_url": Param("text"),
    "role_arn": Param("text"),
}
FROM_ENVIRONMENT = "environment"

# The hosts that answer for these services, those of a VPC endpoint included.
_OWN_HOST = re.compile(
    r"(?:[a-z0-9-]+\.)*(?:bedrock|bedrock-runtime|s3)(?:-fips)?\.(?:dualstack\.)?[a-z0-9-]+"
    r"(?:\.vpce)?\.(?:amazonaws\.com(?:\.cn)?|api\.aws)"
)
# As in botocore's model, with room for what is appended.
_S3_URI = re.compile(r"s3://[a-z0-9][-.a-z0-9]{1,61}[a-z0-9](?:/[-!_*'().a-z0-9A-Z]+)*/?")
_MAX_S3_URI_CHARS = 900
_MIN_BUCKET_CHARS = 3
_ROLE_ARN = re.compile(r"arn:aws(?:-[^:]+)?:iam::(?P<account>[0-9]{12}):role/.+")
_CREDENTIALS = re.compile(
    r"((?i:x-amz-security-token)\W{1,4}|Invalid header value )(?:b?'[^']*'|[^\s'\"]+)"
    # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html
    r"|()\b(?:AKIA|ASIA)[A-Z0-9]{8,}"
)
_CONNECT_SECONDS = 10.0
_opening = threading.Lock()  # clients may be used by several threads, a session may not


@dataclass(frozen=True)
class Aws:
    """Where the services are, and in whose name they are called.

    ``base_url`` and ``s3_endpoint_url`` are None for AWS's own addresses in the region;
    ``region`` and ``profile`` are None where AWS's configuration decides.
    """

    region: str | None
    profile: str | None
    base_url: str | None
    s3_endpoint_url: str | None

    @property
    def is_own(self) -> bool:
        """Whether the models are AWS's own."""
        return self.base_url is None or is_own_url(self.base_url)

    @cached_property
    def session(self) -> Any:
        """The boto3 session. Raises botocore's ProfileNotFound."""
        import boto3

        return boto3.Session(profile_name=self.profile, region_name=self.region)

    def client(
        self, service: str, timeout_seconds: float, *, tries: int = 3, connections: int = 10
    ) -> Any:
        """Return a boto3 client, which sends a request so many times at most.

        The addresses in AWS_ENDPOINT_URL and the like are not used: they belong into the
        declaration. Raises botocore's errors where the configuration lacks something.
        """
        from botocore.config import Config

        options: dict[str, Any] = {}
        if service == "s3":
            url = self.s3_endpoint_url
            if url is not None and not is_own_url(url):
                options["s3"] = {"addressing_style": "path"}
        else:
            # AWS has another host for the control plane.
            url = None if service == "bedrock" and self.is_own else self.base_url
        config = Config(
            retries={"total_max_attempts": tries, "mode": "standard"},
            connect_timeout=min(_CONNECT_SECONDS, timeout_seconds),
            read_timeout=timeout_seconds,
            max_pool_connections=connections,
            ignore_configured_endpoint_urls=True,
            **options,
        )
        with _opening:
            return self.session.client(service, endpoint_url=url, config=config)


def plan_aws(engine: Mapping[str, Any]) -> Aws:
    """Return how checked options want the services to be reached."""
    base_url = engine.get("base_url")
    return Aws(
        engine.get("region"),
        engine.get("profile"),
        None if base_url is None else str(base_url).rstrip("/"),
        engine.get("s3_endpoint_url"),
    )


def need_boto3(model: ModelRef) -> None:
    """Raise MissingExtraError where boto3 is not installed."""
    if importlib.util.find_spec("boto3") is None:
        raise MissingExtraError(
            f"model {model} needs the package boto3, which is not installed; "
            "run: pip install 'batchsql[bedrock]'"
        )


def sdk_version() -> str:
    """Return the name and version of the SDK, for the ledger."""
    return f"boto3 {importlib.metadata.version('boto3')}"


def is_own_url(url: str) -> bool:
    """Return whether AWS answers at an address, so that its credentials may go there unasked."""
    parts = urlsplit(url)
    return parts.scheme == "https" and bool(_OWN_HOST.fullmatch((parts.hostname or "").lower()))


def account_of_role(role_arn: str) -> str:
    """Return the account in the ARN of a role."""
    found = _ROLE_ARN.fullmatch(role_arn)
    return found["account"] if found else ""


def check_aws(engine: Mapping[str, Any]) -> list[Mistake]:
    """Return the mistakes in the options that go beyond single values."""
    mistakes = []
    foreign = []
    for option in ("base_url", "s3_endpoint_url"):
        url = engine.get(option)
        if not isinstance(url, str):
            continue
        wrong = check_endpoint({"base_url": url}, None)
        mistakes += [Mistake(f"engine.{option}", each.message) for each in wrong]
        if not wrong and not is_own_url(url):
            foreign.append(f"engine.{option}")
    named = engine.get("credentials")
    if isinstance(named, str) and named != FROM_ENVIRONMENT:
        message = f"wanted is {FROM_ENVIRONMENT}, or nothing; never write credentials there"
        mistakes.append(Mistake("engine.credentials", message))
    elif foreign and named is None:
        verb = "is no address" if len(foreign) == 1 else "are no addresses"
        mistakes.append(
            Mistake(
                "engine.credentials",
                f"is missing: {' and '.join(foreign)} {verb} of AWS, so your AWS credentials are "
                f"not used there unasked; write credentials: {FROM_ENVIRONMENT} if whoever "
                "answers there may get requests signed with them",
            )
        )
    return mistakes + _check_batch_options(engine)


def _check_batch_options(engine: Mapping[str, Any]) -> list[Mistake]:
    mistakes = []
    s3_uri, role_arn = engine.get("s3_uri"), engine.get("role_arn")
    for option, other in (("s3_uri", "role_arn"), ("role_arn", "s3_uri")):
        if engine.get(option) is None and engine.get(other) is not None:
            message = f"is missing: batches need it beside engine.{other}"
            mistakes.append(Mistake(f"engine.{option}", message))
    if isinstance(s3_uri, str) and (
        len(s3_uri) > _MAX_S3_URI_CHARS or not _S3_URI.fullmatch(s3_uri)
    ):
        bucket = s3_uri.removeprefix("s3://").partition("/")[0]
        reason = ""
        if len(bucket) < _MIN_BUCKET_CHARS:
            reason = f", whose bucket has a name of fewer than {_MIN_BUCKET_CHARS} characters"
        message = (
            f"got {s3_uri[:100]!r}{reason}; write a bucket and a folder in it: "
            "s3://my-bucket/batchsql"
        )
        mistakes.append(Mistake("engine.s3_uri", message))
    if isinstance(role_arn, str) and not _ROLE_ARN.fullmatch(role_arn):
        message = (
            f"got {role_arn[:100]!r}; write the ARN of the role that Bedrock takes on to read and "
            "write in engine.s3_uri: arn:aws:iam::123456789012:role/my-role"
        )
        mistakes.append(Mistake("engine.role_arn", message))
    return mistakes


def read_error(error: Exception) -> ErrorReply | Failure:
    """Return what an error of boto3 says: the reply of a server, or why there is none.

    Its message holds no credentials. An error that is not boto3's is raised again.
    """
    found = _read_error(error)
    return replace(found, message=without_credentials(found.message))


def without_credentials(text: str) -> str:
    """Return a message of AWS's or boto3's without the credentials that it may repeat.

    AWS answers a wrong signature with the request as it should have been signed, session token and
    key id included; Python's HTTP client shows a header that it refuses.
    """
    return _CREDENTIALS.sub(lambda found: f"{found[1] or ''}[hidden]", text)


def _read_error(error: Exception) -> ErrorReply | Failure:
    from boto3.exceptions import Boto3Error
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    if isinstance(error, Boto3Error) and isinstance(error.__context__, Exception):
        error = error.__context__  # that of the request which a transfer was made of
    if isinstance(error, exceptions.ClientError):
        described, about = error.response.get("Error", {}), error.response["ResponseMetadata"]
        return ErrorReply(
            about.get("HTTPStatusCode", 0),
            described.get("Message") or "no reason given",
            kind=described.get("Code"),
            retry_after_seconds=read_retry_after(about.get("HTTPHeaders", {})),
        )
    lost = (
        exceptions.ConnectionError,
        exceptions.HTTPClientError,
        exceptions.IncompleteReadError,
    )
    if isinstance(error, lost):
        return lost_connection(error)
    if isinstance(error, exceptions.ParamValidationError):
        message = f"boto3 refuses the request: {error}"
        # A part of the request's own, or one that all have in common.
        is_own = re.search(r"parameter (messages|system)\b", str(error))
        return Failure(Outcome.REJECTED if is_own else None, message)
    if isinstance(error, exceptions.BotoCoreError):
        hint = "check the AWS credentials and region of this machine, or engine.profile and .region"
        return Failure(None, f"no request can be made: {str(error).rstrip('.')}; {hint}")
    # A JSON reply of another shape makes botocore's parser stumble over its parts.
    unreadable = (ResponseParserError, AttributeError, LookupError, TypeError, ValueError)
    if isinstance(error, unreadable):
        return unreadable_reply(str(error).encode())
    raise error
