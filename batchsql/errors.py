"""The tree of errors that batchsql raises. Retry decisions look at the class, never at the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_SECRET_NAME = re.compile(
    r"api_?key|_key$|secret|password|credential|token$|^auth|header", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"\bsk-\w|\bAIza|\b(?:AKIA|ASIA)[A-Z0-9]{8}|\bBearer ")


class BatchsqlError(Exception):
    """The root of every error that batchsql raises on purpose.

    The message says what happened, the value received, what is accepted, and the next step.
    """


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a declaration: where it stands and what to do about it."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def show_value(name: str, value: object) -> str:
    """Write a value for a message: cut where it is long, left out where it may be a secret."""
    text = repr(value)
    if _SECRET_NAME.search(name) or _SECRET_VALUE.search(text):
        return "a value that is not shown"
    return text if len(text) <= 100 else f"{text[:99]}…"


class SpecError(BatchsqlError):
    """A declaration is wrong. Holds every mistake found, so that one look mends them all."""

    def __init__(
        self, subject: str, mistakes: Sequence[Mistake], kind: str = "declaration"
    ) -> None:
        self.subject = subject
        self.mistakes = tuple(mistakes)
        lines = "\n".join(f"  - {mistake}" for mistake in self.mistakes)
        count = len(self.mistakes)
        noun = "mistake" if count == 1 else "mistakes"
        super().__init__(f"{subject}: {count} {noun} in the {kind}\n{lines}")


class DataError(BatchsqlError):
    """The rows of a model break a promise, such as a unique key that is not unique."""


class WarehouseError(BatchsqlError):
    """The warehouse refused something that batchsql needs, such as creating the ledger's schema."""


class LedgerVersionError(WarehouseError):
    """The ledger was written by a newer batchsql than this one."""


class LeaseLostError(WarehouseError):
    """A shard was taken over by another owner; nothing may be written for it any more."""

    def __init__(self, shard_id: str) -> None:
        self.shard_id = shard_id
        super().__init__(f"shard {shard_id} was taken over by another run")


class ReconciliationError(BatchsqlError):
    """The counts of a run do not add up. Nothing is built from it."""


class PendingRowsError(BatchsqlError):
    """Rows have no answer yet, and the declaration says that the model fails then."""


class LostLedgerError(BatchsqlError):
    """The table holds answers that the ledger does not know, so they would be paid for again."""


class BackendError(BatchsqlError):
    """A backend failed as a whole, not for one request."""


class SystemicError(BackendError):
    """Every further request would fail the same way: bad key, unknown model, no memory."""


class MissingExtraError(BackendError):
    """A package that only some users need is not installed; the message names the extra."""
