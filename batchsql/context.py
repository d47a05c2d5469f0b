"""Where a run happens: the connections, the ledger, the backend's opener, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event

from batchsql.asking import OpenPrices
from batchsql.backends.base import StreamBackend
from batchsql.collecting import OpenBatchBackend
from batchsql.declare.spec import Declaration
from batchsql.warehouse.base import Dialect, Source, Warehouse
from batchsql.warehouse.ledger import Ledger


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a run needs of the world. Whoever opens it closes the warehouse."""

    source: Source
    warehouse: Warehouse
    dialect: Dialect
    ledger: Ledger
    open_backend: Callable[[Declaration], StreamBackend]
    open_ledger: Callable[[str], Ledger]
    open_batch_backend: OpenBatchBackend
    open_prices: OpenPrices
    enrichment: str
    invocation_id: str
    stop: Event
    info: Callable[[str], None]
    warn: Callable[[str], None]
    column_types: Mapping[str, str] = field(default_factory=dict)
    """The user's own type for an answer column, by name."""
