"""`make demo`: the default cluster, four chats at once, and where their time went."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from cluster import render
from cluster.client import AsyncClient, Chunk, Completion, completion_of
from cluster.config import ClusterConfig, load_config
from cluster.ports import why_not_bindable
from cluster.up import running
from protos.worker_pb2 import WorkerStats
from workers.errors import ConfigError, KVFerryError

_CHATS = {
    "capital": "What is the capital of France? Answer in one sentence.",
    "ferry": "Explain in two sentences what a ferry does.",
    "poem": "Write a short poem about the sea.",
    "python": "Name three things that Python is good for.",
}
_COLOURS = dict(zip(_CHATS, ("cyan", "green", "yellow", "magenta"), strict=True))
_MAX_TOKENS = 48
# What a chat says is shown when this much has come: several at once stay readable.
_SHOWN_CHARACTERS = 60
_SETTLE_S = 5.0


def demo_config() -> ClusterConfig:
    """local.yaml beside whatever else runs here: a name of its own, and any free port where its own are taken."""
    config = load_config(None)
    router = config.router
    ports = {"http_port": router.http_port, "grpc_port": router.grpc_port}
    free = {key: 0 if why_not_bindable(router.host, port) else port for key, port in ports.items()}
    return config.model_copy(update={"name": "demo", "router": router.model_copy(update=free)})


class Transcript:
    """Several answers on one screen: whole pieces of lines, each with its chat's name before it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._unshown = dict.fromkeys(_CHATS, "")

    def add(self, label: str, chunk: Chunk) -> None:
        *whole, rest = (self._unshown[label] + chunk.text).split("\n")
        while len(rest) > _SHOWN_CHARACTERS and " " in rest[:_SHOWN_CHARACTERS]:
            cut = rest.rindex(" ", 0, _SHOWN_CHARACTERS)
            whole, rest = [*whole, rest[:cut]], rest[cut + 1 :]
        if chunk.finish_reason:
            whole, rest = [*whole, rest], ""
        self._unshown[label] = rest
        for line in whole:
            if line.strip():
                self._console.print(Text(f"{label:>8} ", style=_COLOURS[label]), Text(line), sep="")


async def chat(client: AsyncClient, label: str, show: Callable[[str, Chunk], None]) -> Completion:
    chunks = []
    messages = [{"role": "user", "content": _CHATS[label]}]
    async for chunk in client.stream(messages, max_tokens=_MAX_TOKENS, temperature=0.0, request_id=f"demo-{label}"):
        chunks.append(chunk)
        show(label, chunk)
    return completion_of(chunks)


async def converse(target: str, console: Console) -> None:
    async with AsyncClient(target) as client:
        transcript = Transcript(console)
        completions = await asyncio.gather(*(chat(client, label, transcript.add) for label in _CHATS))
        workers = await settled(client)
    console.print()
    console.print(render.timeline_table(dict(zip(_CHATS, completions, strict=True))))
    console.print()
    console.print(render.work_table(workers))
    console.print()
    if not all(idle(stats) for stats in workers):
        raise KVFerryError("blocks are still taken though every request is done")


async def settled(client: AsyncClient) -> list[WorkerStats]:
    """The workers' statistics once they show the requests as done; they are as old as the router's last look."""
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        workers = [worker.stats for worker in (await client.status()).workers]
        produced = sum(stats.num_output_tokens for stats in workers)
        if (produced and all(idle(stats) for stats in workers)) or time.monotonic() > deadline_s:
            return workers
        await asyncio.sleep(0.1)


def idle(stats: WorkerStats) -> bool:
    return stats.blocks_free + stats.blocks_cached == stats.blocks_total and not stats.num_running


def main() -> int:
    console = Console(file=sys.stdout, highlight=False)
    began_s = time.monotonic()

    def say(line: str) -> None:
        console.print(Text(f"{time.monotonic() - began_s:6.1f} s  {line}", style="dim"), soft_wrap=True)

    try:
        config = demo_config()
        with running(config, say) as (_, endpoints):
            say(f"ready: 1 prefill and 1 decode worker behind HTTP {endpoints.http}, gRPC {endpoints.grpc}")
            console.print()
            asyncio.run(converse(endpoints.grpc, console))
            say("stopping")
        say("all gone")
    except KVFerryError as exc:
        print(f"demo: {exc.message}", file=sys.stderr)
        return 2 if isinstance(exc, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
