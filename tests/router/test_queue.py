"""Who goes next: the queue by itself, with takers that hold the turn for no time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from cluster.sim.loop import run
from router.queue import RequestQueue
from tests.factories import make_request
from workers.errors import OverloadedError


@dataclass
class Crowd:
    """Waiters that leave the queue in the order in which their names come into `served`, while `open` is set."""

    queue: RequestQueue
    open: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    served: list[str] = field(default_factory=list)

    async def come(
        self, name: str, tenant: str = "", priority: int = 0, num_tokens: int = 10, *, job: bool = False
    ) -> None:
        request = make_request([1] * num_tokens, request_id=name, tenant=tenant, priority=priority, job=job)
        with self.queue.joined(request) as waiter:
            while True:
                async with self.queue.turn(waiter):
                    if self.open.is_set():
                        self.queue.served(waiter)
                        self.served.append(name)
                        return
                    self.queue.refused(waiter)
                    self.changed.clear()
                    await self.changed.wait()

    def let_in(self) -> None:
        self.open.set()
        self.changed.set()


def crowd(max_num_queued_reqs: int = 100) -> Crowd:
    changed = asyncio.Event()
    return Crowd(RequestQueue(max_num_queued_reqs, changed), changed=changed)


async def arrive(crowd: Crowd, *comings: tuple[str, str, int, int]) -> list[asyncio.Task[None]]:
    tasks = []
    for name, tenant, priority, num_tokens in comings:
        tasks.append(asyncio.create_task(crowd.come(name, tenant, priority, num_tokens), name=name))
        await asyncio.sleep(0.001)
    return tasks


def order_of(*comings: tuple[str, str, int, int]) -> list[str]:
    async def main() -> list[str]:
        people = crowd()
        tasks = await arrive(people, *comings)
        people.let_in()
        await asyncio.gather(*tasks)
        assert len(people.queue) == 0
        return people.served

    return run(main())


def test_lower_priorities_go_first_even_before_one_that_has_the_turn():
    assert order_of(("job", "", 100, 10), ("a", "", 0, 10), ("vip", "", -1, 10), ("b", "", 0, 10)) == [
        "vip", "a", "b", "job",
    ]  # fmt: skip


def test_who_waits_with_the_turn_hears_of_a_more_urgent_one_at_once():
    async def main() -> None:
        people = crowd()
        (job,) = await arrive(people, ("job", "", 100, 10))
        # Nobody tells that there is room now.
        people.open.set()
        (same,) = await arrive(people, ("same", "", 100, 10))
        assert people.served == []
        await arrive(people, ("urgent", "", 0, 10))
        await asyncio.gather(job, same)
        assert people.served == ["urgent", "job", "same"]

    run(main())


def test_one_tenants_crowd_does_not_hold_up_another():
    comings = [(f"a{i}", "a", 0, 10) for i in range(5)] + [("b0", "b", 0, 10), ("b1", "b", 0, 10)]
    assert order_of(*comings) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]


def test_tenants_get_as_many_tokens_and_not_as_many_requests():
    comings = [(f"a{i}", "a", 0, 40) for i in range(3)] + [(f"b{i}", "b", 0, 10) for i in range(8)]
    # Of 40 tokens each, b's are four requests.
    assert order_of(*comings)[:8] == ["a0", "b0", "b1", "b2", "b3", "a1", "b4", "b5"]


def test_who_was_away_has_no_claim_to_what_it_did_not_ask_for():
    async def main() -> list[str]:
        people = crowd()
        people.let_in()
        first = await arrive(people, *((f"a{i}", "a", 0, 10) for i in range(20)))
        await asyncio.gather(*first)
        people.open.clear()
        rest = await arrive(
            people, *((f"{tenant}{i}", tenant, 0, 10) for i in range(100, 103) for tenant in ("a", "b"))
        )
        people.let_in()
        await asyncio.gather(*rest)
        return people.served[20:]

    assert run(main()) == ["a100", "b100", "a101", "b101", "a102", "b102"]


def test_who_leaves_leaves_at_once_and_the_next_has_the_turn():
    async def main() -> None:
        people = crowd()
        tasks = await arrive(people, ("a", "", 0, 10), ("b", "", 0, 10), ("c", "", 0, 10))
        for leaver in tasks[:2]:
            leaver.cancel()
            await asyncio.gather(leaver, return_exceptions=True)
        assert len(people.queue) == 1
        people.let_in()
        await tasks[2]
        assert people.served == ["c"]

    run(main())


def test_a_full_queue_refuses_who_is_no_more_urgent_and_makes_room_for_who_is():
    async def main() -> None:
        people = crowd(3)
        jobs = await arrive(people, *((f"j{i}", "", 100, 10) for i in range(3)))
        with pytest.raises(OverloadedError, match="max_num_queued_reqs"):
            await people.come("late", priority=100)
        (urgent,) = await arrive(people, ("urgent", "", 0, 10))
        with pytest.raises(OverloadedError) as caught:
            await jobs[2]
        assert caught.value.code == "queue_full"
        people.let_in()
        await asyncio.gather(urgent, *jobs[:2])
        assert people.served == ["urgent", "j0", "j1"]

    run(main())


def test_a_tenant_that_fills_the_queue_makes_room_for_others_up_to_their_share():
    async def main() -> None:
        people = crowd(4)
        crowded = await arrive(people, *((f"a{i}", "a", 0, 10) for i in range(4)))
        others = await arrive(people, *((f"b{i}", "b", 0, 10) for i in range(3)))
        people.let_in()
        results = await asyncio.gather(*crowded, *others, return_exceptions=True)
        assert people.served == ["a0", "b0", "a1", "b1"]
        assert sum(isinstance(result, OverloadedError) for result in results) == 3

    run(main())


@pytest.mark.parametrize("seed", range(20))
def test_tokens_said_to_be_before_a_request_are_those_that_go_before_it(seed):
    """Nobody comes after it; of other tenants' requests, one at most is cut in two by the end of its share."""
    rng = random.Random(seed)

    async def main() -> None:
        people = crowd()
        sizes = {f"r{i}": rng.randrange(1, 50) for i in range(30)}
        comings = [(name, rng.choice("abc"), rng.choice((0, 0, 1)), size) for name, size in sizes.items()]
        tasks = await arrive(people, *comings)
        mine = make_request([1] * 20, tenant=rng.choice("abcd"), priority=rng.choice((0, 1)))
        before = people.queue.num_tokens_before(mine)
        tasks += await arrive(people, ("mine", mine.tenant, mine.priority, mine.num_tokens))
        people.let_in()
        await asyncio.gather(*tasks)
        went = sum(sizes[name] for name in people.served[: people.served.index("mine")])
        assert abs(went - before) <= 3 * 50

    run(main())


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_comings_and_goings_serves_each_once_or_ends_it(seed):
    rng = random.Random(seed)

    async def main() -> None:
        people = crowd(8)
        tasks = []
        for i in range(200):
            coming = people.come(f"r{i}", rng.choice("abc"), rng.choice((0, 5, 100)), rng.randrange(1, 30))
            tasks.append(asyncio.create_task(coming))
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
            if rng.random() < 0.2:
                people.let_in()
            elif rng.random() < 0.2:
                people.open.clear()
        people.let_in()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results.count(None) == len(people.served) == len(set(people.served))
        assert all(isinstance(result, OverloadedError | asyncio.CancelledError) for result in results if result)
        assert len(people.queue) == 0

    run(main())
