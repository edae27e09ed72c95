"""Jobs and maps of both clients, against routers with a database."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import as_completed
from pathlib import Path

import pytest

from cluster.client import AsyncClient, Client, JobResult
from tests.cluster.job_server import job_server
from tests.router.jobs import jobs_config, token_of
from tests.router.scripted import smollm
from workers.errors import InvalidRequestError, NotFoundError, UnavailableError

PROMPTS = ["one", "two", "three"]


def expected(prompt: str, seed: int) -> tuple[int, ...]:
    return (token_of(smollm().encode(prompt), seed),)


def tokens_of(results: list[JobResult]) -> list[tuple[int, ...]]:
    return [result.completion.token_ids for result in results if result.completion]


def test_jobs_are_futures_of_all_results_in_the_order_of_the_prompts(tmp_path):
    with job_server(jobs_config(tmp_path)) as server, Client(server.target) as client:
        first, second = client.submit(PROMPTS, seed=1), client.submit(PROMPTS[:1], seed=2)
        done = {job: tokens_of(job.result()) for job in as_completed([first, second], timeout=20)}
        assert done == {first: [expected(prompt, 1) for prompt in PROMPTS], second: [expected("one", 2)]}
        assert (first.status, first.progress, first.usage.num_completion_tokens) == ("completed", 1.0, 3)
        assert first.timeline.prefill_s == 0.75


def test_results_come_while_the_job_runs(tmp_path):
    with job_server(jobs_config(tmp_path), num_permits=0) as server, Client(server.target) as client:
        job = client.submit(PROMPTS, seed=1)
        results = job.results()
        for count in (1, 2):
            server.permit(1)
            assert next(results).completion is not None
            assert (job.refresh().num_answered, job.status) == (count, "running")
        server.permit(1)
        assert len(list(results)) == 1


def test_a_client_that_comes_back_finds_its_jobs_and_can_cancel_them(tmp_path):
    with job_server(jobs_config(tmp_path), num_permits=1) as server:
        with Client(server.target) as client:
            job_id = client.submit(PROMPTS).id
        with Client(server.target) as client:
            assert [info.id for info in client.jobs.list()] == [job_id]
            job = client.jobs.get(job_id)
            assert next(job.results()).completion is not None
            assert job.cancel()
            assert not job.cancel()
            assert (job.status, len(job.result(timeout=5))) == ("cancelled", 1)
            with pytest.raises(NotFoundError, match="there is no job 'other'"):
                client.jobs.get("other")


def test_an_error_is_the_result_of_its_prompt_alone(tmp_path):
    with job_server(jobs_config(tmp_path)) as server, Client(server.target) as client:
        bad, good = client.submit(["long " * 200, "fine"]).result(timeout=20)
        assert bad.completion is None
        assert isinstance(bad.error, InvalidRequestError)
        assert (bad.error.code, good.error) == ("context_length_exceeded", None)


def test_whoever_waits_for_a_job_hears_when_its_client_is_closed(tmp_path):
    with job_server(jobs_config(tmp_path), num_permits=0) as server:
        with Client(server.target) as client:
            job = client.submit(PROMPTS)
        with pytest.raises(UnavailableError, match="the client is closed"):
            job.result(timeout=5)


def test_a_look_that_comes_late_does_not_bring_an_ended_job_back(tmp_path):
    async def run(target: str, job_id: str) -> None:
        async with AsyncClient(target) as client:
            job = await client.jobs.get(job_id)
            before = job.info
            assert await job.cancel()
            job._saw(before)
            assert job.status == "cancelled"

    with job_server(jobs_config(tmp_path), num_permits=0) as server, Client(server.target) as client:
        job = client.submit(PROMPTS)
        before = job.info
        assert job.cancel()
        job._see(before)
        assert job.status == "cancelled"
        asyncio.run(run(server.target, client.submit(PROMPTS).id))


def test_asyncs_jobs_are_awaited(tmp_path):
    async def run(target: str) -> None:
        async with AsyncClient(target) as client:
            jobs = [await client.submit(PROMPTS, seed=1), await client.submit(PROMPTS, seed=2)]
            for seed, results in enumerate(await asyncio.gather(*jobs), start=1):
                assert tokens_of(results) == [expected(prompt, seed) for prompt in PROMPTS]
            assert [info.id for info in await client.jobs.list()] == [job.id for job in reversed(jobs)]
            again = await client.jobs.get(jobs[0].id)
            assert (again.status, await again.cancel(), jobs[0].progress) == ("completed", False, 1.0)
            assert len([result async for result in again.results()]) == 3

    with job_server(jobs_config(tmp_path)) as server:
        asyncio.run(run(server.target))


def test_each_line_of_a_file_may_have_options_of_its_own(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "one"},
        {"prompt": [5, 6], "seed": 9},
        {"messages": [{"role": "user", "content": "Hi"}], "logit_bias": {"7": 1.0}},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    with job_server(jobs_config(tmp_path)) as server, Client(server.target) as client:
        client.submit(path, seed=1, max_tokens=3).result(timeout=20)
        asked = {request_id[-1]: (prompt, params) for prompt, params, request_id in server.router.calls}
    assert asked["0"][0] == smollm().encode("one")
    assert asked["1"][0] == [5, 6]
    assert [asked[at][1].seed for at in "012"] == [1, 9, 1]
    assert [asked[at][1].max_tokens for at in "012"] == [3, 3, 3]
    assert asked["2"][1].logit_bias == ((7, 1.0),)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not valid JSON"),
        ("[1]", 'must be {"prompt": ...} or {"messages": [...]}'),
        ('{"prompt": "a", "messages": []}', 'must be {"prompt": ...} or {"messages": [...]}'),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": 5}', "must be text, token ids or messages"),
        ('{"prompt": "a", "top_q": 1}', "unknown parameter 'top_q'"),
        ('{"prompt": "a", "top_k": "x"}', "cannot be sent"),
        ('{"prompt": "a", "request_id": "x"}', "request_id is not for jobs"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_submitted(tmp_path, line, says):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with Client("127.0.0.1:9") as client, pytest.raises(InvalidRequestError) as caught:
        client.submit(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert says in str(caught.value)


def test_a_file_that_is_not_there_is_said_to_be_so():
    with Client("127.0.0.1:9") as client, pytest.raises(InvalidRequestError, match="No such file"):
        client.submit(Path("nowhere.jsonl"))


def test_a_job_goes_on_for_its_client_when_the_router_that_it_asks_goes(tmp_path):
    """The second router answers what the first one had not."""
    config = jobs_config(tmp_path, max_in_flight=2)
    with (
        job_server(config, num_permits=3) as first,
        job_server(config, num_permits=0) as second,
        Client(f"{first.target},{second.target}") as client,
    ):
        job = client.submit([f"prompt {at}" for at in range(10)], seed=1)
        results = job.results()
        seen = [next(results) for _ in range(3)]
        first.stop()
        second.permit(10)
        seen += results
    assert sorted(result.index for result in seen) == list(range(10))
    for result in seen:
        assert result.completion is not None
        assert result.completion.token_ids == expected(f"prompt {result.index}", 1)


def test_a_map_is_in_the_order_of_its_prompts_and_so_many_at_once(tmp_path):
    prompts = [f"prompt {at}" for at in range(30)]

    async def run(target: str) -> list[tuple[int, ...]]:
        async with AsyncClient(target) as client:
            return [answer.token_ids async for answer in client.map(prompts, max_in_flight=4, seed=1)]

    with job_server(jobs_config(tmp_path)) as server, Client(server.target) as client:
        answers = [answer.token_ids for answer in client.map(iter(prompts), max_in_flight=4, progress=True, seed=1)]
        assert answers == asyncio.run(run(server.target)) == [expected(prompt, 1) for prompt in prompts]
        assert 1 < server.router.most_running <= 4


def test_closing_a_map_cancels_what_is_under_way(tmp_path):
    async def run(target: str) -> None:
        async with AsyncClient(target) as client:
            answers = client.map(PROMPTS, max_in_flight=1)
            await anext(answers)
            await answers.aclose()

    with job_server(jobs_config(tmp_path), num_permits=1) as server:
        with Client(server.target) as client:
            answers = client.map(PROMPTS, max_in_flight=1)
            next(answers)
            server.wait_until(lambda: len(server.router.calls) == 2)
            answers.close()
            server.wait_until(lambda: len(server.router.aborted) == 1)
            server.permit(1)
            asyncio.run(run(server.target))
            server.wait_until(lambda: not server.router.num_running)
        assert 3 <= len(server.router.calls) <= 4


def test_a_map_raises_in_the_place_of_the_answer(tmp_path):
    with job_server(jobs_config(tmp_path)) as server, Client(server.target) as client:
        answers = client.map(["fine", "long " * 200, "fine"])
        assert next(answers).token_ids
        with pytest.raises(InvalidRequestError, match="maximum context length"):
            next(answers)
