"""What a request reads of its worker: every token once and in order, however late it reads."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.sim.loop import run, virtual_loop
from router.outputs import Outputs
from workers.errors import DeadlineError, UnavailableError
from workers.request import FinishReason, TokenLogprobs, TokenOutput
from workers.timeline import Timeline

SILENT = DeadlineError("no token")


def output(index: int, *token_ids: int, choice: int = 0, finish: FinishReason | None = None) -> TokenOutput:
    scores = tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in token_ids)
    return TokenOutput("r", index, token_ids, finish, logprobs=scores, choice=choice)


async def read(outputs: Outputs, count: int) -> list[TokenOutput]:
    return [await outputs.next() for _ in range(count)]


def test_what_came_while_nobody_read_comes_as_one():
    async def main() -> None:
        outputs = Outputs()
        first = replace(output(0, 1, 2), timeline=Timeline(prefill_s=1.0))
        last = replace(output(3, 4, finish=FinishReason.STOP), timeline=Timeline(decode_s=2.0))
        for one in (first, output(2, 3), last):
            outputs.put(one)
        [whole] = await read(outputs, 1)
        assert (whole.index, whole.token_ids, whole.finish_reason) == (0, (1, 2, 3, 4), FinishReason.STOP)
        assert [one.token_id for one in whole.logprobs] == [1, 2, 3, 4]
        assert whole.timeline == Timeline(prefill_s=1.0, decode_s=2.0)

    run(main())


@pytest.mark.parametrize(
    "second",
    [output(0, 1), output(2, 3), output(1, 2, choice=1)],
    ids=["sent twice", "one is missing before it", "another choice's"],
)
def test_what_does_not_follow_is_left_alone(second):
    async def main() -> None:
        outputs = Outputs()
        outputs.put(output(0, 1))
        outputs.put(replace(second))
        assert await read(outputs, 2) == [output(0, 1), second]

    run(main())


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans()), max_size=30))
def test_whatever_the_order_of_writing_and_reading_every_choice_is_whole(steps):
    async def main() -> None:
        outputs, written, heard = Outputs(), {0: 0, 1: 0, 2: 0}, {0: 0, 1: 0, 2: 0}
        reading = asyncio.ensure_future(outputs.next())
        for choice, count, pause in steps:
            outputs.put(output(written[choice], *range(written[choice], written[choice] + count), choice=choice))
            written[choice] += count
            if pause:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            if reading.done():
                one = reading.result()
                assert one.token_ids == tuple(range(heard[one.choice], heard[one.choice] + len(one.token_ids)))
                heard[one.choice] += len(one.token_ids)
                reading = asyncio.ensure_future(outputs.next())
        while heard != written:
            one = await reading
            assert one.index == heard[one.choice]
            heard[one.choice] += len(one.token_ids)
            reading = asyncio.ensure_future(outputs.next())
        reading.cancel()

    run(main())


def test_a_failure_comes_after_what_had_arrived():
    async def main() -> None:
        outputs = Outputs()
        outputs.put(output(0, 1))
        outputs.fail(UnavailableError("gone"))
        outputs.fail(UnavailableError("said again"))
        assert (await outputs.next()).token_ids == (1,)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="gone"):
                await outputs.next()

    run(main())


def test_silence_is_counted_from_the_latest_token():
    async def main() -> None:
        outputs = Outputs()
        await asyncio.sleep(5)
        outputs.limit_silence(10.0, SILENT)
        for index in range(3):
            virtual_loop().call_later(9.0 * (index + 1), outputs.put, output(index, index))
        await read(outputs, 3)
        began = virtual_loop().time()
        with pytest.raises(DeadlineError):
            await outputs.next()
        assert virtual_loop().time() - began == pytest.approx(10.0)

    run(main())


def test_nothing_fails_once_it_is_closed():
    async def main() -> None:
        outputs = Outputs()
        outputs.limit_silence(10.0, SILENT)
        outputs.close()
        reading = asyncio.ensure_future(outputs.next())
        await asyncio.sleep(20)
        assert not reading.done()
        reading.cancel()

    run(main())
