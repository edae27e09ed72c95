"""What is left of a group when either side closes, is replaced, stands still or dies: nothing that waits."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests.workers.kv_transfer.groups import (
    OTHER,
    RECEIVER,
    SENDER,
    TIMEOUT_S,
    Stage,
    frame,
    on_stage,
    until,
)
from tests.workers.kv_transfer.unsent import send_frame
from workers.errors import DeadlineError, UnavailableError
from workers.kv_transfer.nccl import NcclTransport
from workers.kv_transfer.pair_group import RECEIVER as RECEIVER_RANK
from workers.kv_transfer.pair_group import Gloo


def test_closing_the_sender_ends_its_sends_and_its_groups():
    async def script(stage: Stage) -> None:
        stage.receiver.open.clear()
        sends = [asyncio.create_task(send_frame(stage.sender, frame(i), "r", TIMEOUT_S)) for i in range(4)]
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
        sending = asyncio.create_task(send_frame(stage.sender, frame(), "r", TIMEOUT_S))
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
        sends = [asyncio.create_task(send_frame(stage.sender, frame(i), "r", TIMEOUT_S)) for i in range(4)]
        await until(lambda: stage.receiver.num_waiting == 4)
        await stage._server.stop(None)
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert {type(result) for result in results} == {UnavailableError}
        new = Stage(OTHER)
        await new.start(port=int(stage.address.rsplit(":", 1)[1]))
        with pytest.raises(UnavailableError, match=f"{RECEIVER} is no more"):
            await send_frame(new.sender, frame(1), "r", TIMEOUT_S)
        to_new = NcclTransport(Gloo(), new.network, SENDER).sender(new.address, OTHER)
        await send_frame(to_new, frame(2), "r", TIMEOUT_S)
        assert set(new.receiver.received) == {2}
        await to_new.close()
        await new.stop()

    on_stage(script)


# Takes frames from its parent, and sends it some without end.
_PEER = """
import asyncio, sys
from tests.workers.kv_transfer.groups import Stage, frame
from tests.workers.kv_transfer.unsent import send_frame
async def main():
    stage = Stage()
    await stage.start()
    print(stage.address, flush=True)
    sender = stage.transport.sender(sys.argv[1], "b" * 32)
    while True:
        await send_frame(sender, frame(), "r", 20.0)
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
            await asyncio.gather(*(send_frame(sender, frame(i), "r", TIMEOUT_S) for i in range(4)))
            await until(lambda: stage.receiver.num_waiting > 10)
            # Stands still for longer than the sender waits, and comes back.
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(DeadlineError):
                await send_frame(sender, frame(5), "r", 0.3)
            process.send_signal(signal.SIGCONT)
            await send_frame(sender, frame(6), "r", TIMEOUT_S)
            # Dies between two sides that wait for it.
            process.send_signal(signal.SIGSTOP)
            sends = [
                asyncio.create_task(send_frame(sender, frame(i, bytes(8 << 20)), "r", TIMEOUT_S)) for i in range(4)
            ]
            await asyncio.sleep(0.1)
            process.kill()
            async with asyncio.timeout(2.0):
                results = await asyncio.gather(*sends, return_exceptions=True)
            assert {type(result) for result in results} == {UnavailableError}
            await until(lambda: not stage.pairs, within_s=2.0)
            with suppress(UnavailableError):
                await send_frame(sender, frame(7), "r", 0.5)
            await sender.close()

    on_stage(script)


def test_a_process_that_closes_nothing_ends_all_the_same():
    script = """
import asyncio
from tests.workers.kv_transfer.groups import Stage, frame
from tests.workers.kv_transfer.unsent import send_frame
async def main():
    stage = Stage()
    await stage.start()
    await send_frame(stage.sender, frame(), "r", 20.0)
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60.0, capture_output=True)
