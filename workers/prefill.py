"""The prefill half of a worker: admit -> step -> ship blocks as chunks finish -> token 1 -> commit -> free."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from protos import kv_transfer_pb2 as pb
from workers.config import TransferConfig
from workers.engine.engine import Engine
from workers.errors import BY_NAME, AbortedError, KVFerryError, StaleGrantError
from workers.kv_transfer.base import Grant
from workers.kv_transfer.outgoing import FrameSender, Outgoing, first_error
from workers.kv_transfer.peers import Peer, Peers
from workers.request import FinishReason, Request, RequestStatus, SamplingParams, TokenOutput
from workers.rpc import close_quietly

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Shipment(Outgoing):
    """One prompt being computed and sent at the same time."""

    # One output for each choice.
    token_1: asyncio.Future[list[TokenOutput]]
    # Set after every step, so that a waiting shipment looks at num_computed_tokens again.
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    computed_s: float = 0.0

    @property
    def num_ready(self) -> int:
        """Positions [0, num_ready) may be sent."""
        return min(self.request.num_computed_tokens, self.grant.end)


class Prefill:
    def __init__(self, engine: Engine, peers: Peers, frames: FrameSender, config: TransferConfig) -> None:
        self._engine = engine
        self._peers = peers
        self._frames = frames
        self._config = config
        self._shipments: dict[str, Shipment] = {}
        # Of shipments, until the last has given back its grant.
        self._tasks: set[asyncio.Task[None]] = set()
        self._heartbeat: asyncio.Task[None] | None = None

    async def prefill(self, request: Request, grant: Grant) -> list[TokenOutput]:
        """Compute the prompt, sending its KV to the grant's owner; token 1 of every choice, which does not wait for the
        hand-off's end.

        Cancelling it ends the request here and gives the grant back. Raises KVFerryError.
        """
        peer = await self._peers.get(grant)
        self.abort(request.request_id)  # The same, sent again while this one connected.
        if grant.end < request.num_tokens:
            _leave_answer(request)
        request.output_limit = request.num_output_tokens + 1
        request.hold_blocks = True
        token_1: asyncio.Future[list[TokenOutput]] = asyncio.get_running_loop().create_future()
        shipment = Shipment(request, grant, peer, token_1)
        self._engine.add(request)
        self._shipments[request.request_id] = shipment
        shipment.task = asyncio.create_task(self._ship(shipment), name=f"ship {request.request_id}")
        self._tasks.add(shipment.task)
        shipment.task.add_done_callback(self._tasks.discard)
        self._beat()
        try:
            return await token_1
        except asyncio.CancelledError:
            if self._shipments.get(request.request_id) is shipment:
                self.abort(request.request_id)
            raise

    def advance(self, outputs: Iterable[TokenOutput]) -> list[TokenOutput]:
        """After a step: hand token 1 to whom it belongs, wake shipments; the outputs that are not prefill's."""
        others: list[TokenOutput] = []
        ours: dict[str, list[TokenOutput]] = defaultdict(list)
        for output in outputs:
            (ours[output.request_id] if output.request_id in self._shipments else others).append(output)
        for request_id, of_choices in ours.items():
            shipment = self._shipments[request_id]
            shipment.computed_s = _now()
            first = of_choices[0]
            if first.finish_reason is FinishReason.ERROR:
                self.fail(request_id, BY_NAME.get(first.error_type, KVFerryError)(first.error_message))
            elif not shipment.token_1.done():
                shipment.token_1.set_result(of_choices)
        for shipment in self._shipments.values():
            shipment.progress.set()
        return others

    def abort(self, request_id: str) -> bool:
        """End a request and its shipment; False when it has none."""
        shipment = self._shipments.pop(request_id, None)
        if shipment is None:
            return False
        # Its blocks stay held until the shipment's task has ended.
        self._engine.abort(request_id)
        if shipment.task is not None:
            # Not now: a task that is cancelled before its first step never reaches its finally.
            asyncio.get_running_loop().call_soon(shipment.task.cancel)
        return True

    def fail(self, request_id: str, error: KVFerryError) -> bool:
        """The engine lost the request; False when it is not prefill's."""
        shipment = self._shipments.get(request_id)
        if shipment is None:
            return False
        if not shipment.token_1.done():
            shipment.token_1.set_exception(error)
        return self.abort(request_id)

    async def close(self) -> None:
        await close_quietly(self._heartbeat)
        for shipment in self._shipments.values():
            if shipment.task is not None:
                shipment.task.cancel()
        # With those that were aborted before: all give back at once.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ship(self, shipment: Shipment) -> None:
        request, reason = shipment.request, "internal error"
        try:
            await self._send_all(shipment)
            reason = await self._finish(shipment)
        except asyncio.CancelledError:
            reason = "aborted"
            raise
        except KVFerryError as error:
            reason = f"{type(error).__name__}: {error.message}"
            self._frames.num_failed[type(error).__name__] += 1
            logger.warning(
                "%s: hand-off failed: %s", request.request_id, reason, extra={"request_id": request.request_id}
            )
            if not shipment.token_1.done():
                shipment.token_1.set_exception(error)
        finally:
            if not shipment.token_1.done():
                shipment.token_1.set_exception(AbortedError(f"{request.request_id} was aborted"))
            self._free(shipment)
            if reason != "committed":
                await self._give_back(shipment, reason)

    async def _finish(self, shipment: Shipment) -> str:
        """Commit the hand-off, or say that there is nothing to hand over."""
        outputs = await asyncio.shield(shipment.token_1)
        running = {output.choice: output.token_ids[0] for output in outputs if output.finish_reason is None}
        if not running:
            return ""
        now = _now()
        message = pb.CommitRequest(
            grant_id=shipment.grant.grant_id,
            incarnation=shipment.grant.incarnation,
            first_token_ids=running,
            num_frames=shipment.num_frames,
            num_bytes=shipment.num_bytes,
            transfer_s=now - min(shipment.began_s or now, shipment.computed_s),
            transfer_unhidden_s=now - shipment.computed_s,
        )
        await shipment.peer.commit(message)
        self._frames.transfer_s.observe(message.transfer_s)
        self._frames.transfer_unhidden_s.observe(message.transfer_unhidden_s)
        return "committed"

    async def _send_all(self, shipment: Shipment) -> None:
        """Send [start, end) as it is computed, several frames at a time; return when all are acknowledged."""
        sent = shipment.grant.start
        failed: list[KVFerryError] = []
        try:
            async with asyncio.TaskGroup() as chunks:
                while sent < shipment.grant.end:
                    ready = await self._ready_beyond(shipment, sent)
                    chunks.create_task(self._frames.send(shipment, sent, ready))
                    sent = ready
        except* KVFerryError as group:
            failed.append(first_error(group))
        if failed:
            # Raised in there, Python before 3.11.4 would make a group of it.
            raise failed.pop()

    async def _ready_beyond(self, shipment: Shipment, sent: int) -> int:
        """How many positions may be sent, more than `sent`, once there is a credit for them: chunks that become ready
        before go together, in larger frames."""
        while shipment.num_ready <= sent:
            shipment.progress.clear()
            await shipment.progress.wait()
        async with shipment.peer.window:
            return shipment.num_ready

    def _free(self, shipment: Shipment) -> None:
        """Nothing reads its KV any more."""
        request = shipment.request
        if self._shipments.get(request.request_id) is shipment:
            del self._shipments[request.request_id]
        if request.status is not RequestStatus.FINISHED:
            self._engine.abort(request.request_id)
        self._engine.release(request)

    async def _give_back(self, shipment: Shipment, reason: str) -> None:
        try:
            await shipment.peer.release(shipment.grant.grant_id, "" if reason == "aborted" else reason)
        except KVFerryError as error:
            request_id = shipment.request.request_id
            logger.info(
                "%s: its grant ends by its lease: %s", request_id, error.message, extra={"request_id": request_id}
            )

    def _beat(self) -> None:
        if self._heartbeat is None or self._heartbeat.done():
            self._heartbeat = asyncio.create_task(self._renew_leases(), name="renew leases")

    async def _renew_leases(self) -> None:
        """Tell every peer, three times a lease, which of its grants are still wanted."""
        while self._shipments:
            await asyncio.sleep(min(shipment.grant.lease_s for shipment in self._shipments.values()) / 3)
            by_peer: dict[Peer, list[Shipment]] = defaultdict(list)
            for shipment in self._shipments.values():
                by_peer[shipment.peer].append(shipment)
            await asyncio.gather(*(self._renew(peer, shipments) for peer, shipments in by_peer.items()))

    async def _renew(self, peer: Peer, shipments: list[Shipment]) -> None:
        try:
            # A peer that does not answer must not cost the others their leases.
            timeout_s = min(self._config.rpc_timeout_s, shipments[0].grant.lease_s / 3)
            lost = set(await peer.renew((s.grant.grant_id for s in shipments), timeout_s))
        except KVFerryError as error:
            logger.warning("leases not renewed at %s: %s", peer.incarnation, error.message)
            return
        for shipment in shipments:
            still_here = self._shipments.get(shipment.request.request_id) is shipment
            if shipment.grant.grant_id in lost and still_here:
                self.fail(shipment.request.request_id, StaleGrantError(f"grant {shipment.grant.grant_id} is no more"))


def _leave_answer(request: Request) -> None:
    """Only its prompt is wanted: whoever decodes computes the answer so far anew, with weights of its own.

    Token 1 is sampled all the same, and nobody reads it. Nothing of it may end the hand-off.
    """
    request.output_token_ids = []
    request.params = SamplingParams(temperature=0.0, ignore_eos=True)


def _now() -> float:
    return asyncio.get_running_loop().time()
