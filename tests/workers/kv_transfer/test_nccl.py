"""Groups of torch.distributed between two workers, over real sockets: Gloo here, by the module that NCCL runs in."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from workers.errors import DeadlineError, FrameError, StaleGrantError, UnavailableError
from workers.kv_transfer.frame import Buffer, Frame, decode, verify
from workers.kv_transfer.nccl import NcclTransport, Outgoing
from workers.kv_transfer.pair_group import RECEIVER as RECEIVER_RANK
from workers.kv_transfer.pair_group import Gloo, PairGroup
from workers.kv_transfer.sessions import SessionSender
from workers.rpc import GrpcNetwork, call

SENDER, RECEIVER, OTHER = "a" * 32, "b" * 32, "c" * 32
TIMEOUT_S = 20.0


def frame(number: int = 7, payload: bytes = b"KV" * 1000) -> Frame:
    return Frame(number, RECEIVER, 0, 2, 0, 4, payload)


class Receiver:
    """Takes frames of request "r" while it is open; those of grant 99 are stale."""

    def __init__(self) -> None:
        self.received: dict[int, bytes] = {}
        self.num_waiting = 0
        self.open = asyncio.Event()
        self.open.set()

    async def receive(self, data: Buffer) -> None:
        found, checksum = decode(data)
        if found.grant_id == 99:
            raise StaleGrantError("no more")
        verify(found, checksum, "r")
        self.num_waiting += 1
        await self.open.wait()
        self.received[found.grant_id] = bytes(found.payload)


class Stage:
    """A receiver behind a gRPC server, and a sender to it."""

    def __init__(self, incarnation: str = RECEIVER) -> None:
        self.network = GrpcNetwork()
        self.receiver = Receiver()
        self.transport = NcclTransport(Gloo(), self.network, incarnation)
        self._server = self.network.server()
        self.transport.serve(self.receiver, self._server)

    async def start(self, port: int = 0) -> None:
        self.address = await self.network.listen(self._server, "127.0.0.1", port)
        self.sender = self.sender_from(NcclTransport(Gloo(), self.network, SENDER))

    def sender_from(self, transport: NcclTransport) -> SessionSender:
        return transport.sender(self.address, RECEIVER)

    async def outgoing(self) -> Outgoing:
        """The sender's group, once frame 0 has gone through it."""
        await self.sender.send(frame(0), "r", TIMEOUT_S)
        assert isinstance(self.sender._session, Outgoing)
        return self.sender._session

    @property
    def pairs(self) -> list[str]:
        """The groups that the receiver has."""
        return [str(pair) for pair in self.transport._incoming]

    async def stop(self) -> None:
        await self.sender.close()
        await self._server.stop(None)


def leftovers() -> list[str]:
    """Threads of groups and stores in this process: torch's, by the names that Linux knows, and ours."""
    names = [thread.name for thread in threading.enumerate()]
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):
            names.append(path.read_text())
    return [name for name in names if name.startswith(("gloo_", "pt_", "kv-gloo"))]


def num_sockets() -> int:
    num = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            num += os.readlink(path).startswith("socket:")
    return num


