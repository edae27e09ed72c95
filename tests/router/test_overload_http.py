"""Overload over real sockets: every request is answered, or told with a 429 to come again."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from tests.router.whole import GOOD, whole_router


def test_more_requests_than_can_wait_get_429_with_retry_after_and_all_others_their_answer():
    async def main() -> None:
        # Room for few at once, and a short queue; jobs fill it first.
        worker: dict[str, Any] = {"num_gpu_blocks_override": 24}
        async with whole_router(worker, max_num_queued_reqs=6) as whole, whole.client() as http:
            statuses: Counter[tuple[int, int]] = Counter()

            async def ask(at: int, priority: int) -> None:
                body = {**GOOD, "prompt": [5 + at] * 20, "max_tokens": 40, "priority": priority, "stream": at % 2 == 0}
                response = await http.post("/v1/completions", json=body)
                statuses[priority, response.status_code] += 1
                if response.status_code == 429:
                    assert response.headers["retry-after"].isdecimal()
                    assert response.json()["error"]["code"] == "queue_full"
                elif body["stream"]:
                    assert response.text.endswith("data: [DONE]\n\n")
                else:
                    assert response.json()["usage"]["completion_tokens"] == 40

            jobs = [asyncio.create_task(ask(at, 100)) for at in range(50)]
            await asyncio.sleep(0.1)
            async with asyncio.timeout(20):
                await asyncio.gather(*(ask(at, 0) for at in range(4)))
                await asyncio.gather(*jobs)
            assert {status for _, status in statuses} == {200, 429}
            assert statuses[0, 200] == 4
            assert statuses[100, 429] > 20

    asyncio.run(main())
