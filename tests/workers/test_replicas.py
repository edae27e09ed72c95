"""Copies of growing KV at a peer: right whatever happens, and nothing but a help (transfer.resume: replicate)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from cluster.sim.loop import run
from cluster.sim.network import SimNetwork, delay
from tests.factories import BLOCK_SIZE, GREEDY, in_use, make_request, make_worker, prompt_of, runner_of
from tests.fake_model import HEAD_DIM, NUM_LAYERS, expected_tokens, kv_of
from workers.kv_transfer.base import Grant
from workers.kv_transfer.layout import DTYPE_BYTES
from workers.request import Request, SamplingParams
from workers.rpc import close_quietly
from workers.worker import Worker

LONG = replace(GREEDY, max_tokens=60)
BLOCK_BYTES = BLOCK_SIZE * 2 * NUM_LAYERS * HEAD_DIM * DTYPE_BYTES["float32"]


class Two:
    """A worker that answers, and the peer that keeps its copies."""

    def __init__(self, peer: dict[str, Any], **settings: Any) -> None:
        self.settings = {"enable_prefix_caching": True} | settings
        self.settings["transfer"] = {"resume": "replicate"} | self.settings.get("transfer", {})
        self.network = SimNetwork()
        self.host = self.network.host()
        self.worker = make_worker(self.host, incarnation="a" * 32, **self.settings)
        self.peer = make_worker(self.network.host(), incarnation="b" * 32, **self.settings | peer)

    async def start(self) -> None:
        await self.worker.start()
        await self.peer.start()
        self.listening = [asyncio.create_task(_listen(worker)) for worker in (self.worker, self.peer)]

    async def stop(self) -> None:
        for task in self.listening:
            await close_quietly(task)
        await self.worker.stop()
        await self.peer.stop()

    def submit(self, length: int = 10, params: SamplingParams = LONG, name: str = "", **fields: Any) -> Request:
        address = self.peer.address
        request = make_request(prompt_of(length), params, name or f"r{length}", replica_address=address, **fields)
        self.worker.submit(request)
        return request

    async def end_of(self, *requests: Request) -> None:
        """They are answered as by a model without a cache."""
        await self.until(lambda: all(r.finish_reason for r in requests))
        for request in requests:
            assert request.output_token_ids == expected_tokens(request.prompt_token_ids, request.params)

    async def until(self, holds: Callable[[], object], within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not holds():  # noqa: ASYNC110  What is waited for is a worker's doing.
                await asyncio.sleep(0.0005)

    def num_copied(self, request: Request) -> int:
        """Blocks of a request that the peer knows; they hold its KV."""
        tokens = request.tokens(0, request.num_tokens)
        probe = make_request(tokens, cache_salt=request.cache_salt)
        found = self.peer.engine.prefix_cache.find(probe, len(tokens))
        slots = [block * BLOCK_SIZE + i for block in found for i in range(BLOCK_SIZE)]
        assert np.array_equal(runner_of(self.peer.engine).pool[:, :, slots], kv_of(tokens[: len(slots)]))
        return len(found)


async def _listen(worker: Worker) -> None:
    """As the router that asks for everything here."""
    async for _ in worker.outputs.stream(""):
        pass


def on_two(
    script: Callable[[Two], Awaitable[Any]],
    peer: dict[str, Any] | None = None,
    idle_within_s: float = 0.5,
    **settings: Any,
) -> None:
    """Run `script`; afterwards all blocks of both must be free again."""

    async def main() -> None:
        two = Two(peer or {}, **settings)
        await two.start()
        await script(two)
        await two.until(lambda: not in_use(two.worker) and not in_use(two.peer), idle_within_s)
        await two.stop()

    run(main())


def test_every_block_that_an_answer_fills_is_copied_once():
    async def script(two: Two) -> None:
        request = two.submit(30)
        await two.until(lambda: request.num_output_tokens >= 40)
        # One block is under way.
        assert two.num_copied(request) >= (30 + 40) // BLOCK_SIZE - 1
        await two.end_of(request)
        await two.until(lambda: not in_use(two.worker))
        assert (num_copied := two.num_copied(request)) >= (30 + 60) // BLOCK_SIZE - 1
        sent, received = two.worker.stats(), two.peer.stats()
        assert sent.kv_bytes_replicated == received.kv_bytes_received == num_copied * BLOCK_BYTES
        assert received.blocks_cached == num_copied

    on_two(script)


def test_by_default_nothing_is_copied():
    async def script(two: Two) -> None:
        hook = two.network.fault("ReserveReplica", delay(0.0))
        await two.end_of(two.submit(30))
        assert hook.num_seen == two.peer.stats().kv_bytes_received == 0

    on_two(script, transfer={"resume": "recompute"})


def test_what_the_peer_knows_already_is_not_sent():
    async def script(two: Two) -> None:
        first = two.submit(30)
        await two.end_of(first)
        await asyncio.sleep(0.1)
        bytes_before, num_before = two.worker.stats().kv_bytes_replicated, two.num_copied(first)
        again = two.submit(30, name="again")
        await two.end_of(again)
        await asyncio.sleep(0.1)
        new = two.num_copied(again) - num_before
        assert 0 <= new <= 1
        assert two.worker.stats().kv_bytes_replicated - bytes_before == new * BLOCK_BYTES

    on_two(script)


@pytest.mark.parametrize("end_of_it", ["abort", "finish"])
def test_a_copy_of_a_request_that_ends_meanwhile_holds_its_own_kv(end_of_it):
    """Reading takes long, and whoever comes next wants the blocks at once."""

    async def script(two: Two) -> None:
        for i in range(12):
            victim = two.submit(21 + i, replace(GREEDY, max_tokens=6 + i), f"victim{i}")
            await two.until(partial(_has_tokens, victim, 2))
            await asyncio.sleep(0.002 * i)
            if end_of_it == "abort":
                two.worker.abort(victim.request_id)
            else:
                await two.end_of(victim)
            # Takes every block that can be taken.
            other = make_request(prompt_of(100, seed=i), replace(GREEDY, max_tokens=8), f"other{i}")
            two.worker.submit(other)
            await two.end_of(other)
            await two.until(lambda: not in_use(two.worker))
            num_copied.append(two.num_copied(victim))

    num_copied: list[int] = []
    on_two(script, num_gpu_blocks_override=32, copy_s=lambda num_slots: 0.02, peer={"num_gpu_blocks_override": 400})
    assert max(num_copied) > 3


def test_a_request_is_preempted_while_it_is_copied(monkeypatch):
    were_copied = []

    async def script(two: Two) -> None:
        scheduler = two.worker.engine.scheduler
        preempt = scheduler._preempt

        def watched(victim: Request) -> None:
            were_copied.append(two.worker._replicas._replicas[victim].copying is not None)
            preempt(victim)

        def begun(copy: Request) -> None:
            assert two.worker.engine.block_manager.can_allocate(len(scheduler.running)), "its blocks may be missed"
            hold(copy)

        hold = two.worker.engine.hold
        monkeypatch.setattr(two.worker.engine, "hold", begun)
        monkeypatch.setattr(scheduler, "_preempt", watched)
        requests = [two.submit(20 + i, replace(GREEDY, max_tokens=50)) for i in range(5)]
        await two.end_of(*requests)
        await two.until(lambda: not in_use(two.worker))
        assert all(two.num_copied(request) > 3 for request in requests)

    on_two(script, num_gpu_blocks_override=40, copy_s=lambda num_slots: 0.03, peer={"num_gpu_blocks_override": 400})
    assert any(were_copied)


def test_a_peer_without_room_refuses_and_is_asked_again_later():
    async def script(two: Two) -> None:
        full = make_request(prompt_of(100, seed=1), replace(GREEDY, max_tokens=55), "full")
        two.peer.submit(full)
        await two.until(lambda: full.num_output_tokens)
        request = two.submit(10, replace(GREEDY, max_tokens=140))
        await two.until(lambda: full.num_output_tokens >= 50)
        assert two.num_copied(request) <= 1
        assert 1 <= two.worker.stats().num_replicas_refused <= 3
        await two.until(lambda: two.num_copied(request) > 20)
        await two.end_of(full)
        await two.end_of(request)

    on_two(script, num_gpu_blocks_override=39, max_model_len=160, step_s=lambda batch: 0.02)


def test_copies_are_few_at_once_and_everybody_gets_a_turn():
    async def script(two: Two) -> None:
        hook = two.network.fault("ReserveReplica", delay(0.05))
        requests = [two.submit(10 + i, replace(GREEDY, max_tokens=100)) for i in range(6)]
        while not all(r.finish_reason for r in requests):
            assert len(two.peer.decode._replicas) <= 2
            assert sum(bool(r.copying) for r in two.worker._replicas._replicas.values()) <= 2
            await asyncio.sleep(0.001)
        assert hook.num_seen > 10
        assert all(two.num_copied(request) > 5 for request in requests)
        await two.end_of(*requests)

    on_two(script, transfer={"max_num_replicas": 2}, num_gpu_blocks_override=400)


def test_a_long_prompt_is_copied_piece_by_piece_and_again_so_when_the_peer_lost_it(monkeypatch):
    monkeypatch.setattr("workers.replicas._MAX_TOKENS", 3 * BLOCK_SIZE)
    wanted: list[int] = []

    async def script(two: Two) -> None:
        reserve = two.peer.reserve_replica

        def watched(request: Request) -> Grant:
            grant = reserve(request)
            wanted.append(grant.end - grant.start)
            return grant

        monkeypatch.setattr(two.peer, "reserve_replica", watched)
        request = two.submit(100, replace(GREEDY, max_tokens=55))
        await two.until(lambda: two.num_copied(request) >= 100 // BLOCK_SIZE)
        assert all(num_tokens <= 3 * BLOCK_SIZE for num_tokens in wanted)
        evict_all(two)
        await two.end_of(request)
        assert two.num_copied(request) >= 100 // BLOCK_SIZE
        assert two.worker.stats().num_replicas_refused == 1
        # It heard of the loss once, and began anew.
        assert sum(num_tokens > 3 * BLOCK_SIZE for num_tokens in wanted) == 1

    on_two(script, step_s=lambda batch: 0.05)


def _has_tokens(request: Request, count: int) -> bool:
    return request.num_output_tokens >= count


def evict_all(two: Two) -> None:
    blocks = two.peer.engine.block_manager
    blocks.free(blocks.allocate(blocks.num_free + blocks.num_cached))


def test_salts_keep_copies_apart():
    async def script(two: Two) -> None:
        one = two.submit(30, name="one", cache_salt="one")
        await two.end_of(one)
        await asyncio.sleep(0.1)
        assert two.num_copied(one) > 10
        other = make_request(prompt_of(30), LONG, "other", cache_salt="other")
        assert two.num_copied(other) == two.num_copied(make_request(prompt_of(30), LONG)) == 0

    on_two(script)
