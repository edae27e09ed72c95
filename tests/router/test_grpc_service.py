from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc
import grpc.aio
import pytest

from protos import router_pb2, router_pb2_grpc, worker_pb2
from tests.router.scripted import HANG, ScriptedRouter, smollm, words
from tests.router.serving import serving, until
from workers.chat_template import Chat
from workers.errors import OverloadedError
from workers.request import SamplingParams

GREEDY = worker_pb2.SamplingParams(temperature=0, max_tokens=3)
Stub: TypeAlias = "router_pb2_grpc.RouterServiceAsyncStub"


def with_stub(router: ScriptedRouter, use: Callable[[Stub], Awaitable[None]]) -> None:
    async def run() -> None:
        async with (
            serving(router) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
        ):
            await use(router_pb2_grpc.RouterServiceStub(channel))

    asyncio.run(run())


def test_generate_streams_pieces_and_ends_with_usage_and_times():
    router = ScriptedRouter(words(" one two 🤗"))

    async def use(stub: Stub) -> None:
        request = router_pb2.GenerateRequest(request_id="r1", model="smol", text="Hi", params=GREEDY)
        pieces = [piece async for piece in stub.Generate(request)]
        assert "".join(piece.text for piece in pieces) == " one two 🤗"
        assert [piece.index for piece in pieces] == list(range(len(pieces)))
        assert [token_id for piece in pieces for token_id in piece.token_ids] == smollm().encode(" one two 🤗")
        assert {piece.request_id for piece in pieces} == {"r1"}
        assert not any(piece.finish_reason or piece.HasField("usage") for piece in pieces[:-1])
        last = pieces[-1]
        assert last.finish_reason == worker_pb2.FINISH_REASON_LENGTH
        assert (last.usage.num_prompt_tokens, last.usage.num_completion_tokens) == (1, len(pieces))
        assert last.timeline.queued_s == 0.5
        assert min(last.ttft_s, last.tpot_s) > 0

    with_stub(router, use)
    [(ids, params, request_id)] = router.calls
    assert (ids, params.temperature, params.max_tokens, request_id) == (smollm().encode("Hi"), 0.0, 3, "r1")


def test_prompts_may_be_ids_or_messages():
    router = ScriptedRouter(words("x"))
    chat = router_pb2.Messages(messages=[router_pb2.ChatMessage(role="user", content="Hi")])

    async def use(stub: Stub) -> None:
        for request in (
            router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(token_ids=[5, 6])),
            router_pb2.GenerateRequest(messages=chat),
        ):
            assert [piece.text async for piece in stub.Generate(request)] == ["x"]

    with_stub(router, use)
    (ids, params, request_id), (rendered, _, _) = router.calls
    assert (ids, request_id[:4]) == ([5, 6], "gen-")
    assert (params.temperature, params.max_tokens) == (SamplingParams().temperature, 62)
    text = smollm().apply_chat_template(Chat([{"role": "user", "content": "Hi"}]))
    assert rendered == smollm().encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("request_", "code", "error", "param"),
    [
        (router_pb2.GenerateRequest(), "INVALID_ARGUMENT", "InvalidRequestError", "prompt"),
        (router_pb2.GenerateRequest(text=""), "INVALID_ARGUMENT", "InvalidRequestError", "prompt"),
        (
            router_pb2.GenerateRequest(messages=router_pb2.Messages()),
            "INVALID_ARGUMENT",
            "InvalidRequestError",
            "messages",
        ),
        (router_pb2.GenerateRequest(text="Hi", model="other"), "NOT_FOUND", "NotFoundError", "model"),
        (
            router_pb2.GenerateRequest(text="Hi", request_id="a b"),
            "INVALID_ARGUMENT",
            "InvalidRequestError",
            "request_id",
        ),
        (
            router_pb2.GenerateRequest(text="Hi", params=worker_pb2.SamplingParams(top_p=2)),
            "INVALID_ARGUMENT",
            "InvalidRequestError",
            "top_p",
        ),
    ],
)
def test_refusals_carry_their_type_and_field(request_: router_pb2.GenerateRequest, code: str, error: str, param: str):
    router = ScriptedRouter(words("never"))

    async def use(stub: Stub) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            [piece async for piece in stub.Generate(request_)]
        assert raised.value.code() == grpc.StatusCode[code]
        trailing = dict(raised.value.trailing_metadata() or ())
        assert (trailing["kvferry-error"], trailing["kvferry-param"]) == (error, param)

    with_stub(router, use)
    assert not router.calls


def test_a_failure_mid_stream_keeps_its_type():
    async def use(stub: Stub) -> None:
        call = stub.Generate(router_pb2.GenerateRequest(text="Hi"))
        first = await call.read()
        assert isinstance(first, router_pb2.GenerateResponse)
        assert first.text == " a"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert raised.value.details() == "full; retry"

    with_stub(ScriptedRouter([*words(" a"), OverloadedError("full; retry")]), use)


@pytest.mark.parametrize("said", ["", " a b"])
def test_a_cancelled_call_aborts_the_request(said: str):
    router = ScriptedRouter([*words(said), HANG])

    async def use(stub: Stub) -> None:
        call = stub.Generate(router_pb2.GenerateRequest(text="Hi", request_id="r1"))
        reading = asyncio.create_task(call.read())
        await until(lambda: router.num_running)
        if said:
            await reading
        call.cancel()
        await until(lambda: router.aborted == ["r1"])
        await asyncio.gather(reading, return_exceptions=True)

    with_stub(router, use)


def test_status():
    async def use(stub: Stub) -> None:
        status = await stub.GetStatus(router_pb2.GetStatusRequest())
        assert (status.name, status.ready, list(status.served_model_names)) == ("kvferry", True, ["smol"])
        assert status.http_endpoint.startswith("http://127.0.0.1:")
        assert status.grpc_endpoint.startswith("127.0.0.1:")
        [router] = status.routers
        assert (router.name, router.incarnation, router.num_queued, router.num_running) == (
            "router-0",
            "router-1",
            4,
            0,
        )

    with_stub(ScriptedRouter([], num_queued=4), use)
