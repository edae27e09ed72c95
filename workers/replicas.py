"""Copies of the KV of running requests at a peer, kept up block by block while they grow (transfer.resume: replicate).

They make resume after a death cheap and nothing depends on them: a peer keeps a copy in its prefix cache for as long as
it has room, and a copy that is refused or fails is tried again later.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from protos import kv_transfer_pb2 as pb
from workers.config import TransferConfig
from workers.engine.engine import Engine
from workers.errors import KVFerryError, OverloadedError
from workers.kv_transfer.base import Grant
from workers.kv_transfer.outgoing import FrameSender, Outgoing
from workers.kv_transfer.peers import Peer, Peers
from workers.request import Request, SamplingParams
from workers.rpc import close_quietly

logger = logging.getLogger(__name__)

# One copy moves no more than that, so that it ends well within a lease and hand-offs get between.
_MAX_TOKENS = 512
# After a copy that was refused or failed, its request waits so long for the next.
_RETRY_S = 1.0


@dataclass(slots=True, eq=False)
class Replica:
    """What the peer was last heard to have of one running request: its first `num_blocks` blocks, counted as here."""

    num_blocks: int = 0
    not_before_s: float = 0.0
    copying: asyncio.Task[None] | None = None


class Replicas:
    def __init__(self, engine: Engine, peers: Peers, frames: FrameSender, config: TransferConfig) -> None:
        self._engine = engine
        self._peers = peers
        self._frames = frames
        self._config = config
        self._block_size = engine.block_manager.block_size
        # Of what runs, and of what is being copied.
        self._replicas: dict[Request, Replica] = {}
        self._num_copies = 0
        self.num_bytes_kept = 0
        self.num_refused = 0

    def advance(self) -> None:
        """After a step: begin to copy what has grown by a block or more, that which is most behind first."""
        if self._config.resume != "replicate":
            return
        copying = {request: replica for request, replica in self._replicas.items() if replica.copying}
        running = [request for request in self._engine.scheduler.running if request.replica_address]
        self._replicas = {request: self._replicas.get(request, Replica()) for request in running} | copying
        now = _now()
        due = [r for r in running if r not in copying and self._replicas[r].not_before_s <= now]
        due = sorted((r for r in due if self._num_behind(r) > 0), key=self._num_behind, reverse=True)
        if not self._engine.block_manager.can_allocate(len(running)):
            return  # What is preempted to make room must give its blocks at once, and a copy holds them.
        for request in due[: self._config.max_num_replicas - len(copying)]:
            self._begin(request, self._replicas[request])

    async def close(self) -> None:
        for replica in self._replicas.values():
            await close_quietly(replica.copying)

    def _num_behind(self, request: Request) -> int:
        """Whole blocks that the replica does not have."""
        return request.num_computed_tokens // self._block_size - self._replicas[request].num_blocks

    def _begin(self, request: Request, replica: Replica) -> None:
        num_new = min(self._num_behind(request), max(1, _MAX_TOKENS // self._block_size))
        copy = self._copy_of(request, replica.num_blocks + num_new)
        # They are its own too while they are read: the request may end or be preempted meanwhile.
        self._engine.hold(copy)
        replica.copying = asyncio.create_task(
            self._copy(copy, replica, request.replica_address), name=f"copy {copy.request_id}"
        )
        replica.copying.add_done_callback(lambda _: self._end(copy, replica))

    def _copy_of(self, request: Request, num_blocks: int) -> Request:
        """The request of which these blocks are all, under an id of its own."""
        self._num_copies += 1
        num_tokens = num_blocks * self._block_size
        return Request(
            f"{request.request_id}/copy-{self._num_copies}",
            list(request.tokens(0, num_tokens)),
            SamplingParams(),
            cache_salt=request.cache_salt,
            num_computed_tokens=num_tokens,
            block_table=request.block_table[:num_blocks],
        )

    def _end(self, copy: Request, replica: Replica) -> None:
        replica.copying = None
        self._engine.release(copy)

    async def _copy(self, copy: Request, replica: Replica, address: str) -> None:
        # Until it is there. Whatever the peer has, its next grant tells.
        replica.num_blocks, replica.not_before_s = 0, _now() + _RETRY_S
        try:
            await self._send(copy, address)
            replica.num_blocks, replica.not_before_s = len(copy.block_table), 0.0
        except KVFerryError as error:
            self.num_refused += isinstance(error, OverloadedError)
            extra = {"request_id": copy.request_id}
            logger.info("%s: no copy at %s: %s", copy.request_id, address, error.message, extra=extra)

    async def _send(self, copy: Request, address: str) -> None:
        asked = await self._peers.at(address)
        grant = await asked.reserve_replica(copy)
        try:
            peer = await self._peers.get(grant)
            outgoing = Outgoing(copy, grant, peer)
            if grant.end - grant.start > max(_MAX_TOKENS, self._block_size):
                raise OverloadedError("the peer has given its copy away, for want of room or with its life")
            await self._frames.send(outgoing, grant.start, grant.end)
            await peer.commit(_commit_of(outgoing))
        except KVFerryError:
            await self._give_back(grant, asked)
            raise
        self.num_bytes_kept += outgoing.num_bytes

    async def _give_back(self, grant: Grant, peer: Peer) -> None:
        try:
            await peer.release(grant.grant_id, "")
        except KVFerryError as error:
            logger.info("grant %d ends by its lease: %s", grant.grant_id, error.message)


def _commit_of(outgoing: Outgoing) -> pb.CommitRequest:
    return pb.CommitRequest(
        grant_id=outgoing.grant.grant_id,
        incarnation=outgoing.grant.incarnation,
        num_frames=outgoing.num_frames,
        num_bytes=outgoing.num_bytes,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
