"""Prompts shared by routers, on both databases: claimed by lease, answered once."""

from __future__ import annotations

import asyncio
import random
import stat
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from router.job_database import Database
from router.job_queue import JobQueue
from router.job_records import Answer, Claim, JobStatus, NewJob, Used
from router.job_store import JobStore
from workers.errors import ConfigError, InvalidRequestError, NotFoundError, UnavailableError
from workers.request import Timeline

LEASE_S, TTL_S = 10.0, 100.0


@dataclass
class Shared:
    """One database and routers at it, each with a connection of its own; the time is what the test says."""

    url: str
    now_s: float = 1000.0
    databases: list[Database] = field(default_factory=list)

    def _database(self) -> Database:
        self.databases.append(Database(self.url))
        return self.databases[-1]

    def queue(self, owner: str) -> JobQueue:
        return JobQueue(self._database(), owner, LEASE_S, TTL_S, lambda: self.now_s)

    def store(self) -> JobStore:
        return JobStore(self._database(), TTL_S, lambda: self.now_s)


@asynccontextmanager
async def shared(url: str) -> AsyncIterator[Shared]:
    one = Shared(url)
    try:
        yield one
    finally:
        for database in one.databases:
            await database.close()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.slow])])
def url(request: pytest.FixtureRequest, tmp_path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres").fresh_database())
    return f"sqlite:///{tmp_path}/jobs.sqlite"


def job_of(count: int, job_id: str = "job", **fields) -> NewJob:
    return NewJob("", job_id, "generate", [f"{job_id} {at}".encode() for at in range(count)], **fields)


def answer_of(claim: Claim, by: str) -> Answer:
    return Answer(f"{claim.index} by {by}".encode(), used=Used(2, 3, 1, Timeline(prefill_s=0.5)))


def test_two_routers_never_hold_the_same_prompt(url):
    async def run() -> None:
        async with shared(url) as at:
            a, b = at.queue("a"), at.queue("b")
            await at.store().add(job_of(50))
            claims = await asyncio.gather(*(queue.claim(7) for queue in (a, b) * 5))
            keys = [claim.key for some in claims for claim in some]
            assert len(keys) == len(set(keys)) == 50
            assert await a.claim(1) == await b.claim(1) == []

    asyncio.run(run())


def test_when_a_lease_ends_another_answers_and_the_first_answer_stays(url):
    async def run() -> None:
        async with shared(url) as at:
            a, b, store = at.queue("a"), at.queue("b"), at.store()
            await store.add(job_of(2))
            lost, kept = await a.claim(2)
            at.now_s += LEASE_S / 2
            assert await a.renew([lost.key, kept.key]) == {lost.key, kept.key}
            at.now_s += LEASE_S - 1
            assert await b.claim(2) == []
            at.now_s += 2
            again = await b.claim(1)
            assert [(claim.key, claim.num_attempts) for claim in again] == [(lost.key, 2)]
            assert await a.renew([lost.key, kept.key]) == {kept.key}
            assert await b.answer(again[0], answer_of(again[0], "b"))
            assert not await a.answer(lost, answer_of(lost, "a"))
            # Late, and all the same the first.
            assert await a.answer(kept, answer_of(kept, "a"))
            job, answers = await store.answers("", "job", 0, 10)
            assert [(one.place, one.index, one.body) for one in answers] == [(0, 0, b"0 by b"), (1, 1, b"1 by a")]
            assert (job.status, job.num_answered) == (JobStatus.COMPLETED, 2)
            assert job.used == Used(4, 6, 2, Timeline(prefill_s=1.0))

    asyncio.run(run())


def test_routers_that_answer_at_once_count_every_answer_once_and_in_places_without_gaps(url):
    async def run() -> None:
        async with shared(url) as at:
            queues, store = [at.queue(name) for name in "abc"], at.store()
            await store.add(job_of(40))
            claims = await queues[0].claim(40)

            async def answer_all(queue: JobQueue) -> int:
                mine = random.Random(str(id(queue))).sample(claims, len(claims))
                return sum([await queue.answer(claim, answer_of(claim, "x")) for claim in mine])

            assert sum(await asyncio.gather(*map(answer_all, queues))) == 40
            job, answers = await store.answers("", "job", 0, 100)
            assert [one.place for one in answers] == list(range(40))
            assert Counter(one.index for one in answers) == dict.fromkeys(range(40), 1)
            assert (job.num_answered, job.used.num_completion_tokens) == (40, 120)

    asyncio.run(run())


def test_a_job_whose_routers_die_again_and_again_is_answered_once_each(url):
    """Routers claim, answer some and die; leases end; none of the prompts is lost or answered twice."""
    num_prompts = 100

    async def run() -> None:
        async with shared(url) as at:
            store, rng = at.store(), random.Random(5)
            await store.add(job_of(num_prompts))
            accepted: Counter[int] = Counter()
            for number in range(200):
                queue = at.queue(f"router {number}")
                for claim in await queue.claim(20):
                    if rng.random() < 0.8 and await queue.answer(claim, answer_of(claim, str(number))):
                        accepted[claim.index] += 1
                await at.databases.pop().close()
                if (await store.get("", "job")).ended:
                    break
                at.now_s += LEASE_S + 1
            job, answers = await store.answers("", "job", 0, 1000)
            assert job.status is JobStatus.COMPLETED
            assert accepted == Counter(one.index for one in answers) == dict.fromkeys(range(num_prompts), 1)

    asyncio.run(run())


def test_what_a_router_gives_back_is_free_at_once_and_no_try(url):
    async def run() -> None:
        async with shared(url) as at:
            a, b = at.queue("a"), at.queue("b")
            await at.store().add(job_of(3))
            first, second, _ = await a.claim(3)
            await a.release(first, after_s=5.0)
            await a.release(second, after_s=5.0, uncounted=True)
            assert await b.claim(3) == []
            at.now_s += 5.0
            assert [claim.num_attempts for claim in await b.claim(3)] == [2, 1]
            await b.release_all()
            await a.release_all()
            assert [claim.num_attempts for claim in await a.claim(3)] == [2, 1, 1]

    asyncio.run(run())


def test_a_short_job_does_not_wait_for_the_end_of_a_long_one(url):
    async def run() -> None:
        async with shared(url) as at:
            queue, store = at.queue("a"), at.store()
            await store.add(job_of(100, "long"))
            await queue.claim(10)
            await store.add(job_of(2, "short"))
            assert [claim.job_id for claim in await queue.claim(3)] == ["short", "short", "long"]

    asyncio.run(run())


def test_a_cancelled_job_takes_no_more_answers(url):
    async def run() -> None:
        async with shared(url) as at:
            queue, store = at.queue("a"), at.store()
            await store.add(job_of(3))
            first, second = await queue.claim(2)
            await queue.answer(first, answer_of(first, "a"))
            assert (await store.cancel("", "job")).status is JobStatus.CANCELLED
            assert not await queue.answer(second, answer_of(second, "a"))
            assert await queue.renew([second.key]) == set()
            assert await queue.claim(3) == []
            job, answers = await store.answers("", "job", 0, 10)
            assert (job.num_answered, len(answers)) == (1, 1)

    asyncio.run(run())


def test_what_is_due_is_given_up_and_what_has_expired_is_gone(url):
    async def run() -> None:
        async with shared(url) as at:
            queue, store = at.queue("a"), at.store()
            await store.add(job_of(2, "short", time_limit_s=5.0))
            await store.add(job_of(2, "long"))
            at.now_s += 5.0
            await queue.sweep()
            jobs = {job.id: job.status for job in await store.list("", ["generate"], 10)}
            assert jobs == {"short": JobStatus.EXPIRED, "long": JobStatus.RUNNING}
            assert {claim.job_id for claim in await queue.claim(9)} == {"long"}
            at.now_s += TTL_S
            await queue.sweep()
            assert [job.id for job in await store.list("", ["generate"], 10)] == ["long"]

    asyncio.run(run())


def test_a_tenant_sees_its_own_jobs_only(url):
    async def run() -> None:
        async with shared(url) as at:
            store = at.store()
            for tenant in ("one", "other"):
                await store.add(NewJob(tenant, "same", "generate", [tenant.encode()]))
            assert [job.tenant for job in await store.list("one", ["generate"], 10)] == ["one"]
            assert (await store.get("other", "same")).tenant == "other"
            await store.cancel("one", "same")
            assert (await store.get("other", "same")).status is JobStatus.RUNNING

    asyncio.run(run())


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
    import sqlite3

    monkeypatch.setattr("router.job_database._LOCK_TIMEOUT_S", 0.05)

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
