"""Writes that go on when their hand-off has ended, or their sender."""

from __future__ import annotations

import asyncio

import pytest

from cluster.sim.loop import virtual_loop
from protos import kv_transfer_pb2 as pb
from tests.factories import GREEDY, LEASE_S, make_request, run_engine
from tests.fake_model import expected_tokens
from tests.workers.test_decode import ME, Stage, on_stage
from workers.errors import StaleGrantError
from workers.kv_transfer.base import Grant


def seconds() -> float:
    return virtual_loop().time()


async def _abort(stage: Stage, grant: Grant) -> None:
    stage.decode.abort("r")


async def _release(stage: Stage, grant: Grant) -> None:
    stage.decode.release(pb.ReleaseRequest(grant_id=grant.grant_id, incarnation=ME))


async def _give_up(stage: Stage, grant: Grant) -> None:
    stage.decode.release(pb.ReleaseRequest(grant_id=grant.grant_id, incarnation=ME, reason="it broke"))


async def _expire(stage: Stage, grant: Grant) -> None:
    await asyncio.sleep(LEASE_S)


async def _close(stage: Stage, grant: Grant) -> None:
    stage.decode.close()


@pytest.mark.parametrize("end", [_abort, _release, _give_up, _expire, _close])
def test_blocks_under_a_write_are_quarantined_until_it_is_over_and_its_late_bytes_harm_nobody(end):
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve(8)
        frames = stage.frames(request, grant)
        slow = LEASE_S + 5
        stage.engine.executor._copy_s = lambda num_slots: slow  # type: ignore[attr-defined]
        began = seconds()
        writing = asyncio.create_task(stage.receive(frames[0]))
        await asyncio.sleep(0.1)
        await end(stage, grant)
        assert sum(len(request.block_table) for request in stage.decode.quarantined) == 3
        assert stage.engine.block_manager.num_free == stage.engine.block_manager.num_blocks - 3
        stage.engine.check_integrity()
        # Who comes next gets other blocks, and right KV.
        next_request = make_request(20, request_id="next")
        stage.engine.add(next_request)
        await run_engine(stage.engine)
        assert next_request.output_token_ids == expected_tokens(next_request.prompt_token_ids, GREEDY)
        with pytest.raises(StaleGrantError):
            await writing
        assert seconds() == pytest.approx(began + slow)
        stage.require_idle()

    on_stage(script)


def test_a_sender_that_goes_away_during_a_write_changes_nothing_about_the_write():
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve(8)
        frames = stage.frames(request, grant)
        writing = asyncio.create_task(stage.receive(frames[0]))
        await asyncio.sleep(0.0001)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await stage.receive(*frames)
        await asyncio.sleep(0.1)
        whole = expected_tokens(request.prompt_token_ids, GREEDY)
        stage.commit(grant, frames, whole[0])
        await run_engine(stage.engine)
        assert request.output_token_ids == whole

    on_stage(script)


def test_a_frame_sent_again_is_acknowledged_once_it_is_written_and_no_sooner():
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve(8)
        frames = stage.frames(request, grant)
        stage.engine.executor._copy_s = lambda num_slots: 1.0  # type: ignore[attr-defined]
        began = seconds()
        first = asyncio.create_task(stage.receive(frames[0]))
        await asyncio.sleep(0.1)
        await stage.receive(frames[0])
        assert seconds() == pytest.approx(began + 1.0)
        await first
        assert stage.decode.num_frames_received == 1
        stage.decode.close()

    on_stage(script)
