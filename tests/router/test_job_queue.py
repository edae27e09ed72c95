"""Prompts shared by routers, on both databases: claimed by lease, answered once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from router.jobs.queue import JobQueue
from router.jobs.records import Claim, JobStatus, NewJob, Used
from tests.router.shared_jobs import LEASE_S, TTL_S, answer_of, job_of, shared
from workers.timeline import Timeline


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


def test_of_a_cancel_and_the_last_answers_at_once_one_ends_the_job_and_nothing_is_left_over(url):
    async def run() -> None:
        async with shared(url) as at:
            queues, store, rng = [at.queue("a"), at.queue("b")], at.store(), random.Random(1)
            canceller = at.store()
            ends: Counter[JobStatus] = Counter()
            for number in range(30):
                name = f"job {number}"
                await store.add(job_of(4, name))
                claims = [claim for queue in queues for claim in await queue.claim(2)]
                assert len(claims) == 4

                async def answer(claim: Claim) -> bool:
                    await asyncio.sleep(rng.random() * 0.01)
                    return await rng.choice(queues).answer(claim, answer_of(claim, "x"))

                async def cancel(name: str = name) -> bool:
                    await asyncio.sleep(rng.random() * 0.03)
                    return (await canceller.cancel("", name)).status is JobStatus.CANCELLED

                was_cancelled, *kept = await asyncio.gather(cancel(), *map(answer, claims))
                job, answers = await store.answers("", name, 0, 10)
                ends[job.status] += 1
                assert job.status is (JobStatus.CANCELLED if was_cancelled else JobStatus.COMPLETED)
                assert was_cancelled or all(kept)
                assert sum(kept) == job.num_answered == len(answers) == len({one.index for one in answers})
                assert await queues[0].claim(9) == []
            assert min(ends[JobStatus.CANCELLED], ends[JobStatus.COMPLETED]) > 2

    asyncio.run(run())
