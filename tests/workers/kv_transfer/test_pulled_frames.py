"""Frames whose KV the receiver copies out of the sender's own pool."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.sim.loop import run
from tests.factories import make_config
from tests.fake_model import HashRunner
from tests.pooled_model import PooledRunner
from workers.errors import FrameError
from workers.fault_config import FrameFault
from workers.faults import Faults, FaultyReceiver
from workers.kv_transfer.frame import Buffer, Digest, Frame, UnsentFrame, decode
from workers.kv_transfer.incoming import write_frame
from workers.kv_transfer.kv_rows import KVRows
from workers.kv_transfer.segment import Mappings

CONFIG = make_config(num_gpu_blocks_override=8, max_model_len=32)
SLOTS = [4, 5, 6, 7, 12, 13, 14, 15]


def sent_by(runner: PooledRunner, checksum: bool = True) -> tuple[bytes, bytes]:
    """The header, and where the payload lies."""
    rows = runner.kv_pool.locate(SLOTS, 0, 3)
    frame = Frame(1, "a" * 32, 0, 3, 0, len(SLOTS))
    unsent = UnsentFrame(frame, "r", len(rows), lambda room: None, checksum)
    return unsent.header(rows), rows.encode()


def take(runner: HashRunner, header: bytes, place: bytes, checksum: bool = True) -> None:
    frame, claimed = decode(header, KVRows.decode(place, Mappings()))
    digest = Digest(frame, "r")
    if not checksum:
        digest.place(frame.payload)
        digest.require(claimed)
    write_frame(runner, frame, SLOTS, claimed, digest if checksum else None)


def filled() -> PooledRunner:
    runner = PooledRunner(CONFIG)
    runner.pool[:] = np.arange(runner.pool.size).reshape(runner.pool.shape)
    return runner


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("into", [lambda: PooledRunner(CONFIG), lambda: HashRunner(CONFIG)])
def test_kv_comes_as_it_is_whether_or_not_the_receivers_pool_is_at_hand(into, checksum):
    sender, receiver = filled(), into()
    take(receiver, *sent_by(sender, checksum), checksum)
    assert (receiver.pool[:, :, SLOTS] == sender.pool[:, :, SLOTS]).all()
    others = [slot for slot in range(receiver.pool.shape[2]) if slot not in SLOTS]
    assert not receiver.pool[:, :, others].any()


@pytest.mark.parametrize("into", [lambda: PooledRunner(CONFIG), lambda: HashRunner(CONFIG)])
def test_kv_that_changed_after_it_was_hashed_is_refused(into):
    sender = filled()
    header, place = sent_by(sender)
    sender.pool[2, 1, SLOTS[-1], 0, 3] ^= 1
    with pytest.raises(FrameError, match="checksum mismatch in the KV of request r"):
        take(into(), header, place)


def test_a_header_of_another_frame_is_refused():
    sender, other = filled(), filled()
    other.pool[:] += 1
    with pytest.raises(FrameError, match="checksum mismatch"):
        take(PooledRunner(CONFIG), sent_by(other)[0], sent_by(sender)[1])


def test_without_a_checksum_of_payloads_every_bit_that_tells_where_they_lie_still_counts():
    sender, receiver = filled(), PooledRunner(CONFIG)
    header, place = sent_by(sender, checksum=False)
    for bit in range(8 * len(place)):
        damaged = bytearray(place)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            take(receiver, header, bytes(damaged), checksum=False)
    assert not receiver.pool.any()


def test_an_injected_fault_damages_what_is_pulled_and_not_the_senders_pool():
    sender = filled()
    before = sender.pool.copy()
    header, place = sent_by(sender)
    rows = KVRows.decode(place, Mappings())
    came: list[bytes] = []

    class Receiver:
        async def receive(self, data: Buffer, elsewhere: KVRows | None = None) -> None:
            assert elsewhere is not None
            came.append(bytes(elsewhere))
            frame, claimed = decode(data, elsewhere)
            write_frame(PooledRunner(CONFIG), frame, SLOTS, claimed, Digest(frame, "r"))

    async def main() -> None:
        receiver = FaultyReceiver(Receiver(), Faults([FrameFault(fault="corrupt_frame", count=20)], "d0"))
        for _ in range(20):
            with pytest.raises(FrameError):
                await receiver.receive(header, rows)
        await receiver.receive(header, rows)

    run(main())
    assert len([payload for payload in came if payload != bytes(rows)]) > 10
    assert came[-1] == bytes(rows)
    assert (sender.pool == before).all()
