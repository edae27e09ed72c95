"""What a worker tells of its hand-offs adds up: what was started has ended in one way, or is still open."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.sim.loop import run
from protos import kv_transfer_pb2 as pb
from tests.factories import GREEDY, LEASE_S, prompt_of, sim_cluster
from tests.workers.kv_transfer.unsent import encode
from tests.workers.test_decode import ME, Stage, on_stage
from workers.decode import Decode
from workers.errors import FrameError, OverloadedError
from workers.kv_transfer.frame import Buffer
from workers.kv_transfer.kv_rows import KVRows


def num_ended(decode: Decode) -> int:
    counts = decode.counts
    return counts.num_committed + counts.num_released + counts.num_failed.total()


def test_every_way_in_which_a_hand_off_ends_is_counted_once():
    async def script(stage: Stage) -> None:
        decode, counts = stage.decode, stage.decode.counts
        request, grant = stage.reserve(request_id="commits")
        frames = stage.frames(request, grant)
        await stage.receive(*frames, request_id="commits")
        stage.commit(grant, frames)
        _, grant = stage.reserve(request_id="is given back")
        decode.release(pb.ReleaseRequest(grant_id=grant.grant_id, incarnation=ME))
        _, grant = stage.reserve(request_id="is given up")
        decode.release(pb.ReleaseRequest(grant_id=grant.grant_id, incarnation=ME, reason="no way"))
        stage.reserve(request_id="is aborted")
        decode.abort("is aborted")
        _, grant = stage.reserve(request_id="is short")
        with pytest.raises(FrameError):
            stage.commit(grant, [])
        stage.reserve(request_id="expires")
        await asyncio.sleep(LEASE_S + 1)
        assert (counts.num_started, decode.num_grants, num_ended(decode)) == (6, 0, 6)
        assert (counts.num_committed, counts.num_released, counts.num_expired) == (1, 1, 1)
        assert counts.num_failed == {"FrameError": 2, "AbortedError": 1, "DeadlineError": 1}
        stage.reserve(request_id="is open")
        assert (counts.num_started, decode.num_grants, num_ended(decode)) == (7, 1, 6)
        decode.abort("is open")
        stage.engine.abort("commits")

    on_stage(script)


def test_a_reservation_without_room_is_refused_and_no_hand_off():
    async def script(stage: Stage) -> None:
        stage.reserve(num_tokens=100, request_id="large")
        for _ in range(2):
            with pytest.raises(OverloadedError):
                stage.reserve(num_tokens=158, request_id="too large beside it")
        assert (stage.decode.counts.num_refused, stage.decode.counts.num_started) == (2, 1)
        stage.decode.abort("large")

    on_stage(script)


def test_a_damaged_frame_is_counted_by_its_error():
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve()
        damaged = bytearray(encode(stage.frames(request, grant)[0], "r"))
        damaged[-1] ^= 1
        with pytest.raises(FrameError):
            await stage.decode.receive(bytes(damaged))
        stage.decode.abort("r")
        assert stage.decode.counts.num_frames_refused == {"FrameError": 1}

    on_stage(script)


def test_what_both_sides_tell_agrees():
    async def main() -> None:
        async with sim_cluster() as cluster:
            for i in range(3):
                await cluster.ask(prompt_of(20, i), request_id=f"r{i}")
            # Token 1 is all of it: nothing is handed over.
            await cluster.ask(prompt_of(20, 9), replace(GREEDY, max_tokens=1), "short")
            await cluster.until_idle(0.5)
            sender, taker = cluster.workers["p0"].stats(), cluster.workers["d0"].stats()
            assert (taker.num_hand_offs_started, taker.num_grants) == (4, 0)
            assert (taker.num_hand_offs_committed, taker.num_hand_offs_released) == (3, 1)
            assert (sum(sender.transfer_s.counts), sum(taker.transfer_s.counts)) == (3, 0)
            assert sender.transfer_s.sum >= sender.transfer_unhidden_s.sum > 0
            assert not sender.send_failures
            assert not taker.receive_failures

    run(main())


def test_a_hand_off_whose_kv_is_refused_is_a_failure_on_both_sides_and_a_retry():
    async def main() -> None:
        async with sim_cluster() as cluster:
            decode = cluster.workers["d0"].decode
            receive = decode._receive

            async def refuse_once(data: Buffer, elsewhere: KVRows | None) -> None:
                decode._receive = receive  # type: ignore[method-assign]
                raise FrameError("damaged on its way")

            decode._receive = refuse_once  # type: ignore[method-assign]
            await cluster.ask(prompt_of(20))
            sender, taker = cluster.workers["p0"].stats(), cluster.workers["d0"].stats()
            assert sender.send_failures == taker.receive_failures == taker.hand_offs_failed == {"FrameError": 1}
            assert cluster.router.num_retries == {"FrameError": 1}
            assert (taker.num_hand_offs_started, taker.num_hand_offs_committed) == (2, 1)

    run(main())
