"""Requests go where their KV is, as far as workers have told; answers are the same wherever they go."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.sim.executor import SimExecutor
from cluster.sim.loop import run
from cluster.sim.network import drop
from router.config import RouterConfig
from router.policy import POLICIES
from router.pool import WorkerPool
from router.router import Router
from tests.factories import BLOCK_SIZE, GREEDY, SEEDED, SimCluster, make_config, prompt_of, sim_cluster
from tests.fake_model import HashRunner, expected_tokens
from workers.rpc import GrpcNetwork
from workers.worker import Worker

ON: dict[str, Any] = {"enable_prefix_caching": True, "num_gpu_blocks_override": 200}
# Longer than a batch of KV events and its way.
TOLD_S = 0.1
PREFIXES = [prompt_of(8 * BLOCK_SIZE, seed=seed) for seed in range(4)]


def turn(conversation: int, number: int) -> list[int]:
    """The prompt of a conversation's turn: all of the last one's, and more."""
    return PREFIXES[conversation] + prompt_of(60, seed=conversation)[: 6 * number + 1]


def indexed(cluster: SimCluster, name: str) -> set[bytes]:
    """What the router believes that a worker has."""
    index = cluster.pool.index
    bit = index._bits.get(cluster.workers[name].incarnation, 0)
    return {block_hash for block_hash, holders in index._holders.items() if holders & bit}


def require_true(cluster: SimCluster) -> None:
    for name, worker in cluster.alive().items():
        assert indexed(cluster, name) == set(worker.engine.block_manager.known_hashes), name


def num_computed(cluster: SimCluster) -> int:
    return sum(worker.engine.num_prompt_tokens_computed for worker in cluster.workers.values())


async def converse(cluster: SimCluster, num_turns: int = 4) -> None:
    for number in range(num_turns):
        answers = await asyncio.gather(
            *(cluster.ask(turn(i, number), GREEDY, f"r{i}.{number}") for i in range(len(PREFIXES)))
        )
        assert answers == [expected_tokens(turn(i, number), GREEDY) for i in range(len(PREFIXES))]
        await asyncio.sleep(TOLD_S)


@pytest.mark.parametrize("places", [(3, 2, 0), (0, 0, 3)], ids=["3P2D", "colocated"])
def test_a_conversation_is_computed_where_it_was_before(places):
    async def tokens_computed(policy: str) -> int:
        async with sim_cluster(*places, router={"policy": policy}, **ON) as cluster:
            await converse(cluster)
            require_true(cluster)
            return num_computed(cluster)

    # The first turn, the new tokens of those that follow, and the block with each one's last token.
    least = len(PREFIXES) * (len(turn(0, 3)) + 3 * BLOCK_SIZE)
    assert run(tokens_computed("prefix_aware")) <= least
    assert run(tokens_computed("round_robin")) > 1.5 * least


@pytest.mark.parametrize("policy", [*POLICIES, "tests.router.test_policy:most_cached"])
@pytest.mark.parametrize("places", [(2, 2, 0), (0, 0, 2)], ids=["2P2D", "colocated"])
def test_answers_are_the_same_whatever_the_policy(policy, places):
    async def main() -> None:
        # Room for little: workers refuse, evict and preempt.
        settings = {**ON, "num_gpu_blocks_override": 48}
        async with sim_cluster(*places, router={"policy": policy, "max_interference": 3.0}, **settings) as cluster:
            params = [replace(params, max_tokens=20) for params in (GREEDY, SEEDED)]
            asked = [(turn(i % 4, i // 4), params[i % 2]) for i in range(16)]
            answers = await asyncio.gather(
                *(cluster.ask(prompt, chosen, f"r{i}") for i, (prompt, chosen) in enumerate(asked))
            )
            assert answers == [expected_tokens(prompt, chosen) for prompt, chosen in asked]

    run(main())


def test_two_runs_of_power_of_two_are_one():
    async def placed() -> list[int]:
        async with sim_cluster(3, 2, router={"policy": "power_of_two"}, **ON) as cluster:
            await converse(cluster)
            return [worker.engine.num_prompt_tokens_computed for worker in cluster.workers.values()]

    assert run(placed()) == run(placed())


def test_salts_are_told_apart():
    async def main() -> None:
        async with sim_cluster(2, 1, **ON) as cluster:
            for salt in ("a", "b"):
                outputs = [o async for o in cluster.router.generate(PREFIXES[0], GREEDY, salt, cache_salt=salt)]
                assert outputs[-1].finish_reason
                await asyncio.sleep(TOLD_S)
            # The second had its turn on the other worker, instead of following what it may not share.
            computed = [cluster.workers[name].engine.num_prompt_tokens_computed for name in ("p0", "p1")]
            assert computed == [len(PREFIXES[0])] * 2

    run(main())


@pytest.mark.parametrize("skip", [0, 3, 4, 5])
def test_who_missed_an_event_gets_all_of_them_anew(skip):
    async def main() -> None:
        async with sim_cluster(2, 1, **ON) as cluster:
            # The first three are what there is at first: nothing.
            cluster.network.fault("StreamKVEvents", drop, answers=True, skip=skip, count=1)
            await converse(cluster)
            # The next message tells that one is missing.
            await asyncio.sleep(1.0)
            require_true(cluster)

    run(main())


def test_the_index_follows_evictions():
    async def main() -> None:
        async with sim_cluster(2, 2, enable_prefix_caching=True, num_gpu_blocks_override=40) as cluster:
            for seed in range(12):
                await cluster.ask(prompt_of(60, seed=100 + seed), GREEDY, f"r{seed}")
            await asyncio.sleep(TOLD_S)
            assert sum(len(indexed(cluster, name)) for name in cluster.workers) <= 4 * 40
            require_true(cluster)

    run(main())


def test_what_a_dead_incarnation_had_is_forgotten_at_once_and_its_successor_starts_with_nothing():
    async def main() -> None:
        async with sim_cluster(2, 1, router={"max_attempts": 10}, **ON) as cluster:
            await converse(cluster)
            died = cluster.workers["p0"]
            assert indexed(cluster, "p0")
            await cluster.kill("p0")
            await asyncio.sleep(0.01)
            assert died.incarnation not in cluster.pool.index._bits
            await cluster.replace("p0")
            await asyncio.sleep(1.5)
            assert indexed(cluster, "p0") == set()
            await converse(cluster)
            require_true(cluster)

    run(main())


def test_the_index_is_bounded_by_its_setting():
    async def main() -> None:
        async with sim_cluster(2, 1, router={"prefix_index_blocks": 10}, **ON) as cluster:
            await converse(cluster)
            assert cluster.pool.num_indexed_blocks == 10

    run(main())


def test_workers_that_cache_nothing_are_not_asked():
    async def main() -> None:
        async with sim_cluster(2, 1, enable_prefix_caching=False) as cluster:
            asked = cluster.network.fault("StreamKVEvents", drop)
            await converse(cluster, num_turns=2)
            assert asked.num_seen == cluster.pool.num_indexed_blocks == 0

    run(main())


def test_events_come_by_grpc_and_end_with_their_worker():
    async def main() -> None:
        config = RouterConfig(heartbeat_s=0.1)
        worker = Worker(make_config(**ON), make_executor=lambda config: SimExecutor(HashRunner(config)))
        pool = WorkerPool([await worker.start()], "router-1", config, GrpcNetwork())
        await pool.start()
        router = Router(pool, config, "router-1")
        outputs = [output async for output in router.generate(PREFIXES[0], GREEDY, "r")]
        assert outputs[-1].finish_reason
        async with asyncio.timeout(5.0):
            # 8 blocks of the prompt, and one of the answer.
            while pool.num_indexed_blocks != 9:  # noqa: ASYNC110  Another side's doing.
                await asyncio.sleep(0.01)
            await worker.stop()
            while pool.num_indexed_blocks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await router.stop()
        await pool.stop()

    asyncio.run(main())
