"""The database of durable jobs: SQLite or PostgreSQL, on a thread of its own, with errors of one line."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, func, inspect, make_url, select, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateColumn

from router.jobs.tables import Table
from workers.errors import ConfigError, InvalidRequestError, KVFerryError, UnavailableError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 5
# How long one process waits for another's transaction.
_LOCK_TIMEOUT_S = 5
# Any number: who makes the tables holds this lock of PostgreSQL.
_SCHEMA_LOCK = 7_310_583
# As well: its first half, with a tenant's number, is held by who adds to what that tenant keeps.
_TENANT_LOCK = 7_310_584
# Of a transaction that another one was in the way of.
_MAX_TRIES = 3
_IN_THE_WAY = ("40001", "40P01")
# What databases say, and what it means.
_REASONS = (
    ("database is locked", "is locked by another process; try again"),
    ("disk is full", "has no room left on its disk; free some"),
    ("No space left on device", "has no room left on its disk; free some"),
    ("readonly database", "may not be written; give this user the right to"),
)


class Database:
    """One transaction at a time, in the order asked for. It is opened when it is first needed, and again after it was
    gone: a router lives on without it."""

    def __init__(self, url: str) -> None:
        self._url = parsed_url(url)
        self._engine = _engine(self._url)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jobs")
        self._has_tables = False

    async def run(self, work: Callable[[Session], T]) -> T:
        """What `work` returns, once all that it changed is on disk. Raises what it raises, UnavailableError when the
        database cannot be reached or written."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, work)

    async def close(self) -> None:
        """After what is under way."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.dispose)
        self._thread.shutdown(wait=False)

    def _transaction(self, work: Callable[[Session], T]) -> T:
        num_tries = 0
        while True:
            num_tries += 1
            try:
                if not self._has_tables:
                    self._make_tables()
                with Session(self._engine, expire_on_commit=False) as session, session.begin():
                    return work(session)
            except (DataError, UnicodeError) as exc:
                raise InvalidRequestError("there are characters in it that no database keeps; leave them out") from exc
            except (SQLAlchemyError, OSError) as exc:
                if num_tries == _MAX_TRIES or not _was_in_the_way(exc):
                    raise self._error(exc) from exc

    def _make_tables(self) -> None:
        if self._url.get_backend_name() == "sqlite":
            path = Path(str(self._url.database))
            path.parent.mkdir(parents=True, exist_ok=True)
            # Prompts are nobody else's to read.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        with self._engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})"))
            Table.metadata.create_all(connection)
            _add_columns(connection)
        self._has_tables = True

    def _error(self, exc: Exception) -> KVFerryError:
        said = " ".join(str(exc.orig if isinstance(exc, DBAPIError) else exc).split())
        reason = next((reason for words, reason in _REASONS if words in said), f"does not answer ({said[:200]})")
        logger.warning("jobs: %s: %s", type(exc).__name__, said)
        return UnavailableError(
            f"the database of jobs (jobs.url: {self._url.set(query={}).render_as_string()}) {reason}"
        )


def one_at_a_time(session: Session, tenant: str) -> None:
    """Let nobody else who asks for it add to what `tenant` keeps until this transaction ends. SQLite has one writer."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(_TENANT_LOCK, func.hashtext(tenant))))


def _add_columns(connection: Connection) -> None:
    """Those that tables of an earlier version lack."""
    there = inspect(connection)
    for table in Table.metadata.sorted_tables:
        known = {column["name"] for column in there.get_columns(table.name)}
        for column in table.columns:
            if column.name not in known:
                definition = CreateColumn(column).compile(dialect=connection.dialect)
                connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {definition}")


def _was_in_the_way(exc: Exception) -> bool:
    """Two at the same new row, or a deadlock: the second try sees what the other did."""
    return isinstance(exc, IntegrityError) or getattr(getattr(exc, "orig", None), "sqlstate", "") in _IN_THE_WAY


def check_url(url: str) -> None:
    """Raises ConfigError when nothing can come of it, or its driver is not installed."""
    _engine(parsed_url(url)).dispose()


def parsed_url(url: str) -> URL:
    """Raises ConfigError when nothing can come of it."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise _bad_url("it is no URL such as postgresql://user@host/name or sqlite:////path/jobs.sqlite") from None
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise _bad_url(f"{backend} is not supported; use postgresql or sqlite")
    if backend == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise _bad_url("jobs in memory do not survive; name a file: sqlite:////path/jobs.sqlite")
    # The driver that `kvferry[postgres]` brings.
    return parsed.set(drivername="postgresql+psycopg") if backend == "postgresql" else parsed


def _bad_url(reason: str) -> ConfigError:
    return ConfigError(f"jobs.url: {reason}", param="jobs.url")


def _engine(url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, connect_args={"timeout": _LOCK_TIMEOUT_S, "check_same_thread": False})
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    try:
        return create_engine(url, connect_args={"connect_timeout": _CONNECT_TIMEOUT_S}, pool_pre_ping=True)
    except ModuleNotFoundError as exc:
        raise _bad_url(f"PostgreSQL needs {exc.name}: pip install 'kvferry[postgres]'") from None
    except ImportError as exc:
        raise _bad_url(f"PostgreSQL's driver cannot be loaded ({exc}): pip install 'kvferry[postgres]'") from None


def _prepare_sqlite(connection: Any, record: object) -> None:
    # Transactions begin where _begin_sqlite says, not where Python's driver thinks.
    connection.isolation_level = None
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    """One writer at a time: a transaction never finds that what it read has changed."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")
