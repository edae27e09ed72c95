"""What keeps one from taking all: jobs beside requests, what a tenant may store, clients that are closed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SHARE_TESTS = "tests/router/test_job_share.py"
QUOTA_TESTS = "tests/router/test_job_quota.py"
FILE_TESTS = "tests/router/test_file_reading.py"
CLOSED_TESTS = "tests/cluster/test_closed_clients.py"

BOUNDS = (
    Mutant(
        "one of a job's prompts may always run",
        "-",
        "router/forecast.py",
        " or not worker.num_jobs:",
        ":",
        (f"{SHARE_TESTS}::test_a_job_goes_on_under_a_load_that_never_leaves_it_room_within_the_slo",),
    ),
    Mutant(
        "a job that is held back lets requests pass",
        "-",
        "router/admission.py",
        "is_held_back = self._forecast.holds_back(request)",
        "is_held_back = False",
        (f"{SHARE_TESTS}::test_a_job_that_is_held_back_keeps_no_request_waiting[200]",),
    ),
    Mutant(
        "a queue that never empties lets a job out now and then",
        "-",
        "router/queue.py",
        "self._num_since_job + len(self._asking) >= _JOBS_SHARE - 1",
        "False",
        (f"{SHARE_TESTS}::test_of_so_many_that_leave_a_queue_that_never_empties_one_is_a_jobs",),
    ),
    Mutant(
        "jobs take no place in the queue from requests",
        "-",
        "router/queue.py",
        "if not waiter.job and self._num_waiting[False] >= self._max_num_queued_reqs:",
        "if self._num_waiting.total() >= self._max_num_queued_reqs:",
        (f"{SHARE_TESTS}::test_jobs_take_no_place_in_the_queue_from_requests_and_lose_none_to_them",),
    ),
    Mutant(
        "a job that comes when its client is closed is not waited for",
        "-",
        "cluster/jobs.py",
        "            if self._closed.is_set():\n                raise closed_error()\n",
        "",
        (f"{CLOSED_TESTS}::test_a_job_that_is_submitted_while_its_client_is_closed_raises_and_nobody_hangs",),
    ),
    Mutant(
        "closing a client is no cancellation of who waits for it",
        "-",
        "cluster/routers.py",
        "except (KVFerryError, ValueError, grpc.aio.UsageError, asyncio.CancelledError) as exc:",
        "except (KVFerryError, ValueError, grpc.aio.UsageError) as exc:",
        (f"{CLOSED_TESTS}::test_closing_an_async_client_is_no_cancellation_of_who_waits",),
    ),
    Mutant(
        "a tenant's jobs have so much room",
        "-",
        "router/jobs/store.py",
        "    require_room(session, job.tenant, num_bytes, config.max_tenant_job_bytes, job.param)\n",
        "",
        (
            f"{QUOTA_TESTS}::test_a_tenants_jobs_have_room_for_so_much_and_each_tenant_has_its_own[sqlite]",
            f"{QUOTA_TESTS}::test_both_apis_say_what_is_full_and_how_to_make_room",
        ),
    ),
    Mutant(
        "answers count like prompts",
        "-",
        "router/jobs/runner.py",
        "            self._require_room(claim)\n",
        "",
        (f"{QUOTA_TESTS}::test_once_a_tenants_answers_fill_it_the_rest_is_not_worked_on_and_says_why",),
    ),
    Mutant(
        "what is removed makes room",
        "-",
        "router/jobs/end.py",
        "row.num_bytes = max(0, row.num_bytes - freed)",
        "row.num_bytes = max(freed, row.num_bytes)",
        (
            f"{QUOTA_TESTS}::test_room_comes_back[sqlite-cancel]",
            f"{QUOTA_TESTS}::test_deleting_a_batchs_output_file_makes_room",
            f"{QUOTA_TESTS}::test_what_is_counted_is_what_is_there_whatever_becomes_of_jobs[sqlite]",
        ),
    ),
    Mutant(
        "a late answer meets no job but its own",
        "-",
        "router/jobs/tables.py",
        ', {"sqlite_autoincrement": True})',
        ",)",
        (f"{QUOTA_TESTS}::test_an_answer_that_comes_after_its_job_was_deleted_is_no_other_jobs[sqlite]",),
    ),
    Mutant(
        "a file that goes while it is read is an error",
        "-",
        "router/batches/file_store.py",
        "            piece, place = await self._database.run(find)\n",
        "            try:\n                piece, place = await self._database.run(find)\n"
        "            except NotFoundError:\n                return\n",
        (f"{FILE_TESTS}::test_answers_that_expire_while_they_are_read_are_an_error_and_no_shorter_file[sqlite]",),
    ),
    Mutant(
        "jobs do not wait for the lines of a file",
        "-",
        "router/batches/batches.py",
        "await asyncio.to_thread(parse_lines, content, body.endpoint, self._max_num_prompts)",
        "parse_lines(content, body.endpoint, self._max_num_prompts)",
        (f"{FILE_TESTS}::test_jobs_go_on_while_the_lines_of_a_large_file_are_read",),
    ),
    Mutant(
        "a router says at once that it has the job",
        "-",
        "router/jobs/service.py",
        "if answers or not told:",
        "if answers:",
        ("tests/cluster/test_job_patience.py::test_a_router_says_at_once_that_it_has_the_job",),
    ),
    Mutant(
        "who reads results is patient anew after each router that was there",
        "-",
        "cluster/jobs.py",
        "                        patience.heard()\n",
        "",
        (
            "tests/cluster/test_job_patience.py"
            "::test_who_reads_results_waits_as_long_for_each_router_that_goes[blocking]",
        ),
    ),
    Mutant(
        "no more answers are read at once than fit",
        "-",
        "router/jobs/pages.py",
        "if last >= 0 and num_bytes > _PAGE_BYTES:",
        "if False:",
        (
            "tests/router/test_answer_pages.py::test_a_page_has_so_many_bytes_or_one_answer_and_none_is_left_out[sqlite]",
            "tests/router/test_answer_pages.py::test_every_answer_comes_in_messages_of_that_size",
        ),
    ),
)
