"""The decode half by itself: grants and frames, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cluster.sim.loop import run
from protos import kv_transfer_pb2 as pb
from tests.factories import BLOCK_SIZE, GREEDY, make_config, make_engine, make_request, run_engine, runner_of
from tests.fake_model import NUM_LAYERS, HashRunner, expected_tokens, kv_of
from tests.pooled_model import PooledRunner
from tests.workers.kv_transfer.unsent import encode
from workers.decode import Decode
from workers.errors import FrameError, KVFerryError, OverloadedError, StaleGrantError
from workers.kv_transfer.base import Grant
from workers.kv_transfer.frame import HEADER_BYTES, Frame
from workers.kv_transfer.slots import slots_of
from workers.request import Request

ME, OTHER = "a" * 32, "b" * 32


class Stage:
    """A decode half, and the prefill worker's part played by hand."""

    def __init__(self, make_runner: type[HashRunner] = HashRunner, **settings: Any) -> None:
        config = make_config(**settings)
        self.engine = make_engine(make_runner=make_runner, **settings)
        self.failures: list[tuple[str, type[KVFerryError]]] = []
        layout = runner_of(self.engine).layout
        self.decode = Decode(self.engine, layout, ME, config.transfer, self._fail)

    def _fail(self, request: Request, error: KVFerryError) -> None:
        self.failures.append((request.request_id, type(error)))

    def reserve(self, num_tokens: int = 10, request_id: str = "r") -> tuple[Request, Grant]:
        request = make_request(num_tokens, request_id=request_id)
        return request, self.decode.reserve(request, "d:1")

    def frames(self, request: Request, grant: Grant) -> list[Frame]:
        """The prompt in two chunks, each of them a frame a layer."""
        half = max(1, grant.end // 2)
        chunks = [(start, end) for start, end in ((0, half), (half, grant.end)) if start < end]
        return [frame_of(request, grant, (layer, layer + 1), chunk) for chunk in chunks for layer in range(NUM_LAYERS)]

    async def receive(self, *frames: Frame, request_id: str = "r") -> None:
        for frame in frames:
            await self.decode.receive(encode(frame, request_id))

    def commit(self, grant: Grant, frames: list[Frame], first_token_id: int = 5) -> None:
        self.decode.commit(commit_of(grant, frames, first_token_id))

    def require_idle(self) -> None:
        self.engine.check_integrity()
        blocks = self.engine.block_manager
        assert blocks.num_free + blocks.num_cached == blocks.num_blocks
        assert not self.decode.quarantined
        assert self.engine.scheduler.num_blocks_reserved == 0


def frame_of(request: Request, grant: Grant, layers: tuple[int, int], tokens: tuple[int, int]) -> Frame:
    kv = kv_of(request.tokens(*tokens), tokens[0])[slice(*layers)]
    return Frame(grant.grant_id, grant.incarnation, *layers, *tokens, kv.tobytes())


def commit_of(grant: Grant, frames: list[Frame], first_token_id: int = 5) -> pb.CommitRequest:
    return pb.CommitRequest(
        grant_id=grant.grant_id,
        incarnation=grant.incarnation,
        first_token_ids={0: first_token_id},
        num_frames=len(frames),
        num_bytes=sum(len(frame.payload) for frame in frames),
    )


def on_stage(script: Any, **settings: Any) -> None:
    """With KV that is verified before it is written, as into a GPU's pool, and that is copied and then verified."""

    async def main(make_runner: type[HashRunner]) -> None:
        stage = Stage(make_runner, **settings)
        await script(stage)
        stage.require_idle()

    run(main(HashRunner))
    run(main(PooledRunner))


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 37])
def test_a_request_whose_kv_came_by_frames_is_answered_as_if_computed_here(length):
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve(length)
        assert (grant.start, grant.end, grant.incarnation) == (0, length, ME)
        frames = stage.frames(request, grant)
        # Any order will do.
        await asyncio.gather(*(stage.receive(frame) for frame in reversed(frames)))
        whole = expected_tokens(request.prompt_token_ids, GREEDY)
        stage.commit(grant, frames, whole[0])
        await run_engine(stage.engine)
        assert request.output_token_ids == whole
        assert stage.engine.num_prompt_tokens_computed == 0
        assert stage.decode.num_bytes_received == length * runner_of(stage.engine).layout.token_bytes
        assert stage.decode.num_frames_received == len(frames)

    on_stage(script)


def damaged(data: bytes) -> Iterator[bytes]:
    """Every byte flipped, and every truncation of the header and around the payload's end."""
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
    for end in (*range(HEADER_BYTES + 1), len(data) - 1):
        yield data[:end]


