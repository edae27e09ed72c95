"""Load on an OpenAI-compatible server, timed as its clients see it.

Open loop (Poisson): when requests are due is drawn beforehand; they are sent then, whatever became of those before, and
timed from then. A server that stalls, or a meter that is held up, hides nothing (coordinated omission). Closed loop
(Clients): so many clients, each asks again once it has its answer.

Prompts are token ids, so no tokenizer is needed; `ignore_eos` keeps the lengths of answers equal.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from cluster.bench.samples import Sample

_REQUEST_TIMEOUT_S = 900.0
_LEAST_TOKEN_ID = 100
_ERROR_CHARS = 200


@dataclass(frozen=True, slots=True)
class Target:
    # Up to and without /v1.
    url: str
    model: str


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked. No two prompts begin alike, nor do those of two workloads: no cache knows them."""

    num_requests: int
    num_prompt_tokens: int
    max_tokens: int
    # Every so many, one prompt is long; 0: none is.
    long_every: int = 0
    num_long_prompt_tokens: int = 0
    vocab_size: int = 40_000
    seed: int = 1

    def prompts(self) -> list[list[int]]:
        rng = random.Random(f"prompts of {self}")
        lengths = map(self._length, range(self.num_requests))
        return [[rng.randrange(_LEAST_TOKEN_ID, self.vocab_size) for _ in range(length)] for length in lengths]

    def _length(self, index: int) -> int:
        long = self.long_every and index % self.long_every == self.long_every - 1
        return self.num_long_prompt_tokens if long else self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Poisson:
    """Open loop: so many requests a second on average."""

    rate: float

    def due_s(self, num_requests: int, seed: int) -> list[float]:
        """From the beginning."""
        rng = random.Random(f"arrivals {seed}")
        return list(itertools.accumulate(rng.expovariate(self.rate) for _ in range(num_requests)))


@dataclass(frozen=True, slots=True)
class Clients:
    """Closed loop: so many at a time."""

    count: int


@dataclass(frozen=True, slots=True)
class Measured:
    """In the order in which the requests ended."""

    samples: Sequence[Sample]
    wall_s: float


# Of the samples so far: whether more would change nothing, so that the rest may be given up.
Enough = Callable[[Sequence[Sample]], bool]


async def load(
    target: Target, workload: Workload, arrivals: Poisson | Clients, enough: Enough = lambda _: False
) -> Measured:
    """Every request of `workload`; one that fails is a sample with an error."""
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    # A connection each: a server may close one that is idle just as it is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        loading = _Load(session, target, workload, enough)
        began_s = asyncio.get_running_loop().time()
        if isinstance(arrivals, Poisson):
            await loading.open_loop(arrivals.due_s(workload.num_requests, workload.seed))
        else:
            await loading.closed_loop(arrivals.count)
        return Measured(loading.samples, asyncio.get_running_loop().time() - began_s)


class _Load:
    def __init__(self, session: aiohttp.ClientSession, target: Target, workload: Workload, enough: Enough) -> None:
        self._session = session
        self._target = target
        self._enough = enough
        self._loop = asyncio.get_running_loop()
        prompts = workload.prompts()
        self._bodies = [_body(target.model, prompt, workload.max_tokens) for prompt in prompts]
        self._lengths = list(map(len, prompts))
        self.samples: list[Sample] = []

    async def open_loop(self, due_s: Sequence[float]) -> None:
        began_s = self._loop.time()
        await self._run([self._ask_at(index, began_s + due) for index, due in enumerate(due_s)])

    async def closed_loop(self, num_clients: int) -> None:
        indices = iter(range(len(self._bodies)))

        async def client() -> None:
            for index in indices:
                await self._ask(index, self._loop.time())

        await self._run([client() for _ in range(num_clients)])

    async def _run(self, coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for coroutine in coroutines:
                    group.create_task(coroutine)
        except* _EnoughError:
            pass

    async def _ask_at(self, index: int, due_s: float) -> None:
        await asyncio.sleep(due_s - self._loop.time())
        await self._ask(index, due_s)

    async def _ask(self, index: int, due_s: float) -> None:
        sample = Sample(self._lengths[index], due_s, self._loop.time())
        try:
            self.samples.append(await self._answered(sample, self._bodies[index]))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.samples.append(replace(sample, error=f"{type(error).__name__}: {error}"[:_ERROR_CHARS]))
        if self._enough(self.samples):
            raise _EnoughError

    async def _answered(self, sample: Sample, body: bytes) -> Sample:
        headers = {"content-type": "application/json"}
        url = f"{self._target.url}/v1/completions"
        async with self._session.post(url, data=body, headers=headers) as response:
            if response.status != 200:
                return replace(sample, error=f"{response.status}: {(await response.text())[:_ERROR_CHARS]}")
            return await self._read(sample, response.content)

    async def _read(self, sample: Sample, lines: aiohttp.StreamReader) -> Sample:
        arrivals_s: list[float] = []
        num_tokens: int | None = None
        async for line in lines:
            now_s = self._loop.time()
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            event = json.loads(line[5:])
            if event.get("error"):
                return replace(sample, error=str(event["error"])[:_ERROR_CHARS])
            if event.get("choices"):
                arrivals_s.append(now_s)
            if usage := event.get("usage"):
                num_tokens = usage["completion_tokens"]
        if not arrivals_s:
            return replace(sample, error="no token came")
        return replace(sample, arrivals_s=tuple(arrivals_s), num_tokens=num_tokens or len(arrivals_s))


class _EnoughError(Exception):
    """Ends all requests that are under way."""


def _body(model: str, prompt: list[int], max_tokens: int) -> bytes:
    """Made beforehand: the clock must not count it."""
    return json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
