"""Hand-offs in flight have a room of their own in decode's pool: neither they nor what runs can starve the other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.factories import BLOCK_SIZE, GREEDY, make_engine, make_request, prompt_of
from tests.workers.test_decode import Stage, on_stage
from workers.config import TransferConfig
from workers.errors import ConfigError, InvalidRequestError, OverloadedError
from workers.grant_room import num_grant_blocks

# A prompt of this many tokens takes 5 blocks, with the place of token 1.
PROMPT = 4 * BLOCK_SIZE + 1
ROOM, POOL = 10, 24
SMALL: dict[str, Any] = {
    "num_gpu_blocks_override": POOL,
    "max_model_len": ROOM * BLOCK_SIZE,
    "transfer": {"max_grant_blocks": ROOM},
}


def test_running_requests_grow_into_all_that_is_not_hand_offs_room():
    async def script(stage: Stage) -> None:
        # With less than their room for the second.
        grants = {f"r{i}": stage.reserve(PROMPT, f"r{i}") for i in range(2)}
        with pytest.raises(OverloadedError, match=r"hold 10 of 10 \(transfer\.max_grant_blocks\)"):
            stage.reserve(1, "one block more")
        answers = [make_request(prompt_of(8, i), replace(GREEDY, max_tokens=16), f"running {i}") for i in range(2)]
        for request in answers:
            stage.engine.add(request)
        while any(request.num_output_tokens < 12 for request in answers):
            await stage.engine.step()
        assert stage.engine.scheduler.num_preemptions == 0
        for name, (request, grant) in grants.items():
            frames = stage.frames(request, grant)
            await stage.receive(*frames, request_id=name)
            stage.commit(grant, frames)
            # What is committed runs, and is no more in that room.
            stage.reserve(1, f"after {name}")
            stage.decode.abort(f"after {name}")
        for request in (*answers, *(request for request, _ in grants.values())):
            stage.engine.abort(request.request_id)

    on_stage(script, **SMALL)


def test_a_prefix_counts_once_and_only_while_nothing_else_needs_it():
    shared = prompt_of(6 * BLOCK_SIZE)

    async def script(stage: Stage) -> None:
        def reserve(name: str, more: int) -> None:
            stage.decode.reserve(make_request([*shared, *prompt_of(BLOCK_SIZE - 1, more)], request_id=name), "d:1")

        running = make_request(shared, replace(GREEDY, max_tokens=8), "running")
        stage.engine.add(running)
        while running.num_output_tokens < 2:
            await stage.engine.step()
        for more in range(4):
            reserve(f"r{more}", more)
        assert stage.engine.scheduler.num_blocks_reserved == 4
        stage.engine.abort("running")
        assert stage.engine.scheduler.num_blocks_reserved == ROOM
        with pytest.raises(OverloadedError):
            reserve("r4", 4)
        stage.decode.abort("r0")
        reserve("r4", 4)
        stage.decode.close()
        # Nobody's any more, and known: it takes up room again from the first that finds it.
        reserve("r5", 5)
        assert stage.engine.scheduler.num_blocks_reserved == 7
        with pytest.raises(OverloadedError):
            stage.reserve(3 * BLOCK_SIZE, "of another prefix")
        stage.decode.close()

    on_stage(script, enable_prefix_caching=True, **SMALL)


def test_copies_take_up_room_and_give_way():
    async def script(stage: Stage) -> None:
        stage.decode.reserve_replica(make_request(ROOM * BLOCK_SIZE - 1, request_id="copy"), "d:1")
        stage.reserve(PROMPT, "first")
        assert set(stage.engine.requests) == {"first"}
        stage.reserve(PROMPT, "second")
        with pytest.raises(OverloadedError):
            stage.decode.reserve_replica(make_request(BLOCK_SIZE, request_id="copy"), "d:1")
        stage.decode.close()

    on_stage(script, enable_prefix_caching=True, **SMALL)


def test_what_never_fits_into_the_room_is_refused_for_good():
    async def script(stage: Stage) -> None:
        request = make_request(PROMPT, replace(GREEDY, n=7))
        with pytest.raises(
            InvalidRequestError, match=r"need 11 KV blocks.*10 \(transfer\.max_grant_blocks\)"
        ) as caught:
            stage.decode.reserve(request, "d:1")
        assert caught.value.param == "n"
        await asyncio.sleep(0)

    on_stage(script, **SMALL)


def test_a_room_that_cannot_hold_the_longest_request_is_refused_at_start_up():
    with pytest.raises(
        ConfigError, match="36 tokens, fewer than one request of max_model_len 40; raise it to 10"
    ) as caught:
        Stage(**SMALL | {"transfer": {"max_grant_blocks": ROOM - 1}})
    assert caught.value.param == "transfer.max_grant_blocks"


@pytest.mark.parametrize(
    ("pool", "max_model_len", "room"),
    # Half; the longest request with its 3 choices more; all there is.
    [(100, 160, 50), (70, 160, 43), (41, 160, 41)],
)
def test_by_default_it_is_half_of_the_pool_or_what_one_request_needs(pool, max_model_len, room):
    engine = make_engine(num_gpu_blocks_override=pool, max_model_len=max_model_len, max_num_seqs=4)
    assert num_grant_blocks(TransferConfig(), engine) == room
