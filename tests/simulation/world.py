"""A world in virtual time: processes that run, stop, die and are resumed, over one real ledger.

Everything runs in one thread and every choice is drawn from one seed, so a seed is a schedule. A
process runs straight through its action, but at each durable step (before and after a transaction,
before and after a call to the provider) the world may let time pass, kill the process, or stop it
there while another one does a whole action.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import duckdb
import orjson
import pyarrow as pa

from batchsql.backends.base import Capabilities
from batchsql.backends.batch import BatchBackend
from batchsql.batches import Batches
from batchsql.collecting import Collector
from batchsql.context import RunContext
from batchsql.declare.keys import asked_json
from batchsql.declare.spec import Declaration, parse_declaration
from batchsql.dispatch import Dispatcher, Question
from batchsql.errors import BackendError, SystemicError
from batchsql.types import Call
from batchsql.warehouse.duckdb import DuckDBDialect, DuckDBWarehouse
from batchsql.warehouse.ledger import Ledger, SpecRow
from batchsql.warehouse.todo import iter_positions
from tests.simulation.provider import HOUR, FakeBatches, Manners, Provider, moment

ENRICHMENT = "model.shop.labels"
SPEC = str(uuid.UUID(int=1))
ACCOUNTS = ("ours", "another")
NAMES = ("A", "B", "C")
INGEST_ROWS = 2
"""Small, so that a process may die or be overtaken in the midst of a shard's results."""

PRICE_USD = 0.001
"""What each try costs."""

_MAX_STOPS = 12
_SETTLE_ROUNDS = 60
_LAST_ROUNDS = 10


class Crash(BaseException):
    """A process is killed here: nothing of it runs any more."""


@dataclass(frozen=True)
class Climate:
    """What a seed's world is like: drawn once, so that each seed has troubles of its own.

    ``is_shared`` stands for PostgreSQL, where processes see each other only by their leases;
    otherwise one process owns the ledger, and those on it are its threads.
    """

    is_shared: bool
    manners: Manners
    requests: int
    actions: int
    crash: float
    stop: float
    jump: float
    other_account: float
    wait_seconds: tuple[float, ...]
    deadline_seconds: float | None
    rescue_max_usd: float
    limit: int | None


def draw_climate(rng: random.Random) -> Climate:
    """Return what a world is like: each trouble is absent, rare or frequent."""

    def chance(*levels: float) -> float:
        return rng.choice((0.0, 0.0, *levels))

    climate = Climate(
        is_shared=rng.random() < 0.7,
        manners=Manners(
            keeps_marks=rng.random() < 0.6,
            keeps_partial=rng.random() < 0.7,
            settles_late=rng.random() < 0.5,
            forgets_old_batches=rng.random() < 0.5,
            lost_reply=chance(0.2, 0.6),
            refused=chance(0.1, 0.4),
            refused_later=chance(0.2, 0.5),
            systemic=chance(0.1),
            busy=chance(0.05, 0.2),
            unknown_at_first=chance(0.5),
            never_ends=chance(0.1, 0.4),
            expires=chance(0.2, 0.5),
            cancel_hangs=chance(0.5, 1.0),
            bad_answer=chance(0.1, 0.4),
            failed_line=chance(0.1, 0.4),
            missing_line=chance(0.1),
            cut_download=chance(0.3, 1.0),
            broken_download=chance(0.3, 1.0),
            repeated_line=chance(0.2),
            foreign_line=chance(0.2),
        ),
        requests=rng.choice((2, 3, 5)),
        actions=rng.choice((2, 4, 6)),
        crash=chance(0.01, 0.04),
        stop=chance(0.02, 0.06),
        jump=chance(0.02, 0.06),
        other_account=chance(0.1, 0.3),
        wait_seconds=rng.choice(((0.0,), (0.0, 5 * HOUR), (30 * HOUR,))),
        deadline_seconds=rng.choice((None, 2 * HOUR, 6 * HOUR)),
        rescue_max_usd=rng.choice((0.0, 0.0, PRICE_USD, 10 * PRICE_USD)),
        limit=rng.choice((None, None, None, 2)),
    )
    if rng.random() < 0.8:
        return climate
    # Asking twice near a deadline takes batches that stay long and are slow to be cancelled.
    manners = replace(
        climate.manners, never_ends=0.3, cancel_hangs=rng.choice((0.0, 0.5)), refused=0.0,
        refused_later=0.0, systemic=0.0,
    )  # fmt: skip
    return replace(
        climate, manners=manners, deadline_seconds=2 * HOUR, rescue_max_usd=2 * PRICE_USD
    )


