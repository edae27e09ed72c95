"""The decode half of a worker: reserve -> receive -> verify -> commit. After that the engine does the rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

from protos import kv_transfer_pb2 as pb
from workers.config import TransferConfig
from workers.engine.engine import Engine
from workers.errors import AbortedError, DeadlineError, FrameError, KVFerryError, OverloadedError, StaleGrantError
from workers.grant_room import num_grant_blocks, require_room
from workers.hand_off import HandOff, HandOffCounts
from workers.kv_transfer import frame as frames
from workers.kv_transfer.base import Grant
from workers.kv_transfer.frame import Buffer, Digest, Frame
from workers.kv_transfer.incoming import write_frame
from workers.kv_transfer.kv_rows import KVRows
from workers.kv_transfer.layout import KVLayout
from workers.kv_transfer.slots import slots_of
from workers.request import Request
from workers.timeline import Timeline

logger = logging.getLogger(__name__)

OnFailure = Callable[[Request, KVFerryError], None]


class Decode:
    """Owns the grants of this worker, and fences every write with them."""

    def __init__(
        self, engine: Engine, layout: KVLayout, incarnation: str, config: TransferConfig, on_failure: OnFailure
    ) -> None:
        self._engine = engine
        self._layout = layout
        self._incarnation = incarnation
        self._config = config
        self._max_blocks = num_grant_blocks(config, engine)
        self._on_failure = on_failure
        self._hand_offs: dict[int, HandOff] = {}
        # Ended while a write was under way: their blocks are free when it is over.
        self._quarantined: dict[int, HandOff] = {}
        self._num_grants = 0
        self.num_frames_received = 0
        self.num_bytes_received = 0
        self.counts = HandOffCounts()

    @property
    def num_grants(self) -> int:
        """Of hand-offs, not of copies."""
        return len(self._hand_offs) - len(self._replicas)

    @property
    def quarantined(self) -> list[Request]:
        return [hand_off.request for hand_off in self._quarantined.values()]

    @property
    def replicas(self) -> list[Request]:
        """Copies of others' KV, on their way."""
        return [hand_off.request for hand_off in self._replicas]

    def reserve(self, request: Request, address: str) -> Grant:
        """Take room for the KV of all tokens of `request`. What of it is to come, the grant tells.

        Raises OverloadedError when there is none, InvalidRequestError when there never will be.
        """
        require_room(request, self._engine, self._max_blocks)
        try:
            self._take_room(request)
        except OverloadedError:
            self.counts.num_refused += 1
            raise
        self.counts.num_started += 1
        return self._grant(request, address).grant

    def _take_room(self, request: Request) -> None:
        num_grants = self.num_grants
        if num_grants >= self._config.max_num_grants:
            raise OverloadedError(f"{num_grants} hand-offs are under way: the most of transfer.max_num_grants")
        try:
            self._engine.reserve(request, self._max_blocks)
        except OverloadedError:
            if not self._replicas:
                raise
            for replica in self._replicas:
                self._end(replica)
            self._engine.reserve(request, self._max_blocks)

    def reserve_replica(self, request: Request, address: str) -> Grant:
        """Take room for a copy of the KV of `request`, whole blocks of it. It gives way to hand-offs.

        Raises OverloadedError when there is none.
        """
        if len(self._replicas) >= self._config.max_num_replicas:
            raise OverloadedError(f"{len(self._replicas)} copies are under way: the most of transfer.max_num_replicas")
        block_size = self._engine.block_manager.block_size
        del request.prompt_token_ids[request.num_tokens // block_size * block_size :]
        request.num_cached_tokens = 0  # No prompt of a client: neither hit nor miss.
        self._engine.reserve(request, self._max_blocks)
        hand_off = self._grant(request, address)
        hand_off.is_replica = True
        return hand_off.grant

    @property
    def _replicas(self) -> list[HandOff]:
        return [h for h in self._hand_offs.values() if h.is_replica]

    def _grant(self, request: Request, address: str) -> HandOff:
        self._num_grants += 1
        grant = Grant(
            self._num_grants,
            self._incarnation,
            address,
            self._config.lease_s,
            request.num_computed_tokens,
            self._engine.prefix_cache.num_shareable(request),
        )
        hand_off = self._hand_offs[grant.grant_id] = HandOff(grant, request, self._lease(grant.grant_id))
        return hand_off

    async def receive(self, data: Buffer, elsewhere: KVRows | None = None) -> None:
        """Verify an encoded frame and put its KV into the blocks of its grant. Raises FrameError, StaleGrantError."""
        try:
            await self._receive(data, elsewhere)
        except KVFerryError as error:
            self.counts.num_frames_refused[type(error).__name__] += 1
            raise

    async def _receive(self, data: Buffer, elsewhere: KVRows | None) -> None:
        frame, checksum = frames.decode(data, elsewhere)
        hand_off = self._find(frame.grant_id, frame.incarnation)
        self._require_inside(frame, hand_off.grant)
        same_range = next((other for other in hand_off.received if frame.same_range(other)), None)
        if same_range is None:
            if any(frame.overlaps(other) for other in hand_off.received):
                raise FrameError(f"KV of request {hand_off.request.request_id} overlaps what is there already")
            writing = self._write(frame, checksum, hand_off)
        elif same_range in hand_off.writing:
            writing = hand_off.writing[same_range]
        else:
            return  # Sent again because our answer was lost.
        # Shielded: a copy that has begun can't be called back, so its blocks stay ours until it is over.
        await asyncio.shield(writing)
        if frame.grant_id not in self._hand_offs:
            raise StaleGrantError(f"grant {frame.grant_id} ended while its KV was being written")

    def commit(self, message: pb.CommitRequest) -> None:
        """The hand-off is complete: the request joins the next step. Raises FrameError when it is not, ending it."""
        hand_off = self._find(message.grant_id, message.incarnation)
        grant = hand_off.grant
        area = sum(frame.area for frame in hand_off.received)
        complete = area == (grant.end - grant.start) * self._layout.num_layers and not hand_off.writing
        if not complete or (message.num_frames, message.num_bytes) != (len(hand_off.received), hand_off.num_bytes):
            error = FrameError(
                f"KV of request {hand_off.request.request_id} is incomplete: {len(hand_off.received)} frames of "
                f"{hand_off.num_bytes} bytes came, {message.num_frames} of {message.num_bytes} were sent"
            )
            self._fail(hand_off, error)
            raise error
        self._verify_choices(message.first_token_ids, hand_off)
        self._forget(hand_off)
        self.counts.num_committed += not hand_off.is_replica
        hand_off.request.hand_off = Timeline(
            transfer_s=message.transfer_s, transfer_unhidden_s=message.transfer_unhidden_s
        )
        self._engine.commit(hand_off.request, message.first_token_ids)

    def release(self, message: pb.ReleaseRequest) -> None:
        """The sender gives up, or has nothing to send. A grant that is no more is no error."""
        hand_off = self._hand_offs.get(message.grant_id)
        if hand_off is None or message.incarnation != self._incarnation:
            return
        if message.reason:
            self._fail(hand_off, FrameError(f"the hand-off was given up: {message.reason}"))
        else:
            self._end(hand_off)
            self.counts.num_released += not hand_off.is_replica

    def renew(self, message: pb.RenewRequest) -> list[int]:
        """Let the leases of these grants begin anew; those that are no more."""
        if message.incarnation != self._incarnation:
            return list(message.grant_ids)
        lost = []
        for grant_id in message.grant_ids:
            if hand_off := self._hand_offs.get(grant_id):
                hand_off.lease.cancel()
                hand_off.lease = self._lease(grant_id)
            else:
                lost.append(grant_id)
        return lost

    def abort(self, request_id: str) -> bool:
        """End the hand-off of a request; False when it has none."""
        hand_off = next((h for h in self._hand_offs.values() if h.request.request_id == request_id), None)
        if hand_off is None:
            return False
        self.counts.failed(hand_off, AbortedError)
        self._end(hand_off)
        return True

    def close(self) -> None:
        for hand_off in list(self._hand_offs.values()):
            self._end(hand_off)

    def _find(self, grant_id: int, incarnation: str) -> HandOff:
        if incarnation != self._incarnation:
            raise StaleGrantError(f"grant {grant_id} is of incarnation {incarnation}; this is {self._incarnation}")
        hand_off = self._hand_offs.get(grant_id)
        if hand_off is None:
            raise StaleGrantError(f"grant {grant_id} is no more: committed, released, aborted or expired")
        return hand_off

    def _require_inside(self, frame: Frame, grant: Grant) -> None:
        inside = grant.start <= frame.token_start and frame.token_end <= grant.end
        if not inside or frame.layer_end > self._layout.num_layers:
            raise FrameError(
                f"layers [{frame.layer_start}, {frame.layer_end}), tokens [{frame.token_start}, {frame.token_end}) lie "
                f"outside grant {grant.grant_id}: {self._layout.num_layers} layers, tokens [{grant.start}, {grant.end})"
            )
        if len(frame.payload) != frame.expected_bytes(self._layout):
            raise FrameError(
                f"a frame of {len(frame.payload)} bytes; its range has {frame.expected_bytes(self._layout)}"
            )

    def _verify_choices(self, choices: Collection[int], hand_off: HandOff) -> None:
        request = hand_off.request
        if bool(choices) != hand_off.is_replica and all(choice in request.choices for choice in choices):
            return
        error = FrameError(
            f"token 1 of request {request.request_id} came for choices {sorted(choices)}; it has {[*request.choices]}"
        )
        self._fail(hand_off, error)
        raise error

    def _write(self, frame: Frame, checksum: int, hand_off: HandOff) -> asyncio.Future[None]:
        request, executor = hand_off.request, self._engine.executor
        slots = slots_of(request.block_table, frame.token_start, frame.token_end, self._layout.block_size)

        def verify_and_copy() -> None:
            digest = Digest(frame, request.request_id)
            if not self._config.checksum:
                digest.place(frame.payload)
                digest.require(checksum)
            write_frame(executor.runner, frame, slots, checksum, digest if self._config.checksum else None)

        header = replace(frame, payload=b"")
        hand_off.received.append(header)
        write = executor.copy(len(slots), verify_and_copy)
        writing = hand_off.writing[header] = asyncio.ensure_future(self._until_written(write, header, hand_off))
        # Nobody is left to hear its error when this call was cancelled.
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return writing

    async def _until_written(self, write: Awaitable[None], header: Frame, hand_off: HandOff) -> None:
        num_bytes = header.expected_bytes(self._layout)
        try:
            await write
            hand_off.num_bytes += num_bytes
            self.num_frames_received += 1
            self.num_bytes_received += num_bytes
        except BaseException:
            hand_off.received.remove(header)
            raise
        finally:
            del hand_off.writing[header]
            if not hand_off.writing and hand_off.grant.grant_id in self._quarantined:
                del self._quarantined[hand_off.grant.grant_id]
                self._engine.release(hand_off.request)

    def _lease(self, grant_id: int) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._config.lease_s, self._expire, grant_id)

    def _expire(self, grant_id: int) -> None:
        hand_off = self._hand_offs[grant_id]
        message = f"no KV of request {hand_off.request.request_id} within the lease of {self._config.lease_s} s"
        request_id = hand_off.request.request_id
        logger.warning("%s: %s", request_id, message, extra={"request_id": request_id})
        self.counts.num_expired += not hand_off.is_replica
        self._fail(hand_off, DeadlineError(message))

    def _fail(self, hand_off: HandOff, error: KVFerryError) -> None:
        self._end(hand_off)
        self.counts.failed(hand_off, type(error))
        if not hand_off.is_replica:
            self._on_failure(hand_off.request, error)

    def _end(self, hand_off: HandOff) -> None:
        self._forget(hand_off)
        if hand_off.writing:
            hand_off.request.hold_blocks = True
            self._quarantined[hand_off.grant.grant_id] = hand_off
        self._engine.abort(hand_off.request.request_id)

    def _forget(self, hand_off: HandOff) -> None:
        hand_off.lease.cancel()
        del self._hand_offs[hand_off.grant.grant_id]
