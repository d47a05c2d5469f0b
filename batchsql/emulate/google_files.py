"""Google's file API: resumable uploads, and the files that batches write."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from aiohttp import web

from batchsql.emulate.google_rules import GoogleError, invalid, read_fields
from batchsql.emulate.provider import json_reply, new_id, read_json
from batchsql.emulate.timeline import Clock

FILE_KEPT_SECONDS = 48 * 3600


@dataclass(slots=True)
class File:
    """A file that is whole."""

    name: str
    content: bytes
    created_at: float
    kind: str = "application/jsonl"
    title: str | None = None
    is_generated: bool = False


@dataclass(slots=True)
class _Upload:
    file: File
    size: int


class Files:
    """All files of the account. Each is deleted 48 hours after it came."""

    def __init__(self, clock: Clock, max_bytes: int) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._files: dict[str, File] = {}
        self._uploads: dict[str, _Upload] = {}

    def find(self, name: str) -> File:
        """Return a file, or raise the error that also hides whose file it is."""
        file = self._files.get(name)
        if file is None or self._clock.now() >= file.created_at + FILE_KEPT_SECONDS:
            raise GoogleError(
                403,
                f"You do not have permission to access the File {name.removeprefix('files/')} "
                "or it may not exist.",
            )
        return file

    def add_generated(self, name: str, content: bytes, created_at: float) -> None:
        """Keep a file that a batch has written."""
        self._files[name] = File(name, content, created_at, is_generated=True)

    def is_upload(self, request: web.Request) -> bool:
        """Return whether a request goes to the URL that an upload was given."""
        return request.query.get("upload_id") in self._uploads

    async def upload(self, request: web.Request) -> web.Response:
        """Begin an upload, or take the next part of one."""
        content = await request.read()
        command = request.headers.get("x-goog-upload-command", "")
        upload = self._uploads.get(request.query.get("upload_id", ""))
        if upload is None:
            return self._begin(request, command, content)
        offset = request.headers.get("x-goog-upload-offset", "")
        if not command.startswith("upload") or offset != str(len(upload.file.content)):
            raise invalid(f"Upload command {command!r} at offset {offset!r} is out of order.")
        upload.file.content += content
        if "finalize" not in command:
            return json_reply({}, 200, **{"x-goog-upload-status": "active"})
        if len(upload.file.content) != upload.size:
            raise invalid("The upload's size is not what was announced.")
        del self._uploads[request.query["upload_id"]]
        self._files[upload.file.name] = upload.file
        return json_reply(
            {"file": _document(upload.file)}, 200, **{"x-goog-upload-status": "final"}
        )

    def _begin(self, request: web.Request, command: str, content: bytes) -> web.Response:
        if request.headers.get("x-goog-upload-protocol") != "resumable" or command != "start":
            raise invalid("Only resumable uploads are served.")
        size = request.headers.get("x-goog-upload-header-content-length", "")
        if not size.isdigit():
            raise invalid("X-Goog-Upload-Header-Content-Length is missing.")
        if int(size) > self._max_bytes:
            raise invalid(f"File size exceeds the limit: {self._max_bytes} bytes.")
        outer = read_fields(read_json(content or b"{}"), {"file"}, "")
        fields = read_fields(
            outer.get("file", {}), {"name", "displayName", "mimeType", "sizeBytes"}, "file"
        )
        name = fields.get("name") or new_id("files/")
        if name in self._files:
            raise GoogleError(409, f"{name} exists already.", kind="ALREADY_EXISTS")
        kind = request.headers.get("x-goog-upload-header-content-type", "")
        file = File(name, b"", self._clock.now(), kind, fields.get("displayName"))
        upload_id = new_id("")
        self._uploads[upload_id] = _Upload(file, int(size))
        url = f"{request.scheme}://{request.host}{request.path}?upload_id={upload_id}"
        headers = {"x-goog-upload-url": url, "x-goog-upload-status": "active"}
        return json_reply({}, 200, **headers)

    async def get(self, request: web.Request) -> web.Response:
        """Describe a file."""
        return json_reply(_document(self.find(f"files/{request.match_info['id']}")))

    async def delete(self, request: web.Request) -> web.Response:
        """Delete a file."""
        del self._files[self.find(f"files/{request.match_info['id']}").name]
        return json_reply({})

    async def download(self, request: web.Request) -> web.Response:
        """Return the content of a file that a batch has written; of an uploaded one it is kept."""
        file = self.find(f"files/{request.match_info['id']}")
        if not file.is_generated or request.query.get("alt") != "media":
            raise invalid(f"{file.name} is not a generated file, so it cannot be downloaded.")
        return web.Response(body=file.content, content_type="application/octet-stream")


def stamp(seconds: float) -> str:
    """Return a time as Google writes it."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S.%f}000Z"


def _document(file: File) -> Mapping[str, Any]:
    digest = hashlib.sha256(file.content).hexdigest().encode()
    return {
        "name": file.name,
        "displayName": file.title,
        "mimeType": file.kind,
        "sizeBytes": str(len(file.content)),
        "createTime": stamp(file.created_at),
        "updateTime": stamp(file.created_at),
        "expirationTime": stamp(file.created_at + FILE_KEPT_SECONDS),
        "sha256Hash": base64.b64encode(digest).decode(),
        "state": "ACTIVE",
        "source": "GENERATED" if file.is_generated else "UPLOADED",
    }