def test_a_damaged_frame_is_refused_whatever_byte_it_is_and_the_true_one_is_still_welcome():
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve(4)
        pool = runner_of(stage.engine).pool
        there, frame = (frame_of(request, grant, (0, NUM_LAYERS), tokens) for tokens in ((0, 2), (2, 4)))
        await stage.receive(there)
        before = pool.copy()
        for data in damaged(encode(frame, "r")):
            with pytest.raises((FrameError, StaleGrantError)):
                await stage.decode.receive(data)
        # Not a bit of what had come before, nor of what is others'.
        yet_to_come = slots_of(request.block_table, 2, 4, BLOCK_SIZE)
        others = [slot for slot in range(pool.shape[2]) if slot not in yet_to_come]
        assert (pool[:, :, others] == before[:, :, others]).all()
        await stage.receive(frame)
        whole = expected_tokens(request.prompt_token_ids, GREEDY)
        stage.commit(grant, [there, frame], whole[0])
        await run_engine(stage.engine)
        assert request.output_token_ids == whole

    on_stage(script)


def test_frames_that_belong_elsewhere_are_refused():
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve(8)
        _, foreign = stage.reserve(8, "other")
        good = frame_of(request, grant, (0, 1), (0, 4))
        cases: list[tuple[type[KVFerryError], Frame]] = [
            (StaleGrantError, replace(good, incarnation=OTHER)),
            (StaleGrantError, replace(good, grant_id=99)),
            (FrameError, replace(good, grant_id=foreign.grant_id)),
            (FrameError, frame_of(request, grant, (NUM_LAYERS - 1, NUM_LAYERS + 1), (0, 4))),
            (FrameError, replace(good, token_start=6, token_end=10)),
            # As of a layout with other heads or another dtype.
            (FrameError, replace(good, payload=bytes(good.payload)[: len(good.payload) // 2])),
            (FrameError, replace(good, payload=bytes(good.payload) * 2)),
        ]
        for error, frame in cases:
            with pytest.raises(error):
                await stage.receive(frame)
        with pytest.raises(FrameError, match="checksum"):
            await stage.receive(good, request_id="another request")
        assert stage.decode.num_frames_received == 0
        stage.decode.abort("r")
        stage.decode.abort("other")

    on_stage(script)


def test_a_frame_sent_twice_counts_once_and_one_that_overlaps_is_refused():
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve()
        frames = stage.frames(request, grant)
        await asyncio.gather(*(stage.receive(frame) for frame in [*frames, *frames]))
        with pytest.raises(FrameError, match="overlaps"):
            await stage.receive(frame_of(request, grant, (0, 2), (4, 6)))
        assert stage.decode.num_frames_received == len(frames)
        whole = expected_tokens(request.prompt_token_ids, GREEDY)
        stage.commit(grant, frames, whole[0])
        await run_engine(stage.engine)
        assert request.output_token_ids == whole

    on_stage(script)


def test_an_end_of_something_unknown_is_no_error():
    async def script(stage: Stage) -> None:
        assert not stage.decode.abort("nobody")
        _, grant = stage.reserve()
        stage.decode.release(pb.ReleaseRequest(grant_id=99, incarnation=ME))
        stage.decode.release(pb.ReleaseRequest(grant_id=grant.grant_id, incarnation=OTHER))
        assert stage.engine.scheduler.num_blocks_reserved == 3
        assert stage.decode.abort("r")
        stage.decode.release(pb.ReleaseRequest(grant_id=grant.grant_id, incarnation=ME, reason="late"))
        assert stage.failures == []

    on_stage(script)


def test_grants_are_bounded_and_their_ids_are_never_used_again():
    async def script(stage: Stage) -> None:
        grants = [stage.reserve(2, f"r{i}")[1] for i in range(2)]
        with pytest.raises(OverloadedError, match="max_num_grants"):
            stage.reserve(2, "r2")
        stage.decode.abort("r0")
        grants.append(stage.reserve(2, "r2")[1])
        assert len({grant.grant_id for grant in grants}) == 3
        stage.decode.close()

    on_stage(script, transfer={"max_num_grants": 2})


def test_a_committed_hand_off_can_be_aborted_before_it_joins_a_batch():
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve()
        frames = stage.frames(request, grant)
        await stage.receive(*frames)
        stage.commit(grant, frames)
        assert not stage.decode.abort("r")
        assert stage.engine.abort("r")

    on_stage(script)
