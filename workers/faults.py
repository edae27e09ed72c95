"""Faults injected on purpose (`faults:` in a config): what the network and the machine may do, at a worker's border.

Nothing of it is in the worker itself: frames, calls and answers pass through here on their way in and out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

import grpc.aio

from protos import kv_transfer_pb2, worker_pb2
from workers.errors import OverloadedError
from workers.fault_config import Fault, FrameFault, Kill, PauseHeartbeat, RefuseReserve
from workers.kv_transfer.base import KVReceiver
from workers.kv_transfer.frame import Buffer
from workers.kv_transfer.kv_rows import KVRows
from workers.rpc import typed_errors
from workers.services import Border, KVTransferService, WorkerService

if TYPE_CHECKING:
    from workers.worker import Worker

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


def kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Faults:
    """Decides when each fault happens: the same every time, for the same calls in the same order."""

    def __init__(self, faults: Iterable[Fault], worker: str) -> None:
        self._faults = tuple(fault for fault in faults if fault.worker in ("", worker))
        self._random = random.Random(worker)
        self._num_seen: Counter[int] = Counter()
        self._num_done: Counter[int] = Counter()
        self._began_s = asyncio.get_running_loop().time()
        logger.warning("%s: faults are injected: %s", worker, "; ".join(map(repr, self._faults)))

    def reach(self, step: str) -> None:
        """The worker gets to a step at which it may be killed."""
        for at, fault in enumerate(self._faults):
            if isinstance(fault, Kill) and fault.at == step:
                self._num_seen[at] += 1
                if self._num_seen[at] == fault.skip + 1:
                    kill_process()

    def to_frame(self) -> FrameFault | None:
        """What happens to the frame that arrives now."""
        return next(
            (f for at, f in enumerate(self._faults) if isinstance(f, FrameFault) and self._strikes(at, f)), None
        )

    def refuses_reserve(self) -> bool:
        return any(isinstance(f, RefuseReserve) and self._strikes(at, f) for at, f in enumerate(self._faults))

    async def heartbeat(self) -> None:
        """Return at once, or when the pause is over."""
        for fault in self._faults:
            if isinstance(fault, PauseHeartbeat):
                since_s = asyncio.get_running_loop().time() - self._began_s - fault.after_s
                if 0 <= since_s < fault.for_s:
                    await asyncio.sleep(fault.for_s - since_s)

    def damaged(self, data: Buffer) -> bytes:
        """One bit of it is another."""
        changed = bytearray(data)
        changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def truncated(self, data: Buffer) -> bytes:
        return bytes(data[: self._random.randrange(len(data))])

    def _strikes(self, at: int, fault: FrameFault | RefuseReserve) -> bool:
        self._num_seen[at] += 1
        spent = fault.count is not None and self._num_done[at] >= fault.count
        if self._num_seen[at] <= fault.skip or spent or self._random.random() >= fault.probability:
            return False
        self._num_done[at] += 1
        return True


def faulty_border(worker: Worker) -> Border:
    faults = Faults(worker.config.faults, worker.config.name)
    receiver = FaultyReceiver(worker.decode, faults)
    return Border(FaultyWorkerService(worker, faults), FaultyKVTransferService(worker, faults), receiver)


class FaultyReceiver:
    """A KVReceiver to which frames come through a bad network."""

    def __init__(self, receiver: KVReceiver, faults: Faults) -> None:
        self._receiver = receiver
        self._faults = faults
        self._overtaken = asyncio.Event()

    async def receive(self, data: Buffer, elsewhere: KVRows | None = None) -> None:
        self._faults.reach("frame")
        fault = self._faults.to_frame()
        match fault and fault.fault:
            case "drop_frame":
                # Until its sender waits no more.
                await asyncio.Event().wait()
            case "delay_frame":
                assert fault is not None
                await asyncio.sleep(fault.delay_s)
            case "reorder_frame":
                assert fault is not None
                await self._wait_to_be_overtaken(fault.delay_s)
            case "duplicate_frame":
                await self._receiver.receive(data, elsewhere)
            case "truncate_frame":
                data, elsewhere = self._faults.truncated(_whole(data, elsewhere)), None
            case "corrupt_frame":
                damaged = self._faults.damaged(_whole(data, elsewhere))
                data, elsewhere = _parts(damaged, elsewhere)
        await self._receiver.receive(data, elsewhere)
        self._overtaken.set()

    async def _wait_to_be_overtaken(self, timeout_s: float) -> None:
        """By the next frame that is received; the last of all waits in vain."""
        self._overtaken.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._overtaken.wait()
        except TimeoutError:
            pass


def _whole(data: Buffer, elsewhere: KVRows | None) -> bytes:
    """A copy of the frame: what is damaged here is not to be the sender's pool."""
    return bytes(data) + (b"" if elsewhere is None else bytes(elsewhere))


def _parts(whole: bytes, elsewhere: KVRows | None) -> tuple[bytes, KVRows | None]:
    """The copy as its receiver gets it: where the payload was elsewhere, it is in memory of its own now."""
    if elsewhere is None:
        return whole, None
    begin = len(whole) - len(elsewhere)
    return whole[:begin], elsewhere.in_order(memoryview(whole)[begin:])


class FaultyWorkerService(WorkerService):
    def __init__(self, worker: Worker, faults: Faults) -> None:
        super().__init__(worker)
        self._faults = faults

    async def GetStats(self, request: worker_pb2.GetStatsRequest, context: Context) -> worker_pb2.GetStatsResponse:
        await self._faults.heartbeat()
        return await super().GetStats(request, context)

    @typed_errors
    async def Reserve(self, request: worker_pb2.ReserveRequest, context: Context) -> worker_pb2.ReserveResponse:
        if self._faults.refuses_reserve():
            raise OverloadedError("no room, by an injected fault")
        answer = await super().Reserve(request, context)
        self._faults.reach("reserve")
        return answer

    async def Prefill(self, request: worker_pb2.PrefillRequest, context: Context) -> worker_pb2.PrefillResponse:
        self._faults.reach("prefill")
        answer = await super().Prefill(request, context)
        self._faults.reach("token_1")
        return answer

    async def StreamOutputs(
        self, request: worker_pb2.StreamOutputsRequest, context: Context
    ) -> AsyncIterator[worker_pb2.StreamOutputsResponse]:
        async for message in super().StreamOutputs(request, context):
            self._faults.reach("output")
            yield message


class FaultyKVTransferService(KVTransferService):
    def __init__(self, worker: Worker, faults: Faults) -> None:
        super().__init__(worker)
        self._faults = faults

    async def Commit(self, request: kv_transfer_pb2.CommitRequest, context: Context) -> kv_transfer_pb2.CommitResponse:
        self._faults.reach("commit")
        answer = await super().Commit(request, context)
        self._faults.reach("committed")
        return answer

    async def Renew(self, request: kv_transfer_pb2.RenewRequest, context: Context) -> kv_transfer_pb2.RenewResponse:
        await self._faults.heartbeat()
        return await super().Renew(request, context)
