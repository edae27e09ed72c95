"""One worker as a router sees it: its channel, its latest stats, and the requests that wait for its outputs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence

import grpc.aio

from protos import router_pb2, worker_pb2, worker_pb2_grpc
from router.config import RouterConfig
from router.policy import Load
from workers.errors import BY_NAME, DeadlineError, KVFerryError, UnavailableError
from workers.request import FinishReason, Request, TokenOutput
from workers.rpc import Network, call, close_quietly, error_from_rpc
from workers.wire import output_from_pb, request_to_pb

logger = logging.getLogger(__name__)

_MAX_MISSES = 3
_RECONNECT_S = 0.1


class _Outputs:
    """What one request has got from the worker, and whether it failed there."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[TokenOutput | KVFerryError] = asyncio.Queue()
        self.failure: asyncio.Future[KVFerryError] = asyncio.get_running_loop().create_future()

    def put(self, output: TokenOutput) -> None:
        if output.finish_reason is FinishReason.ERROR:
            self.fail(BY_NAME.get(output.error_type, KVFerryError)(output.error_message))
        else:
            self.arrived.put_nowait(output)

    def fail(self, error: KVFerryError) -> None:
        self.arrived.put_nowait(error)
        if not self.failure.done():
            self.failure.set_result(error)


class WorkerHandle:
    """Watches one address: heartbeats tell who is there, the output stream tells at once when it is gone."""

    def __init__(self, address: str, router_id: str, config: RouterConfig, network: Network) -> None:
        self.address = address
        self.stats = worker_pb2.WorkerStats()
        # Prompt tokens sent for prefill whose token 1 has not come back.
        self.num_queued_tokens = 0
        # Set when something may have changed for those who wait for room.
        self.changed = asyncio.Event()
        self._router_id = router_id
        self._config = config
        self._channel = network.connect(address)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._outputs: dict[str, _Outputs] = {}
        # Sent again, and not answered yet.
        self._aborts: dict[str, asyncio.Task[None]] = {}
        self._misses = _MAX_MISSES
        self._streaming = False
        self._first_contact = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return when the worker answers and streams, or has had time to."""
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]
        try:
            async with asyncio.timeout(self._config.rpc_timeout_s):
                await self._first_contact.wait()
        except TimeoutError:
            logger.warning("worker at %s does not answer yet", self.address)

    async def stop(self) -> None:
        for task in (*self._tasks, *self._aborts.values()):
            await close_quietly(task)
        self._fail_all(UnavailableError("the router is stopping; send the request again"))
        await self._channel.close()

    @property
    def reachable(self) -> bool:
        return self._misses < _MAX_MISSES and self._streaming

    @property
    def role(self) -> str:
        return self.stats.role

    @property
    def load(self) -> Load:
        return Load(self.num_queued_tokens, len(self._outputs), self.stats.blocks_free)

    def status(self) -> router_pb2.WorkerStatus:
        state = router_pb2.WORKER_STATE_READY if self.reachable else router_pb2.WORKER_STATE_UNREACHABLE
        return router_pb2.WorkerStatus(address=self.address, state=state, stats=self.stats)

    async def reserve(self, request: Request) -> worker_pb2.Grant:
        """Raises OverloadedError when the worker has no room now."""
        message = worker_pb2.ReserveRequest(request=request_to_pb(request))
        return (await call(self._stub.Reserve(message, timeout=self._config.rpc_timeout_s))).grant

    async def prefill(self, request: Request, grant: worker_pb2.Grant) -> list[TokenOutput]:
        """Token 1 of every choice."""
        message = worker_pb2.PrefillRequest(request=request_to_pb(request), grant=grant)
        answer = asyncio.ensure_future(call(self._stub.Prefill(message, timeout=self._config.prefill_timeout_s)))
        try:
            while not answer.done():
                num_steps = self.stats.num_steps
                await asyncio.wait((answer,), timeout=self._config.token_timeout_s)
                if not answer.done() and self.stats.num_steps == num_steps:
                    raise DeadlineError(f"{self.stats.name}: no step within {self._config.token_timeout_s} s")
            return [output_from_pb(output) for output in answer.result().outputs]
        finally:
            answer.cancel()

    async def submit(self, request: Request) -> None:
        message = worker_pb2.SubmitRequest(request=request_to_pb(request))
        await call(self._stub.Submit(message, timeout=self._config.rpc_timeout_s))

    async def abort(self, request_id: str) -> None:
        """Best effort: what it does not reach ends by lease."""
        message = worker_pb2.AbortRequest(router_id=self._router_id, request_ids=[request_id])
        try:
            await call(self._stub.Abort(message, timeout=self._config.rpc_timeout_s))
        except KVFerryError as error:
            logger.info("%s: abort did not reach %s: %s", request_id, self.address, error.message)

    async def audit(self) -> router_pb2.WorkerAudit:
        try:
            message = worker_pb2.AuditWorkerRequest()
            answer = await call(self._stub.AuditWorker(message, timeout=self._config.rpc_timeout_s))
        except KVFerryError as error:
            return router_pb2.WorkerAudit(address=self.address, error=error.message)
        return router_pb2.WorkerAudit(address=self.address, audit=answer)

    def expect(self, request_id: str) -> None:
        """From now on keep this request's outputs for `outputs`; `forget` ends it."""
        self._outputs[request_id] = _Outputs()

    def forget(self, request_id: str) -> None:
        self._outputs.pop(request_id, None)
        self.changed.set()

    async def outputs(self, request_id: str, choices: Iterable[int]) -> AsyncGenerator[TokenOutput, None]:
        """This request's outputs of these choices, until all have ended.

        Raises what ended it on the worker, UnavailableError when that died.
        """
        arrived = self._outputs[request_id].arrived
        running = set(choices)
        while running:
            try:
                async with asyncio.timeout(self._config.token_timeout_s):
                    output = await arrived.get()
            except TimeoutError:
                raise DeadlineError(f"{self.stats.name}: no token within {self._config.token_timeout_s} s") from None
            if isinstance(output, KVFerryError):
                raise output
            if output.choice not in running:
                continue
            if output.finish_reason is not None:
                running.remove(output.choice)
            yield output

    async def lost(self, request_id: str) -> KVFerryError:
        """Wait until this request has failed here; why."""
        return await self._outputs[request_id].failure

    async def _watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(self._config.heartbeat_s)

    async def _look(self) -> None:
        try:
            message = worker_pb2.GetStatsRequest()
            answer = await call(self._stub.GetStats(message, timeout=_MAX_MISSES * self._config.heartbeat_s))
        except KVFerryError as error:
            # A call that timed out has waited as long as all the misses.
            self._misses += _MAX_MISSES if isinstance(error, DeadlineError) else 1
            if not self.reachable:
                self._fail_all(UnavailableError(f"worker {self.stats.name or self.address} does not answer"))
            return
        if self.stats.incarnation and answer.stats.incarnation != self.stats.incarnation:
            self._fail_all(UnavailableError(f"worker {self.stats.name} was replaced"))
        self._misses = 0
        self.stats = answer.stats
        self._note_change()

    async def _listen(self) -> None:
        while True:
            try:
                await self._read_outputs()
                reason = "ended its stream"
            except grpc.aio.AioRpcError as exc:
                reason = error_from_rpc(exc).message
            self._streaming = False
            self._fail_all(UnavailableError(f"worker {self.stats.name or self.address} is gone: {reason}"))
            await asyncio.sleep(_RECONNECT_S)

    async def _read_outputs(self) -> None:
        stream = self._stub.StreamOutputs(worker_pb2.StreamOutputsRequest(router_id=self._router_id))
        try:
            await stream.initial_metadata()
            # It comes, empty, for a call that has failed too.
            self._streaming = not stream.done()
            self._note_change()
            async for message in stream:
                self._deliver(message.outputs)
        finally:
            stream.cancel()

    def _deliver(self, outputs: Sequence[worker_pb2.TokenOutput]) -> None:
        for output in outputs:
            if waiting := self._outputs.get(output.request_id):
                waiting.put(output_from_pb(output))
            elif output.finish_reason == worker_pb2.FINISH_REASON_UNSPECIFIED:
                self._abort_again(output.request_id)

    def _abort_again(self, request_id: str) -> None:
        """It goes on there, and nobody waits for it: its abort is on the way, or got lost."""
        if request_id not in self._aborts:
            self._aborts[request_id] = task = asyncio.create_task(self.abort(request_id))
            task.add_done_callback(lambda _: self._aborts.pop(request_id))

    def _note_change(self) -> None:
        if self.reachable:
            self._first_contact.set()
        self.changed.set()

    def _fail_all(self, error: KVFerryError) -> None:
        for waiting in self._outputs.values():
            waiting.fail(error)
        self.changed.set()
