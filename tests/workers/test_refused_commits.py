"""Commits that say something else than what came."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from protos import kv_transfer_pb2 as pb
from tests.workers.test_decode import OTHER, Stage, commit_of, on_stage
from workers.errors import FrameError, StaleGrantError


def test_a_commit_without_every_byte_is_refused_frees_the_blocks_and_tells_the_router():
    async def script(stage: Stage) -> None:
        for missing in range(6):
            request, grant = stage.reserve()
            frames = stage.frames(request, grant)
            await stage.receive(*(f for i, f in enumerate(frames) if i != missing))
            with pytest.raises(FrameError, match="incomplete"):
                stage.commit(grant, frames)
            stage.require_idle()
            assert stage.failures.pop() == ("r", FrameError)
            with pytest.raises(StaleGrantError):
                await stage.receive(frames[missing])
            with pytest.raises(StaleGrantError):
                stage.commit(grant, frames)

    on_stage(script)


@pytest.mark.parametrize("claim", [{"num_frames": 5}, {"num_bytes": 1}, {"num_frames": 7}])
def test_a_commit_that_names_other_sums_is_refused(claim):
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve()
        frames = stage.frames(request, grant)
        await stage.receive(*frames)
        message = commit_of(grant, frames)
        message.MergeFrom(pb.CommitRequest(**claim))
        with pytest.raises(FrameError):
            stage.decode.commit(message)

    on_stage(script)


def test_a_commit_for_another_incarnation_is_refused_and_harms_nothing():
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve()
        frames = stage.frames(request, grant)
        await stage.receive(*frames)
        with pytest.raises(StaleGrantError):
            stage.commit(replace(grant, incarnation=OTHER), frames)
        stage.commit(grant, frames)
        stage.engine.abort("r")

    on_stage(script)


def test_a_commit_while_a_frame_is_still_being_written_is_refused():
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve()
        frames = stage.frames(request, grant)
        writing = asyncio.create_task(stage.receive(*frames))
        await asyncio.sleep(0)
        with pytest.raises(FrameError, match="incomplete"):
            stage.commit(grant, frames)
        with pytest.raises(StaleGrantError):
            await writing
        await asyncio.sleep(1)

    on_stage(script)
