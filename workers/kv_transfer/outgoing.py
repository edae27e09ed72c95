"""KV out of this worker's pool and on its way to a grant, cut into frames."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial

from workers.buckets import Buckets
from workers.config import TransferConfig
from workers.engine.executor import Executor
from workers.errors import KVFerryError
from workers.kv_transfer.base import Grant
from workers.kv_transfer.frame import Frame, UnsentFrame, ranges_of_frames
from workers.kv_transfer.kv_rows import KVRows
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.peers import Peer
from workers.kv_transfer.slots import Slots, slots_of
from workers.request import Request

_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


@dataclass(slots=True, eq=False)
class Outgoing:
    """The KV of one request for one grant, and what of it was acknowledged. Its blocks stay as they are meanwhile."""

    request: Request
    grant: Grant
    peer: Peer
    _: KW_ONLY
    num_frames: int = 0
    num_bytes: int = 0
    began_s: float | None = None


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
        # Of whole hand-offs, in seconds: all of it, and what of it prefill did not hide.
        self.transfer_s = Buckets(_BOUNDS_S)
        self.transfer_unhidden_s = Buckets(_BOUNDS_S)
        # Hand-offs whose KV did not get through, by the class of the error.
        self.num_failed: Counter[str] = Counter()

    async def send(self, outgoing: Outgoing, start: int, end: int) -> None:
        """Send positions [start, end), several frames at a time; return when all are acknowledged.

        Raises the first KVFerryError, with no frame under way any more.
        """
        failed: list[KVFerryError] = []
        try:
            async with asyncio.TaskGroup() as sends:
                for layers, tokens in self._ranges(outgoing.peer, start, end):
                    sends.create_task(self._send(outgoing, layers, tokens))
        except* KVFerryError as group:
            failed.append(first_error(group))
        if failed:
            # Raised in there, Python before 3.11.4 would make a group of it.
            raise failed.pop()

    def _ranges(self, peer: Peer, start: int, end: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        return ranges_of_frames(peer.layout, start, end, self._config.frame_bytes * peer.frame_scale)

    async def _send(self, outgoing: Outgoing, layers: tuple[int, int], tokens: tuple[int, int]) -> None:
        request, grant = outgoing.request, outgoing.grant
        frame = Frame(grant.grant_id, grant.incarnation, *layers, *tokens)
        num_bytes = frame.expected_bytes(outgoing.peer.layout)
        # Taken in here: a task that is cancelled before its first step could not give it back.
        async with outgoing.peer.window:
            slots = slots_of(request.block_table, *tokens, self._layout.block_size)
            unsent = self._unsent(frame, outgoing, slots)
            if outgoing.began_s is None:
                outgoing.began_s = asyncio.get_running_loop().time()
            packed = await self._executor.copy(len(slots), partial(outgoing.peer.pack, unsent))
            self.num_frames_overlapped += request.num_computed_tokens < grant.end
            try:
                await outgoing.peer.send(packed)
            except KVFerryError as error:
                # Groups of tasks keep what is raised in a cycle: without the calls that hold what was packed.
                raise error.with_traceback(None) from None
            finally:
                del packed
        outgoing.num_frames += 1
        outgoing.num_bytes += num_bytes
        self.num_frames_sent += 1
        self.num_bytes_sent += num_bytes

    def _unsent(self, frame: Frame, outgoing: Outgoing, slots: Slots) -> UnsentFrame:
        runner, layout = self._executor.runner, outgoing.peer.layout
        layers = frame.layer_start, frame.layer_end

        def locate() -> KVRows | None:
            as_it_is = layout.dtype == self._layout.dtype
            return runner.host_pool.locate(slots, *layers) if as_it_is and runner.host_pool else None

        return UnsentFrame(
            frame,
            outgoing.request.request_id,
            frame.expected_bytes(layout),
            partial(runner.read_kv, slots, *layers, dtype=layout.dtype),
            self._config.checksum,
            locate,
        )


def first_error(group: BaseExceptionGroup[KVFerryError]) -> KVFerryError:
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