async def until(holds: Callable[[], object], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110  What is waited for is on other threads.
            await asyncio.sleep(0.005)


def on_stage(script: Callable[[Stage], Awaitable[Any]]) -> None:
    """Run `script`; afterwards no thread and no group may be left."""

    async def main() -> None:
        stage = Stage()
        await stage.start()
        try:
            await script(stage)
        finally:
            await stage.stop()
        await until(lambda: not leftovers() and not stage.pairs)

    asyncio.run(main())


def test_frames_of_any_size_arrive_over_one_group():
    async def script(stage: Stage) -> None:
        payloads = {i: bytes([i]) * size for i, size in enumerate((10, 1 << 20, 3, 5 << 20, 1 << 20))}
        for number, payload in payloads.items():
            await stage.sender.send(frame(number, payload), "r", TIMEOUT_S)
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
        await asyncio.gather(*(stage.sender.send(frame(i, p), "r", TIMEOUT_S) for i, p in payloads.items()))
        assert {number: stage.receiver.received[number] for number in payloads} == payloads

    on_stage(script)


def test_a_damaged_or_foreign_frame_is_refused_and_the_next_one_is_not(monkeypatch):
    async def script(stage: Stage) -> None:
        with pytest.raises(FrameError, match="checksum"):
            await stage.sender.send(frame(), "another request", TIMEOUT_S)
        with pytest.raises(StaleGrantError, match="no more"):
            await stage.sender.send(frame(99), "r", TIMEOUT_S)
        with monkeypatch.context() as patched:
            send = PairGroup.send

            def damaged(group: PairGroup, staging: Any, num_bytes: int, timeout_s: float) -> Any:
                staging[num_bytes - 1] ^= 1
                return send(group, staging, num_bytes, timeout_s)

            patched.setattr(PairGroup, "send", damaged)
            with pytest.raises(FrameError, match="checksum"):
                await stage.sender.send(frame(), "r", TIMEOUT_S)
        assert stage.receiver.received == {}
        await stage.sender.send(frame(), "r", TIMEOUT_S)
        assert stage.pairs == [f"{SENDER}/{RECEIVER}/0"]

    on_stage(script)


def test_a_cancelled_send_does_not_stop_those_behind_it():
    async def script(stage: Stage) -> None:
        sends = [asyncio.create_task(stage.sender.send(frame(i), "r", TIMEOUT_S)) for i in range(9)]
        await asyncio.sleep(0)
        for i, send in enumerate(sends):
            if i % 3 == 0:
                send.cancel()
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError, type(None), type(None)] * 3
        assert {1, 2, 4, 5, 7, 8} <= set(stage.receiver.received)
        await stage.sender.send(frame(100), "r", TIMEOUT_S)
        assert stage.pairs == [f"{SENDER}/{RECEIVER}/0"]

    on_stage(script)


def test_after_a_missed_deadline_the_group_is_another():
    async def script(stage: Stage) -> None:
        await stage.sender.send(frame(1), "r", TIMEOUT_S)
        stage.receiver.open.clear()
        with pytest.raises(DeadlineError):
            await stage.sender.send(frame(2), "r", 0.1)
        stage.receiver.open.set()
        await stage.sender.send(frame(3), "r", TIMEOUT_S)
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
        stuck = asyncio.create_task(stage.sender.send(frame(2), "r", 0.3))
        await asyncio.sleep(0.05)
        outgoing._put = put
        behind = asyncio.create_task(stage.sender.send(frame(3), "r", TIMEOUT_S))
        with pytest.raises(DeadlineError):
            await stuck
        # It can't come before the one that was lost.
        with pytest.raises(UnavailableError, match="no more"):
            await behind
        await stage.sender.send(frame(4), "r", TIMEOUT_S)
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
        await stage.sender.send(frame(1), "r", TIMEOUT_S)
        with pytest.raises(UnavailableError, match="announced before"):
            await call(put(announced[0], timeout=TIMEOUT_S))
        # The number of bytes, of which a wrong one would end the process.
        damaged = bytearray(announced[0])
        damaged[-20] ^= 1
        with pytest.raises(UnavailableError, match="damaged"):
            await call(put(bytes(damaged), timeout=TIMEOUT_S))
        await stage.sender.send(frame(2), "r", TIMEOUT_S)
        assert set(stage.receiver.received) == {0, 1, 2}
        assert stage.pairs == [f"{SENDER}/{RECEIVER}/0"]

    on_stage(script)


def test_groups_that_ended_leave_nothing_open():
    async def script(stage: Stage) -> None:
        at_first = 0

        def no_more_than_at_first() -> bool:
            return num_sockets() <= at_first

        for number in range(12):
            await stage.sender.send(frame(number), "r", TIMEOUT_S)
            # Of gRPC too, which are the same all the time.
            at_first = at_first or num_sockets()
            await until(no_more_than_at_first)
            # Either side may be the one that gives up.
            (incoming,) = stage.transport._incoming.values()
            outgoing = await stage.outgoing()
            (incoming.group.lane.end if number % 2 else outgoing.end)()
            await until(lambda: not leftovers() and not stage.pairs)

    on_stage(script)


