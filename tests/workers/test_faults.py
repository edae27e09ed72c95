"""Injected faults: each does what it says, and the cluster survives it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from cluster.sim.loop import run
from tests.factories import GREEDY, SEEDED, SimCluster, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from tests.workers.kv_transfer.unsent import whole
from workers.errors import FrameError, OverloadedError
from workers.fault_config import Fault
from workers.faults import Faults, FaultyReceiver
from workers.kv_transfer.frame import Buffer
from workers.kv_transfer.kv_rows import KVRows

FRAMES = ("drop_frame", "delay_frame", "duplicate_frame", "reorder_frame", "truncate_frame", "corrupt_frame")
LONG = replace(SEEDED, max_tokens=20)


def faults_of(*described: dict[str, object]) -> tuple[Fault, ...]:
    return TypeAdapter(tuple[Fault, ...]).validate_python(described)


def on_cluster(script: Callable[[SimCluster], Awaitable[None]], *faults: dict[str, object]) -> None:
    async def main() -> None:
        async with sim_cluster(decode=2, idle_within_s=25, faults=faults_of(*faults)) as cluster:
            await script(cluster)

    run(main())


class Recorder:
    def __init__(self) -> None:
        self.received: list[bytes] = []

    async def receive(self, data: Buffer, elsewhere: KVRows | None = None) -> None:
        self.received.append(whole(data, elsewhere))


async def receive(frames: list[bytes], *faults: dict[str, object]) -> list[bytes]:
    """What gets through within 10 s."""
    recorder = Recorder()
    receiver = FaultyReceiver(recorder, Faults(faults_of(*faults), "d0"))
    calls = [asyncio.create_task(receiver.receive(frame)) for frame in frames]
    await asyncio.wait(calls, timeout=10)
    for call in calls:
        call.cancel()
    return recorder.received


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("drop_frame", ["two", "three"]),
        ("delay_frame", ["two", "three", "one"]),
        ("duplicate_frame", ["one", "one", "two", "three"]),
        ("reorder_frame", ["two", "one", "three"]),
    ],
)
def test_frames_are_lost_late_doubled_or_overtaken(fault, expected):
    async def main() -> None:
        got = await receive([b"one", b"two", b"three"], {"fault": fault, "count": 1})
        if fault == "reorder_frame":
            assert sorted(got) == sorted(word.encode() for word in expected)
            assert got.index(b"two") < got.index(b"one")
        else:
            assert got == [word.encode() for word in expected]

    run(main())


def test_a_frame_that_nothing_overtakes_comes_after_all():
    async def main() -> None:
        assert await receive([b"one"], {"fault": "reorder_frame", "delay_s": 2}) == [b"one"]

    run(main())


def test_frames_are_damaged_in_one_bit_or_cut():
    async def main() -> None:
        frame = bytes(range(256))
        (damaged,) = await receive([frame], {"fault": "corrupt_frame"})
        assert sum((a ^ b).bit_count() for a, b in zip(frame, damaged, strict=True)) == 1
        (cut,) = await receive([frame], {"fault": "truncate_frame"})
        assert frame.startswith(cut)
        assert len(cut) < len(frame)

    run(main())


def test_a_fault_happens_between_skip_and_count_and_as_often_as_likely_and_the_same_every_time():
    async def main() -> None:
        frames = [bytes([i]) for i in range(100)]
        got = await receive(frames, {"fault": "drop_frame", "skip": 3, "count": 2})
        assert got == [*frames[:3], *frames[5:]]
        often = [await receive(frames, {"fault": "drop_frame", "probability": 0.3}) for _ in range(2)]
        assert 55 < len(often[0]) < 85
        assert often[0] == often[1]
        assert await receive(frames, {"fault": "drop_frame", "probability": 0.0}) == frames

    run(main())


@pytest.mark.parametrize("fault", FRAMES)
def test_answers_are_exact_whatever_happens_to_frames(fault):
    async def script(cluster: SimCluster) -> None:
        prompts = [prompt_of(20, seed) for seed in range(6)]
        answers = await asyncio.gather(*(cluster.ask(p, LONG, f"r{i}") for i, p in enumerate(prompts)))
        assert answers == [expected_tokens(prompt, LONG) for prompt in prompts]

    on_cluster(script, {"fault": fault, "probability": 0.05, "delay_s": 1.5})


@pytest.mark.parametrize("number", range(5))
def test_a_flipped_bit_in_any_frame_is_found_before_token_2_and_the_client_sees_no_error(number):
    async def script(cluster: SimCluster) -> None:
        prompt = prompt_of(40, number)
        asking = asyncio.create_task(cluster.ask(prompt, LONG))
        decodes = [cluster.workers[name] for name in ("d0", "d1")]
        while not any(worker.engine.num_output_tokens for worker in decodes):  # noqa: ASYNC110
            await asyncio.sleep(0.0005)
        # The first token of a decode worker comes of the second hand-off, which was whole.
        (request,) = [request for worker in decodes for request in worker.engine.sequences()]
        assert request.request_id.endswith(".2")
        assert await asking == expected_tokens(prompt, LONG)

    on_cluster(script, {"fault": "corrupt_frame", "skip": number, "worker": "d0"})


def test_a_frame_that_is_always_damaged_ends_the_request_with_a_typed_error_once_its_tries_are_spent():
    async def script(cluster: SimCluster) -> None:
        with pytest.raises(FrameError):
            await cluster.ask(prompt_of(20))

    on_cluster(script, {"fault": "corrupt_frame"})


def test_a_refused_reserve_waits_or_goes_elsewhere():
    async def script(cluster: SimCluster) -> None:
        assert await cluster.ask(prompt_of(20), LONG) == expected_tokens(prompt_of(20), LONG)
        assert cluster.workers["d0"].decode.num_frames_received == 0
        assert cluster.workers["d1"].decode.num_frames_received > 0

    on_cluster(script, {"fault": "refuse_reserve", "count": 50, "worker": "d0"})


def test_a_worker_whose_heartbeat_pauses_is_gone_around_until_it_is_over():
    async def script(cluster: SimCluster) -> None:
        received = cluster.workers["d0"].decode
        await asyncio.sleep(4)
        answers = await asyncio.gather(*(cluster.ask(prompt_of(20, i), LONG, f"r{i}") for i in range(8)))
        assert answers == [expected_tokens(prompt_of(20, i), LONG) for i in range(8)]
        assert received.num_frames_received == 0
        await asyncio.sleep(14)
        await asyncio.gather(*(cluster.ask(prompt_of(20, i), LONG, f"again{i}") for i in range(8)))
        assert received.num_frames_received > 0

    on_cluster(script, {"fault": "pause_heartbeat", "worker": "d0", "after_s": 1, "for_s": 14})


def test_a_hand_off_whose_renewals_pause_loses_its_lease_and_no_answer(caplog):
    """To a router that asks more seldom, nothing is the matter with the worker."""

    async def main() -> None:
        faults = faults_of({"fault": "pause_heartbeat", "worker": "d0", "after_s": 1, "for_s": 14})
        slow: dict[str, Any] = {"router": {"heartbeat_s": 60}, "transfer": {"lease_s": 3}, "step_s": lambda batch: 1.0}
        async with sim_cluster(decode=2, idle_within_s=25, faults=faults, **slow) as cluster:
            await asyncio.sleep(1.5)
            asking = asyncio.create_task(cluster.ask(prompt_of(150), GREEDY))
            await asyncio.sleep(2.5)
            first = cluster.workers["d0"].stats()
            assert (first.num_waiting_for_kv, first.blocks_reserved > 0) == (1, True)
            await asyncio.sleep(1)
            assert "within the lease of 3.0 s" in caplog.text
            later = cluster.workers["d0"].stats()
            assert (later.num_waiting_for_kv, later.blocks_reserved) == (0, 0)
            assert await asking == expected_tokens(prompt_of(150), GREEDY)

    run(main())


def test_a_worker_is_killed_when_it_gets_to_the_step_for_the_time_that_was_said(monkeypatch):
    killed: list[str] = []
    monkeypatch.setattr("workers.faults.kill_process", lambda: killed.append("killed"))

    async def main() -> None:
        faults = Faults(faults_of({"fault": "kill", "at": "commit", "skip": 2}), "d0")
        for _ in range(2):
            faults.reach("commit")
            faults.reach("frame")
        assert not killed
        for _ in range(3):
            faults.reach("commit")
        assert killed == ["killed"]

    run(main())


@pytest.mark.parametrize(
    "described",
    [
        {"fault": "explode"},
        {"fault": "kill"},
        {"fault": "kill", "at": "lunch"},
        {"fault": "drop_frame", "probability": 2},
        {"fault": "drop_frame", "at": "commit"},
        {"fault": "pause_heartbeat"},
        {"probability": 1},
    ],
)
def test_what_is_no_fault_is_refused(described):
    with pytest.raises(ValidationError):
        faults_of(described)


def test_a_reserve_that_is_always_refused_ends_like_a_full_cluster():
    async def main() -> None:
        faults = faults_of({"fault": "refuse_reserve"})
        async with sim_cluster(router={"queue_timeout_s": 2}, faults=faults) as cluster:
            with pytest.raises(OverloadedError, match="queue_timeout_s"):
                await cluster.ask(prompt_of(4), GREEDY)

    run(main())
