"""Grants end by time: each on its own, and the router hears of it."""

from __future__ import annotations

import asyncio

from protos import kv_transfer_pb2 as pb
from tests.factories import LEASE_S
from tests.workers.test_decode import ME, OTHER, Stage, on_stage
from workers.errors import DeadlineError


def test_a_lease_that_runs_out_frees_the_blocks_on_time_and_tells_the_router():
    async def script(stage: Stage) -> None:
        stage.reserve(8, "first")
        await asyncio.sleep(1)
        stage.reserve(8, "second")
        await asyncio.sleep(LEASE_S - 1.001)
        assert (stage.failures, stage.engine.scheduler.num_blocks_reserved) == ([], 6)
        await asyncio.sleep(0.002)
        assert (stage.failures, stage.engine.scheduler.num_blocks_reserved) == ([("first", DeadlineError)], 3)
        await asyncio.sleep(1)
        assert stage.failures[1:] == [("second", DeadlineError)]

    on_stage(script)


def test_a_renewed_lease_does_not_keep_others_alive():
    """The reaper must not stop at a grant that was renewed while those behind it run out."""

    async def script(stage: Stage) -> None:
        _, kept = stage.reserve(8, "kept")
        stage.reserve(8, "left")
        for _ in range(4):
            await asyncio.sleep(LEASE_S / 3)
            assert stage.decode.renew(pb.RenewRequest(incarnation=ME, grant_ids=[kept.grant_id])) == []
        assert stage.failures == [("left", DeadlineError)]
        assert stage.engine.scheduler.num_blocks_reserved == 3
        await asyncio.sleep(LEASE_S + 0.001)
        assert stage.failures[1:] == [("kept", DeadlineError)]

    on_stage(script)


def test_renewing_tells_which_grants_are_no_more():
    async def script(stage: Stage) -> None:
        _, grant = stage.reserve()
        ids = [grant.grant_id, 77]
        assert stage.decode.renew(pb.RenewRequest(incarnation=ME, grant_ids=ids)) == [77]
        assert stage.decode.renew(pb.RenewRequest(incarnation=OTHER, grant_ids=ids)) == ids
        stage.decode.abort("r")
        assert stage.decode.renew(pb.RenewRequest(incarnation=ME, grant_ids=ids)) == ids

    on_stage(script)
