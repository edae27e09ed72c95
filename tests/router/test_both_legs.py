"""What a client asks for over HTTP reaches both workers of its request as it was meant, and nothing is done twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from cluster.sim.loop import run
from router.openai.app import build_app
from router.text import TextService
from tests import fake_model
from tests.factories import GREEDY, SimCluster, prompt_of, sim_cluster
from tests.fake_model import VOCAB_SIZE, expected_tokens
from tests.router.scripted import StaticPool, smollm
from workers.tokenizer import Tokenizer

PROMPT = prompt_of(10)


@asynccontextmanager
async def http_of(cluster: SimCluster):
    text = TextService(cluster.router, smollm(), ["fake"], max_model_len=160, vocab_size=VOCAB_SIZE)
    transport = httpx.ASGITransport(build_app(text, StaticPool()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return str(response.json()["choices"][0]["text"])
    *pieces, done = [line.removeprefix("data: ") for line in response.text.split("\n\n")[:-1]]
    assert done == "[DONE]"
    return "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("min_tokens", [None, 2, 7])
def test_a_stream_and_min_tokens_are_no_business_of_prefills_alone(stream: bool, min_tokens: int | None):
    body = {"prompt": PROMPT, "max_tokens": 7, "min_tokens": min_tokens, "stream": stream, "temperature": 0}
    wanted = smollm().decode(expected_tokens(PROMPT, replace(GREEDY, max_tokens=7)))

    async def main() -> None:
        async with sim_cluster() as cluster, http_of(cluster) as http:
            assert text_of(await http.post("/v1/completions", json=body | {"ignore_eos": True})) == wanted

    run(main())


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Grows by one with each call."""
    calls: list[Any] = []
    real: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **how: Any) -> Any:
        calls.append(args)
        return real(*args, **how)

    monkeypatch.setattr(owner, name, call)
    return calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_tokenised_once_and_each_token_sampled_once(monkeypatch: pytest.MonkeyPatch, stream: bool):
    # Of the model's small vocabulary.
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: PROMPT)
    encoded = counted(monkeypatch, Tokenizer, "encode")
    samples = counted(monkeypatch, fake_model, "sample")
    asked = {"max_tokens": 7, "temperature": 0, "ignore_eos": True, "stream": stream}

    async def main() -> None:
        async with sim_cluster() as cluster, http_of(cluster) as http:
            for path, prompt in (("completions", {"prompt": "Hi"}), ("completions", {"prompt": "Hi", "echo": True})):
                await http.post(f"/v1/{path}", json=asked | prompt)
            await http.post("/v1/chat/completions", json=asked | {"messages": [{"role": "user", "content": "Hi"}]})
            await http.post("/v1/responses", json={"max_output_tokens": 7, "input": "Hi", "ignore_eos": True})
            assert [w.engine.num_prompt_tokens_computed for w in cluster.workers.values()] == [4 * len(PROMPT), 0]

    run(main())
    assert len(encoded) == 4
    assert len(samples) == 4 * 7


def test_several_tokens_in_decodes_first_message_are_all_new(monkeypatch: pytest.MonkeyPatch):
    """Drafts that hold make it so: with three tokens to choose from they often do."""
    monkeypatch.setattr("tests.fake_model.VOCAB_SIZE", 3)
    ngram = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    params = replace(GREEDY, max_tokens=12)
    firsts: list[int] = []

    async def main() -> None:
        async with sim_cluster(speculative_config=ngram) as cluster:
            for seed in range(8):
                prompt = [token % 3 for token in prompt_of(16, seed)]
                outputs = await cluster.outputs(prompt, params, f"r{seed}")
                assert [token for output in outputs for token in output.token_ids] == expected_tokens(prompt, params)
                firsts.append(len(outputs[1].token_ids))
            # None was missed, and so none asked for again.
            assert cluster.workers["p0"].engine.num_prompt_tokens_computed == 8 * 16

    run(main())
    assert max(firsts) > 1
