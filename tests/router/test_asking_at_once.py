"""Several ask workers for room at once, as long as all of them find it."""

from __future__ import annotations

import asyncio

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import delay
from router.queue import RequestQueue
from tests.factories import make_request, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from workers.request import SamplingParams

SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
SLOW_S = 0.1


class Asked:
    """Waiters that ask, and are told when the test says so."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.queue = RequestQueue(100, self.changed)
        self.names: list[str] = []
        self._found: dict[str, asyncio.Future[bool]] = {}

    async def come(self, name: str) -> None:
        with self.queue.joined(make_request([1], request_id=name)) as waiter:
            while True:
                async with self.queue.turn(waiter):
                    self.names.append(name)
                    self._found[name] = asyncio.get_running_loop().create_future()
                    if await self._found[name]:
                        self.queue.served(waiter)
                        return
                    self.queue.refused(waiter)
                    self.changed.clear()
                    await self.changed.wait()

    async def tell(self, name: str, found: bool) -> None:
        self._found[name].set_result(found)
        await asyncio.sleep(0.001)

    async def change(self) -> None:
        self.changed.set()
        await asyncio.sleep(0.001)


def test_nobody_goes_past_the_first_that_found_no_room():
    async def main() -> None:
        asked = Asked()
        tasks = [asyncio.create_task(asked.come(name)) for name in ("first", "a", "b", "c", "d")]
        await asyncio.sleep(0.001)
        assert asked.names == ["first"]
        await asked.tell("first", True)
        assert asked.names == ["first", "a", "b"]
        await asked.tell("a", False)
        await asked.tell("b", True)
        # There would be room for others: they wait for `a`.
        assert asked.names == ["first", "a", "b"]
        await asked.change()
        assert asked.names == ["first", "a", "b", "a"]
        await asked.tell("a", True)
        assert asked.names[4:] == ["c", "d"]
        await asked.tell("c", True)
        await asked.tell("d", True)
        await asyncio.gather(*tasks)
        assert len(asked.queue) == 0

    run(main())


def test_requests_of_one_moment_do_not_wait_for_each_others_grants():
    async def main() -> None:
        async with sim_cluster(num_gpu_blocks_override=1000, max_num_seqs=64, max_num_batched_tokens=1000) as cluster:
            cluster.network.fault("Reserve", delay(SLOW_S))
            began_s = virtual_loop().time()
            answers = await asyncio.gather(*(cluster.ask(prompt_of(10), SHORT, f"r{i}") for i in range(31)))
            assert answers == [expected_tokens(prompt_of(10), SHORT)] * 31
            # 1, 2, 4, 8 and 16 at once.
            assert virtual_loop().time() - began_s < 8 * SLOW_S

    run(main())


def test_who_asks_counts_where_it_asks():
    async def main() -> None:
        async with sim_cluster(2, 2, num_gpu_blocks_override=1000, max_num_seqs=16) as cluster:
            for i in range(4):
                await cluster.ask(prompt_of(4), SHORT, f"before{i}")
            before = {name: worker.engine.num_output_tokens for name, worker in cluster.workers.items()}
            cluster.network.fault("Reserve", delay(SLOW_S))
            asking = [asyncio.create_task(cluster.ask(prompt_of(8), SHORT, f"r{i}")) for i in range(8)]
            await asyncio.sleep(SLOW_S / 2)
            # A step's worth is 16 tokens: two steps', and no prompt more, at each of two.
            assert [handle.num_asked_tokens for handle in cluster.pool.workers if handle.role == "prefill"] == [32, 32]
            await asyncio.gather(*asking)
            for name in ("d0", "d1"):
                assert cluster.workers[name].engine.num_output_tokens - before[name] == 4

    run(main())
