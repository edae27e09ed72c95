"""Prefill and decode with other weights each, through deaths and preemption: every position keeps its role's weights.

The oracle computes prompt positions with prefill's weights and generated ones with decode's, without any cache.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.sim.loop import run
from tests.factories import BLOCK_SIZE, GREEDY, SEEDED, SimCluster, prompt_of, runner_of, sim_cluster
from tests.fake_model import kv_of, sample, weights_of
from tests.router.simulated import LONG, ask, tokens_until
from workers.errors import UnavailableError
from workers.request import Request, SamplingParams

PROMPT, DECODED = weights_of("int8_dynamic"), weights_of("native")
UNEQUAL: dict[str, Any] = {
    "enable_prefix_caching": True,
    "of_role": {
        "prefill": {"quantization": "int8_dynamic"},
        "decode": {"quantization": "native", "prefill_quantization": "int8_dynamic"},
    },
}
DRAWN = replace(SEEDED, max_tokens=40)


def oracle(prompt: Sequence[int], params: SamplingParams, choice: int = 0, so_far: Sequence[int] = ()) -> list[int]:
    """An answer of max_tokens, which begins with `so_far`."""
    assert params.max_tokens
    kv = np.concatenate((kv_of(prompt) ^ PROMPT, kv_of(so_far, len(prompt)) ^ DECODED), axis=2)
    tokens = list(so_far)
    for position in range(len(prompt) + len(tokens), len(prompt) + params.max_tokens):
        tokens.append(sample(kv, params, position, choice).token_id)
        kv = np.concatenate((kv, kv_of(tokens[-1:], position) ^ DECODED), axis=2)
    return tokens


def oracles(prompt: Sequence[int], params: SamplingParams) -> dict[int, list[int]]:
    return {choice: oracle(prompt, params, choice) for choice in range(params.n)}


def ends_computed(cluster: SimCluster, role: str) -> dict[str, int]:
    """By request, the last position that workers of a role computed; tries are counted together."""
    found: dict[str, int] = {}
    for name, worker in cluster.workers.items():
        for step in runner_of(worker.engine).steps if name.startswith(role) else ():
            for request_id, start, num_tokens in step:
                key = request_id.split("#")[0]
                found[key] = max(found.get(key, 0), start + num_tokens)
    return found


@pytest.mark.parametrize("params", [LONG, DRAWN, replace(DRAWN, n=3)], ids=["greedy", "drawn", "n=3"])
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_a_stream_that_loses_its_decode_worker_goes_on_as_if_nothing_had_been(params, num_tokens):
    async def main() -> None:
        async with sim_cluster(1, 2, **UNEQUAL) as cluster:
            prompts = [prompt_of(length) for length in (1, 16, 37)]
            streams = [asyncio.create_task(cluster.choices(p, params, f"r{i}")) for i, p in enumerate(prompts)]
            await cluster.kill(await tokens_until(cluster, num_tokens))
            assert await asyncio.gather(*streams) == [oracles(prompt, params) for prompt in prompts]
            assert ends_computed(cluster, "p") == {f"r{i}": len(p) for i, p in enumerate(prompts)}

    run(main())


def test_it_goes_on_where_its_prompt_is_known_already():
    async def main() -> None:
        async with sim_cluster(1, 2, **UNEQUAL) as cluster:
            prompt = prompt_of(4 * BLOCK_SIZE)
            stream = ask(cluster, len(prompt))
            busy = await tokens_until(cluster, 10)
            other = ({"d0", "d1"} - {busy}).pop()
            await cluster.ask(prompt, GREEDY, "same prompt")
            assert cluster.workers[other].stats().blocks_cached == 4
            await cluster.kill(busy)
            assert await stream == oracle(prompt, LONG)

    run(main())


def test_a_later_prompt_that_holds_its_answer_lends_it_no_kv():
    """A second turn's prompt is the first's and its answer, all of it computed by prefill: right for the second."""

    async def main() -> None:
        async with sim_cluster(1, 2, **UNEQUAL) as cluster:
            prompt = prompt_of(10)
            first = ask(cluster, len(prompt))
            busy = await tokens_until(cluster, 20)
            second = prompt + oracle(prompt, LONG)[:18]
            assert await cluster.ask(second, GREEDY, "second") == oracle(second, GREEDY)
            other = ({"d0", "d1"} - {busy}).pop()
            assert cluster.workers[other].stats().blocks_cached == 7
            await cluster.kill(busy)
            assert await first == oracle(prompt, LONG)

    run(main())


@pytest.mark.parametrize("params", [LONG, replace(DRAWN, n=3)], ids=["greedy", "n=3"])
def test_who_gives_way_to_others_has_its_prompt_computed_by_prefill_again(params):
    async def main() -> None:
        async with sim_cluster(1, 1, num_gpu_blocks_override=24, max_model_len=96, **UNEQUAL) as cluster:
            prompts = [prompt_of(length) for length in (5, 6, 7)]
            answers = await asyncio.gather(*(cluster.choices(p, params, f"r{i}") for i, p in enumerate(prompts)))
            assert cluster.workers["d0"].engine.scheduler.num_preemptions > 0
            assert answers == [oracles(prompt, params) for prompt in prompts]
            assert ends_computed(cluster, "p") == {f"r{i}": len(p) for i, p in enumerate(prompts)}
            assert cluster.workers["d0"].engine.num_prompt_tokens_computed == 0

    run(main())


@pytest.mark.parametrize("so_far", [oracle(prompt_of(21), GREEDY)[:4], [3, 1, 4]], ids=["its own", "others"])
def test_a_client_that_brings_tokens_gets_the_rest_whatever_token_1_would_be_now(so_far):
    prompt = prompt_of(21)
    token_1 = oracle(prompt, GREEDY)[0]
    params = GREEDY if so_far[0] == token_1 else replace(GREEDY, stop_token_ids=(token_1,))

    async def main() -> None:
        async with sim_cluster(1, 1, **UNEQUAL) as cluster:
            async with aclosing(cluster.router.generate(prompt, params, "r", so_far={0: so_far})) as stream:
                outputs = [output.token_ids async for output in stream]
            assert all(outputs), "a client gets nothing that has no token"
            assert [*so_far, *itertools.chain(*outputs)] == oracle(prompt, GREEDY, so_far=so_far)

    run(main())


def test_decode_refuses_a_prompt_that_comes_without_kv():
    async def main() -> None:
        async with sim_cluster(1, 1, **UNEQUAL) as cluster:
            decode = cluster.pool.candidates("decode")[0]
            outputs = decode.expect("r")
            await decode.submit(Request("r", prompt_of(9), GREEDY, router_id="router-1"))
            with pytest.raises(UnavailableError, match="prefill's weights"):
                await outputs.next()
            decode.forget("r")
            assert runner_of(cluster.workers["d0"].engine).steps == []

    run(main())
