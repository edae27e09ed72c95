"""One worker as a router sees it: its channel, its latest stats, and the requests that wait for its outputs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import grpc.aio

from protos import router_pb2, worker_pb2, worker_pb2_grpc
from router.config import RouterConfig
from router.outputs import Outputs
from router.prediction import Pace
from router.roles import Member, require_expected
from router.waits import Failable, RemoteCall, StillLimit, Wait, Waits
from workers.errors import ConfigError, DeadlineError, KVFerryError, UnavailableError
from workers.request import Request, TokenOutput
from workers.rpc import Network, call, close_quietly, error_from_rpc
from workers.wire import output_from_pb, request_to_pb

logger = logging.getLogger(__name__)

STOPPING = "the router is stopping; send the request again"

# Heartbeats. The last has half a heartbeat to be answered: a worker that stops right after one is known to be gone well
# within four.
_MAX_MISSES = 3
_RECONNECT_S = 0.1


class WorkerHandle:
    """Watches one address: heartbeats tell who is there, the output stream tells at once when it is gone."""

    def __init__(self, address: str, router_id: str, config: RouterConfig, network: Network) -> None:
        self.address = address
        # Why what answers is not served by; empty: it is, or nothing answers.
        self.refused = ""
        self.member = Member()
        self.stats = worker_pb2.WorkerStats()
        self.pace = Pace()
        # Prompt tokens sent for prefill whose token 1 has not come back.
        self.num_queued_tokens = 0
        # Of requests that are being placed: their prompts' tokens, if it is here that they are to be computed, how many
        # are to be decoded here, and how many sequences of those are jobs'.
        self.num_asked_tokens = 0
        self.num_asked = 0
        self.num_asked_jobs = 0
        # Set when something may have changed for those who wait for room.
        self.changed = asyncio.Event()
        # On the event loop's clock; None: it is there.
        self.gone_since_s: float | None = 0.0
        self._router_id = router_id
        self._config = config
        self._channel = network.connect(address, multiplexed=True)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._outputs: dict[str, Outputs] = {}
        # How many sequences each prompt of a job has here.
        self._jobs: dict[str, int] = {}
        # What else ends when it is lost.
        self._waits = Waits()
        # Requests that it may still be at work on, since their abort did not reach it. A dict for a set: in order.
        self._unheard_aborts: dict[str, None] = {}
        self._misses = _MAX_MISSES
        self._streaming = False
        self._first_contact = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return when the worker answers and streams, or has had time to."""
        self.gone_since_s = _now()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]
        try:
            async with asyncio.timeout(self._config.rpc_timeout_s):
                await self._first_contact.wait()
        except TimeoutError:
            logger.warning("%s", self.refused or f"worker at {self.address} does not answer yet")

    async def stop(self) -> None:
        for task in self._tasks:
            await close_quietly(task)
        self.fail_all(UnavailableError(STOPPING))
        await self._channel.close()

    @property
    def reachable(self) -> bool:
        return self._misses < _MAX_MISSES and self._streaming

    @property
    def name(self) -> str:
        return self.stats.name or self.address

    @property
    def role(self) -> str:
        return self.stats.role

    @property
    def num_requests(self) -> int:
        """That decode here, or are about to."""
        return len(self._outputs) + self.num_asked

    @property
    def num_jobs(self) -> int:
        """Sequences that are jobs' here, or are about to be."""
        return sum(self._jobs.values()) + self.num_asked_jobs

    def status(self) -> router_pb2.WorkerStatus:
        state = router_pb2.WORKER_STATE_READY if self.reachable else router_pb2.WORKER_STATE_UNREACHABLE
        return router_pb2.WorkerStatus(address=self.address, state=state, stats=self.stats, refused=self.refused)

    async def reserve(self, request: Request, replica_address: str) -> worker_pb2.Grant:
        """Raises OverloadedError when the worker has no room now."""
        message = worker_pb2.ReserveRequest(request=request_to_pb(request), replica_address=replica_address)
        answer = self._stub.Reserve(message, timeout=self._config.rpc_timeout_s)
        with self._waits.end_call(answer):
            return (await call(answer)).grant

    async def prefill(self, request: Request, grant: worker_pb2.Grant, decodes: Outputs) -> list[TokenOutput]:
        """Token 1 of every choice. Raises what ended the hand-off, should it fail at its decode worker first."""
        message = worker_pb2.PrefillRequest(request=request_to_pb(request), grant=grant)
        answer = self._stub.Prefill(message, timeout=self._config.prefill_timeout_s)
        with self._waits.end_call(answer) as wait, decodes.waits.end(wait), self._limited_silence(wait):
            outputs = (await call(answer)).outputs
        return [output_from_pb(output) for output in outputs]

    async def connect(self, decode: WorkerHandle) -> None:
        """Let it connect to whom it may send KV. LayoutMismatchError when it cannot send any."""
        message = worker_pb2.ConnectPeerRequest(address=decode.address, incarnation=decode.stats.incarnation)
        await call(self._stub.ConnectPeer(message, timeout=self._config.rpc_timeout_s))

    async def submit(self, request: Request) -> None:
        message = worker_pb2.SubmitRequest(request=request_to_pb(request), replica_address=request.replica_address)
        answer = self._stub.Submit(message, timeout=self._config.rpc_timeout_s)
        with self._waits.end_call(answer):
            await call(answer)

    def kv_events(self) -> grpc.aio.UnaryStreamCall[Any, worker_pb2.StreamKVEventsResponse]:
        return self._stub.StreamKVEvents(worker_pb2.StreamKVEventsRequest())

    async def abort(self, request_id: str) -> None:
        """What does not reach the worker is said again with its next heartbeat, if it is the same one then."""
        await self._abort([request_id])

    async def audit(self) -> router_pb2.WorkerAudit:
        try:
            message = worker_pb2.AuditWorkerRequest()
            answer = await call(self._stub.AuditWorker(message, timeout=self._config.rpc_timeout_s))
        except KVFerryError as error:
            return router_pb2.WorkerAudit(address=self.address, error=error.message)
        return router_pb2.WorkerAudit(address=self.address, audit=answer)

    def expect(self, request_id: str, num_job_sequences: int = 0) -> Outputs:
        """From now on, until `forget`, this request's outputs come there. A job's tells how many sequences it has."""
        outputs = self._outputs[request_id] = Outputs()
        if num_job_sequences:
            self._jobs[request_id] = num_job_sequences
        return outputs

    def forget(self, request_id: str) -> None:
        self._jobs.pop(request_id, None)
        if outputs := self._outputs.pop(request_id, None):
            outputs.close()
        self.changed.set()

    def limit_silence(self, outputs: Outputs) -> None:
        """From now on they fail when nothing comes for too long."""
        seconds = self._config.token_timeout_s
        outputs.limit_silence(seconds, DeadlineError(f"{self.stats.name}: no token within {seconds} s"))

    def fail(self, request_id: str, error: KVFerryError) -> None:
        """End what this router waits for of one request here."""
        if waiting := self._outputs.get(request_id):
            waiting.fail(error)

    def fail_all(self, error: KVFerryError) -> None:
        """Of this router's requests here, all that wait."""
        for waiting in self._outputs.values():
            waiting.fail(error)
        self._waits.fail(error)
        self.changed.set()

    def ends(self, wait: Failable) -> AbstractContextManager[None]:
        """Until the end of the block, this fails when the worker is lost."""
        return self._waits.end(wait)

    def ends_call(self, rpc: RemoteCall) -> AbstractContextManager[Wait]:
        """Until the end of the block, which waits for the call, the worker's loss cancels it and is raised."""
        return self._waits.end_call(rpc)

    def _limited_silence(self, wait: Failable) -> StillLimit:
        """Until the end of the block: DeadlineError when the worker takes no step for so long."""
        seconds = self._config.token_timeout_s
        error = DeadlineError(f"{self.stats.name}: no step within {seconds} s")
        return StillLimit(lambda: self.stats.num_steps, seconds, wait, error)

    async def _abort(self, request_ids: Sequence[str]) -> None:
        message = worker_pb2.AbortRequest(router_id=self._router_id, request_ids=request_ids)
        try:
            await call(self._stub.Abort(message, timeout=self._config.rpc_timeout_s))
        except KVFerryError as error:
            logger.info("%s: abort did not reach %s: %s", ", ".join(request_ids), self.address, error.message)
            self._unheard_aborts |= dict.fromkeys(request_ids)
            return
        for request_id in request_ids:
            self._unheard_aborts.pop(request_id, None)

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except Exception as exc:  # Nobody else would look.
                logger.exception("worker at %s: a look at it failed", self.address)
                self.refused = f"what {self.name} tells is not understood: {type(exc).__name__}: {exc}"
                self._lose_sight(self.refused)
            await asyncio.sleep(self._config.heartbeat_s)

    async def _look(self) -> None:
        try:
            timeout_s = (_MAX_MISSES - 0.5) * self._config.heartbeat_s
            stats = (await call(self._stub.GetStats(worker_pb2.GetStatsRequest(), timeout=timeout_s))).stats
            require_expected(stats, self.address, self.member.role)
        except KVFerryError as error:
            self.refused = error.message if isinstance(error, ConfigError) else ""
            # A call that timed out has waited as long as all the misses.
            self._misses += _MAX_MISSES if isinstance(error, DeadlineError) else 1
            if not self.reachable:
                self._lose(f"does not answer: {error.message}")
            return
        if self.stats.incarnation and stats.incarnation != self.stats.incarnation:
            self._lose("was replaced")
            self._unheard_aborts.clear()
            self.pace = Pace()
        else:
            self.pace.saw_stats(self.stats, stats, _now())
        self._misses, self.refused = 0, ""
        self.stats = stats
        self._note_change()
        if self._unheard_aborts:
            await self._abort(list(self._unheard_aborts))

    async def _listen(self) -> None:
        while True:
            try:
                await self._read_outputs()
                reason = "ended its stream"
            except grpc.aio.AioRpcError as exc:
                reason = error_from_rpc(exc).message
            except Exception as exc:  # Nobody else would listen, while heartbeats went on.
                logger.exception("worker at %s: its stream cannot be read", self.address)
                reason = f"its stream cannot be read: {type(exc).__name__}: {exc}"
            self._streaming = False
            # Whoever streams next may be another.
            self._lose_sight(f"is gone: {reason}")
            await asyncio.sleep(_RECONNECT_S)

    async def _read_outputs(self) -> None:
        stream = self._stub.StreamOutputs(worker_pb2.StreamOutputsRequest(router_id=self._router_id))
        try:
            await stream.initial_metadata()
            # It comes, empty, for a call that has failed too.
            self._streaming = not stream.done()
            if self._streaming:
                await self._look()
            async for message in stream:
                self._deliver(message.outputs)
        finally:
            stream.cancel()

    def _deliver(self, outputs: Sequence[worker_pb2.TokenOutput]) -> None:
        for output in outputs:
            if waiting := self._outputs.get(output.request_id):
                waiting.take(output)

    def _note_change(self) -> None:
        if self.reachable:
            if self.gone_since_s is not None:
                logger.info("worker %s (%s) answers at %s", self.stats.name, self.stats.incarnation, self.address)
            self.gone_since_s = None
            self._first_contact.set()
        self.changed.set()

    def _lose_sight(self, how: str) -> None:
        """Nothing goes there before it has told who it is."""
        self._misses = _MAX_MISSES
        self._lose(how)

    def _lose(self, how: str) -> None:
        error = UnavailableError(f"worker {self.stats.name or self.address} {how}")
        if self.gone_since_s is None:
            self.gone_since_s = _now()
            logger.warning("%s (%s at %s)", error.message, self.stats.incarnation, self.address)
        self.fail_all(error)


def _now() -> float:
    return asyncio.get_running_loop().time()
