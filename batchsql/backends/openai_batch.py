"""OpenAI's batches, at OpenAI and at every server that offers the same."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from batchsql.backends.batch import (
    BatchFault,
    BatchGoneError,
    BatchLimits,
    BatchLine,
    BatchStatus,
    CreatedBatch,
    Finding,
    ListedBatch,
    MaybeCreatedError,
    NotCreatedError,
    ProviderBusyError,
    ShardLabel,
    account_of,
    iter_lines,
)
from batchsql.backends.endpoint import DEFAULT_TIMEOUT_SECONDS, Endpoint
from batchsql.backends.online import ErrorReply, Failure
from batchsql.backends.openai import (
    classify_error,
    compatible_endpoint,
    openai_endpoint,
    sdk_version,
)
from batchsql.backends.openai_calls import OpenAICalls, Start, downloading, sending
from batchsql.backends.openai_lines import (
    BATCH_ENDPOINT,
    batch_encoder,
    fault_of,
    parse_json,
    parse_line,
    parse_moment,
    parse_status,
)
from batchsql.errors import BackendError, SystemicError
from batchsql.types import Call, ModelRef, Outcome, Request

_RETENTION = timedelta(days=30)
# 50,000 requests and 200 MB a file, 24 hours, files kept for 30 days: OpenAI's guide to batches.
_LIMITS = BatchLimits(
    max_requests=50_000,
    max_bytes=195_000_000,
    window_seconds=24 * 3600,
    retention_seconds=_RETENTION.total_seconds(),
    settles_late=True,  # the input is checked only after the batch was created
)
_INPUT_KEPT_SECONDS = 7 * 24 * 3600
"""How long OpenAI keeps an input that nobody deleted: well beyond a batch's window."""

_SHARD_KEY, _REQUESTS_KEY = "batchsql_shard", "batchsql_requests"
_CLOCK_SKEW = timedelta(minutes=15)
_PAGE_SIZE = 100  # the most that a list gives at once
_TRANSFER_SECONDS = 800.0
"""How long a file may be under way: no longer than the lease of whoever waits for it."""

_DOWNLOAD_TRIES = 3
_DOWNLOAD_PAUSE_SECONDS = 1.0


def open_openai_batch(
    model: ModelRef, engine: Mapping[str, Any], project_root: Path
) -> OpenAIBatch:
    """Return the batch backend for ``openai/<model>``.

    Raises:
        SpecError: an engine option is wrong.
        MissingExtraError: the SDK is not installed.
    """
    return OpenAIBatch(model, engine, openai_endpoint(model, engine), is_compatible=False)


def open_compatible_batch(
    model: ModelRef, engine: Mapping[str, Any], project_root: Path
) -> OpenAIBatch | None:
    """Return the batch backend for ``openai_compatible/<model>``, None without ``batches: true``.

    Raises:
        SpecError: an engine option is wrong, or ``base_url`` is missing.
        MissingExtraError: the SDK is not installed.
    """
    endpoint = compatible_endpoint(model, engine)
    if not engine.get("batches"):
        return None
    return OpenAIBatch(model, engine, endpoint, is_compatible=True)


