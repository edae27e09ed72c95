"""The simulated network. Its oracle is grpc.aio: the same script, run over both, must see the same."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.sim.loop import run
from cluster.sim.network import SimNetwork
from tests.sim.echo import MOMENT_S, Script, Stage, ask, ask_stream, observe, play, read_all
from workers.rpc import GrpcNetwork


async def answers_and_errors(stage: Stage) -> Any:
    requests = (b"hello", b"fail", b"abort", b"")
    seen = [await observe(ask(stage.channel, request)) for request in requests]
    seen += [await read_all(ask_stream(stage.channel, request)) for request in requests]
    seen.append(await observe(ask(stage.channel, b"", "Nothing")))
    seen.append(await read_all(ask_stream(stage.channel, b"", "Nothing")))
    # When no initial metadata is sent, what comes first stands in for it.
    seen += [await read_all(ask_stream(stage.channel, request, "Written")) for request in requests]
    return seen


async def a_deadline_ends_both_ends(stage: Stage) -> Any:
    seen = await observe(ask(stage.channel, b"hang", timeout=0.1))
    await asyncio.sleep(MOMENT_S)
    return seen


async def a_cancelled_call_cancels_its_handler(stage: Stage) -> Any:
    call = ask(stage.channel, b"hang")
    asyncio.get_running_loop().call_later(MOMENT_S, call.cancel)
    seen = await observe(call), call.cancelled(), call.cancel()
    await asyncio.sleep(MOMENT_S)
    return seen


async def a_cancelled_waiter_cancels_its_call(stage: Stage) -> Any:
    calls = ask(stage.channel, b"hang"), ask_stream(stage.channel, b"hang")
    tasks = asyncio.create_task(observe(calls[0])), asyncio.create_task(read_all(calls[1]))
    await asyncio.sleep(MOMENT_S)
    for task in tasks:
        task.cancel()
    seen = await asyncio.gather(*tasks), [call.cancelled() for call in calls]
    await asyncio.sleep(MOMENT_S)
    return seen


async def a_closed_channel_cancels_its_calls(stage: Stage) -> Any:
    unary = asyncio.create_task(observe(ask(stage.channel, b"hang")))
    stream = asyncio.create_task(read_all(ask_stream(stage.channel, b"hang")))
    await asyncio.sleep(MOMENT_S)
    await stage.channel.close()
    seen = await unary, await stream
    await asyncio.sleep(MOMENT_S)
    with pytest.raises(grpc.aio.UsageError):
        await ask(stage.channel, b"late")
    return seen


async def a_stopped_server_breaks_its_calls(stage: Stage) -> Any:
    unary = asyncio.create_task(observe(ask(stage.channel, b"hang")))
    stream = asyncio.create_task(read_all(ask_stream(stage.channel, b"hang")))
    await asyncio.sleep(MOMENT_S)
    await stage.server.stop(None)
    return await unary, await stream


async def nobody_listens(stage: Stage) -> Any:
    await stage.server.stop(None)
    return await observe(ask(stage.channel, b"hello")), await read_all(ask_stream(stage.channel, b"hello"))


SCRIPTS: list[Script] = [
    answers_and_errors,
    a_deadline_ends_both_ends,
    a_cancelled_call_cancels_its_handler,
    a_cancelled_waiter_cancels_its_call,
    a_closed_channel_cancels_its_calls,
    a_stopped_server_breaks_its_calls,
    nobody_listens,
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_simulated_network_is_seen_as_grpc_is(script):
    assert run(play(script, SimNetwork().host())) == asyncio.run(play(script, GrpcNetwork()))
