"""The decode half as the keeper of copies: room that gives way, whole blocks or nothing, no word to any router."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.factories import BLOCK_SIZE, make_request
from tests.fake_model import NUM_LAYERS
from tests.workers.test_decode import Stage, commit_of, frame_of, on_stage
from workers.errors import FrameError, OverloadedError, StaleGrantError
from workers.kv_transfer.base import Grant
from workers.request import Request


def copy_on(stage: Stage, num_tokens: int = 2 * BLOCK_SIZE + 1, name: str = "copy") -> tuple[Request, Grant]:
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
        assert stage.engine.scheduler.num_blocks_reserved > 0
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
