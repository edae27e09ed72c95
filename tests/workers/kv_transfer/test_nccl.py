"""Groups of torch.distributed between two workers, over real sockets: Gloo here, by the module that NCCL runs in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.workers.kv_transfer.groups import (
    RECEIVER,
    SENDER,
    TIMEOUT_S,
    Stage,
    frame,
    no_thread_left,
    num_sockets,
    on_stage,
    until,
)
from tests.workers.kv_transfer.unsent import send_frame
from workers.errors import DeadlineError, FrameError, StaleGrantError, UnavailableError
from workers.kv_transfer.pair_group import PairGroup
from workers.rpc import call


def test_frames_of_any_size_arrive_over_one_group():
    async def script(stage: Stage) -> None:
        payloads = {i: bytes([i]) * size for i, size in enumerate((16, 1 << 20, 48, 5 << 20, 1 << 20))}
        for number, payload in payloads.items():
            await send_frame(stage.sender, frame(number, payload), "r", TIMEOUT_S)
        assert stage.receiver.received == payloads
        assert stage.pairs == [f"{SENDER}/{RECEIVER}/0"]

    on_stage(script)


def test_announcements_may_come_in_any_order():
    async def script(stage: Stage) -> None:
        outgoing = await stage.outgoing()
        put, waiting = outgoing._put, 12

        async def late(announcement: bytes, timeout: float) -> bytes:
            nonlocal waiting
            waiting -= 1
            # Each passes those announced before it.
            await asyncio.sleep(0.02 * waiting)
            answer: bytes = await put(announcement, timeout=timeout)
            return answer

        outgoing._put = late
        payloads = {i: bytes([i]) * 10_000 for i in range(12)}
        await asyncio.gather(*(send_frame(stage.sender, frame(i, p), "r", TIMEOUT_S) for i, p in payloads.items()))
        assert {number: stage.receiver.received[number] for number in payloads} == payloads

    on_stage(script)


def test_a_damaged_or_foreign_frame_is_refused_and_the_next_one_is_not(monkeypatch):
    async def script(stage: Stage) -> None:
        with pytest.raises(FrameError, match="checksum"):
            await send_frame(stage.sender, frame(), "another request", TIMEOUT_S)
        with pytest.raises(StaleGrantError, match="no more"):
            await send_frame(stage.sender, frame(99), "r", TIMEOUT_S)
        with monkeypatch.context() as patched:
            send = PairGroup.send

            def damaged(group: PairGroup, packed: bytearray, timeout_s: float) -> Any:
                packed[-1] ^= 1
                return send(group, packed, timeout_s)

            patched.setattr(PairGroup, "send", damaged)
            with pytest.raises(FrameError, match="checksum"):
                await send_frame(stage.sender, frame(), "r", TIMEOUT_S)
        assert stage.receiver.received == {}
        await send_frame(stage.sender, frame(), "r", TIMEOUT_S)
        assert stage.pairs == [f"{SENDER}/{RECEIVER}/0"]

    on_stage(script)


def test_a_cancelled_send_does_not_stop_those_behind_it():
    async def script(stage: Stage) -> None:
        sends = [asyncio.create_task(send_frame(stage.sender, frame(i), "r", TIMEOUT_S)) for i in range(9)]
        await asyncio.sleep(0)
        for i, send in enumerate(sends):
            if i % 3 == 0:
                send.cancel()
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError, type(None), type(None)] * 3
        assert {1, 2, 4, 5, 7, 8} <= set(stage.receiver.received)
        await send_frame(stage.sender, frame(100), "r", TIMEOUT_S)
        assert stage.pairs == [f"{SENDER}/{RECEIVER}/0"]

    on_stage(script)


def test_after_a_missed_deadline_the_group_is_another():
    async def script(stage: Stage) -> None:
        await send_frame(stage.sender, frame(1), "r", TIMEOUT_S)
        stage.receiver.open.clear()
        with pytest.raises(DeadlineError):
            await send_frame(stage.sender, frame(2), "r", 0.1)
        stage.receiver.open.set()
        await send_frame(stage.sender, frame(3), "r", TIMEOUT_S)
        assert set(stage.receiver.received) >= {1, 3}
        await until(lambda: stage.pairs == [f"{SENDER}/{RECEIVER}/1"])

    on_stage(script)


def test_a_lost_announcement_costs_its_group_and_no_thread():
    async def script(stage: Stage) -> None:
        outgoing = await stage.outgoing()
        put = outgoing._put

        async def lost(announcement: bytes, timeout: float) -> bytes:
            await asyncio.sleep(timeout)
            raise DeadlineError("lost")

        outgoing._put = lost
        stuck = asyncio.create_task(send_frame(stage.sender, frame(2), "r", 0.3))
        await asyncio.sleep(0.05)
        outgoing._put = put
        behind = asyncio.create_task(send_frame(stage.sender, frame(3), "r", TIMEOUT_S))
        with pytest.raises(DeadlineError):
            await stuck
        # It can't come before the one that was lost.
        with pytest.raises(UnavailableError, match="no more"):
            await behind
        await send_frame(stage.sender, frame(4), "r", TIMEOUT_S)
        assert set(stage.receiver.received) == {0, 4}

    on_stage(script)


def test_an_announcement_that_comes_twice_or_damaged_takes_no_turn():
    async def script(stage: Stage) -> None:
        outgoing = await stage.outgoing()
        put, announced = outgoing._put, []

        async def noted(announcement: bytes, timeout: float) -> bytes:
            announced.append(announcement)
            answer: bytes = await put(announcement, timeout=timeout)
            return answer

        outgoing._put = noted
        await send_frame(stage.sender, frame(1), "r", TIMEOUT_S)
        with pytest.raises(UnavailableError, match="announced before"):
            await call(put(announced[0], timeout=TIMEOUT_S))
        # The number of bytes, of which a wrong one would end the process.
        damaged = bytearray(announced[0])
        damaged[-20] ^= 1
        with pytest.raises(UnavailableError, match="damaged"):
            await call(put(bytes(damaged), timeout=TIMEOUT_S))
        await send_frame(stage.sender, frame(2), "r", TIMEOUT_S)
        assert set(stage.receiver.received) == {0, 1, 2}
        assert stage.pairs == [f"{SENDER}/{RECEIVER}/0"]

    on_stage(script)


def test_groups_that_ended_leave_nothing_open():
    async def script(stage: Stage) -> None:
        at_first = 0

        def no_more_than_at_first() -> bool:
            return num_sockets() <= at_first

        async with no_thread_left() as none_left:
            for number in range(12):
                await send_frame(stage.sender, frame(number), "r", TIMEOUT_S)
                # Of gRPC too, which are the same all the time.
                at_first = at_first or num_sockets()
                await until(no_more_than_at_first)
                # Either side may be the one that gives up.
                (incoming,) = stage.transport._incoming.values()
                outgoing = await stage.outgoing()
                (incoming.group.lane.end if number % 2 else outgoing.end)()
                await until(lambda: none_left() and not stage.pairs)

    on_stage(script)
