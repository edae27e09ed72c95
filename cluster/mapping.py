"""Many prompts, some at once, answers in the order of the prompts; with a progress bar where wanted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from cluster.records import Completion, Prompt
from workers.errors import KVFerryError

# Answers that may wait for a slow one before them, for each that is at work.
_WINDOW = 4

Outcome = Completion | KVFerryError


def map_in_order(
    generate: Callable[[Prompt], Completion],
    prompts: Iterable[Prompt],
    max_in_flight: int,
    progress: bool,
    cancel: Callable[[], None],
) -> Generator[Outcome]:
    """`cancel` ends every `generate` under way; it is called when nobody wants the rest."""
    waiting: deque[Future[Outcome]] = deque()
    with _bar(prompts, progress) as step, ThreadPoolExecutor(max_in_flight, "kvferry-map") as threads:
        rest = iter(prompts)
        try:
            while True:
                for prompt in _some(rest, _WINDOW * max_in_flight - len(waiting)):
                    waiting.append(threads.submit(_outcome, generate, prompt))
                if not waiting:
                    return
                yield waiting.popleft().result()
                step()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            if waiting:
                cancel()


async def amap_in_order(
    generate: Callable[[Prompt], Awaitable[Completion]], prompts: Iterable[Prompt], max_in_flight: int, progress: bool
) -> AsyncGenerator[Outcome]:
    waiting: deque[asyncio.Task[Outcome]] = deque()
    places = asyncio.Semaphore(max_in_flight)

    async def outcome(prompt: Prompt) -> Outcome:
        async with places:
            try:
                return await generate(prompt)
            except KVFerryError as error:
                return error

    with _bar(prompts, progress) as step:
        rest = iter(prompts)
        try:
            while True:
                for prompt in _some(rest, _WINDOW * max_in_flight - len(waiting)):
                    waiting.append(asyncio.create_task(outcome(prompt)))
                if not waiting:
                    return
                yield await waiting[0]
                waiting.popleft()
                step()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


def _outcome(generate: Callable[[Prompt], Completion], prompt: Prompt) -> Outcome:
    try:
        return generate(prompt)
    except KVFerryError as error:
        return error


def _some(rest: Iterator[Prompt], count: int) -> Iterator[Prompt]:
    for _, prompt in zip(range(count), rest, strict=False):
        yield prompt


@contextmanager
def _bar(prompts: Iterable[Prompt], shown: bool) -> Iterator[Callable[[], None]]:
    """What to call after each answer."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    total = len(prompts) if isinstance(prompts, Sized) else None
    columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
