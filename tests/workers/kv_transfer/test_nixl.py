"""NIXL between two agents over UCX, without a GPU; skipped without kvferry[nixl]."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.workers.kv_transfer.groups import OTHER, RECEIVER, SENDER, TIMEOUT_S, Receiver, frame, until
from tests.workers.kv_transfer.unsent import send_frame
from workers.errors import ConfigError, DeadlineError, FrameError, StaleGrantError, UnavailableError
from workers.kv_transfer.nixl import AgentSession, NixlTransport
from workers.rpc import GrpcNetwork

HAS_NIXL = importlib.util.find_spec("nixl") is not None
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="needs NIXL: pip install 'kvferry[nixl]'")


class Stage:
    """A receiver behind a gRPC server, and a sender to it."""

    def __init__(self, incarnation: str = RECEIVER) -> None:
        self.network = GrpcNetwork()
        self.receiver = Receiver()
        self.transport = NixlTransport(self.network, incarnation)
        self.server = self.network.server()
        self.transport.serve(self.receiver, self.server)

    async def start(self, port: int = 0) -> None:
        self.address = await self.network.listen(self.server, "127.0.0.1", port)
        self.sender = NixlTransport(self.network, SENDER).sender(self.address, RECEIVER)

    async def stop(self) -> None:
        await self.sender.close()
        await self.server.stop(None)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def on_stage(script: Callable[[Stage], Awaitable[Any]]) -> None:
    """Run `script`; afterwards no agent may be left."""

    async def main() -> None:
        stage = Stage()
        await stage.start()
        try:
            await script(stage)
        finally:
            await stage.stop()
        await until(lambda: not stage.transport._reading)

    asyncio.run(main())


@pytest.mark.skipif(HAS_NIXL, reason="needs a machine without NIXL")
def test_without_nixl_it_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"No module named 'nixl'\); pip install 'kvferry\[nixl\]'") as caught:
        NixlTransport(GrpcNetwork(), SENDER)
    assert caught.value.param == "transfer.transport"


@needs_nixl
def test_frames_are_read_out_of_the_senders_memory():
    async def script(stage: Stage) -> None:
        payloads = {i: bytes([i]) * size for i, size in enumerate((16, 1 << 20, 48, 5 << 20, 1 << 20))}
        for number, payload in payloads.items():
            await send_frame(stage.sender, frame(number, payload), "r", TIMEOUT_S)
        assert stage.receiver.received == payloads
        several = {i: bytes([i]) * (1 << 20) for i in range(10, 22)}
        await asyncio.gather(*(send_frame(stage.sender, frame(i, p), "r", TIMEOUT_S) for i, p in several.items()))
        assert stage.receiver.received == payloads | several

    on_stage(script)


@needs_nixl
def test_what_is_refused_or_cancelled_costs_no_other_frame(monkeypatch):
    async def script(stage: Stage) -> None:
        with pytest.raises(FrameError, match="checksum"):
            await send_frame(stage.sender, frame(), "another request", TIMEOUT_S)
        with pytest.raises(StaleGrantError, match="no more"):
            await send_frame(stage.sender, frame(99), "r", TIMEOUT_S)
        sends = [asyncio.create_task(send_frame(stage.sender, frame(i), "r", TIMEOUT_S)) for i in range(6)]
        await asyncio.sleep(0)
        sends[0].cancel()
        sends[3].cancel()
        await asyncio.gather(*sends, return_exceptions=True)
        assert {1, 2, 4, 5} <= set(stage.receiver.received)
        assert [pair.number for pair in stage.transport._reading] == [0]

    on_stage(script)


@needs_nixl
def test_after_a_missed_deadline_the_agents_are_others():
    async def script(stage: Stage) -> None:
        await send_frame(stage.sender, frame(1), "r", TIMEOUT_S)
        stage.receiver.open.clear()
        with pytest.raises(DeadlineError):
            await send_frame(stage.sender, frame(2), "r", 0.1)
        stage.receiver.open.set()
        await send_frame(stage.sender, frame(3), "r", TIMEOUT_S)
        assert set(stage.receiver.received) >= {1, 3}
        await until(lambda: [pair.number for pair in stage.transport._reading] == [1])

    on_stage(script)


@needs_nixl
def test_a_restarted_receiver_is_another_peer_and_nothing_of_the_first_is_left():
    async def script(stage: Stage) -> None:
        before = num_threads()
        stage.receiver.open.clear()
        sends = [asyncio.create_task(send_frame(stage.sender, frame(i), "r", TIMEOUT_S)) for i in range(4)]
        await until(lambda: stage.receiver.num_waiting == 4)
        await stage.server.stop(None)
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert {type(result) for result in results} == {UnavailableError}
        await until(lambda: num_threads() <= before + 1)
        new = Stage(OTHER)
        await new.start(port=int(stage.address.rsplit(":", 1)[1]))
        with pytest.raises(UnavailableError, match=f"{RECEIVER} is no more"):
            await send_frame(new.sender, frame(1), "r", TIMEOUT_S)
        to_new = NixlTransport(new.network, SENDER).sender(new.address, OTHER)
        await send_frame(to_new, frame(2), "r", TIMEOUT_S)
        assert set(new.receiver.received) == {2}
        await to_new.close()
        await new.stop()

    on_stage(script)


# Sends to its parent without end.
_PEER = """
import asyncio, sys
from tests.workers.kv_transfer.test_nixl import *
async def main():
    sender = NixlTransport(GrpcNetwork(), "d" * 32).sender(sys.argv[1], RECEIVER)
    while True:
        await send_frame(sender, frame(7, bytes(4 << 20)), "r", 20.0)
asyncio.run(main())
"""


@contextmanager
def peer_process(address: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", _PEER, address]) as process:
        try:
            yield process
        finally:
            process.kill()


@needs_nixl
def test_nothing_waits_for_a_process_that_was_killed_in_the_middle():
    async def script(stage: Stage) -> None:
        before = num_threads()
        with peer_process(stage.address) as process:
            await until(lambda: stage.receiver.num_waiting > 5, within_s=30.0)
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.1)
            process.kill()
            await until(lambda: not stage.transport._reading, within_s=3.0)
            await until(lambda: num_threads() <= before, within_s=3.0)
        await send_frame(stage.sender, frame(1), "r", TIMEOUT_S)
        session = stage.sender._session
        assert isinstance(session, AgentSession)
        assert not session.ended

    on_stage(script)
