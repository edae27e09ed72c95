"""What keeps one from taking all: jobs beside requests, what a tenant may store, clients that are closed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SHARE_TESTS = "tests/router/test_job_share.py"
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
        "if not (self._forecast.holds_back(request) and self._queue.hold_back_jobs()):",
        "if True:",
        (f"{SHARE_TESTS}::test_a_job_that_is_held_back_keeps_no_request_waiting[200]",),
    ),
    Mutant(
        "a queue that never empties lets a job out now and then",
        "-",
        "router/queue.py",
        "self._num_since_job >= _JOBS_SHARE - 1",
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
)
