"""Where a request's time went: the parts add up to what its client waited, whatever happens on the way."""

from __future__ import annotations

import json
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.sim.loop import run, virtual_loop
from cluster.sim.network import delay
from router.answer import TextChunk, TextOptions
from router.text import TextService
from tests.factories import GREEDY, SimCluster, prompt_of, sim_cluster
from tests.fake_model import VOCAB_SIZE, expected_tokens
from tests.router.openai_calls import HI, events, post
from tests.router.scripted import TIMELINE, smollm
from workers.errors import NotFoundError

PLACES = {"1P1D": (1, 1, 0), "colocated": (0, 0, 1)}
LONG = replace(GREEDY, max_tokens=40)
SHOW = {"X-Kvferry-Timeline": "1"}
PHASES = (
    "queued_s",
    "prefill_queued_s",
    "prefill_s",
    "transfer_s",
    "transfer_unhidden_s",
    "decode_queued_s",
    "decode_s",
)


def no_time(rng, num_bytes):
    """A network without latency: nothing but the phases takes time."""
    return 0.0


def text_of(cluster: SimCluster) -> TextService:
    return TextService(cluster.router, smollm(), ["fake"], max_model_len=160, vocab_size=VOCAB_SIZE)


async def complete(
    cluster: SimCluster, prompt, params=LONG, stops: tuple[str, ...] = ()
) -> tuple[list[TextChunk], float]:
    """The answer's pieces, and the seconds that they took."""
    began = virtual_loop().time()
    async with aclosing(text_of(cluster).complete(list(prompt), params, "r", TextOptions(stops))) as stream:
        chunks = [chunk async for chunk in stream]
    return chunks, virtual_loop().time() - began


@pytest.mark.parametrize("length", [5, 60])
@pytest.mark.parametrize("place", PLACES)
def test_without_a_network_the_parts_are_the_whole(place, length):
    async def main() -> None:
        async with sim_cluster(*PLACES[place], latency=no_time) as cluster:
            chunks, passed_s = await complete(cluster, prompt_of(length))
            timeline = chunks[-1].timeline
            assert timeline is not None
            assert timeline.total_s == pytest.approx(passed_s, abs=1e-9)
            assert min(timeline.prefill_s, timeline.decode_s) > 0
            assert (timeline.transfer_s > 0) == (place == "1P1D")

    run(main())


@pytest.mark.parametrize("place", PLACES)
def test_an_answer_that_a_stop_string_ends_has_its_whole_timeline_too(place):
    said = [smollm().decode([token]) for token in expected_tokens(prompt_of(10), LONG)]
    stop = next(text for text in said[10:] if text.isascii() and text.strip() and text not in "".join(said[:10]))

    async def main() -> None:
        async with sim_cluster(*PLACES[place], latency=no_time) as cluster:
            chunks, passed_s = await complete(cluster, prompt_of(10), stops=(stop,))
            timeline = chunks[-1].timeline
            assert timeline is not None
            assert chunks[-1].num_completion_tokens < 40
            assert timeline.total_s == pytest.approx(passed_s, abs=1e-9)
            assert timeline.prefill_s > 0
            assert (timeline.transfer_s > 0) == (place == "1P1D")

    run(main())


def test_time_that_a_dead_worker_took_with_it_is_counted_where_it_went():
    async def main() -> None:
        async with sim_cluster(1, 2, latency=no_time) as cluster:
            text = text_of(cluster)
            began = virtual_loop().time()
            async with aclosing(text.complete(prompt_of(10), LONG, "r")) as stream:
                chunks = []
                async for chunk in stream:
                    chunks.append(chunk)
                    if len(chunks) == 9:
                        await cluster.kill(next(name for name in cluster.busy() if name.startswith("d")))
            timeline = chunks[-1].timeline
            assert timeline is not None
            assert timeline.total_s == pytest.approx(virtual_loop().time() - began, abs=1e-9)
            first, second = cluster.router.traces.tell("r")[0].tries
            assert (first.error, second.error) != ("", "")
            assert first.timeline.decode_s > 0
            assert second.began_s == pytest.approx(first.elapsed_s)
            assert second.timeline.queued_s > 0, "the pause before it"
            parts = [one.timeline.decode_s for one in (first, second)]
            assert timeline.decode_s == pytest.approx(sum(parts))

    run(main())


def test_e10_the_first_token_does_not_wait_for_the_transfer():
    async def main() -> None:
        async with sim_cluster(1, 1, latency=no_time) as cluster:
            plain, _ = await complete(cluster, prompt_of(10))
            cluster.network.fault("Put", delay(0.2))
            slow, _ = await complete(cluster, prompt_of(10, seed=1))
            assert slow[-1].timeline is not None
            assert slow[-1].timeline.transfer_unhidden_s > 0.2
            # Of one chunk: prefill hid nothing of it.
            assert slow[-1].timeline.transfer_s == slow[-1].timeline.transfer_unhidden_s
            assert slow[-1].ttft_s == pytest.approx(plain[-1].ttft_s, abs=0.01)

    run(main())


def test_a_trace_tells_of_requests_that_run_and_of_the_latest_that_ended():
    async def main() -> None:
        async with sim_cluster(router={"max_traces": 2}) as cluster:
            async with aclosing(cluster.router.generate(prompt_of(10), LONG, "long")) as stream:
                await anext(stream)
                await anext(stream)
                [trace] = cluster.router.traces.tell("long")
                assert (trace.outcome, trace.num_prompt_tokens) == ("running", 10)
                [one] = trace.tries
                assert one.running
                assert (one.prefill, one.decode) == (
                    cluster.workers["p0"].config.name,
                    cluster.workers["d0"].config.name,
                )
                assert one.timeline.prefill_s > 0
                for name in ("a", "b", "c"):
                    await cluster.ask(prompt_of(5), GREEDY, name)
                assert cluster.router.traces.tell("long")[0].outcome == "running"
            assert cluster.router.traces.tell("long")[0].outcome.startswith("closed by its reader")
            assert cluster.router.traces.tell("c")[0].outcome == "length"
            for forgotten in ("a", "b", ""):
                with pytest.raises(NotFoundError, match=r"router\.max_traces"):
                    cluster.router.traces.tell(forgotten)

    run(main())


def test_every_prompt_of_a_request_has_a_trace_and_ids_that_begin_alike_have_none():
    async def main() -> None:
        async with sim_cluster() as cluster:
            for name in ("x-0", "x-1", "x.ab", "xy"):
                await cluster.ask(prompt_of(5), GREEDY, name)
            assert [one.request_id for one in cluster.router.traces.tell("x")] == ["x-0", "x-1", "x.ab"]

    run(main())


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_over_http_the_timeline_comes_with_the_header_only(path):
    asked = HI if path.startswith("/chat") else {"prompt": "Hi"}
    shown = {name: getattr(TIMELINE, name) for name in PHASES}
    assert post(path, asked, headers=SHOW).json()["kvferry"] == {"timeline": shown}
    assert "kvferry" not in post(path, asked).json()
    body = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    *pieces, last, usage, _ = events(post(path, body, headers=SHOW))
    assert (last["choices"][0]["finish_reason"], last["kvferry"]) == ("length", {"timeline": shown})
    assert all("kvferry" not in piece for piece in (*pieces, usage))
    assert "kvferry" not in json.dumps(events(post(path, body)))
