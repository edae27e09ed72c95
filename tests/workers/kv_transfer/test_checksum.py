"""What frames are refused for, by every transport, with their payload in the checksum and without."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.sim.loop import run
from cluster.sim.network import SimNetwork
from tests.factories import make_request
from tests.fake_model import NUM_LAYERS, expected_tokens
from tests.workers.kv_transfer.unsent import encode, unsent, whole
from tests.workers.pair import Pair, on_pair
from tests.workers.test_decode import Stage, frame_of, on_stage
from workers.errors import FrameError, LayoutMismatchError, StaleGrantError
from workers.kv_transfer.base import KVSender, Transport
from workers.kv_transfer.frame import HEADER_BYTES, Buffer
from workers.kv_transfer.grpc import GrpcTransport
from workers.kv_transfer.kv_rows import KVRows
from workers.kv_transfer.local import LocalTransport
from workers.kv_transfer.segment import PLACE_BYTES
from workers.kv_transfer.shm import ShmTransport

OFF = {"transport": "shm", "checksum": False}
Damage = Callable[[bytearray], object]
Send = Callable[[KVSender[Any], Damage | None], Awaitable[None]]


class Damaging:
    """Hands frames on to a decode half, the next one damaged."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.damage: Damage | None = None

    async def receive(self, data: Buffer, elsewhere: KVRows | None = None) -> None:
        copy = bytearray(whole(data, elsewhere))
        if self.damage is not None:
            self.damage(copy)
        await self._stage.decode.receive(copy)


def flip_payload(data: bytearray) -> None:
    data[-1] ^= 1


@pytest.mark.parametrize("transport", ["grpc", "local", "shm"])
def test_a_damaged_payload_is_refused_by_every_transport_and_the_true_one_arrives(transport):
    async def script(stage: Stage) -> None:
        host, receiver = SimNetwork().host(), Damaging(stage)
        ways: dict[str, Transport] = {"grpc": GrpcTransport(host), "local": LocalTransport(), "shm": ShmTransport(host)}
        way, server = ways[transport], host.server()
        way.serve(receiver, server)
        address = await host.listen(server, "h", 0)
        way.reachable(receiver, address)
        request, grant = stage.reserve(6)
        frame = frame_of(request, grant, (0, NUM_LAYERS), (0, 6))
        sender = way.sender(address, "a" * 32)
        receiver.damage = flip_payload
        with pytest.raises(FrameError, match="checksum mismatch"):
            await sender.send(sender.pack(unsent(frame)), 5.0)
        assert stage.decode.num_frames_received == 0
        receiver.damage = None
        await sender.send(sender.pack(unsent(frame)), 5.0)
        stage.commit(grant, [frame])
        stage.engine.abort("r")
        await sender.close()
        await server.stop(None)

    on_stage(script)


def test_without_a_checksum_of_payloads_every_byte_of_a_header_still_counts():
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve(4)
        frame = frame_of(request, grant, (0, NUM_LAYERS), (0, 4))
        data = encode(frame, "r", checksum=False)
        for at in range(HEADER_BYTES):
            damaged = bytearray(data)
            damaged[at] ^= 1
            with pytest.raises((FrameError, StaleGrantError)):
                await stage.decode.receive(damaged)
        for end in (0, HEADER_BYTES - 1, HEADER_BYTES, len(data) - 1):
            with pytest.raises(FrameError):
                await stage.decode.receive(data[:end])
        with pytest.raises(FrameError, match="checksum mismatch"):
            await stage.decode.receive(encode(frame, "another request", checksum=False))
        await stage.decode.receive(data)
        stage.commit(grant, [frame])
        stage.engine.abort("r")

    on_stage(script, transfer=OFF)


def test_without_a_checksum_of_payloads_a_damaged_place_is_refused():
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve(4)
        frame = frame_of(request, grant, (0, NUM_LAYERS), (0, 4))
        payload, num_rows = bytes(frame.payload), 2 * NUM_LAYERS
        true = KVRows(
            bytes(PLACE_BYTES), memoryview(payload), 0, 1, num_rows, len(payload) // num_rows, 4, np.arange(num_rows)
        )
        header = unsent(frame, checksum=False).header(true)
        damaged = replace(true, index=np.array([0, 1, 2, 3, 5, 5]))
        with pytest.raises(FrameError, match="checksum mismatch"):
            await stage.decode.receive(header, damaged)
        await stage.decode.receive(header, true)
        stage.commit(grant, [frame])
        stage.engine.abort("r")

    on_stage(script, transfer=OFF)


@pytest.mark.parametrize("elsewhere", [{"layer_start": 1, "layer_end": 2}, {"token_start": 4, "token_end": 8}])
def test_without_a_checksum_of_payloads_a_frame_is_bound_to_its_place(elsewhere):
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve(8)
        frame = frame_of(request, grant, (0, 1), (0, 4))
        data, moved = (encode(f, "r", checksum=False) for f in (frame, replace(frame, **elsewhere)))
        checksum = slice(HEADER_BYTES - 8, HEADER_BYTES)
        with pytest.raises(FrameError, match="checksum mismatch"):
            await stage.decode.receive(moved[: checksum.start] + data[checksum] + moved[checksum.stop :])
        stage.decode.abort("r")

    on_stage(script, transfer=OFF)


def test_without_a_checksum_of_payloads_foreign_and_late_frames_are_refused():
    async def script(stage: Stage) -> None:
        request, grant = stage.reserve(8)
        frame = frame_of(request, grant, (0, NUM_LAYERS), (0, 8))
        for foreign in ({"incarnation": "f" * 32}, {"grant_id": 99}):
            with pytest.raises(StaleGrantError):
                await stage.decode.receive(encode(replace(frame, **foreign), "r", checksum=False))
        outside = replace(frame, token_start=4, token_end=12)
        with pytest.raises(FrameError, match="outside grant"):
            await stage.decode.receive(encode(outside, "r", checksum=False))
        assert stage.decode.abort("r")
        with pytest.raises(StaleGrantError, match="no more"):
            await stage.decode.receive(encode(frame, "r", checksum=False))

    on_stage(script, transfer=OFF)


def test_answers_are_the_same_without_a_checksum_and_status_tells():
    async def script(pair: Pair) -> None:
        request = make_request(37)
        assert await pair.answer(request) == expected_tokens(request.prompt_token_ids, request.params)
        assert [(p.transport, p.checksum) for p in pair.prefill.stats().peers] == [("shm", False)]

    on_pair(script, transfer=OFF)


@pytest.mark.parametrize("odd_one", ["prefill", "decode"])
def test_workers_that_disagree_about_checksums_exchange_no_kv(odd_one):
    async def main() -> None:
        pair = Pair(transfer={"transport": "shm"})
        worker = getattr(pair, odd_one)
        worker.config = worker.config.model_copy(update={"transfer": worker.config.transfer.model_copy(update=OFF)})
        await pair.start()
        with pytest.raises(LayoutMismatchError, match=r"transfer\.checksum is (true|false) here") as caught:
            await pair.hand_over(make_request(8))
        assert caught.value.param == "checksum"
        pair.decode.abort("r")
        await pair.until_idle()
        await pair.stop()

    run(main())
