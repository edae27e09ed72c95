"""Shared memory between real processes, and what a late or dead one can do to it."""

from __future__ import annotations

import asyncio
import gc
import os
import struct
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue

import pytest

from cluster.sim.loop import run
from cluster.sim.network import SimNetwork
from tests.workers.kv_transfer.unsent import unsent
from workers.errors import DeadlineError, FrameError
from workers.kv_transfer.base import Refusal
from workers.kv_transfer.frame import Buffer, Frame, decode
from workers.kv_transfer.kv_rows import KVRows
from workers.kv_transfer.segment import Mappings, Segment, when_ended
from workers.kv_transfer.shm import ShmTransport

FIRST = Frame(7, "a" * 32, 0, 2, 0, 4, b"first" * 160)
SECOND = Frame(8, "a" * 32, 0, 2, 0, 4, b"other" * 160)

# Has something in memory, tells where, and waits to be killed.
_SENDER = """
import sys
from workers.kv_transfer.segment import Segment
segment = Segment(4096)
segment.memory[:800] = b"first" * 160
print(segment.place.hex(), flush=True)
sys.stdin.read()
"""


@contextmanager
def sending_process():
    """The place of another process's memory, and that process."""
    with subprocess.Popen(
        [sys.executable, "-c", _SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield bytes.fromhex(process.stdout.readline()), process
        finally:
            process.kill()


def test_memory_of_another_process_is_read_in_place_and_outlives_it():
    with sending_process() as (place, process):
        memory = Mappings().memory(place)
        assert len(memory) == 4096
        assert bytes(memory[:800]) == FIRST.payload
        process.kill()
        process.wait()
        assert bytes(memory[:800]) == FIRST.payload
        with pytest.raises(FrameError, match=f"process {process.pid} cannot be read here"):
            Mappings().memory(place)


def test_a_descriptor_that_is_another_segment_now_is_not_taken_for_the_old_one():
    old = Segment(100)
    place = old.place
    old.close()
    new = Segment(100)
    assert new.place[:8] == place[:8], "the test needs the descriptor to be used again"
    with pytest.raises(FrameError, match="not the segment"):
        Mappings().memory(place)
    new.close()


def test_the_memory_of_a_process_goes_when_it_dies_on_a_thread_of_its_own():
    ended_on = Queue[str]()

    async def main() -> None:
        transport = ShmTransport(SimNetwork().host())
        with sending_process() as (place, process):
            whole = transport._mappings.memory(place).obj
            weakref.finalize(whole, lambda: ended_on.put(threading.current_thread().name))
            del whole
            await asyncio.sleep(0.1)
            assert ended_on.empty()
            process.kill()
            process.wait()
        assert await asyncio.to_thread(ended_on.get, timeout=10) == "unmap"

    asyncio.run(main())


def test_who_is_gone_already_is_told_of_at_once():
    told: list[int] = []
    with sending_process() as (_, process):
        process.kill()
        process.wait()

    async def main() -> None:
        when_ended(process.pid, lambda: told.append(process.pid))

    asyncio.run(main())
    assert told == [process.pid]


@pytest.mark.timeout(10)
def test_what_another_process_has_in_place_of_a_segment_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    # To open it to read is to wait for who writes.
    place = struct.pack("<II16sQ", os.getpid(), reader, bytes(16), 1)
    with pytest.raises(FrameError, match="cannot be read here"):
        Mappings().memory(place)
    os.close(reader)


def test_memory_that_the_receiver_may_still_read_is_never_written_again():
    held: list[KVRows] = []

    class Slow:
        async def receive(self, data: Buffer, elsewhere: KVRows | None = None) -> None:
            assert elsewhere is not None
            held.append(elsewhere)
            if len(held) == 1:
                await asyncio.sleep(100)

    async def main() -> None:
        host = SimNetwork().host()
        transport, server = ShmTransport(host), host.server()
        transport.serve(Slow(), server)
        sender = transport.sender(await host.listen(server, "h", 0), "a" * 32)
        with pytest.raises(DeadlineError):
            await sender.send(sender.pack(unsent(FIRST)), 1.0)
        await sender.send(sender.pack(unsent(SECOND)), 1.0)
        assert list(map(bytes, held)) == [FIRST.payload, SECOND.payload]
        await sender.send(sender.pack(unsent(FIRST)), 1.0)
        # What the receiver has answered for is used again.
        assert bytes(held[1]) == FIRST.payload
        await sender.close()
        await server.stop(None)

    run(main())


def test_senders_leave_nothing_open_and_receivers_keep_a_bounded_number():
    def num_open() -> int:
        gc.collect()
        num = 0
        for path in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                num += "memfd:kvferry" in os.readlink(path)
        return num

    class Receiver:
        async def receive(self, data: Buffer, elsewhere: KVRows | None = None) -> None:
            decode(data, elsewhere)

    async def main() -> None:
        host = SimNetwork().host()
        transport, server = ShmTransport(host), host.server()
        transport.serve(Receiver(), server)
        address = await host.listen(server, "h", 0)
        before = num_open()
        for size in (10, 1000, 10, 5000) * 10:
            sender = transport.sender(address, "a" * 32)
            frame = Frame(1, "a" * 32, 0, 1, 0, 1, bytes(2 * size))
            await asyncio.gather(*(sender.send(sender.pack(unsent(frame)), 1.0) for _ in "abcd"))
            await sender.close()
        assert num_open() - before == len(transport._mappings._mapped) == 64
        await server.stop(None)

    run(main())


def test_what_this_host_cannot_read_is_not_accepted():
    transport = ShmTransport(SimNetwork().host())
    segment = Segment(1)
    place = segment.place
    segment.close()
    host = transport.offer()[:16]
    gone = transport.refusal(host + place)
    assert gone is not None
    assert gone.is_fault
    assert "on the same host, but the shared memory of process" in gone.reason
    assert transport.refusal(bytes(range(16)) + place) == Refusal("it is on another host")
    assert transport.refusal(b"nonsense") == Refusal("it is on another host")


def test_what_was_packed_and_never_sent_leaves_nothing_open():
    sender = ShmTransport(SimNetwork().host()).sender("h:1", "a" * 32)
    gc.collect()
    before = os.listdir("/proc/self/fd")
    packed = sender.pack(unsent(FIRST))
    assert len(os.listdir("/proc/self/fd")) > len(before)
    del packed
    gc.collect()
    assert os.listdir("/proc/self/fd") == before


def test_a_process_is_watched_once_however_often_its_last_mapping_goes(monkeypatch):
    monkeypatch.setattr("workers.kv_transfer.segment._MAX_MAPPINGS", 1)
    # As processes of another number would have it: whose segment it is tells the first field of its place.
    monkeypatch.setattr("workers.kv_transfer.segment._map", lambda pid, fd, token: memoryview(bytes(8192)))
    watched: list[int] = []
    mappings = Mappings(watched.append)
    places = [struct.pack("<II16sQ", pid, 3, bytes([pid, at]) + bytes(14), 8) for at in range(4) for pid in (5, 6)]
    for place in places:
        mappings.memory(place)
    assert watched == [5, 6]
    mappings.forget(5)
    mappings.memory(places[0])
    assert watched == [5, 6, 5]