@dataclass(frozen=True)
class Troubles:
    """Values of ``Climate`` and ``Manners`` to be had whatever the seed."""

    manners: dict[str, Any] = field(default_factory=dict)
    climate: dict[str, Any] = field(default_factory=dict)


class World:
    """One seed's world; ``live`` runs it to its end.

    Args:
        seed: gives the climate and every choice.
        say: is told what happens, if given.
        troubles: changes of the climate that the seed gives, and of its provider's manners.
    """

    def __init__(
        self,
        seed: int,
        say: Callable[[str], None] | None = None,
        troubles: Troubles | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        climate = draw_climate(self.rng)
        if troubles is not None:
            manners = replace(climate.manners, **troubles.manners)
            climate = replace(climate, manners=manners, **troubles.climate)
        self.climate = climate
        self.now = 0.0
        self.provider = Provider(self, self.climate.manners)
        self.keys: list[str] = []
        self.cancelled_by_hand: set[str] = set()
        """The shards, as hex, that a user wanted cancelled, whatever is lost."""
        self._ids = random.Random(seed)
        self._say = say
        self._is_calm = False
        self._stops_left = _MAX_STOPS
        self._working: list[str] = []
        self._lives = 1
        self._database = open_database()
        self.log(str(self.climate))

    # --- what the provider and the ledger see -----------------------------------------------------

    @property
    def clock(self) -> str:
        """SQL for now."""
        return f"'{moment(self.now).isoformat()}'::timestamptz"

    def log(self, text: str) -> None:
        if self._say is not None:
            who = "/".join(self._working)
            self._say(f"{moment(self.now):%d %H:%M:%S.%f} {who:6} {text}")

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def reach(self, point: str, *, may_stop: bool = True) -> None:
        """Let time pass at a step, kill the process there, or stop it while others work.

        Raises:
            Crash: the process is killed.
        """
        self.now += 0.001  # no two steps are at one time
        climate = self.climate
        if self._is_calm or not self._working or not self._stops_left:
            return
        draw = self.rng.random()
        if draw < climate.crash:
            self._stops_left -= 1
            self.log(f"is killed at {point}")
            raise Crash
        if not may_stop:
            return
        if draw < climate.crash + climate.stop and len(self._working) < len(NAMES):
            self._stops_left -= 1
            self._stop(point)
        elif draw > 1 - climate.jump:
            self._stops_left -= 1
            self.advance(self.rng.choice((5.0, 40.0, 400.0, 1_000.0)))
            self.log(f"is slow at {point}")

    def _stop(self, point: str) -> None:
        self.advance(self.rng.choice((0.0, 20.0, 100.0, 1_000.0, 12 * HOUR, 100 * HOUR)))
        self.log(f"is stopped at {point}")
        for _ in range(self.rng.choice((1, 1, 2))):
            self._act()
            self.advance(self.rng.choice((0.0, 20.0, 1_000.0)))
        self.log(f"goes on at {point}")

    # --- what happens ---------------------------------------------------------------------------

    def live(self) -> None:
        """Run the schedule, let everything settle, then answer the rest under good conditions.

        Raises:
            AssertionError: something does not come to an end.
        """
        with self._patched():
            self._fill()
            for _ in range(self.climate.actions):
                self._act()
                self.advance(
                    self.rng.choice((1.0, 40.0, 150.0, 1_000.0, HOUR, 8 * HOUR, 30 * HOUR))
                )
            self._is_calm = True
            self._settle()
            self._finish()

    def _fill(self) -> None:
        ledger = self.open_ledger()
        declaration = declare()
        ledger.write_spec(
            SpecRow(
                SPEC, 1, str(declaration.model), declaration.template, "{}",
                orjson.dumps(asked_json(declaration.returns)).decode(), "standard", "{}", "[]",
            )
        )  # fmt: skip
        self.keys = [self._new_id().hex for _ in range(self.climate.requests)]
        texts = [f"row {n} " + self._words() for n in range(len(self.keys))]
        ledger.write_items(
            SPEC,
            pa.table(
                {"item_key": self.keys, "request_key": self.keys, "unique_key": self.keys}
            ),
            pa.table(
                {
                    "request_key": self.keys,
                    "messages": [
                        json.dumps([["user", text]], ensure_ascii=False) for text in texts
                    ],
                }
            ),
        )  # fmt: skip

    def _words(self) -> str:
        """Return text of any length: short, as long as a third of a batch, too long for one."""
        # These letters take three bytes in the ledger and six in a line.
        return self.rng.choice(("", "", "", "x" * 600, "€" * 120, "€" * 400))

    def _act(self) -> None:
        """Let a process that does nothing yet do something."""
        name = self.rng.choice([name for name in NAMES if name not in self._working])
        action = self.rng.choice((self._run, self._run, self._collect, self._collect, self._cancel))
        is_other = self.rng.random() < self.climate.other_account
        self._do(name, action, ACCOUNTS[is_other])

    def _do(self, name: str, action: Callable[[Actor], None], account: str = ACCOUNTS[0]) -> None:
        self._working.append(name)
        actor = Actor(self, account)
        self.log(f"begins to {action.__name__.strip('_')} as {account}")
        try:
            action(actor)
            self.log("is done")
        except BackendError as error:
            if action == self._run and not isinstance(error, SystemicError):
                raise AssertionError(f"a run ends with {error!r}") from error
            self.log(f"ends with {type(error).__name__}: {error}")
        except Crash:
            if not self.climate.is_shared and len(self._working) > 1:
                raise  # a thread of the process that is dead
            self._lives += 1
        finally:
            self._working.pop()
            actor.warehouse.close()

    def _run(self, actor: Actor) -> None:
        climate, rng = self.climate, self.rng
        keys = list(self.keys)
        rng.shuffle(keys)
        if self._is_calm:
            actor.run(declare(), keys)
            return
        deadline = climate.deadline_seconds
        declaration = replace(
            declare(),
            wait_seconds=rng.choice(climate.wait_seconds),
            limit=climate.limit,
            deadline=None if deadline is None else FixedDeadline(deadline),
            rescue_before_seconds=HOUR,
            rescue_max_usd=climate.rescue_max_usd,
        )  # type: ignore[arg-type]
        actor.run(declaration, keys)

    def _collect(self, actor: Actor) -> None:
        actor.collect()

    def _cancel(self, actor: Actor) -> None:
        shards = actor.ledger.read_open_batches()
        if shards:
            shard_id = self.rng.choice(shards).shard_id
            self.cancelled_by_hand.add(shard_id.replace("-", ""))
            actor.batches.cancel(shard_id)

    def _settle(self) -> None:
        """Collect under both accounts, ever later, until no batch is open."""
        self.log("settling")
        ledger = self.open_ledger()
        for number in range(_SETTLE_ROUNDS):
            self.advance(5 * HOUR)
            self._do("A", self._collect, ACCOUNTS[number % 2 if self.climate.other_account else 0])
            if not ledger.read_open_batches():
                return
        raise AssertionError(f"batches stay open: {ledger.read_open_batches()}")

    def _finish(self) -> None:
        """Run with a provider that does as it should, until every request is answered or dead."""
        self.log("finishing")
        manners = self.climate.manners
        self.provider.manners = Manners(manners.keeps_marks, manners.keeps_partial)
        ledger = self.open_ledger()
        for _ in range(_LAST_ROUNDS):
            self.advance(30 * HOUR)  # what was refused is forgotten after a day
            self._do("A", self._run)
            counts = ledger.count_requests(SPEC)
            if counts.results + counts.dead == counts.total:
                ledger.free_lost_shards()
                return
        raise AssertionError(f"requests stay without an answer: {counts}")

    # --- its parts --------------------------------------------------------------------------------

    def open_ledger(self) -> Ledger:
        return Ledger(SimulatedWarehouse(self, self._database.cursor()), "ledger")

    def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        """Read the ledger from outside of the world."""
        rows: list[tuple[Any, ...]] = self._database.execute(sql).fetchall()
        return rows

    def process(self) -> str:
        """Return the process that owns the ledger, where one does."""
        return f"life {self._lives}"

    def new_run(self) -> str:
        return str(self._new_id())

    def _new_id(self) -> uuid.UUID:
        return uuid.UUID(int=self._ids.getrandbits(128), version=4)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        time = SimpleNamespace(monotonic=lambda: self.now)
        with (
            mock.patch("uuid.uuid4", self._new_id),
            mock.patch("batchsql.dispatch.time", time),
            mock.patch("batchsql.batches.INGEST_ROWS", INGEST_ROWS),
            mock.patch("batchsql.warehouse.shards.process_id", self.process),
            mock.patch("batchsql.warehouse.batch_shards.process_id", self.process),
        ):
            yield


class SimulatedWarehouse(DuckDBWarehouse):
    """A cursor on the ledger with the world's clock, whose transactions are steps.

    Transactions never overlap, since nothing stops in the midst of one; so the row locks that
    PostgreSQL takes are left out.
    """

    def __init__(self, world: World, cursor: Any) -> None:
        super().__init__(cursor, "memory", cursor.close)
        self._world = world
        self._is_open = False
        self.has_foreign_writers = world.climate.is_shared

    @property
    def clock(self) -> str:  # type: ignore[override]
        return self._world.clock

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._world.reach("the beginning of a transaction")
        with super().transaction():
            self._is_open = True
            try:
                yield
                self._world.reach("a commit", may_stop=False)
            finally:
                self._is_open = False
        self._world.reach("what follows a commit")

    def fetch(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        if not self._is_open:
            self._world.reach("a read")
        bare = sql.removesuffix(" for update skip locked").removesuffix(" for update")
        return super().fetch(bare, params)


class SimulatedCollector(Collector):
    """A collector whose batches go by the world's clock."""

    def __init__(self, world: World, ledger: Ledger, **more: Any) -> None:
        super().__init__(ledger, **more)
        self._world = world

    def _look_after_with(self, backend: BatchBackend) -> Batches:
        return Batches(
            self._ledger, backend, owner=self._owner, judge_of=self.judge_of,
            say=self._say, warn=self._warn, clock=lambda: self._world.now,
        )  # fmt: skip


class Stop:
    """The event that tells a run to stop; waiting for it is how the run's time passes."""

    def __init__(self, world: World) -> None:
        self._world = world

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        # More than asked for: a run that polls every minute would take its time here too.
        self._world.advance(
            max(seconds, self._world.rng.choice((0.0, 100.0, 100.0, HOUR, 6 * HOUR)))
        )
        self._world.reach("a wait")
        return False


@dataclass(frozen=True)
class FixedDeadline:
    """A deadline so long after each run's beginning."""

    seconds: float

    def seconds_from(self, now: datetime) -> float:
        return self.seconds


class Actor:
    """One action of a process: its connection, and what it works with."""

    def __init__(self, world: World, account: str) -> None:
        self.ledger = world.open_ledger()
        self.warehouse = self.ledger.warehouse
        self._world = world
        self._run_id = world.new_run()
        self._owner = f"{world.process()}:{self._run_id}"
        backend = FakeBatches(world, world.provider, lambda: account)
        self._collector = SimulatedCollector(
            world, self.ledger, open_backend=lambda model, engine: backend,
            open_prices=lambda model, prices, tier: lambda route, usage, reported: 0.001,
            owner=self._owner, say=self._say, warn=self._say,
        )  # fmt: skip

    def _say(self, message: str) -> None:
        self._world.log(f"  says: {message}")

    @property
    def batches(self) -> Batches:
        return self._collector.batches_of(declare().model, {})

    def collect(self) -> None:
        """Look after all open batches, as ``batchsql collect`` does."""
        self.ledger.free_lost_shards()
        looked = self._collector.look_after(self.ledger.read_open_batches())
        for error in looked.errors:
            self._say(f"{type(error).__name__}: {error}")

    def run(self, declaration: Declaration, keys: list[str]) -> None:
        """Do what a run of an enrichment does, from the collection of older batches on."""
        ledger = self.ledger
        ledger.begin_run(self._run_id, ENRICHMENT, SPEC, self._world.process())
        self.collect()
        wanted = pa.RecordBatch.from_pydict({"request_key": keys, "is_urgent": [False] * len(keys)})
        ledger.load_todo(iter_positions(iter([wanted])))
        dispatcher = Dispatcher(
            declaration, self._context(), _NoStream(), self._collector,
            Question(call(declaration), (), SPEC), run_id=self._run_id, owner=self._owner,
        )  # type: ignore[arg-type]  # fmt: skip
        dispatcher.ship()
        ledger.finish_run(self._run_id, "finished", None, {})

    def _context(self) -> RunContext:
        return RunContext(
            source=None, warehouse=self.warehouse, dialect=DuckDBDialect(), ledger=self.ledger,
            open_backend=None, open_ledger=None, open_batch_backend=None,
            open_prices=lambda model, prices, tier: lambda route, usage, reported: 0.001,
            enrichment=ENRICHMENT, invocation_id="simulation", stop=Stop(self._world),
            info=self._say, warn=self._say,
        )  # type: ignore[arg-type]  # fmt: skip


def _open_prices(*of: object) -> Callable[..., float]:
    return lambda route, usage, reported: PRICE_USD


class _NoStream:
    """The online endpoint, which nothing is sent to."""

    version = "none"
    capabilities = Capabilities(slots=1, shard_requests=1, stays_inside=False)


def call(declaration: Declaration) -> Call:
    return Call(declaration.model, {}, declaration.returns.object_schema(), declaration.max_tokens)


@lru_cache
def declare() -> Declaration:
    """Return the one enrichment of every world."""
    return parse_declaration(
        "model labels",
        {
            "model": "openai/simulated",
            "prompt": "{{ text }}\n",
            "returns": {"label": {"type": "string"}},
            "route": "batch",
            "max_attempts": 2,
        },
        project_root=Path(),
        check_model=lambda model, params, engine: [],
    )


_OPENED: list[Any] = []


def open_database() -> Any:
    """Return the process's one database in memory, with an empty ledger.

    Making the tables takes far longer than emptying them.
    """
    if not _OPENED:
        database = duckdb.connect(":memory:", config={"threads": 1})
        ledger = Ledger(DuckDBWarehouse(database.cursor(), "memory", lambda: None), "ledger")
        ledger.migrate()
        _OPENED.append(database)
    database = _OPENED[0]
    tables = database.execute(
        "select table_name from duckdb_tables() where schema_name = 'ledger' and not temporary "
        "and table_name <> 'meta'"
    ).fetchall()
    for (name,) in tables:
        database.execute(f"truncate ledger.{name}")
    return database
