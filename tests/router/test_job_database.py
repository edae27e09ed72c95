"""The database of jobs: what it is given, what it says when something is wrong, and what is on disk."""

from __future__ import annotations

import asyncio
import sqlite3
import stat

import pytest
from sqlalchemy import text

from router.jobs.database import Database
from tests.router.shared_jobs import answer_of, job_of, shared
from workers.errors import ConfigError, InvalidRequestError, NotFoundError, UnavailableError


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "'; DROP TABLE jobs; --", "x" * 10_000])
def test_names_that_no_job_has_are_not_found_or_refused_in_words(url, name):
    async def run() -> None:
        async with shared(url) as at:
            store = at.store()
            await store.add(job_of(1))
            for look in (store.get("", name), store.get(name, "job"), store.list("", ["generate"], 1, name)):
                with pytest.raises((NotFoundError, InvalidRequestError)):
                    await look
            assert (await store.get("", "job")).num_prompts == 1

    asyncio.run(run())


def test_a_file_of_jobs_is_its_owners_alone(tmp_path):
    async def run() -> None:
        async with shared(f"sqlite:///{tmp_path}/deep/jobs.sqlite") as at:
            await at.store().add(job_of(1))

    asyncio.run(run())
    assert stat.S_IMODE((tmp_path / "deep" / "jobs.sqlite").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense", "no URL"),
        ("mysql://host/name", "mysql is not supported"),
        ("sqlite://", "jobs in memory do not survive"),
        ("sqlite:///:memory:", "jobs in memory do not survive"),
    ],
)
def test_a_url_of_which_nothing_can_come_is_refused(url, says):
    with pytest.raises(ConfigError, match=says) as caught:
        Database(url)
    assert caught.value.param == "jobs.url"


def test_a_database_that_another_process_holds_is_said_to_be_locked(tmp_path, monkeypatch):
    monkeypatch.setattr("router.jobs.database._LOCK_TIMEOUT_S", 0.05)

    async def run() -> None:
        async with shared(f"sqlite:///{tmp_path}/jobs.sqlite") as at:
            store = at.store()
            await store.add(job_of(1))
            other = sqlite3.connect(tmp_path / "jobs.sqlite")
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(UnavailableError, match="is locked by another process"):
                await store.add(job_of(1, "another"))
            other.rollback()
            other.close()
            assert (await store.add(job_of(1, "another"))).num_prompts == 1

    asyncio.run(run())


def test_a_full_disk_is_said_to_be_full_and_what_was_there_is_there(tmp_path):
    async def run() -> None:
        async with shared(f"sqlite:///{tmp_path}/jobs.sqlite") as at:
            store = at.store()
            await store.add(job_of(1))
            engine = at.databases[0]._engine
            with engine.connect() as connection:
                pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
                connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            with pytest.raises(UnavailableError, match="has no room left on its disk; free some"):
                await store.add(job_of(2000, "large"))
            assert [job.id for job in await store.list("", ["generate"], 10)] == ["job"]

    asyncio.run(run())


def test_what_is_answered_is_synced_to_the_disk(tmp_path):
    async def run() -> None:
        async with shared(f"sqlite:///{tmp_path}/jobs.sqlite") as at:
            await at.store().add(job_of(1))
            with at.databases[0]._engine.connect() as connection:
                pragmas = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in _DURABLE]
            assert pragmas == ["wal", 2]

    asyncio.run(run())


_DURABLE = ("journal_mode", "synchronous")


@pytest.mark.postgres
@pytest.mark.slow
def test_a_server_that_is_started_anew_has_what_was_accepted(postgres):
    async def run() -> None:
        async with shared(postgres.fresh_database()) as at:
            queue, store = at.queue("a"), at.store()
            await store.add(job_of(3))
            (claim, *_) = await queue.claim(1)
            await queue.answer(claim, answer_of(claim, "a"))
            postgres.stop()
            with pytest.raises(UnavailableError, match=r"\(jobs.url: postgresql\+psycopg://postgres@/jobs"):
                await store.add(job_of(1, "another"))
            postgres.start()
            job, answers = await store.answers("", "job", 0, 10)
            assert (job.num_prompts, len(answers)) == (3, 1)
            assert len(await queue.claim(9)) == 2

    asyncio.run(run())


def test_tables_of_an_earlier_version_get_what_they_lack(url):
    async def run() -> None:
        async with shared(url) as at:
            await at.store().add(job_of(2, "before"))
            await at.databases[0].run(lambda session: session.execute(text("ALTER TABLE jobs DROP COLUMN num_bytes")))
            store, queue = at.store(), at.queue("a")
            for claim in await queue.claim(2):
                assert await queue.answer(claim, answer_of(claim, "a"))
            assert (await store.get("", "before")).ended
            await store.add(job_of(1, "after"))

    asyncio.run(run())
