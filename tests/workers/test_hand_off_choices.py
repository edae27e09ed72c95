"""The hand-off of several choices: one grant, token 1 of each that is still wanted, and room for every one of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.factories import BLOCK_SIZE, GREEDY, SEEDED, by_choice, make_request, prompt_of, run_engine
from tests.fake_model import expected_choices
from tests.workers.pair import Pair, copy_of, on_pair
from tests.workers.test_decode import Stage, commit_of, on_stage
from workers.errors import FrameError, InvalidRequestError, OverloadedError, StaleGrantError

THREE = replace(SEEDED, n=3)
LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 37]


async def arrived(stage: Stage, length: int, first_token_ids: dict[int, int]) -> None:
    """A request of three choices whose KV is all here, committed with these."""
    request = make_request(length, THREE)
    grant = stage.decode.reserve(request, "d:1")
    assert (grant.start, grant.end) == (0, length)
    assert stage.engine.scheduler.num_blocks_reserved == len(request.block_table) == length // BLOCK_SIZE + 3
    frames = stage.frames(request, grant)
    await stage.receive(*frames)
    message = commit_of(grant, frames)
    message.first_token_ids.clear()
    message.first_token_ids.update(first_token_ids)
    stage.decode.commit(message)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("running", [(0, 1, 2), (0, 2), (1,)])
def test_choices_whose_kv_came_by_frames_are_answered_as_if_computed_here(length, running):
    async def script(stage: Stage) -> None:
        whole = expected_choices(prompt_of(length), THREE)
        await arrived(stage, length, {choice: whole[choice][0] for choice in running})
        # What the ended choices had is free at once.
        assert len(stage.engine.blocks_in_use()) == length // BLOCK_SIZE + len(running)
        stage.engine.check_integrity()
        outputs = (await run_engine(stage.engine))["r"]
        found = by_choice(replace(output, index=output.index - 1) for output in outputs)
        assert found == {choice: whole[choice][1:] for choice in running}
        assert stage.engine.num_prompt_tokens_computed == 0

    on_stage(script)


@pytest.mark.parametrize("first_token_ids", [{}, {3: 5}, {0: 5, -1: 5}])
def test_a_commit_of_choices_that_nobody_asked_for_or_of_none_ends_the_hand_off(first_token_ids):
    async def script(stage: Stage) -> None:
        with pytest.raises(FrameError, match="token 1 of request r"):
            await arrived(stage, 10, first_token_ids)
        assert stage.failures == [("r", FrameError)]
        with pytest.raises(StaleGrantError):
            stage.decode.commit(commit_of(replace(stage.reserve(10, "s")[1], grant_id=1), []))
        stage.decode.abort("s")

    on_stage(script)


def test_a_choice_that_goes_on_alone_is_committed_by_its_index():
    async def script(stage: Stage) -> None:
        request = make_request(10, SEEDED, choice=2)
        grant = stage.decode.reserve(request, "d:1")
        frames = stage.frames(request, grant)
        await stage.receive(*frames)
        with pytest.raises(FrameError, match=r"choices \[0\]; it has \[2\]"):
            stage.commit(grant, frames)

    on_stage(script)


@pytest.mark.parametrize("num_steps", range(4))
@pytest.mark.parametrize("length", [8, 10])
def test_an_abort_after_the_commit_ends_every_choice(length, num_steps):
    async def script(stage: Stage) -> None:
        await arrived(stage, length, dict.fromkeys(range(3), 5))
        for _ in range(num_steps):
            await stage.engine.step()
        step = asyncio.create_task(stage.engine.step())
        await asyncio.sleep(0.001)
        assert stage.engine.abort("r")
        assert await step == []

    on_stage(script)


def test_room_is_taken_for_every_choice_or_not_at_all():
    async def script(stage: Stage) -> None:
        with pytest.raises(InvalidRequestError):
            stage.decode.reserve(make_request(16, replace(THREE, n=5)), "d:1")
        stage.decode.reserve(make_request(3, GREEDY, "other"), "d:1")
        with pytest.raises(OverloadedError):
            stage.decode.reserve(make_request(16, replace(THREE, n=4)), "d:1")
        assert stage.engine.scheduler.num_blocks_reserved == 1
        stage.decode.abort("other")
        stage.decode.reserve(make_request(16, replace(THREE, n=4)), "d:1")
        assert stage.engine.scheduler.num_blocks_reserved == 8
        stage.decode.abort("r")

    on_stage(script, num_gpu_blocks_override=8, max_model_len=32)


def test_token_1_of_every_choice_comes_back_at_once_and_the_rest_from_decode():
    async def script(pair: Pair) -> None:
        request, whole = make_request(20, THREE), expected_choices(prompt_of(20), THREE)
        first = await pair.prefill.prefill(copy_of(request), pair.reserve(request))
        assert [(o.choice, *o.token_ids) for o in first] == [(choice, tokens[0]) for choice, tokens in whole.items()]
        await pair.until(lambda: sum(o.finish_reason is not None for o in pair.outputs.get("r", ())) == 3)
        assert by_choice([*first, *pair.outputs["r"]]) == whole
        assert pair.decode.engine.num_prompt_tokens_computed == 0

    on_pair(script)


def test_several_choices_of_an_answer_that_has_begun_are_refused():
    async def script(pair: Pair) -> None:
        with pytest.raises(InvalidRequestError, match="1 of an answer that has begun") as caught:
            pair.decode.submit(make_request(5, THREE, output_token_ids=[1]))
        assert caught.value.param == "n"

    on_pair(script)
