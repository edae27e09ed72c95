"""KV out of this worker's pool and on its way to a grant, cut into frames."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

from workers.config import TransferConfig
from workers.engine.executor import Executor
from workers.errors import KVFerryError
from workers.kv_transfer.base import Grant
from workers.kv_transfer.frame import Frame, layers_per_frame
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.peers import Peer
from workers.kv_transfer.slots import slots_of
from workers.request import Request


@dataclass(slots=True, eq=False)
class Outgoing:
    """The KV of one request for one grant, and what of it was acknowledged. Its blocks stay as they are meanwhile."""

    request: Request
    grant: Grant
    peer: Peer
    _: KW_ONLY
    num_frames: int = 0
    num_bytes: int = 0
    first_sent_s: float | None = None


class FrameSender:
    """As many frames are in flight to a peer as it gave credits for, whoever sends them."""

    def __init__(self, executor: Executor, layout: KVLayout, config: TransferConfig) -> None:
        self._executor = executor
        self._layout = layout
        self._config = config
        self.num_frames_sent = 0
        # Sent while their prompt still had tokens to compute.
        self.num_frames_overlapped = 0
        self.num_bytes_sent = 0

    async def send(self, outgoing: Outgoing, start: int, end: int) -> None:
        """Send positions [start, end), several frames at a time; return when all are acknowledged.

        Raises the first KVFerryError, with no frame under way any more.
        """
        try:
            async with asyncio.TaskGroup() as sends:
                for layers in self._layer_ranges(end - start):
                    sends.create_task(self._send(outgoing, layers, (start, end)))
        except* KVFerryError as group:
            raise first_error(group) from None

    def _layer_ranges(self, num_tokens: int) -> Iterator[tuple[int, int]]:
        if num_tokens:
            step = layers_per_frame(self._layout, num_tokens, self._config.frame_bytes)
            for start in range(0, self._layout.num_layers, step):
                yield start, min(start + step, self._layout.num_layers)

    async def _send(self, outgoing: Outgoing, layers: tuple[int, int], tokens: tuple[int, int]) -> None:
        request, grant = outgoing.request, outgoing.grant
        # Taken in here: a task that is cancelled before its first step could not give it back.
        async with outgoing.peer.window:
            slots = slots_of(request.block_table, *tokens, self._layout.block_size)
            payload = await self._executor.read_kv(slots, *layers)
            if outgoing.first_sent_s is None:
                outgoing.first_sent_s = asyncio.get_running_loop().time()
            self.num_frames_overlapped += request.num_computed_tokens < grant.end
            frame = Frame(grant.grant_id, grant.incarnation, *layers, *tokens, payload)
            await outgoing.peer.send(frame, request.request_id)
        outgoing.num_frames += 1
        outgoing.num_bytes += len(payload)
        self.num_frames_sent += 1
        self.num_bytes_sent += len(payload)


def first_error(group: BaseExceptionGroup[KVFerryError]) -> KVFerryError:
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
