"""Durable jobs through the native API: one stored answer a prompt, whatever happens to the router."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import pytest

from protos import router_pb2 as pb
from router.jobs.queue import JobQueue
from router.jobs.records import Claim
from router.text import seed_of
from tests.router.jobs import EchoRouter, jobs_config, open_router, serving_jobs, token_of
from tests.router.scripted import smollm
from tests.router.serving import until
from workers.errors import FrameError, OverloadedError, UnavailableError
from workers.rpc import error_from_rpc


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("router.jobs.runner._FIRST_PAUSE_S", 0.01)


def prompts_of(count: int) -> list[str]:
    return [f"prompt {at}" for at in range(count)]


def test_every_prompt_of_a_job_is_answered_as_a_request_with_its_id_would_be(tmp_path):
    async def run() -> None:
        async with serving_jobs(open_router(), jobs_config(tmp_path)) as served:
            job = await served.submit(prompts_of(5))
            results = await served.results(job.job_id)
            assert [result.place for result in results] == list(range(5))
            by_index = {result.index: result.choices[0] for result in results}
            for at, prompt in enumerate(prompts_of(5)):
                token = token_of(smollm().encode(prompt), seed_of(f"{job.job_id}.{at}"))
                assert list(by_index[at].token_ids) == [token]
                assert by_index[at].text == smollm().decode([token])
            ended = await served.job(job.job_id)
            assert (ended.status, ended.num_answered, ended.num_failed) == (pb.JOB_STATUS_COMPLETED, 5, 0)
            assert ended.usage.num_completion_tokens == 5
            assert ended.usage.num_prompt_tokens == sum(len(smollm().encode(prompt)) for prompt in prompts_of(5))
            assert ended.timeline.prefill_s == 5 * 0.25

    asyncio.run(run())


def test_a_bad_prompt_has_its_typed_error_as_its_answer_and_the_others_theirs(tmp_path):
    async def run() -> None:
        async with serving_jobs(open_router(), jobs_config(tmp_path)) as served:
            job = await served.submit(["fine", "long " * 200, "fine too"])
            results = sorted(await served.results(job.job_id), key=lambda result: result.index)
            assert [result.error.type for result in results] == ["", "InvalidRequestError", ""]
            assert (results[1].error.code, results[1].error.param) == ("context_length_exceeded", "prompt")
            assert "maximum context length" in results[1].error.message
            ended = await served.job(job.job_id)
            assert (ended.status, ended.num_answered, ended.num_failed) == (pb.JOB_STATUS_COMPLETED, 3, 1)

    asyncio.run(run())


def test_no_more_prompts_are_at_work_than_may_be(tmp_path):
    async def run() -> None:
        router = EchoRouter()
        async with serving_jobs(router, jobs_config(tmp_path, max_in_flight=3)) as served:
            job = await served.submit(prompts_of(20))
            await until(lambda: router.num_running == 3)
            await asyncio.sleep(0.2)
            assert len(router.calls) == 3
            for _ in range(20):
                router.permits.release()
            assert len(await served.results(job.job_id)) == 20
        assert router.most_running == 3

    asyncio.run(run())


def test_what_is_not_the_prompts_fault_is_tried_again(tmp_path):
    async def run() -> None:
        router = open_router()
        router.errors += [UnavailableError("nobody there"), OverloadedError("full"), FrameError("damaged")]
        async with serving_jobs(router, jobs_config(tmp_path)) as served:
            job = await served.submit(["one"])
            (result,) = await served.results(job.job_id)
            assert not result.HasField("error")
        assert len(router.calls) == 4

    asyncio.run(run())


def test_a_bug_in_one_turn_does_not_leave_jobs_standing(tmp_path, monkeypatch):
    claim, num_bugs = JobQueue.claim, 0

    async def buggy(queue: JobQueue, room: int) -> list[Claim]:
        nonlocal num_bugs
        num_bugs += 1
        return list(await claim(queue, room if num_bugs > 2 else 1 // 0))

    monkeypatch.setattr(JobQueue, "claim", buggy)

    async def run() -> None:
        async with serving_jobs(open_router(), jobs_config(tmp_path)) as served:
            job = await served.submit(["one"])
            (result,) = await served.results(job.job_id)
            assert not result.HasField("error")
        assert num_bugs > 2

    asyncio.run(run())


def test_a_prompt_waits_for_workers_for_as_long_as_it_takes(tmp_path):
    async def run() -> None:
        router = open_router()
        router.errors += [UnavailableError("nobody there") for _ in range(3)]
        async with serving_jobs(router, jobs_config(tmp_path, max_attempts=1)) as served:
            job = await served.submit(["one"])
            (result,) = await served.results(job.job_id)
            assert not result.HasField("error")

    asyncio.run(run())


def test_an_error_that_does_not_pass_is_the_answer_in_the_end(tmp_path):
    async def run() -> None:
        router = open_router()
        router.errors += [FrameError("damaged") for _ in range(9)]
        async with serving_jobs(router, jobs_config(tmp_path, max_attempts=2)) as served:
            job = await served.submit(["one"])
            (result,) = await served.results(job.job_id)
            assert result.error.type == "FrameError"
        assert len(router.calls) == 2

    asyncio.run(run())


def test_the_next_router_goes_on_with_the_same_ids_and_seeds(tmp_path):
    async def run() -> None:
        first, second = EchoRouter(), open_router()
        async with serving_jobs(first, jobs_config(tmp_path)) as served:
            job = await served.submit(prompts_of(4))
            await until(lambda: len(first.calls) == 4)
        assert sorted(first.aborted) == [f"{job.job_id}.{at}" for at in range(4)]
        async with serving_jobs(second, jobs_config(tmp_path)) as served:
            results = await served.results(job.job_id)
        assert Counter(result.index for result in results) == dict.fromkeys(range(4), 1)
        asked = [{request_id: (prompt, params) for prompt, params, request_id in one.calls} for one in (first, second)]
        assert asked[0] == asked[1]

    asyncio.run(run())


def test_cancelling_aborts_what_is_at_work_and_keeps_what_is_answered(tmp_path):
    async def run() -> None:
        router = EchoRouter()
        async with serving_jobs(router, jobs_config(tmp_path, max_in_flight=2)) as served:
            job = await served.submit(prompts_of(5))
            await until(lambda: router.num_running == 2)
            router.permits.release()
            await until(lambda: len(router.calls) == 3)
            gone = (await served.jobs.CancelJob(pb.CancelJobRequest(job_id=job.job_id))).job
            assert (gone.status, gone.num_answered) == (pb.JOB_STATUS_CANCELLED, 1)
            await until(lambda: router.num_running == 0)
            assert len(await served.results(job.job_id)) == 1
            again = (await served.jobs.CancelJob(pb.CancelJobRequest(job_id=job.job_id))).job
            assert again == gone

    asyncio.run(run())


def test_submitting_again_under_an_id_makes_no_second_job(tmp_path):
    async def run() -> None:
        async with serving_jobs(open_router(), jobs_config(tmp_path)) as served:
            first = await served.submit(["one", "two"], "mine")
            again = await served.submit(["one", "two"], "mine")
            assert again.created_s == first.created_s
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.submit(["one", "other"], "mine")
            assert type(error_from_rpc(caught.value)).__name__ == "ConflictError"
            listed = await served.jobs.ListJobs(pb.ListJobsRequest())
            assert [job.job_id for job in listed.jobs] == ["mine"]

    asyncio.run(run())


def test_the_list_goes_back_page_by_page(tmp_path):
    async def run() -> None:
        async with serving_jobs(open_router(), jobs_config(tmp_path)) as served:
            for name in "abc":
                await served.submit(["one"], name)
            page = await served.jobs.ListJobs(pb.ListJobsRequest(limit=2))
            rest = await served.jobs.ListJobs(pb.ListJobsRequest(limit=2, after=page.jobs[-1].job_id))
            assert [[job.job_id for job in one.jobs] for one in (page, rest)] == [["c", "b"], ["a"]]

    asyncio.run(run())


def test_what_is_no_job_is_refused_in_words(tmp_path):
    refused = [("", 0, "at least one prompt"), ("a b", 1, "visible ASCII"), ("", 4, "at most 3 (jobs.max_num_prompts)")]

    async def run() -> None:
        async with serving_jobs(open_router(), jobs_config(tmp_path, max_num_prompts=3)) as served:
            for job_id, count, says in refused:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await served.submit(prompts_of(count), job_id)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert says in (caught.value.details() or "")

    asyncio.run(run())


def test_answers_are_gone_after_their_time(tmp_path):
    async def run() -> None:
        async with serving_jobs(open_router(), jobs_config(tmp_path, ttl_s=0.3)) as served:
            job = await served.submit(["one"])
            assert len(await served.results(job.job_id)) == 1
            ended = await served.job(job.job_id)
            assert ended.expires_s - ended.finished_s == pytest.approx(0.3)
            await asyncio.sleep(0.6)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.job(job.job_id)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(run())


def test_a_router_without_its_database_lives_on_and_says_what_is_wrong(tmp_path):
    async def run() -> None:
        (tmp_path / "file").write_text("in the way")
        config = jobs_config(tmp_path, url=f"sqlite:///{tmp_path}/file/jobs.sqlite")
        async with serving_jobs(open_router(), config) as served:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.submit(["one"])
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "the database of jobs (jobs.url: sqlite:///" in (caught.value.details() or "")
            # It is there again: nothing has to be started anew.
            (tmp_path / "file").unlink()
            job = await served.submit(["one"])
            assert len(await served.results(job.job_id)) == 1

    asyncio.run(run())