class OpenAIBatch:
    """One model behind ``/files`` and ``/batches``; see ``BatchBackend``."""

    def __init__(
        self,
        model: ModelRef,
        engine: Mapping[str, Any],
        endpoint: Endpoint,
        *,
        is_compatible: bool,
    ) -> None:
        self._endpoint = endpoint
        self._is_compatible = is_compatible
        timeout_seconds = float(engine.get("timeout_seconds", DEFAULT_TIMEOUT_SECONDS))
        self._calls = OpenAICalls(model, endpoint, timeout_seconds)

    @property
    def limits(self) -> BatchLimits:
        return _LIMITS

    @property
    def version(self) -> str:
        return sdk_version()

    @property
    def account(self) -> str:
        return account_of(self._endpoint.base_url, self._endpoint.read_api_key())

    def identity(self) -> Mapping[str, Any]:
        """Return the endpoint, unless it is the provider's own: there the name says it all."""
        return {} if self._endpoint.is_own else {"endpoint": self._endpoint.base_url}

    def encoder(self, call: Call) -> Callable[[str, Request], bytes]:
        return batch_encoder(call, is_compatible=self._is_compatible)

    def upload(self, shard: ShardLabel, lines: Path, call: Call) -> str:
        what = "uploading the input of a batch"
        more: dict[str, Any] = {}
        if self._endpoint.is_own:  # other servers may not know it
            more["expires_after"] = {"anchor": "created_at", "seconds": _INPUT_KEPT_SECONDS}
        with lines.open("rb") as content:
            file = (f"batchsql-{shard.hex}.jsonl", content, "application/jsonl")
            reply = self._calls.reply_to(
                sending("POST", "/files", body={"purpose": "batch", **more}, file=file),
                _TRANSFER_SECONDS,
            )
        if isinstance(reply, ErrorReply):
            refusal = self._refusal(what, reply)
            fault = refusal.fault if isinstance(refusal, NotCreatedError) else None
            if fault is not BatchFault.TRANSIENT:
                raise refusal
        return self._id_of(what, self._calls.read(what, reply))

    def create(
        self, shard: ShardLabel, lines: Path, uploaded: str | None, call: Call, must_end_by: float
    ) -> CreatedBatch:
        what = "creating a batch"
        file_id = str(uploaded)
        start = Start(latest=must_end_by - self.limits.create_seconds / 2)
        body = {
            "input_file_id": file_id,
            "endpoint": BATCH_ENDPOINT,
            "completion_window": "24h",
            "metadata": {_SHARD_KEY: shard.hex, _REQUESTS_KEY: str(shard.requests)},
        }
        begin = sending("POST", "/batches", body=body, max_retries=0)
        reply = self._calls.reply_to_once(begin, start, must_end_by)
        if isinstance(reply, ErrorReply) and reply.status < 500 and reply.status != 408:
            if reply.status == 404 and file_id in reply.message:
                said = self._calls.say(f"{what}: its input is gone: {reply.message}")
                raise NotCreatedError(BatchFault.TRANSIENT, said)
            raise self._refusal(what, reply)
        if isinstance(reply, Failure) and not start.is_begun:
            said = self._calls.say(f"{what}: {reply.message}")
            raise NotCreatedError(BatchFault.TRANSIENT, said)
        try:
            batch = self._calls.read(what, reply)
            batch_id = self._id_of(what, batch)
        except BackendError as error:
            raise MaybeCreatedError(str(error)) from None
        created_at = parse_moment(batch.get("created_at"))
        return CreatedBatch(batch_id, created_at and created_at + _RETENTION)

    def find(self, shard: ShardLabel) -> Finding:
        """Look for the shard's mark in the list of batches.

        On a server that keeps no marks, a batch of the right time and size leaves it open whether
        it is ours.
        """
        since, until = shard.created_after, shard.created_before
        reason = None
        for batch, created_at in self._list(since and since - _CLOCK_SKEW):
            if batch["id"] in shard.not_ours:
                continue
            if _shard_of(batch) == shard.hex:
                return Finding(batch["id"])
            is_late = until and created_at and created_at > until + _CLOCK_SKEW
            if self._endpoint.is_own or batch.get("metadata") or is_late:
                continue
            counts = batch.get("request_counts") or {}
            if counts.get("total") in (None, 0, shard.requests):
                reason = f"batch {batch['id']} carries no metadata and may be ours"
        return Finding(is_sure=reason is None, reason=reason)

    def poll(self, provider_batch_id: str) -> BatchStatus:
        batch = self._retrieve(provider_batch_id)
        status = _status(batch)
        if status.error is not None:
            status = dataclasses.replace(status, error=self._calls.clean(status.error))
        if status.state.is_final and (expiries := list(self._file_expiries(batch))):
            status = dataclasses.replace(status, results_until=min(expiries))
        return status

    def fetch(self, provider_batch_id: str, folder: Path, call: Call) -> Iterator[BatchLine]:
        what = f"fetching batch {provider_batch_id}"
        batch = self._retrieve(provider_batch_id)
        status = _status(batch)
        if not status.state.is_final:
            raise ProviderBusyError(self._calls.say(f"{what}: it is {status.provider_state}"))
        if status.ok and not batch.get("output_file_id"):
            # They are paid for, so rather wait than ask again.
            said = f"{what}: it has {status.ok} answers but names no file of them yet"
            raise ProviderBusyError(self._calls.say(said))
        files: list[Path] = []
        for kind, file_id in _result_files(batch):
            file = folder / f"{kind}.jsonl"
            try:
                self._download(f"{what}, its {kind} file", file_id, file)
            except BatchGoneError:
                if not files:  # without the other file's lines nothing is paid for twice
                    raise
            else:
                files.append(file)
        return self._lines(files, call.schema)

    def cancel(self, provider_batch_id: str) -> None:
        what = f"cancelling batch {provider_batch_id}"
        # One that has ended is told by 409, which the SDK would repeat.
        path = f"/batches/{quote(provider_batch_id, safe='')}/cancel"
        reply = self._calls.reply_to(sending("POST", path, max_retries=0))
        is_refused = isinstance(reply, ErrorReply) and reply.status in (400, 409)
        if is_refused and _status(self._retrieve(provider_batch_id)).state.is_final:
            return
        self._calls.read(what, reply, is_about_batch=True)

    def discard(self, provider_batch_id: str, uploaded: str | None) -> None:
        if uploaded:
            with contextlib.suppress(BackendError):
                path = f"/files/{quote(uploaded, safe='')}"
                self._calls.ask("deleting an input", sending("DELETE", path))

    def list_batches(self, since: datetime) -> Iterator[ListedBatch]:
        for batch, created_at in self._list(since):
            yield ListedBatch(batch["id"], _status(batch), created_at or since, _shard_of(batch))

    def close(self) -> None:
        self._calls.close()

    def _refusal(self, what: str, reply: ErrorReply) -> BackendError:
        """Return the error for a definite no to an input or a batch."""
        failure = classify_error(reply)
        said = self._calls.say(f"{what}: {failure.message}")
        fault = fault_of(reply.code, reply.message)
        if fault is BatchFault.SYSTEMIC and failure.outcome is Outcome.TRANSIENT:
            fault = BatchFault.TRANSIENT
        if fault is BatchFault.SYSTEMIC and reply.status == 413:
            fault = BatchFault.TOO_LARGE
        if failure.outcome is None or fault is BatchFault.SYSTEMIC:
            return SystemicError(said)
        return NotCreatedError(fault, said, reply.retry_after_seconds)

    def _id_of(self, what: str, reply: Mapping[str, Any]) -> str:
        found = reply.get("id")
        if not isinstance(found, str) or not found:
            raise ProviderBusyError(self._calls.say(f"{what}: the reply has no id"))
        return found

    def _retrieve(self, batch_id: str) -> dict[str, Any]:
        return self._calls.ask(
            f"looking at batch {batch_id}",
            sending("GET", f"/batches/{quote(batch_id, safe='')}"),
            is_about_batch=True,
        )

    def _list(self, since: datetime | None) -> Iterator[tuple[dict[str, Any], datetime | None]]:
        """Yield the batches created since then and when they were, page by page, newest first."""
        after = ""
        while True:
            params = {"limit": _PAGE_SIZE, **({"after": after} if after else {})}
            page = self._calls.ask("listing batches", sending("GET", "/batches", params=params))
            found = [
                (batch, parse_moment(batch.get("created_at")))
                for batch in page.get("data") or ()
                if isinstance(batch, dict) and batch.get("id")
            ]
            recent = [each for each in found if not (since and each[1] and each[1] < since)]
            yield from recent
            # By whole pages, since not every server sorts exactly.
            if not recent or not page.get("has_more") or found[-1][0]["id"] == after:
                return
            after = found[-1][0]["id"]

    def _file_expiries(self, batch: Mapping[str, Any]) -> Iterator[datetime]:
        for _, file_id in _result_files(batch):
            with contextlib.suppress(BackendError):
                path = f"/files/{quote(file_id, safe='')}"
                file = self._calls.ask("looking at a file of results", sending("GET", path))
                if (expires_at := parse_moment(file.get("expires_at"))) is not None:
                    yield expires_at

    def _download(self, what: str, file_id: str, target: Path) -> None:
        path = f"/files/{quote(file_id, safe='')}/content"
        said = ""
        for number in range(_DOWNLOAD_TRIES):
            if number:
                time.sleep(_DOWNLOAD_PAUSE_SECONDS)
            reply = self._calls.reply_to(downloading(path, target), _TRANSFER_SECONDS)
            if isinstance(reply, ErrorReply):
                raise self._calls.trouble(what, reply, is_about_batch=True)
            if reply is None and _is_whole(target):
                return
            said = reply.message if reply else "its last line is cut off"
        raise ProviderBusyError(self._calls.say(f"{what}: {said} ({_DOWNLOAD_TRIES} times)"))

    def _lines(self, files: list[Path], schema: Mapping[str, Any]) -> Iterator[BatchLine]:
        for file in files:
            for text in iter_lines(file):
                line = parse_line(text, schema)
                if line.completion.error is not None:
                    error = self._calls.clean(line.completion.error)
                    completion = dataclasses.replace(line.completion, error=error)
                    line = dataclasses.replace(line, completion=completion)
                yield line


def _status(batch: Mapping[str, Any]) -> BatchStatus:
    return parse_status(batch, _RETENTION)


def _shard_of(batch: Mapping[str, Any]) -> str | None:
    metadata = batch.get("metadata")
    return metadata.get(_SHARD_KEY) if isinstance(metadata, dict) else None


def _result_files(batch: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for kind in ("output", "error"):
        if file_id := batch.get(f"{kind}_file_id"):
            yield kind, str(file_id)


def _is_whole(file: Path) -> bool:
    """Return whether the last line of a file ends, or is a whole JSON text."""
    if file.stat().st_size == 0:
        return True
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
        tail = text[text.rfind(b"\n") + 1 :]
    return not tail.strip() or parse_json(tail) is not None
