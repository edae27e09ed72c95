"""/v1/files and /v1/batches, through OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import httpx
import openai
import pytest
from openai.types import Batch

from protos import router_pb2 as pb
from router.text import seed_of
from tests.router.jobs import EchoRouter, Served, jobs_config, open_router, serving_jobs, token_of
from tests.router.scripted import smollm
from tests.router.serving import until

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"


@asynccontextmanager
async def api(router: EchoRouter, tmp_path, **settings: Any) -> AsyncIterator[tuple[Served, openai.AsyncOpenAI]]:
    async with (
        serving_jobs(router, jobs_config(tmp_path, **settings)) as served,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{served.server.http_port}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        yield served, client


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "smol", **body}}


async def upload(client: openai.AsyncOpenAI, lines: list[Any]) -> str:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    return (await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")).id


async def create(client: openai.AsyncOpenAI, lines: list[Any], endpoint: Any = COMPLETIONS) -> Batch:
    file_id = await upload(client, lines)
    return await client.batches.create(
        input_file_id=file_id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(10):
        while (batch := await client.batches.retrieve(batch.id)).status == "in_progress":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return batch


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(one) for one in (await client.files.content(file_id)).text.splitlines()]


def test_a_batch_answers_each_line_as_its_endpoint_would(tmp_path):
    async def run() -> None:
        async with api(open_router(), tmp_path) as (_, client):
            lines = [line(f"request-{at}", prompt=f"prompt {at}") for at in range(4)]
            batch = await create(client, lines)
            assert (batch.status, batch.endpoint, batch.metadata) == ("in_progress", COMPLETIONS, {"a": "b"})
            done = await ended(client, batch)
            assert (done.status, done.error_file_id, done.errors) == ("completed", None, None)
            assert done.request_counts is not None
            assert (done.request_counts.total, done.request_counts.completed) == (4, 4)
            answers = {answer["custom_id"]: answer for answer in await lines_of(client, done.output_file_id)}
            assert len(answers) == 4
            for at in range(4):
                answer = answers[f"request-{at}"]
                assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
                token = token_of(smollm().encode(f"prompt {at}"), seed_of(f"{batch.id}.{at}"))
                assert answer["response"]["body"]["choices"][0]["text"] == smollm().decode([token])
                assert answer["response"]["body"]["object"] == "text_completion"

    asyncio.run(run())


def test_chats_can_be_batched_and_a_bad_line_goes_to_the_error_file(tmp_path):
    async def run() -> None:
        async with api(open_router(), tmp_path) as (_, client):
            messages = [{"role": "user", "content": "Hi"}]
            bad = line("bad", CHAT, messages=messages, temperature=-1)
            batch = await create(client, [line("good", CHAT, messages=messages), bad], CHAT)
            done = await ended(client, batch)
            (good,) = await lines_of(client, done.output_file_id)
            assert good["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
            (failed,) = await lines_of(client, done.error_file_id)
            assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
            assert failed["response"]["body"]["error"]["param"] == "temperature"
            output = await client.files.retrieve(done.output_file_id or "")
            assert (output.purpose, output.bytes) == ("batch_output", len(json.dumps(good, separators=(",", ":"))) + 1)

    asyncio.run(run())


BAD_LINES = [
    ("{", "invalid_json_line"),
    ("[]", "invalid_json_line"),
    (line("a", CHAT), "mismatched_endpoint"),
    ({**line("a"), "method": "GET"}, "invalid_method"),
    (line("first"), "duplicate_custom_id"),
    ({**line("a"), "custom_id": 5}, "missing_required_parameter"),
    (line("a", stream=True), "invalid_request"),
]


def test_a_file_with_bad_lines_fails_as_a_batch_and_names_them(tmp_path):
    async def run() -> None:
        router = open_router()
        async with api(router, tmp_path) as (_, client):
            batch = await create(client, [line("first", prompt="a"), *(bad for bad, _ in BAD_LINES)])
            assert batch.status == "failed"
            assert batch.errors is not None
            assert batch.errors.data is not None
            told = [(one.line, one.code) for one in batch.errors.data]
            assert told == [(number, code) for number, (_, code) in enumerate(BAD_LINES, start=2)]
            empty = await create(client, [])
            assert (empty.status, empty.request_counts and empty.request_counts.total) == ("failed", 0)
        assert router.calls == []

    asyncio.run(run())


def test_a_cancelled_batch_shows_what_was_answered(tmp_path):
    async def run() -> None:
        router = EchoRouter(permits=asyncio.Semaphore(1))
        async with api(router, tmp_path, max_in_flight=1) as (_, client):
            batch = await create(client, [line(str(at), prompt="a") for at in range(3)])
            await until(lambda: len(router.calls) == 2)
            cancelled = await client.batches.cancel(batch.id)
            assert cancelled.status == "cancelled"
            assert len(await lines_of(client, cancelled.output_file_id)) == 1
            await until(lambda: not router.num_running)
            assert [one.id async for one in client.batches.list(limit=1)] == [batch.id]

    asyncio.run(run())


def test_files_are_listed_read_and_deleted(tmp_path):
    async def run() -> None:
        async with api(open_router(), tmp_path) as (_, client):
            ids = [await upload(client, [line(str(at))]) for at in range(3)]
            assert [one.id async for one in client.files.list(limit=2)] == ids[::-1]
            assert [one.id async for one in client.files.list(limit=2, order="asc")] == ids
            assert await lines_of(client, ids[0]) == [line("0")]
            assert (await client.files.delete(ids[0])).deleted
            with pytest.raises(openai.NotFoundError):
                await client.files.content(ids[0])
            with pytest.raises(openai.NotFoundError):
                await client.batches.create(input_file_id=ids[0], endpoint=COMPLETIONS, completion_window="24h")

    asyncio.run(run())


def test_what_is_no_file_or_too_large_is_refused(tmp_path):
    async def run() -> None:
        async with api(open_router(), tmp_path, max_file_bytes=1000) as (_, client):
            with pytest.raises(openai.APIStatusError) as caught:
                await client.files.create(file=("in.jsonl", b"x" * 1001), purpose="batch")
            assert caught.value.status_code == 413
            with pytest.raises(openai.APIStatusError) as caught:
                await client.files.create(file=("in.jsonl", b"x" * 100_000), purpose="batch")
            assert caught.value.status_code == 413
            with pytest.raises(openai.BadRequestError, match="purpose"):
                await client.files.create(file=("in.jsonl", b"x"), purpose="fine-tune")
            url = f"{client.base_url}files"
            async with httpx.AsyncClient() as plain:
                for body in ({"content": b"{}"}, {"data": {"purpose": "batch"}}, {"files": {"purpose": b"batch"}}):
                    answer = await plain.post(url, **body)
                    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
                broken = await plain.post(
                    url, content=b"--x\r\nnonsense", headers={"content-type": "multipart/form-data; boundary=x"}
                )
                assert broken.status_code == 400

    asyncio.run(run())


def test_a_batch_is_no_job_of_the_native_api_and_the_other_way_round(tmp_path):
    async def run() -> None:
        async with api(open_router(), tmp_path) as (served, client):
            job = await served.submit(["one"])
            await served.results(job.job_id)
            assert [one.id async for one in client.batches.list()] == []
            with pytest.raises(openai.BadRequestError, match="native API"):
                await client.batches.retrieve(job.job_id)
            batch = await create(client, [line("a", prompt="a")])
            await ended(client, batch)
            with pytest.raises(grpc.aio.AioRpcError, match="is a batch"):
                await served.results(batch.id)
            assert [one.job_id for one in (await served.jobs.ListJobs(pb.ListJobsRequest())).jobs] == [job.job_id]

    asyncio.run(run())


NO_BATCHES = [
    b"[]",
    b"{}",
    b'{"input_file_id": 5}',
    b'{"input_file_id": "\\ud800", "endpoint": "/v1/completions", "completion_window": "24h"}',
    b'{"input_file_id": "x\\u0000", "endpoint": "/v1/completions", "completion_window": "24h"}',
    b'{"input_file_id": "x", "endpoint": "/v1/models", "completion_window": "24h"}',
    b'{"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "1h"}',
    b'{"input_file_id": "FILE", "endpoint": "/v1/completions", "completion_window": "24h", '
    b'"metadata": {"a": "\\ud800"}}',
]


def test_what_is_no_batch_is_refused_in_openais_shape(tmp_path):
    async def run() -> None:
        async with api(open_router(), tmp_path) as (_, client), httpx.AsyncClient() as plain:
            file_id = await upload(client, [line("a", prompt="a")])
            for body in NO_BATCHES:
                answer = await plain.post(
                    f"{client.base_url}batches",
                    content=body.replace(b"FILE", file_id.encode()),
                    headers={"content-type": "application/json"},
                )
                assert answer.status_code in (400, 404), body
                assert answer.json()["error"]["message"]
            for path, param in (
                ("batches/gone", "batch_id"),
                ("files/gone", "file_id"),
                ("batches?after=gone", "after"),
                ("files?after=gone", "after"),
            ):
                answer = await plain.get(f"{client.base_url}{path}")
                assert (answer.status_code, answer.json()["error"]["param"]) == (404, param)
            with pytest.raises(openai.NotFoundError) as caught:
                await client.batches.create(input_file_id="gone", endpoint=COMPLETIONS, completion_window="24h")
            assert caught.value.param == "input_file_id"
            with pytest.raises(openai.NotFoundError, match="no batch 'gone'"):
                await client.batches.cancel("gone")
            for path in ("batches?limit=0", "files?limit=x", "batches/%00", "files/%FF/content", "batches?after=%00"):
                assert (await plain.get(f"{client.base_url}{path}")).status_code in (400, 404), path

    asyncio.run(run())
