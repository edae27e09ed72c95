"""How much one tenant may upload."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from router.jobs.room import ROW_BYTES
from tests.router.jobs import jobs_config, open_router, serving_jobs
from tests.router.test_api_keys import key_file
from tests.router.test_batches import create, ended, line


def test_a_tenants_files_have_a_quota_that_deleting_gives_back(tmp_path):
    async def run() -> None:
        path, keys = key_file(tmp_path, acme={}, other={})
        config = jobs_config(tmp_path, max_tenant_file_bytes=1000 + 2 * ROW_BYTES)
        async with serving_jobs(open_router(), config, api_keys=str(path)) as served:
            url = f"http://127.0.0.1:{served.server.http_port}/v1"
            async with (
                openai.AsyncOpenAI(base_url=url, api_key=keys["acme"], max_retries=0) as acme,
                openai.AsyncOpenAI(base_url=url, api_key=keys["other"], max_retries=0) as other,
            ):

                async def upload(client: openai.AsyncOpenAI, num_bytes: int) -> str:
                    return (await client.files.create(file=("in.jsonl", b"x" * num_bytes), purpose="batch")).id

                first = await upload(acme, 600)
                with pytest.raises(openai.BadRequestError, match=r"856 bytes.*max_tenant_file_bytes.*delete") as caught:
                    await upload(acme, 401)
                assert (caught.value.param, caught.value.code) == ("file", "file_quota_exceeded")
                await upload(acme, 400)
                await upload(other, 1000)
                # Files without a byte are bounded, too.
                await upload(other, 0)
                with pytest.raises(openai.BadRequestError, match="max_tenant_file_bytes"):
                    await upload(other, 0)
                await acme.files.delete(first)
                await upload(acme, 600)

    asyncio.run(run())


def test_answers_that_are_read_as_files_take_nothing_of_it(tmp_path):
    async def run() -> None:
        lines = [line("a", prompt="one")]
        async with serving_jobs(
            open_router(), jobs_config(tmp_path, max_tenant_file_bytes=2 * len(json.dumps(lines[0])) + 2 * ROW_BYTES)
        ) as served:
            url = f"http://127.0.0.1:{served.server.http_port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                batch = await ended(client, await create(client, lines))
                assert batch.output_file_id is not None
                used = [one.bytes async for one in client.files.list(purpose="batch")]
                assert (await client.files.retrieve(batch.output_file_id)).bytes + sum(used) > 2 * sum(used)
                await create(client, lines)

    asyncio.run(run())
