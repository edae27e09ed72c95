"""What a commit lets in: no KV that was not verified is ever shared, and none is waited for twice."""

from __future__ import annotations

import asyncio

import pytest

from tests.factories import GREEDY, run_engine
from tests.fake_model import NUM_LAYERS, expected_tokens
from tests.workers.test_decode import Stage, commit_of, frame_of, on_stage
from workers.errors import FrameError, StaleGrantError


@pytest.mark.parametrize("fault", ["a frame is missing", "too few frames", "too few bytes", "nothing came"])
def test_kv_of_a_commit_that_is_refused_never_enters_the_prefix_cache(fault):
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve(16)
        frames = stage.frames(request, grant)
        await stage.receive(*{"nothing came": [], "a frame is missing": frames[:-1]}.get(fault, frames))
        # What has come, though every byte of it is right, is not to be shared yet.
        assert stage.reserve(16, "early")[1].start == 0
        message = commit_of(grant, frames)
        message.num_frames -= fault == "too few frames"
        message.num_bytes -= fault == "too few bytes"
        with pytest.raises(FrameError):
            stage.decode.commit(message)
        stage.decode.abort("early")
        assert stage.engine.block_manager.num_cached == 0
        _, again = stage.reserve(16)
        assert again.start == 0
        await stage.receive(*(frames := stage.frames(request, again)))
        stage.commit(again, frames, expected_tokens(request.prompt_token_ids, GREEDY)[0])
        # Once committed it is, while its owner still runs.
        assert stage.reserve(16, "late")[1].start == 16
        stage.decode.abort("late")
        assert (await run_engine(stage.engine))["r"]

    on_stage(script, enable_prefix_caching=True)


def test_a_commit_that_counts_only_what_is_written_so_far_is_refused():
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve()
        whole = frame_of(request, grant, (0, NUM_LAYERS), (0, grant.end))
        writing = asyncio.create_task(stage.receive(whole))
        await asyncio.sleep(0)
        message = commit_of(grant, [whole])
        message.num_bytes = 0
        with pytest.raises(FrameError, match="incomplete"):
            stage.decode.commit(message)
        with pytest.raises(StaleGrantError):
            await writing

    on_stage(script)


def test_a_handed_over_request_that_is_preempted_is_computed_here_and_finishes():
    async def script(stage: Stage) -> None:
        requests = []
        for i in range(3):
            request, grant = stage.reserve(8, f"r{i}")
            frames = stage.frames(request, grant)
            await stage.receive(*frames, request_id=f"r{i}")
            stage.commit(grant, frames, expected_tokens(request.prompt_token_ids, GREEDY)[0])
            requests.append(request)
        # 3 blocks each, of 10; each wants a fourth.
        await run_engine(stage.engine)
        assert stage.engine.scheduler.num_preemptions > 0
        for request in requests:
            assert request.output_token_ids == expected_tokens(request.prompt_token_ids, GREEDY)
        assert stage.engine.num_prompt_tokens_computed >= 8

    on_stage(script, num_gpu_blocks_override=10, max_model_len=36)
