"""A prefill and a decode worker on a simulated network, with the test as their router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from cluster.sim.loop import run
from cluster.sim.network import SimNetwork
from tests.factories import in_use, make_worker, runner_of, tokens_of
from tests.fake_model import HashRunner
from workers.errors import BY_NAME
from workers.kv_transfer.base import Grant
from workers.request import FinishReason, Request, TokenOutput
from workers.worker import Worker

ROUTER = "router-1"


class Pair:
    def __init__(self, num_decode: int = 1, **settings: Any) -> None:
        self.network = SimNetwork()
        self.hosts = [self.network.host() for _ in range(1 + num_decode)]
        workers = [make_worker(host, incarnation=f"{i:032x}", **settings) for i, host in enumerate(self.hosts)]
        self.prefill, self.decode = workers[:2]
        self.workers = workers
        self.outputs: dict[str, list[TokenOutput]] = {}

    async def start(self) -> None:
        for worker in self.workers:
            await worker.start()
        self._listening = [asyncio.create_task(self._listen(worker)) for worker in self.workers[1:]]
        await asyncio.sleep(0)

    async def stop(self) -> None:
        for task in self._listening:
            task.cancel()
        await asyncio.gather(*self._listening, return_exceptions=True)
        for worker in self.workers:
            await worker.stop()

    async def hand_over(self, request: Request, decode: Worker | None = None) -> TokenOutput:
        """Reserve and Prefill; token 1 of the only choice."""
        grant = self.reserve(request, decode)
        (output,) = await self.prefill.prefill(copy_of(request), grant)
        return output

    def reserve(self, request: Request, decode: Worker | None = None) -> Grant:
        return (decode or self.decode).reserve(copy_of(request))

    async def answer(self, request: Request) -> list[int]:
        """The whole answer, through both. Raises what ended it early."""
        first = await self.hand_over(request)
        if first.finish_reason is None:
            await self.until(lambda: any(o.finish_reason for o in self.outputs.get(request.request_id, ())))
        last = self.outputs.get(request.request_id, [first])[-1]
        if last.finish_reason is FinishReason.ERROR:
            raise BY_NAME[last.error_type](last.error_message)
        return tokens_of([first, *self.outputs.get(request.request_id, ())])

    async def until(self, holds: Callable[[], object], within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not holds():  # noqa: ASYNC110  What is waited for is a worker's doing.
                await asyncio.sleep(0.0005)

    async def until_idle(self, within_s: float = 0.5) -> None:
        await self.until(lambda: not any(in_use(worker) for worker in self.workers), within_s)

    @property
    def runner(self) -> HashRunner:
        return runner_of(self.prefill.engine)

    async def _listen(self, worker: Worker) -> None:
        async for step in worker.outputs.stream(ROUTER):
            for output in step:
                self.outputs.setdefault(output.request_id, []).append(output)


def copy_of(request: Request) -> Request:
    """As it is after crossing the wire: each worker has its own."""
    tokens = list(request.output_token_ids)
    return Request(request.request_id, request.prompt_token_ids, request.params, tokens, router_id=ROUTER)


def on_pair(
    script: Callable[[Pair], Awaitable[Any]], num_decode: int = 1, idle_within_s: float = 0.5, **settings: Any
) -> None:
    """Run `script`; afterwards all blocks must be free again, much sooner than a lease."""

    async def main() -> None:
        pair = Pair(num_decode, **settings)
        await pair.start()
        await script(pair)
        await pair.until_idle(idle_within_s)
        await pair.stop()

    run(main())
