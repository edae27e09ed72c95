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
from cluster.sim.network import Fault, SimNetwork, corrupt, delay, drop, duplicate
from tests.factories import BLOCK_SIZE, GREEDY, in_use, make_request, make_worker, prompt_of, runner_of
from tests.fake_model import HEAD_DIM, NUM_LAYERS, expected_tokens, kv_of
from tests.workers.test_decode import Stage, commit_of, frame_of, on_stage
from workers.errors import FrameError, OverloadedError, StaleGrantError
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


FAULTS: dict[str, Fault] = {"lost": drop, "twice": duplicate, "late": delay(3.0), "damaged": corrupt(-1)}


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        *((method, fault) for method in ("ReserveReplica", "Commit", "Release") for fault in ("lost", "twice", "late")),
        *(("Put", fault) for fault in FAULTS),
    ],
)
@pytest.mark.parametrize("answers", [False, True])
def test_a_copy_whose_messages_get_lost_comes_late_or_never_but_right(method, fault, answers):
    if fault == "damaged" and answers:
        return  # Empty.

    async def script(two: Two) -> None:
        two.network.fault(method, FAULTS[fault], answers=answers, skip=1, count=2)
        requests = [two.submit(length, replace(GREEDY, max_tokens=100)) for length in (10, 30)]
        await two.end_of(*requests)
        await asyncio.sleep(3.5)
        assert all(two.num_copied(request) > 15 for request in requests)

    settings = {"rpc_timeout_s": 1.0, "lease_s": 2.0}
    on_two(script, idle_within_s=4.0, transfer=settings, num_gpu_blocks_override=200, step_s=lambda batch: 0.04)


def test_a_peer_that_dies_harms_nobody_and_the_next_one_there_gets_everything():
    async def script(two: Two) -> None:
        request = two.submit(30, replace(GREEDY, max_tokens=120))
        await two.until(lambda: request.num_output_tokens > 20)
        port = int(two.peer.address.rsplit(":", 1)[1])
        two.network.kill(two.peer.address)
        await two.peer.stop()
        await two.until(lambda: request.num_output_tokens > 40)
        two.peer = make_worker(two.network.host(), incarnation="c" * 32, port=port, **two.settings)
        await two.peer.start()
        await two.end_of(request)
        await two.until(lambda: not in_use(two.worker))
        assert two.num_copied(request) > 30

    on_two(script, step_s=lambda batch: 0.05)


def copy_on(stage: Stage, num_tokens: int = 2 * BLOCK_SIZE + 1, name: str = "copy") -> tuple[Request, Any]:
    request = make_request(num_tokens, request_id=name)
    return request, stage.decode.reserve_replica(request, "d:1")


ON: dict[str, Any] = {"enable_prefix_caching": True}


def test_a_copy_is_whole_blocks_and_once_committed_nobodys():
    async def script(stage: Stage) -> None:
        request, grant = copy_on(stage)
        assert (grant.start, grant.end) == (0, 2 * BLOCK_SIZE)
        frame = frame_of(request, grant, (0, NUM_LAYERS), (0, grant.end))
        await stage.receive(frame, request_id="copy")
        message = commit_of(grant, [frame])
        message.first_token_ids.clear()
        stage.decode.commit(message)
        assert stage.engine.block_manager.num_cached == 2
        assert not stage.engine.has_work
        assert copy_on(stage)[1].start == 2 * BLOCK_SIZE
        stage.decode.close()

    on_stage(script, **ON)


@pytest.mark.parametrize("is_copy", [False, True])
def test_only_a_hand_off_is_committed_with_tokens(is_copy):
    async def script(stage: Stage) -> None:
        request, grant = copy_on(stage) if is_copy else stage.reserve()
        frame = frame_of(request, grant, (0, NUM_LAYERS), (0, grant.end))
        await stage.receive(frame, request_id=request.request_id)
        message = commit_of(grant, [frame])
        if not is_copy:
            message.first_token_ids.clear()
        with pytest.raises(FrameError, match="token 1"):
            stage.decode.commit(message)
        assert stage.engine.block_manager.num_cached == 0
        assert len(stage.failures) == (not is_copy)

    on_stage(script, **ON)


def test_a_copy_gives_way_to_a_hand_off():
    async def script(stage: Stage) -> None:
        copy, copy_grant = copy_on(stage, 24)
        request, grant = stage.reserve(24)
        with pytest.raises(StaleGrantError):
            await stage.receive(frame_of(copy, copy_grant, (0, 1), (0, 24)), request_id="copy")
        with pytest.raises(OverloadedError):
            copy_on(stage, 24)
        frames = stage.frames(request, grant)
        await stage.receive(*frames)
        stage.commit(grant, frames)
        stage.engine.abort("r")
        assert not stage.failures

    on_stage(script, num_gpu_blocks_override=8, **ON)


def test_copies_do_not_count_as_hand_offs_and_have_a_bound_of_their_own():
    async def script(stage: Stage) -> None:
        for name in ("a", "b"):
            copy_on(stage, name=name)
        with pytest.raises(OverloadedError, match="max_num_replicas"):
            copy_on(stage, name="c")
        stage.reserve()
        with pytest.raises(OverloadedError, match="1 hand-offs are under way"):
            stage.reserve(request_id="s")
        stage.decode.close()

    on_stage(script, transfer={"max_num_grants": 1, "max_num_replicas": 2}, **ON)


def test_a_copy_that_is_given_up_frees_its_blocks_by_its_lease_and_tells_no_router():
    async def script(stage: Stage) -> None:
        copy_on(stage)
        assert stage.engine.num_blocks_reserved > 0
        await asyncio.sleep(stage.decode._config.lease_s + 0.1)
        assert not stage.failures

    on_stage(script, **ON)


def test_a_copy_that_is_not_whole_is_refused():
    async def script(stage: Stage) -> None:
        request, grant = copy_on(stage)
        frame = frame_of(request, grant, (1, NUM_LAYERS), (0, grant.end))
        await stage.receive(frame, request_id="copy")
        message = commit_of(grant, [frame])
        message.first_token_ids.clear()
        with pytest.raises(FrameError, match="incomplete"):
            stage.decode.commit(message)
        assert stage.engine.block_manager.num_cached == 0

    on_stage(script, **ON)
