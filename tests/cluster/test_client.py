from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import aclosing, closing

import pytest

import cluster
from cluster.client import AsyncClient, Client, Completion
from tests.cluster.fake_router import WORDS
from workers.errors import DeadlineError, InvalidRequestError, KVFerryError, OverloadedError, UnavailableError
from workers.request import FinishReason


def run(target: str, kind: str, prompt, **options) -> Completion:
    """The same call through either client."""
    if kind == "sync":
        with Client(target) as client:
            return client.generate(prompt, **options)

    async def generate() -> Completion:
        async with AsyncClient(target) as client:
            return await client.generate(prompt, **options)

    return asyncio.run(generate())


both = pytest.mark.parametrize("kind", ["sync", "async"])


@both
def test_generate_returns_the_whole_answer(router, kind):
    completion = run(router.target, kind, "hi", max_tokens=4)
    assert completion.text == "".join(WORDS)
    assert completion.token_ids == (10, 11, 12, 13)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.usage.num_completion_tokens == 4
    assert completion.timeline.transfer_s == 0.25
    assert (completion.ttft_s, completion.tpot_s) == (0.6, 0.02)


@both
def test_every_option_reaches_the_router_and_the_rest_stays_unset(router, kind):
    run(router.target, kind, [1, 2], temperature=0.0, top_k=3, seed=5, stop_token_ids=[9], ignore_eos=True, model="m")
    request = router.requests[-1]
    assert list(request.token_ids.token_ids) == [1, 2]
    assert request.params.HasField("temperature")
    assert request.params.temperature == 0.0
    assert (request.params.top_k, request.params.seed, list(request.params.stop_token_ids)) == (3, 5, [9])
    assert request.params.ignore_eos
    assert request.model == "m"
    assert not request.params.HasField("top_p")
    assert not request.params.HasField("max_tokens")


@both
def test_prompts_of_three_kinds(router, kind):
    run(router.target, kind, "text")
    run(router.target, kind, [])
    run(router.target, kind, [{"role": "user", "content": "hi"}])
    assert [request.WhichOneof("prompt") for request in router.requests] == ["text", "token_ids", "messages"]
    assert router.requests[-1].messages.messages[0].content == "hi"


@both
@pytest.mark.parametrize(
    ("prompt", "options"),
    [([1, "a"], {}), ([{"rol": "user"}], {}), ("a", {"top_k": "x"}), ("a", {"foo": 1}), ([2**40], {})],
)
def test_what_cannot_be_sent_is_refused_here(router, kind, prompt, options):
    with pytest.raises(InvalidRequestError):
        run(router.target, kind, prompt, **options)
    assert not router.requests


@both
def test_errors_keep_their_type(router, kind):
    with pytest.raises(InvalidRequestError, match="must be positive") as caught:
        run(router.target, kind, "bad")
    assert caught.value.param == "max_tokens"
    with pytest.raises(OverloadedError):
        run(router.target, kind, "busy")
    with pytest.raises(DeadlineError):
        run(router.target, kind, "endless", timeout_s=0.3)


@both
def test_an_answer_without_an_end_is_an_error(router, kind):
    with pytest.raises(UnavailableError, match="without a finish reason"):
        run(router.target, kind, "broken")


@both
def test_unreachable_router_is_one_line_with_the_mend(kind):
    with pytest.raises(UnavailableError) as caught:
        run("127.0.0.1:9", kind, "hi")
    assert str(caught.value) == ("no router answers at 127.0.0.1:9; start one with `kvferry up`, or give its target")


def test_closing_a_stream_cancels_the_request(router):
    with Client(router.target) as client, closing(client.stream("endless")) as chunks:
        assert next(chunks).text == WORDS[0]
    assert router.cancelled.wait(5)


def test_closing_an_async_stream_cancels_the_request(router):
    async def read_one() -> None:
        async with AsyncClient(router.target) as client, aclosing(client.stream("endless")) as chunks:
            assert (await anext(chunks)).text == WORDS[0]

    asyncio.run(read_one())
    assert router.cancelled.wait(5)


def test_chunks_come_in_order_and_the_last_has_the_summary(router):
    with Client(router.target) as client:
        *chunks, last = client.stream("hi")
    assert [chunk.index for chunk in chunks] == [0, 1, 2, 3]
    assert all(chunk.finish_reason is None and chunk.usage is None for chunk in chunks)
    assert last.usage is not None


def test_status_of_both_clients(router):
    async def status():
        async with AsyncClient(router.target) as client:
            return await client.status()

    with Client(router.target) as client:
        assert client.status() == asyncio.run(status())
    with Client("127.0.0.1:9") as client, pytest.raises(KVFerryError):
        client.status()


def test_package_exports_the_clients_and_nothing_heavy():
    assert cluster.Client is Client
    assert cluster.AsyncClient is AsyncClient
    with pytest.raises(AttributeError):
        _ = cluster.Nothing
    code = "import sys, cluster; cluster.Client('x'); print({'torch', 'ray', 'pydantic'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
