"""Law 2 over the ways that KV travels: what the packaged model answers colocated, it answers handed over by each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import cache
from importlib.util import find_spec

import pytest
import torch

from router.answer import TextChunk, TextOptions
from router.config import RouterConfig
from router.pool import WorkerPool
from router.router import Router
from router.structured import grammar_of
from router.text import TextService
from tests.prompts import MODEL, questions, tokenizer
from tests.workers.real_workers import answer
from workers.config import Role, TransferConfig, WorkerConfig
from workers.kv_transfer.local import LocalTransport
from workers.kv_transfer.transports import Transports
from workers.request import FinishReason, Request, SamplingParams, TokenLogprobs
from workers.rpc import GrpcNetwork
from workers.worker import Worker

NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="needs NIXL: pip install 'kvferry[nixl]'")
TRANSPORTS = ["local", "shm", "grpc", "gloo", pytest.param("nixl", marks=NEEDS_NIXL)]
BLOCK_SIZE = 16
TEXT = tokenizer().encode(" ".join(questions(8)))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=6, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def prompt_of(number: int, num_tokens: int = 40) -> list[int]:
    """Unlike any other in its first block."""
    return TEXT[7 * number : 7 * number + num_tokens]


Case = tuple[list[int], SamplingParams, tuple[str, ...]]
# Each has a prompt of its own, so that none finds another's KV.
CASES: dict[str, Case] = {
    "greedy": (prompt_of(0), GREEDY, ()),
    "seeded": (prompt_of(1), SEEDED, ()),
    "penalties": (
        prompt_of(2),
        SamplingParams(
            temperature=0.7, seed=3, max_tokens=8, ignore_eos=True,
            repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5,
        ),
        (),
    ),
    "logprobs": (prompt_of(3), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=3), ()),
    "prompt logprobs": (
        prompt_of(4), SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=2), ()
    ),
    "n=3": (prompt_of(5), SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=6, ignore_eos=True), ()),
    "max_tokens 1": (prompt_of(6), SamplingParams(temperature=0.0, max_tokens=1), ()),
    "JSON schema": (
        prompt_of(7),
        SamplingParams(temperature=1.0, seed=2, max_tokens=24, grammar=grammar_of("json", SCHEMA, "json")),
        (),
    ),
    "block minus one": (prompt_of(8, BLOCK_SIZE - 1), GREEDY, ()),
    "exactly a block": (prompt_of(9, BLOCK_SIZE), GREEDY, ()),
    "block plus one": (prompt_of(10, BLOCK_SIZE + 1), GREEDY, ()),
}  # fmt: skip
# Whose first blocks both sides know from answers before, or only one of them: what P may skip, and what D may.
CACHED = 2 * BLOCK_SIZE
HITS: dict[str, tuple[Case, int, int]] = {
    "known to both": (CASES["greedy"], CACHED, CACHED),
    "known to prefill": ((CASES["max_tokens 1"][0], GREEDY, ()), CACHED, 0),
    "known to decode": ((prompt_of(11), GREEDY, ()), 0, CACHED),
}


@asynccontextmanager
async def cluster(roles: Sequence[Role], transport: str) -> AsyncIterator[tuple[TextService, dict[str, Worker]]]:
    local = Transports([LocalTransport()])
    async with AsyncExitStack() as stack:
        workers: dict[str, Worker] = {}
        for role in roles:
            transfer = TransferConfig.model_validate({"transport": "grpc" if transport == "local" else transport})
            worker = Worker(worker_config(role, transfer))
            if transport == "local":
                worker.transports = local
            await worker.start()
            stack.push_async_callback(worker.stop)
            workers[role] = worker
        config = RouterConfig(heartbeat_s=0.5)
        pool = WorkerPool([worker.address for worker in workers.values()], "router", config, GrpcNetwork())
        await pool.start()
        stack.push_async_callback(pool.stop)
        router = Router(pool, config, "router")
        stack.push_async_callback(router.stop)
        yield TextService(router, tokenizer(), ["smol"], max_model_len=512, vocab_size=49152), workers


def worker_config(role: Role, transfer: TransferConfig) -> WorkerConfig:
    return WorkerConfig(
        model=MODEL,
        name=role,
        role=role,
        block_size=BLOCK_SIZE,
        max_model_len=512,
        num_gpu_blocks_override=128,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        num_threads=1,
        transfer=transfer,
    )


async def complete(text: TextService, case: Case, request_id: str) -> list[TextChunk]:
    prompt, params, stops = case
    async with aclosing(text.complete(prompt, params, request_id, TextOptions(stops))) as chunks:
        return [chunk async for chunk in chunks]


def answer_of(chunks: Sequence[TextChunk]) -> dict[int, tuple[list[int], str, FinishReason | None]]:
    """Of each choice: tokens, text, and why it ended."""
    found: dict[int, tuple[list[int], str, FinishReason | None]] = {}
    for chunk in chunks:
        tokens, text, _ = found.get(chunk.choice, ([], "", None))
        assert chunk.index == len(tokens)
        found[chunk.choice] = ([*tokens, *chunk.token_ids], text + chunk.text, chunk.finish_reason)
    return dict(sorted(found.items()))


def require_same_scores(mine: Sequence[TokenLogprobs], others: Sequence[TokenLogprobs]) -> None:
    assert [one.token_id for one in mine] == [one.token_id for one in others]
    for one, other in zip(mine, others, strict=True):
        assert (one.logprob, *one.top_logprobs) == pytest.approx((other.logprob, *other.top_logprobs), abs=1e-3)


async def answers_to(text: TextService, cases: dict[str, Case]) -> dict[str, list[TextChunk]]:
    answers = await asyncio.gather(*(complete(text, case, name.replace(" ", "-")) for name, case in cases.items()))
    return dict(zip(cases, answers, strict=True))


@cache
def colocated() -> dict[str, list[TextChunk]]:
    async def main() -> dict[str, list[TextChunk]]:
        async with cluster(["colocated"], "grpc") as (text, _):
            return await answers_to(text, CASES) | await answers_to(
                text, {name: case for name, (case, _, _) in HITS.items()}
            )

    torch.set_num_threads(1)
    return asyncio.run(main())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_handed_over_is_colocated(transport):
    expected = colocated()
    stop = answer_of(expected["greedy"])[0][1][:3]

    async def main() -> None:
        async with cluster(["prefill", "decode"], transport) as (text, workers):
            decode = workers["decode"]
            answers = await answers_to(text, CASES)
            for name, chunks in answers.items():
                assert answer_of(chunks) == answer_of(expected[name]), name
                require_same_scores(*([s for c in some for s in c.logprobs] for some in (chunks, expected[name])))
                require_same_scores(
                    *([s for c in some for s in c.prompt_logprobs] for some in (chunks, expected[name]))
                )
            ((_, written, reason),) = answer_of(answers["JSON schema"]).values()
            assert (set(json.loads(written)), reason) == ({"ok"}, FinishReason.STOP)
            assert decode.engine.num_prompt_tokens_computed == 0
            assert [peer.transport for peer in workers["prefill"].stats().peers] == [transport]
            # A stop string in token 1, whose prompt both sides know by now.
            prompt, params, _ = CASES["greedy"]
            (ended,) = answer_of(await complete(text, (prompt, params, (stop,)), "stop")).values()
            assert (len(ended[0]), ended[1], ended[2]) == (1, "", FinishReason.STOP)
            await require_hits(text, workers)
            await until_free(workers)

    torch.set_num_threads(1)
    asyncio.run(main())


async def until_free(workers: dict[str, Worker]) -> None:
    async with asyncio.timeout(5):
        while any(worker.engine.requests or worker.engine.held for worker in workers.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for worker in workers.values():
        worker.engine.check_integrity()


async def require_hits(text: TextService, workers: dict[str, Worker]) -> None:
    """What either side knows of a prompt costs it nothing again, and changes no answer."""
    decode, prefill = workers["decode"], workers["prefill"]
    prompt, params, _ = HITS["known to decode"][0]
    await answer(decode, Request("alone", prompt, params))
    for name, (case, by_prefill, by_decode) in HITS.items():
        num_tokens = len(case[0])
        await until_free(workers)
        received, computed = decode.decode.num_bytes_received, prefill.engine.num_prompt_tokens_computed
        chunks = await complete(text, case, "again")
        num_received = (decode.decode.num_bytes_received - received) / decode.layout.token_bytes
        assert num_received == num_tokens - by_decode, name
        assert prefill.engine.num_prompt_tokens_computed - computed == num_tokens - by_prefill, name
        assert chunks[-1].num_cached_tokens == by_prefill, name
        assert answer_of(chunks) == answer_of(colocated()[name]), name
        assert len(answer_of(chunks)[0][0]) == GREEDY.max_tokens