def test_closing_the_sender_ends_its_sends_and_its_groups():
    async def script(stage: Stage) -> None:
        stage.receiver.open.clear()
        sends = [asyncio.create_task(stage.sender.send(frame(i), "r", TIMEOUT_S)) for i in range(4)]
        await until(lambda: stage.receiver.num_waiting == 4)
        await stage.sender.close()
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert {type(result) for result in results} == {UnavailableError}
        await until(lambda: not stage.pairs)

    on_stage(script)


def test_closing_does_not_wait_for_a_group_that_is_being_made(monkeypatch):
    async def script(stage: Stage) -> None:
        connect = Gloo.connect

        def late(gloo: Gloo, store: Any, rank: int, host: str, timeout_s: float) -> Any:
            if rank == RECEIVER_RANK:
                time.sleep(1.0)
            return connect(gloo, store, rank, host, timeout_s)

        monkeypatch.setattr(Gloo, "connect", late)
        sending = asyncio.create_task(stage.sender.send(frame(), "r", TIMEOUT_S))
        await until(lambda: stage.pairs)
        await asyncio.sleep(0.2)
        async with asyncio.timeout(0.5):
            await stage.sender.close()
        with pytest.raises(UnavailableError):
            await sending

    on_stage(script)


def test_a_restarted_receiver_is_another_peer_at_once():
    async def script(stage: Stage) -> None:
        stage.receiver.open.clear()
        sends = [asyncio.create_task(stage.sender.send(frame(i), "r", TIMEOUT_S)) for i in range(4)]
        await until(lambda: stage.receiver.num_waiting == 4)
        await stage._server.stop(None)
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert {type(result) for result in results} == {UnavailableError}
        new = Stage(OTHER)
        await new.start(port=int(stage.address.rsplit(":", 1)[1]))
        with pytest.raises(UnavailableError, match=f"{RECEIVER} is no more"):
            await new.sender.send(frame(1), "r", TIMEOUT_S)
        to_new = NcclTransport(Gloo(), new.network, SENDER).sender(new.address, OTHER)
        await to_new.send(frame(2), "r", TIMEOUT_S)
        assert set(new.receiver.received) == {2}
        await to_new.close()
        await new.stop()

    on_stage(script)


# Takes frames from its parent, and sends it some without end.
_PEER = """
import asyncio, sys
from tests.workers.kv_transfer.test_nccl import Stage, frame
async def main():
    stage = Stage()
    await stage.start()
    print(stage.address, flush=True)
    sender = stage.transport.sender(sys.argv[1], "b" * 32)
    while True:
        await sender.send(frame(), "r", 20.0)
asyncio.run(main())
"""


@contextmanager
def peer_process(address: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process with a receiver, which sends to ours at `address`; and its receiver's address."""
    command = [sys.executable, "-c", _PEER, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_nothing_waits_for_a_process_that_was_killed_or_stands_still():
    async def script(stage: Stage) -> None:
        with peer_process(stage.address) as (process, address):
            sender = NcclTransport(Gloo(), stage.network, SENDER).sender(address, RECEIVER)
            await asyncio.gather(*(sender.send(frame(i), "r", TIMEOUT_S) for i in range(4)))
            await until(lambda: stage.receiver.num_waiting > 10)
            # Stands still for longer than the sender waits, and comes back.
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(DeadlineError):
                await sender.send(frame(5), "r", 0.3)
            process.send_signal(signal.SIGCONT)
            await sender.send(frame(6), "r", TIMEOUT_S)
            # Dies between two sides that wait for it.
            process.send_signal(signal.SIGSTOP)
            sends = [asyncio.create_task(sender.send(frame(i, bytes(8 << 20)), "r", TIMEOUT_S)) for i in range(4)]
            await asyncio.sleep(0.1)
            process.kill()
            async with asyncio.timeout(2.0):
                results = await asyncio.gather(*sends, return_exceptions=True)
            assert {type(result) for result in results} == {UnavailableError}
            await until(lambda: not stage.pairs, within_s=2.0)
            with suppress(UnavailableError):
                await sender.send(frame(7), "r", 0.5)
            await sender.close()

    on_stage(script)


def test_a_process_that_closes_nothing_ends_all_the_same():
    script = """
import asyncio
from tests.workers.kv_transfer.test_nccl import Stage, frame
async def main():
    stage = Stage()
    await stage.start()
    await stage.sender.send(frame(), "r", 20.0)
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60.0, capture_output=True)
