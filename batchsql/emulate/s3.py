"""The object store that emulated batch jobs read from and write to: any server that speaks S3."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from batchsql.errors import MissingExtraError

KEY = "rehearsal"
BUCKET = "rehearsal"
REGION = "us-east-1"


class ObjectStore:
    """Reads and writes objects by ``s3://bucket/key``, with a key that is none.

    Its methods may be called from any thread, by one caller at a time.

    Raises:
        MissingExtraError: boto3 is not installed.
    """

    def __init__(self, endpoint_url: str) -> None:
        if importlib.util.find_spec("boto3") is None:
            raise MissingExtraError(
                "rehearsing Bedrock's batch jobs needs boto3: pip install 'batchsql[bedrock]'"
            )
        self.endpoint_url = endpoint_url
        self._opened: Any = None

    def read_jsonl(self, uri: str) -> Mapping[str, bytes]:
        """Return the contents of the ``.jsonl`` files at or below a place, by their key.

        Raises whatever boto3 raises.
        """
        bucket, key = _split(uri)
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key)
        keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
        folder = f"{key.rstrip('/')}/" if key else ""
        return {
            each: self._client.get_object(Bucket=bucket, Key=each)["Body"].read()
            for each in keys
            if each.endswith(".jsonl") and (each == key or each.startswith(folder))
        }

    def write(self, uri: str, content: bytes) -> None:
        """Store an object."""
        bucket, key = _split(uri)
        self._client.put_object(Bucket=bucket, Key=key, Body=content)

    def make_bucket(self, name: str) -> None:
        """Create a bucket."""
        self._client.create_bucket(Bucket=name)

    @property
    def _client(self) -> Any:
        if self._opened is None:
            import boto3
            from botocore.config import Config

            self._opened = boto3.client(
                "s3", endpoint_url=self.endpoint_url, region_name=REGION,
                aws_access_key_id=KEY, aws_secret_access_key=KEY,
                config=Config(s3={"addressing_style": "path"}, proxies={}),
            )  # fmt: skip
        return self._opened


def _split(uri: str) -> tuple[str, str]:
    parts = urlsplit(uri)
    return parts.netloc, parts.path.lstrip("/")


@contextmanager
def serve_s3() -> Iterator[str]:
    """Run moto's S3 on a free port of this machine, with one empty bucket, and yield its address.

    The bucket is called ``BUCKET``.

    Raises:
        MissingExtraError: moto or boto3 is not installed.
    """
    if importlib.util.find_spec("moto") is None:
        raise MissingExtraError("a store of its own needs moto: pip install 'moto[s3,server]'")
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # or a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        ObjectStore(url).make_bucket(BUCKET)
        yield url
    finally:
        server.stop()
