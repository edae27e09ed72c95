"""Two workers over real gRPC whose KV goes by Gloo, or NIXL: the same tokens as from one, and nothing left of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.factories import GREEDY, in_use, make_config, make_request, tokens_of
from tests.fake_model import HashRunner, expected_tokens
from tests.workers.kv_transfer.groups import no_thread_left, until
from tests.workers.kv_transfer.test_nixl import needs_nixl
from tests.workers.pair import ROUTER, copy_of
from workers.engine.executor import Executor
from workers.kv_transfer.nccl import GroupSession
from workers.kv_transfer.pair_group import PairGroup
from workers.request import FinishReason, Request, TokenOutput
from workers.worker import Worker


def real_worker(name: str, port: int = 0, transport: str = "gloo") -> Worker:
    config = make_config(name=name, port=port, num_gpu_blocks_override=256, transfer={"transport": transport})
    return Worker(config, make_executor=lambda config: Executor(HashRunner(config)))


class Duo:
    def __init__(self, transport: str) -> None:
        self.prefill, self.decode = (real_worker(name, transport=transport) for name in "pd")
        self.outputs: dict[str, list[TokenOutput]] = {}
        self._listening: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.prefill.start()
        await self.start_decode(self.decode)

    async def start_decode(self, worker: Worker) -> None:
        self.decode = worker
        await worker.start()
        self._listening.append(asyncio.create_task(self._listen(worker)))

    async def answer(self, request: Request) -> list[int]:
        """The whole answer; [] where it ended by an error."""
        first = await self.prefill.prefill(copy_of(request), self.decode.reserve(copy_of(request)))
        outputs = self.outputs.setdefault(request.request_id, [])
        await until(lambda: any(output.finish_reason for output in outputs))
        return [] if outputs[-1].finish_reason is FinishReason.ERROR else tokens_of([*first, *outputs])

    async def until_idle(self) -> None:
        await until(lambda: not in_use(self.prefill) and not in_use(self.decode), within_s=3.0)

    async def stop(self) -> None:
        for task in self._listening:
            task.cancel()
        await self.prefill.stop()
        await self.decode.stop()

    async def _listen(self, worker: Worker) -> None:
        async for step in worker.outputs.stream(ROUTER):
            for output in step:
                self.outputs.setdefault(output.request_id, []).append(output)


def on_duo(script: Callable[[Duo], Awaitable[Any]], transport: str = "gloo") -> None:
    """Run `script`; afterwards all blocks are free, and no thread is left."""

    async def main() -> None:
        async with no_thread_left():
            duo = Duo(transport)
            await duo.start()
            try:
                await script(duo)
                await duo.until_idle()
            finally:
                await duo.stop()

    asyncio.run(main())


def requests(count: int, num_tokens: int = 50) -> list[Request]:
    return [make_request(list(range(i, i + num_tokens)), GREEDY, f"r{i}") for i in range(count)]


def oracle(request: Request) -> list[int]:
    return expected_tokens(request.prompt_token_ids, request.params)


@pytest.mark.parametrize("transport", ["gloo", pytest.param("nixl", marks=needs_nixl)])
def test_the_answers_are_those_of_one_worker_and_every_frame_went_by_it(transport):
    async def script(duo: Duo) -> None:
        asked = requests(6)
        assert await asyncio.gather(*map(duo.answer, asked)) == [oracle(request) for request in asked]
        sent, received = duo.prefill.stats(), duo.decode.stats()
        assert sent.num_frames_sent == received.num_frames_received > 6
        assert sent.kv_bytes_sent == received.kv_bytes_received == 6 * 50 * duo.prefill.layout.token_bytes
        assert [(peer.transport, peer.address) for peer in sent.peers] == [(transport, duo.decode.address)]

    on_duo(script, transport)


def test_a_flipped_bit_is_caught_before_token_2(monkeypatch):
    async def script(duo: Duo) -> None:
        send = PairGroup.send

        def damaged(group: PairGroup, packed: bytearray, timeout_s: float) -> Any:
            packed[len(packed) // 2] ^= 16
            return send(group, packed, timeout_s)

        (bad, good) = requests(2)
        with monkeypatch.context() as patched:
            patched.setattr(PairGroup, "send", damaged)
            assert await duo.answer(bad) == []
        assert [output.error_type for output in duo.outputs["r0"]] == ["FrameError"]
        assert await duo.answer(good) == oracle(good)

    on_duo(script)


def test_a_group_that_breaks_costs_what_was_on_its_way_and_no_more():
    async def script(duo: Duo) -> None:
        asked = requests(4, num_tokens=120)
        answers = [asyncio.ensure_future(duo.answer(request)) for request in asked]
        await until(lambda: duo.decode.stats().num_frames_received > 3)
        (peer,) = duo.prefill._peers.connected
        outgoing: GroupSession = peer._sender._session  # type: ignore[attr-defined]
        outgoing.group.lane.end()
        results = await asyncio.gather(*answers, return_exceptions=True)
        for request, result in zip(asked, results, strict=True):
            assert isinstance(result, Exception) or result in ([], oracle(request))
        await duo.until_idle()
        assert await duo.answer(requests(5)[-1]) == oracle(requests(5)[-1])

    on_duo(script)


def test_a_decode_worker_replaced_on_the_same_port_is_sent_to_at_once():
    async def script(duo: Duo) -> None:
        first, lost, second = requests(3)
        assert await duo.answer(first) == oracle(first)
        grant = duo.decode.reserve(copy_of(lost))
        await duo.decode.stop()
        await duo.start_decode(real_worker("d", port=int(grant.address.rsplit(":", 1)[1])))
        # A grant of the one that is no more: token 1 is all that comes of it.
        (token_1,) = await duo.prefill.prefill(copy_of(lost), grant)
        assert list(token_1.token_ids) == oracle(lost)[:1]
        await duo.until_idle()
        assert await duo.answer(second) == oracle(second)
        assert [peer.incarnation for peer in duo.prefill.stats().peers] == [duo.decode.incarnation]

    on_duo(script)


def test_requests_aborted_in_the_middle_leave_the_group_to_the_others():
    async def script(duo: Duo) -> None:
        asked = requests(6, num_tokens=100)
        answers = [asyncio.ensure_future(duo.answer(request)) for request in asked]
        await until(lambda: duo.decode.stats().num_frames_received > 2)
        for answer, request in list(zip(answers, asked, strict=True))[::2]:
            answer.cancel()
            duo.prefill.abort(request.request_id)
            duo.decode.abort(request.request_id)
        results = await asyncio.gather(*answers, return_exceptions=True)
        assert results[1::2] == [oracle(request) for request in asked[1::2]]

    on_duo(script)
