"""Frames that could not be sent are free at once, not when Python next looks for cycles: they are large."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress
from typing import Any, cast

from tests.factories import make_config, make_request
from tests.fake_model import HashRunner
from workers.config import TransferConfig
from workers.engine.executor import Executor
from workers.errors import StaleGrantError
from workers.kv_transfer.base import Grant
from workers.kv_transfer.outgoing import FrameSender, Outgoing
from workers.kv_transfer.peers import Peer


class Packed:
    """A frame."""


class Gone:
    """A peer that has ended every grant."""

    frame_scale = 1

    def __init__(self, runner: HashRunner) -> None:
        self.layout = runner.layout
        self.window = asyncio.Semaphore(4)
        self.packed: list[weakref.ref[Packed]] = []

    def pack(self, frame: Any) -> Packed:
        packed = Packed()
        self.packed.append(weakref.ref(packed))
        return packed

    async def send(self, packed: Packed) -> None:
        await asyncio.sleep(0.001)
        raise StaleGrantError("no more")


def test_what_was_packed_goes_with_the_error() -> None:
    async def main() -> None:
        runner = HashRunner(make_config())
        executor, peer = Executor(runner), Gone(runner)
        config = TransferConfig.model_validate({"frame_bytes": 1024})
        request = make_request(8)
        request.block_table = [0, 1, 2, 3]
        outgoing = Outgoing(request, Grant(1, "a" * 32, "there:1", 10.0, 0, 8), cast(Peer, peer))
        gc.disable()
        try:
            with suppress(StaleGrantError):  # pytest.raises would keep it.
                await FrameSender(executor, runner.layout, config).send(outgoing, 0, 8)
            await asyncio.sleep(0.01)
            assert peer.packed
            assert [frame() for frame in peer.packed] == [None] * len(peer.packed)
        finally:
            gc.enable()
            executor.close()

    asyncio.run(main())
