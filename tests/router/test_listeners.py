"""What listens goes on listening, whatever it hears. A task that ended in silence leaves what looks well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import workers.services
from cluster.sim.loop import run, virtual_loop
from protos import worker_pb2
from router.worker_handle import WorkerHandle
from tests.factories import SimCluster, prompt_of, sim_cluster
from tests.fake_model import expected_tokens
from tests.router.simulated import LONG, ask, tokens_until
from tests.router.test_pool import handle_of
from workers.request import TokenOutput
from workers.wire import output_to_pb

# Long before a silent worker would be given up (router.token_timeout_s).
SOON_S = 10.0


def once(broken: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter([broken])
    return lambda *arguments: next(calls, otherwise)(*arguments)


def raises(*arguments: object) -> None:
    raise KeyError(99)


async def ask_two(cluster: SimCluster) -> tuple[list[asyncio.Task[list[int]]], WorkerHandle]:
    """Requests of 20 and of 30 tokens, and the decode worker of one of them, which has begun to decode."""
    asking = [ask(cluster, length) for length in (20, 30)]
    return asking, handle_of(cluster, await tokens_until(cluster, 5))


async def all_answer(asking: list[asyncio.Task[list[int]]]) -> None:
    began_s = virtual_loop().time()
    for length, answer in zip((20, 30), asking, strict=True):
        assert await answer == expected_tokens(prompt_of(length), LONG)
    assert virtual_loop().time() - began_s < SOON_S


def tries_of(cluster: SimCluster, length: int) -> int:
    return cluster.router.traces.tell(f"r{length}")[0].num_tries


def test_an_output_that_cannot_be_read_costs_its_own_request_a_try_and_no_other(monkeypatch):
    def of_a_newer_worker(output: TokenOutput) -> worker_pb2.TokenOutput:
        message = output_to_pb(output)
        if message.request_id.startswith("r20") and not strange:
            strange.append(message.request_id)
            message.finish_reason = 99  # type: ignore[assignment]
        return message

    strange: list[str] = ["not yet"]

    async def main() -> None:
        async with sim_cluster(1, 1) as cluster:
            asking, handle = await ask_two(cluster)
            strange.clear()
            await all_answer(asking)
            assert handle.reachable
            assert (tries_of(cluster, 20), tries_of(cluster, 30)) == (2, 1)

    monkeypatch.setattr(workers.services, "output_to_pb", of_a_newer_worker)
    run(main())
    assert strange


def test_a_stream_that_cannot_be_read_is_a_broken_one_and_is_opened_again():
    async def main() -> None:
        async with sim_cluster(1, 2) as cluster:
            asking, handle = await ask_two(cluster)
            handle._deliver = once(raises, handle._deliver)  # type: ignore[method-assign]
            await all_answer(asking)
            await asyncio.sleep(1.0)
            assert handle.reachable
            # Of outputs that come by the new stream.
            await all_answer([ask(cluster, length, name=f"again{length}") for length in (20, 30)])

    run(main())


def test_a_look_that_fails_is_told_and_is_not_the_last():
    async def main() -> None:
        async with sim_cluster(1, 2) as cluster:
            asking, handle = await ask_two(cluster)
            handle.pace.saw_stats = once(raises, handle.pace.saw_stats)  # type: ignore[method-assign]
            while handle.reachable:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert "KeyError: 99" in handle.status().refused
            await all_answer(asking)
            await asyncio.sleep(1.0)
            assert (handle.reachable, handle.status().refused) == (True, "")

    run(main())


def test_who_follows_kv_events_goes_on_after_one_that_cannot_be_read():
    async def main() -> None:
        async with sim_cluster(1, 1, enable_prefix_caching=True) as cluster:
            index = cluster.pool.index
            index.enter = once(raises, index.enter)  # type: ignore[method-assign]
            await cluster.ask(prompt_of(40), LONG)
            await asyncio.sleep(1.0)
            assert len(index)

    run(main())


@pytest.mark.parametrize("step", ["_fail_all", "wait_for_work"])
def test_a_worker_that_can_step_no_more_is_gone_for_all_to_see(step):
    async def main() -> None:
        async with sim_cluster(1, 2) as cluster:
            asking, handle = await ask_two(cluster)
            worker = cluster.workers[handle.name]
            if step == "_fail_all":
                worker._fail_all = raises  # type: ignore[assignment,method-assign]
                worker.engine.step = raises  # type: ignore[assignment,method-assign]
            else:
                worker.engine.wait_for_work = raises  # type: ignore[assignment,method-assign]
            cluster.dead.append(handle.name)
            await all_answer(asking)
            await asyncio.sleep(3.0)
            assert not handle.reachable
            await worker.stop()

    run(main())
